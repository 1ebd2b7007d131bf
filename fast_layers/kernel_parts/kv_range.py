"""Which tiles of the score matrix a kernel visits, computed once from per-row key intervals.

Axis letters: B batch, T query rows, I query tiles, J key tiles.

The rule is exact per row and conservative per tile: a visited tile may turn out to be empty, a skipped one never
holds a visible key. `KvRange.of` answers for a loop over key tiles inside a query tile (forward, dQ),
`KvRange.transpose` for a loop over query tiles inside a key tile (dK, dV).
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

INT_MAX = jnp.iinfo(jnp.int32).max


class TileRange(NamedTuple):
    """Half-open range of tiles."""

    first: Int[Array, ...]
    last: Int[Array, ...]


class KvRange(NamedTuple):
    """Key intervals of query tiles: their hull over the rows of each tile that see any key.

    A tile whose rows see no key has first_key = INT_MAX and last_key = 0.
    """

    first_key: Int[Array, "B I"]
    last_key: Int[Array, "B I"]

    @classmethod
    def of(cls, start: Int[Array, "B T"], stop: Int[Array, "B T"], q_tile: int) -> KvRange:
        """`start`, `stop` hold the rows' key intervals; T is a multiple of `q_tile`."""
        sees_some = stop > start
        first, last = jnp.where(sees_some, start, INT_MAX), jnp.where(sees_some, stop, 0)
        tiled = first.shape[0], first.shape[1] // q_tile, q_tile

        def hull(a, b):
            return lax.min(a[0], b[0]), lax.max(a[1], b[1])

        # One reduction, which XLA makes one kernel.
        neutral = jnp.int32(INT_MAX), jnp.int32(0)
        return cls(*lax.reduce((first.reshape(tiled), last.reshape(tiled)), neutral, hull, (2,)))

    def over_batch(self) -> KvRange:
        """The hull over the batch, for a loop that serves all examples at once."""
        return KvRange(self.first_key.min(0, keepdims=True), self.last_key.max(0, keepdims=True))

    def key_tiles(self, kv_tile: int) -> TileRange:
        """[B, I]: the key tiles that query tile i visits; empty if first == last."""
        last = (self.last_key + (kv_tile - 1)) // kv_tile
        return TileRange(jnp.minimum(self.first_key // kv_tile, last), last)

    def transpose(self, kv_tile: int, num_kv_tiles: int) -> TileRange:
        """[B, J]: the query tiles that key tile j must visit; empty if first == last.

        Of those whose hull of keys meets the key tile, from the first to the last.
        """
        tile_start = jnp.arange(num_kv_tiles, dtype=jnp.int32)[:, None] * kv_tile
        index = jnp.arange(self.first_key.shape[1], dtype=jnp.int32)
        # I x J booleans at tile granularity, and no gather.
        first_key, last_key = self.first_key[:, None, :], self.last_key[:, None, :]
        meets = (first_key < tile_start + kv_tile) & (last_key > tile_start)
        last = jnp.where(meets, index + 1, 0).max(-1)
        return TileRange(jnp.minimum(jnp.where(meets, index, INT_MAX).min(-1), last), last)

"""Which tiles attention's backward on Hopper visits where arrays say what a mask hides, and dS is left.

Axis letters: B batch, J tiles of keys, I tiles of queries, both of 128.

Both kernels have a block for each tile of keys or of queries, the longest first among some heads, and the GPU deals
them out. A tile of keys visits all tiles of queries between the first and the last that may see it. So it leaves dS of
all tiles that a tile of queries goes through, which are those between the first and the last that it sees.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from fast_layers.ops.attention.hopper_bwd_scores import TILE
from fast_layers.ops.attention.kernel_operands import RowMask
from fast_layers.ops.attention.problem import Problem

_KEYS_TOGETHER = 512
_QUERIES_TOGETHER = 256
"""Tiles of heads side by side, at least: few, so that what they share stays in the cache, and enough for all SMs."""


class Visits(NamedTuple):
    """Tiles come from those that visit the most to those that visit the fewest."""

    by_keys: Int[Array, "B|1 J 5"]
    """Of keys: index; first and last tile of queries, and of those that see all of them, by the kernel's tiles."""
    by_queries: Int[Array, "B|1 I 5"]
    """Of queries: index, first and last tile of keys, and of those that all its rows see all of."""
    some_broken: Int[Array, "B K"] | None
    """Whether any query or output gradient of a pair may be."""

    @classmethod
    def of(cls, p: Problem, mask: RowMask, broken_queries: Int[Array, "B N I"] | None) -> Visits:
        # In few reductions, since each is a kernel.
        keys, parts = p.kv_len // TILE, mask.tiles.shape[1] // (p.q_len // TILE)
        first_key, last_key, first_full, last_full = (mask.tiles[:, None, :, i] for i in range(4))
        index = jnp.arange(mask.tiles.shape[1], dtype=jnp.int32)
        start = TILE * jnp.arange(keys, dtype=jnp.int32)[:, None]
        end = start + TILE
        # Not only those whose keys meet these, as `KvRange.transpose` has it: two parts of a tile of queries may see
        # keys before and behind them, and all between is read.
        first = jnp.where(last_key > start, index, index.size).min(-1) // parts
        last = jnp.where(first_key < end, index + parts, 0).max(-1) // parts
        # All that see all of the keys, or none if others lie between.
        full = (first_full <= start) & (last_full >= end)
        full_first, full_last = jnp.where(full, index, index.size).min(-1), jnp.where(full, index + 1, 0).max(-1)
        together = full.sum(-1, dtype=jnp.int32) == full_last - full_first
        full_first, full_last = jnp.where(together, full_first, 0), jnp.where(together, full_last, 0)
        first = jnp.minimum(first, last)

        def of_tile(join, i):
            return functools.reduce(join, (mask.tiles[:, part::parts, i] for part in range(parts)))

        last_seen = -(-of_tile(jnp.maximum, 1) // TILE)
        first_seen = jnp.minimum(of_tile(jnp.minimum, 0) // TILE, last_seen)
        full_seen = -(-of_tile(jnp.maximum, 2) // TILE), of_tile(jnp.minimum, 3) // TILE
        return cls(
            _longest_first(first, last, full_first, full_last),
            _longest_first(first_seen, last_seen, *full_seen),
            None if broken_queries is None else broken_queries.reshape(p.batch, p.kv_heads, -1).max(-1),
        )

    def of_keys(self, block: Any, heads: int, first_head: Any, heads_of_example: int) -> tuple[Any, ...]:
        """In a kernel: (head within the group of `heads`, *its row of `by_keys`)."""
        return _find(self.by_keys, block, heads, first_head, heads_of_example, _KEYS_TOGETHER)

    def of_queries(self, block: Any, heads: int, first_head: Any, heads_of_example: int) -> tuple[Any, ...]:
        """Likewise, a row of `by_queries`."""
        return _find(self.by_queries, block, heads, first_head, heads_of_example, _QUERIES_TOGETHER)


def places(lengths: Int[Array, "B X"]) -> Int[Array, "B X"]:
    """Of each from the longest on. Sums over comparisons, each of two kernels of XLA, where a sort would be many."""
    size = lengths.shape[1]
    falling = lengths * size - jnp.arange(size, dtype=jnp.int32)
    return (falling[:, None, :] > falling[..., None]).sum(-1, dtype=jnp.int32)


def _longest_first(*facts: Int[Array, "B X"]) -> Int[Array, "B X 5"]:
    """[index, *facts] by what lies between the first two."""
    rank = places(facts[1] - facts[0])
    index = jnp.arange(rank.shape[1], dtype=jnp.int32)
    own = (rank[:, None, :] == index[:, None])[..., None]
    told = jnp.stack([jnp.broadcast_to(index, rank.shape), *facts], -1)
    return jnp.where(own, told[:, None], 0).sum(2, dtype=jnp.int32)


def _find(told, block, heads, first_head, heads_of_example, together):
    tiles, facts = told.shape[1:]
    side = min(-(-together // tiles), heads)
    first = lax.div(block, side * tiles) * side
    here = jnp.minimum(side, heads - first)
    within = block - first * tiles
    head, rank = first + lax.rem(within, here), lax.div(within, here)
    example = lax.div(first_head + head, heads_of_example) if told.shape[0] > 1 else 0
    return head, *(told[example, rank, i] for i in range(facts))

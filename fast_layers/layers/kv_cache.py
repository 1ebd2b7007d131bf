"""The key-value cache of autoregressive decoding: chunks of any length are appended to arrays of fixed size.

Axis letters: B any number of batch dims, L capacity, T tokens of a chunk, K key/value heads, H depth.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from fast_layers.kernel_parts.manual_axes import explicit_axes, lay_out, mesh_of


class KVCache(NamedTuple):
    """Keys and values of the first `index` positions; what lies past them is never read."""

    key: Float[Array, "*B L K H"]
    value: Float[Array, "*B L K H"]
    index: Int[Array, ""]

    def append(self, key: Float[Array, "*B T K H"], value: Float[Array, "*B T K H"], operand: str = "key") -> KVCache:
        """This cache with T more tokens, cast to its dtype.

        Raises ValueError for a shape that does not fit (`operand` names the culprit), and for a chunk longer than
        the room left, as far as that is known while tracing; see `fits` for the rest.
        """
        *batch, capacity, heads, depth = self.key.shape
        length = key.shape[-3]
        expected = (*batch, length, heads, depth)
        if key.shape != expected:
            raise ValueError(
                f"Autoregressive cache shape error, expected {operand} shape {expected} instead got {key.shape}."
            )
        # A traced index leaves only the chunk itself to check here.
        filled = 0 if isinstance(self.index, Tracer) else int(self.index)
        if filled + length > capacity:
            raise ValueError(
                f"a chunk of {length} tokens does not fit a cache of {capacity} that holds {filled}: "
                "initialise a longer cache, or start again from an empty one"
            )
        zero = jnp.zeros((), self.index.dtype)
        start = (zero,) * len(batch) + (self.index, zero, zero)
        key, value = (
            lax.dynamic_update_slice(*_alike(cached, new.astype(cached.dtype)), start)
            for cached, new in ((self.key, key), (self.value, value))
        )
        return KVCache(key, value, self.index + length)

    @property
    def fits(self) -> Bool[Array, ""]:
        """False once more was appended than there is room for."""
        return self.index <= jnp.asarray(self.key.shape[-3], self.index.dtype)


def _alike(cached: Float[Array, "*B L K H"], new: Float[Array, "*B T K H"]) -> tuple[Array, Array]:
    """Both explicitly sharded as the cache is, or if that is whole, as it is when new, as the tokens are."""
    mesh = mesh_of((cached, new))
    if mesh is None:
        return cached, new
    *batch, length, heads, depth = explicit_axes(cached if any(explicit_axes(cached)) else new)
    if length or depth:
        raise ValueError(
            f"keys or values are sharded over mesh axes {length or depth} along their length or depth: a cache needs "
            "these whole; shard batch and heads instead"
        )
    spec = P(*(axes or None for axes in (*batch, length, heads, depth)))
    return lay_out((cached, new), (spec, spec), mesh)


class CacheSlot(Protocol):
    """Where a module keeps its cache."""

    def read(self, key: Array, value: Array) -> KVCache | None:
        """The cache; or None while one is made, as long as this `key` and `value`."""
        ...

    def write(self, cache: KVCache) -> None: ...

"""The key-value cache of autoregressive decoding: chunks of any length are appended to arrays of fixed size.

Axis letters: B any number of batch dims, L capacity, T tokens of a chunk, K key/value heads, H depth.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int


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
            lax.dynamic_update_slice(cached, new.astype(cached.dtype), start)
            for cached, new in ((self.key, key), (self.value, value))
        )
        return KVCache(key, value, self.index + length)

    @property
    def fits(self) -> Bool[Array, ""]:
        """False once more was appended than there is room for."""
        return self.index <= jnp.asarray(self.key.shape[-3], self.index.dtype)


class CacheSlot(Protocol):
    """Where a module keeps its cache."""

    def read(self, key: Array, value: Array) -> KVCache | None:
        """The cache; or None while one is made, as long as this `key` and `value`."""
        ...

    def write(self, cache: KVCache) -> None: ...

"""`FlashMHA` for Flax Linen: Flax's own layer with our attention, grouped heads, and decoding in chunks.

Axis letters: B any number of batch dims, T queries, S keys, F features, L cache capacity, N heads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from fast_layers.layers import attention_fn as shared
from fast_layers.layers.flash_mha import with_flax_signature
from fast_layers.layers.kv_cache import KVCache
from fast_layers.layers.rope import Rope
from fast_layers.linen import hook

# Flax's method without Linen's wrapping, which this module's own method has already: one call is one call for
# nn.tabulate, capture_intermediates and interceptors.
_flax_call: Callable[..., Any] = nn.MultiHeadDotProductAttention.__call__.__wrapped__  # pyright: ignore


class FlashMHA(nn.MultiHeadDotProductAttention):
    """`nn.MultiHeadDotProductAttention` whose attention is `fast_layers.dot_product_attention`.

    Parameters, initial values, caches, errors, warnings and arguments are those of the installed Flax version; its
    checkpoints load in this layer and the other way round. Linen names a module without `name=` after its class;
    where a checkpoint has such a name, take `fast_layers.linen.MultiHeadDotProductAttention` or
    `fast_layers.linen.MultiHeadAttention`: the same layer under the names of Flax's classes.

    Attributes beyond Flax's, all keyword only:
      num_kv_heads: heads of keys and values, a divisor of num_heads (grouped-query attention); None: num_heads.
      rope, window, softcap, implementation: as in `fast_layers.FlashMHA`.

    A given `attention_fn` is called as Flax would, and then takes none of the arguments beyond Flax's (ValueError),
    except that it gets `num_kv_heads` heads when not decoding.

    Decoding is as in `fast_layers.FlashMHA`: chunks of any length T, causal, from a cache that `init` makes as long
    as its input. A chunk that does not fit raises ValueError; inside jit its outputs and all later ones are NaN.
    """

    attention_fn: Callable[..., Array] = hook.attention_fn
    num_kv_heads: int | None = dataclasses.field(default=None, kw_only=True)
    rope: Rope | None = dataclasses.field(default=None, kw_only=True)
    window: shared.Window | None = dataclasses.field(default=None, kw_only=True)
    softcap: float | None = dataclasses.field(default=None, kw_only=True)
    implementation: str | None = dataclasses.field(default=None, kw_only=True)

    @nn.compact
    @with_flax_signature(_flax_call)
    def __call__(
        self,
        inputs_q: Float[Array, "*B T F"],
        inputs_k: Float[Array, "*B S Fkv"] | None = None,
        inputs_v: Float[Array, "*B S Fkv"] | None = None,
        *,
        mask: shared.MaskLike | None = None,
        segment_ids: Any = None,
        input_positions: shared.Positions | None = None,
        **flax_arguments: Any,
    ) -> Float[Array, "*B T Fout"]:
        """Attend; what is not listed here is as in Flax.

        Args:
          mask: an array broadcastable to [B.., N, T, S], nonzero where a query may see a key, or a structured
            mask (`fast_layers.masks`). While decoding, S is L, and structured masks count positions from the
            cache's start.
          segment_ids: packed documents, as in `dot_product_attention`: int [B.., T], or a pair
            for queries and keys (a tuple, or a list of two arrays).
          input_positions: for `rope`: int [B.., T] or [T], or such a pair. By default positions count from 0, or from
            the cache's length while decoding.
          sow_weights: sow softmax weights as Flax does; this takes the reference implementation, whatever
            `implementation` says, with O(T S) memory.

        Returns:
          [B.., T, out_features].
        """
        kv_heads = self._checked_kv_heads()
        options = shared.AttentionOptions(self.rope, self.window, self.softcap, self.implementation)
        if self.attention_fn is hook.attention_fn:
            if self.decode:
                shared.refuse_segments_in_decode(segment_ids)
            # Our attention updates the cache, so Flax's method must not.
            attention_fn = functools.partial(hook.attention_fn, **options.as_keywords())
            module = _WithFields(self, decode=False, attention_fn=attention_fn)
            slot = _CacheCollection(self) if self.decode else None
            mask = shared.with_segments(mask, segment_ids)
            operand = "query" if kv_heads == self.num_heads else "key"
            passed = shared.CallExtras(mask, input_positions, slot, operand)
        else:
            shared.refuse_options(options, self.attention_fn)
            shared.refuse_extras(self.attention_fn, mask, segment_ids, input_positions)
            if self.decode and kv_heads != self.num_heads:
                raise ValueError(
                    f"decode with {kv_heads} key heads for {self.num_heads} query heads: not in Flax, so not with "
                    "attention_fn=; leave that or num_kv_heads= out"
                )
            module, passed = self, mask
        with contextlib.ExitStack() as stack:
            if kv_heads != self.num_heads:
                stack.enter_context(nn.intercept_methods(functools.partial(_narrow, self, kv_heads)))
            return _flax_call(module, inputs_q, inputs_k, inputs_v, mask=passed, **flax_arguments)

    @nn.nowrap
    def _checked_kv_heads(self) -> int:
        shared.check_heads(num_heads=self.num_heads, num_kv_heads=self.num_kv_heads)
        kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        if self.num_heads % kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be divisible by num_kv_heads ({kv_heads}).")
        return kv_heads


class _WithFields:
    """A module as Flax's method shall see it: itself, but for some fields."""

    def __init__(self, module: nn.Module, **fields: Any):
        self.__dict__.update(fields, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _narrow(owner: nn.Module, kv_heads: int, call, args, kwargs, context):
    """Interceptor: the key and value projections that Flax's method makes get `kv_heads` heads."""
    dense = context.module
    if dense.parent is owner and dense.name in ("key", "value"):
        # Made a moment ago and not called yet, so nothing has read its features.
        object.__setattr__(dense, "features", (kv_heads, *dense.features[1:]))
    return call(*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class _CacheCollection:
    """The variables of the collection "cache"."""

    module: nn.Module

    def read(self, key: Array, value: Array) -> KVCache | None:
        initialised = self.module.has_variable("cache", "cached_key")
        variable = functools.partial(self.module.variable, "cache")
        cache = KVCache(
            variable("cached_key", jnp.zeros, key.shape, key.dtype).value,
            variable("cached_value", jnp.zeros, value.shape, value.dtype).value,
            variable("cache_index", jnp.zeros, (), jnp.int32).value,
        )
        return cache if initialised else None

    def write(self, cache: KVCache) -> None:
        names = ("cached_key", "cached_value", "cache_index")
        for name, array in zip(names, cache, strict=True):
            self.module.put_variable("cache", name, array)


class MultiHeadDotProductAttention(FlashMHA):
    """`FlashMHA` under the name that Linen gives to parameters of `nn.MultiHeadDotProductAttention`."""


class MultiHeadAttention(FlashMHA):
    """`FlashMHA` under the name that Linen gives to parameters of `nn.MultiHeadAttention`."""

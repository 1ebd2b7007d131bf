"""`FlashMHA` for Flax NNX: Flax's own layer with our attention, decoding in chunks, and rotary embedding.

Axis letters: B any number of batch dims, T queries, S keys, F features, L cache capacity, N heads.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from fast_layers.layers import attention_fn as hook
from fast_layers.layers.kv_cache import KVCache
from fast_layers.layers.rope import Rope
from fast_layers.ops.static_options import flag


@dataclasses.dataclass(frozen=True)
class FlashAttention(hook.AttentionOptions):
    """`nnx_attention_fn` with options bound: a static attribute of a module, compared by value."""

    def __call__(self, query: Array, key: Array, value: Array, **flax_arguments: Any) -> Array:
        return hook.nnx_attention_fn(query, key, value, **flax_arguments, **self.as_keywords())


def with_flax_signature(flax_method: Callable[..., Any]):
    """Show the installed Flax version's keywords in place of `**flax_arguments`, and ours behind them."""

    def sign(method):
        theirs = inspect.signature(flax_method).parameters
        ours = inspect.signature(method).parameters
        positional = [p for p in ours.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        keywords = {name: p for name, p in theirs.items() if p.kind is p.KEYWORD_ONLY}
        if "attention_fn" in keywords:
            keywords["attention_fn"] = keywords["attention_fn"].replace(default=hook.nnx_attention_fn)
        keywords |= {name: p for name, p in ours.items() if p.kind is p.KEYWORD_ONLY}
        method.__signature__ = inspect.Signature([*positional, *keywords.values()])
        return method

    return sign


class FlashMHA(nnx.MultiHeadAttention):
    """`nnx.MultiHeadAttention` whose attention is `fast_layers.dot_product_attention`.

    Parameters, initial values, caches, errors and arguments are those of the installed Flax version; its
    checkpoints load in this layer and the other way round.

        layer = fast_layers.FlashMHA(8, 512, num_kv_heads=2, rope=fast_layers.Rope(), rngs=nnx.Rngs(0))
        y = layer(x, is_causal=True, segment_ids=documents, decode=False)

    Args beyond Flax's, all keyword only:
      rope: rotary embedding of queries and keys after projection and normalisation; head depth must be even.
      window: a query sees keys at most this far away, as `local_window_size` of `dot_product_attention`: an
        int, or a pair (left, right) with None for unbounded. With `is_causal`, `window=w` leaves w keys besides
        the query's own.
      softcap: c > 0 replaces scores s by c * tanh(s / c).
      implementation: a backend by name; None takes the best. `fast_layers.explain` tells which.

    A given `attention_fn` is called as Flax would, and then no argument beyond Flax's is taken (ValueError).

    Decoding. `init_cache((*B, L, F), dtype)` makes room for L tokens; give it the layer's own `dtype`, or the
    cache is converted in each step, and for a GPU's kernels an L that is a multiple of 8, 128 at least, or they
    copy it in each step. A call with `decode=True` takes a chunk [B.., T, F] of any length T, so a
    prompt can be fed at once, stores its keys, and attends causally to all that is stored. A chunk that does
    not fit raises ValueError; inside jit, where that cannot be known, its outputs and all later ones are NaN.

    Raises:
      ValueError: what Flax's layer raises, and arguments of ours that do not fit; it says the way out.
    """

    @with_flax_signature(nnx.MultiHeadAttention.__init__)
    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        rope: Rope | None = None,
        window: hook.Window | None = None,
        softcap: float | None = None,
        implementation: str | None = None,
        **flax_arguments: Any,
    ):
        hook.check_heads(num_heads=num_heads, num_kv_heads=num_kv_heads)
        ours = FlashAttention(rope, window, softcap, implementation)
        attention_fn = flax_arguments.pop("attention_fn", hook.nnx_attention_fn)
        if attention_fn is not hook.nnx_attention_fn:
            hook.refuse_options(ours, attention_fn)
        super().__init__(
            num_heads,
            in_features,
            qkv_features=qkv_features,
            out_features=out_features,
            num_kv_heads=num_kv_heads,
            in_kv_features=in_kv_features,
            attention_fn=ours if attention_fn is hook.nnx_attention_fn else attention_fn,
            **flax_arguments,
        )
        if rope is not None:
            rope.frequencies(self.head_dim)

    @with_flax_signature(nnx.MultiHeadAttention.__call__)
    def __call__(
        self,
        inputs_q: Float[Array, "*B T F"],
        inputs_k: Float[Array, "*B S Fkv"] | None = None,
        inputs_v: Float[Array, "*B S Fkv"] | None = None,
        *,
        mask: hook.MaskLike | None = None,
        segment_ids: Any = None,
        decode: bool | None = None,
        input_positions: hook.Positions | None = None,
        **flax_arguments: Any,
    ) -> Float[Array, "*B T Fout"]:
        """Attend; what is not listed here is as in Flax.

        Args:
          mask: an array broadcastable to [B.., N, T, S], nonzero where a query may see a key, or a structured
            mask (`fast_layers.masks`). While decoding, S is L, and structured masks count positions from the
            cache's start.
          segment_ids: packed documents, as in `dot_product_attention`: int [B.., T], or a pair
            for queries and keys (a tuple, or a list of two arrays).
          decode: append to the cache and attend to it; implies `is_causal`.
          input_positions: for `rope`: int [B.., T] or [T], or such a pair. By default positions count from 0, or from
            the cache's length while decoding.
          sow_weights: sow softmax weights as Flax does; this takes the reference implementation, whatever
            `implementation` says, with O(T S) memory.

        Returns:
          [B.., T, out_features].
        """
        call = functools.partial(super().__call__, inputs_q, inputs_k, inputs_v, **flax_arguments)
        if not isinstance(self.attention_fn, FlashAttention):
            hook.refuse_extras(self.attention_fn, mask, segment_ids)
            positions = {} if input_positions is None else {"input_positions": input_positions}
            return call(mask=mask, decode=decode, **positions)
        flag("is_causal", flax_arguments.get("is_causal", False))  # Flax would make a bool of it
        slot = None
        if self.decode if decode is None else decode:
            hook.refuse_segments_in_decode(segment_ids)
            if self.cached_key is None or self.cached_value is None or self.cache_index is None:
                return call(mask=mask, decode=decode)  # Flax says what is missing.
            slot, decode = _ModuleCache(self), False
        mask = hook.with_segments(mask, segment_ids)
        return call(mask=hook.CallExtras(mask, input_positions, slot), decode=decode)


@dataclasses.dataclass(frozen=True)
class _ModuleCache:
    """The cache variables of a module; see `CacheSlot`."""

    module: FlashMHA

    def read(self, key: Array, value: Array) -> KVCache:
        return KVCache(*(variable[...] for variable in self._variables()))

    def write(self, cache: KVCache) -> None:
        for variable, array in zip(self._variables(), cache, strict=True):
            # Not [...]: the cache may now be sharded as the keys are, the one from init_cache is not.
            variable.set_value(array)

    def _variables(self) -> Iterator[nnx.Variable]:
        for variable in (self.module.cached_key, self.module.cached_value, self.module.cache_index):
            assert variable is not None
            yield variable

"""The hooks' common part: from the arguments Flax hands to an attention function to `dot_product_attention`.

Axis letters: B any number of batch dims, T queries, S keys, N query heads, K key/value heads, H query/key
depth, V value depth.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.nnx import dot_product_attention as flax_dot_product_attention
from flax.nnx.nn import dtypes
from jaxtyping import Array, ArrayLike, Float, Int

from fast_layers.layers.kv_cache import CacheSlot
from fast_layers.layers.rope import Rope
from fast_layers.ops.attention import attention_weights, dot_product_attention, masks
from fast_layers.ops.attention.api import check_implementation, check_softcap, window_pair
from fast_layers.ops.operands import integers
from fast_layers.ops.static_options import check_size, flag

Window = int | tuple[int | None, int | None]
Positions = ArrayLike | tuple[ArrayLike, ArrayLike]
MaskLike = ArrayLike | masks.Mask


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """What a layer of ours is told beyond Flax's arguments: static, hashable, compared by value."""

    rope: Rope | None = None
    window: Window | None = None
    softcap: float | None = None
    implementation: str | None = None

    def __post_init__(self):
        if self.rope is not None and not isinstance(self.rope, Rope):
            raise ValueError(f"rope={self.rope!r}: must be None or a fast_layers.Rope, e.g. Rope(theta=10_000.0)")
        if isinstance(self.window, list):
            object.__setattr__(self, "window", tuple(self.window))
        _window_mask(self.window)
        check_softcap(self.softcap)
        check_implementation(self.implementation)

    def as_keywords(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def given(self) -> list[str]:
        """Names of the options that are set."""
        return [name for name, option in self.as_keywords().items() if option is not None]


@dataclasses.dataclass(frozen=True)
class CallExtras:
    """What one call says beyond the arguments that Flax's `__call__` has.

    It travels in `mask`, which Flax hands on to the attention function as it is.
    """

    mask: MaskLike | None = None
    positions: Positions | None = None
    cache: CacheSlot | None = None
    cache_operand: str = "key"


def attend(
    options: AttentionOptions,
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K V"],
    *,
    bias: Array | None,
    mask: MaskLike | CallExtras | None,
    positions: Positions | None,
    is_causal: bool,
    dropout_rate: float,
    dropout_rng: Array | None,
    broadcast_dropout: bool,
    deterministic: bool,
    precision: Any,
    promote: Callable[[tuple[Array, Array, Array]], tuple[Array, Array, Array]],
    sow: Callable[[Array], Any] | None,
    flax_attention: Callable[..., Array],
    flax_computes: str | None = None,
) -> Float[Array, "*B T N V"]:
    """Rotate, update the cache, gather all masks into one, and attend.

    Args:
      sow: takes the weights [B.., N, T, S] before dropout; None if nobody wants them.
      flax_attention: Flax's own function as `f(query, key, value, mask)`. It computes what the op does not:
        complex numbers, and what `flax_computes` names.
    """
    flag("is_causal", is_causal)
    if not 0.0 <= dropout_rate < 1.0:
        raise ValueError(f"dropout_rate must be in the range [0, 1), got {dropout_rate!r}")
    extras = mask if isinstance(mask, CallExtras) else CallExtras(mask)
    positions = extras.positions if positions is None else positions
    slot = extras.cache
    cache = None if slot is None else slot.read(key, value)
    q_offset = 0 if cache is None else cache.index

    if options.rope is not None:
        query_positions, key_positions = _positions(positions, query, key, q_offset)
        query, key = options.rope.apply(query, query_positions), options.rope.apply(key, key_positions)
    elif positions is not None:
        raise ValueError("input_positions has no use without rotary embedding: set rope=fast_layers.Rope(), or drop it")

    in_cache = None
    if slot is not None and cache is not None:
        if query.shape[-3] != key.shape[-3]:
            raise ValueError(
                f"decoding appends the keys of the queries' own tokens, got {query.shape[-3]} queries and "
                f"{key.shape[-3]} keys; call with decode=False for cross attention"
            )
        cache = cache.append(key, value, extras.cache_operand)
        slot.write(cache)
        # Queries see keys up to their own position, so this also hides what is not filled yet.
        is_causal, key, value, in_cache = True, cache.key, cache.value, cache.fits

    # A jitted step cannot raise when the cache is full, and must not look like an answer. Where each query sees a key,
    # its own NaN reaches all of `out`: XLA writes it with the query, and not once more with `out`.
    each_sees_some = extras.mask is None and options.window is None
    if in_cache is not None and each_sees_some:
        query, in_cache = jnp.where(in_cache, query, jnp.nan), None
    query, key, value = promote((query, key, value))
    combined = _combine(extras.mask, is_causal, options.window, q_offset)
    if jnp.iscomplexobj(query):
        flax_computes = flax_computes or "complex numbers"
    if flax_computes:
        refused = [name for name in options.given() if name in ("softcap", "implementation")]
        if refused:
            raise ValueError(
                f"{' and '.join(refused)} cannot be combined with {flax_computes}, for which Flax's own "
                "attention function is called; leave one of them out"
            )
        key, value = (_repeat_heads(x, query.shape[-2]) for x in (key, value))
        out = flax_attention(query, key, value, _as_array(combined, query, key))
    else:
        shared: dict[str, Any] = {
            "softcap": options.softcap,
            "dropout_rate": 0.0 if deterministic else dropout_rate,
            "dropout_rng": dropout_rng,
            "broadcast_dropout": broadcast_dropout,
            "precision": precision,
        }
        operands = (query, key, value, bias, combined)
        if sow is None:
            out = dot_product_attention(*operands, implementation=options.implementation, **shared)
        else:
            out, weights = attention_weights(*operands, **shared)
            sow(weights)
    return out if in_cache is None else jnp.where(in_cache, out, jnp.nan)


def nnx_attention_fn(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K V"],
    bias: Array | None = None,
    mask: MaskLike | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: nnx.Module | None = None,
    promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
    is_causal: bool = False,
    *,
    input_positions: Positions | None = None,
    rope: Rope | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "*B T N V"]:
    """`nnx.dot_product_attention` by `fast_layers.dot_product_attention`; N may be a multiple of K.

        nnx.MultiHeadAttention(8, 512, attention_fn=fast_layers.nnx_attention_fn, rngs=nnx.Rngs(0))

    Arguments of Flax's function have its meaning. Those beyond it:

    Args:
      mask: also a structured mask (`fast_layers.masks`). Arrays broadcast to [B.., N, T, S]; nonzero keeps.
      module: sow softmax weights [B.., N, T, S] there; takes the reference implementation, O(T S) memory.
      input_positions: for `rope`: int [B.., T] or [T], or a pair for queries and keys. Default: 0, 1, 2, ...
      rope, window, softcap, implementation: as in `fast_layers.FlashMHA`.

    Returns:
      [B.., T, N, V] in the promoted dtype. A query that sees no key gets 0.

    Raises:
      ValueError: shapes, dtypes or options that do not fit.
    """

    def flax_attention(query, key, value, mask):
        return flax_dot_product_attention(
            query,
            key,
            value,
            bias,
            mask,
            broadcast_dropout,
            dropout_rng,
            dropout_rate,
            deterministic,
            dtype,
            precision,
            module,
            promote_dtype,
        )

    return attend(
        AttentionOptions(rope, window, softcap, implementation),
        query,
        key,
        value,
        bias=bias,
        mask=mask,
        positions=input_positions,
        is_causal=is_causal,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        broadcast_dropout=broadcast_dropout,
        deterministic=deterministic,
        precision=precision,
        promote=functools.partial(promote_dtype, dtype=dtype),
        sow=None if module is None else functools.partial(module.sow, nnx.Intermediate, "attention_weights"),
        flax_attention=flax_attention,
    )


def check_heads(**heads: int | None) -> None:
    """Raise ValueError for numbers of heads that Flax would divide by; None is left to Flax."""
    for name, number in heads.items():
        if number is not None:
            check_size(name, number)


def with_segments(mask: MaskLike | None, segment_ids: Any) -> MaskLike | None:
    """`mask` and-ed with packed documents: ids as `dot_product_attention` takes them."""
    if segment_ids is None:
        return mask
    segments = masks.Segments(*masks.queries_and_keys("segment_ids", segment_ids))
    return segments if mask is None else _as_mask(mask) & segments


def refuse_segments_in_decode(segment_ids: Any) -> None:
    if segment_ids is not None:
        raise ValueError(
            "segment_ids with decode=True: a cache holds one document per example; decode documents as "
            "examples of their own, or pass mask=masks.Segments(ids of the chunk, ids of the whole cache)"
        )


def refuse_extras(attention_fn: Callable[..., Any], mask: Any, segment_ids: Any, positions: Any = None) -> None:
    """Raise ValueError if a foreign attention function would have to understand what is ours alone."""
    given = ["a structured mask"] if isinstance(mask, masks.Mask) else []
    given += [name for name, x in (("segment_ids", segment_ids), ("input_positions", positions)) if x is not None]
    if given:
        raise ValueError(
            f"{' and '.join(given)}: attention_fn={_name(attention_fn)} takes arrays only; pass "
            "mask.as_array(T, S, batch_dims), or leave attention_fn= out"
        )


def refuse_options(options: AttentionOptions, attention_fn: Callable[..., Any]) -> None:
    """Raise ValueError if options of ours were given together with a foreign attention function."""
    if options.given():
        raise ValueError(
            f"{', '.join(options.given())} cannot reach attention_fn={_name(attention_fn)}; bind what it "
            "needs yourself, e.g. with functools.partial, or leave attention_fn= out"
        )


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)


def _positions(
    positions: Positions | None, query: Array, key: Array, q_offset: Int[Array, ""] | int
) -> tuple[ArrayLike, ArrayLike]:
    q_len, kv_len = query.shape[-3], key.shape[-3]
    if positions is None:
        return tuple(q_offset + jnp.arange(length, dtype=jnp.int32) for length in (q_len, kv_len))  # pyright: ignore
    pair = masks.queries_and_keys("input_positions", positions)
    if len(pair) == 1 and q_len != kv_len:
        raise ValueError(
            "input_positions must be a pair (queries, keys) when their lengths differ, got one array for "
            f"{q_len} queries and {kv_len} keys"
        )
    if any(given is None for given in pair):
        raise ValueError("input_positions has None in its pair (queries, keys): give both, or one array if they agree")
    read = [integers("input_positions", given) for given in pair]
    return read[0], read[-1]


def _as_mask(mask: MaskLike) -> masks.Mask:
    """Of an array, what is not zero keeps, as in Flax."""
    if isinstance(mask, masks.Mask):
        return mask
    masks.refuse_what_is_no_mask(mask)
    return masks.Dense(masks.mask_array(mask).astype(bool))


def _window_mask(window: Window | None) -> masks.LocalWindow | None:
    return None if window is None else masks.LocalWindow(*window_pair("window", window))


def _combine(mask: MaskLike | None, is_causal: bool, window: Window | None, q_offset) -> masks.Mask | None:
    parts = [
        None if mask is None else _as_mask(mask),
        masks.Causal() if is_causal else None,
        _window_mask(window),
    ]
    given = [part for part in parts if part is not None]
    if not given:
        return None
    return masks.Offset(functools.reduce(operator.and_, given), q_offset)


def _as_array(mask: masks.Mask | None, query: Array, key: Array) -> Array | None:
    if mask is None:
        return None
    batch = query.shape[:-3]
    array = mask.as_array(query.shape[-3], key.shape[-3], batch)
    leading = batch if array.shape[0] > 1 else (1,) * len(batch)
    return array.reshape(*leading, *array.shape[1:])


def _repeat_heads(x: Array, heads: int) -> Array:
    return x if heads % x.shape[-2] else jnp.repeat(x, heads // x.shape[-2], axis=-2)

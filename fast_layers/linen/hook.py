"""The hook for Flax Linen: `nn.dot_product_attention` by `fast_layers.dot_product_attention`.

Axis letters: B any number of batch dims, T queries, S keys, N query heads, K key/value heads, H query/key depth,
V value depth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax.linen import dot_product_attention as flax_dot_product_attention
from flax.nnx.nn import dtypes
from jaxtyping import Array, Float

from fast_layers.layers.attention_fn import AttentionOptions, MaskLike, Positions, Window, attend
from fast_layers.layers.rope import Rope


# Every argument has its name: Linen passes only those that it finds in the signature.
def attention_fn(
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
    module: nn.Module | None = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., Array] | None = None,
    qk_attn_weights_einsum: Callable[..., Array] | None = None,
    attn_weights_value_einsum: Callable[..., Array] | None = None,
    *,
    input_positions: Positions | None = None,
    rope: Rope | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "*B T N V"]:
    """`nn.dot_product_attention` by `fast_layers.dot_product_attention`; N may be a multiple of K.

        nn.MultiHeadDotProductAttention(8, attention_fn=fast_layers.linen.attention_fn)

    Arguments of Flax's function have its meaning. Custom einsums replace the very matmuls that are fused here, so
    with them Flax's own function computes. Those beyond it:

    Args:
      mask: also a structured mask (`fast_layers.masks`). Arrays broadcast to [B.., N, T, S]; nonzero keeps.
      module: sow softmax weights [B.., N, T, S] there; takes the reference implementation, O(T S) memory.
      force_fp32_for_softmax: the softmax is float32 in any case; this makes output and sown weights float32 too.
      input_positions: for `rope`: int [B.., T] or [T], or a pair for queries and keys. Default: 0, 1, 2, ...
      rope, window, softcap, implementation: as in `fast_layers.FlashMHA`.

    Returns:
      [B.., T, N, V] in the promoted dtype. A query that sees no key gets 0.

    Raises:
      ValueError: shapes, dtypes or options that do not fit.
    """

    def flax_attention(query: Array, key: Array, value: Array, mask: Array | None) -> Array:
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
            force_fp32_for_softmax,
            einsum_dot_general,
            qk_attn_weights_einsum,
            attn_weights_value_einsum,
        )

    def sow(weights: Array) -> None:
        assert module is not None
        module.sow("intermediates", "attention_weights", weights)

    einsums = (einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum)
    customised = any(einsum is not None for einsum in einsums)

    def promote(operands: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        query, key, value = dtypes.promote_dtype(operands, dtype=dtype)
        if force_fp32_for_softmax and module is not None and not customised:
            # The reference's weights have the operands' dtype.
            wide = jnp.promote_types(query.dtype, jnp.float32)
            query, key, value = query.astype(wide), key.astype(wide), value.astype(wide)
        return query, key, value

    out = attend(
        AttentionOptions(rope, window, softcap, implementation),
        query,
        key,
        value,
        bias=bias,
        mask=mask,
        positions=input_positions,
        is_causal=False,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        broadcast_dropout=broadcast_dropout,
        deterministic=deterministic,
        precision=precision,
        promote=promote,
        sow=None if module is None else sow,
        flax_attention=flax_attention,
        flax_computes="custom einsums" if customised else None,
    )
    return out.astype(jnp.promote_types(out.dtype, jnp.float32)) if force_fp32_for_softmax else out

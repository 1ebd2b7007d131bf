"""The decoder-only language model: RMSNorm, rotary grouped-query attention, gated MLP.

B: rows. T: bytes per row. D: width. V: 256 byte values.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import fast_layers

from .config import VOCAB, Config

ROPE_THETA = 10_000.0


class FlaxAttention(nnx.MultiHeadAttention):
    """Flax's own layer behind FlashMHA's arguments: builds the dense [B, 1, T, T] mask that Flax needs."""

    def __init__(self, *args, rope: fast_layers.Rope, **kwargs):
        attend = functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE(rope.theta))
        super().__init__(*args, attention_fn=attend, **kwargs)

    def __call__(self, x: jax.Array, *, segment_ids: jax.Array, is_causal: bool, decode: bool):
        same_segment = (segment_ids[:, :, None] == segment_ids[:, None, :]) & (segment_ids >= 0)[:, None, :]
        return super().__call__(x, mask=same_segment[:, None], is_causal=is_causal, decode=decode)


# Both take FlashMHA's arguments and hold the same parameter tree with the same initial values.
ATTENTION: dict[str, Any] = {"flash": fast_layers.FlashMHA, "flax": FlaxAttention}


class FlaxMLP(nnx.Module):
    """What FusedMLP computes in the model below, by Flax's own layers."""

    def __init__(self, features: int, hidden: int, *, down_kernel_init: nnx.Initializer, dtype: Any, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
        self.gate = linear(features, hidden)
        self.up = linear(features, hidden)
        self.down = linear(hidden, features, kernel_init=down_kernel_init)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


# As with attention: the same parameter tree and initial values.
MLP: dict[str, Any] = {
    "fused": functools.partial(fast_layers.FusedMLP, activation="silu", gated=True, use_bias=False),
    "flax": FlaxMLP,
}


class Block(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        # Each block adds twice to the residual stream, whose variance should not grow with depth.
        out_init = nnx.initializers.variance_scaling(0.5 / config.layers, "fan_in", "truncated_normal")
        self.attention_norm = nnx.RMSNorm(config.width, dtype=dtype, rngs=rngs)
        self.attention = ATTENTION[config.attention](
            config.heads,
            config.width,
            num_kv_heads=config.kv_heads,
            rope=fast_layers.Rope(theta=ROPE_THETA),
            use_bias=False,
            dtype=dtype,
            out_kernel_init=out_init,
            rngs=rngs,
        )
        self.mlp_norm = nnx.RMSNorm(config.width, dtype=dtype, rngs=rngs)
        self.mlp = MLP[config.mlp](config.width, config.mlp_width, down_kernel_init=out_init, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, segment_ids: jax.Array | None, decode: bool = False) -> jax.Array:
        x += self.attention(self.attention_norm(x), segment_ids=segment_ids, is_causal=True, decode=decode)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        self.remat = config.remat
        self.embed = nnx.Embed(VOCAB, config.width, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.final_norm = nnx.RMSNorm(config.width, dtype=dtype, rngs=rngs)
        # Small, so that the first predictions are nearly uniform and the first loss is ln 256 = 5.55.
        head_init = nnx.initializers.normal(0.01)
        self.head = nnx.Linear(config.width, VOCAB, use_bias=False, dtype=dtype, kernel_init=head_init, rngs=rngs)

    def __call__(self, tokens: jax.Array, segment_ids: jax.Array | None = None, *, decode: bool = False) -> jax.Array:
        """Next-byte logits float32 [B, T, V] for tokens [B, T]; decode continues the caches."""
        block = nnx.remat(Block.__call__, static_argnums=3) if self.remat and not decode else Block.__call__
        x = self.embed(tokens)
        for layer in self.blocks:
            x = block(layer, x, segment_ids, decode)
        return self.head(self.final_norm(x)).astype(jnp.float32)

    def init_cache(self, batch_size: int, max_len: int) -> None:
        """Gives every attention layer an empty cache for max_len bytes."""
        for layer in self.blocks:
            attention = layer.attention
            attention.init_cache((batch_size, max_len, attention.in_features), dtype=attention.dtype)


def create(config: Config) -> Transformer:
    return Transformer(config, rngs=nnx.Rngs(config.seed))


def parameter_count(config: Config) -> int:
    return sum(math.prod(shape) for shape in _shapes(config))


def _shapes(config: Config) -> list[tuple[int, ...]]:
    params = jax.eval_shape(lambda: nnx.state(create(config), nnx.Param))
    return [leaf.shape for leaf in jax.tree.leaves(params)]


def flops_per_token(config: Config) -> float:
    """Floating-point operations of one training step per byte, without recomputation.

    Each parameter of a matrix product is used by 2 operations forward and 4 backward. The embedding is looked
    up. The two attention products take 2 * 2 * width operations per visible key forward, and causality shows
    half of them.
    """
    matrices = sum(math.prod(shape) for shape in _shapes(config) if len(shape) > 1) - VOCAB * config.width
    attention = config.layers * 2 * 2 * config.width * config.seq_len / 2
    return 6 * matrices + 3 * attention

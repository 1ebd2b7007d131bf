"""The decoder-only language model: blocks of rotary grouped-query attention and a gated MLP, or of Mamba-2.

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
from .flax_mamba2 import FlaxMamba2

ROPE_THETA = 10_000.0


class FlaxAttention(nnx.MultiHeadAttention):
    """Flax's own layer behind FlashMHA's arguments: for documents it builds the dense [B, 1, T, T] mask of Flax."""

    attend = staticmethod(nnx.dot_product_attention_with_rope)

    def __init__(self, *args, rope: fast_layers.Rope, **kwargs):
        attend = functools.partial(self.attend, rope=nnx.RoPE(rope.theta))
        super().__init__(*args, attention_fn=attend, **kwargs)

    def __call__(self, x: jax.Array, *, segment_ids: jax.Array | None, is_causal: bool, decode: bool):
        if segment_ids is None:
            return super().__call__(x, is_causal=is_causal, decode=decode)
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


MAMBA: dict[str, Any] = {"fused": fast_layers.Mamba2, "flax": FlaxMamba2}


class Block(nnx.Module):
    """A transformer's block."""

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

    def init_cache(self, batch_size: int, max_len: int) -> None:
        self.attention.init_cache((batch_size, max_len, self.attention.in_features), dtype=self.attention.dtype)


class MambaBlock(nnx.Module):
    """A block of Mamba-2, whose gate and wide projections do the work of an MLP."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        self.mamba_norm = nnx.RMSNorm(config.width, dtype=dtype, rngs=rngs)
        self.mamba = MAMBA[config.mamba](
            config.width,
            d_state=config.ssm_state,
            headdim=config.ssm_head_dim,
            n_layer=config.layers,
            dtype=dtype,
            rngs=rngs,
        )

    def __call__(self, x: jax.Array, segment_ids: jax.Array | None, decode: bool = False) -> jax.Array:
        return x + self.mamba(self.mamba_norm(x), segment_ids=segment_ids, decode=decode)

    def init_cache(self, batch_size: int, max_len: int) -> None:
        self.mamba.init_cache((batch_size, max_len, self.mamba.options.d_model))  # of a size that max_len leaves alone


def has_attention(config: Config, layer: int) -> bool:
    """Whether block number `layer` is a transformer's: in a hybrid the second of every four."""
    return config.arch == "transformer" or (config.arch == "hybrid" and layer % 4 == 1)


class LanguageModel(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        self.remat = config.remat
        self.embed = nnx.Embed(VOCAB, config.width, dtype=dtype, rngs=rngs)
        kinds = [Block if has_attention(config, layer) else MambaBlock for layer in range(config.layers)]
        self.blocks = nnx.List([kind(config, rngs=rngs) for kind in kinds])
        self.final_norm = nnx.RMSNorm(config.width, dtype=dtype, rngs=rngs)
        # Small, so that the first predictions are nearly uniform and the first loss is ln 256 = 5.55.
        head_init = nnx.initializers.normal(0.01)
        self.head = nnx.Linear(config.width, VOCAB, use_bias=False, dtype=dtype, kernel_init=head_init, rngs=rngs)

    def __call__(self, tokens: jax.Array, segment_ids: jax.Array | None = None, *, decode: bool = False) -> jax.Array:
        """Next-byte logits float32 [B, T, V] for tokens [B, T]; decode continues the caches."""
        x = _look_up(self.embed, tokens)
        for layer in self.blocks:
            block: Any = type(layer).__call__
            block = nnx.remat(block, static_argnums=3) if self.remat and not decode else block
            x = block(layer, x, segment_ids, decode)
        return self.head(self.final_norm(x)).astype(jnp.float32)

    def init_cache(self, batch_size: int, max_len: int) -> None:
        """Gives every block an empty cache for max_len bytes."""
        for layer in self.blocks:
            layer.init_cache(batch_size, max_len)


def _look_up(embed: nnx.Embed, tokens: jax.Array) -> jax.Array:
    """`embed(tokens)`, whose gradient is a product of matrices: a scatter's sums have no fixed order on a GPU, and in
    bfloat16 are rounded at each step."""
    one_hot = jax.nn.one_hot(tokens.reshape(-1), embed.num_embeddings, dtype=embed.dtype)
    found = jnp.matmul(one_hot, embed.embedding[...].astype(embed.dtype), precision="highest")
    return found.reshape(*tokens.shape, embed.features)


def create(config: Config) -> LanguageModel:
    return LanguageModel(config, rngs=nnx.Rngs(config.seed))


def parameter_count(config: Config) -> int:
    return sum(math.prod(shape) for shape in _shapes(config))


def _shapes(config: Config) -> list[tuple[int, ...]]:
    params = jax.eval_shape(lambda: nnx.state(create(config), nnx.Param))
    return [leaf.shape for leaf in jax.tree.leaves(params)]


def flops_per_token(config: Config) -> float:
    """Floating-point operations of one training step per byte, without recomputation.

    Each parameter of a matrix product is used by 2 operations forward and 4 backward. The embedding is looked
    up. The two attention products take 2 * 2 * width operations per visible key forward, and causality shows
    half of them. Mamba-2's recurrence updates and reads ssm_state numbers for each of 2 * width channels, 2
    operations each.
    """
    matrices = sum(math.prod(shape) for shape in _shapes(config) if len(shape) > 1) - VOCAB * config.width
    attention = 2 * 2 * config.width * config.seq_len / 2
    recurrence = 2 * 2 * (2 * config.width) * config.ssm_state
    mixing = sum(attention if has_attention(config, layer) else recurrence for layer in range(config.layers))
    return 6 * matrices + 3 * mixing

"""The language model of the published Mamba-2 checkpoints.

Axis letters: B any number of batch dims, T positions, V rows of the embedding.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, ArrayLike, Float, Int

from fast_layers.checkpoints.config import Mamba2LMConfig, check_config
from fast_layers.layers.mamba2 import Mamba2


class _Block(nnx.Module):
    """x + mixer(norm(x))."""

    def __init__(self, config: Mamba2LMConfig, *, dtype: Any, param_dtype: Any, rngs: nnx.Rngs):
        self.norm = _norm(config, dtype, param_dtype, rngs)
        self.mixer = Mamba2(
            **config.mixer_arguments, n_layer=config.n_layer, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )


class Mamba2LM(nnx.Module):
    """Embedding, `n_layer` blocks x + mixer(norm(x)), norm, head: mamba_ssm's `MambaLMHeadModel` of Mamba2 layers.

    Args:
      config: its sizes.
      dtype: of the computation; None: that of the parameters.
      param_dtype: of the parameters.
      rngs: stream `params`; initial values are those of mamba_ssm, but for an untied head's, which has the embedding's.

    Parameters: embed.embedding [V, d_model], layers.{i}.norm.scale, layers.{i}.mixer (see `fast_layers.Mamba2`),
    final_norm.scale, and head.kernel [d_model, V] unless the embedding serves as head.
    """

    def __init__(self, config: Mamba2LMConfig, *, dtype: Any = None, param_dtype: Any = jnp.float32, rngs: nnx.Rngs):
        check_config(config)
        self.config = config
        # Of the parameters where none is said: rows of an embedding alone do not promote to anything.
        dtype = param_dtype if dtype is None else dtype
        normal = nnx.initializers.normal(0.02)
        self.embed = nnx.Embed(
            config.vocab_rows,
            config.d_model,
            dtype=dtype,
            param_dtype=param_dtype,
            embedding_init=normal,
            rngs=rngs,
        )
        self.layers = nnx.List(
            [_Block(config, dtype=dtype, param_dtype=param_dtype, rngs=rngs) for _ in range(config.n_layer)]
        )
        self.final_norm = _norm(config, dtype, param_dtype, rngs)
        self.head = nnx.data(None)
        if not config.tie_embeddings:
            self.head = nnx.Linear(
                config.d_model,
                config.vocab_rows,
                use_bias=False,
                dtype=dtype,
                param_dtype=param_dtype,
                kernel_init=normal,
                rngs=rngs,
            )

    def __call__(
        self, tokens: Int[Array, "*B T"], *, segment_ids: ArrayLike | None = None, decode: bool = False
    ) -> Float[Array, "*B T V"]:
        """Logits of the next token in the computation's dtype, with those of padding rows behind `vocab_size`.

        Args:
          tokens: int [*B, T].
          segment_ids: packed documents, as in `fast_layers.Mamba2`.
          decode: continue the caches that `init_cache` made.
        """
        if decode and any(layer.mixer.ssm_state is None for layer in self.layers):
            raise ValueError("no cache to decode with: call model.init_cache(tokens.shape[:-1]) first")
        x = self.embed(tokens)
        block_dtype = x.dtype
        if self.config.residual_in_fp32:
            x = x.astype(jnp.promote_types(block_dtype, jnp.float32))
        for layer in self.layers:
            mixed = layer.mixer(layer.norm(x).astype(block_dtype), segment_ids=segment_ids, decode=decode)
            x = x + mixed.astype(x.dtype)
        x = self.final_norm(x).astype(block_dtype)
        return self.embed.attend(x) if self.head is None else self.head(x)

    def init_cache(self, batch: tuple[int, ...], dtype: Any = jnp.float32) -> None:
        """Empty caches for tokens of [*batch, any length]."""
        if not isinstance(batch, tuple | list):
            raise ValueError(f"{batch=}: must be the dims before the length, such as tokens.shape[:-1]")
        for layer in self.layers:
            layer.mixer.init_cache((*batch, 1, self.config.d_model), dtype)


def _norm(config: Mamba2LMConfig, dtype: Any, param_dtype: Any, rngs: nnx.Rngs) -> nnx.RMSNorm:
    # Flax's faster variance is the same for a norm without mean; the sum is float32 in any case.
    return nnx.RMSNorm(config.d_model, epsilon=config.norm_eps, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

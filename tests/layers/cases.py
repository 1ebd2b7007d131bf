"""Calls that Flax's layers and ours must answer alike, for NNX and Linen.

B examples, T queries, S keys, F features.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

# Compilation is nearly all the time that these tests take; this halves it.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

FEATURES = 16
HEADS = 4


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    constructor: dict[str, Any] = dataclasses.field(default_factory=dict)
    batch: tuple[int, ...] = (2,)
    queries: int = 9
    keys: int | None = None  # None: self attention
    mask: str | None = None  # causal, padding, per_head
    is_causal: bool = False
    nnx_only: bool = False

    def inputs(self, dtype=jnp.float32) -> tuple[jax.Array, ...]:
        """(queries [B.., T, F],) or (queries, keys [B.., S, F], values [B.., S, F])."""
        lengths = (self.queries,) if self.keys is None else (self.queries, self.keys, self.keys)
        rngs = jax.random.split(jax.random.key(1), len(lengths))
        shapes = [(*self.batch, length, FEATURES) for length in lengths]
        return tuple(jax.random.normal(rng, shape, dtype) for rng, shape in zip(rngs, shapes, strict=True))

    def mask_array(self) -> jax.Array | None:
        """[B.., 1 or N, T, S], as Flax's helpers make it, float32; no row is fully masked."""
        keys = self.queries if self.keys is None else self.keys
        if self.mask is None:
            return None
        if self.mask == "causal":
            return nnx.make_causal_mask(jnp.ones((*self.batch, self.queries)))
        if self.mask == "padding":
            # Padded queries see keys too: where a row sees none, Flax and we differ on purpose.
            real = jnp.ones(self.queries), (jnp.arange(keys) < keys - 2).astype(jnp.float32)
            return nnx.make_attention_mask(*(jnp.broadcast_to(x, (*self.batch, x.size)) for x in real))
        assert self.mask == "per_head"
        shape = (*self.batch, HEADS, self.queries, keys)
        return jax.random.bernoulli(jax.random.key(2), 0.6, shape).at[..., 0].set(True)


CASES = [
    Case("plain"),
    Case("cross", keys=13),
    Case("causal mask", mask="causal"),
    Case("padding mask", mask="padding", keys=13),
    Case("mask per head", mask="per_head"),
    Case("is_causal", is_causal=True, nnx_only=True),
    Case("is_causal and padding", is_causal=True, mask="padding", nnx_only=True),
    Case("grouped heads", {"num_kv_heads": 2}, mask="causal", nnx_only=True),
    Case("one key head", {"num_kv_heads": 1}, keys=5, nnx_only=True),
    Case("normalised", {"normalize_qk": True, "use_bias": False}),
    Case("two batch dims", batch=(2, 3), mask="padding"),
    Case("no batch dims", batch=(), mask="causal"),
    Case("wider", {"qkv_features": 24, "out_features": 10}),
    Case("dropout switched off", {"dropout_rate": 0.5, "deterministic": True}),
]


def names(cases):
    return [case.name for case in cases]

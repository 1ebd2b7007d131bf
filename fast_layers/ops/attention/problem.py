"""The static facts of one attention call, and the arrays that go with them.

Axis letters: B flattened batch, T queries, S keys, N query heads, K key/value heads, H query/key depth, V value depth.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fast_layers.kernel_parts.dropout import DropoutSeed
from fast_layers.ops.attention.masks import Band, MaskForm


@dataclasses.dataclass(frozen=True)
class MaskFacts:
    """Which parts a lowered mask has: what a kernel needs to know to accept or refuse it."""

    band: Band | None = None
    interval_arrays: bool = False
    lengths_only: bool = False
    segments: bool = False
    dense: tuple[int, ...] | None = None

    @classmethod
    def of(cls, form: MaskForm) -> MaskFacts:
        return cls(
            band=form.band,
            interval_arrays=form.start is not None or form.stop is not None,
            lengths_only=form.lengths_only,
            segments=form.query_segments is not None,
            dense=None if form.dense is None else form.dense.shape,
        )

    def describe(self) -> str:
        parts = []
        if self.band is not None:
            parts.append(f"band [{_bound(self.band.low)}, {_bound(self.band.high)}]")
        parts += [name for name, present in (("segments", self.segments),) if present]
        if self.interval_arrays and not self.segments:
            parts.append("lengths" if self.lengths_only else "intervals")
        if self.dense is not None:
            parts.append(f"dense {list(self.dense)}")
        return " & ".join(parts) or "none"


def _bound(offset: int | None) -> str:
    return ".." if offset is None else f"{offset:+d}" if offset else "0"


@dataclasses.dataclass(frozen=True)
class Problem:
    """Shapes, dtypes and options; no arrays. Lengths and batch may be symbolic dimensions of `jax.export`."""

    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    dtype: jnp.dtype
    mask: MaskFacts
    scale: float
    bias: tuple[int, ...] | None = None
    bias_dtype: jnp.dtype | None = None
    softcap: float | None = None
    sinks: bool = False
    dropout_rate: float = 0.0
    precision: Any = None
    reproducible: bool = True
    """Whether gradients must have the same bits in every run of a kernel."""
    lse_returned: bool = False
    """Whether the caller gets lse, and so may differentiate it. A backward pass may rely on d_lse = 0 if not."""

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads

    @property
    def per_score(self) -> bool:
        """Whether single scores have something of their own: a bias, a place in a dense mask, a keep decision."""
        return self.bias is not None or self.mask.dense is not None or bool(self.dropout_rate)

    @property
    def accumulator_dtype(self) -> jnp.dtype:
        """Scores, softmax, lse and sums: float32, or float64 for float64 inputs."""
        return jnp.dtype(jnp.float64 if self.dtype == jnp.float64 else jnp.float32)

    def describe(self) -> str:
        facts = [
            f"query [{self.batch}, {self.q_len}, {self.heads}, {self.qk_dim}]",
            f"key [{self.batch}, {self.kv_len}, {self.kv_heads}, {self.qk_dim}]",
            *([f"value depth {self.v_dim}"] if self.v_dim != self.qk_dim else []),
            str(self.dtype),
            f"mask {self.mask.describe()}",
            *([f"bias {list(self.bias)}"] if self.bias else []),
            *([f"softcap {self.softcap:g}"] if self.softcap else []),
            *(["sinks"] if self.sinks else []),
            *([f"dropout {self.dropout_rate:g}"] if self.dropout_rate else []),
            *(["lse returned"] if self.lse_returned else []),
            *([] if self.reproducible else ["sums in any order"]),
        ]
        return ", ".join(facts)


class Inputs(NamedTuple):
    """What gradients flow to."""

    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K V"]
    bias: Float[Array, "B|1 N|1 T|1 S|1"] | None = None
    sinks: Float[Array, " N"] | None = None


class Aux(NamedTuple):
    """What no gradient flows to."""

    mask: MaskForm
    dropout: DropoutSeed | None = None


class Residuals(NamedTuple):
    """What every backend's forward saves and every backend's backward takes.

    lse is the natural logarithm of the softmax denominator, sink included, in `Problem.accumulator_dtype`; it is
    -inf, and out is 0, for a row that sees no key.

    `sizes` are there where Hopper's forward found them for its backward: by J tiles of keys the largest magnitude in
    each key, then in each value; inf where a number is NaN or inf.
    """

    inputs: Inputs
    aux: Aux
    out: Float[Array, "B T N V"]
    lse: Float[Array, "B N T"]
    sizes: Float[Array, "B K J 2 S/J"] | None = None


def finite_or_zero(x: Array) -> Array:
    """`x` with NaN and inf replaced: an operand whose masked entries meet a zero weight in a matmul (0 * NaN)."""
    return jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))


def poison(*operands: Array) -> Array:
    """NaN for each row (last axis) that holds a NaN or inf in any operand, 0 for the others.

    Added to the scores before masking: whoever sees a broken row becomes NaN, and nobody else is touched.
    """
    broken = jnp.zeros(operands[0].shape[:-1], bool)
    for operand in operands:
        broken |= ~jnp.isfinite(operand).all(-1)
    return jax.lax.stop_gradient(jnp.where(broken, jnp.nan, 0.0).astype(operands[0].dtype))

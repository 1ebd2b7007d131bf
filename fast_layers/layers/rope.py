"""Rotary position embedding (Su et al., "RoFormer", 2021), plain and with the frequency scaling of Llama 3.1.

Axis letters: B any number of batch dims, T positions, N heads, H head depth, F = H / 2 frequencies.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Real

from fast_layers.ops.operands import is_real


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Stretches long wavelengths so that a model reads texts longer than those it was trained on.

    Wavelengths, in positions, beyond `original_max_position / low_freq_factor` grow by `factor`; those below
    `original_max_position / high_freq_factor` stay; between the two the frequency is interpolated. The defaults
    are those of Llama 3.1 (Grattafiori et al., "The Llama 3 Herd of Models", 2024, and its configuration files).
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self):
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position"):
            _check_positive(f"Llama3Scaling {name}", getattr(self, name))
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"Llama3Scaling low_freq_factor={self.low_freq_factor} must be less than "
                f"high_freq_factor={self.high_freq_factor}"
            )

    def scale(self, frequencies: np.ndarray) -> np.ndarray:
        """Angular frequencies in radians per position [F], scaled."""
        turns = self.original_max_position * frequencies / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = np.clip(kept, 0.0, 1.0)
        return frequencies * (kept + (1.0 - kept) / self.factor)


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotates queries and keys by angles that grow with their positions.

    Feature f is paired with feature f + H / 2, as in `nnx.RoPE` and in Llama checkpoints of Hugging Face.
    Hashable and compared by value: models built alike have equal graph definitions.

    Args:
      theta: base of the wavelengths, which go from 2 pi to nearly 2 pi theta positions.
      scaling: None, or `Llama3Scaling`.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021).
    """

    theta: float = 10_000.0
    scaling: Llama3Scaling | None = None

    def __post_init__(self):
        _check_positive("Rope theta", self.theta)
        if self.scaling is not None and not isinstance(self.scaling, Llama3Scaling):
            raise ValueError(f"Rope scaling={self.scaling!r}: must be None or a fast_layers.Llama3Scaling")

    def frequencies(self, depth: int) -> np.ndarray:
        """Angular frequencies in radians per position, float64 [F]. Raises ValueError for an odd depth."""
        if depth % 2:
            raise ValueError(f"Rope rotates pairs of features, got head depth {depth}: must be even")
        plain = self.theta ** (-np.arange(0, depth, 2) / depth)
        return plain if self.scaling is None else self.scaling.scale(plain)

    def apply(self, x: Float[Array, "*B T N H"], positions: Real[ArrayLike, "*B T"]) -> Float[Array, "*B T N H"]:
        """`x` rotated, in x's dtype; angles and rotation are computed in float32 (float64 for float64).

        `positions` has shape [B.., T], or [T] for all examples. Raises ValueError for another shape or an odd H.
        """
        positions = jnp.asarray(positions)
        length, wanted = x.shape[-3], x.shape[:-2]
        if positions.shape not in ((length,), wanted):
            raise ValueError(f"positions must have shape {wanted} or ({length},), got {positions.shape}")
        dtype = jnp.promote_types(x.real.dtype, jnp.float32)
        positions = positions.reshape((1,) * (len(wanted) - positions.ndim) + positions.shape + (1, 1))
        frequencies = jnp.asarray(self.frequencies(x.shape[-1]).reshape((1,) * (x.ndim - 1) + (-1,)), dtype)
        angles = positions.astype(dtype) * frequencies
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        first, second = jnp.split(x, 2, axis=-1)
        rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return rotated.astype(x.dtype)


def _check_positive(name: str, value) -> None:
    if not is_real(value) or not 0 < value < math.inf:
        raise ValueError(f"{name}={value!r}: must be a finite number > 0")

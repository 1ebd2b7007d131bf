"""The static facts of one MLP or linear call, and the arrays that go with them.

Axis letters: M tokens (all leading dims of x flattened), I input features, F hidden features, O output features.

    up = x w_up + b_up                              [M, F]
    gate = x w_gate + b_gate                        [M, F], gated only
    h = activation(gate) * up, or activation(up)    [M, F]
    out = h w_down + b_down                         [M, O]; without w_down (`linear`) out is h
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from fast_layers.ops.mlp.float8 import Float8

Save = Literal["pre_activation", "inputs"]
SAVES: tuple[Save, ...] = ("pre_activation", "inputs")


@dataclasses.dataclass(frozen=True)
class Problem:
    """Shapes, dtypes and options; no arrays. `tokens` may be a symbolic dimension of `jax.export`."""

    tokens: int
    in_features: int
    hidden_features: int
    out_features: int | None
    """None: `linear`, whose output is h."""
    dtype: jnp.dtype
    """Of all inputs, the output, the residuals and the gradients."""
    activation: str
    """A name from `activations.ACTIVATIONS`."""
    gated: bool = False
    up_bias: bool = False
    gate_bias: bool = False
    down_bias: bool = False
    save: Save = "pre_activation"
    """What the forward keeps for the backward besides the inputs; a call without gradients keeps nothing and has
    "inputs" here."""
    precision: Any = None
    float8: Float8 | None = None
    """To which the operands of the forward's matmuls are rounded."""

    @property
    def has_down(self) -> bool:
        return self.out_features is not None

    @property
    def saves_up(self) -> bool:
        """Whether the forward saves `up`. The backward of a bare matmul needs none of it."""
        bare = not self.has_down and not self.gated and self.activation == "identity"
        return self.save == "pre_activation" and not bare

    @property
    def saves_gate(self) -> bool:
        return self.saves_up and self.gated

    @property
    def accumulator_dtype(self) -> jnp.dtype:
        """Of the activation and of the bias gradients' sums: float32, or float64 for float64 inputs."""
        return jnp.dtype(jnp.float64 if self.dtype == jnp.float64 else jnp.float32)

    def describe(self) -> str:
        given = (("up", self.up_bias), ("gate", self.gate_bias), ("down", self.down_bias))
        biases = [name for name, present in given if present]
        facts = [
            f"x [{self.tokens}, {self.in_features}]",
            f"hidden {self.hidden_features}",
            *([f"out {self.out_features}"] if self.has_down else []),
            str(self.dtype),
            f"{self.activation}{' gate' if self.gated else ''}",
            *([f"bias {' '.join(biases)}"] if biases else []),
            *([f"{self.float8} forward"] if self.float8 else []),
            *(["saves inputs only"] if self.save == "inputs" else []),
        ]
        return ", ".join(facts)


class Inputs(NamedTuple):
    """What gradients flow to. The op's own functions take x with any leading dims, backends take it as [M, I]."""

    x: Float[Array, "M I"]
    w_up: Float[Array, "I F"]
    w_gate: Float[Array, "I F"] | None = None
    w_down: Float[Array, "F O"] | None = None
    b_up: Float[Array, " F"] | None = None
    b_gate: Float[Array, " F"] | None = None
    b_down: Float[Array, " O"] | None = None


PreActivations = tuple[Float[Array, "M F"] | None, Float[Array, "M F"] | None]
"""(up, gate) in `Problem.dtype`: what every backend's forward returns besides out.

Each is None unless `Problem.saves_up` or `Problem.saves_gate`. The activation, in forward and backward, is computed
from these rounded values, so that both agree on it.
"""


class Residuals(NamedTuple):
    """What every backend's forward saves and every backend's backward takes."""

    inputs: Inputs
    pre_up: Float[Array, "M F"] | None
    pre_gate: Float[Array, "M F"] | None

"""The parity of `mlp` and `linear`: a table of cases, the oracle and the yardstick.

The oracle is the `reference` backend in float64, the yardstick the formula in the dtype under test with `jax.nn`'s
activations, differentiated by JAX.

Axis letters: M tokens, I input features, F hidden features, O output features.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fast_layers.ops.mlp import api, reference, xla
from fast_layers.ops.mlp.problem import Inputs, PreActivations, Problem, Residuals, Save
from fast_layers.testing._parity_suite import Answer, Expected, Suite, compiled_soon, draws_for, on_device


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of `mlp`, or of `linear` where `out_features` is None."""

    tokens: int = 256
    in_features: int = 128
    hidden_features: int = 256
    out_features: int | None = 128
    activation: str = "gelu_tanh"
    gated: bool = False
    bias: bool = False
    save: Save = "pre_activation"

    @property
    def draws(self) -> int:
        return draws_for(self.tokens * (self.out_features or self.hidden_features))


CASES: Mapping[str, Case] = {
    "gelu_tanh": Case(bias=True),
    "gelu": Case(activation="gelu", bias=True),
    # Without bias: rounding a sum that is about 0 may change its sign, and relu's derivative is a step there.
    "relu": Case(activation="relu"),
    "relu_squared": Case(activation="relu_squared", bias=True),
    "silu": Case(activation="silu", bias=True),
    "sigmoid": Case(activation="sigmoid", bias=True),
    "identity": Case(activation="identity", bias=True),
    "swiglu": Case(activation="silu", gated=True),
    "geglu with bias": Case(activation="gelu", gated=True, bias=True),
    "reglu": Case(activation="relu", gated=True),
    "linear": Case(out_features=None, activation="identity", bias=True),
    "linear, gelu_tanh": Case(out_features=None, bias=True),
    "linear, gated": Case(out_features=None, activation="silu", gated=True, bias=True),
    "1 token": Case(tokens=1, activation="silu", gated=True),
    "7 tokens": Case(tokens=7, bias=True),
    "130 tokens": Case(tokens=130, activation="silu", gated=True, bias=True),
    "1000 tokens": Case(tokens=1000, bias=True),
    "multiples of 8": Case(130, 72, 136, 40, "silu", gated=True, bias=True),
    "odd features": Case(130, 33, 65, 17, bias=True),
    "wide": Case(512, 256, 1408, 256, "silu", gated=True),
    "saving inputs": Case(activation="silu", gated=True, bias=True, save="inputs"),
}
"""The whole table, by name: what a backend must either compute within the limit or refuse with a reason."""

QUICK = ("gelu_tanh", "swiglu", "7 tokens", "linear, gated")
_ALSO_FLOAT16 = frozenset({"gelu_tanh", "swiglu", "130 tokens"})

_PLAIN: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "identity": lambda x: x,
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
}


@dataclasses.dataclass(frozen=True)
class _Draw:
    problem: Problem
    inputs: Inputs
    d_out: jax.Array

    @property
    def operands(self) -> tuple[Inputs]:
        return (self.inputs,)

    @property
    def cotangents(self) -> tuple[jax.Array]:
        return (self.d_out,)

    def residuals(self, returned: tuple[jax.Array, PreActivations]) -> Residuals:
        return Residuals(self.inputs, *returned[1])

    def outputs(self, returned: tuple[jax.Array, PreActivations]) -> dict[str, Any]:
        out, (pre_up, pre_gate) = returned
        return _present({"out": out, "pre_up": pre_up, "pre_gate": pre_gate})

    def gradients(self, returned: Inputs) -> dict[str, Any]:
        return _present({f"d{name}": x for name, x in returned._asdict().items()})

    @classmethod
    def of(cls, case: Case, dtype: Any, index: int) -> _Draw:
        c = case
        rng = np.random.default_rng(index)

        def normal(*shape: int, scale: float = 1.0):
            return on_device(scale * rng.normal(size=shape), dtype)

        def kernel(rows: int, columns: int):
            return normal(rows, columns, scale=1 / math.sqrt(rows))

        out_features = c.out_features
        inputs = Inputs(
            x=normal(c.tokens, c.in_features),
            w_up=kernel(c.in_features, c.hidden_features),
            w_gate=kernel(c.in_features, c.hidden_features) if c.gated else None,
            w_down=None if out_features is None else kernel(c.hidden_features, out_features),
            b_up=normal(c.hidden_features) if c.bias else None,
            b_gate=normal(c.hidden_features) if c.bias and c.gated else None,
            b_down=normal(out_features) if c.bias and out_features is not None else None,
        )
        problem = api.problem_of(inputs, activation=c.activation, save=c.save)
        return cls(problem, inputs, normal(c.tokens, out_features or c.hidden_features))


def _present(named: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in named.items() if x is not None}


def _expected(draws: list[_Draw]) -> Expected:
    problem = draws[0].problem
    wide_problem = dataclasses.replace(problem, dtype=jnp.dtype(jnp.float64))

    def answer_by(forward: Callable[[Inputs], Any], dtype: Any):
        @compiled_soon
        def call(inputs, d_out):
            inputs, d_out = jax.tree.map(lambda x: x.astype(dtype), (inputs, d_out))
            out, pull, saved = jax.vjp(forward, inputs, has_aux=True)
            return (out, saved), pull(d_out)[0]

        def answer(draw: _Draw) -> Answer:
            returned, grads = jax.device_get(call(draw.inputs, draw.d_out))
            return Answer(draw.outputs(returned), draw.gradients(grads))

        return answer

    by_formula = answer_by(functools.partial(reference.forward, wide_problem), jnp.float64)
    by_layers = answer_by(functools.partial(_plain, problem), problem.dtype)
    with jax.enable_x64(True):
        oracle = [by_formula(draw) for draw in draws]
    plain = [by_layers(draw) for draw in draws]
    return Expected(oracle, (plain,))


def _plain(problem: Problem, inputs: Inputs) -> tuple[jax.Array, PreActivations]:
    x, w_up, w_gate, w_down, b_up, b_gate, b_down = inputs

    def affine(x, w, b):
        return x @ w if b is None else x @ w + b[None]

    up = affine(x, w_up, b_up)
    gate = None if w_gate is None else affine(x, w_gate, b_gate)
    activate = _PLAIN[problem.activation]
    out = activate(up) if gate is None else activate(gate) * up
    if w_down is not None:
        out = affine(out, w_down, b_down)
    return out, (up if problem.saves_up else None, gate if problem.saves_gate else None)


def _typical_problem() -> Problem:
    tokens, features, hidden = 8192, 2048, 5504

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    up, down = array(features, hidden), array(hidden, features)
    inputs = Inputs(array(tokens, features), w_up=up, w_gate=up, w_down=down)
    return api.problem_of(inputs, activation="silu")


SUITE = Suite(
    op=api.OP,
    backends=lambda: api.BACKENDS,
    typical=_typical_problem,
    cases=CASES,
    quick=QUICK,
    also_float16=_ALSO_FLOAT16,
    draw=_Draw.of,
    expect=_expected,
    plain_forward=xla.forward,
)

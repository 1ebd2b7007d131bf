"""The parity of `gated_rms_norm`: a table of cases, the oracle and the yardstick.

The oracle is the `reference` backend in float64. The yardstick gates and scales in the dtype under test and normalises
in float32, as models' own code does, and is differentiated by JAX.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fast_layers.ops.gated_norm import api, reference, xla
from fast_layers.ops.gated_norm.problem import Inputs, Problem
from fast_layers.testing._parity_suite import Expected, Suite, answers_by, draws_for, on_device


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of `gated_rms_norm`; the arrays follow from the shapes, the dtype and the draw."""

    rows: tuple[int, ...] = (256,)
    features: int = 256
    group_size: int | None = None
    eps: float = 1e-5
    norm_before_gate: bool = False

    @property
    def draws(self) -> int:
        return draws_for(int(np.prod(self.rows)) * self.features)


CASES: Mapping[str, Case] = {
    "as in Mamba-2": Case(),
    "norm before gate": Case(norm_before_gate=True),
    "groups": Case(group_size=64),
    "groups, norm before gate": Case(group_size=64, norm_before_gate=True),
    "groups of 1": Case(group_size=1, eps=0.1),
    "large eps": Case(eps=0.5),
    "one row": Case(rows=()),
    "7 rows": Case(rows=(7,)),
    "rows of two axes": Case(rows=(3, 43)),
    "1000 rows": Case(rows=(1000,)),
    "odd features": Case(features=33, group_size=11),
    "wide": Case(rows=(64,), features=5120),
}
"""The whole table, by name: what a backend must either compute within the limit or refuse with a reason."""

QUICK = ("as in Mamba-2", "groups, norm before gate")
_ALSO_FLOAT16 = frozenset({"as in Mamba-2", "norm before gate"})


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

    def residuals(self, returned: jax.Array) -> Inputs:
        return self.inputs

    def outputs(self, returned: jax.Array) -> dict[str, Any]:
        return {"out": returned}

    def gradients(self, returned: Inputs) -> dict[str, Any]:
        return {f"d{name}": x for name, x in returned._asdict().items()}

    @classmethod
    def of(cls, case: Case, dtype: Any, index: int) -> _Draw:
        c = case
        rng = np.random.default_rng(index)
        y, z, d_out = (on_device(rng.normal(size=(*c.rows, c.features)), dtype) for _ in range(3))
        inputs = Inputs(y, z, on_device(rng.normal(size=c.features), dtype))
        return cls(api._problem(inputs, c.group_size, c.eps, c.norm_before_gate), inputs, d_out)


def _expected(draws: list[_Draw]) -> Expected:
    problem = draws[0].problem
    wide_problem = dataclasses.replace(problem, dtype=jnp.dtype(jnp.float64))

    answers = functools.partial(answers_by, draws=draws, cotangents_of=lambda draw: draw.d_out)
    with jax.enable_x64(True):
        oracle = answers(functools.partial(reference.forward, wide_problem), dtype=jnp.float64)
    return Expected(oracle, (answers(functools.partial(_plain, problem), dtype=problem.dtype),))


def _plain(p: Problem, inputs: Inputs) -> jax.Array:
    y, z, weight = inputs
    gate = jax.nn.silu(z)
    x = y if p.norm_before_gate else y * gate
    groups = x.astype(jnp.float32).reshape(*p.rows, -1, p.group_size)
    groups = groups * lax.rsqrt(jnp.mean(jnp.square(groups), -1, keepdims=True) + p.eps)
    out = groups.reshape(x.shape).astype(p.dtype) * jnp.broadcast_to(weight, x.shape)
    return out * gate if p.norm_before_gate else out


def _typical_problem() -> Problem:
    """Of the 2.7B Mamba-2."""
    rows, features = (4, 2048), 5120

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    y = array(*rows, features)
    return api._problem(Inputs(y, y, array(features)), None, 1e-5, False)


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

"""The parity of `causal_conv1d`: a table of cases, the oracle and the yardstick.

The oracle is the `reference` backend in float64. The yardstick convolves each document by itself, rounds to the dtype
under test before the activation as well as after it, and is differentiated by JAX.

Axis letters: B examples, L positions, C channels, W taps.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fast_layers.ops.conv1d import api, reference, xla
from fast_layers.ops.conv1d.problem import Aux, Inputs, Outputs, Problem
from fast_layers.testing._parity_suite import Expected, Suite, answers_by, draws_for, on_device


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of `causal_conv1d`; the arrays follow from the shapes, the dtype and the draw."""

    batch: int = 2
    length: int = 150
    channels: int = 128
    width: int = 4
    activation: str | None = "silu"
    bias: bool = True
    initial_state: bool = False
    final_state: bool = False
    documents: tuple[int, ...] | None = None
    """Their lengths, the same in all examples."""

    @property
    def draws(self) -> int:
        return draws_for(self.batch * self.length * self.channels)


CASES: Mapping[str, Case] = {
    "as in Mamba": Case(),
    "no activation": Case(activation=None),
    "no bias": Case(bias=False),
    "1 tap": Case(width=1),
    "2 taps": Case(width=2, initial_state=True),
    "7 taps": Case(width=7, initial_state=True, final_state=True),
    "1 position": Case(length=1, initial_state=True, final_state=True),
    "2 positions": Case(length=2, initial_state=True, final_state=True),
    "129 positions": Case(length=129),
    "1000 positions": Case(length=1000),
    "odd channels": Case(channels=33),
    "many channels": Case(channels=768),
    "states": Case(initial_state=True, final_state=True),
    "documents": Case(documents=(37, 1, 2, 110), initial_state=True, final_state=True),
    "a short last document": Case(documents=(148, 2), final_state=True),
}
"""The whole table, by name: what a backend must either compute within the limit or refuse with a reason."""

QUICK = ("documents",)
_ALSO_FLOAT16 = frozenset({"as in Mamba", "states"})


@dataclasses.dataclass(frozen=True)
class _Draw:
    case: Case
    problem: Problem
    inputs: Inputs
    aux: Aux
    d_outputs: Outputs

    @property
    def operands(self) -> tuple[Inputs, Aux]:
        return self.inputs, self.aux

    @property
    def cotangents(self) -> tuple[Aux, Outputs]:
        """A backward takes `aux` between the operands, which are all its residuals, and the cotangents."""
        return self.aux, self.d_outputs

    def residuals(self, returned: Outputs) -> Inputs:
        return self.inputs

    def outputs(self, returned: Outputs) -> dict[str, Any]:
        return _present(returned._asdict())

    def gradients(self, returned: Inputs) -> dict[str, Any]:
        return _present({f"d{name}": x for name, x in returned._asdict().items()})

    @classmethod
    def of(cls, case: Case, dtype: Any, index: int) -> _Draw:
        c = case
        rng = np.random.default_rng(index)

        def normal(*shape: int):
            return on_device(rng.normal(size=shape), dtype)

        state = (c.batch, c.channels, c.width - 1)
        inputs = Inputs(
            x=normal(c.batch, c.length, c.channels),
            w=normal(c.width, c.channels),
            b=normal(c.channels) if c.bias else None,
            initial_state=normal(*state) if c.initial_state else None,
        )
        problem = Problem(
            batch=c.batch,
            length=c.length,
            channels=c.channels,
            width=c.width,
            dtype=jnp.dtype(dtype),
            activation=c.activation,
            bias=c.bias,
            segments=c.documents is not None,
            initial_state=c.initial_state,
            final_state=c.final_state,
        )
        aux = Aux()
        if c.documents is not None:
            # The first document sees all of the initial state.
            positions = [np.arange(length) + problem.history * (i == 0) for i, length in enumerate(c.documents)]
            aux = Aux(on_device(np.minimum(np.concatenate(positions), problem.history)[None], np.int32))
        d_state = normal(*state) if c.final_state else None
        return cls(c, problem, inputs, aux, Outputs(normal(c.batch, c.length, c.channels), d_state))


def _present(named: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in named.items() if x is not None}


def _expected(draws: list[_Draw]) -> Expected:
    case, problem = draws[0].case, draws[0].problem
    wide_problem = dataclasses.replace(problem, dtype=jnp.dtype(jnp.float64))

    answers = functools.partial(answers_by, draws=draws, cotangents_of=lambda draw: draw.d_outputs)
    with jax.enable_x64(True):
        oracle = answers(functools.partial(reference.forward, wide_problem), dtype=jnp.float64)
    return Expected(oracle, (answers(lambda inputs, aux: _plain(case, inputs), dtype=problem.dtype),))


def _plain(case: Case, inputs: Inputs) -> Outputs:
    dtype, history = inputs.x.dtype, case.width - 1
    none = jnp.zeros((case.batch, history, case.channels), dtype)
    before = none if inputs.initial_state is None else inputs.initial_state.swapaxes(1, 2)
    lengths = case.documents or (case.length,)
    last, outs = none, []
    for document in jnp.split(inputs.x, np.cumsum(lengths)[:-1], axis=1):
        row = jnp.concatenate([before, document], axis=1)
        windows = jnp.stack([row[:, i : i + document.shape[1]] for i in range(case.width)], axis=2)
        total = (windows.astype(jnp.float32) * inputs.w.astype(jnp.float32)[None, None]).sum(2)
        if inputs.b is not None:
            total += inputs.b.astype(jnp.float32)[None, None]
        total = total.astype(dtype)
        outs.append(total if case.activation is None else jax.nn.silu(total))
        before, last = none, row[:, document.shape[1] :]
    return Outputs(jnp.concatenate(outs, axis=1), last.swapaxes(1, 2) if case.final_state else None)


def _typical_problem() -> Problem:
    """Of the 2.7B Mamba-2: x, B and C side by side."""
    channels = 2 * 2560 + 2 * 128
    return Problem(
        batch=4, length=2048, channels=channels, width=4, dtype=jnp.dtype(jnp.bfloat16), activation="silu", bias=True
    )


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

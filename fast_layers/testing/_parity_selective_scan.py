"""The parity of `selective_scan`: a table of cases, the oracle and the yardstick.

The oracle is the `reference` backend, token by token, in float64. The yardsticks are the same in the accumulator's
dtype, and the scan as a sum over all pairs of tokens, state by state, which shares no chunk and no recurrence with the
backends; both are differentiated by JAX.

Axis letters: B batch, L tokens (`q` the reading, `s` the written one), D channels, N state size.
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

from fast_layers.ops.selective_scan import api, recurrence
from fast_layers.ops.selective_scan.problem import Aux, Inputs, Problem, Residuals, Scanned
from fast_layers.ops.ssd.check import chunk_size
from fast_layers.testing._parity_ssd import FEWEST_DRAWS, ScanDraw, document_numbers, draw_steps
from fast_layers.testing._parity_suite import Expected, Suite, answers_by, draws_for, on_device


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of `selective_scan`; the arrays follow from the shapes, the dtype and the draw."""

    batch: int = 2
    length: int = 70
    channels: int = 24
    groups: int = 1
    state_dim: int = 16
    skip: bool = False
    gated: bool = False
    softplus: bool = False
    """With a bias, as Mamba has it."""
    initial_state: bool = False
    documents: tuple[int, ...] | None = None
    """Their lengths, the same in all examples."""
    chunk: int | None = None

    @property
    def draws(self) -> int:
        return max(FEWEST_DRAWS, draws_for(self.batch * self.length * self.channels))


CASES: Mapping[str, Case] = {
    "as in Mamba": Case(skip=True, gated=True, softplus=True),
    "scan only": Case(),
    "groups": Case(groups=3),
    "initial state": Case(initial_state=True),
    "documents": Case(documents=(17, 1, 40, 12), initial_state=True),
    "1 token": Case(length=1, softplus=True, initial_state=True),
    "64 tokens": Case(length=64),
    "65 tokens": Case(length=65),
    "400 tokens": Case(batch=1, length=400, channels=8, skip=True, softplus=True),
    "odd sizes": Case(channels=7, state_dim=3, skip=True),
    "chunks of 16": Case(chunk=16, documents=(33, 37)),
    "everything": Case(
        groups=2, skip=True, gated=True, softplus=True, initial_state=True, documents=(30, 1, 39), chunk=32
    ),
}
"""The whole table, by name: what a backend must either compute within the limit or refuse with a reason."""

QUICK = ("as in Mamba", "documents")
_ALSO_FLOAT16 = frozenset({"as in Mamba", "everything"})


class _Draw(ScanDraw):
    def residuals(self, returned: Scanned) -> Residuals:
        return Residuals(self.inputs, self.aux)

    @classmethod
    def of(cls, case: Case, dtype: Any, index: int) -> _Draw:
        c = case
        rng = np.random.default_rng(index)

        def normal(*shape: int, dtype: Any = dtype):
            return on_device(rng.normal(size=shape), dtype)

        # What concerns decay is in float32 also beside 16-bit activations, as in Mamba.
        wide = functools.partial(on_device, dtype=jnp.float32)
        rows, state = (c.batch, c.length, c.channels), (c.batch, c.channels, c.state_dim)
        dt, bias = draw_steps(rng, rows, c.softplus)
        inputs = Inputs(
            x=normal(*rows),
            dt=wide(dt),
            A=wide(-rng.uniform(1, 16, (c.channels, c.state_dim))),
            B=normal(c.batch, c.length, c.groups, c.state_dim),
            C=normal(c.batch, c.length, c.groups, c.state_dim),
            D=normal(c.channels, dtype=jnp.float32) if c.skip else None,
            z=normal(*rows) if c.gated else None,
            dt_bias=wide(bias) if c.softplus else None,
            initial_state=normal(*state, dtype=jnp.float32) if c.initial_state else None,
        )
        aux = Aux(document_numbers(c.documents, rows[:2]))
        problem = _problem(inputs, aux, c)
        return cls(problem, inputs, aux, normal(*rows), normal(*state, dtype=jnp.float32))


def _problem(inputs: Inputs, aux: Aux, case: Case) -> Problem:
    return Problem.of(inputs, aux, chunk_size(case.chunk, api.DEFAULT_CHUNK, case.length), case.softplus)


def _expected(draws: list[_Draw]) -> Expected:
    problem = draws[0].problem
    wide_problem = dataclasses.replace(problem, dtype=jnp.dtype(jnp.float64))

    answers = functools.partial(answers_by, draws=draws, cotangents_of=lambda draw: draw.cotangents)
    with jax.enable_x64(True):
        oracle = answers(functools.partial(recurrence.reference, wide_problem), dtype=jnp.float64)
    by_token, by_pairs = (answers(functools.partial(forward, problem)) for forward in (recurrence.reference, _plain))
    return Expected(oracle, (by_token, by_pairs))


def _plain(p: Problem, inputs: Inputs, aux: Aux) -> Scanned:
    """All pairs of tokens, and the final state as a sum over all; in float32 from operands in their dtype."""
    wide = jax.tree.map(lambda v: v.astype(jnp.float32), inputs)
    x, A, D, initial = wide.x, wide.A, wide.D, wide.initial_state
    B, C = (jnp.repeat(v, p.channels // p.groups, axis=2) for v in (wide.B, wide.C))  # [B, L, D, N]
    dt = wide.dt if wide.dt_bias is None else wide.dt + wide.dt_bias
    dt = jax.nn.softplus(dt) if p.dt_softplus else dt
    document = jnp.zeros((p.batch, p.length), int) if aux.document is None else aux.document
    visible = (document[:, :, None] == document[:, None, :]) & jnp.tri(p.length, dtype=bool)
    # Sums within a document: over all tokens they grow, and their differences lose digits.
    since_start = jnp.einsum("bqs,bsd->bqd", visible.astype(dt.dtype), dt, precision="highest")
    between = since_start[:, :, None] - since_start[:, None]  # [B, q, s, D]
    entered = document == document[:, :1]

    def one_state(out, of_state):
        rate, written, read, start = of_state  # [D], [B, L, D], [B, L, D], [B, D]
        decays = jnp.exp(jnp.where(visible[..., None], between * rate, -jnp.inf))
        states = (decays * written[:, None]).sum(2)
        if start is not None:
            states += jnp.where(entered[..., None], jnp.exp(since_start * rate), 0) * start[:, None]
        return out + read * states, states[:, -1]

    written = (dt * x)[..., None] * B
    by_state = A.T, *(jnp.moveaxis(v, -1, 0) for v in (written, C))
    start = None if initial is None else jnp.moveaxis(initial, -1, 0)
    out, final = lax.scan(jax.checkpoint(one_state), jnp.zeros_like(x), (*by_state, start))
    out = out if D is None else out + D * x
    out = out if wide.z is None else out * jax.nn.silu(wide.z)
    return Scanned(out.astype(p.dtype), jnp.moveaxis(final, 0, -1))


def _typical_problem() -> Problem:
    """Of the 2.8B Mamba."""
    batch, length, channels, state_dim = 4, 2048, 5120, 16

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    per_channel = array(channels, dtype=jnp.float32)
    x, by_group = array(batch, length, channels), array(batch, length, 1, state_dim)
    inputs = Inputs(
        x,
        array(*x.shape, dtype=jnp.float32),
        array(channels, state_dim, dtype=jnp.float32),
        by_group,
        by_group,
        D=per_channel,
        z=x,
        dt_bias=per_channel,
    )
    return _problem(inputs, Aux(), Case(length=length, softplus=True))


SUITE = Suite(
    op=api.OP,
    backends=lambda: api.BACKENDS,
    typical=_typical_problem,
    cases=CASES,
    quick=QUICK,
    also_float16=_ALSO_FLOAT16,
    draw=_Draw.of,
    expect=_expected,
    plain_forward=recurrence.chunked,
)

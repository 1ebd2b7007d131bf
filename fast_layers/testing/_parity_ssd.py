"""The parity of `ssd`: a table of cases, the oracle and the yardstick.

The oracle is the `reference` backend, the recurrence, in float64. The yardstick is the scan as one masked matmul over
all tokens, as attention is, with operands rounded to the dtype under test and differentiated by JAX; it shares no
chunk and no state with the backends.

Axis letters: B batch, L tokens (`q` the reading, `s` the written one), H heads, P channels of a head, G groups, N state
size.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fast_layers.ops.ssd import api, check, reference, xla
from fast_layers.ops.ssd.problem import Aux, Inputs, Problem, Residuals, Scanned
from fast_layers.testing._parity_suite import Expected, Suite, answers_by, draws_for, on_device

# A and D have one gradient for each head: few numbers, however long the rows.
FEWEST_DRAWS = 6


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of `ssd`; the arrays follow from the shapes, the dtype and the draw."""

    batch: int = 2
    length: int = 150
    heads: int = 4
    head_dim: int = 64
    groups: int = 1
    state_dim: int = 64
    skip: Literal["head", "channel"] | None = None
    gated: bool = False
    softplus: bool = False
    """With a bias, as Mamba-2 has it."""
    dt_limit: tuple[float, float] = (0.0, math.inf)
    initial_state: bool = False
    documents: tuple[int, ...] | None = None
    """Their lengths, the same in all examples."""
    chunk: int | None = None
    forgetting: Literal["usual", "slow", "at once"] = "usual"
    """A token leaves 0.2 to 0.999 of the state; all but 1e-5 or less; or, every tenth or so, nothing."""

    @property
    def draws(self) -> int:
        return max(FEWEST_DRAWS, draws_for(self.batch * self.length * self.heads * self.head_dim))


CASES: Mapping[str, Case] = {
    "as in Mamba-2": Case(skip="head", softplus=True),
    "scan only": Case(),
    "gate": Case(skip="channel", gated=True),
    "groups": Case(heads=6, groups=3),
    "a group for each head": Case(heads=3, groups=3),
    "initial state": Case(initial_state=True),
    "documents": Case(documents=(37, 27, 64, 22), initial_state=True),
    "1 token": Case(length=1, softplus=True, initial_state=True),
    "7 tokens": Case(length=7, initial_state=True),
    "64 tokens": Case(length=64),
    "65 tokens": Case(length=65),
    "1000 tokens": Case(batch=1, length=1000, skip="head", softplus=True),
    "heads of 32, state of 16": Case(head_dim=32, state_dim=16),
    "heads of 64, state of 128": Case(state_dim=128, skip="head", softplus=True),
    "heads of 128": Case(heads=2, head_dim=128),
    "odd sizes": Case(heads=3, head_dim=19, state_dim=33, skip="head"),
    "chunks of 32": Case(chunk=32, documents=(37, 113)),
    "limited steps": Case(softplus=True, dt_limit=(0.01, 0.05)),
    "forgetting slowly": Case(forgetting="slow", initial_state=True),
    "forgetting at once": Case(forgetting="at once", initial_state=True),
    "everything": Case(
        heads=6,
        groups=2,
        skip="channel",
        gated=True,
        softplus=True,
        dt_limit=(0.0, 0.09),
        initial_state=True,
        documents=(64, 1, 85),
    ),
}
"""The whole table, by name: what a backend must either compute within the limit or refuse with a reason."""

QUICK = ("heads of 64, state of 128", "documents")
"""The first has the sizes of the published Mamba-2 models' heads, for `python -m fast_layers doctor`."""
_ALSO_FLOAT16 = frozenset({"heads of 64, state of 128", "everything"})


@dataclasses.dataclass(frozen=True)
class ScanDraw:
    """One call of either scan; `Residuals` of both are the operands."""

    problem: Any
    inputs: Any
    aux: Any
    d_out: jax.Array
    d_final_state: jax.Array

    @property
    def operands(self) -> tuple[Any, Any]:
        return self.inputs, self.aux

    @property
    def cotangents(self) -> tuple[jax.Array, jax.Array]:
        return self.d_out, self.d_final_state

    def outputs(self, returned: Any) -> dict[str, Any]:
        return dict(zip(("out", "final_state"), returned, strict=True))

    def gradients(self, returned: Any) -> dict[str, Any]:
        return {f"d{name}": x for name, x in returned._asdict().items() if x is not None}


def draw_steps(rng: np.random.Generator, rows: tuple[int, ...], softplus: bool) -> tuple[np.ndarray, np.ndarray]:
    """(dt, dt_bias): steps of 1e-3 to 0.1, or what softplus makes such of together with the bias."""
    dt = np.exp(rng.uniform(math.log(1e-3), math.log(0.1), rows))
    bias = np.log(np.expm1(dt[0, 0]))
    return (np.log(np.expm1(dt)) - bias if softplus else dt), bias


def document_numbers(lengths: tuple[int, ...] | None, rows: tuple[int, int]) -> jax.Array | None:
    if lengths is None:
        return None
    return on_device(np.broadcast_to(np.repeat(np.arange(len(lengths)), lengths), rows), np.int32)


class _Draw(ScanDraw):
    def residuals(self, returned: Scanned) -> Residuals:
        return Residuals(self.inputs, self.aux)

    @classmethod
    def of(cls, case: Case, dtype: Any, index: int) -> _Draw:
        c = case
        rng = np.random.default_rng(index)

        def normal(*shape: int, dtype: Any = dtype):
            return on_device(rng.normal(size=shape), dtype)

        # What concerns decay is in float32 also beside 16-bit activations, as in Mamba-2.
        wide = functools.partial(on_device, dtype=jnp.float32)
        rows, state = (c.batch, c.length, c.heads), (c.batch, c.heads, c.head_dim, c.state_dim)
        dt, bias = draw_steps(rng, rows, c.softplus)
        rates = rng.uniform(*((1e-6, 1e-4) if c.forgetting == "slow" else (1, 16)), c.heads)
        if c.forgetting == "at once":
            dt = np.where(rng.random(rows) < 0.1, 50.0, dt)
        inputs = Inputs(
            x=normal(*rows, c.head_dim),
            dt=wide(dt),
            A=wide(-rates),
            B=normal(c.batch, c.length, c.groups, c.state_dim),
            C=normal(c.batch, c.length, c.groups, c.state_dim),
            D=None if c.skip is None else normal(*state[1 : 2 + (c.skip == "channel")], dtype=jnp.float32),
            z=normal(*rows, c.head_dim) if c.gated else None,
            dt_bias=wide(bias) if c.softplus else None,
            initial_state=normal(*state, dtype=jnp.float32) if c.initial_state else None,
        )
        aux = Aux(document_numbers(c.documents, rows[:2]))
        d_final_state = normal(*state, dtype=jnp.float32)
        return cls(_problem(inputs, aux, c), inputs, aux, normal(*rows, c.head_dim), d_final_state)


def _problem(inputs: Inputs, aux: Aux, case: Case) -> Problem:
    chunk = check.chunk_size(case.chunk, api.DEFAULT_CHUNK, case.length)
    return api._Options(chunk, case.softplus, case.dt_limit).problem(inputs, aux)


def _expected(draws: list[_Draw]) -> Expected:
    problem = draws[0].problem
    wide_problem = dataclasses.replace(problem, dtype=jnp.dtype(jnp.float64))

    answers = functools.partial(answers_by, draws=draws, cotangents_of=lambda draw: draw.cotangents)
    with jax.enable_x64(True):
        oracle = answers(functools.partial(reference.forward, wide_problem), dtype=jnp.float64)
    return Expected(oracle, (answers(functools.partial(_plain, problem)),))


def _plain(p: Problem, inputs: Inputs, aux: Aux) -> Scanned:
    """What one writes without thinking of memory: all pairs of tokens, and the final state as a sum over all."""
    x, dt, A, B, C, D, z, bias, initial = inputs
    product = functools.partial(_product, p.dtype)
    B, C = (jnp.repeat(v, p.heads_per_group, axis=2) for v in (B, C))
    dt = dt if bias is None else dt + bias
    dt = jax.nn.softplus(dt) if p.dt_softplus else dt
    dt = jnp.clip(dt, *p.dt_limit).swapaxes(1, 2)  # [B, H, L]
    document = jnp.zeros((p.batch, p.length), int) if aux.document is None else aux.document
    same = (document[:, :, None] == document[:, None, :])[:, None]
    visible = same & jnp.tri(p.length, dtype=bool)
    # Sums within a document: over all tokens they grow, and their differences lose digits.
    log_decay = dt * A[:, None]
    since_start = jnp.einsum("bqs,bhs->bhq", visible[:, 0].astype(dt.dtype), log_decay, precision="highest")
    between = jnp.where(visible, since_start[..., :, None] - since_start[..., None, :], -jnp.inf)
    decays = jnp.exp(between)  # [B, H, q, s]
    written = decays * dt[..., None, :]
    out = product("bhqs,bshp->bqhp", written * product("bqhn,bshn->bhqs", C, B), x)
    final = product("bshp,bshn->bhpn", written[..., -1, :].swapaxes(1, 2)[..., None] * x, B)
    if initial is not None:
        entered = jnp.where(document[:, None] == document[:, None, :1], jnp.exp(since_start), 0)  # [B, H, L]
        out += entered.swapaxes(1, 2)[..., None] * product("bqhn,bhpn->bqhp", C, initial)
        final += entered[..., -1, None, None] * initial
    if D is not None:
        out += D.reshape(p.heads, -1) * x
    out = out if z is None else out * jax.nn.silu(z.astype(out.dtype))
    return Scanned(out.astype(p.dtype), final)


def _product(dtype: Any, subscripts: str, *operands: jax.Array) -> jax.Array:
    """An einsum of operands rounded to `dtype`, and of cotangents rounded likewise, with sums in float32.

    Not an einsum in `dtype`: XLA's CPU has none for every layout.
    """
    info = jnp.finfo(dtype)
    rounded = (lax.reduce_precision(x.astype(jnp.float32), info.nexp, info.nmant) for x in operands)
    return jnp.einsum(subscripts, *rounded, precision="highest")


def _typical_problem() -> Problem:
    """Of the 2.7B Mamba-2."""
    batch, length, heads, head_dim, state_dim = 4, 2048, 80, 64, 128

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    per_head = array(heads, dtype=jnp.float32)
    x, by_group = array(batch, length, heads, head_dim), array(batch, length, 1, state_dim)
    dt = array(batch, length, heads, dtype=jnp.float32)
    inputs = Inputs(x, dt, per_head, by_group, by_group, D=per_head, dt_bias=per_head)
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
    plain_forward=xla.forward,
)

"""The Hopper scan in the simulator, as it is and with one thing changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from ops.ssd.cases import Built, Case, build

from fast_layers.ops.ssd import api, check, hopper_fwd, xla
from fast_layers.ops.ssd.problem import Aux, Inputs, Problem, documents
from fast_layers.testing import Simulation, simulate
from simulator.attention import StandIn


def problem_of(built: Built) -> tuple[Problem, Inputs, Aux]:
    case = built.case
    inputs = check.sequence(*built.operands)
    ids = check.segment_ids(built.segment_ids, case.batch, case.length)
    aux = Aux(None if ids is None else documents(ids))
    options = api._Options(check.chunk_size(None, api.DEFAULT_CHUNK, case.length), case.softplus, case.limit)
    return options.problem(inputs, aux), inputs, aux


def simulated(case: Case, dtype: Any = jnp.bfloat16, tiles: Any = None, draw: int = 0) -> tuple[Built, Simulation]:
    built = build(case, dtype, draw)
    problem, inputs, aux = problem_of(built)
    return built, simulate(lambda inputs, aux: hopper_fwd.scan(problem, inputs, aux, tiles), inputs, aux)


@contextlib.contextmanager
def changed(stand_in: StandIn, *patches: tuple[Any, str, Any]) -> Iterator[StandIn]:
    """The kernel traced anew with `stand_in` for `plgpu`, and attributes replaced."""
    kernel: Any = hopper_fwd
    with pytest.MonkeyPatch.context() as patch:
        # Without its jit, which would give back what was traced before.
        patch.setattr(hopper_fwd, "_launch", kernel._launch.__wrapped__)
        patch.setattr(hopper_fwd, "plgpu", stand_in)
        patch.setattr(hopper_fwd, "_Scratch", stand_in.recording(hopper_fwd._Scratch))
        for target, name, value in patches:
            patch.setattr(target, name, value)
        yield stand_in


def plain(built: Built) -> tuple[Any, Any]:
    """What a framework's own code does: the chunked form of the paper, its matmuls in the inputs' dtype."""
    problem, inputs, aux = problem_of(built)
    with jax.default_matmul_precision("highest"):
        return tuple(xla._forward(problem, problem.dtype, inputs, aux))

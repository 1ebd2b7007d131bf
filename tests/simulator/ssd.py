"""The Hopper scan in the simulator, both passes, as they are and with one thing changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from ops.ssd.cases import Built, Case, build

from fast_layers.ops.ssd import api, check, hopper_bwd, hopper_fwd, hopper_states, xla
from fast_layers.ops.ssd.problem import Aux, Inputs, Problem, Residuals, Scanned, documents
from fast_layers.testing import Simulation, _parity_ssd, simulate
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


def simulated_grad(
    case: Case, dtype: Any = jnp.bfloat16, draw: int = 0, timeout: float = 120.0, **tiles: Any
) -> tuple[Built, Simulation]:
    built = build(case, dtype, draw)
    problem, inputs, aux = problem_of(built)

    def grad(inputs, aux, *cotangents):
        return hopper_bwd.scan_grad(problem, Residuals(inputs, aux), *cotangents, **tiles)

    return built, simulate(grad, inputs, aux, built.d_out, built.d_final, timeout=timeout)


@contextlib.contextmanager
def changed(stand_in: StandIn, *patches: tuple[Any, str, Any], kernel: Any = hopper_fwd) -> Iterator[StandIn]:
    """The kernel of this module traced anew with `stand_in` for `plgpu`, and attributes replaced."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (hopper_fwd, hopper_states, hopper_bwd):
            # Without its jit, which would give back what was traced before.
            patch.setattr(module, "_launch", module._launch.__wrapped__)
        patch.setattr(kernel, "plgpu", stand_in)
        patch.setattr(kernel, "_Scratch", stand_in.recording(kernel._Scratch))
        for target, name, value in patches:
            patch.setattr(target, name, value)
        yield stand_in


def plain(built: Built) -> tuple[Any, Any]:
    """What a framework's own code does: the chunked form of the paper, its matmuls in the inputs' dtype."""
    problem, inputs, aux = problem_of(built)
    with jax.default_matmul_precision("highest"):
        return tuple(xla._forward(problem, problem.dtype, inputs, aux))


def plain_grads(built: Built) -> tuple[Inputs, Inputs]:
    """Of the chunked form; and, by JAX, of all pairs of tokens at once, where what comes back is rounded as well."""
    problem, inputs, aux = problem_of(built)
    with jax.default_matmul_precision("highest"):
        chunked = xla._backward(problem, problem.dtype, Residuals(inputs, aux), built.d_out, built.d_final)
    _, pull = jax.vjp(lambda inputs: _parity_ssd._plain(problem, inputs, aux), inputs)
    return chunked, pull(Scanned(jnp.asarray(built.d_out), jnp.asarray(built.d_final)))[0]

"""tests/gpu fails where a kernel refuses what it should take; no GPU is needed to tell which refusals these are."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from gpu import refusals

from fast_layers.arch import Arch
from fast_layers.dispatch import PASSES
from fast_layers.kernel_parts import automatic_axes
from fast_layers.testing.parity import SUITES

ON = {"hopper": Arch("cuda", "NVIDIA H200", (9, 0)), "blackwell": Arch("cuda", "NVIDIA B200", (10, 0))}


def _check(problem, suite):
    for backend in suite.backends():
        if backend.name in ON:
            arch = ON[backend.name]
            refusals.check(backend.name, arch, [backend.supports(problem, arch, pass_) for pass_ in PASSES])


@pytest.mark.parametrize("op", SUITES)
def test_what_layers_need_is_taken(op):
    _check(SUITES[op].typical(), SUITES[op])


@pytest.mark.exhaustive
@pytest.mark.parametrize("op", SUITES)
def test_only_what_is_documented_is_refused(op):
    suite = SUITES[op]
    for case in suite.cases.values():
        _check(suite.draw(case, jnp.dtype(jnp.bfloat16), 0).problem, suite)


def test_any_other_refusal_fails(monkeypatch):
    """As that of several GPUs, had the tests not been told to use the first."""
    monkeypatch.setattr(automatic_axes, "gpus_here", lambda: 2)
    with pytest.raises(pytest.fail.Exception, match=r"hopper must take this on .*, and refuses: several GPUs are here"):
        _check(SUITES["mlp"].typical(), SUITES["mlp"])
    with automatic_axes.on_one_device():
        _check(SUITES["mlp"].typical(), SUITES["mlp"])
    with pytest.raises(pytest.skip.Exception, match="of another make"):
        refusals.skip("hopper", ON["blackwell"], [None, "of another make"])
    with pytest.raises(pytest.skip.Exception, match="features in multiples"):
        refusals.skip("hopper", ON["hopper"], ["takes features in multiples of 8, got 33", None])

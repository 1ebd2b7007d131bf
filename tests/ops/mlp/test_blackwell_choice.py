"""Which calls the Blackwell backend of the MLP takes, and why not the others. Runs anywhere."""

from __future__ import annotations

import dataclasses

import pytest

from fast_layers.arch import Arch
from fast_layers.dispatch import PASSES, choose
from fast_layers.ops.mlp import blackwell_call
from fast_layers.ops.mlp.backends import BACKENDS
from ops.mlp.test_hopper_choice import H200, PROBLEM, REFUSED, TAKEN

B200, B300 = Arch("cuda", "NVIDIA B200", (10, 0)), Arch("cuda", "NVIDIA B300", (10, 3))


@pytest.mark.parametrize("fields", TAKEN.values(), ids=TAKEN)
@pytest.mark.parametrize("arch", [B200, B300], ids=lambda arch: arch.name)
def test_takes_both_passes_by_name(fields, arch):
    problem = dataclasses.replace(PROBLEM, **fields)
    for pass_ in PASSES:
        choice = choose(BACKENDS, problem, arch, pass_, wanted="blackwell")
        assert choice.backend is not None
        assert choice.backend.name == "blackwell"


def test_is_not_taken_unasked():
    """Until a GPU has run and timed it."""
    choice = choose(BACKENDS, PROBLEM, B200, "forward")
    assert choice.backend is not None
    assert choice.backend.name == "xla"
    assert "taken only by name" in dict(choice.refusals)["blackwell"]


@pytest.mark.parametrize(("fields", "words"), REFUSED.values(), ids=REFUSED)
def test_refuses_with_the_reason(fields, words):
    problem = dataclasses.replace(PROBLEM, **fields)
    for pass_ in PASSES:
        choice = choose(BACKENDS, problem, B200, pass_, wanted="blackwell")
        assert choice.backend is None
        assert words in dict(choice.refusals)["blackwell"]


@pytest.mark.parametrize("arch", [Arch("cpu"), Arch("cuda"), H200, Arch("cuda", "RTX PRO 6000", (12, 0))], ids=str)
def test_refuses_other_devices(arch):
    wanted = "needs an NVIDIA GPU of compute capability 10.0 (B200) or 10.3 (B300), got"
    for pass_ in PASSES:
        assert wanted in (blackwell_call.supports(PROBLEM, arch, pass_) or "")


def test_8_bits_need_longer_rows():
    problem = dataclasses.replace(PROBLEM, float8="e4m3")
    assert blackwell_call.supports(problem, B200, "forward") is None
    odd = dataclasses.replace(problem, hidden_features=264)
    wanted = "takes features in multiples of 16, got hidden_features=264; pad the weights"
    assert blackwell_call.supports(odd, B200, "forward") == wanted

"""The whole training step of examples/train_lm.py, compiled for GPUs that are not here, on whatever is here."""

from __future__ import annotations

import os

import jax
import pytest

from bench import memory
from fast_layers.testing import compile_all_for
from fast_layers.testing._deviceless_targets import TARGETS
from fast_layers.testing.deviceless import missing_wheels

pytestmark = [
    pytest.mark.deviceless,
    pytest.mark.skipif(bool(missing_wheels()) and not os.environ.get("CI"), reason=missing_wheels() or ""),
]

SMALL = memory.Config(
    layers=1,
    width=128,
    heads=2,
    kv_heads=1,
    mlp_width=256,
    seq_len=256,
    batch_size=2,
    accumulate=2,
    dtype="bfloat16",
    mlp="flax",
)
ATTENTION = {"attention_forward", "attention_backward"}


def test_a_small_step_with_blackwells_kernels():
    (report,) = compile_all_for("b200", [memory.step_of(SMALL, "blackwell")])
    assert report.failure is None, report.failure
    assert "attention_forward" in {kernel.name for kernel in report.kernels}
    assert len(report.kernels) > 1
    assert all(kernel.instructions["UTCHMMA"] for kernel in report.kernels)
    state_and_batch = memory.step_of(SMALL, None).shapes
    bytes_of = [sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) for tree in state_and_batch]
    assert report.argument_bytes == pytest.approx(sum(bytes_of), rel=0.1)
    assert report.result_bytes < 0.1 * bytes_of[0]  # the state's memory is taken over


def test_a_small_step_for_hopper_takes_its_kernels_unasked():
    (report,) = compile_all_for("h200", [memory.step_of(SMALL, None)])
    assert report.failure is None, report.failure
    assert {kernel.name for kernel in report.kernels} >= ATTENTION


@pytest.mark.exhaustive
@pytest.mark.parametrize("gpu", ["h200", "b200"])
def test_the_step_of_the_largest_preset_fits_its_gpu(gpu):
    for row in memory.rows([gpu], "1B", ["transformer"], mlp=False):
        assert row["failure"] is None, row
        assert row["total_bytes"] < TARGETS[gpu].memory_bytes
        ours = gpu == "h200" or row["backend"] == "blackwell"  # which is taken by name only
        assert {kernel["name"] for kernel in row["kernels"]} >= ATTENTION if ours else not row["kernels"]

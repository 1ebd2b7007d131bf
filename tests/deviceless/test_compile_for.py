"""Kernels compile for GPUs that are not here, and what is slow in them is reported."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import sys

import jax
import jax.numpy as jnp
import pytest
from simulator import kernels

import fast_layers
from deviceless import functions
from fast_layers.testing import Compilation, CompileError, CompileReport, compile_all_for, compile_for
from fast_layers.testing.deviceless import missing_wheels

# The wheels are for Linux x86_64 and a dependency group of their own; where CI is set they must be there.
pytestmark = [
    pytest.mark.deviceless,
    pytest.mark.skipif(bool(missing_wheels()) and not os.environ.get("CI"), reason=missing_wheels() or ""),
]


def bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


MATMUL = (bf16(128, 512), bf16(512, 64))
TWO_BLOCKS = (bf16(256, 512), bf16(512, 128))

HOPPER = {
    "healthy": Compilation(kernels.matmul, MATMUL),
    "by name": Compilation("simulator.kernels:discounted_sum", (bf16(64, 512), bf16(512, 64)), {"form": "stored"}),
    "fits": Compilation(functions.many_accumulators, (bf16(64, 64), bf16(64, 256)), {"count": 1}),
    "spills": Compilation(functions.many_accumulators, (bf16(64, 64), bf16(64, 256)), {"count": 3}),
    "serialised": Compilation(kernels.matmul, MATMUL, {"fault": "accumulator read in flight"}),
    "thrice": Compilation(functions.matmul_thrice, MATMUL),
    "no kernel": Compilation(functions.doubled, MATMUL[:1]),
    "targets": Compilation(functions.tell_targets, MATMUL[:1]),
    "leaves": Compilation(functions.leaves, MATMUL[:1]),
    "ends the process": Compilation(functions.ends_the_process, MATMUL[:1]),
    "not for Hopper": Compilation(kernels.two_block_matmul, TWO_BLOCKS),
}


@pytest.fixture(scope="module")
def hopper() -> dict[str, CompileReport]:
    return dict(zip(HOPPER, compile_all_for("h200", iter(HOPPER.values())), strict=True))


def test_healthy_kernel(hopper):
    kernel = hopper["healthy"].check().kernel
    assert not kernel.spills
    assert kernel.serialised_wgmma == ()
    assert kernel.name == "kernel"
    assert kernel.instructions["HGMMA"] >= 4
    assert 1000 > kernel.total_instructions > kernel.instructions["HGMMA"]
    assert 16 <= kernel.live_registers <= kernel.registers <= 168
    assert kernel.register_budgets == ()
    ring = kernels.SLOTS * (128 * 64 + 64 * 64) * 2
    assert kernel.smem_bytes == ring + 128 * 64 * 4 + 2 * kernels.SLOTS * 8
    assert kernel.tmem_columns == 0
    assert hopper["by name"].check().kernel.instructions["HGMMA"] >= 4


def test_spill_is_reported(hopper):
    assert not hopper["fits"].check().kernel.spills
    report = hopper["spills"]
    assert report.kernel.spills
    assert report.kernel.spill_store_bytes > 0
    assert report.kernel.local_stores > 0
    assert report.kernel.local_loads > 0
    with pytest.raises(CompileError, match=r"kernel: spills \d+ bytes of stores"):
        report.check()


def test_serialised_wgmma_is_reported(hopper):
    report = hopper["serialised"]
    assert report.kernel.serialised_wgmma[0].startswith("C7517: ")
    assert not report.kernel.spills
    with pytest.raises(CompileError, match="wgmma serialised, C7517"):
        report.check()


def test_a_kernel_is_reported_once_for_each_program(hopper):
    assert hopper["thrice"].check().kernel == hopper["healthy"].kernel


def test_function_without_kernels(hopper):
    report = hopper["no kernel"].check()
    assert report.kernels == ()
    with pytest.raises(CompileError, match="one kernel was expected, the function has none"):
        _ = report.kernel


def test_dispatch_sees_the_target(hopper):
    failure = hopper["targets"].failure
    assert "targets: cuda (NVIDIA H200, sm_90)\n" in failure
    assert "forward  on cuda (NVIDIA H200, sm_90)" in failure


def test_kernel_for_another_gpu_fails_alone(hopper):
    assert "tcgen05" in hopper["not for Hopper"].failure
    with pytest.raises(CompileError, match="for h200: "):
        hopper["not for Hopper"].check()


@pytest.mark.parametrize("gpu", ["b200", "b300"])
def test_blackwell(gpu):
    kernel = compile_for(gpu, kernels.two_block_matmul, *TWO_BLOCKS).check().kernel
    assert kernel.tmem_columns == 128
    assert kernel.instructions["UTCHMMA"] >= 4


def test_timeout():
    never, after = compile_all_for(
        "h100",
        [Compilation(functions.never_ends, MATMUL[:1]), Compilation(functions.doubled, MATMUL[:1])],
        timeout=6.0,
    )
    assert never.failure == "not compiled after 6 s"
    assert after.failure is None


def test_what_ends_its_process_fails_alone(hopper):
    assert hopper["leaves"].failure == "SystemExit: usage: a program"
    assert hopper["ends the process"].failure == "the process ended before it could report (exit code 3)"


def test_what_is_set_here_holds_where_it_is_compiled():
    with (
        fast_layers.use_backends(forbid="cudnn", reproducible=False),
        jax.enable_x64(True),
        jax.default_matmul_precision("highest"),
    ):
        failure = compile_for("h200", functions.tell_settings, jax.ShapeDtypeStruct((8,), jnp.float64)).failure or ""
    assert "forbid=frozenset({'cudnn'}) policy.reproducible=False" in failure
    assert "dtype=dtype('float64')" in failure
    assert "precision='highest'" in failure


@pytest.mark.parametrize("timeout", [0, "x", float("inf")])
def test_timeout_is_a_time(timeout):
    with pytest.raises(ValueError, match=f"timeout={timeout!r}: must be a positive number of seconds"):
        compile_all_for("h200", [HOPPER["no kernel"]], timeout=timeout)


@pytest.mark.parametrize("gpu", ["v100", ["h200"]], ids=str)
def test_unknown_gpu(gpu):
    message = re.escape(f"gpu={gpu!r}: must be one of 'h100', 'h200', 'b200', 'b300'")
    with pytest.raises(ValueError, match=message):
        compile_for(gpu, functions.doubled, bf16(8))


def test_function_must_be_importable():
    with pytest.raises(ValueError, match="Define the function at the top of a module"):
        compile_for("h200", lambda x: x, bf16(8))
    for given in ("deviceless.functions.doubled", 3):
        with pytest.raises(ValueError, match='"module:function"'):
            compile_for("h200", given, bf16(8))


def test_nothing_may_come_from_the_program_that_runs(monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "doubled", functions.doubled, raising=False)
    monkeypatch.setattr(functions.doubled, "__module__", "__main__")
    for given in (functions.doubled, functools.partial(functions.doubled), "__main__:doubled"):
        with pytest.raises(ValueError, match="is defined in the program that runs"):
            compile_for("h200", given, bf16(8))


def test_arguments_must_be_arrays():
    with pytest.raises(ValueError, match="3 is no array: give arrays"):
        compile_for("h200", functions.doubled, 3)


@pytest.mark.parametrize(
    ("compilations", "message"),
    [
        ([], "compilations is empty"),
        (iter([]), "compilations is empty"),
        ([3], "compilations has 3"),
        (HOPPER["no kernel"], r"a single Compilation: give a list"),
        ([Compilation(functions.doubled, bf16(8))], "shapes of a Compilation is of type ShapeDtypeStruct"),
        ([Compilation(functions.doubled, jnp.ones((1, 8)))], "shapes of a Compilation is of type"),
        ([Compilation(functions.doubled, (bf16(8),), [3])], "static of a Compilation is of type list"),
        ([Compilation(functions.doubled, (bf16(8),), donated=0)], "donated of a Compilation is of type int"),
    ],
    ids=["none", "none to come", "no compilation", "one", "one shape", "one array", "static", "donated"],
)
def test_what_is_to_be_compiled_must_be_there(compilations, message):
    with pytest.raises(ValueError, match=message):
        compile_all_for("h200", compilations)


@pytest.mark.parametrize("donated", [(1,), (0, -1), ("x",)])
def test_donated_positions_must_be_there(donated):
    with pytest.raises(ValueError, match="are not among the 1 positions of shapes"):
        compile_all_for("h200", [Compilation(functions.doubled, (bf16(8),), donated=donated)])


def test_missing_or_foreign_wheels(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(ValueError, match=r"wheel jax-cuda13-plugin, which is not installed.*nvidia-cuda-nvdisasm"):
        compile_for("h200", functions.doubled, bf16(8))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1")
    with pytest.raises(ValueError, match=r"jax-cuda13-plugin is 0\.1, and jax is"):
        compile_for("h200", functions.doubled, bf16(8))

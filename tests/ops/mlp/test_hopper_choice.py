"""Which calls the Hopper backend of the MLP takes, why not the others, and that asking costs nothing. Runs anywhere."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from fast_layers.arch import Arch
from fast_layers.dispatch import PASSES, Pass, choose
from fast_layers.kernel_parts import automatic_axes
from fast_layers.ops.mlp import hopper_call
from fast_layers.ops.mlp.backends import BACKENDS
from fast_layers.ops.mlp.problem import Problem

H100, H200 = Arch("cuda", "NVIDIA H100 80GB HBM3", (9, 0)), Arch("cuda", "NVIDIA H200", (9, 0))
PROBLEM = Problem(512, 64, 256, 64, jnp.dtype(jnp.bfloat16), "gelu_tanh")

TAKEN = {
    "plain": {},
    "float16": {"dtype": jnp.dtype(jnp.float16)},
    "gated, with biases": {"gated": True, "up_bias": True, "gate_bias": True, "down_bias": True},
    "inputs saved": {"save": "inputs"},
    "linear": {"out_features": None},
    "bare matmul": {"out_features": None, "activation": "identity"},
    "one token": {"tokens": 1},
    "odd tokens": {"tokens": 131},
    "features in eights": {"in_features": 8, "hidden_features": 72, "out_features": 200},
    "default precision": {"precision": jax.lax.Precision.DEFAULT},
}
REFUSED = {
    "float32": ({"dtype": jnp.dtype(jnp.float32)}, "takes bfloat16 and float16, got float32; cast the inputs"),
    "precision": ({"precision": jax.lax.Precision.HIGHEST}, "has no precision"),
    "odd features": ({"in_features": 60}, "in multiples of 8, got in_features=60; pad the weights"),
    "odd hidden and out features": (
        {"hidden_features": 257, "out_features": 1},
        "got hidden_features=257, out_features=1",
    ),
}


@pytest.mark.parametrize("fields", TAKEN.values(), ids=TAKEN)
@pytest.mark.parametrize("arch", [H100, H200], ids=lambda arch: arch.name)
def test_takes_both_passes_by_name(fields, arch):
    problem = dataclasses.replace(PROBLEM, **fields)
    for pass_ in PASSES:
        assert hopper_call.supports(problem, arch, pass_) is None
        choice = choose(BACKENDS, problem, arch, pass_, wanted="hopper")
        assert choice.backend is not None
        assert choice.backend.name == "hopper"


MEASURED = dataclasses.replace(PROBLEM, tokens=8192, in_features=2048, hidden_features=8192, out_features=2048)
TIMED: list[tuple[int, int, bool, tuple[Pass, ...]]] = [
    (2048, 8192, False, PASSES),
    (2048, 512, False, PASSES),
    (2048, 512, True, PASSES),
    (2048, 16_384, True, PASSES),
    (4096, 512, False, PASSES),
    (4096, 2048, False, PASSES),
    (4096, 8192, False, PASSES),
    (4096, 8192, True, PASSES),
    (8192, 8192, True, ("forward",)),
    (8192, 16_384, True, ("forward",)),
    (4096, 1, True, ("forward",)),
    (4096, 64, True, ("forward",)),
    (4096, 64, False, ("forward",)),
]
"""Widths in and out, tokens, whether gated."""
LEFT_TO_XLA = {
    "linear": ({"out_features": None}, PASSES, "without a product down"),
    "float16": ({"dtype": jnp.dtype(jnp.float16)}, PASSES, "has not been timed in float16"),
    "few tokens": ({"tokens": 511}, PASSES, "tokens, or was not timed there, got 511"),
    "thousands of tokens, wide": ({"tokens": 8191, "in_features": 4096}, PASSES, "4096 and 2048 below 8192 tokens"),
    "between rounds": (
        {"tokens": 640, "in_features": 4096, "out_features": 4096},
        PASSES,
        "4096 and 4096 below 8192 tokens",
    ),
    "narrow": (
        {"in_features": 1024},
        PASSES,
        "at widths of 2048 to 4096, or was not timed there, got 1024 in and 2048 out",
    ),
    "wide": ({"out_features": 8192}, PASSES, "at widths of 2048 to 4096"),
    "the backward of a wide one": (
        {"gated": True, "in_features": 8192, "hidden_features": 21_888, "out_features": 8192},
        ("backward",),
        "XLA's backward with a gate but at widths of 2048 to 4096",
    ),
    "wide, few tokens": (
        {"gated": True, "in_features": 8192, "hidden_features": 21_888, "out_features": 8192, "tokens": 8191},
        PASSES,
        "got ",
    ),
    "between widths": (
        {"gated": True, "in_features": 5120, "hidden_features": 13_824, "out_features": 5120},
        PASSES,
        "2048 to 4096",
    ),
    "wide on one side": ({"gated": True, "out_features": 8192}, PASSES, "got 2048 in and 8192 out"),
    "wider than any": ({"gated": True, "in_features": 8200, "hidden_features": 21_888}, PASSES, "got 8200 in"),
    "narrow inside": ({"hidden_features": 4088}, PASSES, "from twice the width on, got 4088 for 2048"),
    "gated and wide": (
        {"gated": True, "in_features": 4096, "out_features": 4096, "tokens": 8191},
        PASSES,
        "with a gate at widths of 4096 and 4096",
    ),
    "a token without a gate": (
        {"in_features": 4096, "out_features": 4096, "tokens": 16},
        PASSES,
        "without a gate at widths of 4096 and 4096",
    ),
    "decoding at another width": ({"out_features": 4096, "tokens": 64}, PASSES, "below 8192 tokens"),
    "the backward of few tokens": (
        {"gated": True, "in_features": 4096, "out_features": 4096, "tokens": 64},
        ("backward",),
        "XLA's backward",
    ),
}


@pytest.mark.parametrize("arch", [H100, H200], ids=lambda arch: arch.name)
def test_is_taken_where_it_was_timed(arch):
    for width, tokens, gated, passes in TIMED:
        sizes = {"tokens": tokens, "in_features": width, "hidden_features": 4 * width, "out_features": width}
        problem = dataclasses.replace(MEASURED, gated=gated, **sizes)
        for pass_ in passes:
            choice = choose(BACKENDS, problem, arch, pass_)
            assert choice.backend is not None
            assert choice.backend.name == "hopper"


def test_a_bare_matmuls_forward_is_taken_at_the_sizes_that_were_timed():
    square = dataclasses.replace(
        MEASURED, tokens=4096, in_features=4096, hidden_features=8184, out_features=None, activation="identity"
    )
    others = {"tokens": 4095, "in_features": 8192, "hidden_features": 2048, "up_bias": True, "activation": "relu"}
    for fields in ({}, *({name: value} for name, value in others.items())):
        for pass_ in PASSES:
            choice = choose(BACKENDS, dataclasses.replace(square, **fields), H200, pass_)
            assert choice.backend is not None
            assert choice.backend.name == ("xla" if fields or pass_ == "backward" else "hopper")


@pytest.mark.parametrize(("fields", "passes", "words"), LEFT_TO_XLA.values(), ids=LEFT_TO_XLA)
def test_is_left_to_xla_where_that_is_no_slower(fields, passes, words):
    problem = dataclasses.replace(MEASURED, **fields)
    for pass_ in PASSES:
        choice = choose(BACKENDS, problem, H200, pass_)
        assert choice.backend is not None
        assert choice.backend.name == ("xla" if pass_ in passes else "hopper")
        if pass_ in passes:
            assert words in dict(choice.refusals)["hopper"]


@pytest.mark.parametrize(("fields", "words"), REFUSED.values(), ids=REFUSED)
def test_refuses_with_the_reason(fields, words):
    problem = dataclasses.replace(PROBLEM, **fields)
    for pass_ in PASSES:
        choice = choose(BACKENDS, problem, H200, pass_, wanted="hopper")
        assert choice.backend is None
        assert words in dict(choice.refusals)["hopper"]


@pytest.mark.parametrize(
    ("arch", "words"),
    [
        (Arch("cpu"), "needs an NVIDIA GPU of compute capability 9.0 (H100, H200), got cpu"),
        (Arch("rocm", "MI300X", (9, 4)), "needs an NVIDIA GPU"),
        (Arch("cuda"), "needs an NVIDIA GPU of compute capability 9.0"),
        (Arch("cuda", "NVIDIA A100", (8, 0)), "9.0 (H100, H200), got cuda (NVIDIA A100, sm_80)"),
        (Arch("cuda", "NVIDIA B200", (10, 0)), "got cuda (NVIDIA B200, sm_100)"),
    ],
    ids=str,
)
def test_refuses_other_devices(arch, words):
    for pass_ in PASSES:
        assert words in hopper_call.supports(PROBLEM, arch, pass_)


def test_leaves_alone_what_xla_may_split(monkeypatch):
    monkeypatch.setattr(automatic_axes, "gpus_here", lambda: 2)
    assert "call inside jax.shard_map" in (hopper_call.supports(PROBLEM, H200, "forward") or "")
    for axis_type, splits in ((jax.sharding.AxisType.Auto, True), (jax.sharding.AxisType.Explicit, False)):
        with jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(axis_type,))):
            assert (hopper_call.supports(PROBLEM, H200, "forward") is not None) == splits


@pytest.mark.parametrize("name", ["tokens", "in_features", "hidden_features", "out_features"])
def test_refuses_symbolic_sizes(name):
    (size,) = jax.export.symbolic_shape("unknown")
    problem = dataclasses.replace(PROBLEM, **{name: size})
    assert hopper_call.supports(problem, H200, "forward") == "needs sizes known when tracing, got symbolic unknown"


_PROGRAM = """
import json, sys
import flax.nnx, jax, jax.numpy as jnp
before = set(sys.modules)
import fast_layers
x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
text = str(fast_layers.explain(jax.grad(lambda x: fast_layers.mlp(x, x, x).astype(float).sum()), x))
print(json.dumps([text, [name for name in set(sys.modules) - before if "pallas" in name or "mlp.hopper_" in name]]))
"""


def test_neither_import_nor_explain_loads_pallas():
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    text, loaded = json.loads(done.stdout)
    assert "not hopper: " in text
    assert loaded == ["fast_layers.ops.mlp.hopper_call"]

"""Which calls the Hopper kernels take, why not the others, and that asking costs nothing. Runs anywhere."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fast_layers
from fast_layers.arch import Arch
from fast_layers.dispatch import PASSES, choose
from fast_layers.kernel_parts import automatic_axes
from fast_layers.ops.attention import api, hopper_call, kernel_call, masks
from fast_layers.ops.attention.problem import Problem

H100, H200 = Arch("cuda", "NVIDIA H100 80GB HBM3", (9, 0)), Arch("cuda", "NVIDIA H200", (9, 0))
SHAPE = (2, 130, 4, 64)
LENGTHS = np.array([100, 3], np.int32)


def _problem(q=SHAPE, kv=None, v_dim=None, dtype=jnp.bfloat16, **options: Any) -> Problem:
    query = jax.ShapeDtypeStruct(q, dtype)
    key = jax.ShapeDtypeStruct(kv or q, dtype)
    value = jax.ShapeDtypeStruct((*key.shape[:3], v_dim or key.shape[3]), dtype)
    explained = fast_layers.explain(
        lambda q, k, v: fast_layers.dot_product_attention(q, k, v, implementation="reference", **options),
        query,
        key,
        value,
    )
    return explained.plans[0].problem


TAKEN = {
    "full": {},
    "causal": {"is_causal": True},
    "float16": {"dtype": jnp.float16},
    "bottom right": {"kv": (2, 200, 4, 64), "is_causal": True, "q_offset": "bottom_right"},
    "offsets": {"is_causal": True, "q_offset": LENGTHS},
    "window": {"local_window_size": (4, 3)},
    "lengths": {"key_value_seq_lengths": LENGTHS, "query_seq_lengths": LENGTHS},
    "segments": {"segment_ids": np.zeros(130, int)},
    "prefix": {"mask": masks.Prefix(LENGTHS)},
    "everything at once": {
        "mask": masks.Causal() & masks.KeyLengths(LENGTHS) & masks.Segments(np.zeros(130, int)),
        "softcap": 2.0,
        "sinks": np.zeros(4, np.float32),
        "scale": 0.3,
        "return_residual": True,
    },
    "grouped": {"kv": (2, 70, 2, 64)},
    "one query": {"q": (2, 1, 4, 64), "kv": (2, 70, 1, 64)},
    "odd depth": {"q": (2, 130, 4, 40), "v_dim": 24},
    "depth 1": {"q": (2, 130, 4, 1)},
    "two depths": {"q": (2, 130, 4, 64), "v_dim": 128},
    "depth 128": {"q": (2, 130, 4, 128)},
}
DEEP = {
    "depths 192 and 128": {"q": (2, 130, 4, 192), "v_dim": 128},
    "depth 256": {"q": (2, 130, 4, 256)},
}
REFUSED = {
    "float32": ({"dtype": jnp.float32}, "takes bfloat16 and float16, got float32; cast the inputs"),
    "too deep": ({"q": (2, 130, 4, 264)}, "got 264 and 264"),
    "values too deep": ({"v_dim": 272}, "got 64 and 272"),
    "scale 0": ({"scale": 0.0}, "needs a scale > 0, got 0"),
    "negative scale": ({"scale": -0.5}, "needs a scale > 0, got -0.5"),
}
BIAS, MASK = np.zeros((130, 130), jnp.bfloat16), np.ones((130, 130), bool)
DROPOUT = {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}
PER_SCORE = {
    "bias": {"bias": BIAS},
    "boolean mask": {"mask": MASK},
    "dropout": DROPOUT,
    "all three": {"bias": BIAS, "mask": MASK, **DROPOUT},
}


@pytest.mark.parametrize("options", [*TAKEN.values(), *PER_SCORE.values()], ids=[*TAKEN, *PER_SCORE])
@pytest.mark.parametrize("arch", [H100, H200], ids=lambda arch: arch.name)
def test_takes_both_passes_before_any_other_backend(options, arch):
    problem = _problem(**options)
    for pass_ in PASSES:
        assert hopper_call.supports(problem, arch, pass_) is None
        assert choose(api.BACKENDS, problem, arch, pass_).backend.name == "hopper"


@pytest.mark.parametrize("options", DEEP.values(), ids=DEEP)
def test_takes_each_pass_up_to_its_depth(options):
    problem = _problem(**options)
    deepest = kernel_call.MAX_DEPTH
    for pass_ in PASSES:
        chosen = choose(api.BACKENDS, problem, H200, pass_).backend.name
        if max(problem.qk_dim, problem.v_dim) <= deepest:
            assert hopper_call.supports(problem, H200, pass_) is None
            assert chosen == "hopper"
        else:
            wanted = f"the {pass_} kernel takes depths up to {deepest}, got {problem.qk_dim} and {problem.v_dim}"
            assert hopper_call.supports(problem, H200, pass_) == wanted
            assert chosen != "hopper"


@pytest.mark.parametrize(("options", "words"), REFUSED.values(), ids=REFUSED)
def test_refuses_with_the_reason(options, words):
    problem = _problem(**options)
    for pass_ in PASSES:
        assert words in hopper_call.supports(problem, H200, pass_)
        choice = choose(api.BACKENDS, problem, H200, pass_)
        assert choice.backend.name != "hopper"
        assert words in dict(choice.refusals)["hopper"]


@pytest.mark.parametrize(
    ("arch", "words"),
    [
        (Arch("cpu"), "needs an NVIDIA GPU of compute capability 9.0 (H100, H200), got cpu"),
        (Arch("tpu", "TPU v5e"), "needs an NVIDIA GPU"),
        (Arch("rocm", "MI300X", (9, 4)), "needs an NVIDIA GPU"),
        (Arch("cuda"), "needs an NVIDIA GPU of compute capability 9.0"),
        (Arch("cuda", "NVIDIA A100", (8, 0)), "9.0 (H100, H200), got cuda (NVIDIA A100, sm_80)"),
        (Arch("cuda", "NVIDIA L4", (8, 9)), "got cuda (NVIDIA L4, sm_89)"),
        (Arch("cuda", "NVIDIA B200", (10, 0)), "got cuda (NVIDIA B200, sm_100)"),
    ],
    ids=str,
)
def test_refuses_other_devices(arch, words):
    for pass_ in PASSES:
        assert words in hopper_call.supports(_problem(), arch, pass_)


@pytest.mark.parametrize("gpus", [1, 2])
def test_leaves_alone_what_xla_may_split_in_part(gpus, monkeypatch):
    """XLA is told how to split a call by itself, but not what is left of one that shard_map has split already."""
    monkeypatch.setattr(automatic_axes, "gpus_here", lambda: gpus)
    problem, found = _problem(), []

    def ask(x):
        found.append(hopper_call.supports(problem, H200, "forward"))
        return x

    x = jnp.zeros((4, 2))
    jax.eval_shape(ask, x)
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis_type,) * 2)
        with jax.set_mesh(mesh):
            jax.eval_shape(ask, x)
            for spec, axes in ((P("data", "model"), {"data", "model"}), (P("data"), {"data"})):
                placed = jax.device_put(x, jax.NamedSharding(mesh, spec))
                jax.eval_shape(jax.shard_map(ask, in_specs=spec, out_specs=spec, axis_names=axes), placed)
    refused = [reason is not None for reason in found]
    assert refused == [False, False, False, True, False, False, False]
    assert all("shard_map" in reason for reason in found if reason is not None)


@pytest.mark.parametrize("name", ["batch", "q_len", "kv_len", "heads", "kv_heads", "qk_dim", "v_dim"])
def test_refuses_symbolic_sizes(name):
    (size,) = jax.export.symbolic_shape("unknown")
    problem = dataclasses.replace(_problem(), **{name: size})
    for pass_ in PASSES:
        assert hopper_call.supports(problem, H200, pass_) == "needs sizes known when tracing, got symbolic unknown"


def test_refuses_an_empty_batch():
    for pass_ in PASSES:
        reason = hopper_call.supports(dataclasses.replace(_problem(), batch=0), H200, pass_)
        assert reason == "takes one example or more, got an empty batch"


def test_export_with_symbolic_sizes():
    """What refuses must not break the call."""
    sizes = jax.export.symbolic_shape("b, t, n")
    x = jax.ShapeDtypeStruct((*sizes, 64), jnp.bfloat16)
    call = jax.jit(lambda x: fast_layers.dot_product_attention(x, x, x, is_causal=True))
    exported = jax.export.export(call, platforms=["cuda"], disabled_checks=[])(x)
    assert exported.out_avals[0].shape == (*sizes, 64)


def test_explain_shows_reasons():
    if jax.default_backend() != "cpu":
        pytest.skip("the reasons are those of a CPU")
    x = jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)
    text = str(fast_layers.explain(fast_layers.dot_product_attention, x, x, x))
    reason = "not hopper: needs an NVIDIA GPU of compute capability 9.0 (H100, H200), got cpu"
    assert text.count(reason) == 2


_PROGRAM = """
import json, sys
import flax.nnx, jax, jax.numpy as jnp
before = set(sys.modules)
import fast_layers
x = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
text = str(fast_layers.explain(jax.grad(lambda x: fast_layers.dot_product_attention(x, x, x).astype(float).sum()), x))
print(json.dumps([text, [name for name in set(sys.modules) - before if "pallas" in name or "hopper_" in name]]))
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
    assert "fast_layers.ops.attention.hopper_call" in loaded
    assert all(name.endswith(".hopper_call") for name in loaded)

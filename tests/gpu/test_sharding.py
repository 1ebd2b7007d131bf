"""Kernels on several GPUs at once: batch, heads, channels, tokens, hidden features, over a mesh of all that are here.

Split by XLA, by the arrays' types, or by `shard_map`.

python3 -m pytest tests/gpu/test_sharding.py -n0 -p no:cacheprovider
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fast_layers
from fast_layers.arch import lowering_targets
from fast_layers.testing.closeness import assert_trees_close

GPUS = sum(device.platform == "gpu" for device in jax.devices())
SHAPE = (max(GPUS // 2, 1), 2)
KERNEL = {(9, 0): "hopper", (10, 0): "blackwell", (10, 3): "blackwell"}
B, T, N, K, H, D, F, G, S = 8, 512, 8, 4, 64, 256, 1024, 2, 64
ROWS, TOKENS = P("data", None, "model"), P("data")

pytestmark = pytest.mark.skipif(GPUS not in (2, 4, 8), reason="needs 2, 4 or 8 GPUs")


def attention(implementation, query, key, value):
    return fast_layers.dot_product_attention(query, key, value, is_causal=True, implementation=implementation)


def attention_in_one_launch(implementation, query, key, value):
    """Long enough for dQ beside dS on each of two GPUs, where blocks wait for others at semaphores."""
    return fast_layers.dot_product_attention(query, key, value, implementation=implementation)


def mlp(implementation, x, w_up, w_gate, w_down, b_down):
    return fast_layers.mlp(
        x, w_up, w_down, w_gate=w_gate, b_down=b_down, activation="silu", implementation=implementation
    )


def ssd(implementation, x, dt, A, B, C):
    return fast_layers.ssd(x, jax.nn.softplus(dt), -jnp.exp(A), B, C, implementation=implementation)


def conv(implementation, x, w):
    return fast_layers.causal_conv1d(x, w, activation="silu", implementation=implementation)


def norm(implementation, x, z, w):
    return fast_layers.gated_rms_norm(x, z, w, implementation=implementation)


# The function, and shape and layout of each operand, the gradient of its result's last.
EXPLICIT = {
    "attention": (attention, [((B, T, N, H), ROWS), *[((B, T, K, H), ROWS)] * 2, ((B, T, N, H), ROWS)]),
    "attention_in_one_launch": (attention_in_one_launch, [((B, 2048, 16, 128), ROWS)] * 4),
    "mlp": (
        mlp,
        [
            ((B, T, D), TOKENS),
            *[((D, F), P(None, "model"))] * 2,
            ((F, D), P("model", None)),
            ((D,), P()),
            ((B, T, D), TOKENS),
        ],
    ),
    "ssd": (
        ssd,
        [
            ((B, T, N, H), ROWS),
            ((B, T, N), ROWS),
            ((N,), P("model")),
            *[((B, T, G, S), ROWS)] * 2,
            ((B, T, N, H), ROWS),
        ],
    ),
    "conv": (conv, [((B, T, D), ROWS), ((4, D), P(None, "model")), ((B, T, D), ROWS)]),
    "norm": (norm, [*[((B, T, D), TOKENS)] * 2, ((D,), P()), ((B, T, D), TOKENS)]),
}
# Over the batch alone, the weights on all alike.
IN_SHARD_MAP = {
    "attention": EXPLICIT["attention"],
    "attention_in_one_launch": EXPLICIT["attention_in_one_launch"],
    "mlp": EXPLICIT["mlp"],
    "conv": (conv, [((B, T, D), TOKENS), ((4, D), P()), ((B, T, D), TOKENS)]),
    "norm": EXPLICIT["norm"],
}


def _arrays(shapes, dtype):
    """Weights are scaled so that results are of the size of 1."""
    rng = np.random.default_rng(0)
    scaled = (rng.normal(size=s) * (s[0] ** -0.5 if len(s) == 2 else 1) for s, _ in shapes)
    return [jnp.asarray(x, jnp.bfloat16).astype(dtype) for x in scaled]


def _step(fn, *arrays):
    """The last is the gradient of fn's result."""
    out, pull = jax.vjp(fn, *arrays[:-1])
    return out, pull(arrays[-1])


def _kernel():
    capability = lowering_targets()[0].capability
    assert capability is not None
    return KERNEL[capability]


def _assert_as_on_one(run, call, shapes):
    with jax.default_matmul_precision("highest"):
        wide = jax.jit(functools.partial(_step, functools.partial(call, "xla")))(*_arrays(shapes, jnp.float32))
    assert_trees_close(run(_kernel()), jax.device_get(wide), run("xla"))


@pytest.mark.parametrize("name", EXPLICIT)
def test_explicit_axes(name):
    call, shapes = EXPLICIT[name]
    mesh = jax.make_mesh(SHAPE, ("data", "model"), axis_types=(AxisType.Explicit,) * 2)

    def run(implementation):
        with jax.set_mesh(mesh):
            arrays = _arrays(shapes, jnp.bfloat16)
            placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, (_, spec) in zip(arrays, shapes, strict=True)]
            results = jax.jit(functools.partial(_step, functools.partial(call, implementation)))(*placed)
        assert len(results[0].sharding.device_set) == GPUS
        return jax.device_get(results)

    _assert_as_on_one(run, call, shapes)


# Those that XLA splits by itself. Where a row of the norm is on several GPUs, each has a part and takes no kernel.
AUTOMATIC = {name: EXPLICIT[name] for name in ("attention", "attention_in_one_launch", "ssd", "conv", "norm")}
AUTOMATIC["norm_in_parts"] = (norm, [*[((B, T, D), ROWS)] * 2, ((D,), P("model")), ((B, T, D), ROWS)])


@pytest.mark.parametrize("name", AUTOMATIC)
def test_automatic_axes(name):
    call, shapes = AUTOMATIC[name]
    mesh = jax.make_mesh(SHAPE, ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def run(implementation):
        arrays = _arrays(shapes, jnp.bfloat16)
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, (_, spec) in zip(arrays, shapes, strict=True)]
        with jax.set_mesh(mesh):
            step = jax.jit(functools.partial(_step, functools.partial(call, implementation))).lower(*placed).compile()
        if implementation != "xla":
            assert "all-gather" not in step.as_text()
        results = step(*placed)
        assert results[0].sharding.is_equivalent_to(placed[0].sharding, results[0].ndim)
        return jax.device_get(results)

    _assert_as_on_one(run, call, shapes)


@pytest.mark.parametrize("name", IN_SHARD_MAP)
def test_inside_shard_map(name):
    call, shapes = IN_SHARD_MAP[name]
    mesh = jax.make_mesh((GPUS,), ("data",), axis_types=(AxisType.Auto,))
    specs = tuple(P("data") if shape[0] == B else P() for shape, _ in shapes)

    def run(implementation):
        with jax.set_mesh(mesh):
            split = jax.shard_map(
                functools.partial(call, implementation), mesh=mesh, in_specs=specs[:-1], out_specs=P("data")
            )
            return jax.device_get(jax.jit(functools.partial(_step, split))(*_arrays(shapes, jnp.bfloat16)))

    _assert_as_on_one(run, call, shapes)

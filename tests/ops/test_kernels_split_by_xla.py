"""Calls that XLA spreads over devices by itself, as their ops say. Plain code stands in for the kernels."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fast_layers
from fast_layers import dispatch
from fast_layers.arch import Arch
from fast_layers.kernel_parts import automatic_axes
from fast_layers.ops.attention import api, hopper_call, hopper_fwd_sizes, xla
from fast_layers.testing.closeness import assert_trees_close

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")

B, T, S, H = 8, 24, 20, 8
OPS = ("attention", "ssd", "conv1d", "gated_norm")
LAYOUTS = {
    "batch and heads": P("data", None, "model"),
    "batch": P(("data", "model")),
    "heads": P(None, None, ("data", "model")),
    "length": P(None, "model"),
}


@pytest.fixture
def shards(monkeypatch):
    """A backend named "kernel" for each op that lets XLA split its kernels; the problems that it was given."""
    seen = []
    monkeypatch.setattr(automatic_axes, "gpus_here", lambda: 8)
    for op in OPS:
        api, xla, sharding = (importlib.import_module(f"fast_layers.ops.{op}.{x}") for x in ("api", "xla", "sharding"))

        def forward(problem, *args, xla=xla):
            seen.append(problem)
            # A kernel writes to refs, which nothing around it may be left with.
            return jax.tree.map(_through_a_ref, jax.jit(xla.forward, static_argnums=0)(problem, *args))

        def takes(*_):
            return None

        kernel = dispatch.Backend("kernel", takes, forward, xla.backward, is_kernel=True, split=sharding.by_xla)
        monkeypatch.setattr(api, "BACKENDS", (kernel, *api.BACKENDS))
    return seen


@jax.jit
def _through_a_ref(x):
    return jax.new_ref(x)[...]


def _mesh():
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:8])


def _normal(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


def attend(backend, inputs, **options):
    out, lse = fast_layers.dot_product_attention(**inputs, **options, implementation=backend, return_residual=True)
    return out, jnp.where(jnp.isfinite(lse), lse, 0.0)


def scan(backend, inputs, **options):
    inputs = {**inputs, "dt": jax.nn.softplus(inputs["dt"]), "A": -jnp.exp(inputs["A"])}
    return fast_layers.ssd(**inputs, **options, return_final_state=True, implementation=backend)


def convolve(backend, inputs, **options):
    return fast_layers.causal_conv1d(**inputs, **options, activation="silu", implementation=backend)


def normalise(backend, inputs, **options):
    return fast_layers.gated_rms_norm(**inputs, **options, implementation=backend)


def _attention(heads, kv_heads, **more):
    shapes = {"query": (B, T, heads, H), "key": (B, S, kv_heads, H), "value": (B, S, kv_heads, H), **more}
    return {name: _normal(*shape) for name, shape in shapes.items()}


def _scan(heads, groups, **more):
    shapes = {"x": (B, T, heads, 4), "dt": (B, T, heads), "A": (heads,)}
    shapes |= {"B": (B, T, groups, 6), "C": (B, T, groups, 6), **more}
    return {name: _normal(*shape) for name, shape in shapes.items()}


def _norm(*shape):
    return {"y": _normal(*shape), "z": _normal(*shape) / 2, "weight": _normal(shape[-1])}


IDS = np.repeat([[0, 1], [1, 2], [3, 3], [4, 5]] * 2, T // 2, 1)
# By name: the function, what gradients flow to, its options.
CALLS: dict[str, tuple[Any, dict[str, jax.Array], dict[str, Any]]] = {
    "a key head each": (attend, _attention(8, 8), {"is_causal": True}),
    "grouped heads": (attend, _attention(8, 4), {"is_causal": True}),
    "fewer key heads than shards": (attend, _attention(8, 2), {}),
    "one key head": (attend, _attention(8, 1), {"is_causal": True}),
    "heads that no shards fit": (attend, _attention(12, 3), {}),
    "lengths": (attend, _attention(8, 4), {"key_value_seq_lengths": np.array([3, 20, 10, 0] * 2)}),
    "bias of all examples": (attend, _attention(8, 4, bias=(1, 8, T, S)), {}),
    "bias of all heads": (attend, _attention(8, 4, bias=(B, 1, 1, S)), {}),
    "sinks": (attend, _attention(8, 2, sinks=(8,)), {}),
    "dropout": (attend, _attention(8, 4), {"dropout_rate": 0.3, "dropout_rng": jax.random.key(3)}),
    "dense mask": (attend, _attention(8, 4), {"mask": np.random.default_rng(0).random((B, 8, T, S)) < 0.6}),
    "scan": (scan, _scan(8, 4, D=(8,), z=(B, T, 8, 4), dt_bias=(8,)), {"chunk_size": 8}),
    "scan, one group": (scan, _scan(8, 1, D=(8, 4), initial_state=(B, 8, 4, 6)), {"chunk_size": 8}),
    "scan, fewer groups than shards": (scan, _scan(8, 2), {"chunk_size": 8, "segment_ids": IDS}),
    "convolution": (convolve, {"x": _normal(B, T, 16), "w": _normal(4, 16), "b": _normal(16)}, {}),
    "convolution, with states": (
        convolve,
        {"x": _normal(B, T, 16), "w": _normal(3, 16), "initial_state": _normal(B, 16, 2)},
        {"segment_ids": IDS, "return_final_state": True},
    ),
    "norm, groups": (normalise, _norm(B, T, 16), {"group_size": 2}),
    "norm, one group": (normalise, _norm(B, T, 16), {"norm_before_gate": True}),
    "norm, groups on several devices": (normalise, _norm(B, T, 16), {"group_size": 8}),
    "norm, more dimensions": (normalise, _norm(B, 3, T, 16), {}),
}
IN_ALL_LAYOUTS = (
    "fewer key heads than shards",
    "scan, one group",
    "convolution",
    "norm, groups",
    "norm, one group",
    "norm, groups on several devices",
)


def _step(call, backend, options, inputs):
    """The results, and the gradients of their sum, weighed at random."""

    def loss(inputs):
        results = call(backend, inputs, **options)
        return sum((_normal(*x.shape) * x).sum() for x in jax.tree.leaves(results)), results

    grads, results = jax.grad(loss, has_aux=True)(inputs)
    return results, grads


def _placed(inputs, spec, mesh):
    """Batch and heads of the first operand so, of others of its rank whatever of it they can have; the rest whole."""
    first = inputs[_first(inputs)]

    def place(x):
        dims = [*spec, *[None] * first.ndim][: x.ndim] if x.ndim == first.ndim and x.shape[0] > 1 else []
        fits = [
            axes if size % np.prod([mesh.shape[a] for a in np.atleast_1d(axes or [])], dtype=int) == 0 else None
            for axes, size in zip(dims, x.shape, strict=False)
        ]
        return jax.device_put(x, NamedSharding(mesh, P(*fits)))

    return jax.tree.map(place, inputs)


def _first(inputs):
    return next(iter(inputs))


def _sizes(problem):
    """Of what may be split."""
    p = problem
    if hasattr(p, "rows"):
        return (*p.rows, p.features)
    return p.batch, p.channels if hasattr(p, "channels") else p.heads


def _assert_alike(got, whole):
    """But for the order of sums in float32."""
    assert got.shape == whole.shape
    assert got.dtype == whole.dtype
    np.testing.assert_allclose(got, whole, rtol=0, atol=1e-5 * float(jnp.abs(whole).max()))


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, layout) for name in CALLS for layout in LAYOUTS if layout == "batch and heads" or name in IN_ALL_LAYOUTS],
)
def test_values_and_gradients(name, layout, shards):
    call, inputs, options = CALLS[name]
    whole = jax.jit(functools.partial(_step, call, "xla", options))(inputs)
    placed = _placed(inputs, LAYOUTS[layout], _mesh())
    step = jax.jit(functools.partial(_step, call, "kernel", options)).lower(placed).compile()
    jax.tree.map(_assert_alike, step(placed), whole)
    of_shards = {_sizes(p) for p in shards}
    first = placed[_first(inputs)]
    of_first = first.sharding.shard_shape(first.shape)
    parted = first.ndim == 3 and of_first[2] % options.get("group_size", first.shape[2]) != 0
    if call is normalise and parted and "group_size" in options:
        assert (*of_first[:2], first.shape[2]) in of_shards
    elif call is normalise:
        # Of a group on several devices each computes its part, by no kernel.
        assert (of_first in of_shards) == (not parted)
        assert "all-gather" not in step.as_text()
    elif name == "heads that no shards fit":
        assert of_shards == {(B, 12), (B // 2, 12)}
    elif layout == "length":
        assert of_shards == {(B, first.shape[2])}
    else:
        assert (of_first[0], of_first[2]) in of_shards
        assert "all-gather" not in step.as_text()  # of what devices share, the gradients are summed


@pytest.mark.parametrize("kv_heads", [pytest.param(8, marks=pytest.mark.exhaustive), 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_the_forward_saves(layout, kv_heads, shards, monkeypatch):
    """Sizes of keys and values, by key heads, which devices may share."""
    seen = []

    def saving(problem, inputs, aux):
        return xla.forward(problem, inputs, aux), hopper_fwd_sizes.by_xla(inputs)

    def backward(problem, residuals, *gradients):
        seen.append(problem)
        right = (residuals.sizes == hopper_fwd_sizes.by_xla(residuals.inputs)).all()
        return jax.tree.map(lambda x: jnp.where(right, x, jnp.nan), xla.backward(problem, residuals, *gradients))

    kernel = dataclasses.replace(api.BACKENDS[0], bwd=backward, saves=lambda _: True, fwd_saving=saving)
    monkeypatch.setattr(hopper_call, "forward_saving", saving)
    monkeypatch.setattr(api, "BACKENDS", (kernel, *api.BACKENDS[1:]))
    shapes = {"query": (B, 128, 8, H), "key": (B, 256, kv_heads, H), "value": (B, 256, kv_heads, H)}
    inputs = {name: _normal(*shape).astype(jnp.bfloat16) for name, shape in shapes.items()}

    def out_and_gradients(backend):
        return jax.jit(functools.partial(_step, lambda *args: attend(*args)[0], backend, {}))

    step, whole = map(out_and_gradients, ("kernel", "xla"))
    exact = whole(jax.tree.map(lambda x: x.astype(jnp.float32), inputs))
    assert_trees_close(step(_placed(inputs, LAYOUTS[layout], _mesh())), exact, whole(inputs))
    of_one = {"batch and heads": (B // 2, 2), "batch": (1, 8), "heads": (B, 1), "length": (B, 8)}[layout]
    assert of_one in {(p.batch, p.heads) for p in seen}


def test_a_layout_without_names(shards):
    """Of two key heads over four devices XLA gives each device half of one's columns, as their projection has them."""
    mesh, inputs = _mesh(), _attention(8, 2)
    flat = {name: inputs[name].reshape(B, S, -1) for name in ("key", "value")}
    placed = {"query": inputs["query"], **flat}
    specs = {"query": P("data", None, "model"), "key": P("data", None, "model"), "value": P("data", None, "model")}
    placed = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in placed.items()}

    def step(backend, query, key, value):
        heads = {name: (x * 2).reshape(B, S, 2, H) for name, x in (("key", key), ("value", value))}
        return _step(attend, backend, {}, {"query": query, **heads})

    got = jax.jit(functools.partial(step, "kernel"))(**placed)
    jax.tree.map(_assert_alike, got, jax.jit(functools.partial(step, "xla"))(inputs["query"], **flat))
    assert (B // 2, 2, 1) in {(p.batch, p.heads, p.kv_heads) for p in shards}


def test_outside_of_jit(shards):
    placed = _placed(_attention(8, 4), LAYOUTS["batch and heads"], _mesh())
    out, _ = attend("kernel", placed)
    assert out.sharding.is_equivalent_to(placed["query"].sharding, out.ndim)
    assert (B // 2, 2, 1) in {(p.batch, p.heads, p.kv_heads) for p in shards}


@pytest.mark.parametrize("axes", [{"query": 0, "key": 0, "value": 0}, {"query": 3, "key": None, "value": 1}])
def test_vmap_is_one_call_on_a_larger_batch(axes, shards):
    inputs = _attention(8, 4)
    mapped = {name: x if axes[name] is None else jnp.stack([x, -x, x / 2], axes[name]) for name, x in inputs.items()}

    def run(backend):
        return jax.jit(jax.vmap(functools.partial(_step, attend, backend, {"is_causal": True}), in_axes=(axes,)))

    jax.tree.map(_assert_alike, run("kernel")(mapped), run("xla")(mapped))
    assert 3 * B in {p.batch for p in shards}


@pytest.mark.parametrize("of_sinks", [0, None])
def test_vmap_where_examples_share_sinks(of_sinks, shards):
    """Each mapped call has a gradient of its own for them, so they go one by one."""
    inputs = _attention(8, 4, sinks=(8,))
    mapped = {name: x if name == "sinks" and of_sinks is None else jnp.stack([x, -x]) for name, x in inputs.items()}

    def run(backend):
        axes = {**dict.fromkeys(inputs, 0), "sinks": of_sinks}
        return jax.jit(jax.vmap(functools.partial(_step, attend, backend, {}), in_axes=(axes,)))(mapped)

    jax.tree.map(_assert_alike, run("kernel"), run("xla"))


def test_a_mesh_of_several_kinds_is_refused():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto))
    with jax.set_mesh(mesh):
        reason = automatic_axes.refusal()
        assert reason is not None
        assert "make all axes of the mesh automatic, or all explicit" in reason
    with jax.set_mesh(_mesh()):
        assert automatic_axes.refusal() is None
        assert automatic_axes.xla_splits()


def test_a_kernel_is_chosen_unasked(shards):
    x = jax.ShapeDtypeStruct((B, T, 8, H), jnp.float32)
    with jax.set_mesh(_mesh()):
        (plan,) = fast_layers.explain(fast_layers.dot_product_attention, x, x, x).plans
    assert [plan.sole_backend(pass_).name for pass_ in dispatch.PASSES] == ["kernel", "kernel"]


@pytest.fixture
def whole_channels(shards, monkeypatch):
    """The convolution's kernel takes all 16 channels or none; the problems that it was given."""
    from fast_layers.ops.conv1d import api

    def takes(problem, arch, pass_):
        return None if problem.channels == 16 else f"takes 16 channels, got {problem.channels}"

    monkeypatch.setattr(api, "BACKENDS", (dataclasses.replace(api.BACKENDS[0], supports=takes), *api.BACKENDS[1:]))
    return shards


@pytest.mark.parametrize("layout", ["batch", "batch and heads"])
def test_shards_that_the_kernel_refuses_are_left_to_xla(layout, whole_channels):
    call, inputs, options = CALLS["convolution"]
    whole = jax.jit(functools.partial(_step, call, "xla", options))(inputs)
    step = jax.jit(functools.partial(_step, call, None, options))
    jax.tree.map(_assert_alike, step(_placed(inputs, LAYOUTS[layout], _mesh())), whole)
    of_kernel = {_sizes(problem) for problem in whole_channels}
    assert of_kernel == ({(B, 16), (1, 16)} if layout == "batch" else {(B, 16)})


def test_shards_that_a_named_kernel_refuses_raise(whole_channels):
    call, inputs, options = CALLS["convolution"]
    step = jax.jit(functools.partial(_step, call, "kernel", options))
    placed = _placed(inputs, LAYOUTS["batch and heads"], _mesh())
    with pytest.raises(Exception, match=r"each device x \[4, 24, 4\].* kernel: takes 16 channels, got 4\. Shard it"):
        step(placed)


def test_forbidden_backends_take_no_shards(whole_channels):
    call, inputs, options = CALLS["convolution"]
    step = jax.jit(functools.partial(_step, call, None, options))
    placed = _placed(inputs, LAYOUTS["batch and heads"], _mesh())
    with fast_layers.use_backends(forbid="xla"), pytest.raises(Exception, match="takes 16 channels, got 4"):
        step(placed)


@pytest.mark.parametrize("op", ["conv1d", "gated_norm"])
def test_more_numbers_than_a_kernel_counts(op):
    """They may be those of all devices, and are no more than one has."""
    hopper = importlib.import_module(f"fast_layers.ops.{op}.hopper_call")
    sizes = {
        "conv1d": {"batch": 2**10, "length": 2**10, "channels": 2**12, "width": 4, "activation": None}
        | dict.fromkeys(("bias", "segments", "initial_state", "final_state"), False),
        "gated_norm": {
            "rows": (2**20,),
            "features": 2**12,
            "group_size": 2**12,
            "eps": 1e-5,
            "norm_before_gate": False,
        },
    }
    problem = importlib.import_module(f"fast_layers.ops.{op}.problem").Problem(dtype=jnp.bfloat16, **sizes[op])
    h100 = Arch("cuda", "NVIDIA H100", (9, 0))
    with jax.set_mesh(_mesh()):
        assert hopper.supports(problem, h100, "forward") is None
        with automatic_axes.on_a_shard():
            assert "takes up to 2147483647 numbers" in hopper.supports(problem, h100, "forward")
    assert "takes up to 2147483647 numbers" in hopper.supports(problem, h100, "forward")


def test_the_name_stands_for_the_call(shards):
    """By which JAX's cache knows programs, where it leaves out the address of what splits them."""
    x = jax.device_put(_normal(B, T, 8, H), NamedSharding(_mesh(), P("data")))

    def name_with(**options):
        lowered = jax.jit(lambda x: attend("kernel", {"query": x, "key": x, "value": x}, **options)[0]).lower(x)
        (name,) = set(re.findall(r"@(forward_[0-9a-f]{16})\(", lowered.as_text()))
        return name

    names = [name_with(**options) for options in ({}, {"is_causal": True}, {"softcap": 2.0}, {"softcap": 3.0})]
    assert len(set(names)) == 4
    jax.clear_caches()
    assert name_with(softcap=3.0) == names[-1]


def test_equal_layers_are_lowered_once(shards):
    """XLA asks for each layer's program by itself; to lower a kernel takes a second."""
    x = jax.device_put(_normal(B, T, 8, H), NamedSharding(_mesh(), P("data")))

    def model(x, softcap):
        for _ in range(3):
            x = x + attend("kernel", {"query": x, "key": x, "value": x}, softcap=softcap)[0]
        return x

    for softcap in (11.0, 12.0):
        shards.clear()
        jax.jit(model, static_argnums=1).lower(x, softcap).compile()
        assert [p.softcap for p in shards if p.batch == B // 2] == [softcap]

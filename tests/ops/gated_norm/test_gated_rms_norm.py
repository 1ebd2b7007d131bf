"""`gated_rms_norm`: values and gradients of every backend, groups, precision, transforms, memory, errors.

F features; everything before them are rows.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close_over_draws
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import fast_layers
from fast_layers.arch import lowering_targets
from fast_layers.ops.gated_norm.backends import BACKENDS
from fast_layers.ops.gated_norm.problem import Problem

_SMALL = Problem((3,), 8, np.dtype(np.float32), 8, 1e-5, False)
ALL = [backend.name for backend in BACKENDS if backend.supports(_SMALL, lowering_targets()[0], "forward") is None]


class Answer(NamedTuple):
    out: Any
    d_y: Any
    d_z: Any
    d_weight: Any


def draws(shape, dtype=np.float32, seed=0):
    """y, z, weight and the cotangent; one row of y is large, one tiny."""
    rng = np.random.default_rng((seed, *shape))
    scale = np.ones(shape)
    scale.reshape(-1, shape[-1])[0] *= 1e3
    scale.reshape(-1, shape[-1])[-1] *= 1e-3
    arrays = rng.normal(size=shape) * scale, 2 * rng.normal(size=shape), rng.normal(size=shape[-1:])
    return [x.astype(dtype) for x in (*arrays, rng.normal(size=shape))]


def oracle(y, z, weight, d_out, dtype, *, group_size=None, eps=1e-5, norm_before_gate=False) -> Answer:
    """Written from the formula for one group at a time, with the norm's derivative as a matrix."""
    y, z, weight, d_out = (np.asarray(x).astype(dtype) for x in (y, z, weight, d_out))
    features = y.shape[-1]
    size = group_size or features
    one = dtype(1)
    sigmoid = one / (one + np.exp(-z))
    gate, d_gate_dz = z * sigmoid, sigmoid * (one + z * (one - sigmoid))
    out, d_y, d_z, d_weight = np.empty_like(y), np.empty_like(y), np.empty_like(y), np.zeros_like(weight)
    for row in np.ndindex(y.shape[:-1]):
        for start in range(0, features, size):
            at = (*row, slice(start, start + size))
            w, g, d = weight[start : start + size], gate[at], d_out[at]
            v = y[at] if norm_before_gate else y[at] * g
            root = np.sqrt((v * v).mean() + dtype(eps))
            n = v / root
            jacobian = (np.eye(size, dtype=dtype) - np.outer(n, n) / dtype(size)) / root
            if norm_before_gate:
                out[at] = n * w * g
                d_weight[start : start + size] += d * n * g
                d_y[at], d_g = jacobian @ (d * w * g), d * n * w
            else:
                out[at] = n * w
                d_weight[start : start + size] += d * n
                d_v = jacobian @ (d * w)
                d_y[at], d_g = d_v * g, d_v * y[at]
            d_z[at] = d_g * d_gate_dz[at]
    return Answer(out, d_y, d_z, d_weight)


@functools.cache
def runner(implementation, **options):
    norm = functools.partial(fast_layers.gated_rms_norm, implementation=implementation, **options)

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def call(y, z, weight, d_out):
        out, pull = jax.vjp(norm, y, z, weight)
        return Answer(out, *pull(d_out))

    return call


OPTIONS = [{}, {"group_size": 4}, {"norm_before_gate": True}, {"group_size": 2, "norm_before_gate": True, "eps": 0.1}]


@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 12), (7, 8), (8,)], ids=str)
def test_values_and_gradients(implementation, options, shape):
    def make(draw):
        arrays = draws(shape, seed=draw)
        return (
            runner(implementation, **options)(*arrays),
            oracle(*arrays, np.float64, **options),
            oracle(*arrays, np.float32, **options),
        )

    assert_close_over_draws(make, f"{implementation} {options} {shape}: ")


@pytest.mark.parametrize("implementation", ALL)
def test_float64(implementation):
    with jax.enable_x64(True):

        def make(draw):
            arrays = draws((4, 12), np.float64, draw)
            wide, plain = (oracle(*arrays, dtype, group_size=6) for dtype in (np.longdouble, np.float64))
            return runner(implementation, group_size=6)(*arrays), wide, plain

        assert_close_over_draws(make, f"{implementation}: ")


@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("options", OPTIONS[1:3], ids=str)
def test_low_precision_is_computed_in_float32(implementation, dtype, options):
    """As near as the rounding of the results; with a float32 weight, as mixed-precision models have."""

    def make(draw):
        y, z, weight, d_out = draws((40, 16), dtype, draw)
        y = np.clip(y.astype(np.float32), -100, 100).astype(dtype)
        arrays = (y, z, weight.astype(np.float32), d_out)
        got = runner(implementation, **options)(*arrays)
        assert [x.dtype for x in got] == [dtype, dtype, dtype, np.float32]
        want = oracle(*arrays, np.float64, **options)
        return got[:3], want[:3], tuple(x.astype(dtype) for x in want[:3])

    assert_close_over_draws(make, f"{implementation}: ", draws=2)


@pytest.mark.parametrize("implementation", ALL)
def test_an_open_gate_leaves_flax_rms_norm(implementation):
    norm = nnx.RMSNorm(12, epsilon=1e-5, rngs=nnx.Rngs(0))
    y, _, weight, _ = draws((5, 12))
    norm.scale[...] = weight
    z = np.full_like(y, 100.0)  # silu(100) is 100
    got = fast_layers.gated_rms_norm(y / 100, z, weight, implementation=implementation)
    np.testing.assert_allclose(got, norm(y), rtol=1e-5, atol=1e-6)


def test_the_backward_keeps_the_inputs_only():
    y, weight = jax.ShapeDtypeStruct((64, 32), jnp.bfloat16), jax.ShapeDtypeStruct((32,), jnp.float32)

    def kept(implementation):
        norm = functools.partial(fast_layers.gated_rms_norm, implementation=implementation)
        _, pull = jax.eval_shape(lambda *inputs: jax.vjp(norm, *inputs), y, y, weight)
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(pull))

    assert kept("xla") == 2 * y.size * 2 + weight.size * 4
    assert kept("reference") > 2 * kept("xla")  # the measure sees what is kept


@pytest.mark.parametrize("implementation", ALL)
def test_transforms(implementation):
    y, z, weight, _ = draws((3, 8))
    norm = functools.partial(fast_layers.gated_rms_norm, group_size=4, implementation=implementation)

    def loss(*inputs):
        return jnp.sin(norm(*inputs)).sum()

    np.testing.assert_allclose(jax.vmap(norm, (0, 0, None))(y, z, weight), norm(y, z, weight), rtol=1e-6)
    want = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(y, z, weight)
    got = jax.grad(jax.checkpoint(loss), argnums=(0, 1, 2))(y, z, weight)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), got, want)
    if implementation == "reference":
        y = np.clip(y, -2, 2)
        check_grads(jax.jit(loss), (y, z, weight), order=2, modes=("fwd", "rev"), rtol=0.05, atol=0.05)


@pytest.mark.skipif(len(jax.devices("cpu")) < 4, reason="needs four CPU devices")
@pytest.mark.parametrize(
    ("kind", "group_size", "shape"),
    [
        (AxisType.Auto, 4, (2, 2)),
        (AxisType.Explicit, 4, (2, 2)),
        (AxisType.Explicit, 16, (2, 2)),
        (AxisType.Explicit, 8, (1, 4)),
    ],
    ids=["automatic", "explicit", "explicit, a group over devices", "explicit, two groups over four devices"],
)
def test_sharded_rows_and_groups(kind, group_size, shape):
    arrays = draws((4, 3, 16))
    want = runner("xla", group_size=group_size)(*arrays)
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(kind,) * 2, devices=jax.devices("cpu")[:4])
    rows = P("data", None, "model")
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, jax.NamedSharding(mesh, spec))
            for x, spec in zip(arrays, (rows, rows, P("model"), rows), strict=True)
        ]
        got = runner("xla", group_size=group_size)(*placed)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)
    assert got.out.sharding.is_equivalent_to(jax.NamedSharding(mesh, rows), 3)


@pytest.mark.skipif(len(jax.devices("cpu")) < 4, reason="needs four CPU devices")
def test_vmap_over_a_sharded_axis():
    y, z, weight, _ = draws((4, 3, 16))
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices("cpu")[:4])
    call = jax.vmap(functools.partial(fast_layers.gated_rms_norm, group_size=4), in_axes=(0, 0, None))
    with jax.set_mesh(mesh):
        rows = jax.NamedSharding(mesh, P("data", None, "model"))
        placed = jax.device_put(weight, jax.NamedSharding(mesh, P("model")))
        got = jax.jit(call)(jax.device_put(y, rows), jax.device_put(z, rows), placed)
    np.testing.assert_allclose(got, fast_layers.gated_rms_norm(y, z, weight, group_size=4), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(len(jax.devices("cpu")) < 4, reason="needs four CPU devices")
@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma):
    """Each shard its rows; the weight that all share gets a summed gradient."""
    y, z, weight, d_out = draws((4, 8))
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:4])
    split = jax.shard_map(
        fast_layers.gated_rms_norm,
        mesh=mesh,
        in_specs=(P("data"), P("data"), P()),
        out_specs=P("data"),
        check_vma=check_vma,
    )

    def grads(f):
        return jax.jit(jax.grad(lambda *inputs: (f(*inputs) * d_out).sum(), argnums=(0, 1, 2)))(y, z, weight)

    want = grads(fast_layers.gated_rms_norm)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), grads(split), want)


Y, WEIGHT = np.zeros((2, 6), np.float32), np.zeros(6, np.float32)
BAD = {
    "integers": ({"y": Y.astype(int)}, "y has dtype int.*must be floating point"),
    "8 bits": ({"y": Y.astype(jnp.float8_e4m3fn)}, "y has dtype float8_e4m3fn: must be floating point"),
    "no features": ({"y": Y[:, :0], "z": Y[:, :0]}, r"at least one feature, got \(2, 0\)"),
    "shapes": ({"z": Y[:1]}, r"the same shape, got \(2, 6\) and \(1, 6\)"),
    "dtypes": ({"z": Y.astype(np.float16)}, "the same dtype, got float32 and float16; cast"),
    "weight": ({"weight": WEIGHT[:3]}, r"weight must have shape \(features,\) = \(6,\), got \(3,\)"),
    "group size": ({"group_size": 4}, "group_size=4: must be a divisor of the 6 features"),
    "flag": ({"norm_before_gate": "after"}, "norm_before_gate='after': must be True or False"),
    "eps": ({"eps": -1.0}, "eps=-1.0: must be a number, 0 or more"),
    "backend": ({"implementation": "mosaic"}, "implementation 'mosaic' is unknown; .* xla, reference"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        fast_layers.gated_rms_norm(**{"y": Y, "z": Y, "weight": WEIGHT, **changes})


def test_numbers_of_numpy_are_numbers():
    want = fast_layers.gated_rms_norm(Y, Y, WEIGHT, group_size=3, eps=0.25)
    got = fast_layers.gated_rms_norm(Y, Y, WEIGHT, group_size=np.int64(3), eps=np.float32(0.25))
    np.testing.assert_array_equal(got, want)


def test_explain():
    explained = str(fast_layers.explain(fast_layers.gated_rms_norm, Y, Y, WEIGHT, group_size=3))
    assert explained.startswith("gated_rms_norm: y [2, 6], float32, groups of 3, gate before norm")
    assert "backward on cpu: xla" in explained


@pytest.mark.parametrize("implementation", ALL)
def test_no_rows(implementation):
    y, z, weight = np.zeros((0, 3, 8), np.float32), np.zeros((0, 3, 8), np.float32), np.ones(8, np.float32)
    norm = functools.partial(fast_layers.gated_rms_norm, group_size=4, implementation=implementation)
    assert norm(y, z, weight).shape == y.shape
    d_y, d_weight = jax.grad(lambda y, w: norm(y, z, w).sum(), argnums=(0, 1))(y, weight)
    assert d_y.shape == y.shape
    np.testing.assert_array_equal(d_weight, np.zeros_like(weight))

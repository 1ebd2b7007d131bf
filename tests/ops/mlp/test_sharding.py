"""Tokens and hidden features over eight devices: the unsharded results, and nothing gathered that need not be."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fast_layers
from ops.mlp import oracle
from ops.mlp.cases import TESTED, Case, as_jax, build

CASE = Case((4, 8), 8, 16, 8, "silu", True, (True, True, True))
LINEAR = Case((4, 8), 8, 16, None, "gelu", True, (True, True, False))
REPLICATED = oracle.Operands(None, P(), P(), P(), P(), P(), P())
TENSOR = oracle.Operands(None, P(None, "model"), P(None, "model"), P("model", None), P("model"), P("model"), P())
# name: (mesh shape, spec of x, specs of the weights)
LAYOUTS = {
    "tokens": ((8, 1), P(None, "data"), REPLICATED),
    "tokens over both leading dims": ((4, 2), P("data", "model"), REPLICATED),
    "hidden": ((1, 8), P(), TENSOR),
    "tokens and hidden": ((4, 2), P("data"), TENSOR),
}
MOVING = re.compile(r"= .*\b(all-gather|all-to-all|collective-permute|reduce-scatter)[\w-]*\(.*")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}

pytestmark = pytest.mark.skipif(len(jax.devices("cpu")) < 8, reason="needs eight CPU devices")


def _mesh(shape, kind):
    return jax.make_mesh(shape, ("data", "model"), axis_types=(kind,) * 2, devices=jax.devices("cpu")[:8])


def _step(case, implementation, operands, d_out):
    out, pull = jax.vjp(lambda operands: case.call(operands, implementation=implementation), operands)
    return out, pull(d_out)[0]


@functools.cache
def _unsharded(case):
    built = build(case)
    return jax.jit(functools.partial(_step, case, "xla"))(as_jax(built.operands), built.d_out)


def _placed(case, mesh, x_spec, weight_specs):
    built = build(case)
    specs = weight_specs._replace(x=x_spec)

    def place(x, spec):
        return jax.device_put(x, NamedSharding(mesh, spec))

    pairs = zip(built.operands, specs, strict=True)
    operands = oracle.Operands(*(None if x is None else place(x, spec) for x, spec in pairs))
    tensor = weight_specs is TENSOR and case.out_features is None
    d_out_spec = P(*(*x_spec, None, None)[:2], "model") if tensor else x_spec
    return operands, place(built.d_out, d_out_spec)


@pytest.mark.parametrize("implementation", TESTED)
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", [CASE, LINEAR], ids=["mlp", "linear"])
def test_the_unsharded_results(implementation, kind, layout, case):
    shape, x_spec, weight_specs = LAYOUTS[layout]
    mesh = _mesh(shape, kind)
    with jax.set_mesh(mesh):
        operands, d_out = _placed(case, mesh, x_spec, weight_specs)
        compiled = jax.jit(functools.partial(_step, case, implementation)).lower(operands, d_out).compile()
        got = compiled(operands, d_out)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), got, _unsharded(case))
    if kind == AxisType.Explicit:
        assert not MOVING.findall(compiled.as_text())
        out, grads = got
        assert out.sharding.is_equivalent_to(d_out.sharding, out.ndim)
        for name, grad, operand in zip(grads._fields, grads, operands, strict=True):
            assert grad is None or grad.sharding.is_equivalent_to(operand.sharding, grad.ndim), name


@pytest.mark.parametrize("implementation", TESTED)
def test_inside_shard_map(implementation):
    mesh = _mesh((8, 1), AxisType.Auto)
    built = build(CASE)
    operands = as_jax(built.operands)

    def loss(operands, d_out):
        return jax.lax.psum((CASE.call(operands, implementation=implementation) * d_out).sum(), "data")

    tokens = P(None, "data")
    specs = REPLICATED._replace(x=tokens)
    sharded = jax.shard_map(loss, mesh=mesh, in_specs=(specs, tokens), out_specs=P())
    got = jax.jit(jax.grad(sharded))(operands, built.d_out)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), got, _unsharded(CASE)[1])


# name: (replaced specs, pieces of the message)
REFUSED = {
    "features of x": ({"x": P(None, None, "model")}, "x is sharded along its features over mesh axes .'model',."),
    "input features": ({"w_up": P("data", None)}, "w_up is sharded along in features over mesh axes .'data',."),
    "output features": ({"w_down": P(None, "model")}, "w_down is sharded along out features over mesh axes .'model',."),
    "hidden in one only": (
        {"w_up": P(None, "model")},
        "w_gate is sharded along hidden features over mesh axes .., wanted",
    ),
    "one axis twice": (
        {**TENSOR._replace(x=P("model"))._asdict()},
        "both sharded over mesh axes .'model',.: each needs its own",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_layouts_are_refused(name):
    replaced, message = REFUSED[name]
    mesh = _mesh((4, 2), AxisType.Explicit)
    specs = REPLICATED._replace(x=P())._replace(**replaced)
    operands = oracle.Operands(
        *(jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(build(CASE).operands, specs, strict=True))
    )
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        jax.jit(CASE.call)(operands)


def test_outside_a_mesh_context():
    """The mesh is known from the arrays."""
    operands, _ = _placed(CASE, _mesh((4, 2), AxisType.Explicit), P("data"), TENSOR)
    np.testing.assert_allclose(jax.jit(CASE.call)(operands), _unsharded(CASE)[0], **CLOSE)


def test_outside_a_mesh_context_and_outside_jit():
    """Weights that were never placed join those that were."""
    built = build(CASE)
    rows = NamedSharding(_mesh((4, 2), AxisType.Explicit), P("data"))
    operands = as_jax(built.operands)._replace(x=jax.device_put(built.operands.x, rows))
    got = _step(CASE, "xla", operands, jax.device_put(built.d_out, rows))
    jax.tree.map(functools.partial(np.testing.assert_allclose, **CLOSE), got, _unsharded(CASE))


def test_partial_sums_do_not_add_the_bias_more_than_once():
    mesh = _mesh((1, 8), AxisType.Explicit)
    x, w_up, w_down = jnp.ones((2, 8)), jnp.zeros((8, 16)), jnp.zeros((16, 8))
    with jax.set_mesh(mesh):
        specs = ((w_up, P(None, "model")), (w_down, P("model")), (x, P()), (jnp.ones(8), P()))
        w_up, w_down, x, bias = (jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in specs)
        np.testing.assert_array_equal(fast_layers.mlp(x, w_up, w_down, b_down=bias), np.ones((2, 8)))

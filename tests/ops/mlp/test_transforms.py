"""jit, grad, vmap over anything, jacobians, remat, scan, export: each against what it stands for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_bitwise_equal

import fast_layers
from ops.attention.tracing import equations
from ops.mlp import oracle
from ops.mlp.cases import ALL, TESTED, Case, as_jax, build

CASE = Case((3, 4), 8, 24, 16, "silu", True, (True, True, True))
FAST = {"compiler_options": {"xla_backend_optimization_level": 0}}
# Members of a vmap are summed in another order than by themselves.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def _loss(implementation, case=CASE):
    weights = jnp.asarray(build(case).d_out)
    return lambda operands: (case.call(operands, implementation=implementation) * weights).sum()


@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize("mapped", [*oracle.Operands._fields, "all"])
def test_vmap_of_the_gradient_over_any_operand(implementation, mapped):
    first, second = (as_jax(build(CASE, draw=draw).operands) for draw in (0, 1))
    chosen = oracle.Operands._fields if mapped == "all" else (mapped,)
    stacked = first._replace(**{n: jnp.stack([getattr(first, n), getattr(second, n)]) for n in chosen})
    axes = oracle.Operands(*(0 if name in chosen else None for name in first._fields))
    gradient = jax.grad(_loss(implementation))
    got = jax.jit(jax.vmap(gradient, in_axes=(axes,)), **FAST)(stacked)
    for index, operands in enumerate((first, first._replace(**{n: getattr(second, n) for n in chosen}))):
        want = jax.jit(gradient, **FAST)(operands)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a[index], b, **CLOSE)


def test_the_reference_is_differentiated_to_any_order():
    operands = as_jax(build(CASE).operands)
    loss = _loss("reference")
    tangents = as_jax(build(CASE, draw=1).operands)
    _, forward = jax.jit(lambda o, t: jax.jvp(loss, (o,), (t,)), **FAST)(operands, tangents)
    gradient = jax.jit(jax.grad(loss), **FAST)(operands)
    product = sum(jnp.vdot(g, t) for g, t in zip(jax.tree.leaves(gradient), jax.tree.leaves(tangents), strict=True))
    np.testing.assert_allclose(forward, product, rtol=1e-4)
    curvature = jax.jit(lambda o, t: jax.jvp(jax.grad(loss), (o,), (t,))[1], **FAST)(operands, tangents)
    assert all(np.isfinite(a).all() and np.abs(a).max() > 0 for a in jax.tree.leaves(curvature[:4]))


@pytest.mark.parametrize("implementation", TESTED)
def test_jacobian_by_rows(implementation):
    case = Case((2,), 3, 4, 2, "gelu")
    x, *weights = as_jax(build(case).operands)

    def call(x, implementation):
        return case.call(oracle.Operands(x, *weights), implementation=implementation)

    got, want = (jax.jit(jax.jacrev(call), static_argnums=1, **FAST)(x, name) for name in (implementation, "reference"))
    np.testing.assert_allclose(got, want, **CLOSE)


@pytest.mark.parametrize("implementation", TESTED)
def test_mixed_passes(implementation, monkeypatch):
    """The forward of each backend may meet the backward of another: they share one residual contract."""
    import dataclasses

    from fast_layers import dispatch
    from fast_layers.ops.mlp import api
    from fast_layers.ops.mlp.backends import BACKENDS

    by_name = {backend.name: backend for backend in BACKENDS}
    one, other = by_name[implementation], by_name["reference"]
    operands = as_jax(build(CASE).operands)
    want = jax.jit(jax.grad(_loss("reference")), **FAST)(operands)
    for forward, backward in ((one, other), (other, one)):
        mixed = dispatch.Backend("mixed", lambda *_: None, lambda *a: forward.fwd(*a), backward.bwd)  # noqa: B023
        monkeypatch.setattr(api, "BACKENDS", (mixed, *BACKENDS))
        for save in ("pre_activation", "inputs"):
            got = jax.jit(jax.grad(_loss("mixed", dataclasses.replace(CASE, save=save))), **FAST)(operands)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), got, want)


@pytest.mark.parametrize("implementation", TESTED)
def test_remat_policies_know_what_is_saved(implementation):
    """Saving the named residuals, the backward has no matmul of the forward to repeat; without them it has two."""
    operands = as_jax(build(CASE).operands)

    def matmuls(policy):
        remat = jax.checkpoint(_loss(implementation), policy=policy)
        jaxpr = jax.make_jaxpr(jax.grad(remat))(operands)
        return sum(eqn.primitive.name == "dot_general" for eqn in equations(jaxpr))

    policies = jax.checkpoint_policies
    plain = matmuls(policies.everything_saveable)
    named = matmuls(policies.save_only_these_names(*fast_layers.MLP_RESIDUAL_NAMES))
    only_up = matmuls(policies.save_only_these_names(fast_layers.MLP_RESIDUAL_NAMES[0]))
    nothing = matmuls(policies.nothing_saveable)
    assert (named - plain, only_up - named, nothing - only_up) == (0, 1, 1)
    want = jax.jit(jax.grad(_loss(implementation)), **FAST)(operands)
    for policy in (policies.save_only_these_names(*fast_layers.MLP_RESIDUAL_NAMES), policies.nothing_saveable):
        got = jax.jit(jax.grad(jax.checkpoint(_loss(implementation), policy=policy)), **FAST)(operands)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), got, want)


@pytest.mark.parametrize("implementation", TESTED)
def test_scan_over_layers(implementation):
    case = Case((6,), 16, 24, 16, "gelu_tanh", biases=(True, True, True))
    layers = [as_jax(build(case, draw=draw).operands) for draw in range(3)]
    x = layers[0].x

    def one_by_one(x, layers):
        for layer in layers:
            x = x + case.call(layer._replace(x=x), implementation=implementation)
        return (x**2).sum()

    def scanned(x, stacked):
        def step(x, layer):
            return x + case.call(layer._replace(x=x), implementation=implementation), None

        return (jax.lax.scan(step, x, stacked)[0] ** 2).sum()

    weights = [layer._replace(x=None) for layer in layers]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights)
    want = jax.jit(jax.grad(one_by_one, argnums=1), **FAST)(x, weights)
    got = jax.jit(jax.grad(scanned, argnums=1), **FAST)(x, stacked)
    want = jax.tree.map(lambda *leaves: jnp.stack(leaves), *want)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)


@pytest.mark.parametrize("implementation", ["xla"])
def test_export_with_any_number_of_tokens(implementation):
    x, *weights = as_jax(build(CASE).operands)
    (tokens,) = jax.export.symbolic_shape("tokens")
    arguments = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in weights]
    symbolic = jax.ShapeDtypeStruct((tokens, 8), np.float32)

    def loss(x, weights):
        return CASE.call(oracle.Operands(x, *weights), implementation=implementation).sum()

    step = jax.grad(loss, argnums=(0, 1))
    exported = jax.export.export(jax.jit(step), platforms=("cpu", "cuda"))(symbolic, arguments)
    again = jax.export.deserialize(exported.serialize())
    for rows in (1, 12):
        given = (x.reshape(12, 8)[:rows], weights)
        want = jax.jit(step, **FAST)(*given)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), again.call(*given), want)


@pytest.mark.parametrize("implementation", TESTED)
def test_leading_dims_are_tokens(implementation):
    operands = build(CASE).operands
    flat = operands._replace(x=operands.x.reshape(12, 8))
    out, want = (CASE.call(o, implementation=implementation) for o in (operands, flat))
    assert out.shape == (3, 4, 16)
    assert_bitwise_equal(out.reshape(12, 16), want)
    assert CASE.call(operands._replace(x=operands.x[0, 0]), implementation=implementation).shape == (16,)


def test_gradients_of_a_layer_leave_together_on_one_device_only():
    operands = as_jax(build(CASE).operands)

    def barriers(devices):
        mesh = jax.make_mesh((devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        with jax.set_mesh(mesh):
            jaxpr = jax.make_jaxpr(jax.grad(_loss("xla")))(operands)
        return [len(eqn.invars) for eqn in equations(jaxpr) if eqn.primitive.name == "optimization_barrier"]

    recomputing = 3  # both pre-activations and the output's gradient
    assert barriers(1) == [recomputing, len(operands)]
    assert barriers(2) == [recomputing]

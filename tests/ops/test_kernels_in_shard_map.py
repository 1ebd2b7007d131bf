"""Kernels traced inside `shard_map`, the way out on several GPUs that their refusals name, and on explicitly sharded
arrays; nothing runs here.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fast_layers
from fast_layers import dispatch
from fast_layers.ops.attention.hopper_bwd_beside import Maker
from fast_layers.ops.ssd.config import HopperForwardTiles, HopperStateTiles
from ops.kernel_calls import H200, KERNELS, operands_of, ssd


def _mesh():
    return jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(AxisType.Auto,))


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch):
    call, arch, shapes = KERNELS[request.param]
    monkeypatch.setattr(dispatch, "lowering_targets", lambda: (arch,))
    return call, operands_of(shapes)


def test_gradients_have_the_types_of_their_operands(kernel):
    """The operands of each shard vary over the mesh, the weights do not."""
    call, operands = kernel

    def loss(*operands):
        return jax.lax.psum(call(*operands).astype(jnp.float32).sum(), "data")

    in_specs = (P("data"), *(P() for _ in operands[1:]))
    sharded = jax.shard_map(loss, mesh=_mesh(), in_specs=in_specs, out_specs=P())
    grads = jax.eval_shape(jax.grad(sharded, argnums=tuple(range(len(operands)))), *operands)
    assert [g.shape for g in grads] == [x.shape for x in operands]


def test_a_split_sequence(monkeypatch):
    """Splits start from zeros, which do not vary over the mesh, and go on with states that do."""
    monkeypatch.setattr(dispatch, "lowering_targets", lambda: (H200,))
    x = jax.ShapeDtypeStruct((4, 4096, 64), jnp.bfloat16)
    problem = fast_layers.explain(ssd("hopper"), x, a := jax.ShapeDtypeStruct((2,), jnp.float32)).plans[0].problem
    of_shard = dataclasses.replace(problem, batch=2)
    assert HopperForwardTiles.of(of_shard).splits > 2
    assert HopperStateTiles.of(of_shard).splits > 2
    sharded = jax.shard_map(ssd("hopper"), mesh=_mesh(), in_specs=(P("data"), P()), out_specs=P("data"))
    assert jax.eval_shape(sharded, x, a).shape == (4, 4096, 2, 64)
    grads = jax.eval_shape(jax.grad(lambda *args: sharded(*args).astype(jnp.float32).sum(), argnums=(0, 1)), x, a)
    assert [g.shape for g in grads] == [x.shape, a.shape]


def test_attention_whose_blocks_wait_for_one_another(monkeypatch):
    """On Hopper, of rows so long that dQ is made by blocks of the launch that leaves its dS."""
    monkeypatch.setattr(dispatch, "lowering_targets", lambda: (H200,))
    made, of = [], Maker.of
    monkeypatch.setattr(Maker, "of", lambda *args: made.append(args) or of(*args))

    def loss(x):
        out = fast_layers.dot_product_attention(x, x, x, is_causal=True, implementation="hopper")
        return jax.lax.psum(out.astype(jnp.float32).sum(), "data")

    x = jax.ShapeDtypeStruct((8, 4096, 16, 128), jnp.bfloat16)
    sharded = jax.shard_map(loss, mesh=_mesh(), in_specs=P("data"), out_specs=P())
    assert jax.eval_shape(jax.grad(sharded), x).shape == x.shape
    assert made


def test_results_of_a_shard_do_not_pass_for_those_of_all(kernel):
    call, operands = kernel
    in_specs = (P("data"), *(P() for _ in operands[1:]))
    with pytest.raises(ValueError, match=r"replicat|varying"):
        jax.eval_shape(jax.shard_map(call, mesh=_mesh(), in_specs=in_specs, out_specs=P()), *operands)


# By name, the layout of the operands. Groups of the norm are whole on each device.
EXPLICIT = {
    "conv": (
        lambda x, w: fast_layers.causal_conv1d(x, w, activation="silu", implementation="hopper"),
        [((8, 16, 512), P("data", None, "model")), ((4, 512), P())],
    ),
    "conv, the batch on one axis": (
        lambda x, w: fast_layers.causal_conv1d(x, w, implementation="hopper"),
        [((8, 16, 128), P("data")), ((4, 128), P())],
    ),
    "norm": (
        lambda y, w: fast_layers.gated_rms_norm(y, y, w, group_size=128, implementation="hopper"),
        [((8, 16, 512), P("data", None, "model")), ((512,), P())],
    ),
    "norm, rows of two axes": (
        lambda y, w: fast_layers.gated_rms_norm(y, y, w, implementation="hopper"),
        [((8, 16, 128), P("data", "model")), ((128,), P())],
    ),
}


def _explicit(specs):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:8])
    placed = (jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=jax.NamedSharding(mesh, spec)) for s, spec in specs)
    return mesh, list(placed)


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")
@pytest.mark.parametrize("name", EXPLICIT)
def test_explicitly_sharded_arrays(name, monkeypatch):
    call, specs = EXPLICIT[name]
    monkeypatch.setattr(dispatch, "lowering_targets", lambda: (H200,))
    mesh, operands = _explicit(specs)
    with jax.set_mesh(mesh):
        traced = jax.jit(jax.value_and_grad(lambda *o: call(*o).astype(jnp.float32).sum(), (0, 1))).trace(*operands)
    _, grads = traced.out_info
    assert [g.sharding.spec for g in grads] == [jax.typeof(x).sharding.spec for x in map(_zeros, operands)]
    assert "shard_map" in str(traced.jaxpr)


def _zeros(x):
    return jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding)


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")
def test_a_group_split_over_devices_is_left_to_xla(monkeypatch):
    monkeypatch.setattr(dispatch, "lowering_targets", lambda: (H200,))
    mesh, (y, w) = _explicit([((8, 16, 512), P("data", None, "model")), ((512,), P("model"))])
    with jax.set_mesh(mesh):
        (plan,) = fast_layers.explain(fast_layers.gated_rms_norm, y, y, w).plans
        assert plan.sole_backend("forward").name == "xla"
        assert "groups split over devices" in plan.problem.describe()
        with pytest.raises(ValueError, match="needs the features of a group on one device"):
            jax.eval_shape(lambda y, w: fast_layers.gated_rms_norm(y, y, w, implementation="hopper"), y, w)

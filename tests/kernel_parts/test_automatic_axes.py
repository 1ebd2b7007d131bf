"""Whether XLA may split what is traced; several GPUs are pretended."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from fast_layers.kernel_parts import automatic_axes


def test_several_gpus_without_a_mesh(monkeypatch):
    assert not automatic_axes.may_be_partitioned()
    monkeypatch.setattr(automatic_axes, "gpus_here", lambda: 2)
    assert automatic_axes.may_be_partitioned()
    with automatic_axes.on_one_device():
        assert not automatic_axes.may_be_partitioned()
        assert float(jax.jit(jnp.sum)(jnp.ones(3))) == 3
    assert automatic_axes.may_be_partitioned()


def test_inside_shard_map_nothing_is_left_to_split(monkeypatch):
    monkeypatch.setattr(automatic_axes, "gpus_here", lambda: 2)
    seen = []

    def on_shard(x):
        seen.append(automatic_axes.may_be_partitioned())
        return x

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    for axes, splits in (({"a", "b"}, False), ({"a"}, True)):
        seen.clear()
        mapped = jax.shard_map(on_shard, mesh=mesh, in_specs=P("a"), out_specs=P("a"), axis_names=axes)
        jax.eval_shape(mapped, jnp.ones((4, 4)))
        assert set(seen) == {splits}

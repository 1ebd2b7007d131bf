"""Whether XLA may spread what is being traced over several GPUs, which no kernel of ours can have done to it."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
from jax.sharding import AxisType

WAY_OUT = "several GPUs are here, and XLA cannot split this kernel by itself: call inside jax.shard_map"


def may_be_partitioned() -> bool:
    """XLA would run the whole kernel on each GPU."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return gpus_here() > 1
    return any(kind == AxisType.Auto and size > 1 for kind, size in zip(mesh.axis_types, mesh.axis_sizes, strict=True))


def xla_splits() -> bool:
    """Whether XLA spreads over several devices what is traced here, and nothing else does."""
    kinds = jax.sharding.get_abstract_mesh().axis_types or ()
    return may_be_partitioned() and all(kind == AxisType.Auto for kind in kinds)


def on_one_device() -> contextlib.AbstractContextManager[Any]:
    """On a machine with several GPUs, where no mesh says otherwise, what is traced inside is for the first one."""
    if gpus_here() < 2 or not jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    return jax.set_mesh(jax.make_mesh((1,), ("only",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1]))


def gpus_here() -> int:
    return sum(device.platform == "gpu" for device in jax.devices())

"""Whether XLA may spread what is being traced over several GPUs: a kernel must be told how, or else not be taken."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AxisType

WAY_OUT = "several GPUs are here, and XLA cannot split this kernel by itself: call inside jax.shard_map"


_on_a_shard = contextvars.ContextVar("fast_layers_on_a_shard", default=False)


@contextlib.contextmanager
def on_a_shard() -> Iterator[None]:
    """Of what is asked for inside, XLA has split off a device's part before: it spreads that no further."""
    token = _on_a_shard.set(True)
    try:
        yield
    finally:
        _on_a_shard.reset(token)


def may_be_partitioned() -> bool:
    """XLA would run the whole kernel on each GPU."""
    if _on_a_shard.get():
        return False
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return gpus_here() > 1
    return any(kind == AxisType.Auto and size > 1 for kind, size in zip(mesh.axis_types, mesh.axis_sizes, strict=True))


def xla_splits() -> bool:
    """Whether XLA spreads over several devices what is traced here, and nothing else does."""
    mesh = jax.sharding.get_abstract_mesh()
    several = [kind for kind, size in zip(mesh.axis_types, mesh.axis_sizes, strict=True) if size > 1]
    return may_be_partitioned() and all(kind == AxisType.Auto for kind in several)


def refusal() -> str | None:
    """Of a kernel that XLA is told how to split: where some axes of the mesh are automatic, and others not."""
    if may_be_partitioned() and not xla_splits():
        kinds = jax.sharding.get_abstract_mesh().axis_types
        return f"{WAY_OUT}, or make all axes of the mesh automatic, or all explicit (here they are {kinds})"
    return None


def on_one_device() -> contextlib.AbstractContextManager[Any]:
    """On a machine with several GPUs, where no mesh says otherwise, what is traced inside is for the first one."""
    if gpus_here() < 2 or not jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    return jax.set_mesh(jax.make_mesh((1,), ("only",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1]))


def gpus_here() -> int:
    return sum(device.platform == "gpu" for device in jax.devices())

"""Mesh axes in the types of arrays: those over which a value varies inside `jax.shard_map`, which JAX tracks and on
which loops must agree, and those over which it is explicitly sharded.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding


def varying_axes(x: jax.Array) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying  # pyright: ignore[reportAttributeAccessIssue]


def vary_over(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """`x`, marked as varying over `axes` too; x itself outside `shard_map`."""
    missing = tuple(sorted(axes - varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def vary_alike(operands: Any) -> Any:
    """A pytree whose arrays vary over all axes that any of them varies over.

    A gradient rule then gets cotangents of one type, and JAX sums those of replicated operands.
    """
    union = frozenset().union(*map(varying_axes, jax.tree.leaves(operands)))
    return jax.tree.map(lambda x: vary_over(x, union), operands)


def explicit_axes(x: jax.Array) -> tuple[tuple[str, ...], ...]:
    """The explicit mesh axes (`AxisType.Explicit`) of each dimension, from the array's type."""
    sharding = jax.typeof(x).sharding
    kinds = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
    spec = (*sharding.spec, *(None,) * (x.ndim - len(sharding.spec)))
    entries = ((entry,) if isinstance(entry, str) else entry or () for entry in spec)
    return tuple(tuple(name for name in entry if kinds[name] == AxisType.Explicit) for entry in entries)


def mesh_of(operands: Any) -> AbstractMesh | None:
    """The mesh over which any array of the pytree is explicitly sharded, known also outside `jax.set_mesh`."""
    for x in jax.tree.leaves(operands):
        if any(explicit_axes(x)):
            return jax.typeof(x).sharding.mesh
    return None


def explicit_names(mesh: AbstractMesh) -> set[str]:
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name for name, kind in kinds if kind == AxisType.Explicit}


def lay_out(operands: Any, specs: Any, mesh: AbstractMesh) -> Any:
    """The pytree's arrays, sharded over the mesh's explicit axes as its PartitionSpecs say."""
    arrays, tree = jax.tree.flatten(operands)
    shardings = tuple(NamedSharding(mesh, spec) for spec in tree.flatten_up_to(specs))
    return tree.unflatten(_reshard(arrays, shardings))


@functools.partial(jax.jit, static_argnums=1)
def _reshard(arrays: list[jax.Array], shardings: tuple[NamedSharding, ...]) -> list[jax.Array]:
    """Under jit even outside of any mesh context: alone, an array of one device knows none of the mesh's others."""
    return [jax.sharding.reshard(x, sharding) for x, sharding in zip(arrays, shardings, strict=True)]

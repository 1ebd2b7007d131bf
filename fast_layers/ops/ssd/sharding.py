"""The scan on sharded arrays: batch and heads are independent, so each device computes its own part.

Under automatic sharding XLA partitions the `xla` backend by itself, and is told how kernels may be split. Under
explicit sharding (`AxisType.Explicit`) the arrays' types say how they are laid out, and the call runs per shard in
`jax.shard_map`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from fast_layers.kernel_parts.manual_axes import explicit_axes, explicit_names, lay_out, mesh_of, vary_alike
from fast_layers.kernel_parts.split_by_xla import OfShards, Split
from fast_layers.ops.ssd.problem import Aux, Inputs, Problem, Residuals, Scanned

# What the dimensions of each operand are, by its field name; None is never sharded.
_DIMENSIONS = {
    "x": ("batch", None, "heads", None),
    "dt": ("batch", None, "heads"),
    "A": ("heads",),
    "B": ("batch", None, "groups", None),
    "C": ("batch", None, "groups", None),
    "D": ("heads", None),
    "z": ("batch", None, "heads", None),
    "dt_bias": ("heads",),
    "initial_state": ("batch", "heads", None, None),
    "document": ("batch", None),
    "out": ("batch", None, "heads", None),
    "final_state": ("batch", "heads", None, None),
}


def per_shard(scan: Callable[[Inputs, Aux], Scanned], inputs: Inputs, aux: Aux) -> Scanned:
    """`scan(inputs, aux)`, on each device's shard if x is explicitly sharded; the other operands follow x."""
    batch_axes, head_axes = _explicit_axes(inputs)
    mesh = mesh_of((inputs, aux))
    if mesh is None:
        return scan(*vary_alike((inputs, aux)))
    heads, groups = inputs.x.shape[2], inputs.B.shape[2]
    shards = math.prod(mesh.shape[name] for name in head_axes)
    if groups % shards and shards % groups:
        raise ValueError(
            f"{groups} groups do not fit {shards} shards of {heads} heads (mesh axes {head_axes}): one must be a "
            "multiple of the other; shard the heads over fewer devices"
        )
    replicated_groups = groups % shards != 0

    def on_shard(inputs: Inputs, aux: Aux):
        if replicated_groups:
            # Fewer groups than shards: each shard takes the one that its heads read.
            own = lax.axis_index(head_axes) * inputs.x.shape[2] // (heads // groups)
            B, C = (lax.dynamic_slice_in_dim(v, own, 1, 2) for v in (inputs.B, inputs.C))
            inputs = inputs._replace(B=B, C=C)
        return scan(*vary_alike((inputs, aux)))

    axes_of = {"batch": batch_axes, "heads": head_axes, "groups": () if replicated_groups else head_axes, None: None}

    def spec(path, operand):
        return P(*(axes_of[dim] for dim in _DIMENSIONS[path[-1].name][: operand.ndim]))

    operands = (inputs, aux)
    in_specs = jax.tree_util.tree_map_with_path(spec, operands)
    operands = lay_out(operands, in_specs, mesh)
    out_specs: list[Any] = [P(batch_axes, None, head_axes, None), P(batch_axes, head_axes, None, None)]
    # If x is whole, so is now everything, and each device computes all.
    names = {*batch_axes, *head_axes} or explicit_names(mesh)
    split = jax.shard_map(on_shard, mesh=mesh, in_specs=in_specs, out_specs=Scanned(*out_specs), axis_names=names)
    return split(*operands)


def _explicit_axes(inputs: Inputs) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The explicit mesh axes over which x's batch and heads are sharded; refuses other sharded dimensions."""
    found: dict[str, tuple[str, ...]] = {}
    for operand, x, names in (
        ("x", inputs.x, ("batch", "length", "heads", "head_dim")),
        ("B", inputs.B, ("batch", "length", "groups", "state_dim")),
        ("C", inputs.C, ("batch", "length", "groups", "state_dim")),
    ):
        for name, axes in zip(names, explicit_axes(x), strict=True):
            if axes and name in ("length", "head_dim", "state_dim"):
                raise ValueError(
                    f"{operand} is sharded along {name} over mesh axes {axes}: the scan needs it whole; shard batch "
                    "and heads instead, e.g. jax.sharding.reshard(x, P('data', None, 'model', None))"
                )
            if axes and operand == "x":
                found[name] = axes
            elif axes and name == "batch" and found.get("batch", ()) != axes:
                raise ValueError(
                    f"{operand} is sharded along batch over mesh axes {axes}, x over {found.get('batch', ())}: both "
                    "must be the same; reshard one of them"
                )
    return found.get("batch", ()), found.get("heads", ())


def _of_shard(problem: Problem, given: Inputs | Residuals, *others: Any) -> Problem:
    del others
    inputs = given if isinstance(given, Inputs) else given.inputs
    batch, _, heads, _ = inputs.x.shape
    return dataclasses.replace(problem, batch=batch, heads=heads, groups=inputs.B.shape[2])


def by_xla(method: OfShards, problem: Problem, *operands: Any) -> Any:
    """`method(problem, *operands)`, a kernel's forward or backward, each device's part of it by itself."""
    facts = _DIMENSIONS, ("out", "final_state"), "heads", "groups", _of_shard
    return Split.of_pass(*facts, method, problem, *operands, backward=len(operands) > 2)(*operands)

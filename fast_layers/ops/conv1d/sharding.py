"""The convolution on sharded arrays: batch and channels are independent, so each device computes its own part.

Under automatic sharding XLA partitions the `xla` backend by itself, and is told how kernels may be split. Under
explicit sharding (`AxisType.Explicit`) the arrays' types say how they are laid out, and the call runs per shard in
`jax.shard_map`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from fast_layers.kernel_parts.manual_axes import explicit_axes, explicit_names, lay_out, mesh_of, vary_alike
from fast_layers.kernel_parts.split_by_xla import OfShards, Split
from fast_layers.ops.conv1d.problem import Aux, Inputs, Outputs, Problem

_DIMENSIONS = {
    "x": ("batch", None, "channels"),
    "w": (None, "channels"),
    "b": ("channels",),
    "initial_state": ("batch", "channels", None),
    "reach": ("batch", None),
    "y": ("batch", None, "channels"),
    "final_state": ("batch", "channels", None),
}
"""By the names of operands and results; None is never split."""


def refuse_split_length(name: str, x: Array) -> None:
    """Raise ValueError if the second dimension is sharded."""
    if axes := explicit_axes(x)[1]:
        raise ValueError(
            f"{name} is sharded along length over mesh axes {axes}: each position needs those before it; shard batch "
            "and channels instead, e.g. jax.sharding.reshard(x, P('data', None, 'model'))"
        )


def per_shard(convolve: Callable[[Inputs, Aux], Outputs], inputs: Inputs, aux: Aux) -> Outputs:
    """`convolve(inputs, aux)`, on each device's shard if x is explicitly sharded; the other operands follow x."""
    mesh = mesh_of((inputs, aux))
    if mesh is None:
        return convolve(*vary_alike((inputs, aux)))
    batch, _, channels = (axes or None for axes in explicit_axes(inputs.x))
    # One row of ids is shared by all examples, so every shard has it whole.
    shared_ids = aux.reach is not None and aux.reach.shape[0] == 1
    axes_of = {"batch": batch, "channels": channels, None: None}
    specs = {name: P(*(axes_of[dim] for dim in dims)) for name, dims in _DIMENSIONS.items()}
    if shared_ids:
        specs["reach"] = P()
    operands = (inputs, aux)
    in_specs = jax.tree_util.tree_map_with_path(lambda path, _: specs[path[-1].name], operands)
    out_specs = Outputs(specs["y"], specs["final_state"])  # pyright: ignore[reportArgumentType]
    split = jax.shard_map(
        lambda inputs, aux: convolve(*vary_alike((inputs, aux))),
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        # If x is whole, so is now everything, and each device computes all.
        axis_names={*(batch or ()), *(channels or ())} or explicit_names(mesh),
    )
    return split(*lay_out(operands, in_specs, mesh))


def _of_shard(problem: Problem, inputs: Inputs, *others: Any) -> Problem:
    del others
    batch, _, channels = inputs.x.shape
    return dataclasses.replace(problem, batch=batch, channels=channels)


def by_xla(method: OfShards, problem: Problem, *operands: Any) -> Any:
    """`method(problem, *operands)`, a kernel's forward or backward, each device's part of it by itself."""
    results = ("y", "final_state") if problem.final_state else ("y",)
    facts = _DIMENSIONS, results, "channels", "channels", _of_shard
    return Split.of_pass(*facts, method, problem, *operands, backward=len(operands) > 2)(*operands)

"""The gated norm on sharded arrays: rows are independent, and so are groups, so each device computes its own part.

Under automatic sharding XLA partitions the `xla` backend by itself, and is told how kernels may be split: by rows and
whole groups, and where one group is spread over devices, each computes its part in plain XLA and they add up its sums.

Under explicit sharding (`AxisType.Explicit`) the arrays' types say how they are laid out, and the call runs per shard
in `jax.shard_map`; but where features of one group are on several devices, the whole is left to XLA: it adds up over
devices if there is one group, else features are gathered first.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from fast_layers.kernel_parts.manual_axes import explicit_axes, explicit_names, lay_out, mesh_of, vary_alike
from fast_layers.kernel_parts.split_by_xla import OfShards, Split
from fast_layers.ops.gated_norm import xla
from fast_layers.ops.gated_norm.problem import Inputs, Problem


def per_shard(normalise: Callable[[Problem, Inputs], Array], problem: Problem, inputs: Inputs) -> Array:
    """`normalise(problem, inputs)`, on each device's shard if y is explicitly sharded; the other operands follow y."""
    mesh = mesh_of(inputs)
    if mesh is None:
        return normalise(problem, vary_alike(inputs))
    *rows, features = (axes or None for axes in explicit_axes(inputs.y))
    by_row: Any = P(*rows, features)
    weight: Any = P(features)
    specs = Inputs(by_row, by_row, weight)
    inputs = lay_out(inputs, specs, mesh)
    own = problem.features // math.prod(mesh.shape[name] for name in features or ())
    if own % problem.group_size:
        left_to_xla = dataclasses.replace(problem, split_groups=True)
        if problem.group_size == problem.features:
            return normalise(left_to_xla, inputs)
        of_rows: Any = P(*rows)
        of_weight: Any = P()
        gathered = lay_out(inputs, Inputs(of_rows, of_rows, of_weight), mesh)
        return lay_out(normalise(left_to_xla, gathered), by_row, mesh)

    def on_shard(inputs: Inputs) -> Array:
        *rows, features = inputs.y.shape
        return normalise(dataclasses.replace(problem, rows=tuple(rows), features=features), vary_alike(inputs))

    # If y is whole, so is now everything, and each device computes all.
    names = {name for axes in (*rows, features) for name in axes or ()} or explicit_names(mesh)
    return jax.shard_map(on_shard, mesh=mesh, in_specs=(specs,), out_specs=specs.y, axis_names=names)(inputs)


def _of_shard(problem: Problem, inputs: Inputs, *others: Any) -> Problem:
    del others
    *rows, features = inputs.y.shape
    size = min(problem.group_size, features)
    return dataclasses.replace(problem, rows=tuple(rows), features=features, group_size=size)


def _forward_of_part(problem: Problem, axes: tuple[str, ...], inputs: Inputs) -> Array:
    return xla.forward(problem, inputs, axes)


def _backward_of_part(problem: Problem, axes: tuple[str, ...], inputs: Inputs, d_out: Array) -> Inputs:
    return xla.backward(problem, inputs, d_out, axes)


def by_xla(method: OfShards, problem: Problem, *operands: Any) -> Any:
    """`method(problem, *operands)`, a kernel's forward or backward, each device's part of it by itself."""
    of_rows = ("batch", *(f"rows_{i}" for i in range(1, len(problem.rows))))[: len(problem.rows)]
    by_row = (*of_rows, "features")
    dimensions = {"y": by_row, "z": by_row, "weight": ("features",)}
    facts = dimensions, ("y",), "features", "features", _of_shard
    backward = len(operands) > 1
    split = Split.of_pass(*facts, method, problem, *operands, backward=backward)
    joined = _backward_of_part if backward else _forward_of_part
    return dataclasses.replace(split, unit=problem.group_size, joined=joined)(*operands)

"""Attention on sharded arrays: batch and heads are independent, so each device computes its own part.

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

from fast_layers.kernel_parts.manual_axes import explicit_axes, lay_out, vary_alike
from fast_layers.kernel_parts.split_by_xla import OfShards, Split
from fast_layers.ops.attention import hopper_call
from fast_layers.ops.attention.problem import Aux, Inputs, MaskFacts, Problem, Residuals

# What the dimensions of each operand are, by its field name; None is never sharded.
_DIMENSIONS = {
    "query": ("batch", None, "heads", None),
    "key": ("batch", None, "kv_heads", None),
    "value": ("batch", None, "kv_heads", None),
    "bias": ("batch", "heads", None, None),
    "sinks": ("heads",),
    "start": ("batch", None),
    "stop": ("batch", None),
    "query_segments": ("batch", None),
    "key_segments": ("batch", None),
    "scattered": ("batch", None),
    "offset": ("batch", None),
    "lengths": ("batch", None),
    "dense": ("batch", "heads", None, None),
    "words": (None,),
    "batch_index": ("batch",),
    "head_index": ("heads",),
    "out": ("batch", None, "heads", None),
    "lse": ("batch", "heads", None),
    "sizes": ("batch", "kv_heads", None, None, None),
}


def per_shard(attend: Callable[[Inputs, Aux], Any], inputs: Inputs, aux: Aux) -> Any:
    """`attend(inputs, aux)`, on each device's shard if the inputs are explicitly sharded."""
    batch_axes, head_axes = _explicit_axes(inputs)
    if not batch_axes and not head_axes:
        return attend(*vary_alike((inputs, aux)))
    heads, kv_heads = inputs.query.shape[2], inputs.key.shape[2]
    mesh = jax.typeof(inputs.query).sharding.mesh
    shards = math.prod(mesh.shape[name] for name in head_axes)
    if kv_heads % shards and shards % kv_heads:
        raise ValueError(
            f"{kv_heads} key heads do not fit {shards} shards of {heads} query heads (mesh axes {head_axes}): "
            "one must be a multiple of the other; shard the heads over fewer devices"
        )
    replicated_kv = kv_heads % shards != 0

    def on_shard(inputs: Inputs, aux: Aux):
        if replicated_kv:
            # Fewer key heads than shards: each shard takes the one that its queries read.
            first_head = lax.axis_index(head_axes) * inputs.query.shape[2]
            own = first_head // (heads // kv_heads)
            key, value = (lax.dynamic_slice_in_dim(x, own, 1, 2) for x in (inputs.key, inputs.value))
            inputs = inputs._replace(key=key, value=value)
        return attend(*vary_alike((inputs, aux)))

    axes_of = {"batch": batch_axes, "heads": head_axes, "kv_heads": () if replicated_kv else head_axes, None: None}

    def spec(path, x):
        # A dimension of 1 is shared by all examples or heads, so every shard has it whole.
        dims = _DIMENSIONS[path[-1].name]
        return P(*(axes_of[dim] if size != 1 else None for dim, size in zip(dims, x.shape, strict=True)))

    operands = (inputs, aux)
    in_specs = jax.tree_util.tree_map_with_path(spec, operands)
    operands = lay_out(operands, in_specs, mesh)
    out_specs = (P(batch_axes, None, head_axes, None), P(batch_axes, head_axes, None))
    names = {*batch_axes, *head_axes}
    split = jax.shard_map(on_shard, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=names)
    return split(*operands)


def _explicit_axes(inputs: Inputs) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The explicit mesh axes over which batch and query heads are sharded; refuses other sharded dimensions."""
    names = ("batch", "length", "heads", "depth")
    found: dict[str, tuple[str, ...]] = {}
    for operand, x in (("query", inputs.query), ("key", inputs.key), ("value", inputs.value)):
        for name, axes in zip(names, explicit_axes(x), strict=True):
            if axes and name in ("length", "depth"):
                raise ValueError(
                    f"{operand} is sharded along {name} over mesh axes {axes}: attention here needs whole rows; "
                    "shard batch and heads instead, e.g. jax.sharding.reshard(x, P('data', None, 'model', None))"
                )
            if axes and operand == "query":
                found[name] = axes
            elif axes and name == "batch" and found.get("batch", ()) != axes:
                raise ValueError(
                    f"{operand} is sharded along batch over mesh axes {axes}, query over "
                    f"{found.get('batch', ())}: both must be the same; reshard one of them"
                )
    return found.get("batch", ()), found.get("heads", ())


def _of_shard(problem: Problem, given: Inputs | Residuals, *others: Any) -> Problem:
    inputs, aux = (given, others[0]) if isinstance(given, Inputs) else (given.inputs, given.aux)
    return dataclasses.replace(
        problem,
        batch=inputs.query.shape[0],
        heads=inputs.query.shape[2],
        kv_heads=inputs.key.shape[2],
        mask=MaskFacts.of(aux.mask),
        bias=None if inputs.bias is None else inputs.bias.shape,
    )


def by_xla(method: OfShards, problem: Problem, *operands: Any) -> Any:
    """`method(problem, *operands)`, a kernel's forward or backward, each device's part of it by itself."""
    results: tuple[str, ...] = ("out", "lse")
    largest: tuple[int, ...] = ()
    if method.kernel is hopper_call.forward_saving:
        results, largest = (*results, "sizes"), (len(results),)
    facts = _DIMENSIONS, results, "heads", "kv_heads", _of_shard
    split = Split.of_pass(*facts, method, problem, *operands, backward=len(operands) > 2)
    return dataclasses.replace(split, largest=largest)(*operands)

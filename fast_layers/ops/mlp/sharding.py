"""The MLP on sharded arrays: tokens are independent, and so are hidden features until the down-projection adds them.

Under automatic sharding XLA partitions the `xla` backend by itself. Under explicit sharding (`AxisType.Explicit`) the
arrays' types say how they are laid out, and the call runs per shard in `jax.shard_map`: tokens over some mesh axes,
hidden features over others (tensor parallelism), whose partial outputs are summed.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from fast_layers.kernel_parts.manual_axes import explicit_axes, lay_out, mesh_of, vary_alike
from fast_layers.ops.mlp.problem import Inputs

# What the dimensions of each weight are; I and O are never sharded.
_DIMENSIONS = {
    "w_up": ("in", "hidden"),
    "w_gate": ("in", "hidden"),
    "w_down": ("hidden", "out"),
    "b_up": ("hidden",),
    "b_gate": ("hidden",),
    "b_down": ("out",),
}


def per_shard(apply: Callable[[Inputs], Array], inputs: Inputs) -> Array:
    """`apply(inputs)`, on each device's shard if the inputs are explicitly sharded. x has its own leading dims."""
    *token_axes, feature_axes = explicit_axes(inputs.x)
    if feature_axes:
        raise ValueError(
            f"x is sharded along its features over mesh axes {feature_axes}: the matmul here needs whole rows; shard "
            "its leading dims instead, e.g. jax.sharding.reshard(x, P('data', None, None))"
        )
    hidden_axes = _hidden_axes(inputs)
    both = sorted(set(hidden_axes) & {name for axes in token_axes for name in axes})
    if both:
        raise ValueError(
            f"x's tokens and the weights' hidden features are both sharded over mesh axes {tuple(both)}: each needs "
            "its own; reshard one of them"
        )
    names = {name for axes in (*token_axes, hidden_axes) for name in axes}
    mesh = mesh_of(inputs)
    if mesh is None:
        return apply(vary_alike(inputs))

    def on_shard(inputs: Inputs) -> Array:
        if inputs.w_down is None or not hidden_axes:
            return apply(vary_alike(inputs))
        # The bias belongs to the sum, not to each of its parts.
        partial = apply(vary_alike(inputs._replace(b_down=None)))
        out = lax.psum(partial, hidden_axes)
        return out if inputs.b_down is None else out + inputs.b_down.reshape((1,) * (out.ndim - 1) + (-1,))

    axes_of = {"hidden": hidden_axes or None, "in": None, "out": None}
    tokens = tuple(axes or None for axes in token_axes)
    weights = {name: P(*(axes_of[dim] for dim in dims)) for name, dims in _DIMENSIONS.items()}
    given = {name: spec for name, spec in weights.items() if getattr(inputs, name) is not None}
    in_specs = inputs._replace(x=P(*tokens, None), **given)
    out_specs = P(*tokens, None if inputs.w_down is not None else hidden_axes or None)
    inputs = lay_out(inputs, in_specs, mesh)
    return jax.shard_map(on_shard, mesh=mesh, in_specs=(in_specs,), out_specs=out_specs, axis_names=names)(inputs)


def _hidden_axes(inputs: Inputs) -> tuple[str, ...]:
    """The explicit mesh axes over which the hidden features are sharded, in all weights alike; refuses others."""
    hidden_axes = explicit_axes(inputs.w_up)[1]
    for name, dims in _DIMENSIONS.items():
        weight = getattr(inputs, name)
        if weight is None:
            continue
        for dim, axes in zip(dims, explicit_axes(weight), strict=True):
            wanted = hidden_axes if dim == "hidden" else ()
            if axes != wanted:
                raise ValueError(
                    f"{name} is sharded along {dim} features over mesh axes {axes}, wanted {wanted}: hidden features "
                    "may be sharded, alike in all weights and biases, and input and output features not; "
                    "jax.sharding.reshard it"
                )
    return hidden_axes

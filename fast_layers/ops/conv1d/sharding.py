"""The convolution on explicitly sharded arrays (`AxisType.Explicit`): batch and channels are independent, so all
operands that are joined with x, or select from it, are laid out as x is.
"""

from __future__ import annotations

from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from fast_layers.kernel_parts.manual_axes import explicit_axes, lay_out, mesh_of
from fast_layers.ops.conv1d.problem import Aux, Inputs


def refuse_split_length(name: str, x: Array) -> None:
    """Raise ValueError if the second dimension is sharded."""
    if axes := explicit_axes(x)[1]:
        raise ValueError(
            f"{name} is sharded along length over mesh axes {axes}: each position needs those before it; shard batch "
            "and channels instead, e.g. jax.sharding.reshard(x, P('data', None, 'model'))"
        )


def follow_x(inputs: Inputs, aux: Aux) -> tuple[Inputs, Aux]:
    mesh = mesh_of((inputs, aux))
    if mesh is None:
        return inputs, aux
    batch, _, channels = (axes or None for axes in explicit_axes(inputs.x))
    if inputs.initial_state is not None:
        inputs = inputs._replace(initial_state=lay_out(inputs.initial_state, P(batch, channels, None), mesh))
    if aux.reach is not None:
        # One row of ids is shared by all examples, so every shard has it whole.
        aux = Aux(lay_out(aux.reach, P(batch if aux.reach.shape[0] != 1 else None, None), mesh))
    return inputs, aux

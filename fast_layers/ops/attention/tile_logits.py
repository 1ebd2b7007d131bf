"""What each score has of its own inside a kernel: a bias, a place in a boolean mask, a keep decision.

Axis letters: B batch, T queries, S keys, N query heads.

Biases and masks are read from the GPU's memory, a tile at a time, straight to where the scores stand; an axis of size 1
serves all. Where scores stand keys first (backward) these arrays come with their last two axes exchanged.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Int8

from fast_layers.kernel_parts.dropout import DropoutSeed
from fast_layers.kernel_parts.dropout_in_registers import keep_in_registers
from fast_layers.ops.attention.kernel_operands import pad_axis, round_up
from fast_layers.ops.attention.problem import Aux, Inputs, Problem

WGMMA = plgpu.Layout.WGMMA


class LogitOperands(NamedTuple):
    """Padded to whole tiles; None for what a call does not have."""

    bias: Float[Array, "B|1 N|1 T|1 S|1"] | None
    dense: Int8[Array, "B|1 N|1 T|1 S|1"] | None
    """1 where a query may see a key."""
    dropout: Int[Array, "B|1 N|1 4"] | None
    """The seed's two words, head and example, bit for bit in int32."""

    @classmethod
    def of(cls, inputs: Inputs, aux: Aux, q_tile: int, kv_tile: int, *, keys_first: bool = False) -> LogitOperands:
        def whole(x, dtype):
            if x is None:
                return None
            for axis, tile in ((2, q_tile), (3, kv_tile)):
                x = x if x.shape[axis] == 1 else pad_axis(x, round_up(x.shape[axis], tile), axis)
            return (x.swapaxes(2, 3) if keys_first else x).astype(dtype)

        bias = None if inputs.bias is None else whole(inputs.bias, inputs.bias.dtype)
        return cls(bias, whole(aux.mask.dense, jnp.int8), None if aux.dropout is None else _packed(aux.dropout))


def _packed(seed: DropoutSeed) -> Int[Array, "B|1 N|1 4"]:
    shape = (seed.batch_index.shape[0], seed.head_index.shape[0])
    words = (seed.words[0], seed.words[1], seed.head_index[None, :], seed.batch_index[:, None])
    return lax.bitcast_convert_type(jnp.stack([jnp.broadcast_to(x, shape) for x in words], -1), jnp.int32)


class TileLogits:
    """`refs` are `LogitOperands` in the GPU's memory; `layout` is that of scores in registers."""

    def __init__(self, problem: Problem, refs: LogitOperands, layout: Any = WGMMA):
        self.problem, self.refs, self.layout = problem, refs, layout
        self.survived = 1.0 / (1.0 - problem.dropout_rate)
        """What a weight that is kept is multiplied by."""

    def bias(self, example: Any, head: Any, q_start: Any, k_start: Any, shape: Any, q_axis: int) -> Any:
        """In float32."""
        return self._load(self.refs.bias, example, head, q_start, k_start, shape, q_axis).astype(jnp.float32)

    def visible(self, example: Any, head: Any, q_start: Any, k_start: Any, shape: Any, q_axis: int) -> Any:
        return self._load(self.refs.dense, example, head, q_start, k_start, shape, q_axis).astype(jnp.int32) != 0

    def keep(self, example: Any, head: Any, q_start: Any, k_start: Any, shape: Any, q_axis: int) -> Any:
        ref: Any = self.refs.dropout
        seed = ref.at[_shared(ref, 0, example), _shared(ref, 1, head)]
        *words, head_index, example_index = (seed[i].astype(jnp.uint32) for i in range(4))
        rate, layout = self.problem.dropout_rate, self.layout
        return keep_in_registers(tuple(words), example_index, head_index, q_start, k_start, shape, q_axis, rate, layout)

    def _load(self, ref: Any, example: Any, head: Any, q_start: Any, k_start: Any, shape: Any, q_axis: int) -> Any:
        """A tile, [queries, keys] or the other way round."""
        starts = (q_start, k_start) if q_axis == 0 else (k_start, q_start)
        whole = [axis for axis in (0, 1) if ref.shape[2 + axis] > 1]
        window = (pl.ds(starts[axis], shape[axis]) if axis in whole else 0 for axis in (0, 1))
        at = ref.at[(_shared(ref, 0, example), _shared(ref, 1, head), *window)]
        if not whole:
            return lax.broadcast_in_dim(at[...], shape, [])
        layout = self.layout if len(whole) == 2 else self.layout.reduce(1 - whole[0])
        loaded = plgpu.load(at, layout=layout, optimized=False)
        return loaded if len(whole) == 2 else lax.broadcast_in_dim(loaded, shape, whole)


def _shared(ref: Any, axis: int, index: Any) -> Any:
    return index if ref.shape[axis] > 1 else 0

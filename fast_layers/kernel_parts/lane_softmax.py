"""`OnlineSoftmax` for scores in wgmma's layout, where a thread sums what it holds of a row: less for each piece to do.

Axis letters: R rows, S keys of one piece.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from fast_layers.kernel_parts.online_softmax import OnlineSoftmax

COLUMNS = 8
"""From one of the pairs of columns that a thread holds of a row to the next."""


class LaneSoftmax(NamedTuple):
    """Maximum (of scores times log2 e) and parts of the sum of what a row has seen.

    The maximum starts at the least finite number: that row's weights are 0 whose scores are all -inf.
    """

    row_max_log2: Float[Array, " R"]
    sums: Float[Array, "R 8"]

    @classmethod
    def start(cls, rows: int) -> LaneSoftmax:
        layout = plgpu.Layout.WGMMA
        row_max = plgpu.layout_cast(jnp.full((rows,), jnp.finfo(jnp.float32).min), layout.reduce(1))
        return cls(row_max, plgpu.layout_cast(jnp.zeros((rows, COLUMNS), jnp.float32), layout))

    def step(self, scores: Float[Array, "R S"], to_log2: float, keeps_maximum: Any = None):
        """(state, weights [R, S], rescale [R]), as `OnlineSoftmax.step`; the maximum stays where `keeps_maximum`."""
        old = self.row_max_log2
        row_max = jnp.maximum(old, scores.max(axis=1) * to_log2)
        if keeps_maximum is not None:
            row_max = lax.cond(keeps_maximum, lambda old, new: old, lambda old, new: new, old, row_max)
        weights = jnp.exp2(scores * to_log2 - lax.broadcast_in_dim(row_max, scores.shape, [0]))
        rescale = jnp.exp2(old - row_max)
        sums = self.sums * lax.broadcast_in_dim(rescale, self.sums.shape, [0])
        for column in range(0, scores.shape[1], COLUMNS):
            sums += weights[:, column : column + COLUMNS]
        return LaneSoftmax(row_max, sums), weights, rescale

    def whole(self) -> OnlineSoftmax:
        return OnlineSoftmax(self.row_max_log2, self.sums.sum(axis=1))

"""A softmax over a row that arrives in pieces, relative to the maximum of its first piece alone.

Later maxima change nothing, so that no step waits for one and nothing that was summed is ever rescaled. Weights are
powers of two with a float's range: they are as exact as those of `OnlineSoftmax`, until one or their sum is no finite
number any more, or too small. That shows at the end (`failed`), and then the row is to be done with all maxima.

Axis letters: R rows, S keys of one piece.

Source: the unified maximum of Hong et al., "FlashDecoding++" (2023), there told before the call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from fast_layers.kernel_parts.lane_softmax import COLUMNS
from fast_layers.kernel_parts.online_softmax import OnlineSoftmax

_LEAST_SUM = 2.0**-64
"""A weight may be so much less than the largest, and a value so small, before float32 has too few bits for them."""
_LARGE_SUM = 2.0**20
"""With less, what overflows would do so with weights up to 1, or nearly."""


class FirstMaximumSoftmax(NamedTuple):
    """The maximum (of scores times log2 e) of a row's first piece, 0 if that is less; and parts of the sum.

    None before the first step. Scores stand in wgmma's layout, where a thread sums what it holds of a row.
    """

    row_max_log2: Float[Array, " R"] | None = None
    sums: Float[Array, "R 8"] | None = None

    def step(self, scores: Float[Array, "R S"], to_log2: float):
        """(state, weights [R, S], None), as `OnlineSoftmax.step` where nothing is to be rescaled."""
        row_max, sums = self
        if row_max is None:
            row_max = jnp.maximum(scores.max(axis=1) * to_log2, 0.0)
        weights = jnp.exp2(scores * to_log2 - lax.broadcast_in_dim(row_max, scores.shape, [0]))
        for column in range(0, scores.shape[1], COLUMNS):
            part = weights[:, column : column + COLUMNS]
            sums = part if sums is None else sums + part
        return FirstMaximumSoftmax(row_max, sums), weights, None

    def whole(self) -> OnlineSoftmax:
        assert self.row_max_log2 is not None
        assert self.sums is not None
        return OnlineSoftmax(self.row_max_log2, self.sums.sum(axis=1))


def failed(row_sum: Float[Array, " R"], unfinished: Float[Array, " R"], sees_keys: Bool[Array, " R"] | None) -> Any:
    """[R]: whether a row's weights left the range of floats.

    `unfinished`: 0, or NaN where what was summed with them is no finite number, which may have other causes than that;
    `sees_keys`: which rows have any, None if all.
    """
    too_small = row_sum < _LEAST_SUM
    if sees_keys is not None:
        too_small &= sees_keys
    return too_small | ((row_sum > _LARGE_SUM) & (row_sum * 0.0 + unfinished != 0))  # NaN differs from everything

"""Softmax over a row that arrives in pieces (Milakov & Gimelshein 2018), in powers of two.

Axis letters: R rows, S keys of one piece.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

LOG2_E = 1.4426950408889634


class OnlineSoftmax(NamedTuple):
    """Maximum (of scores times log2 e) and sum of what a row has seen; -inf and 0 if that is nothing."""

    row_max_log2: Float[Array, " R"]
    row_sum: Float[Array, " R"]

    @classmethod
    def start(cls, rows: int, layout: Any) -> OnlineSoftmax:
        return cls(*(plgpu.layout_cast(jnp.full((rows,), x, jnp.float32), layout) for x in (-jnp.inf, 0.0)))

    def step(self, scores: Float[Array, "R S"], to_log2: float):
        """(state, weights [R, S], rescale [R]); `to_log2` > 0 times `scores` is the logit times log2 e.

        What was summed with earlier weights must be multiplied by `rescale`.
        """
        row_max = jnp.maximum(self.row_max_log2, scores.max(axis=1) * to_log2)
        base = zero_where_empty(row_max)
        weights = jnp.exp2(scores * to_log2 - lax.broadcast_in_dim(base, scores.shape, [0]))
        rescale = jnp.exp2(self.row_max_log2 - base)
        return OnlineSoftmax(row_max, self.row_sum * rescale + weights.sum(axis=1)), weights, rescale

    def join(self, logit_log2: Any):
        """(state, rescale) after one more key of value 0 and this logit times log2 e; not for rows that saw nothing."""
        row_max = zero_where_empty(jnp.maximum(self.row_max_log2, logit_log2))
        rescale = jnp.exp2(self.row_max_log2 - row_max)
        row_sum = self.row_sum * rescale + jnp.exp2(logit_log2 - row_max)
        sees_none = self.row_sum == 0
        return OnlineSoftmax(row_max, jnp.where(sees_none, 0.0, row_sum)), rescale

    def finish(self):
        """(normaliser, lse): what to multiply the sums by, and the natural logarithm; 0 and -inf for an empty row."""
        sees_none = self.row_sum == 0
        row_sum = jnp.where(sees_none, 1.0, self.row_sum)
        log_sum = jnp.where(sees_none, -jnp.inf, jnp.log(row_sum))
        # What a compiler sees by itself becomes one multiply-add; else some passes round the product before the sum.
        row_max, log_sum = lax.optimization_barrier((self.row_max_log2, log_sum))
        lse = row_max * (1.0 / LOG2_E) + log_sum
        return jnp.where(sees_none, 0.0, 1.0 / row_sum), lse


def zero_where_empty(row_max: Float[Array, " R"]) -> Float[Array, " R"]:
    """2^(-inf - 0) is 0 for a row that has seen no key, where 2^(-inf - -inf) is NaN."""
    return jnp.where(row_max == -jnp.inf, 0.0, row_max)

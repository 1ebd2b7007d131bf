"""What Hopper's backward kernels of attention share.

Axis letters: B batch, T queries, S keys, N query heads, K key/value heads, H query/key depth, V value depth; I tiles of
queries, J tiles of keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from fast_layers.kernel_parts.nearest_integers import nearest_integers
from fast_layers.kernel_parts.smem_tile import swizzled_columns
from fast_layers.ops.attention.kernel_operands import RowMask
from fast_layers.ops.attention.problem import Problem
from fast_layers.ops.attention.tile_logits import LogitOperands
from fast_layers.ops.attention.tile_mask import WGMMA

BY_QUERY = WGMMA.reduce(0)
BY_ROW = WGMMA.reduce(1)


class Operands(NamedTuple):
    """lse and delta are what the products start from: -delta, and -lse / scale (with a soft cap or a bias, -lse)."""

    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K V"]
    d_out: Float[Array, "B T N V"]
    lse: Float[Array, "B N T"]
    delta: Float[Array, "B N T"]
    units: Float[Array, "B N T"] | None
    """How many of dQ's integers make 1; None where dQ is summed in floats."""
    mask: RowMask | None
    q_span: Int[Array, "B|1 J 2"] | None
    logits: LogitOperands
    broken_keys: Int[Array, "B K"] | None = None
    """Whether a key or value of the head may be NaN or inf; None where none is hidden."""
    broken_queries: Int[Array, "B N I"] | None = None
    """Whether a query or output gradient of a tile may be; None where it may meet all weights, or was mended before."""
    zeros: Int[Array, "B T N H"] | Float[Array, "B T N H"] | None = None
    """For dQ to be added to; None where there are none yet."""


def folds_lse(p: Problem) -> bool:
    """Whether lse is what the scores' product starts from; else it is subtracted later."""
    return p.softcap is None and p.bias is None


def summed_dtype(p: Problem) -> Any:
    """Of dQ, while blocks add to it."""
    return jnp.int32 if p.reproducible else jnp.float32


def as_summed(d_query: Float[Array, "t c"], units: Float[Array, " t"] | None) -> Array:
    return d_query if units is None else nearest_integers(d_query, lax.broadcast_in_dim(units, d_query.shape, [0]))


def make_finite(tile: Any) -> None:
    """Zeros in place of NaN and inf, one column of swizzled tiles at a time, to spare registers and code."""
    columns = swizzled_columns(tile.shape[1], tile.dtype)

    def mend(i, _):
        part = tile.at[:, pl.ds(i * columns, columns)]
        x = plgpu.load(part, layout=WGMMA, optimized=False)
        part[...] = jnp.where(jnp.abs(x) < jnp.inf, x, jnp.zeros_like(x))

    lax.fori_loop(0, tile.shape[1] // columns, mend, None)

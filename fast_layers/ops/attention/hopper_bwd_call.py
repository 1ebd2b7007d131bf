"""The call around Hopper's backward kernels of attention: what they get, which of them run, what is made of it.

Axis letters: B batch, T queries, N query heads; I tiles of queries, J tiles of keys.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from fast_layers.kernel_parts.kv_range import KvRange
from fast_layers.kernel_parts.over_batch import over_batch
from fast_layers.ops.attention import (
    hopper_bias_grad,
    hopper_bwd,
    hopper_bwd_deep,
    hopper_bwd_rows,
    hopper_bwd_sums,
    hopper_bwd_units,
    tuned,
)
from fast_layers.ops.attention.config import MAX_SHALLOW_DEPTH
from fast_layers.ops.attention.hopper_bwd_config import HopperBackwardTiles, HopperDeepBackwardTiles
from fast_layers.ops.attention.hopper_grad_parts import KeyRows, Operands, folds_lse, summed_dtype
from fast_layers.ops.attention.kernel_operands import SHARED, RowMask, array_columns, pad_axis, pad_for_tma, round_up
from fast_layers.ops.attention.problem import Aux, Inputs, Problem, Residuals, finite_or_zero
from fast_layers.ops.attention.tile_logits import LogitOperands
from fast_layers.ops.attention.xla import sink_gradient


def attend_grad(problem: Problem, residuals: Residuals, d_out: Array, d_lse: Array, tiles: Any = None) -> Inputs:
    """Gradients of all inputs, in the inputs' dtypes; `tiles` of the class for the depth."""
    p = problem
    inputs, aux, out, lse, sizes = residuals
    tiles = tuned.find(p, "backward") if tiles is None else tiles
    deep = max(p.qk_dim, p.v_dim) > MAX_SHALLOW_DEPTH
    if deep:
        tiles, launch = (tiles or HopperDeepBackwardTiles.of(p)).for_call(p), hopper_bwd_deep.launch
    else:
        tiles, launch = (tiles or HopperBackwardTiles.of(p)).for_call(p), hopper_bwd.launch
    columns = tiles.tile_columns(p.qk_dim, p.v_dim)
    qk_dim, v_dim = columns if deep else (array_columns(p.qk_dim, columns[0]), columns[1])
    query = inputs.query
    sees_none = lse == -jnp.inf
    hides_queries = any(x is not None for x in (aux.mask.start, aux.mask.stop, aux.mask.dense)) or _band_misses_rows(p)
    # A broken query shows in its lse, but through a soft cap; and a bias' gradient has a kernel that mends nothing.
    in_kernel = not deep and p.bias is None and p.softcap is None
    if hides_queries and not in_kernel:
        # Padding or documents. A hidden weight is 0, but 0 times NaN is NaN: so rows are made finite, and those that
        # were not start from NaN below, which reaches the keys that they see and no others.
        broken = ~(jnp.isfinite(query).all(-1) & jnp.isfinite(d_out).all(-1)).swapaxes(1, 2)
        query = finite_or_zero(query)
        d_out = jnp.where(sees_none.swapaxes(1, 2)[..., None], 0, finite_or_zero(d_out))
        lse = jnp.where(broken & ~sees_none, jnp.nan, lse)
    rows, measured = None, hopper_bwd_rows.Operands(out, d_out, inputs.key, inputs.value, sizes)
    if not tiles.sums_d_query:
        delta = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(-1).swapaxes(1, 2)
    elif hopper_bwd_rows.takes(p, tiles.q_tile, columns[0]):
        rows = over_batch(functools.partial(hopper_bwd_rows.row_sums, summed_dtype(p)))(p, measured)
    else:
        rows = hopper_bwd_rows.row_sums_by_xla(measured)
    delta = delta if rows is None else rows.delta
    broken_rows = ~(jnp.isfinite(lse) & jnp.isfinite(delta))
    delta = jnp.where(sees_none, 0.0, delta - d_lse)
    whole = round_up(p.q_len, tiles.q_tile)
    # A row that sees nothing, or that does not exist, starts from -inf: its weights are 2^-inf = 0.
    start = jnp.where(jnp.isfinite(delta) & (lse < jnp.inf), -lse / (p.scale if folds_lse(p) else 1.0), jnp.nan)
    start = jnp.where(sees_none, -jnp.inf, start)
    mask = RowMask.of(p, aux.mask, tiles.q_tile, tiles.kv_tile)
    units, broken_keys = (None, None) if rows is None else hopper_bwd_units.row_units(p, aux.mask, rows, delta)
    hides_keys = p.mask.band is not None or hides_queries or p.kv_len % tiles.kv_tile != 0
    operands = Operands(
        pad_for_tma(query, tiles.q_tile, qk_dim),
        pad_for_tma(inputs.key, tiles.kv_tile, qk_dim),
        pad_for_tma(inputs.value, tiles.kv_tile, v_dim),
        pad_for_tma(d_out, tiles.q_tile, v_dim),
        pad_axis(start, whole, 2, -jnp.inf),
        pad_axis(-finite_or_zero(delta), whole, 2),
        None if units is None or not p.reproducible else pad_axis(units, whole, 2, 1.0),
        mask,
        None if mask is None else _query_span(p, mask, tiles.q_tile, tiles.kv_tile),
        LogitOperands.of(inputs, aux, tiles.q_tile, tiles.kv_tile, keys_first=True),
        broken_keys if hides_keys else None,
        _some_of_tile(pad_axis(broken_rows, whole, 2), tiles.q_tile) if hides_queries and in_kernel else None,
        None if deep else KeyRows.of(p, aux.mask, tiles.kv_tile),
        None if rows is None else rows.d_query,
    )
    d_query, d_key, d_value = over_batch(functools.partial(launch, tiles), SHARED)(p, operands)
    if tiles.sums_d_query:
        # Integers know no NaN; a row that starts from NaN has one in every weight.
        factors = p.scale / units if p.reproducible and units is not None else p.scale
        factors = jnp.where(jnp.isnan(start), jnp.nan, factors)
        if deep:
            d_query = d_query[:, : p.q_len].astype(jnp.float32) * factors.swapaxes(1, 2)[..., None]
        else:
            summed = hopper_bwd_sums.Operands(d_query, pad_axis(factors, whole, 2))
            d_query = over_batch(hopper_bwd_sums.d_query)(p, summed)
    d_query = d_query[:, : p.q_len, :, : p.qk_dim].astype(p.dtype)
    return Inputs(
        query=d_query,
        key=d_key[:, : p.kv_len, :, : p.qk_dim],
        value=d_value[:, : p.kv_len, :, : p.v_dim],
        bias=None if inputs.bias is None else _bias_gradient(p, inputs, aux, operands),
        sinks=None if inputs.sinks is None else sink_gradient(inputs.sinks, lse, delta),
    )


def wants_sizes(p: Problem) -> bool:
    """Whether the backward would have to find the sizes of keys and values itself."""
    if max(p.qk_dim, p.v_dim) > MAX_SHALLOW_DEPTH:
        return False
    tiles = (tuned.find(p, "backward") or HopperBackwardTiles.of(p)).for_call(p)
    return tiles.sums_d_query and hopper_bwd_rows.takes(p, tiles.q_tile, tiles.tile_columns(p.qk_dim, p.v_dim)[0])


def _bias_gradient(p: Problem, inputs: Inputs, aux: Aux, operands: Operands) -> Array:
    return hopper_bias_grad.attend_grad(p, inputs, aux, operands._replace(zeros=None))


def _band_misses_rows(p: Problem) -> bool:
    """Whether the first rows stand before all keys of a band mask, or the last ones after all."""
    band = p.mask.band
    if band is None:
        return False
    before = band.high is not None and band.high < 0
    return before or (band.low is not None and p.q_len - 1 + band.low >= p.kv_len)


def _some_of_tile(rows: Bool[Array, "B N T"], q_tile: int) -> Int[Array, "B N I"]:
    return rows.reshape(*rows.shape[:2], -1, q_tile).any(-1).astype(jnp.int32)


def _query_span(p: Problem, mask: RowMask, q_tile: int, kv_tile: int) -> Int[Array, "B|1 J 2"]:
    """The query tiles that each tile of keys visits."""
    visits = KvRange.of(mask.start, mask.stop, q_tile).transpose(kv_tile, -(-p.kv_len // kv_tile))
    return jnp.stack(visits, -1)

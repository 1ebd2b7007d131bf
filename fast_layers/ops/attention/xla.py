"""Flash attention in plain XLA: any device, any length, any dtype, O(T + S) memory, forward and backward.

Axis letters: B batch, T queries, S keys, K key/value heads, G query heads per key/value head, H query/key depth,
V value depth; `q` and `s` in einsums are the rows of one tile.

The score matrix is visited tile by tile with an online softmax (Milakov & Gimelshein 2018; Dao et al. 2022) and never
written out. The backward recomputes the scores from lse and visits each tile once (5 matmuls). Tiles outside the
rows' key intervals are skipped in both passes; `KvRange` says which.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Float, Int

from fast_layers.arch import lowering_targets
from fast_layers.kernel_parts.dropout import DropoutSeed, keep_tile
from fast_layers.kernel_parts.kv_range import KvRange, TileRange
from fast_layers.kernel_parts.manual_axes import vary_over, varying_axes
from fast_layers.kernel_parts.once_in_reverse import once_in_reverse
from fast_layers.ops.attention.masks import same_segment
from fast_layers.ops.attention.problem import Aux, Inputs, Problem, Residuals, finite_or_zero, poison
from fast_layers.ops.attention.xla_config import XlaTiles


def supports(problem: Problem, arch, pass_) -> str | None:
    return None


class _Tiled(NamedTuple):
    """Operands with T and S padded to whole tiles. Parts of the mask may be None.

    Keys and values are as given unless `kv_heads_first`; `_kv_tile` makes a tile of either ready for use.
    """

    query: Float[Array, "B K G T H"]
    key: Float[Array, "B S K H"] | Float[Array, "B K S H"]
    value: Float[Array, "B S K V"] | Float[Array, "B K S V"]
    kv_heads_first: bool
    bias: Float[Array, "B|1 K|1 G|1 T|1 S|1"] | None
    start: Int[Array, "B|1 T"] | None
    stop: Int[Array, "B|1 T"] | None
    query_segments: Int[Array, "B|1 T"] | None
    key_segments: Int[Array, "B|1 S"] | None
    dense: Bool[Array, "B|1 K|1 G|1 T|1 S|1"] | None
    dropout: DropoutSeed | None


class _Loops(NamedTuple):
    """How far the loops go: key tiles for each query tile, or query tiles for each key tile."""

    num_q_tiles: int
    num_kv_tiles: int
    inner: TileRange | None  # each [tiles]; None: all


def forward(problem: Problem, inputs: Inputs, aux: Aux):
    """(out [B, T, N, V], lse [B, N, T])."""
    return _forward(problem, XlaTiles.of(problem, lowering_targets()[0]), inputs, aux)


def backward(problem: Problem, residuals: Residuals, d_out: Array, d_lse: Array) -> Inputs:
    """Gradients of all inputs, in the inputs' dtypes."""
    gradients = _backward(problem, XlaTiles.of(problem, lowering_targets()[0]), residuals, d_out, d_lse)
    return once_in_reverse(
        gradients,
        "attention: xla is differentiated once in reverse mode; reverse mode of its gradient was asked for. Take "
        'implementation="reference" for any order, in a whole model use_backends(force="reference"), or jax.jvp of the '
        "gradient",
    )


# Jitted, so that a model of many equal layers traces and lowers the loops once.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(p: Problem, tiles: XlaTiles, inputs: Inputs, aux: Aux):
    # A single tile of queries, as in decoding, visits each tile of keys once, and not those past a cache's end.
    one_q_tile = isinstance(p.q_len, int) and p.q_len <= tiles.q_tile
    tiled = _tile(p, tiles, inputs, aux, kv_heads_first=not one_q_tile)
    loops = _loops(p, tiles, tiled, transposed=False)
    seen_by_all = _seen_by_all(p, tiles, tiled) if one_q_tile and tiles.asks_each_tile else None
    q_rows, rows = tiles.q_tile, (p.batch, p.kv_heads, p.group, tiles.q_tile)
    like = functools.partial(vary_over, axes=varying_axes(tiled.query))

    def attend_q_tile(i, out_and_lse):
        query = _slice(tiled.query, i, q_rows, 3)

        def attend_kv_tile(j, state, mends=True):
            row_max, row_sum, acc = state
            key, value = _kv_tile(tiles, tiled, j, mends)
            scores = _einsum(p, "bkgqh,bksh->bkgqs", query, key)
            scores, _ = _mask_scores(p, tiles, tiled, scores, i, j)
            new_max = jnp.maximum(row_max, scores.max(-1))
            base = _zero_where_empty(new_max)
            weights = jnp.exp(scores - base[..., None])
            rescale = jnp.exp(row_max - base)
            row_sum = row_sum * rescale + weights.sum(-1)
            if tiled.dropout is not None:
                weights = jnp.where(_keep(p, tiles, tiled, i, j), weights, 0.0)
            acc = acc * rescale[..., None] + _einsum(p, "bkgqs,bksv->bkgqv", weights.astype(p.dtype), value)
            return new_max, row_sum, acc

        def visit_kv_tile(j, state):
            if seen_by_all is None:
                return attend_kv_tile(j, state)
            is_seen = (seen_by_all.first <= j) & (j < seen_by_all.last)
            return lax.cond(is_seen, functools.partial(attend_kv_tile, mends=False), attend_kv_tile, j, state)

        empty = (
            like(jnp.full(rows, -jnp.inf, p.accumulator_dtype)),
            like(jnp.zeros(rows, p.accumulator_dtype)),
            like(jnp.zeros((*rows, p.v_dim), p.accumulator_dtype)),
        )
        row_max, row_sum, acc = lax.fori_loop(*_span(loops.inner, i, loops.num_kv_tiles), visit_kv_tile, empty)
        sees_none = row_sum == 0  # not by row_max: XLA's CPU maximum may pass over NaN
        if inputs.sinks is not None:
            row_max, row_sum, acc = _add_sink(p, inputs.sinks, row_max, row_sum, acc)
        row_sum = jnp.where(sees_none, 1.0, row_sum)
        lse = jnp.where(sees_none, -jnp.inf, row_max + jnp.log(row_sum))
        out = acc / (row_sum * (1.0 - p.dropout_rate))[..., None]
        out_buffer, lse_buffer = out_and_lse
        return (
            _update(out_buffer, out.astype(p.dtype), i, q_rows, 3),
            _update(lse_buffer, lse, i, q_rows, 3),
        )

    padded_q = loops.num_q_tiles * q_rows
    buffers = (
        like(jnp.zeros((*rows[:3], padded_q, p.v_dim), p.dtype)),
        like(jnp.zeros((*rows[:3], padded_q), p.accumulator_dtype)),
    )
    out, lse = lax.fori_loop(0, loops.num_q_tiles, attend_q_tile, buffers)
    return _ungroup_rows(p, out), lse[..., : p.q_len].reshape(p.batch, p.heads, p.q_len)


def _add_sink(p: Problem, sinks, row_max, row_sum, acc):
    """The sink joins the denominator as one more key whose value is 0."""
    sink = sinks.astype(p.accumulator_dtype).reshape(p.kv_heads, p.group, 1)
    new_max = _zero_where_empty(jnp.maximum(row_max, sink))
    rescale = jnp.exp(row_max - new_max)
    return new_max, row_sum * rescale + jnp.exp(sink - new_max), acc * rescale[..., None]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _backward(p: Problem, tiles: XlaTiles, residuals: Residuals, d_out: Array, d_lse: Array) -> Inputs:
    inputs, aux, out, lse, _ = residuals
    tiled = _tile(p, tiles, inputs, aux, kv_heads_first=False)
    loops = _loops(p, tiles, tiled, transposed=True)
    like = functools.partial(vary_over, axes=varying_axes(tiled.query))
    clean_query = finite_or_zero(tiled.query)

    sees_some = (lse != -jnp.inf).swapaxes(1, 2)[..., None]
    d_out = jnp.where(sees_some, d_out, 0)
    # sum_s of weights * d_weights, less lse's own gradient: both enter the softmax's backward alike.
    delta = (out.astype(p.accumulator_dtype) * d_out.astype(p.accumulator_dtype)).sum(-1).swapaxes(1, 2)
    delta = delta - jnp.where(lse == -jnp.inf, 0, d_lse)
    d_out = _group_rows(p, d_out, tiles.q_tile)
    lse_rows, delta_rows = (
        _pad(x.reshape(p.batch, p.kv_heads, p.group, p.q_len), tiles.q_tile, 3) for x in (_zero_where_empty(lse), delta)
    )

    def grad_kv_tile(j, state):
        key, value = _kv_tile(tiles, tiled, j)
        key_columns = finite_or_zero(key).swapaxes(2, 3)

        def grad_q_tile(i, state):
            d_query, d_bias, d_key, d_value = state
            rows = functools.partial(_slice, index=i, size=tiles.q_tile, axis=3)
            query, d_out_tile = rows(clean_query), rows(d_out)
            # Keys first, [B, K, s, G, q], and d_query with its depth first: so every matmul contracts the last axis
            # of its left operand. XLA's CPU matmul is half as fast where the left one must be transposed.
            scores = _einsum(p, "bksh,bkgqh->bksgq", key, rows(tiled.query))
            scores, d_cap = _mask_scores(p, tiles, tiled, scores, i, j, _keys_first)
            # A row that has seen a broken key is NaN in lse and delta; what it does not see must not become so.
            hides = d_cap is not None or _visible(tiles, tiled, i, j) is not None

            def visible_only(x):
                return jnp.where(scores == -jnp.inf, 0.0, x) if hides else x

            weights = visible_only(jnp.exp(scores - rows(lse_rows)[:, :, None]))
            d_weights = _einsum(p, "bksv,bkgqv->bksgq", value, d_out_tile)
            kept = weights
            if tiled.dropout is not None:
                keep = _keys_first(_keep(p, tiles, tiled, i, j))
                survived = 1.0 / (1.0 - p.dropout_rate)
                kept = jnp.where(keep, weights * survived, 0.0)
                d_weights = jnp.where(keep, d_weights * survived, 0.0)
            d_value += _einsum(p, "bksgq,bkgqv->bksv", kept.astype(p.dtype), d_out_tile)
            d_scores = visible_only(weights * (d_weights - rows(delta_rows)[:, :, None]))
            if d_bias is not None:
                d_bias = _accumulate_bias(d_bias, _queries_first(d_scores), i, j, tiles)
            if d_cap is not None:
                d_scores *= visible_only(d_cap)
            d_scores = (d_scores * p.scale).astype(p.dtype)
            d_key += _einsum(p, "bksgq,bkgqh->bksh", d_scores, query)
            d_query_tile = _slice(d_query, i, tiles.q_tile, 4)
            d_query_tile += _einsum(p, "bkhs,bksgq->bkhgq", key_columns, d_scores)
            return _update(d_query, d_query_tile, i, tiles.q_tile, 4), d_bias, d_key, d_value

        d_query, d_bias, d_keys, d_values = state
        zeros = (like(jnp.zeros(x.shape, p.accumulator_dtype)) for x in (key, value))
        d_query, d_bias, d_key, d_value = lax.fori_loop(
            *_span(loops.inner, j, loops.num_q_tiles), grad_q_tile, (d_query, d_bias, *zeros)
        )
        return (
            d_query,
            d_bias,
            _update(d_keys, d_key.astype(p.dtype), j, tiles.kv_tile, 2),
            _update(d_values, d_value.astype(p.dtype), j, tiles.kv_tile, 2),
        )

    padded_q, padded_kv = loops.num_q_tiles * tiles.q_tile, loops.num_kv_tiles * tiles.kv_tile
    d_query, d_bias, d_key, d_value = lax.fori_loop(
        0,
        loops.num_kv_tiles,
        grad_kv_tile,
        (
            like(jnp.zeros((p.batch, p.kv_heads, p.qk_dim, p.group, padded_q), p.accumulator_dtype)),
            None if tiled.bias is None else like(jnp.zeros(tiled.bias.shape, p.accumulator_dtype)),
            *(like(jnp.zeros((p.batch, p.kv_heads, padded_kv, dim), p.dtype)) for dim in (p.qk_dim, p.v_dim)),
        ),
    )
    return Inputs(
        query=_ungroup_rows(p, jnp.moveaxis(d_query, 2, 4)).astype(p.dtype),
        key=d_key[:, :, : p.kv_len].swapaxes(1, 2),
        value=d_value[:, :, : p.kv_len].swapaxes(1, 2),
        bias=None if d_bias is None or inputs.bias is None else _ungroup_bias(p, d_bias, inputs.bias),
        sinks=None if inputs.sinks is None else sink_gradient(inputs.sinks, lse, delta),
    )


def sink_gradient(sinks, lse, delta):
    """The sink's value is 0, so only the normaliser depends on it. [N]"""
    weight = jnp.where(lse == -jnp.inf, 0.0, jnp.exp(sinks.astype(lse.dtype)[:, None] - _zero_where_empty(lse)))
    return -(weight * delta).sum((0, 2)).astype(sinks.dtype)


def _queries_first(x: Array) -> Array:
    """[B, K, s, G, q] to [B, K, G, q, s]."""
    return x.transpose(0, 1, 3, 4, 2)


def _keys_first(x: Array) -> Array:
    """[B, K, G, q, s] to [B, K, s, G, q]."""
    return x.transpose(0, 1, 4, 2, 3)


def _mask_scores(p: Problem, tiles: XlaTiles, tiled: _Tiled, scores: Array, i, j, arrange=lambda x: x):
    """Products to scores, -inf where masked; and the soft cap's derivative, if there is one.

    `arrange` brings a [B, K, G, q, s] operand to the order of `scores`.
    """
    scores = scores * p.scale
    d_cap = None
    if p.softcap is not None:
        squashed = jnp.tanh(scores / p.softcap)
        scores, d_cap = p.softcap * squashed, (1.0 - squashed) * (1.0 + squashed)
    if tiled.bias is not None:
        scores += arrange(_logits_tile(tiled.bias, i, j, tiles).astype(scores.dtype))
    visible = _visible(tiles, tiled, i, j)
    return (scores if visible is None else jnp.where(arrange(visible), scores, -jnp.inf)), d_cap


def _visible(tiles: XlaTiles, tiled: _Tiled, i, j) -> Bool[Array, "B|1 K|1 G|1 q s"] | None:
    """The tile's mask, None if it allows everything."""

    def rows(x):
        return _slice(x, i, tiles.q_tile, 1)[:, None, None, :, None]

    conditions = []
    keys = j * tiles.kv_tile + jnp.arange(tiles.kv_tile, dtype=jnp.int32)
    if tiled.start is not None:
        conditions.append(keys >= rows(tiled.start))
    if tiled.stop is not None:
        conditions.append(keys < rows(tiled.stop))
    if tiled.query_segments is not None and tiled.key_segments is not None:
        key_ids = _slice(tiled.key_segments, j, tiles.kv_tile, 1)[:, None, None, None, :]
        conditions.append(same_segment(rows(tiled.query_segments), key_ids))
    if tiled.dense is not None:
        conditions.append(_logits_tile(tiled.dense, i, j, tiles))
    return functools.reduce(jnp.logical_and, conditions) if conditions else None


def _keep(p: Problem, tiles: XlaTiles, tiled: _Tiled, i, j) -> Bool[Array, "B|1 K|1 G|1 q s"]:
    assert tiled.dropout is not None
    keep = keep_tile(tiled.dropout, i * tiles.q_tile, j * tiles.kv_tile, tiles.q_tile, tiles.kv_tile, p.dropout_rate)
    return _group_heads(p, keep)


def _tile(p: Problem, tiles: XlaTiles, inputs: Inputs, aux: Aux, *, kv_heads_first: bool) -> _Tiled:
    """Group and pad. `kv_heads_first` pays if each tile of keys is visited often; it costs a pass over all of them."""
    key, value = inputs.key, inputs.value
    if kv_heads_first:
        key, value = (x.swapaxes(1, 2) for x in _nan_safe(key, value))
    start, stop = aux.mask.intervals(p.q_len, p.kv_len)
    padded_kv = not isinstance(p.kv_len, int) or p.kv_len % tiles.kv_tile
    if stop is None and padded_kv:
        stop = jnp.full((1, p.q_len), p.kv_len, jnp.int32)
    kv_axis = 2 if kv_heads_first else 1
    return _Tiled(
        query=_group_rows(p, finite_or_zero(inputs.query) + poison(inputs.query)[..., None], tiles.q_tile),
        key=_pad(key, tiles.kv_tile, kv_axis),
        value=_pad(value, tiles.kv_tile, kv_axis),
        kv_heads_first=kv_heads_first,
        bias=None if inputs.bias is None else _pad_logits(_group_heads(p, inputs.bias), tiles),
        start=None if start is None else _pad(start, tiles.q_tile, 1),
        stop=None if stop is None else _pad(stop, tiles.q_tile, 1),
        query_segments=_pad_ids(aux.mask.query_segments, tiles.q_tile),
        key_segments=_pad_ids(aux.mask.key_segments, tiles.kv_tile),
        dense=None if aux.mask.dense is None else _pad_logits(_group_heads(p, aux.mask.dense), tiles),
        dropout=aux.dropout,
    )


def _nan_safe(key: Array, value: Array) -> tuple[Array, Array]:
    """A broken key or value poisons the scores of those who see it, and only them: (poisoned key, clean value)."""
    return finite_or_zero(key) + poison(key, value)[..., None], finite_or_zero(value)


def _kv_tile(tiles: XlaTiles, tiled: _Tiled, j, mends=True) -> tuple[Float[Array, "B K s H"], Float[Array, "B K s V"]]:
    """Poisoned keys and clean values of one tile, or as they are where no row has any hidden."""
    if tiled.kv_heads_first:
        return _slice(tiled.key, j, tiles.kv_tile, 2), _slice(tiled.value, j, tiles.kv_tile, 2)
    key, value = _slice(tiled.key, j, tiles.kv_tile, 1), _slice(tiled.value, j, tiles.kv_tile, 1)
    if mends:
        key, value = _nan_safe(key, value)
    return key.swapaxes(1, 2), value.swapaxes(1, 2)


def _loops(p: Problem, tiles: XlaTiles, tiled: _Tiled, *, transposed: bool) -> _Loops:
    num_q_tiles, num_kv_tiles = _count(p.q_len, tiles.q_tile), _count(p.kv_len, tiles.kv_tile)
    if tiled.start is None and tiled.stop is None:
        return _Loops(num_q_tiles, num_kv_tiles, None)
    rows = (1, tiled.query.shape[3])
    start = jnp.zeros(rows, jnp.int32) if tiled.start is None else tiled.start
    stop = jnp.full(rows, p.kv_len, jnp.int32) if tiled.stop is None else tiled.stop
    start, stop = jnp.broadcast_arrays(start, stop)
    hull = KvRange(*_over_vmap(*KvRange.of(start, stop, tiles.q_tile).over_batch()))
    visits = hull.transpose(tiles.kv_tile, num_kv_tiles) if transposed else hull.key_tiles(tiles.kv_tile)
    return _Loops(num_q_tiles, num_kv_tiles, TileRange(visits.first[0], visits.last[0]))


def _seen_by_all(p: Problem, tiles: XlaTiles, tiled: _Tiled) -> TileRange | None:
    """The tiles of whose keys no row has any hidden; None where more than rows' intervals hides some."""
    if tiled.query_segments is not None or tiled.dense is not None:
        return None
    first = jnp.int32(0) if tiled.start is None else tiled.start.max()
    last = jnp.int32(p.kv_len) if tiled.stop is None else tiled.stop.min()
    # What all of a `vmap` see: the greatest first and the least last, where a hull has the others.
    first, last = (-x for x in _over_vmap(-first, -last))
    return TileRange(_count(first, tiles.kv_tile), last // tiles.kv_tile)


@custom_vmap
def _over_vmap(first_key, last_key):
    """The same key intervals for all members of a `vmap`: loops whose bounds differed would copy their state."""
    return first_key, last_key


@_over_vmap.def_vmap
def _hull_over_vmap(axis_size, in_batched, first_key, last_key):
    first_batched, last_batched = in_batched
    first_key = first_key.min(0) if first_batched else first_key
    last_key = last_key.max(0) if last_batched else last_key
    return _over_vmap(first_key, last_key), (False, False)


def _span(visits: TileRange | None, tile, count):
    return (0, count) if visits is None else (visits.first[tile], visits.last[tile])


def _einsum(p: Problem, subscripts: str, *operands: Array) -> Array:
    """A matmul summed in the accumulator's dtype."""
    product = functools.partial(
        jnp.einsum, subscripts, precision=p.precision, preferred_element_type=p.accumulator_dtype
    )
    if p.dtype.itemsize >= p.accumulator_dtype.itemsize:
        return product(*operands)
    # XLA's CPU has no 16-bit matmul for every layout that its own passes produce, and fails when run.
    return lax.platform_dependent(
        *operands, cpu=lambda *xs: product(*(x.astype(p.accumulator_dtype) for x in xs)), default=product
    )


def _zero_where_empty(row_max: Array) -> Array:
    """exp(-inf - 0) is 0 for a row that has seen no key, where exp(-inf - -inf) is NaN."""
    return jnp.where(row_max == -jnp.inf, 0.0, row_max)


def _slice(x: Array, index, size: int, axis: int) -> Array:
    return lax.dynamic_slice_in_dim(x, index * size, size, axis)


def _update(x: Array, tile: Array, index, size: int, axis: int) -> Array:
    return lax.dynamic_update_slice_in_dim(x, tile, index * size, axis)


def _count(length, tile: int):
    """Tiles that hold `length` rows; written so that a symbolic length is known to need at least one."""
    return (length + (tile - 1)) // tile


def _pad(x: Array, multiple: int, axis: int, value=0) -> Array:
    missing = _count(x.shape[axis], multiple) * multiple - x.shape[axis]
    if isinstance(missing, int) and missing == 0:
        return x
    return jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)], constant_values=value)


def _pad_ids(ids: Int[Array, "B|1 T"] | None, multiple: int):
    return None if ids is None else _pad(ids, multiple, 1, value=-1)


def _pad_logits(x: Array, tiles: XlaTiles) -> Array:
    x = x if _is_one(x.shape[3]) else _pad(x, tiles.q_tile, 3)
    return x if _is_one(x.shape[4]) else _pad(x, tiles.kv_tile, 4)


def _logits_tile(x: Array, i, j, tiles: XlaTiles) -> Array:
    x = x if _is_one(x.shape[3]) else _slice(x, i, tiles.q_tile, 3)
    return x if _is_one(x.shape[4]) else _slice(x, j, tiles.kv_tile, 4)


def _is_one(dim) -> bool:
    return isinstance(dim, int) and dim == 1


def _accumulate_bias(d_bias: Array, d_scores: Array, i, j, tiles: XlaTiles) -> Array:
    """Add a tile to the bias' gradient, summed over the axes along which the bias was broadcast."""
    broadcast = [a for a, dim in enumerate(d_bias.shape) if _is_one(dim)]
    tile = _logits_tile(d_bias, i, j, tiles) + d_scores.sum(broadcast, keepdims=True)
    q_start = 0 if _is_one(d_bias.shape[3]) else i * tiles.q_tile
    kv_start = 0 if _is_one(d_bias.shape[4]) else j * tiles.kv_tile
    # Of one type: under `jax_enable_x64` a loop counts in 64 bits, but in 32 where a mask gives its bounds.
    starts = (jnp.asarray(start, jnp.int32) for start in (0, 0, 0, q_start, kv_start))
    return lax.dynamic_update_slice(d_bias, tile, tuple(starts))


def _group_heads(p: Problem, x: Array) -> Array:
    """[B|1, N|1, T|1, S|1] to [B|1, K|1, G|1, T|1, S|1]."""
    heads = (1, 1) if _is_one(x.shape[1]) else (p.kv_heads, p.group)
    return x.reshape(x.shape[0], *heads, *x.shape[2:])


def _ungroup_bias(p: Problem, d_bias: Array, bias: Array) -> Array:
    q_len, kv_len = bias.shape[2:]
    return d_bias[..., :q_len, :kv_len].reshape(bias.shape).astype(bias.dtype)


def _group_rows(p: Problem, x: Float[Array, "B T N H"], q_tile: int) -> Float[Array, "B K G T H"]:
    grouped = x.reshape(p.batch, p.q_len, p.kv_heads, p.group, x.shape[-1])
    return _pad(grouped.transpose(0, 2, 3, 1, 4), q_tile, 3)


def _ungroup_rows(p: Problem, x: Float[Array, "B K G T H"]) -> Float[Array, "B T N H"]:
    return x[:, :, :, : p.q_len].transpose(0, 3, 1, 2, 4).reshape(p.batch, p.q_len, p.heads, x.shape[-1])

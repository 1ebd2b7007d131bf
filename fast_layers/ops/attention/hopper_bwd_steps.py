"""A compute warpgroup's way through the queries of a piece, in attention's backward for Hopper at depths up to 128."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fast_layers.kernel_parts.fragments import store_factor
from fast_layers.kernel_parts.online_softmax import LOG2_E
from fast_layers.kernel_parts.tanh import tanh
from fast_layers.ops.attention import hopper_bwd_d_query, hopper_bwd_in_order
from fast_layers.ops.attention.hopper_bwd_form import WARPGROUPS, Before, Role
from fast_layers.ops.attention.hopper_bwd_load import DELTA, LSE, UNITS
from fast_layers.ops.attention.hopper_bwd_pieces import Piece
from fast_layers.ops.attention.hopper_bwd_scores import TILE, LeftScores
from fast_layers.ops.attention.hopper_call import ROWS
from fast_layers.ops.attention.hopper_grad_parts import (
    BY_QUERY,
    BY_ROW,
    folds_lse,
    make_finite,
    make_finite_in_chunks,
)
from fast_layers.ops.attention.tile_mask import WGMMA


class Keys(NamedTuple):
    """A warpgroup's 64 keys of a piece."""

    piece: Piece
    own: Any
    """Which they are of the tile; as timed, a number of each piece, not one that is kept between them."""
    start: Any
    """The first of them."""
    key: list[Any]
    """Their panels in shared memory."""
    value: Any
    place: dict[str, Any]
    """Of `Before`, what is known of all steps of the piece."""
    rows: Any
    """`KeyRows`, where there are some."""
    some_broken: Any
    """Whether the head has any query that is broken, where the call knows it."""


def through_queries(role: Role, piece: Piece, turn: Any, before: Before, k_start: Any) -> tuple[Before, Any, Any]:
    """The last step, and dK and dV."""
    form = role.form
    keys = _keys(role, piece, turn, before, k_start)

    def over_queries(d_key, d_value):
        def step(head, q_index, before: Before, hides, held_keys):
            return _step(role, keys, d_key, d_value, head, q_index, before, hides, held_keys)

        def hold_keys():
            # As products read it from shared memory, that would be busier than the tensor cores.
            held = keys.key[form.panels - form.held_panels :]
            return [plgpu.load(panel, layout=WGMMA, optimized=False) for panel in held]

        after = piece.each_query_tile(step, before, hold_keys)
        return after, d_key[...], d_value[...]

    return pl.run_scoped(
        over_queries,
        plgpu.WGMMAAccumulatorRef((ROWS, form.qk_dim), jnp.float32),
        plgpu.WGMMAAccumulatorRef((ROWS, form.v_dim), jnp.float32),
    )


def _keys(role: Role, piece: Piece, turn: Any, before: Before, k_start: Any) -> Keys:
    """Waits for them, and mends them where they may be broken."""
    form, inputs, s = role.form, role.inputs, role.scratch
    own = pl.ds(role.warpgroup * ROWS, ROWS)
    example = piece.example
    k_index = form.key_slot(turn)
    place = {"example": example, "k_index": k_index} if form.persistent else {}
    key = [s.k_slots.at[k_index, i, own] for i in range(form.panels)]
    value = s.v_slot.at[role.warpgroup]
    # Asked for before the wait, which hides how long memory takes to answer; so below.
    broken_keys = None if inputs.broken_keys is None else inputs.broken_keys[example, piece.kv_head] != 0
    pl.when(piece.steps > 0)(lambda: plgpu.barrier_wait(s.kv_ready))

    def mend_keys():
        # A weight of 0 times NaN is NaN, so what is hidden must be finite. Who sees a broken key has an lse of NaN.
        for tile in (*key, value):
            (make_finite_in_chunks if form.lags else make_finite)(tile)
        plgpu.commit_smem()

    if broken_keys is not None:
        pl.when(broken_keys & (piece.steps > 0))(mend_keys)
    if form.mends_keys:
        mend_keys()
    key_rows = None if inputs.key_rows is None else inputs.key_rows.load(example, k_start, ROWS)
    some_broken = None
    if role.visits is not None and role.visits.some_broken is not None:
        some_broken = role.visits.some_broken[example, piece.kv_head] != 0
    if form.lags:
        # The step before the first has no scores: its dQ, of whatever stands there, is added to nothing.
        nothing_before = (before.steps == 0) & (piece.steps > 0)
        pl.when(nothing_before)(lambda: plgpu.barrier_arrive(s.scores_ready.at[1]))
    return Keys(piece, own, k_start, key, value, place, key_rows, some_broken)


def _step(
    role: Role,
    keys: Keys,
    d_key: Any,
    d_value: Any,
    head: Any,
    q_index: Any,
    before: Before,
    hides: bool,
    held_keys: Any,
) -> Before:
    """On one tile of queries of one head."""
    form, inputs, s, p = role.form, role.inputs, role.scratch, role.form.problem
    i = before.steps
    slot, buffer = lax.rem(i, form.ring), lax.rem(i, 2)
    query, d_out = s.q_slots.at[slot], s.d_out_slots.at[slot]
    first_row = role.warpgroup * ROWS if form.by_rows else 0
    place_of_tile = {"slot": slot, "head": head, "q_index": q_index}
    weights, kept, d_weights = pl.run_scoped(
        functools.partial(_weights_and_gradients, role, keys, **place_of_tile, hides=hides, held_keys=held_keys),
        plgpu.WGMMAAccumulatorRef((ROWS, form.q_tile), jnp.float32),
        plgpu.WGMMAAccumulatorRef((ROWS, form.q_tile), jnp.float32),
    )
    units = None
    if inputs.units is not None:
        of_tile = s.row_slots.at[UNITS, slot, pl.ds(first_row, ROWS)]
        units = plgpu.load(of_tile, layout=BY_ROW, optimized=False)
    plgpu.wgmma(d_value, kept.astype(p.dtype), d_out)
    d_scores = (weights * d_weights).astype(p.dtype)
    if form.left is not None:
        _leave_d_scores(role, keys, form.left, buffer, d_scores, head, q_index)
        plgpu.wgmma(d_key, d_scores, query)
        plgpu.wgmma_wait(1)  # dK's product goes on
        plgpu.barrier_arrive(s.d_out_consumed.at[slot])
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(s.q_consumed.at[slot])
        return before._replace(steps=i + 1)

    @pl.when(i > 0)
    def _wait_consumed():
        plgpu.barrier_wait(s.scores_consumed.at[buffer])

    _write_d_scores(role, keys, buffer, d_scores)
    # dQ lags a step behind, so that neither warpgroup waits for the other's scores of this step.
    plgpu.barrier_wait(s.scores_ready.at[1 - buffer])

    def d_query_and_key(acc):
        hopper_bwd_d_query.multiply(role, acc, before)
        plgpu.wgmma(d_key, d_scores, query)
        return plgpu.wgmma_accumulator_load(acc, wait_n=1)  # dK's product goes on

    d_query = pl.run_scoped(d_query_and_key, plgpu.WGMMAAccumulatorRef((ROWS, form.panel), jnp.float32))
    plgpu.barrier_arrive(s.d_out_consumed.at[slot])
    plgpu.barrier_arrive(s.scores_consumed.at[1 - buffer])
    hopper_bwd_d_query.add(role, d_query, before)
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(s.q_consumed.at[slot])
    visit = hopper_bwd_in_order.visit(role, keys.piece, q_index) if form.in_order else {}
    done = before._replace(steps=i + 1, head=head, q_index=q_index, units=units, **keys.place, **visit)
    if form.in_order:
        hopper_bwd_in_order.fetch(role, done, before)
    return done


def _weights_and_gradients(
    role: Role,
    keys: Keys,
    score_acc: Any,
    d_weight_acc: Any,
    slot: Any,
    head: Any,
    q_index: Any,
    hides: bool,
    held_keys: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(weights, those that are kept, their gradients)."""
    form, inputs, s, mask, logits = role.form, role.inputs, role.scratch, role.mask, role.logits
    p, q_tile, panel = form.problem, form.q_tile, form.panel
    piece, example = keys.piece, keys.piece.example
    at = {"example": example, "head": head, "q_start": q_index * q_tile, "k_start": keys.start, "q_axis": 1}
    query, d_out = s.q_slots.at[slot], s.d_out_slots.at[slot]
    # Before the scores are there, since it takes many registers.
    keep = logits.keep(shape=(ROWS, q_tile), **at).astype(p.dtype) if p.dropout_rate else None
    broken = ragged = None
    if hides and inputs.broken_queries is not None and keys.some_broken is None:
        broken = inputs.broken_queries[example, head, q_index] != 0
    if hides and not piece.ragged_apart:
        told = role.visits is not None
        ragged = piece.is_ragged(q_index) if told else mask.ragged_for_keys(example, q_index, keys.start, ROWS)
    plgpu.barrier_wait(s.q_ready.at[slot])
    plgpu.barrier_wait(s.d_out_ready.at[slot])
    if broken is not None:
        _mend_queries(role, slot, broken)
    if hides and keys.some_broken is not None:
        pl.when(keys.some_broken)(lambda: _mend_queries(role, slot, inputs.broken_queries[example, head, q_index] != 0))

    def hide_by_rows(scores):
        return mask.hide(scores, mask.rows(example, q_index * q_tile, q_tile, 1), **at)

    def by_query(x):
        return lax.broadcast_in_dim(x, (ROWS, q_tile), [1])

    lse = by_query(plgpu.load(s.row_slots.at[LSE, slot], layout=BY_QUERY))
    delta = by_query(plgpu.load(s.row_slots.at[DELTA, slot], layout=BY_QUERY))
    at_start = hides and piece.hides_at_start
    if at_start:
        score_acc[...] = lax.cond(ragged, hide_by_rows, lambda x: x, lse)
    elif folds_lse(p):
        score_acc[...] = lse
    if not p.dropout_rate:
        d_weight_acc[...] = delta
    for i, part in enumerate([*keys.key[: form.panels - len(held_keys)], *held_keys]):
        plgpu.wgmma(score_acc, part, query.at[:, i * panel : (i + 1) * panel].T)
    plgpu.wgmma(d_weight_acc, keys.value, d_out.T)
    scores = plgpu.wgmma_accumulator_load(score_acc, wait_n=1)  # d_weights' product goes on
    to_log2, d_cap = p.scale * LOG2_E, None
    if p.softcap is not None:
        squashed = tanh(scores * (p.scale / p.softcap))
        d_cap = (1.0 - squashed) * (1.0 + squashed)
        scores, to_log2 = p.softcap * squashed + lse, LOG2_E
    elif p.bias is not None:
        scores, to_log2 = p.scale * scores + lse, LOG2_E
    if p.bias is not None:
        scores += logits.bias(shape=scores.shape, **at)
    if hides and not at_start:

        def hide(scores):
            if keys.rows is None:
                return hide_by_rows(scores)
            visible = functools.partial(keys.rows.visible, q_index * q_tile, q_tile)
            return lax.cond(keys.rows.say_all, lambda x: jnp.where(visible(), x, -jnp.inf), hide_by_rows, scores)

        scores = hide(scores) if ragged is None else lax.cond(ragged, hide, lambda x: x, scores)
    weights = jnp.exp2(scores * to_log2)
    d_weights, kept = plgpu.wgmma_accumulator_load(d_weight_acc, wait_n=0), weights
    if keep is not None:
        keep = keep > 0
        kept = jnp.where(keep, weights, 0.0)
        d_weights = jnp.where(keep, d_weights * logits.survived, 0.0) + delta
    return weights, kept, d_weights if d_cap is None else d_weights * d_cap


def _mend_queries(role: Role, slot: Any, broken: Any) -> None:
    """One warpgroup mends the queries, the other the output gradients; both read both."""
    s = role.scratch

    @pl.when(broken)
    def _mend():
        for mine, tile in enumerate((s.q_slots.at[slot], s.d_out_slots.at[slot])):

            @pl.when(role.warpgroup == mine)
            def _mine(tile=tile):
                make_finite_in_chunks(tile)

        plgpu.commit_smem()
        plgpu.barrier_arrive(s.queries_mended)
        plgpu.barrier_wait(s.queries_mended)


def _own_scores(role: Role, keys: Keys, buffer: Any, j: int) -> Any:
    form, d_scores = role.form, role.scratch.d_scores
    if form.lags:
        return d_scores.at[buffer, j, keys.own]
    return d_scores.at[(buffer * form.halves + j) * WARPGROUPS + role.warpgroup]


def _write_d_scores(role: Role, keys: Keys, buffer: Any, d_scores: jax.Array) -> None:
    for j in range(role.form.halves):
        store_factor(_own_scores(role, keys, buffer, j), d_scores[:, j * ROWS : (j + 1) * ROWS])
    plgpu.commit_smem()
    if role.form.lags:
        plgpu.barrier_arrive(role.scratch.scores_ready.at[buffer])


def _leave_d_scores(
    role: Role, keys: Keys, left: LeftScores, buffer: Any, d_scores: jax.Array, head: Any, q_index: Any
) -> None:
    piece, halves = keys.piece, role.form.halves
    plgpu.wait_smem_to_gmem(halves, wait_read_only=True)  # for those of the step before the last
    _write_d_scores(role, keys, buffer, d_scores)
    left_head = left.place(piece.left_index) * role.form.heads + head - piece.first_head
    row = left.row(left_head, piece.kv_index, piece.first_tile)
    for j in range(halves):
        to = role.last_ref.at[TILE // ROWS * row + q_index * halves + j, keys.own]
        plgpu.copy_smem_to_gmem(_own_scores(role, keys, buffer, j), to)

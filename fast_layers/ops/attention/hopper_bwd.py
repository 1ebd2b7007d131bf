"""Attention's backward for Hopper (sm_90a) at depths up to 128: all gradients in one pass, five products a tile.

Axis letters: B batch, T queries, S keys, N query heads, K key/value heads, H query/key depth, V value depth.

A block owns 128 keys of one key/value head at a time, 64 for each of its two compute warpgroups, and goes through the
query tiles that see them, for every query head of the group. Scores stand keys first, so that dK and dV stay in
registers:

    load warpgroup                              each compute warpgroup, on its own 64 keys
    --------------                              ------------------------------------------
    K, V        -> kv_ready                     scores = K Q^T, d_weights = V dO^T    needs q_ready, d_out_ready
    Q, lse      -> q_ready     waits q_consumed     dV += P dO                        P = 2^(scores - lse)
    dO, delta, units -> d_out_ready, likewise       dS = P * (d_weights - delta)      -> shared memory, scores_ready
                                                dQ += dS^T K, its half; dK += dS Q    frees scores_consumed

The blocks of a persistent grid take the tiles of keys that were dealt out to them when the call was traced. dQ lags a
step behind, also from one tile of keys to the next; so there are two slots for K. As soon as the last products of a
tile are done, kv_consumed lets the next K and V in, while dK and dV leave through dQ's slots.

Where a mask hides scores, a tile with NaN or inf in Q or dO is mended first, one operand by each warpgroup
(`queries_mended`).

Both warpgroups need all 128 keys' dS for dQ, so they exchange it through shared memory. Blocks add their dQ to one
array by TMA (hopper_bwd_sums.py), in whatever order they come. So that array holds integers: sums of integers do not
depend on the order, and every run gives the same bits. Each row has its own unit, a power of two, from a bound on what
the row can sum to. Where the bits may change from run to run (`Problem.reproducible`), it holds floats, and rows have
no units. Nor have they with `whole_heads`, where the order is known (hopper_bwd_in_order.py).

Where all pieces are alike, and few are left when all blocks have taken as many, those are cut by their queries
(hopper_bwd_parts.py).

With `d_query_apart` dS goes to the GPU's memory instead, another kernel makes dQ of it, or of long rows other blocks of
this one (hopper_bwd_beside.py), and there are no units. Of long grouped heads dS goes there in parts, of some of the
heads, or without a mask of the queries, at a time; these add to dK and dV.

What comes before and after is in hopper_bwd_call.py, the order of tiles in hopper_bwd_pieces.py. The roles are in
hopper_bwd_load.py and hopper_bwd_steps.py, with hopper_bwd_d_query.py and hopper_bwd_send.py for what they leave.

Sources: Dao, "FlashAttention-2" (2023); Shah et al., "FlashAttention-3" (2024).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from fast_layers.kernel_parts.tile_order import each_dealt
from fast_layers.ops.attention import (
    hopper_bwd_apart,
    hopper_bwd_d_query,
    hopper_bwd_in_order,
    hopper_bwd_parts,
    hopper_bwd_pieces,
    hopper_bwd_sums,
)
from fast_layers.ops.attention.hopper_bwd_beside import Maker, Semaphores
from fast_layers.ops.attention.hopper_bwd_config import HopperBackwardTiles
from fast_layers.ops.attention.hopper_bwd_form import WARPGROUPS, Before, Form, Role, Scratch
from fast_layers.ops.attention.hopper_bwd_load import load
from fast_layers.ops.attention.hopper_bwd_pieces import KV_TILE, Piece
from fast_layers.ops.attention.hopper_bwd_scores import LeftScores, gradients
from fast_layers.ops.attention.hopper_bwd_send import send
from fast_layers.ops.attention.hopper_bwd_steps import through_queries
from fast_layers.ops.attention.hopper_bwd_visits import Visits
from fast_layers.ops.attention.hopper_call import ROWS
from fast_layers.ops.attention.hopper_grad_parts import BY_ROW, Operands, summed_dtype
from fast_layers.ops.attention.kernel_operands import round_up
from fast_layers.ops.attention.problem import Problem
from fast_layers.ops.attention.tile_logits import TileLogits
from fast_layers.ops.attention.tile_mask import TileMask


# Jitted, so that a model of many equal layers traces and lowers the kernel once.
@functools.partial(jax.jit, static_argnums=(0, 1))
def launch(tiles: HopperBackwardTiles, p: Problem, operands: Operands):
    """(dQ, or its sums without the scale where `sums_d_query`, dK, dV), padded as the operands are."""
    query, key, value, zeros = operands.query, operands.key, operands.value, operands.zeros
    operands = operands._replace(zeros=None)
    if tiles.whole_heads:
        form = Form.of(p, tiles, operands, None)
        clusters, q_len = hopper_bwd_pieces.clusters(p, tiles), round_up(p.q_len, tiles.q_tile)
        shape = hopper_bwd_sums.sums_shape(clusters, p.group, q_len, tiles.panels, form.qk_dim)
        results = [jax.new_ref(lax.empty(x.shape, x.dtype)) for x in (key, value, query)]
        _run(form, operands, *results, sums=jax.new_ref(lax.empty(shape, jnp.float32)))
        d_key, d_value, d_query = (result[...] for result in results)
        return d_query, d_key, d_value
    if not tiles.d_query_apart:
        form = Form.of(p, tiles, operands, None)
        q_len = round_up(p.q_len, tiles.q_tile)
        shape = hopper_bwd_sums.sums_shape(p.batch, p.heads, q_len, form.panels, form.panel)
        d_query = jax.new_ref(jnp.zeros(shape, summed_dtype(p)) if zeros is None else zeros.reshape(shape))
        d_key, d_value = (jax.new_ref(lax.empty(x.shape, x.dtype)) for x in (key, value))
        parts = None if form.cut is None else jax.new_ref(hopper_bwd_parts.empty(form))
        _run(form, operands, d_key, d_value, d_query, parts=parts)
        if parts is not None:
            hopper_bwd_parts.join(form, parts, d_key, d_value)
        return d_query[...], d_key[...], d_value[...]

    operands = operands._replace(q_span=None)
    sequence = tiles.sequence(p)
    if sequence is not None:
        left = LeftScores(p, places=sequence.places)
        d_query, d_key, d_value = (jax.new_ref(result) for result in left.results(operands))
        _run(Form.of(p, tiles, operands, left, sequence), operands, d_key, d_value, d_query)
        return tuple(result[...].astype(p.dtype) for result in (d_query, d_key, d_value))

    def leave(left, operands, turn, d_key_ref, d_value_ref):
        form = Form.of(p, tiles, operands, left)
        (d_scores,) = _run(form, operands, d_key_ref, d_value_ref, visits=visits, turn=turn)
        return d_scores

    visits = None if operands.mask is None else Visits.of(p, operands.mask, operands.broken_queries)
    d_query = functools.partial(hopper_bwd_apart.d_query, visits)
    return gradients(p, operands, leave, d_query, may_sum=tiles.holds_keys)


def _run(
    form: Form,
    operands: Operands,
    d_key_ref: Any,
    d_value_ref: Any,
    d_query_ref: Any = None,
    *,
    sums: Any = None,
    parts: Any = None,
    visits: Visits | None = None,
    turn: Int[Array, " 1"] | None = None,
):
    """Writes dK and dV, or adds to them for a part of the query heads; and adds to dQ or gives back dS.

    With `sums` it writes dQ, of what it sums up there, and with `Form.sequence` of the dS that it leaves; to `parts` go
    dK and dV of pieces that are cut.
    """
    p, tiles, left, order, schedule = form.problem, form.tiles, form.left, form.order, form.schedule
    if operands.q_span is not None and hopper_bwd_pieces.ranks(order):
        schedule = hopper_bwd_pieces.longest_first(p, operands.q_span, order)
    given = operands, None if schedule is None else jnp.asarray(schedule), visits, turn
    written = [x for x in (d_key_ref, d_value_ref, d_query_ref, sums, parts) if x is not None]
    arrays, tree = jax.tree.flatten(given)

    def attention_backward(*refs, **scratch):
        inputs: Any
        inputs, schedule_ref, visits_ref, turn_ref = jax.tree.unflatten(tree, refs[: tree.num_leaves])
        # The last of the results, but for dQ's sums or parts of dK and dV, is dQ or dS for it.
        d_key_ref, d_value_ref, last_ref, *others = refs[tree.num_leaves :]
        sums_ref, parts_ref = others[0] if sums is not None else None, others[0] if parts is not None else None
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        if tiles.cluster > 1:
            block = block * tiles.cluster + lax.axis_index("rank")
        logits = TileLogits(p, inputs.logits)
        mask = TileMask(p, form.q_tile, KV_TILE, inputs.mask, logits)
        s = Scratch(**form.told_apart(scratch))
        maker: Maker | None = None
        if form.sequence is not None and left is not None:
            d_query_ref, last_ref = last_ref, others[0]
            semaphores = Semaphores.of(left, form.sequence)
            maker = Maker.of(s.maker, last_ref, inputs.key, d_query_ref, semaphores, block)
            block = maker.pieces_before

        first_pair, first_head, queries = jnp.int32(0), 0, None
        if left is not None:
            first_pair, first_head = left.first_pair(turn_ref), left.first_head(turn_ref)
            queries = None if left.q_parts == 1 else (left.q_tiles, left.first_tile(turn_ref))

        def whose(index):
            return (first_pair + index, first_head) if form.sequence is None else form.sequence.pair(index)

        of_form = p, tiles, order, mask, inputs, whose, form.heads, queries, form.cut
        piece_of = functools.partial(Piece.of, *of_form)

        def each_piece(role, before):
            """The last `before = role(piece, turn, before)`, from what `before` makes; `turn` counts the pieces."""
            if not form.persistent:
                if visits_ref is not None:
                    piece = Piece.visited(p, tiles, mask, visits_ref, form.pairs, first_pair, block)
                else:
                    piece = piece_of(block if schedule_ref is None else schedule_ref[block])
                return role(piece, jnp.int32(0), before(piece))

            def take(_, index, state):
                turn, before = state
                return turn + 1, role(piece_of(index), turn, before)

            return each_dealt(schedule_ref, block, take, (jnp.int32(0), before(None)))[1]

        def take_or_make(take, make):
            """What a block does: it takes pieces, or makes dQ of what others have left."""
            if maker is None:
                take()
            else:
                pl.when(~maker.makes)(take)
                pl.when(maker.makes)(functools.partial(make, maker))

        @pl.when(warpgroup == WARPGROUPS)
        def _load():
            plgpu.set_max_registers(24, action="decrease")

            def load_pieces():
                semaphores = None if maker is None else maker.semaphores
                each_piece(functools.partial(load, form, inputs, s, semaphores), lambda _: jnp.int32(0))

            take_or_make(load_pieces, Maker.load)

        @pl.when(warpgroup < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(240, action="increase")
            own = pl.ds(warpgroup * ROWS, ROWS)
            role = Role(form, inputs, s, mask, logits, last_ref, sums_ref, parts_ref, visits_ref, warpgroup, own)

            def gradients(piece: Piece, turn, before: Before):
                keys = pl.ds(piece.kv_index * KV_TILE + warpgroup * ROWS, ROWS)
                before, d_key, d_value = through_queries(role, piece, turn, before, keys.start)
                if form.lags and not form.persistent:
                    hopper_bwd_d_query.add_last(role, before)
                if p.dropout_rate:
                    d_value = d_value * logits.survived
                d_key = d_key * p.scale
                send_both = functools.partial(
                    send, role, piece, keys, (d_key_ref, d_key), (d_value_ref, d_value), before.steps
                )
                if maker is None:
                    send_both()
                else:
                    maker.semaphores.add_in_order(piece.left_index, piece.kv_index, send_both)
                    maker.semaphores.tell_left(piece.left_index, form.panels + 1)
                return before

            zero, any_units = jnp.int32(0), None
            if form.with_units:
                any_units = plgpu.layout_cast(jnp.ones((ROWS,), jnp.float32), BY_ROW)
            visit = (zero, zero) if form.in_order else (None, None)

            def nothing(piece):
                if not form.lags:
                    return Before(zero)
                # With one piece its place is no part of what a step hands to the next.
                example, k_index = (zero, zero) if piece is None else (piece.example, None)
                return Before(zero, example, zero, zero, k_index, any_units, *visit)

            def take_pieces():
                if tiles.cluster > 1:
                    hopper_bwd_in_order.begin(role)
                before = each_piece(gradients, nothing)
                if form.lags and form.persistent:
                    hopper_bwd_d_query.add_last(role, before)
                if tiles.cluster > 1:
                    hopper_bwd_in_order.end(role, before.steps)

            take_or_make(take_pieces, lambda maker: maker.multiply(warpgroup))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    cluster_options: dict[str, Any] = {}
    if tiles.cluster > 1:
        cluster_options = {"cluster": (tiles.cluster,), "cluster_names": ("rank",)}
    return plgpu.kernel(
        attention_backward,
        out_type=() if left is None else (jax.ShapeDtypeStruct(left.shape, p.dtype),),
        grid=(form.blocks // tiles.cluster,),
        grid_names=("block",),
        **cluster_options,
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=form.scratch_types(),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=not form.keeps_barriers),
    )(*arrays, *written)

"""dQ by a product of its own, for attention's backward on Hopper (sm_90a).

Axis letters: B batch, S keys, K key/value heads, H depth; L tiles of dS, of 128 keys and half as many queries.

The backward's main kernel leaves a group of heads' dS, its keys first, in the GPU's memory (`hopper_bwd_scores.py`),
and a block here goes through the keys that a tile of 128 queries sees, 64 for each of its two compute warpgroups:

    load warpgroup                              each compute warpgroup, on its own 64 queries
    dS, K       -> ready        waits consumed      dQ += dS K                        frees consumed
                                                    dQ * scale                        -> shared memory, then TMA

The blocks are persistent, so that the next tile loads meanwhile, or one for each tile of queries where arrays tell what
they see. Each row is summed by one block in a fixed order.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from fast_layers.kernel_parts.tile_order import TileOrder, deal, each_dealt
from fast_layers.ops.attention.config import HOPPER_SMS
from fast_layers.ops.attention.hopper_bwd_scores import TILE, LeftScores
from fast_layers.ops.attention.hopper_bwd_visits import Visits
from fast_layers.ops.attention.hopper_call import ROWS
from fast_layers.ops.attention.hopper_d_query_parts import (
    FREEING,
    STAGES,
    WARPGROUPS,
    Scratch,
    exchange_mended_keys,
    scratch_types,
    send,
    turned,
)
from fast_layers.ops.attention.hopper_grad_parts import make_finite
from fast_layers.ops.attention.problem import Problem
from fast_layers.ops.attention.tile_mask import Span, TileMask

_IDLE_FOR_PAGES = 0.03
"""Heads are as few at a time as let the last block end so little late: what neighbours read lies near then."""
_PIECE_COST = 1.0
"""Of what a tile of queries takes besides its tiles of keys, in the time of one."""


def _tiles_seen(p: Problem, q_index: np.ndarray) -> np.ndarray:
    """Of keys, by tiles of queries."""
    band, q_start = p.mask.band, q_index * TILE
    first, last = np.zeros_like(q_start), np.full_like(q_start, p.kv_len // TILE)
    if band is not None and band.low is not None:
        first = np.clip((q_start + band.low) // TILE, first, last)
    if band is not None and band.high is not None:
        last = np.clip(-(-(q_start + TILE + band.high) // TILE), first, last)
    return last - first


def _schedule(p: Problem, heads: int, q_tiles: int) -> tuple[TileOrder, np.ndarray]:
    """Which tiles of queries each block takes, from last to first, as `deal` says it.

    Of as few heads at a time as keep all blocks busy: neighbouring tiles' dS lies together, and is read faster so.
    """
    blocks = min(heads * q_tiles, HOPPER_SMS)
    by_tile = _PIECE_COST + _tiles_seen(p, np.arange(q_tiles)[::-1])
    soonest = max(heads * by_tile.sum() / blocks, -(-heads * q_tiles // blocks) * by_tile.min(), by_tile.max())
    found = []
    for order in (TileOrder(heads, q_tiles, d) for d in range(1, heads + 1) if heads % d == 0):
        durations = np.tile(np.repeat(by_tile, order.group), heads // order.group)
        schedule = deal(durations, blocks)
        latest = max(durations[row[1 : row[0] + 1]].sum() for row in schedule)
        found.append((latest, len(found), order, schedule))
        if latest <= (1 + _IDLE_FOR_PAGES) * soonest:
            return order, schedule
    return min(found)[2:]


def d_query(
    visits: Visits | None,
    left: LeftScores,
    d_scores: Float[Array, "L 128 64"],
    key: Float[Array, "B S K H"],
    turn: Int[Array, " 1"] | None,
    d_query_ref: Any,
):
    """Writes a group's dQ; `turn` as `LeftScores.in_groups` gives it."""
    p, depth = left.problem, key.shape[3]
    q_tiles = left.q_tiles
    heads, mask = left.pairs * left.heads, TileMask(p, TILE, TILE, None)
    hides = visits is not None or mask.hides
    order: Any = None
    schedule: Any = None
    if visits is None:
        order, schedule = _schedule(p, heads, q_tiles)
    blocks = heads * q_tiles if schedule is None else len(schedule)
    arrays, tree = jax.tree.flatten((d_scores, key, None if schedule is None else jnp.asarray(schedule), visits, turn))

    def attention_backward_query(*refs, **scratch):
        d_scores_ref, key_ref, schedule_ref, visits_ref, turn_ref = jax.tree.unflatten(tree, refs[: tree.num_leaves])
        d_query_ref = refs[tree.num_leaves]
        s = Scratch(**scratch)
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        query_head, first_tile = left.query_heads(turn_ref), left.first_tile(turn_ref)

        def each_tile(role, state):
            """The last `state = role(head within the group, q_index, its tiles of keys, state)`."""
            if visits_ref is not None:
                head, q_index, *span = visits_ref.of_queries(block, heads, query_head(0), p.heads)
                return role(head, q_index, Span(*span), state)

            def take(_, index, state):
                head, tiles_after = order.locate(index)
                q_index = first_tile + q_tiles - 1 - tiles_after
                return role(head, q_index, mask.key_span(0, q_index), state)

            return each_dealt(schedule_ref, block, take, state)

        @pl.when(warpgroup == WARPGROUPS)
        def _load():
            plgpu.set_max_registers(40, action="decrease")

            def load(head, q_index, span, step):
                example = lax.div(query_head(head), p.heads)
                kv_head = lax.div(lax.rem(query_head(head), p.heads), p.group)

                def tile(j, step):
                    slot, keys = lax.rem(step, STAGES), pl.ds(j * TILE, TILE)
                    pl.when(step >= STAGES)(lambda: plgpu.barrier_wait(s.consumed.at[slot]))
                    for i in range(WARPGROUPS):
                        tile_part = d_scores_ref.at[WARPGROUPS * (left.row(head, j, first_tile) + q_index) + i]
                        plgpu.copy_gmem_to_smem(tile_part, s.score_slots.at[slot, i], s.ready.at[slot])
                    plgpu.copy_gmem_to_smem(key_ref.at[example, keys, kv_head], s.key_slots.at[slot], s.ready.at[slot])
                    return step + 1

                return lax.fori_loop(span.first, span.last, tile, step)

            each_tile(load, jnp.int32(0))

        @pl.when(warpgroup < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(224, action="increase")

            def multiply(head, q_index, span, step):
                def over_keys(acc):
                    def tile(j, step):
                        slot = lax.rem(step, STAGES)
                        plgpu.barrier_wait(s.ready.at[slot])
                        if hides:
                            pl.when(span.ragged(j))(lambda: mend(slot))
                        key = s.key_slots.at[slot]
                        (scores,) = turned([s.score_slots.at[slot, warpgroup]], key)
                        plgpu.wgmma(acc, scores, key)
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(s.consumed.at[slot])
                        return step + 1

                    step_after = lax.fori_loop(span.first, span.last, tile, step)
                    return step_after, acc[...]

                step, product = pl.run_scoped(over_keys, plgpu.WGMMAAccumulatorRef((ROWS, depth), jnp.float32))
                rows = pl.ds(q_index * TILE + warpgroup * ROWS, ROWS)
                send(p, product, s.result_slots.at[warpgroup], d_query_ref, query_head(head), rows)
                return step

            def mend(slot):
                # 0 times NaN is NaN; who sees a broken key has NaN in its dS.
                make_finite(s.key_slots.at[slot, pl.ds(warpgroup * ROWS, ROWS)])
                exchange_mended_keys(s)

            each_tile(multiply, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    plgpu.kernel(
        attention_backward_query,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=scratch_types(p, TILE, depth, plgpu.Barrier(**FREEING)),
    )(*arrays, d_query_ref)

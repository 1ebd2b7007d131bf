"""dQ in attention's backward for Hopper at depth 64, where a block goes through all keys of a head.

Then it is known which tile of keys is the first that sees a tile of queries, and which the last. The first stores its
part of dQ in the GPU's memory, those between add to it by TMA, and the last takes the sum back and writes dQ: a sum of
floats, in the same order in every run. A block's heads have their sums in one place, one after the other; so those of
all blocks stay in the cache, if rows are short.

Without a mask the tiles of keys come from the first on, under a causal one from the last, so that the tile that is the
last to come sees all queries.

For rows whose sums would not stay in the cache, two blocks of a cluster share a head, and take its tiles of keys in
turns. The second block is some steps behind, and each tells the other with each step what it has added. Both blocks of
a cluster run at the same time, so neither waits for ever.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fast_layers.kernel_parts.fragments import load_fragments, store_fragments
from fast_layers.ops.attention.config import sees_all
from fast_layers.ops.attention.hopper_bwd_config import CLUSTER_DELAY, CLUSTER_LAG
from fast_layers.ops.attention.hopper_bwd_form import Before, Role
from fast_layers.ops.attention.hopper_bwd_pieces import Piece
from fast_layers.ops.attention.hopper_call import ROWS


def visit(role: Role, piece: Piece, q_index: Any) -> dict[str, Any]:
    """Of `Before`: whether the piece's keys are the first that see a tile of queries, and whether the last."""
    if sees_all(role.form.problem):
        is_first, is_last = piece.kv_index == 0, piece.kv_index == role.form.order.tiles - 1
    else:
        is_first, is_last = piece.kv_index == q_index, piece.kv_index == 0
    return {"is_first": is_first.astype(jnp.int32), "is_last": is_last.astype(jnp.int32)}


def fetch(role: Role, step: Before, before: Before) -> None:
    """Takes back what other keys have added, where no more than those of `step` is missing.

    All of it is there: what they add comes two steps earlier at least, and was waited for.
    """
    slot = role.scratch.d_query_slots.at[role.warpgroup]

    @pl.when((step.is_last != 0) & (step.is_first == 0))
    def _fetch():
        # What the step before adds is read from the slot; a dQ that it finishes is in another, and takes longer.
        pl.when(before.is_last == 0)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
        plgpu.copy_gmem_to_smem(_sum_of(role, step), slot, role.scratch.sum_ready.at[role.warpgroup])


def add(role: Role, d_query: jax.Array, step: Before) -> None:
    """Adds this warpgroup's half of a step's dQ to the sum, or makes dQ of both."""
    form, s, warpgroup, p = role.form, role.scratch, role.warpgroup, role.form.problem
    slot, is_first = s.d_query_slots.at[warpgroup], step.is_first != 0
    plgpu.wait_smem_to_gmem(0)  # not for the slot alone: until all is added
    if form.tiles.cluster > 1:
        _tell(role, _turn(step.steps))

    @pl.when((step.is_last == 0) & (step.steps > 0))
    def _add():
        store_fragments(slot, d_query, None)
        plgpu.commit_smem()
        to = _sum_of(role, step)
        plgpu.copy_smem_to_gmem(slot, to, is_first, commit_group=False)
        plgpu.copy_smem_to_gmem(slot, to, ~is_first, reduction_op="add")

    @pl.when(step.is_last != 0)
    def _finish():
        def summed():
            plgpu.barrier_wait(s.sum_ready.at[warpgroup])
            return d_query + load_fragments(slot, form.panel)

        result = s.result_slots.at[warpgroup, 0]
        result[...] = (lax.cond(is_first, lambda: d_query, summed) * p.scale).astype(p.dtype)
        plgpu.commit_smem()
        rows = pl.ds(step.q_index * form.q_tile + warpgroup * ROWS, ROWS)
        plgpu.copy_smem_to_gmem(result, role.last_ref.at[step.example, rows, step.head])


def begin(role: Role) -> None:
    """Before the first step of a block in a cluster."""
    lax.fori_loop(0, _turn(0), lambda turn, _: _tell(role, turn), None)


def end(role: Role, steps: Any) -> None:
    """After its last. Blocks that tell each other must not end before all is told."""
    plgpu.wait_smem_to_gmem(0)
    last = steps + CLUSTER_DELAY * (role.form.tiles.cluster - 1)
    lax.fori_loop(_turn(steps) + 1, last + 1, lambda turn, _: _tell(role, turn), None)
    for untold in range(1, CLUSTER_LAG):
        plgpu.barrier_wait(_told(role, last - CLUSTER_LAG + 1 + untold))


def _sum_of(role: Role, step: Before) -> Any:
    """This warpgroup's rows of the sum in the GPU's memory, which the heads of a cluster have one after the other."""
    form = role.form
    head = lax.rem(step.head, form.problem.group)
    return role.sums_ref.at[lax.axis_index("block"), head, step.q_index * form.halves + role.warpgroup, 0]


def _turn(steps: Any) -> Any:
    """In the time of all blocks of a cluster, in which the second is behind the first."""
    return steps + CLUSTER_DELAY * lax.axis_index("rank")


def _told(role: Role, turn: Any) -> Any:
    return role.scratch.added.at[role.warpgroup * CLUSTER_LAG + lax.rem(turn, CLUSTER_LAG)]


def _tell(role: Role, turn: Any) -> None:
    """That all is added but what the last step before `turn` adds; and waits until all blocks have told of an earlier
    turn.

    A copy that has ended is followed by a proxy fence (PTX ISA, "async proxy"), so that other blocks' copies see it.
    """
    plgpu.barrier_arrive(_told(role, turn))
    earlier = turn - (CLUSTER_LAG - 1)
    pl.when(earlier >= 0)(lambda: plgpu.barrier_wait(_told(role, earlier)))

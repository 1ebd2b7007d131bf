"""How the blocks of a cluster put their parts together, in attention's forward of few rows for Hopper (sm_90a).

Axis letters: B batch, T queries, N query heads, K key/value heads, V value depth, C columns of rows.

Each block has a part of the keys, and its out and lse in shared memory. A row is put together by one of the blocks, who
reads it in all of them; so nothing goes through the GPU's memory, and there is no second kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fast_layers.kernel_parts import cluster_smem
from fast_layers.kernel_parts.by_column import WARPS
from fast_layers.kernel_parts.online_softmax import LOG2_E
from fast_layers.ops.attention import split_kv
from fast_layers.ops.attention.forward_parts import Piece
from fast_layers.ops.attention.hopper_few_rows_config import HopperFewRowsTiles
from fast_layers.ops.attention.problem import Problem


class Scratch(NamedTuple):
    """What a block holds in shared memory: tiles, and the barriers named after the event that they wait for."""

    loose_query: Any
    q_slot: Any
    k_slots: Any
    v_slots: Any
    weight_slot: Any
    by_column: Any
    """What each warp tells the others of columns, and lse. Apart they would take another KiB, as shared memory is
    given."""
    out_slot: Any
    q_ready: Any
    kv_ready: Any
    consumed: Any
    row_slots: Any = None
    """Of rows that this block has put together, if they leave by way of some."""
    met: Any = None
    """All blocks of the cluster."""

    @property
    def exchange(self) -> Any:
        return self.by_column.at[pl.ds(0, WARPS)]

    @property
    def lse_slot(self) -> Any:
        return self.by_column.at[WARPS]


def join(
    p: Problem, tiles: HopperFewRowsTiles, group: int, s: Scratch, sinks: Any, piece: Piece, out_ref: Any, lse_ref: Any
) -> None:
    """Writes out [B, T, N, V] and lse [B, K, C] of the piece's rows; `out_slot` and `lse_slot` are committed.

    `p` has `group` heads of each query as rows.
    """
    cluster_smem.release()
    plgpu.barrier_arrive(s.met)
    plgpu.barrier_wait(s.met)
    cluster_smem.acquire()
    columns = s.out_slot.shape[1]

    def store(i: int, row: Any, lse_log2: list[Any], values: list[Any]) -> None:
        joined = split_kv.Joined.start(columns, cluster_smem.layout(columns)).join(lse_log2, values)
        sees_none = joined.total == 0
        if sinks is not None:
            of_head = sinks.at[piece.example if sinks.shape[0] > 1 else 0, piece.head]
            sink = of_head[0 if of_head.shape[0] == 1 else row]
            joined = joined.join([sink * LOG2_E], [jnp.zeros_like(joined.summed)])
        to = out_ref.at[piece.example, *split_kv.place_of_row(row, piece.head, group)]
        split_kv.store_row(joined.out.astype(p.dtype), to, None if s.row_slots is None else s.row_slots.at[i])
        lse_ref[piece.example, piece.head, row] = jnp.where(sees_none, -jnp.inf, joined.lse)

    whole, rest = divmod(p.q_len, tiles.splits)
    rows = [lax.axis_index("rank") + i * tiles.splits for i in range(whole + 1)]
    # All loads are on their way before the first is needed.
    parts = [_parts(s, row, tiles.splits) for row in rows[:whole]]
    for i, part in enumerate(parts):
        store(i, rows[i], *part)
    if rest:
        pl.when(rows[whole] < p.q_len)(lambda: store(whole, rows[whole], *_parts(s, rows[whole], tiles.splits)))
    # A block whose shared memory others read must not end. What was read is stored by now; all warps meet, and then all
    # blocks, of which each is told by another warp.
    plgpu.commit_smem()
    plgpu.barrier_arrive(s.met)
    plgpu.barrier_wait(s.met)


def _parts(s: Scratch, row: Any, blocks: int) -> tuple[list[Any], list[Any]]:
    """A row's lse times log2 e, and out, of all blocks."""
    lse = [cluster_smem.number_of_block(s.lse_slot.at[pl.ds(row, 1)], rank) for rank in range(blocks)]
    return [x * LOG2_E for x in lse], [cluster_smem.row_of_block(s.out_slot.at[row], rank) for rank in range(blocks)]

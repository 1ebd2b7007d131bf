"""The load warpgroup of attention's backward for Hopper at depths up to 128."""

from __future__ import annotations

from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fast_layers.kernel_parts.tma_columns import tma_columns
from fast_layers.ops.attention.hopper_bwd_beside import Semaphores
from fast_layers.ops.attention.hopper_bwd_form import WARPGROUPS, Form, Scratch
from fast_layers.ops.attention.hopper_bwd_pieces import KV_TILE, Piece
from fast_layers.ops.attention.hopper_call import ROWS
from fast_layers.ops.attention.hopper_grad_parts import load_row

LSE, DELTA, UNITS = range(3)
"""What a row of queries has, in one array: each array starts at a multiple of 1 KiB."""


def load(
    form: Form, inputs: Any, s: Scratch, semaphores: Semaphores | None, piece: Piece, turn: Any, steps: Any
) -> Any:
    """A piece's keys and values, and all that its `steps` go through; how many these are then."""
    q_tile, ring = form.q_tile, form.ring
    # Which of the two takes fewer registers of the others was read off the assembly.
    copy_row: Any = load_row if form.lags else plgpu.copy_gmem_to_smem
    example, k_start = piece.example, piece.kv_index * KV_TILE

    def load_queries(head, q_index, step, _hides, _held):
        slot, rows = lax.rem(step, ring), pl.ds(q_index * q_tile, q_tile)

        @pl.when(step >= ring)
        def _wait_q():
            plgpu.barrier_wait(s.q_consumed.at[slot])

        query = tma_columns(inputs.query.at[example, rows, head], 0, form.qk_dim)
        plgpu.copy_gmem_to_smem(query, s.q_slots.at[slot], s.q_ready.at[slot])
        copy_row(inputs.lse.at[example, head, rows], s.row_slots.at[LSE, slot], s.q_ready.at[slot])

        @pl.when(step >= ring)
        def _wait_d_out():
            plgpu.barrier_wait(s.d_out_consumed.at[slot])

        ready = s.d_out_ready.at[slot]
        plgpu.copy_gmem_to_smem(inputs.d_out.at[example, rows, head], s.d_out_slots.at[slot], ready)
        copy_row(inputs.delta.at[example, head, rows], s.row_slots.at[DELTA, slot], ready)
        if inputs.units is not None:
            copy_row(inputs.units.at[example, head, rows], s.row_slots.at[UNITS, slot], ready)
        # After the first queries, whose slots are free before those of keys and values.
        pl.when(step == steps)(lambda: _load_keys(form, inputs, s, piece, k_start, turn))
        if not form.keeps_barriers:
            plgpu.commit_smem()  # for its barrier: no warp shall wait for a phase two behind
        return step + 1

    if semaphores is not None:
        semaphores.wait_made(piece.left_index)
    return piece.each_query_tile(load_queries, steps)


def _load_keys(form: Form, inputs: Any, s: Scratch, piece: Piece, k_start: Any, turn: Any) -> None:
    example, kv_head, panel = piece.example, piece.kv_head, form.panel
    if form.persistent:
        pl.when(turn > 0)(lambda: plgpu.barrier_wait(s.kv_consumed))
    k_slot = s.k_slots.at[form.key_slot(turn)]
    keys = inputs.key.at[example, pl.ds(k_start, KV_TILE), kv_head]
    for i in range(form.panels):
        plgpu.copy_gmem_to_smem(tma_columns(keys, i * panel, panel), k_slot.at[i], s.kv_ready)
    for i in range(WARPGROUPS):
        value = inputs.value.at[example, pl.ds(k_start + i * ROWS, ROWS), kv_head]
        plgpu.copy_gmem_to_smem(value, s.v_slot.at[i], s.kv_ready)

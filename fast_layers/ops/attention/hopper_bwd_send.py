"""How dK and dV leave a block of attention's backward for Hopper at depths up to 128.

By way of slots in shared memory that nobody needs at the time, then by TMA.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fast_layers.kernel_parts.tma_columns import tma_columns
from fast_layers.ops.attention import hopper_bwd_parts
from fast_layers.ops.attention.hopper_bwd_form import WARPGROUPS, Role
from fast_layers.ops.attention.hopper_bwd_pieces import Piece


def send(
    role: Role,
    piece: Piece,
    rows: Any,
    d_key: tuple[Any, jax.Array],
    d_value: tuple[Any, jax.Array],
    steps: Any,
) -> None:
    """The gradients of a warpgroup's 64 keys in float32, `rows` of the arrays that stand before them: those of all keys
    in the GPU's memory, in float32 if `Form.sums`.

    `steps`: of the block up to now.
    """
    form, exact = role.form, (d_key[1], d_value[1])
    if not form.sums:
        d_key, d_value = ((to, x.astype(form.problem.dtype)) for to, x in (d_key, d_value))
    if form.sums or (form.persistent and not form.lags):
        _through_scores(role, piece, rows, (d_value, d_key), steps)
    elif form.persistent:
        plgpu.barrier_arrive(role.scratch.kv_consumed)
        whole = functools.partial(_through_sums, role, piece, rows, (d_value, d_key))
        if piece.part is None:
            whole()
        else:
            pl.when(piece.part < 0)(whole)
            pl.when(piece.part >= 0)(lambda: hopper_bwd_parts.send(role, piece.part, exact))
    else:
        _through_inputs(role, piece, rows, d_key, d_value)


def _through_scores(role: Role, piece: Piece, rows: Any, both: Any, steps: Any) -> None:
    """By way of this warpgroup's halves of dS; or adds to the sums over all parts of the query heads."""
    form, s = role.form, role.scratch
    if form.persistent:
        plgpu.barrier_arrive(s.kv_consumed)
    # By those that were copied first, and that the next step does not write. Steps of 64 queries are even.
    first = lax.rem(steps + 1, 2) * form.halves if form.halves > 1 else 0
    slots = s.sum_slots if form.sums else s.d_scores
    columns, reduction = slots.shape[-1], "add" if form.sums else None
    parts = [(to, x, at) for to, x in both for at in range(0, x.shape[1], columns)]
    for i, (to, x, at) in enumerate(parts):
        slot = slots.at[(first + i % 2) * WARPGROUPS + role.warpgroup]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # for the copy before the last
        slot[...] = x[:, at : at + columns]
        plgpu.commit_smem()
        to = to.at[piece.example, rows, piece.kv_head, pl.ds(at, columns)]
        plgpu.copy_smem_to_gmem(slot, to, reduction_op=reduction)


def _through_inputs(role: Role, piece: Piece, rows: Any, d_key: Any, d_value: Any) -> None:
    """By way of the slots of K and V, which no other piece needs."""
    form, s, warpgroup = role.form, role.scratch, role.warpgroup
    (d_key_ref, d_key), (d_value_ref, d_value) = d_key, d_value
    if form.lags:
        # Keys that both warpgroups have used for dQ.
        plgpu.barrier_arrive(s.keys_left)
        plgpu.barrier_wait(s.keys_left)
    s.v_slot[warpgroup] = d_value
    panel = form.panel
    for i in range(form.panels):
        s.k_slots[0, i, role.own] = d_key[:, i * panel : (i + 1) * panel]
    plgpu.commit_smem()
    for i in range(form.panels):
        to = tma_columns(d_key_ref.at[piece.example, rows, piece.kv_head], i * panel, panel)
        plgpu.copy_smem_to_gmem(s.k_slots.at[0, i, role.own], to)
    plgpu.copy_smem_to_gmem(s.v_slot.at[warpgroup], d_value_ref.at[piece.example, rows, piece.kv_head])


def _through_sums(role: Role, piece: Piece, rows: Any, both: Any) -> None:
    """By way of the slots of dQ, or of those that dQ leaves by, so that the next K and V may come in."""
    form, s = role.form, role.scratch
    panel = form.panel
    parts = [(to, i * panel, x[:, i * panel : (i + 1) * panel]) for to, x in both for i in range(form.panels)]
    slots = s.result_slots.at[role.warpgroup]
    for first in range(0, len(parts), form.result_parts):
        some = parts[first : first + form.result_parts]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for i, (_, _, x) in enumerate(some):
            slots[i] = x
        plgpu.commit_smem()
        for i, (to, start, _) in enumerate(some):
            columns = tma_columns(to.at[piece.example, rows, piece.kv_head], start, panel)
            plgpu.copy_smem_to_gmem(slots.at[i], columns)

"""Pieces of attention's backward for Hopper that are cut by their queries, so that all blocks end together.

Where all pieces are alike, few may be left when all blocks have taken as many, and would take the time of a whole one.
They are cut: each part leaves its dK and dV in float32, as warpgroups hold them (kernel_parts/fragments.py), and
another kernel adds the parts, always in the same order.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fast_layers.kernel_parts.fragments import fragments_shape, load_fragments, store_fragments
from fast_layers.kernel_parts.smem_tile import smem_tile
from fast_layers.ops.attention.hopper_bwd_form import WARPGROUPS, Form, Role
from fast_layers.ops.attention.hopper_bwd_pieces import KV_TILE
from fast_layers.ops.attention.hopper_call import ROWS
from fast_layers.ops.attention.hopper_grad_parts import summed_dtype

_GRADIENTS = 2
"""dK and dV."""
_COLUMNS = 16
"""That a block adds up, of all parts in registers."""


def empty(form: Form) -> jax.Array:
    """For the parts: [pieces that are cut, parts of each, dK or dV, warpgroup, ...]."""
    assert form.cut is not None
    shape = form.cut.pieces, form.cut.parts, _GRADIENTS, WARPGROUPS, *fragments_shape(form.panel)
    return lax.empty(shape, summed_dtype(form.problem))


def send(role: Role, part: Any, gradients: tuple[jax.Array, jax.Array]) -> None:
    """A warpgroup's dK and dV, by way of the slot that its dQ leaves by."""
    form, slot = role.form, role.scratch.d_query_slots.at[role.warpgroup]
    assert form.cut is not None
    piece, part = lax.div(part, form.cut.parts), lax.rem(part, form.cut.parts)
    for i, gradient in enumerate(gradients):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        # The bits of a float, if dQ is a sum of integers.
        store_fragments(slot, lax.bitcast_convert_type(gradient, slot.dtype), None)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(slot, role.parts_ref.at[piece, part, i, role.warpgroup])


def join(form: Form, parts: Any, d_key: Any, d_value: Any) -> None:
    """Adds the parts up, in `d_key` and `d_value`, references to those of all keys."""
    cut, order, p = form.cut, form.order, form.problem
    assert cut is not None

    def attention_backward_parts(parts_ref, *gradients, slot):
        piece, gradient, half, columns = (lax.axis_index(name) for name in names)
        pair, kv_index = order.locate(cut.whole + piece)
        example, kv_head = lax.div(pair, p.kv_heads), lax.rem(pair, p.kv_heads)
        fragments = fragments_shape(_COLUMNS)[0]
        stored = parts_ref.at[piece, :, gradient, half, pl.ds(columns * fragments, fragments)]
        loaded = [load_fragments(stored.at[part], _COLUMNS) for part in range(cut.parts)]
        total = functools.reduce(jnp.add, (lax.bitcast_convert_type(x, jnp.float32) for x in loaded))
        slot[...] = total.astype(p.dtype)
        plgpu.commit_smem()
        rows = pl.ds(kv_index * KV_TILE + half * ROWS, ROWS)
        for i, to in enumerate(gradients):
            to = to.at[example, rows, kv_head, pl.ds(columns * _COLUMNS, _COLUMNS)]
            plgpu.copy_smem_to_gmem(slot, to, gradient == i)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    names = "piece", "gradient", "half", "columns"
    plgpu.kernel(
        attention_backward_parts,
        grid=(cut.pieces, _GRADIENTS, WARPGROUPS, form.panel // _COLUMNS),
        grid_names=names,
        scratch_types={"slot": smem_tile(ROWS, _COLUMNS, dtype=p.dtype)},
    )(parts, d_key, d_value)

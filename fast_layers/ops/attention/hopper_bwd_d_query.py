"""dQ in attention's backward for Hopper at depths up to 128, where its main kernel makes it.

Both warpgroups need all 128 keys' dS for it, so they exchange it through shared memory. Each makes half of a tile's dQ,
a step behind, and adds it by TMA to what other blocks have added.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fast_layers.kernel_parts.fragments import store_fragments
from fast_layers.ops.attention import hopper_bwd_in_order
from fast_layers.ops.attention.hopper_bwd_form import Before, Role
from fast_layers.ops.attention.hopper_call import ROWS


def multiply(role: Role, acc: Any, step: Before) -> None:
    """Issues the product of this warpgroup's half."""
    form, s = role.form, role.scratch
    buffer = lax.rem(step.steps + 1, 2)
    mine, columns = (role.warpgroup, 0) if form.by_rows else (0, role.warpgroup)
    key = s.k_slots.at[step.k_index if form.persistent else 0, columns]
    plgpu.wgmma(acc, s.d_scores.at[buffer, mine].T, key)


def add(role: Role, d_query: jax.Array, step: Before) -> None:
    """Adds this warpgroup's half of a step's dQ to the sum in the GPU's memory."""
    form, warpgroup = role.form, role.warpgroup
    if form.in_order:
        hopper_bwd_in_order.add(role, d_query, step)
        return
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    slot = role.scratch.d_query_slots.at[warpgroup]
    store_fragments(slot, d_query, step.units)
    plgpu.commit_smem()
    of_tile = (step.q_index * form.halves + warpgroup, 0) if form.by_rows else (step.q_index, warpgroup)
    to = role.last_ref.at[step.example, step.head, *of_tile]
    plgpu.copy_smem_to_gmem(slot, to, step.steps > 0, reduction_op="add")


def add_last(role: Role, before: Before) -> None:
    """That of the last step."""

    @pl.when(before.steps > 0)
    def _last():
        plgpu.barrier_wait(role.scratch.scores_ready.at[lax.rem(before.steps + 1, 2)])

        def last(acc):
            multiply(role, acc, before)
            return acc[...]

        d_query = pl.run_scoped(last, plgpu.WGMMAAccumulatorRef((ROWS, role.form.panel), jnp.float32))
        add(role, d_query, before)

"""How out leaves by the slots of the last values, in attention's forward for Hopper.

At depths over 128 there is room for one tile of queries. If out leaves through it, as elsewhere, the next queries come
when it has left, and a block multiplies nothing meanwhile. So they come as soon as the last scores are there:

    load warpgroup                               each compute warpgroup
    next Q      -> q_ready   waits q_consumed    the last scores                  frees q_consumed
    next K(0), K(1)                              the last products; all wait for all (values_left)
    out by TMA  waits out_ready                  out -> slots of values           -> out_ready
    next V(0)                                    the next scores

With `spare_values` there is a slot more, into which V(0) comes before out is sent. Where a slot of values has room for
all warpgroups' rows (`out_in_one_slot`), V(0) needs none for that.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fast_layers.ops.attention.forward_parts import Piece, Work, keys_and_values, load_query


def nothing() -> tuple[Any, ...]:
    """Instead of where a piece's out goes, before a block's first."""
    return (jnp.int32(0),) * 3


def load(
    work: Work, inputs: Any, s: Any, out_ref: Any, piece: Piece, turn: Any, steps: Any, *before: Any
) -> tuple[Any, ...]:
    """The load warpgroup's part, keys a tile ahead of values; `s` is the kernel's scratch. `before`: where the out of
    the piece before goes. Gives where this one's does."""
    tiles, count = work.tiles, piece.span.tiles

    def load_tile(ref, i, ring, slots, ready, consumed):
        step, slot = steps + i, lax.rem(steps + i, ring)
        pl.when(step >= ring)(lambda: plgpu.barrier_wait(consumed.at[slot]))
        plgpu.copy_gmem_to_smem(ref, slots.at[slot], ready.at[slot])

    def load_key(i):
        key, _ = keys_and_values(work, inputs, piece, work.tile_at(piece.span, i))
        load_tile(key, i, tiles.stages, s.k_slots, s.k_ready, s.k_consumed)

    def load_value(i):
        _, value = keys_and_values(work, inputs, piece, work.tile_at(piece.span, i))
        load_tile(value, i, tiles.value_stages, s.v_slots, s.v_ready, s.v_consumed)

    def load_both(i, _):
        load_value(i)
        pl.when(i + 2 < count)(lambda: load_key(i + 2))

    load_key(0)
    load_query(work, inputs, s, piece, turn)
    pl.when(count > 1)(lambda: load_key(1))
    early = first_values_before_out(work, count)
    pl.when(early)(lambda: load_value(0))
    pl.when(turn > 0)(lambda: send(work, s, out_ref, steps, *before))
    pl.when(jnp.logical_not(early))(lambda: load_value(0))
    pl.when(count > 2)(lambda: load_key(2))
    lax.fori_loop(1, count, load_both, None)
    return piece.out_index, piece.head, piece.q_index


def first_values_before_out(work: Work, count: Any) -> Any:
    """Whether a piece's first values need not wait until the out of the piece before is sent. But where out takes
    several slots, and they are the piece's only ones, its own out goes where that may still be."""
    return work.tiles.out_in_one_slot | (work.tiles.spare_values & (count > 1))


def send(work: Work, s: Any, out_ref: Any, steps: Any, out_index: Any, head: Any, q_index: Any) -> None:
    """The load warpgroup, a piece's out; its slots are free for values then. `steps` as after the piece."""
    plgpu.barrier_wait(s.out_ready)
    for part in range(work.tiles.compute_wgs):
        rows = pl.ds(q_index * work.tiles.q_tile + part * work.rows, work.stored_rows)
        slot = _rows(work, s, part, steps, work.stored_rows)
        plgpu.copy_smem_to_gmem(slot, out_ref.at[out_index, rows, head, pl.ds(0, work.v_dim)])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def own_slot(work: Work, s: Any, warpgroup: Any, steps: Any) -> Any:
    """A compute warpgroup's rows of values, for those of its out, when all have read the values."""
    plgpu.barrier_arrive(s.values_left)
    plgpu.barrier_wait(s.values_left)
    return _rows(work, s, warpgroup, steps, work.rows)


def own_slot_again(work: Work, s: Any, warpgroup: Any) -> Any:
    """Likewise in the second pass, which has values in the first slot alone, where out takes one."""
    return _rows(work, s, warpgroup, 2, work.rows)


def _rows(work: Work, s: Any, warpgroup: Any, steps: Any, rows: int) -> Any:
    """In the slots of the last values before `steps`."""
    ring, from_last, start = work.tiles.value_stages, work.tiles.compute_wgs - warpgroup, 0
    if work.tiles.out_in_one_slot:
        from_last, start = 1, warpgroup * work.rows
    return s.v_slots.at[lax.rem(steps + ring - from_last, ring)].at[pl.ds(start, rows)]

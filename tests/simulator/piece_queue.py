"""A kernel whose blocks take pieces from a queue, and tell who took which."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fast_layers.kernel_parts import piece_queue
from fast_layers.kernel_parts.piece_queue import PieceQueue

FOLLOWERS = 2


def is_marked(piece: Any) -> Any:
    """By one or both of the followers."""
    return piece % 3 < FOLLOWERS


def taken(
    pieces: int, order: np.ndarray | None, *, blocks: int, scratch: dict[str, Any] | None = None
) -> tuple[jax.Array, jax.Array]:
    """(int32 [2, warpgroups, pieces]: one more than the block that took a piece, and 1000 times its turn there, in both
    passes; int32 [2, warpgroups, blocks]: how many each took). `scratch` is told the kernel's."""

    def kernel(state_ref, who_ref, counts_ref, *order_ref, slots, all_done, **barriers):
        if scratch is not None:
            scratch.update(barriers, slots=slots)
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        queue = PieceQueue(state_ref, *(order_ref or (None,)), pieces, blocks, FOLLOWERS, slots, **barriers)

        def passes(*ways, marks=False):
            for i, way in enumerate(ways):

                def role(turn, piece, steps, i=i):
                    who_ref[i, warpgroup, piece] = block + 1 + 1000 * turn
                    if marks and i == 0:
                        rows = plgpu.broadcasted_iota(jnp.int32, (64,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
                        marked = (rows == piece) & ((lax.rem(piece, 3) == warpgroup) | (lax.rem(piece, 9) == 0))
                        queue.mark(turn, warpgroup, jnp.where(marked, 1.0, 0.0))
                    return steps + 1

                turns, steps = way(block, role, jnp.int32(0))
                counts_ref[i, warpgroup, block] = turns + 1000 * (turns - steps)
                plgpu.barrier_arrive(all_done)
                plgpu.barrier_wait(all_done)

        @pl.when(warpgroup == FOLLOWERS)
        def _take():
            passes(queue.take, queue.again)

        @pl.when(warpgroup < FOLLOWERS)
        def _follow():
            passes(queue.follow, queue.again, marks=True)

    shapes = [(2, FOLLOWERS + 1, n) for n in (pieces, blocks)]
    found = [jax.new_ref(jnp.zeros(shape, jnp.int32)) for shape in shapes]
    state = jax.new_ref(piece_queue.new(pieces, FOLLOWERS))
    plgpu.kernel(
        kernel,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=FOLLOWERS + 1,
        thread_name="warpgroup",
        scratch_types={
            "slots": plgpu.SMEM((piece_queue.SLOTS,), jnp.float32),
            "all_done": plgpu.Barrier(num_arrivals=FOLLOWERS + 1),
            **piece_queue.barriers(FOLLOWERS),
        },
    )(state, *found, *([] if order is None else [jnp.asarray(order, jnp.int32)]))
    return found[0][...], found[1][...]

"""What the two kernels share that make dQ of dS, in attention's backward for Hopper.

`hopper_bwd_apart.py` has those for depths up to 128, `hopper_bwd_deep_query.py` for more: they load tiles of dS with
the keys of as many columns, in a ring of slots, and each of two compute warpgroups sums 64 queries' dQ.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from fast_layers.kernel_parts.fragments import load_turned_factor
from fast_layers.kernel_parts.smem_tile import smem_tile, swizzled_columns
from fast_layers.ops.attention.hopper_bwd_scores import TILE
from fast_layers.ops.attention.hopper_call import ROWS
from fast_layers.ops.attention.problem import Problem

WARPGROUPS = TILE // ROWS
STAGES = 3
FREEING: dict[str, Any] = {"num_arrivals": WARPGROUPS, "num_barriers": STAGES}
"""Of the barriers `consumed`, for a block's own slots."""


class Scratch(NamedTuple):
    """What a block holds in shared memory: tiles, and the barriers named after the event that they wait for."""

    score_slots: Any
    key_slots: Any
    result_slots: Any
    ready: Any
    consumed: Any
    keys_mended: Any


def scratch_types(p: Problem, keys: int, depth: int, consumed: Any) -> dict[str, Any]:
    """For tiles of so many keys; the load warpgroup waits for `consumed`."""
    types = Scratch(
        score_slots=smem_tile(STAGES, WARPGROUPS, keys, ROWS, dtype=p.dtype),
        key_slots=smem_tile(STAGES, keys, depth, dtype=p.dtype),
        result_slots=smem_tile(WARPGROUPS, ROWS, depth, dtype=p.dtype),
        ready=plgpu.Barrier(num_arrivals=WARPGROUPS + 1, num_barriers=STAGES),
        consumed=consumed,
        keys_mended=plgpu.Barrier(num_arrivals=WARPGROUPS),
    )
    return types._asdict()


def turned(d_scores: list[Any], key: Any) -> list[Any]:
    """Tiles of dS, which stand with their keys first, as products with those keys take them."""
    columns = swizzled_columns(ROWS, key.dtype)
    if swizzled_columns(key.shape[1], key.dtype) == columns:
        return [x.T for x in d_scores]
    # wgmma wants both of its factors in shared memory swizzled alike, and dS by fewer columns takes longer to copy.
    loaded = [load_turned_factor(x, 0, ROWS, columns) for x in d_scores]
    plgpu.commit_smem()  # read by all, before the next are written
    return loaded


def send(p: Problem, product: Float[Array, "64 H"], slot: Any, d_query_ref: Any, head: Any, rows: Any):
    """dS K, less the scale, by way of a warpgroup's slot; `head`: among all examples' query heads."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    slot[...] = (product * p.scale).astype(p.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(slot, d_query_ref.at[lax.div(head, p.heads), rows, lax.rem(head, p.heads)])


def exchange_mended_keys(s: Scratch):
    """Each warpgroup has mended a part of a tile, and both read all of it."""
    plgpu.commit_smem()
    plgpu.barrier_arrive(s.keys_mended)
    plgpu.barrier_wait(s.keys_mended)

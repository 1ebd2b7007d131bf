"""What attention's backward for Hopper (sm_90a) must know of each row before it starts.

Axis letters: B batch, T queries, S keys, N query heads, K key/value heads, D depth; J tiles of keys.

In the kernel each warpgroup goes through tiles of 64 rows of one head by itself, up to 128 columns at a time, and loads
them two ahead: keys and values first, if the forward has not found their sizes, then out and d_out, in whose turns it
also writes dQ's zeros. It waits for memory alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from fast_layers.kernel_parts.row_sizes import sizes_of
from fast_layers.kernel_parts.smem_tile import smem_tile
from fast_layers.ops.attention.config import HOPPER_SMS
from fast_layers.ops.attention.hopper_call import ROWS
from fast_layers.ops.attention.problem import Problem, finite_or_zero
from fast_layers.ops.attention.tile_mask import WGMMA

WARPGROUPS = 3
_STAGES = 2
_COLUMNS = 128
"""At most, of a tile at a time."""
_ZEROS = 1 << 12
"""Of dQ, that one copy writes."""


class Operands(NamedTuple):
    out: Float[Array, "B T N D"]
    d_out: Float[Array, "B T N D"]
    key: Float[Array, "B S K D"]
    value: Float[Array, "B S K D"]
    sizes: Float[Array, "B K J 2 S/J"] | None = None
    """As `Residuals` has them: then keys and values are not read."""


class RowSums(NamedTuple):
    """A size is the largest magnitude, inf where some number is NaN or inf."""

    delta: Float[Array, "B N T"]
    """The sum of out times d_out."""
    d_out_length: Float[Array, "B N T"]
    """Of what is finite."""
    key_size: Float[Array, "B K S"]
    value_size: Float[Array, "B K S"]
    value_length: Float[Array, "B K S"]
    """Or more than that; inf or NaN where the value has such."""
    d_query: Array | None
    """Zeros, to be added to; [B, T, N, D]."""


def takes(p: Problem, q_tile: int, columns: int) -> bool:
    """Whether `row_sums` can be asked, for a dQ of so many columns."""
    depths = columns == p.qk_dim == p.v_dim and p.v_dim in (64, 128, 256)
    return depths and p.q_len % q_tile == 0 and p.kv_len % ROWS == 0


def row_sums_by_xla(operands: Operands) -> RowSums:
    """Without dQ's zeros, and of keys and values themselves."""
    out, d_out, value = (x.astype(jnp.float32) for x in (operands.out, operands.d_out, operands.value))

    def length(x):
        return jnp.sqrt((x * x).sum(-1))

    value_length = length(value)
    # A sum of squares may be infinite though the numbers are not; a maximum may lose a NaN, which that sum shows.
    value_size = jnp.where(jnp.isnan(value_length), jnp.inf, jnp.abs(value).max(-1))
    key_size = sizes_of(operands.key).astype(jnp.float32)
    by_row = (out * d_out).sum(-1), length(finite_or_zero(d_out)), key_size, value_size, value_length
    return RowSums(*(x.swapaxes(1, 2) for x in by_row), d_query=None)


# Jitted, so that a model of many equal layers traces and lowers the kernel once.
@functools.partial(jax.jit, static_argnums=(0, 1))
def row_sums(summed_dtype: Any, p: Problem, operands: Operands) -> RowSums:
    """In one pass over memory, for what it `takes`."""
    depth, columns = p.v_dim, min(p.v_dim, _COLUMNS)
    parts, zero_rows = depth // columns, _ZEROS // depth
    most_tiles = p.batch * max(p.q_len * p.heads, p.kv_len * p.kv_heads) // ROWS
    blocks = min(-(-most_tiles // WARPGROUPS), HOPPER_SMS)
    read = [operands.out, operands.d_out]
    if operands.sizes is None:
        read += operands.key, operands.value

    def attention_backward_rows(*refs, slots, row_slots, zeros, ready, zeros_made):
        queries, keys = refs[:2], refs[2 : len(read)]
        *to, zeros_ref = refs[len(read) :]
        warpgroup = lax.axis_index("warpgroup")
        worker, workers = lax.axis_index("block") * WARPGROUPS + warpgroup, blocks * WARPGROUPS

        def each_tile(both: Sequence[Any], sums: Callable[..., Any], to: Sequence[Any], zeros_to: Any = None):
            """`sums(first, second, before)` go `to` these arrays, the root of the last, and zeros to one more.

            `before` are those of the columns before, if there are such.
            """
            batch, length, heads, _ = both[0].shape
            tiles = length // ROWS
            total = batch * tiles * heads
            count = lax.div(total - worker + (workers - 1), workers)

            def place(turn):
                index = worker + turn * workers
                tile = lax.div(index, heads)
                return lax.div(tile, tiles), pl.ds(lax.rem(tile, tiles) * ROWS, ROWS), lax.rem(index, heads)

            def slot_of(part):
                return warpgroup * _STAGES + lax.rem(part, _STAGES)

            def fetch(part):
                """Of the parts of all tiles."""
                example, rows, head = place(lax.div(part, parts))
                of_part = pl.ds(lax.rem(part, parts) * columns, columns)
                at = slot_of(part)
                for i, ref in enumerate(both):
                    plgpu.copy_gmem_to_smem(ref.at[example, rows, head, of_part], slots.at[at, i], ready.at[at])

            def step(turn, _):
                found: Any = None
                for part in range(parts):
                    part += turn * parts
                    at = slot_of(part)
                    plgpu.barrier_wait(ready.at[at])
                    first, second = (plgpu.load(slots.at[at, i], layout=WGMMA) for i in range(2))
                    plgpu.commit_smem()  # read by all, before the next are written
                    pl.when(part + _STAGES < count * parts)(functools.partial(fetch, part + _STAGES))
                    found = sums(first.astype(jnp.float32), second.astype(jnp.float32), found)
                *numbers, squares = found
                example, rows, head = place(turn)
                # Those of the turn before may still be on their way.
                stores = len(to) + (0 if zeros_to is None else ROWS // zero_rows)
                plgpu.wait_smem_to_gmem(stores, wait_read_only=True)
                kept = row_slots.at[warpgroup, lax.rem(turn, 2)]
                for i, x in enumerate([*numbers, jnp.sqrt(squares)]):
                    kept[i] = x
                plgpu.commit_smem()
                for i, ref in enumerate(to):
                    plgpu.copy_smem_to_gmem(kept.at[i], ref.at[example, head, rows])
                if zeros_to is not None:
                    for start in range(0, ROWS, zero_rows):
                        some = pl.ds(rows.start + start, zero_rows)
                        plgpu.copy_smem_to_gmem(zeros, zeros_to.at[example, some, head])

            for part in range(_STAGES):
                pl.when(part < count * parts)(functools.partial(fetch, part))
            lax.fori_loop(0, count, step, None)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def size(x):
            broken = (x * 0.0).sum(axis=1) != 0.0  # NaN differs from everything
            return jnp.where(broken, jnp.inf, jnp.abs(x).max(axis=1))

        def of_queries(out, d_out, before):
            finite = jnp.where(jnp.abs(d_out) < jnp.inf, d_out, 0.0)
            found = (out * d_out).sum(axis=1), (finite * finite).sum(axis=1)
            return found if before is None else tuple(map(jnp.add, before, found))

        def of_keys(key, value, before):
            found = size(key), size(value), (value * value).sum(axis=1)
            if before is None:
                return found
            return *map(jnp.maximum, before[:2], found[:2]), before[2] + found[2]

        @pl.when(warpgroup == 0)
        def _make_zeros():
            zeros[...] = plgpu.layout_cast(jnp.zeros(zeros.shape, zeros.dtype), plgpu.Layout.WG_STRIDED(zeros.shape, 4))

        plgpu.commit_smem()
        plgpu.barrier_arrive(zeros_made)
        plgpu.barrier_wait(zeros_made)
        if keys:
            each_tile(keys, of_keys, to[2:])
        each_tile(queries, of_queries, to[:2], zeros_ref)

    def rows(heads, length):
        return jax.ShapeDtypeStruct((p.batch, heads, length), jnp.float32)

    of_queries_types = [rows(p.heads, p.q_len)] * 2
    of_keys_types = [rows(p.kv_heads, p.kv_len)] * 3 if operands.sizes is None else []
    zeros_type = jax.ShapeDtypeStruct((p.batch, p.q_len, p.heads, depth), summed_dtype)
    delta, d_out_length, *of_keys, d_query = plgpu.kernel(
        attention_backward_rows,
        out_type=(*of_queries_types, *of_keys_types, zeros_type),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        scratch_types={
            "slots": smem_tile(WARPGROUPS * _STAGES, 2, ROWS, columns, dtype=p.dtype),
            "row_slots": plgpu.SMEM((WARPGROUPS, 2, 3, ROWS), jnp.float32),
            "zeros": plgpu.SMEM((zero_rows, depth), summed_dtype),
            "ready": plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS * _STAGES),
            "zeros_made": plgpu.Barrier(num_arrivals=WARPGROUPS),
        },
    )(*read)
    if operands.sizes is not None:
        by_tile = (operands.sizes[..., i, :].astype(jnp.float32) for i in range(2))
        key_size, value_size = (x.reshape(p.batch, p.kv_heads, p.kv_len) for x in by_tile)
        of_keys = key_size, value_size, value_size * math.sqrt(depth)
    key_size, value_size, value_length = of_keys
    return RowSums(delta, d_out_length, key_size, value_size, value_length, d_query)

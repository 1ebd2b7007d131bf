"""What attention's backward for Hopper at depths up to 128 sums up of dQ, and dQ from it.

Axis letters: B batch, T queries, N query heads, H query/key depth; I tiles of 64 queries.

Blocks add to a tile, or with two panels to half of its columns, as warpgroups hold them (kernel_parts/fragments.py), so
that no thread waits for another before TMA adds what lies together.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from fast_layers.kernel_parts.fragments import ROWS, fragments_shape, load_fragments
from fast_layers.kernel_parts.smem_tile import smem_tile
from fast_layers.kernel_parts.tma_columns import tma_columns
from fast_layers.ops.attention.hopper_grad_parts import BY_ROW
from fast_layers.ops.attention.kernel_operands import array_columns, for_tma
from fast_layers.ops.attention.problem import Problem


def sums_shape(batch: int, heads: int, q_len: int, panels: int, columns: int) -> tuple[int, ...]:
    """[B, N, I, panels, ...] for whole tiles of queries and panels of so many columns."""
    return batch, heads, q_len // ROWS, panels, *fragments_shape(columns)


class Operands(NamedTuple):
    sums: Array
    factors: Float[Array, "B N T"]
    """What makes dQ of a row's sums, for whole tiles of queries."""


# Jitted, so that a model of many equal layers traces and lowers the kernel once.
@functools.partial(jax.jit, static_argnums=0)
def d_query(p: Problem, operands: Operands) -> Float[Array, "B T N H"]:
    """Padded as TMA wants it. A block for each tile; blocks are small, so that many wait for memory at a time."""
    _, _, tiles, panels, parts, width = operands.sums.shape
    columns = parts * width // ROWS

    def attention_backward_sums(sums, factors, d_query, slots):
        example, head, tile = (lax.axis_index(name) for name in ("example", "head", "tile"))
        rows = pl.ds(tile * ROWS, ROWS)
        factor = plgpu.load(factors.at[example, head, rows], layout=BY_ROW, optimized=False)
        for panel in range(panels):
            x = load_fragments(sums.at[example, head, tile, panel], columns).astype(jnp.float32)
            slots[panel] = (x * lax.broadcast_in_dim(factor, x.shape, [0])).astype(p.dtype)
        plgpu.commit_smem()
        for panel in range(panels):
            to = tma_columns(d_query.at[example, rows, head], panel * columns, columns, axis="tile")
            plgpu.copy_smem_to_gmem(slots.at[panel], to)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return plgpu.kernel(
        attention_backward_sums,
        out_type=jax.ShapeDtypeStruct(
            (p.batch, for_tma(p.q_len, ROWS), p.heads, array_columns(p.qk_dim, panels * columns)), p.dtype
        ),
        grid=(p.batch, tiles, p.heads),
        grid_names=("example", "tile", "head"),
        scratch_types={"slots": smem_tile(panels, ROWS, columns, dtype=p.dtype)},
    )(*operands)

"""Matmuls for Blackwell (sm_100a, sm_103a): tcgen05 products in tensor memory, finished by an epilogue.

Axis letters: R rows, C columns, K what is contracted.

    load warpgroup               matmul warpgroup                         each epilogue warpgroup, on its columns
    --------------               ----------------                         ---------------------------------------
    A(k), B(k) -> ready(k)       products += A(k) B(k)                    waits products_ready
              waits consumed(k)    needs ready(k)      -> consumed(k)     products -> registers -> products_read
                                   after the last k    -> products_ready  `piece` columns at a time: what it reads came
                                   before the first k: waits              by TMA before, what it writes goes out by TMA
                                     products_read of two tiles ago       during the next piece

Blocks are persistent. Tensor memory holds the products of two tiles: the epilogue of one runs under the matmuls of the
next, and the ring of operands knows no tiles.

If `collective`, two blocks of a cluster multiply together (`cta_group::2`): 256 rows, of which each block has 128, in
shared memory as in tensor memory. Of what stands on the right each loads one half, and the tensor cores read both: of
one product half of its columns each, of two products one each, so that both are one matmul with the columns side by
side. The first block issues; that memory of both may be overwritten is told to both. Else a block is alone, and two
products are two matmuls; nothing else differs.

What stands beyond an operand's end is loaded as zeros, and not stored; so sizes need not be multiples of a tile, only
of TMA's own: 8 rows and 64 columns. K is not split over blocks, so a product of few rows and columns leaves SMs idle.

No GPU has run this kernel yet: it is simulated, and compiled by the real assembler.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from fast_layers.kernel_parts.smem_tile import smem_tile
from fast_layers.ops.mlp.blackwell_config import BLACKWELL_SMS, BUFFERS, DEPTH_BYTES, ROWS, BlackwellMatmulTiles
from fast_layers.ops.mlp.column_sums import sum_over_rows
from fast_layers.ops.mlp.matmul import (
    TMA_COLUMNS,
    TMA_ROWS,
    Matmul,
    Operands,
    Results,
    fit_operands,
    oriented,
    round_up,
    split,
    tile_at,
    trim,
)
from fast_layers.ops.mlp.ring import freed_slot

STAGED: Any = plgpu.Layout.TCGEN05
"""Four threads share a row: what goes to shared memory without bank conflicts."""
BY_COLUMN = STAGED.reduce(0)


def multiply(m: Matmul, operands: Operands, tiles: BlackwellMatmulTiles | None = None) -> Results:
    tiles = BlackwellMatmulTiles.of(m.rows, m.columns, m.needs, m.operand_bytes) if tiles is None else tiles
    reason = tiles.objection(m.needs, m.operand_bytes)
    assert reason is None, reason
    fitted = fit_operands(
        m,
        operands,
        rows=tiles.tile_rows,
        columns=tiles.columns,
        b_window=tiles.columns * (m.epilogue.products if tiles.collective else 1),
        piece=(ROWS, tiles.piece),
        depth=DEPTH_BYTES // m.operand_bytes,
    )
    return trim(m, *_launch(tiles, m, fitted))


# Jitted, so that a model of many equal layers traces and lowers the kernel once.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _launch(tiles: BlackwellMatmulTiles, m: Matmul, operands: Operands) -> tuple[list[Array], list[Array]]:
    epilogue, stages, ranks, columns = m.epilogue, tiles.stages, tiles.ranks, tiles.columns
    width = epilogue.products * columns
    matmuls, matmul_columns = tiles.matmuls(epilogue.products), tiles.matmul_columns(epilogue.products)
    operand_dtype = m.dtype if m.float8 is None else m.float8
    depth_tile = DEPTH_BYTES // m.operand_bytes
    row_tiles, column_tiles = -(-m.rows // tiles.tile_rows), -(-m.columns // columns)
    total = row_tiles * column_tiles
    clusters = min(BLACKWELL_SMS // ranks, total)
    steps_per_term = -(-m.depth // depth_tile)
    steps = m.terms * steps_per_term
    piece_columns, wg_columns = tiles.piece, columns // tiles.epilogue_wgs
    tree = jax.tree.structure(operands)
    together: Any = {"collective_axis": "rank"} if tiles.collective else {}

    def mlp_matmul(*refs, **scratch):
        inputs: Any = jax.tree.unflatten(tree, refs[: tree.num_leaves])
        written, sums = split(refs[tree.num_leaves :], epilogue.writes)
        s = _Scratch(**{"read_slots": None, "read_ready": None, "sum_slots": None, **scratch})
        rank = lax.axis_index("rank") if tiles.collective else 0
        first, warpgroup = lax.axis_index("cluster"), lax.axis_index("warpgroup")
        turns = lax.div(total - 1 - first, clusters) + 1

        def place(turn) -> _Place:
            row_tile, column_tile = tile_at(turn * clusters + first, row_tiles, column_tiles, tiles.row_group)
            # To and fro: a group of rows begins with the columns that the one before has ended with, which L2 holds.
            goes_back = lax.rem(lax.div(row_tile, tiles.row_group), 2) == 1
            column_tile = jnp.where(goes_back, column_tiles - 1 - column_tile, column_tile)
            return _Place(row_tile * tiles.tile_rows, column_tile * columns)

        # Warpgroups, where warps would do: inside shard_map a warp's code may not see operands that vary over the mesh.
        @pl.when(warpgroup == tiles.epilogue_wgs)
        def _load():
            plgpu.set_max_registers(tiles.issue_registers, action="decrease")
            lax.fori_loop(0, turns, lambda turn, _: load(inputs, s, rank, place(turn), turn), None)
            # Blocks of a cluster free each other's slots, and must not end before that.
            each_of_last(stages, turns * steps, lambda step: s.consumed.at[lax.rem(step, stages)])

        @pl.when(warpgroup == tiles.epilogue_wgs + 1)
        def _multiply():
            plgpu.set_max_registers(tiles.issue_registers, action="decrease")
            lax.fori_loop(0, turns, lambda turn, _: multiply_tile(s, rank, turn), None)
            each_of_last(BUFFERS, turns, lambda turn: s.products_read.at[lax.rem(turn, BUFFERS)])

        @pl.when(warpgroup < tiles.epilogue_wgs)
        def _finish():
            plgpu.set_max_registers(tiles.epilogue_registers, action="increase")
            take = functools.partial(finish, inputs, s, written, sums, warpgroup, rank)
            lax.fori_loop(0, turns, lambda turn, _: take(place(turn), turn), None)
            plgpu.wait_smem_to_gmem(0)

    def each_of_last(count, end, barrier):
        """Waits for the last events of a ring of `count` barriers, of `end` in all."""
        start = jnp.maximum(end - count, 0)
        lax.fori_loop(start, end, lambda i, _: plgpu.barrier_wait(barrier(i)), None)

    def load(inputs: Any, s: _Scratch, rank, at: _Place, turn):
        def copy_step(i, _):
            slot = freed_slot(s.consumed, turn * steps + i, stages)

            def copy_a(ref, depth):
                window = oriented(pl.ds(at.row, tiles.tile_rows), depth, m.a_turned)
                copy(ref.at[window], s.a_slots.at[slot], 0, m.a_turned)

            def copy_b(ref, depth, column, size, slots):
                copy(ref.at[oriented(depth, pl.ds(column, size), m.b_turned)], slots, 1, m.b_turned)

            def copy(window, to, axis, turned):
                """`axis` of A or B is what the blocks of a pair divide between them."""
                halves: Any = {}
                if tiles.collective:
                    partition = plgpu.CopyPartition.PARTITIONED(1 - axis if turned else axis)
                    halves = {"collective_axes": "rank", "leader_tracked": partition}
                plgpu.copy_gmem_to_smem(window, to, s.ready.at[slot], **halves)

            def copy_term(a_ref, b_refs, k):
                depth = pl.ds(k * depth_tile, depth_tile)
                copy_a(a_ref, depth)
                for j, b_ref in enumerate(b_refs):
                    if not tiles.collective or len(b_refs) == 1:
                        copy_b(b_ref, depth, at.column, columns, s.b_slots.at[slot, j])
                    else:
                        # Block j takes the j-th part of a window, which is to be this product's columns.
                        window = at.column - j * columns, width
                        pl.when(rank == j)(functools.partial(copy_b, b_ref, depth, *window, s.b_slots.at[slot, 0]))

            if m.terms == 1:
                copy_term(inputs.a[0], inputs.b, i)
            else:
                for term in range(m.terms):

                    @pl.when(lax.div(i, steps_per_term) == term)
                    def _copy(term=term):
                        copy_term(inputs.a[term], inputs.b[term : term + 1], i - term * steps_per_term)

        lax.fori_loop(0, steps, copy_step, None)

    def multiply_tile(s: _Scratch, rank, turn):
        buffer = lax.rem(turn, BUFFERS)

        @pl.when(turn >= BUFFERS)
        def _wait():
            plgpu.barrier_wait(s.products_read.at[buffer])

        def step(i, _):
            slot = lax.rem(turn * steps + i, stages)
            plgpu.barrier_wait(s.ready.at[slot])
            a = s.a_slots.at[slot].T if m.a_turned else s.a_slots.at[slot]
            for j in range(matmuls):
                b = s.b_slots.at[slot, j].T if m.b_turned else s.b_slots.at[slot, j]
                own = pl.ds(buffer * width + j * matmul_columns, matmul_columns)
                plgpu.tcgen05_mma(s.products.at[:, own], a, b, accumulate=i > 0, **together)
            plgpu.tcgen05_commit_arrive(s.consumed.at[slot], **together)

        @pl.when(rank == 0)
        def _issue():
            lax.fori_loop(0, steps, step, None)
            plgpu.tcgen05_commit_arrive(s.products_ready.at[buffer], **together)

    def finish(inputs: Any, s: _Scratch, written, sums, warpgroup, rank, at: _Place, turn):
        buffer = lax.rem(turn, BUFFERS)
        row, own_column = at.row + rank * ROWS, warpgroup * wg_columns  # the latter within the tile

        def slots_of(piece, count):
            first = (warpgroup * tiles.pieces + piece % tiles.pieces) * count
            return [first + i for i in range(count)]

        def columns_of(piece):
            return pl.ds(at.column + own_column + piece * piece_columns, piece_columns)

        def read_piece(piece):
            """Starts the loads of what the epilogue reads."""
            for ref, slot in zip(inputs.read, slots_of(piece, epilogue.reads), strict=True):
                window = ref.at[pl.ds(row, ROWS), columns_of(piece)]
                plgpu.copy_gmem_to_smem(window, s.read_slots.at[slot], s.read_ready.at[slot])

        def load_products(piece):
            first = buffer * width + own_column + piece * piece_columns
            parts = [pl.ds(first + j * columns, piece_columns) for j in range(epilogue.products)]
            loaded = [plgpu.async_load_tmem(s.products.at[:, part], layout=STAGED) for part in parts]
            plgpu.wait_load_tmem()
            return loaded if scales is None else [x * scale for x, scale in zip(loaded, scales, strict=True)]

        scales = None if inputs.scales is None else [inputs.scales[j] for j in range(epilogue.products)]
        count = wg_columns // piece_columns
        for piece in range(tiles.pieces):
            read_piece(piece)
        plgpu.barrier_wait(s.products_ready.at[buffer])
        for piece in range(count):
            products = load_products(piece)
            if piece + 1 == count:
                plgpu.barrier_arrive(s.products_read.at[buffer])
            biases = [None if ref is None else bias_of(ref, columns_of(piece)) for ref in inputs.biases]
            read_slots, write_slots = slots_of(piece, epilogue.reads), slots_of(piece, epilogue.writes)
            for slot in read_slots:
                plgpu.barrier_wait(s.read_ready.at[slot])
            read = [plgpu.load(s.read_slots.at[slot], layout=STAGED) for slot in read_slots]
            results = epilogue(m.dtype, products, biases, read)
            # The slots' last stores are older than those of the pieces that are still on their way.
            stores = epilogue.writes + len(epilogue.sums)
            plgpu.wait_smem_to_gmem((tiles.pieces - 1) * stores, wait_read_only=True)
            for slot, result in zip(write_slots, results, strict=True):
                s.write_slots[slot] = result
            plgpu.commit_smem()  # the results, and that what was read may be overwritten
            if piece + tiles.pieces < count:
                read_piece(piece + tiles.pieces)
            if epilogue.sums:
                sum_slots = slots_of(piece, len(epilogue.sums))
                for slot, i in zip(sum_slots, epilogue.sums, strict=True):
                    s.sum_slots[slot] = sum_over_rows(s.write_slots.at[write_slots[i]])
                plgpu.commit_smem()
                for slot, ref in zip(sum_slots, sums, strict=True):
                    plgpu.copy_smem_to_gmem(s.sum_slots.at[slot], ref.at[lax.div(row, ROWS), columns_of(piece)])
            for slot, ref in zip(write_slots, written, strict=True):
                plgpu.copy_smem_to_gmem(s.write_slots.at[slot], ref.at[pl.ds(row, ROWS), columns_of(piece)])

    a_tile = oriented(ROWS, depth_tile, m.a_turned)
    b_tile = oriented(depth_tile, matmul_columns // ranks, m.b_turned)
    slots = tiles.epilogue_wgs * tiles.pieces
    in_order: Any = functools.partial(plgpu.Barrier, orders_tensor_core=True)
    reading: Any = {"num_arrivals": tiles.epilogue_wgs, "num_barriers": BUFFERS, "orders_tensor_core": True}
    scratch = {
        "a_slots": smem_tile(stages, *a_tile, dtype=operand_dtype),
        "b_slots": smem_tile(stages, matmuls, *b_tile, dtype=operand_dtype),
        "write_slots": smem_tile(slots * epilogue.writes, ROWS, piece_columns, dtype=m.dtype),
        "products": plgpu.TMEM((ROWS, BUFFERS * width), jnp.float32, collective=tiles.collective),
        "ready": plgpu.Barrier(num_arrivals=1 + matmuls, num_barriers=stages),
        "consumed": in_order(num_barriers=stages),
        "products_ready": in_order(num_barriers=BUFFERS),
        "products_read": (
            plgpu.ClusterBarrier(collective_axes=("rank",), **reading) if tiles.collective else plgpu.Barrier(**reading)
        ),
    }
    if epilogue.reads:
        scratch["read_slots"] = smem_tile(slots * epilogue.reads, ROWS, piece_columns, dtype=m.dtype)
        scratch["read_ready"] = plgpu.Barrier(num_barriers=slots * epilogue.reads)
    if epilogue.sums:
        scratch["sum_slots"] = plgpu.SMEM((slots * len(epilogue.sums), piece_columns), jnp.float32)
    out_rows, out_columns = max(round_up(m.rows, TMA_ROWS), ROWS), round_up(m.columns, TMA_COLUMNS)
    # A row of sums is stored as one dimension: what went beyond its end would come to stand in the next row.
    pair: dict[str, Any] = {"cluster": (ranks,), "cluster_names": ("rank",)} if tiles.collective else {}
    results = plgpu.kernel(
        mlp_matmul,
        out_type=(
            *[jax.ShapeDtypeStruct((out_rows, out_columns), m.dtype)] * epilogue.writes,
            *[jax.ShapeDtypeStruct((row_tiles * ranks, column_tiles * columns), jnp.float32)] * len(epilogue.sums),
        ),
        grid=(clusters,),
        grid_names=("cluster",),
        **pair,
        num_threads=tiles.epilogue_wgs + 2,
        thread_name="warpgroup",
        scratch_types=scratch,
        # The GPU's own tanh is good for 11 bits, of which bfloat16 keeps 8. Sums over rows need no scratch.
        compiler_params=plgpu.CompilerParams(approx_math=m.dtype == jnp.bfloat16, reduction_scratch_bytes=512),
    )(*jax.tree.leaves(operands))
    return split(results, epilogue.writes)


def bias_of(ref: Any, columns: Any) -> Float[Array, "R C"]:
    bias = plgpu.load(ref.at[columns], layout=BY_COLUMN, optimized=False)
    return lax.broadcast_in_dim(bias, (ROWS, columns.size), [1])


class _Place(NamedTuple):
    """A tile, by its first row and column."""

    row: Any
    column: Any


class _Scratch(NamedTuple):
    """What a block holds in shared and in tensor memory, and the barriers named after the event that they wait for."""

    a_slots: Any
    b_slots: Any
    write_slots: Any
    read_slots: Any
    sum_slots: Any
    products: Any
    ready: Any
    consumed: Any
    products_ready: Any
    products_read: Any
    read_ready: Any

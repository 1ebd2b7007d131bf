"""Matmuls for Hopper (sm_90a): operands in either orientation, and an epilogue between the product and memory.

Axis letters: R rows, C columns, K what is contracted.

    load warpgroup                        each compute warpgroup, on a tile of its own or on its half of one
    --------------                        ------------------------------------------------------------------
    A(k), B(k) -> ready(k)                products += A(k) B(k)      needs ready(k), frees consumed(k) a step later
                  waits consumed(k)       epilogue, 64 x 64 numbers at a time: what it reads came by TMA during the
                                          matmul, what it writes goes out by TMA during the next piece and tile

Blocks are persistent, and the ring of operands knows no tiles: the first steps of the next tile are loaded while the
epilogue of this one runs. With `ping_pong` the compute warpgroups take tiles in turns, and the tensor cores do not wait
for epilogues either. Blocks of a cluster stand below one another and load each half of the columns' operand, for both.

What the epilogue reads comes into the slots from which its results leave: a set of slots for each of the `pieces`
under way. Where a product has fewer tiles than there are SMs, K is split over blocks (`splits`), whose parts leave in
float32; XLA then adds them up and does what the epilogue would have done. Products of equal K without an epilogue may
share a launch (`multiply_together`): their tiles stand in one row, whose last round alone leaves SMs idle.

What stands beyond an operand's end is loaded as zeros, and not stored; so sizes need not be multiples of a tile, only
of TMA's own: 8 rows and 64 columns. Where they are not, `fit` copies the operand.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from fast_layers.kernel_parts.smem_tile import smem_tile
from fast_layers.ops.mlp import hopper_few_rows
from fast_layers.ops.mlp.column_sums import sum_over_rows
from fast_layers.ops.mlp.config import (
    COMPUTE_REGISTERS,
    COMPUTE_WGS,
    DEPTH_TILE,
    HOPPER_SMS,
    LOAD_REGISTERS,
    PIECE,
    TURNED_ROWS,
    HopperFewRowsTiles,
    HopperMatmulTiles,
)
from fast_layers.ops.mlp.epilogue import Plain
from fast_layers.ops.mlp.matmul import (
    TMA_COLUMNS,
    TMA_ROWS,
    Matmul,
    Operands,
    Products,
    Results,
    finish,
    fit_operands,
    oriented,
    round_up,
    split,
    tile_at,
    trim,
)
from fast_layers.ops.mlp.ring import freed_slot

BY_COLUMN = plgpu.Layout.WGMMA.reduce(0)


def multiply(m: Matmul, operands: Operands, tiles: HopperMatmulTiles | HopperFewRowsTiles | None = None) -> Results:
    tiles = tiles_of(m) if tiles is None else tiles
    if isinstance(tiles, HopperFewRowsTiles):
        return hopper_few_rows.multiply(m, operands, tiles)
    if tiles.splits > 1:
        return _multiply_split(m, operands, tiles)
    (results,) = _launch(tiles, (m,), (_fit(m, operands, tiles),))
    return trim(m, *results)


def multiply_together(products: Products, tiles: HopperMatmulTiles | None = None) -> list[Results]:
    """Several in one launch, unless one alone has so few tiles that its depth is split. All have the same depth."""
    ms = tuple(m for m, _ in products)
    if tiles is None:
        if len(ms) == 1 or any(tiles_of(m).splits > 1 for m in ms):
            return [multiply(*product) for product in products]
        tiles = HopperMatmulTiles.of_several([(m.rows, m.columns) for m in ms], ms[0].depth, ms[0].needs)
    results = _launch(tiles, ms, tuple(_fit(*product, tiles) for product in products))
    return [trim(m, *result) for m, result in zip(ms, results, strict=True)]


def tiles_of(m: Matmul) -> HopperMatmulTiles | HopperFewRowsTiles:
    if m.rows <= TURNED_ROWS and m.terms == 1 and not (m.a_turned or m.b_turned or m.epilogue.reads):
        return HopperFewRowsTiles.of(m.rows, m.columns, m.depth, m.needs)
    return HopperMatmulTiles.of(m.rows, m.columns, m.depth, m.needs, m.terms)


def _fit(m: Matmul, operands: Operands, tiles: HopperMatmulTiles) -> Operands:
    columns = tiles.columns
    return fit_operands(m, operands, rows=tiles.block_rows, columns=columns, b_window=columns, piece=(PIECE, PIECE))


def _multiply_split(m: Matmul, operands: Operands, tiles: HopperMatmulTiles) -> Results:
    """The parts are added up in the same order in every run."""
    bare = dataclasses.replace(m, epilogue=Plain((False,) * m.epilogue.products))
    given = _fit(bare, Operands(operands.a, operands.b, (None,) * m.epilogue.products), tiles)
    ((parts, _),) = _launch(tiles, (bare,), (given,))
    summed = (x.reshape(tiles.splits, -1, x.shape[1]).sum(0) for x in parts)
    return finish(m, operands, [x[: m.rows, : m.columns] for x in summed])


# Jitted, so that a model of many equal layers traces and lowers the kernel once.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _launch(tiles: HopperMatmulTiles, ms: tuple[Matmul, ...], operands: tuple[Operands, ...]) -> list[Results]:
    """Of several, which differ in rows and columns only, none may have an epilogue, terms or a split depth."""
    m = ms[0]
    assert all(dataclasses.replace(other, rows=m.rows, columns=m.columns) == m for other in ms), ms
    assert len(ms) == 1 or (m.epilogue == Plain() and m.terms == tiles.splits == 1), (m, tiles)
    reason = tiles.objection(m.needs)
    assert reason is None, reason
    epilogue, stages, cluster = m.epilogue, tiles.stages, tiles.cluster
    wg_rows, columns, block_rows = tiles.rows, tiles.columns, tiles.block_rows
    row_tiles = [-(-each.rows // (block_rows * cluster)) for each in ms]
    column_tiles = [-(-each.columns // columns) for each in ms]
    firsts = [0, *itertools.accumulate(r * c for r, c in zip(row_tiles, column_tiles, strict=True))]
    per_split = firsts.pop()
    total = tiles.splits * per_split
    clusters = min(HOPPER_SMS // cluster, total)
    steps_per_term = -(-m.depth // DEPTH_TILE)
    # What the last split has beyond the depth's end is loaded as zeros.
    steps = -(-m.terms * steps_per_term // tiles.splits)
    out_dtype = m.dtype if tiles.splits == 1 else jnp.dtype(jnp.float32)
    # Of those that wait for one tile: with ping_pong each warpgroup waits for its own tiles alone.
    owners = COMPUTE_WGS if tiles.ping_pong else 1
    sharers = COMPUTE_WGS // owners
    row_pieces, column_pieces = wg_rows // PIECE, columns // PIECE
    tree = jax.tree.structure(operands)

    def mlp_matmul(*refs, **scratch):
        inputs: Any = jax.tree.unflatten(tree, refs[: tree.num_leaves])
        outputs = results_of(refs[tree.num_leaves :])
        s = _Scratch(**{"read_ready": None, "sum_slots": None, **scratch})
        rank = lax.axis_index("rank") if cluster > 1 else 0
        first, warpgroup = lax.axis_index("cluster"), lax.axis_index("warpgroup")
        turns = lax.div(total - 1 - first, clusters) + 1

        def place(turn) -> _Place:
            index = turn * clusters + first
            split = lax.div(index, per_split)
            within = index - split * per_split
            member = sum(((within >= start).astype(jnp.int32) for start in firsts[1:]), jnp.int32(0))
            first_tile, tiles_below, tiles_beside = (numbered(member, x) for x in (firsts, row_tiles, column_tiles))
            row_tile, column_tile = tile_at(within - first_tile, tiles_below, tiles_beside, tiles.row_group)
            return _Place((row_tile * cluster + rank) * block_rows, column_tile * columns, split, member)

        @pl.when(warpgroup == COMPUTE_WGS)
        def _load():
            plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
            lax.fori_loop(0, turns, lambda turn, _: load(inputs, s, place(turn), turn), None)
            # Blocks of a cluster free each other's slots, and must not end before that.
            drain(s, turns * steps)

        @pl.when(warpgroup < COMPUTE_WGS)
        def _compute():
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            take = functools.partial(compute, inputs, s, outputs, warpgroup)
            if not tiles.ping_pong:
                lax.fori_loop(0, turns, lambda turn, _: take(place(turn), turn), None)
            else:

                @pl.when(warpgroup == 0)
                def _first_turn():
                    plgpu.barrier_arrive(s.turn.at[0])

                own = lax.div(turns - warpgroup + 1, COMPUTE_WGS)
                lax.fori_loop(0, own, lambda i, _: take(place(i * 2 + warpgroup), i * 2 + warpgroup), None)

                @pl.when(warpgroup == lax.rem(turns, COMPUTE_WGS))
                def _last_turn():
                    plgpu.barrier_wait(s.turn.at[warpgroup])

            plgpu.wait_smem_to_gmem(0)

    def ready(s: _Scratch, slot, turn):
        """A warpgroup sees each phase of the barriers it waits for, so each owner has its own."""
        return s.ready.at[slot if owners == 1 else lax.rem(turn, owners) * stages + slot]

    def load(inputs: Any, s: _Scratch, at: _Place, turn):
        if m.terms == 1:
            sources = [(each.a[0], each.b) for each in inputs]
        else:
            sources = [(a, (b,)) for a, b in zip(inputs[0].a, inputs[0].b, strict=True)]

        def copy_step(i, _):
            slot = freed_slot(s.consumed, turn * steps + i, stages)
            arrived = ready(s, slot, turn)

            k = at.split * steps + i
            source = at.member if m.terms == 1 else jnp.minimum(lax.div(k, steps_per_term), m.terms - 1)
            k = k if m.terms == 1 else k - source * steps_per_term

            def copy(a_ref, b_refs):
                depth = pl.ds(k * DEPTH_TILE, DEPTH_TILE)
                a_window = oriented(pl.ds(at.row, block_rows), depth, m.a_turned)
                plgpu.copy_gmem_to_smem(a_ref.at[a_window], s.a_slots.at[slot], arrived)
                b_window = oriented(depth, pl.ds(at.column, columns), m.b_turned)
                together: Any = {"collective_axes": "rank"} if cluster > 1 else {}
                for i, b_ref in enumerate(b_refs):
                    plgpu.copy_gmem_to_smem(b_ref.at[b_window], s.b_slots.at[slot, i], arrived, **together)

            do_one_of(source, [functools.partial(copy, *each) for each in sources])

        lax.fori_loop(0, steps, copy_step, None)

    def drain(s: _Scratch, all_steps):
        def wait(step, _):
            plgpu.barrier_wait(s.consumed.at[lax.rem(step, stages)])

        lax.fori_loop(jnp.maximum(all_steps - stages, 0), all_steps, wait, None)

    def compute(inputs: Any, s: _Scratch, outputs, warpgroup, at: _Place, turn):
        rows_before = 0 if tiles.ping_pong else warpgroup * wg_rows  # in the block's tile
        row = at.row + rows_before

        def read_piece(piece):
            """Starts the loads of what the epilogue reads, once what left through the slots before has left them."""
            if epilogue.reads:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for i, ref in enumerate(inputs[0].read):
                slot = (warpgroup * tiles.pieces + piece.lap) * epilogue.writes + i
                window = ref.at[pl.ds(row + piece.row, PIECE), pl.ds(at.column + piece.column, PIECE)]
                plgpu.copy_gmem_to_smem(window, s.out_slots.at[slot], s.read_ready.at[slot])

        for piece in pieces[: tiles.pieces]:
            read_piece(piece)

        def over_depth(*accumulators):
            def multiply_step(i):
                slot = lax.rem(turn * steps + i, stages)
                plgpu.barrier_wait(ready(s, slot, turn))
                own = pl.ds(rows_before, wg_rows)
                a = s.a_slots.at[slot, :, own].T if m.a_turned else s.a_slots.at[slot, own]
                for j, acc in enumerate(accumulators):
                    b = s.b_slots.at[slot, j]
                    plgpu.wgmma(acc, a, b.T if m.b_turned else b)

            def free(i):
                plgpu.barrier_arrive(s.consumed.at[lax.rem(turn * steps + i, stages)])

            def step(i, _):
                multiply_step(i)
                plgpu.wgmma_wait(len(accumulators))  # the step before is done, this one goes on
                free(i - 1)

            if tiles.ping_pong:
                plgpu.barrier_wait(s.turn.at[warpgroup])
            multiply_step(jnp.int32(0))
            lax.fori_loop(1, steps, step, None)
            if tiles.ping_pong:
                plgpu.barrier_arrive(s.turn.at[1 - warpgroup])
            plgpu.wgmma_wait(0)
            free(steps - 1)
            return [plgpu.wgmma_accumulator_load(acc, wait_n=None) for acc in accumulators]

        shape = plgpu.WGMMAAccumulatorRef((wg_rows, columns), jnp.float32)
        products = pl.run_scoped(over_depth, *[shape] * epilogue.products)

        totals: list[Any] = [None] * len(epilogue.sums)
        for piece in pieces:
            rows = slice(piece.row, piece.row + PIECE)
            cols = slice(piece.column, piece.column + PIECE)
            slots = [(warpgroup * tiles.pieces + piece.lap) * epilogue.writes + i for i in range(epilogue.writes)]
            biases = [None if ref is None else bias_of(ref, at.column + piece.column) for ref in inputs[0].biases]
            for slot in slots[: epilogue.reads]:
                plgpu.barrier_wait(s.read_ready.at[slot])
            read = [plgpu.load(s.out_slots.at[slot], layout=plgpu.Layout.WGMMA) for slot in slots[: epilogue.reads]]
            results = epilogue(out_dtype, [x[rows, cols] for x in products], biases, read)
            if not epilogue.reads:
                # The slots' last stores are older than those of the pieces that are still on their way.
                plgpu.wait_smem_to_gmem((tiles.pieces - 1) * epilogue.writes, wait_read_only=True)
            for slot, result in zip(slots, results, strict=True):
                s.out_slots[slot] = result
            plgpu.commit_smem()
            ahead = piece.index - 1 + tiles.pieces
            if tiles.pieces > 1 and piece.index > 0 and ahead < len(pieces):
                read_piece(pieces[ahead])  # where the piece before this one was
            if epilogue.sums:
                parts = [sum_over_rows(s.out_slots.at[slots[i]]) for i in epilogue.sums]
                totals = parts if piece.row == 0 else [x + y for x, y in zip(totals, parts, strict=True)]
                if piece.row + PIECE == wg_rows:
                    store_sums(s, outputs[0][1], warpgroup, totals, row, at.column + piece.column)
            to_row = at.split * split_rows + row + piece.row
            window = pl.ds(to_row, PIECE), pl.ds(at.column + piece.column, PIECE)
            do_one_of(at.member, [functools.partial(store, s, slots, written, window) for written, _ in outputs])
            if tiles.pieces == 1 and epilogue.reads and piece.index + 1 < len(pieces):
                plgpu.commit_smem()  # the sums have been read
                read_piece(pieces[piece.index + 1])

    def store(s: _Scratch, slots, written, window):
        for slot, ref in zip(slots, written, strict=True):
            plgpu.copy_smem_to_gmem(s.out_slots.at[slot], ref.at[window])

    def store_sums(s: _Scratch, sums, warpgroup, totals, row, column):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for i, total in enumerate(totals):
            s.sum_slots[warpgroup * len(totals) + i] = total
        plgpu.commit_smem()
        for i, ref in enumerate(sums):
            to = ref.at[lax.div(row, wg_rows), pl.ds(column, PIECE)]
            plgpu.copy_smem_to_gmem(s.sum_slots.at[warpgroup * len(totals) + i], to)

    pieces = [
        _Piece(i, i % tiles.pieces, i % row_pieces * PIECE, i // row_pieces * PIECE)
        for i in range(row_pieces * column_pieces)
    ]
    a_tile = (DEPTH_TILE, block_rows) if m.a_turned else (block_rows, DEPTH_TILE)
    b_tile = (columns, DEPTH_TILE) if m.b_turned else (DEPTH_TILE, columns)
    out_slots = COMPUTE_WGS * tiles.pieces * epilogue.writes
    freeing: Any = {"num_arrivals": sharers, "num_barriers": stages}
    consumed = plgpu.Barrier(**freeing) if cluster == 1 else plgpu.ClusterBarrier(collective_axes=("rank",), **freeing)
    scratch = {
        "a_slots": smem_tile(stages, *a_tile, dtype=m.dtype),
        "b_slots": smem_tile(stages, epilogue.products, *b_tile, dtype=m.dtype),
        "out_slots": smem_tile(out_slots, PIECE, PIECE, dtype=out_dtype),
        "ready": plgpu.Barrier(num_arrivals=1 + epilogue.products, num_barriers=owners * stages),
        "consumed": consumed,
        "turn": plgpu.Barrier(num_barriers=COMPUTE_WGS),
    }
    if epilogue.reads:
        scratch["read_ready"] = plgpu.Barrier(num_barriers=out_slots)
    if epilogue.sums:
        scratch["sum_slots"] = plgpu.SMEM((COMPUTE_WGS * len(epilogue.sums), PIECE), jnp.float32)
    # Of one split, whose last tile must not reach into the next split's rows.
    split_rows = row_tiles[0] * block_rows * cluster

    def out_types(each: Matmul, column_tiles: int) -> list[jax.ShapeDtypeStruct]:
        rows = max(round_up(each.rows, TMA_ROWS), PIECE) if tiles.splits == 1 else tiles.splits * split_rows
        written = jax.ShapeDtypeStruct((rows, round_up(each.columns, TMA_COLUMNS)), out_dtype)
        # A row of sums is stored as one dimension: what went beyond its end would come to stand in the next row.
        summed = jax.ShapeDtypeStruct((split_rows // wg_rows, column_tiles * columns), jnp.float32)
        return [written] * epilogue.writes + [summed] * len(epilogue.sums)

    def results_of(arrays: Sequence[Any]) -> list[tuple[list[Any], list[Any]]]:
        count = epilogue.writes + len(epilogue.sums)
        return [split(arrays[i * count : (i + 1) * count], epilogue.writes) for i in range(len(ms))]

    cluster_options: dict[str, Any] = {"cluster": (cluster,), "cluster_names": ("rank",)} if cluster > 1 else {}
    results = plgpu.kernel(
        mlp_matmul,
        out_type=[
            x for each, tiles_beside in zip(ms, column_tiles, strict=True) for x in out_types(each, tiles_beside)
        ],
        grid=(clusters,),
        grid_names=("cluster",),
        **cluster_options,
        num_threads=COMPUTE_WGS + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        # The GPU's own tanh is good for 11 bits, of which bfloat16 keeps 8. Sums over rows need no scratch.
        compiler_params=plgpu.CompilerParams(approx_math=m.dtype == jnp.bfloat16, reduction_scratch_bytes=512),
    )(*jax.tree.leaves(operands))
    return results_of(results)


def numbered(number: Any, values: list[int]) -> Any:
    """The one of these with that number."""
    if len(set(values)) == 1:
        return values[0]
    found = jnp.int32(values[0])
    for i, value in enumerate(values[1:], start=1):
        found = lax.select(number == i, jnp.int32(value), found)
    return found


def do_one_of(number: Any, doings: list[Callable[[], None]]) -> None:
    """What has that number among doings, which name different arrays."""
    if len(doings) == 1:
        doings[0]()
    else:
        for i, do in enumerate(doings):
            pl.when(number == i)(do)


def bias_of(ref: Any, column: Any) -> Float[Array, "64 64"]:
    bias = plgpu.load(ref.at[pl.ds(column, PIECE)], layout=BY_COLUMN, optimized=False)
    return lax.broadcast_in_dim(bias, (PIECE, PIECE), [1])


class _Place(NamedTuple):
    """A block's tile, by its first row and column, which share of the depth, and of which of the launch's products."""

    row: Any
    column: Any
    split: Any
    member: Any


class _Piece(NamedTuple):
    """64 x 64 numbers of a warpgroup's tile, and which of the slots for pieces it uses."""

    index: int
    lap: int
    row: int
    column: int


class _Scratch(NamedTuple):
    """What a block holds in shared memory: tiles, and the barriers named after the event that they wait for."""

    a_slots: Any
    b_slots: Any
    out_slots: Any
    sum_slots: Any
    ready: Any
    consumed: Any
    read_ready: Any
    turn: Any

"""What the forward kernels of Hopper and Blackwell share: the call around them, pieces of work, and loads.

Axis letters: B batch, T queries, S keys, N query heads, K key/value heads, H query/key depth, V value depth.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from fast_layers.kernel_parts.kv_range import KvRange
from fast_layers.kernel_parts.online_softmax import LOG2_E, OnlineSoftmax
from fast_layers.kernel_parts.over_batch import over_batch
from fast_layers.kernel_parts.tile_order import TileOrder, deal, snake, turns
from fast_layers.ops.attention import packed_heads, split_kv
from fast_layers.ops.attention.config import PART_COLUMNS, packs_heads
from fast_layers.ops.attention.kernel_operands import (
    SHARED,
    SMEM_LINE,
    TMA_ROWS,
    RowMask,
    pad_axis,
    pad_for_tma,
    padded_depth,
    round_up,
)
from fast_layers.ops.attention.masks import ExampleBand, MaskForm
from fast_layers.ops.attention.problem import Aux, Inputs, Problem
from fast_layers.ops.attention.tile_logits import LogitOperands
from fast_layers.ops.attention.tile_mask import Span, TileMask, has_broken_rows, mend_broken_rows


class Operands(NamedTuple):
    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K V"]
    sinks: Float[Array, "B|1 N T|1"] | None
    mask: RowMask | ExampleBand | None
    logits: LogitOperands


def attend(
    problem: Problem,
    inputs: Inputs,
    aux: Aux,
    rows: int,
    choose: Callable[[Problem], Any],
    launch: Callable[[Any, int, Problem, Operands], tuple[Array, ...]],
    takes_loose_queries: Callable[[Any, Problem], bool] = lambda tiles, problem: False,
) -> tuple[Array, ...]:
    """(out, lse, what else it gives) by `launch(tiles, group, problem, operands)`, which multiplies `rows` queries at
    once.

    `choose(problem)` gives the tiles. Both get the problem that the kernel sees, with heads packed into rows or not.
    So does `takes_loose_queries(tiles, problem)`: whether the kernel finds its rows in [B, T, N, H] by itself.
    """
    p, query, form, sinks = problem, inputs.query, aux.mask, inputs.sinks
    packs = packs_heads(p, rows)
    if packs:
        form = packed_heads.pack_mask(p, form)
        p = packed_heads.pack_problem(p, form)
    tiles = choose(p)
    qk_dim, v_dim = padded_depth(p.qk_dim), padded_depth(p.v_dim)
    group = problem.group if packs else 1
    # In shared memory a query's heads stand right behind those of the one before, where a copy may have to begin.
    lines_up = problem.q_len == 1 or group * qk_dim * problem.dtype.itemsize % SMEM_LINE == 0
    few = p.q_len <= rows and problem.q_len <= _MOST_LOOSE_QUERIES
    if few and lines_up and takes_loose_queries(tiles, p):
        query = pad_axis(query, qk_dim, 3)
    else:
        query = pad_for_tma(packed_heads.pack(query, p.kv_heads) if packs else query, rows, qk_dim)
    operands = Operands(
        query,
        pad_for_tma(inputs.key, tiles.kv_tile, qk_dim),
        pad_for_tma(inputs.value, tiles.kv_tile, v_dim),
        None if sinks is None or tiles.splits > 1 else sinks_by_row(sinks, p, tiles.q_tile),
        mask_operand(p, form, tiles, tiles.mask_parts),
        LogitOperands.of(inputs, aux, tiles.q_tile, tiles.kv_tile),
    )
    out, lse, *others = over_batch(functools.partial(launch, tiles, group), SHARED)(p, operands)
    out = out[..., : problem.v_dim]
    if sinks is not None and tiles.splits > 1:
        out, lse = split_kv.join_sinks(out, lse, sinks)
    return out.astype(problem.dtype), lse, *others


def mask_operand(p: Problem, form: MaskForm, tiles: Any, parts: int = 1) -> RowMask | ExampleBand | None:
    """Of few rows the numbers of each example, if these say all: arrays of rows take XLA longer than a kernel saves.
    Else arrays that tell of `parts` of each tile of queries."""
    by_example = form.intervals_by_example if form.has_interval_arrays and p.q_len <= tiles.q_tile else None
    return by_example or RowMask.of(p, form, tiles.q_tile, tiles.kv_tile, parts)


def sinks_by_row(sinks: Float[Array, " N"], p: Problem, q_tile: int) -> Float[Array, "1 N T|1"]:
    """One per head, or where heads are packed one per row."""
    sinks = sinks.astype(jnp.float32).reshape(1, p.heads, -1)
    group = sinks.shape[2]
    return sinks if group == 1 else pad_axis(jnp.tile(sinks, (1, 1, p.q_len // group)), round_up(p.q_len, q_tile), 2)


_MOST_LOOSE_QUERIES = 32
"""Each is a copy by itself."""
# Of what a piece of work takes besides its tiles of keys, in the time of one.
_PIECE_COST = 0.7


class Piece(NamedTuple):
    """What a block does at a time: these key tiles for this tile of queries, with results at `out_index`."""

    example: Any
    head: Any
    q_index: Any
    out_index: Any
    span: Span
    index: Any
    """Among all pieces."""


@dataclasses.dataclass(frozen=True)
class Work:
    """A launch's pieces: which block takes which of them, and where their results go."""

    problem: Problem
    tiles: Any
    rows: int
    """Of one product."""
    qk_dim: int
    v_dim: int
    cluster: int = 1
    """Neighbouring blocks that take neighbouring tiles of queries, on the axis "rank"."""
    least_rounds: int = 0
    """So many pieces at least has each block of each group of heads."""
    backwards: bool = False
    """Whether a piece's tiles of keys are taken from the last on."""
    loose_group: int = 0
    """So many heads of each query are a kernel's rows, which it finds by itself in [B, T, N, H]; 0 if it does not."""

    @property
    def q_tiles(self) -> int:
        return -(-self.problem.q_len // self.tiles.q_tile)

    @property
    def out_is_loose(self) -> bool:
        """Whether out goes to [B, T, N, V] at once, from the slot of such queries."""
        return self.loose_group > 0 and self.tiles.splits == 1 and self.qk_dim == self.v_dim

    def each_loose(self, array: Any, slot: Any, piece: Piece) -> list[tuple[Any, Any]]:
        """For each query its group's heads, in the GPU's memory and in `slot`."""
        group, queries = self.loose_group, array.shape[1]
        heads = pl.ds(piece.head * group, group)
        return [(array.at[piece.example, t, heads], slot.at[pl.ds(t * group, group)]) for t in range(queries)]

    @property
    def out_rows(self) -> int:
        return round_up(self.problem.q_len, TMA_ROWS)

    @property
    def stored_rows(self) -> int:
        """Of one product's; TMA cuts off those beyond the last."""
        return min(self.rows, self.out_rows)

    @property
    def out_dtype(self) -> Any:
        return jnp.dtype(jnp.float32) if self.tiles.splits > 1 else self.problem.dtype

    @property
    def order(self) -> TileOrder:
        p = self.problem
        bytes_per_head = p.kv_len * (self.qk_dim + self.v_dim) * p.dtype.itemsize
        tiles = self.q_tiles // self.cluster * self.tiles.splits
        pieces = self.least_rounds * self.tiles.blocks
        return TileOrder.of(p.batch * p.heads, tiles, p.group, bytes_per_head, pieces)

    @property
    def blocks(self) -> int:
        """Or clusters of them."""
        return min(self.tiles.blocks // self.cluster or self.order.total, self.order.total)

    @property
    def out_type(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        p, splits = self.problem, self.tiles.splits
        columns = self.v_dim if splits == 1 else round_up(self.v_dim, PART_COLUMNS)
        rows, heads = self.out_rows, p.heads
        if self.out_is_loose:
            rows, heads = p.q_len // self.loose_group, p.heads * self.loose_group
        return (
            jax.ShapeDtypeStruct((p.batch * splits, rows, heads, columns), self.out_dtype),
            jax.ShapeDtypeStruct((p.batch * splits, p.heads, self.q_tiles * self.tiles.q_tile), jnp.float32),
        )

    def piece(self, mask: TileMask, index: Any) -> Piece:
        p, splits, q_tiles = self.problem, self.tiles.splits, self.q_tiles
        head, tile = self.order.locate(index)
        split, q_index = (0, tile) if splits == 1 else (lax.div(tile, q_tiles), lax.rem(tile, q_tiles))
        if p.mask.band is not None and p.mask.band.high is not None:
            q_index = q_tiles - 1 - q_index  # scores of a causal mask grow with the row
        if self.cluster > 1:
            q_index = q_index * self.cluster + lax.axis_index("rank")
        example, head = lax.div(head, p.heads), lax.rem(head, p.heads)
        span = mask.key_span(example, q_index)
        if splits == 1:
            return Piece(example, head, q_index, example, span, index)
        return Piece(example, head, q_index, example * splits + split, span.part(split, splits), index)

    @property
    def is_persistent(self) -> bool:
        return self.blocks < self.order.total

    def schedule(self) -> np.ndarray:
        """For the blocks of a persistent grid, as `deal` gives it."""
        return deal(self.key_tiles() + _PIECE_COST, self.blocks)

    def queued(self, mask: RowMask) -> Int[Array, " pieces"]:
        """The order of a `PieceQueue`, with a mask not known before the call: of a group of heads, each takes its tiles
        of queries from that with the most keys on."""
        p, order = self.problem, self.order
        piece = np.arange(order.total)
        within = piece % (order.group * order.tiles)
        rank, example = within // order.group, ((piece - within) // order.tiles + within % order.group) // p.heads
        keys, size = p.kv_len, self.tiles.kv_tile
        # Not by `mask.tiles`, which would be put together again here. Unsigned, quotients are shifts, which XLA fuses.
        first, last = (x.astype(jnp.uint32) for x in KvRange.of(mask.start, mask.stop, self.tiles.q_tile))
        tiles = ((last + (size - 1)) // size - jnp.minimum(first, keys - 1) // size).astype(jnp.int32)
        place = index = jnp.arange(order.tiles, dtype=jnp.int32)
        if p.mask.band is not None and p.mask.band.high is not None:
            index = order.tiles - 1 - index  # as in `piece`
        # Sums over comparisons: sorting would take XLA longer than all else here.
        falling = tiles * order.tiles - index
        ranks = (falling[:, None, :] > falling[:, :, None]).sum(-1, dtype=jnp.int32)
        ranks = ranks[0] if ranks.shape[0] == 1 else ranks[example]
        found = jnp.where(ranks == rank[:, None], order.group * index, 0)
        found += jnp.where(place == 0, (piece - order.group * rank)[:, None], 0)  # where XLA fuses it
        return found.sum(-1, dtype=jnp.int32)

    def tile_at(self, span: Span, i: Any) -> Any:
        """The i-th tile of keys that a piece takes."""
        return span.last - 1 - i if self.backwards else span.first + i

    def key_tiles(self) -> np.ndarray:
        """Of each piece, or of each block's; all the same where the mask is not known before the call."""
        p, tiles, order = self.problem, self.tiles, self.order
        q_start = np.arange(self.q_tiles // self.cluster) * tiles.q_tile
        first, last = np.zeros_like(q_start), np.full_like(q_start, p.kv_len)
        band = None if p.mask.interval_arrays or p.mask.segments else p.mask.band
        if band is not None and band.low is not None:
            first = np.clip(q_start + band.low, 0, p.kv_len)
        if band is not None and band.high is not None:
            last = np.clip(q_start + tiles.q_tile + band.high, 0, p.kv_len)
        key_tiles = np.maximum(-(-last // tiles.kv_tile) - first // tiles.kv_tile, 1)
        if band is not None and band.high is not None:
            key_tiles = key_tiles[::-1]  # as in `piece`
        return key_tiles[np.arange(order.total) % (order.group * order.tiles) // order.group]

    def each_piece(
        self,
        mask: TileMask,
        role: Callable[..., Any],
        without_keys: Callable[[Piece], Any] = lambda _: None,
        schedule: Any = None,
        walk: Callable[..., Any] | None = None,
        turn: Any = 0,
        steps: Any = 0,
        state: tuple[Any, ...] = (),
    ) -> tuple[Any, ...]:
        """`role(piece, turn, steps, *state)` for all of the block's pieces; a `schedule` lies in the GPU's memory. Or a
        `walk` goes through them, as a method of `PieceQueue`.

        `turn` and `steps` count the pieces and the key tiles before each, from what is given. Returns those after all,
        and the `state` of which a role that has some gives the next.
        """
        turn, steps = jnp.int32(turn), jnp.int32(steps)
        # Plus a 0 that compilers cannot know: what depends on the block stays inside a loop around this one.
        block = lax.axis_index("block") + jnp.minimum(steps, 0)

        def take(i, index, carry):
            steps, *state = carry
            taken = self.piece(mask, index)
            state = role(taken, turn + i, steps, *state) or ()
            return steps + taken.span.tiles, *state

        def scheduled(i, carry):
            index, *carry = carry
            following = schedule[block, i + 2]  # loaded long before it is needed
            return following, *take(i, index, carry)

        carry = steps, *state
        if walk is not None:
            count, carry = walk(block, take, carry)
            return turn + count, *carry
        if self.is_persistent and schedule is not None:
            count = schedule[block, 0]
            _, *carry = lax.fori_loop(0, count, scheduled, (schedule[block, 1], *carry))
            return turn + count, *carry
        if self.is_persistent:
            count = turns(self.order.total, block, self.blocks)
            carry = lax.fori_loop(0, count, lambda i, carry: take(i, snake(i, block, self.blocks), carry), carry)
            return turn + count, *carry
        if self.tiles.splits == 1:
            return turn + 1, *take(0, block, carry)
        taken = self.piece(mask, block)
        has_keys = taken.span.first < taken.span.last

        @pl.when(has_keys)
        def _some_keys():
            role(taken, turn, steps)

        pl.when(~has_keys)(lambda: without_keys(taken))
        return turn + 1, steps + taken.span.tiles

    def combine(self, out: Array, lse: Array, group: int) -> tuple[Float[Array, "B T N V"], Float[Array, "B N T"]]:
        """The results of all parts of the keys, for `group` heads that were packed into rows."""
        p, splits = self.problem, self.tiles.splits
        if splits == 1:
            out = out if self.out_is_loose else packed_heads.unpack(out[:, : p.q_len], group)
            lse = lse[..., : p.q_len]
        else:
            out, lse = (x.reshape(p.batch, splits, *x.shape[1:]) for x in (out, lse))
            wanted = jnp.float32 if p.sinks else p.dtype
            out = split_kv.combine_out(out, lse, p.q_len, self.v_dim, group, wanted)
            lse = split_kv.combine_lse(lse[..., : p.q_len])
        return out, packed_heads.unpack_lse(lse, group)


def load_query(work: Work, inputs: Any, s: Any, piece: Piece, turn: Any) -> None:
    """A piece's queries, `turn` of the block's, into their slot; `s` is the kernel's scratch."""
    tiles = work.tiles
    parts = tiles.q_tile // work.rows
    for part in range(parts):
        slot = lax.rem(turn, tiles.q_slots) * parts + part

        @pl.when(turn >= tiles.q_slots)
        def _wait(slot=slot):
            plgpu.barrier_wait(s.q_consumed.at[slot])

        if work.loose_group:
            for query, rows in work.each_loose(inputs.query, s.loose_query, piece):
                plgpu.copy_gmem_to_smem(query, rows, s.q_ready.at[slot])
            continue
        rows = pl.ds(piece.q_index * tiles.q_tile + part * work.rows, work.rows)
        query = inputs.query.at[piece.example, rows, piece.head]
        plgpu.copy_gmem_to_smem(query, s.q_slots.at[slot], s.q_ready.at[slot])


def keys_and_values(work: Work, inputs: Any, piece: Piece, j: Any) -> tuple[Any, Any]:
    """Tile `j` of each, in the GPU's memory."""
    keys = pl.ds(j * work.tiles.kv_tile, work.tiles.kv_tile)
    kv_head = lax.div(piece.head, work.problem.group)
    return inputs.key.at[piece.example, keys, kv_head], inputs.value.at[piece.example, keys, kv_head]


def load(
    work: Work,
    mask: TileMask,
    inputs: Any,
    s: Any,
    piece: Piece,
    turn,
    steps,
    *in_slots: Any,
    mends: bool = False,
    measure: Any = None,
) -> Any:
    """The load warpgroup's part: K, Q and V in the order in which they are needed; `s` is the kernel's scratch.

    If it `mends`, it looks for broken values in tiles that the mask cuts through, and mends them. With `measure`
    (hopper_fwd_sizes.py) it finds the sizes of some tiles when all have read them: `in_slots` are the places of those
    that are there, from the oldest on. It gives back those after the piece.
    """
    tiles, span = work.tiles, piece.span
    together: Any = {"collective_axes": "rank"} if work.cluster > 1 else {}

    def wait_for_slot(step, consumed):
        pl.when(step >= tiles.stages)(lambda: plgpu.barrier_wait(consumed.at[lax.rem(step, tiles.stages)]))

    def load_kv(i, first=False, in_slots=in_slots):
        step, j = steps + i, work.tile_at(span, i)
        slot = lax.rem(step, tiles.stages)
        k_ref, v_ref = keys_and_values(work, inputs, piece, j)
        k_slot, v_slot = s.k_slots.at[slot], s.v_slots.at[slot]
        looks = span.ragged(j) if mends and mask.hides_real_keys else None

        def copy(ref, slot_ref, ready):
            if looks is None:
                plgpu.copy_gmem_to_smem(ref, slot_ref, ready, **together)
            else:
                # A copy's own predicate would leave its barrier's arrival in place.
                pl.when(looks)(lambda: plgpu.copy_gmem_to_smem(ref, slot_ref, s.kv_arrived))
                pl.when(~looks)(lambda: plgpu.copy_gmem_to_smem(ref, slot_ref, ready))

        wait_for_slot(step, s.k_consumed)
        if measure is not None:
            measure.key(in_slots[0], k_slot)
        copy(k_ref, k_slot, s.k_ready.at[slot])
        if first:
            load_query(work, inputs, s, piece, turn)
        wait_for_slot(step, s.v_consumed)
        if measure is not None:
            measure.value(in_slots[0], v_slot)
        copy(v_ref, v_slot, s.v_ready.at[slot])
        if looks is not None:

            @pl.when(looks)
            def _mend():
                plgpu.barrier_wait(s.kv_arrived)
                pl.when(has_broken_rows(v_slot))(lambda: mend_broken_rows(k_slot, v_slot))
                plgpu.commit_smem()
                plgpu.barrier_arrive(s.k_ready.at[slot])
                plgpu.barrier_arrive(s.v_ready.at[slot])

        return () if measure is None else (*in_slots[1:], measure.place(piece, j))

    in_slots = load_kv(0, first=True)
    return lax.fori_loop(1, span.tiles, lambda i, in_slots: load_kv(i, in_slots=in_slots), in_slots)


def join_sink(state: OnlineSoftmax, sinks: Any, piece: Piece, rows: Any, layout: Any) -> tuple[OnlineSoftmax, Any]:
    """(state, rescale) with the sink's logits, one or one per row, from the GPU's memory."""
    of_head = sinks.at[piece.example if sinks.shape[0] > 1 else 0, piece.head]
    sink = of_head[0] if of_head.shape[0] == 1 else plgpu.load(of_head.at[rows], layout=layout, optimized=False)
    return state.join(sink * LOG2_E)


def see_nothing(lse_slot: Any, lse_ref: Any, piece: Piece, rows: Any, layout: Any) -> None:
    """What a part of the keys without a tile leaves: lse -inf, by which its out counts for nothing."""
    lse_slot[...] = plgpu.layout_cast(jnp.full(lse_slot.shape, -jnp.inf, jnp.float32), layout)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(lse_slot, lse_ref.at[piece.out_index, piece.head, rows])

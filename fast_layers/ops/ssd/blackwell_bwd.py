"""The scan's backward for Blackwell (sm_100a, sm_103a), in three kernels whose sums have one order: every run gives the
same bits. No GPU has run it: it is simulated, and compiled by the real assembler.

The first (`blackwell_states`) writes, in 16 bits, the state S that enters each chunk and the gradient G of the one
that leaves it. The other two, both here, then need no other chunk: a block has one chunk of 128 tokens of one group,
and goes through its units of at most 64 channels of a head. They are one body, since they mirror each other:

                  "columns", the tokens that write         "rows", the tokens that read
                  --------------------------------         ----------------------------
    values          x                                        dy
    others          dy                                       x
    own, other      B, C                                     C, B
    state           G                                        S
    share           leaving * dt                             entering
    sums            dB                                       dC, what it has of the state
    out             dx                                       y, only with a gate

Rows of all tiles are the tokens of `own`. The roles of a block:

    channel warpgroup                   matmul warpgroup, of each unit
    -----------------                   ------------------------------
    loads own, other                      pairs = values others^T      needs ready, pairs_consumed     -> pairs_ready
      once -> projections_ready           inter = own state^T          needs inter_consumed            -> inter_ready
    loads values, others, state,          sums += scaled state         needs scaled_ready
      factors of a unit -> ready          inter += W others            needs weights_ready             -> unit_done
      waits consumed                      rows: passed = from_on T     needs passing_ready,
                                                                             passed_consumed           -> passed_ready
    scaled = values * share             needs ready, unit_done         -> scaled_ready
    sums of values * inter; inter * share   needs inter_ready          -> weights_ready
    out, to memory                      needs unit_done                -> inter_consumed
    rows: sums of what passes           needs passed_ready             -> passed_consumed

    two pair warpgroups, each with half of the columns of pairs
    -----------------------------------------------------------
    take pairs (d_weights)              needs pairs_ready              -> pairs_consumed
    W = scores * decays * dt            needs unit_done                -> weights_ready
    rows: T = d_weights * W             needs passed_ready             -> passing_ready
                                                                       -> consumed

The channel warpgroup loads, since it is the last to leave a unit's slot. A warpgroup for that alone would have to be
given registers too: of a multiprocessor's 512 for each thread of four, five could have 480.

Pairs of the next unit are multiplied before W is awaited. No number goes from one warpgroup to another but in tiles
that a product reads: each writes the sums of its own columns, and XLA adds them.

The pair warpgroups of "columns" sum the gradient of scores over the units in registers; at the end it is multiplied by
C for dB and, transposed, by B for dC. The gradient of a token's decay is a sum over all that passed it, as in
`hopper_bwd`: a triangle of ones times T, then a masked sum of each row; T is two bfloat16, its value and the rest. With
a gate, W of "rows" stands where what passes will: it is written when that of the unit before is read.

Source: Dao and Gu, "Transformers are SSMs" (2024).
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from fast_layers.kernel_parts.over_batch import over_batch
from fast_layers.kernel_parts.smem_tile import smem_tile
from fast_layers.ops.ssd import blackwell_states, kernel_grads
from fast_layers.ops.ssd.blackwell_call import state_as_panels
from fast_layers.ops.ssd.blackwell_config import BLACKWELL_ROWS as ROWS
from fast_layers.ops.ssd.blackwell_config import (
    COMPUTE_WGS,
    BlackwellBackwardTiles,
    BlackwellStateTiles,
    unit_channels,
)
from fast_layers.ops.ssd.blackwell_states import BACKWARDS, FORWARDS, StateOperands, Sweep
from fast_layers.ops.ssd.blackwell_tile import (
    COLUMNS,
    STAGED,
    ahead_of_columns,
    by_column,
    by_row,
    column_slices,
    positions,
    where_ahead,
)
from fast_layers.ops.ssd.hopper_call import ENTERING, LEAVING, ROW, by_head, decays_of, for_tma
from fast_layers.ops.ssd.problem import Inputs, Problem, Residuals

Way = Literal["columns", "rows"]

DT, COLUMN, ROW_AGAIN = 1, 4, 5
"""In the factors: dt; what the forward's have as `hopper_call.COLUMN`; and ROW once more, since a load of one row into
two layouts would be made one by the compiler, which then searches for a layout that is both."""
BY_ROW, BY_COLUMN = STAGED.reduce(1), STAGED.reduce(0)
# Barriers of one array share a word of phases, which is a register in each role.
EVENTS = (
    "scores_ready",
    "pairs_ready",
    "inter_ready",
    "inter_consumed",
    "scaled_ready",
    "unit_done",
    "sums_ready",
    "passed_ready",
    "passed_consumed",
)
EVENTS_OF_PAIRS = ("pairs_consumed", "passing_ready", "d_scores_ready")
PAIR_COLUMNS = 16
"""Of a pair warpgroup's that go through registers at a time, beside half a tile that stays there."""
MOST_LOG2_DECAY = 64.0
"""So that a product of two numbers and of it is finite."""


class BackwardOperands(NamedTuple):
    """U units of c channels; as the body names them."""

    values: Float[Array, "B L U c"]
    others: Float[Array, "B L U c"]
    own: Float[Array, "B L G N"]
    other: Float[Array, "B L G N"]
    between: Float[Array, "B C 2 U c N"]
    factors: Float[Array, "B C H 6 Q"]
    first: Int[Array, "B C Q"] | None
    D: Float[Array, "B U c"] | None
    """Of columns."""


class _Results(NamedTuple):
    own: Float[Array, "B S*G C*Q N"]
    """Of each slice of a group, as `other`."""
    sums: Float[Array, "B C U F Q"]
    """Of each token: over channels, of values * inter; of columns, then two parts of that over tokens of d_weights *
    scores * decay, and sums of x dy, for a D for each head and no gate; of rows, of T over the pairs that pass it."""
    other: Float[Array, "B S*G C*Q N"] | None
    """Of columns: what dC has of the chunk's own tokens."""
    out: Float[Array, "B L U c"] | None


def scan_grad(
    problem: Problem,
    residuals: Residuals,
    d_out: Array,
    d_final_state: Array,
    tiles: BlackwellBackwardTiles | None = None,
    state_tiles: BlackwellStateTiles | None = None,
) -> Inputs:
    """Gradients of all inputs, in the inputs' dtypes."""
    p = problem
    inputs, aux = residuals
    state_tiles = BlackwellStateTiles.of(p) if state_tiles is None else state_tiles
    tiles = BlackwellBackwardTiles.of(p) if tiles is None else tiles
    decays = decays_of(p, inputs, aux, ROWS)
    dt, sums, entering, leaving, first = decays
    factors = by_head(sums, dt, entering, leaving * dt, sums - jnp.log2(dt), sums)
    d_y = kernel_grads.before_gate(inputs, d_out).astype(p.dtype)
    x, d_y, B, C = (for_tma(v, ROWS) for v in (inputs.x, d_y, inputs.B, inputs.C))
    initial = jnp.zeros_like(d_final_state) if inputs.initial_state is None else inputs.initial_state
    start = jnp.stack([state_as_panels(state, state_tiles.panel) for state in (initial, d_final_state)], 1)
    find_states: Any = over_batch(functools.partial(blackwell_states._launch, state_tiles))
    end, between = find_states(p, StateOperands((Sweep(x, B), Sweep(d_y, C)), factors, start))

    channels = unit_channels(p.head_dim)
    x_units, d_y_units = (v.reshape(*v.shape[:2], -1, channels) for v in (x, d_y))
    by_unit = between.reshape(*between.shape[:3], -1, channels, p.state_dim)
    D = None
    if inputs.D is not None:
        D = jnp.broadcast_to(inputs.D.astype(jnp.float32).reshape(p.heads, -1), (p.batch, p.heads, p.head_dim))
        D = D.reshape(p.batch, -1, channels)

    def launch(way: Way, *operands) -> _Results:
        run: Any = over_batch(functools.partial(_launch, way, tiles))
        return run(p, BackwardOperands(*operands))

    columns = launch("columns", x_units, d_y_units, B, C, by_unit, factors, first, D)
    rows = launch("rows", d_y_units, x_units, C, B, by_unit, factors, first, None)
    assert columns.out is not None
    assert columns.other is not None

    def of_heads(x: Float[Array, "B L U c"]) -> Float[Array, "B L H P"]:
        return x[:, : p.length].reshape(p.batch, p.length, p.heads, p.head_dim)

    def of_groups(x: Float[Array, "B S*G C*Q N"]) -> Float[Array, "B L G N"]:
        return x.reshape(p.batch, -1, p.groups, *x.shape[2:]).sum(1).swapaxes(1, 2)[:, : p.length]

    def by_token(sums: Float[Array, "B C U F Q"]) -> list[Float[Array, "B C Q H"]]:
        sums = sums.reshape(*sums.shape[:2], p.heads, -1, *sums.shape[3:]).sum(3)
        return [sums[:, :, :, i].swapaxes(2, 3) for i in range(sums.shape[3])]

    left, wrote, wrote_too, *skipped = by_token(columns.sums)
    read, passed = by_token(rows.sums)
    state, d_state = (between[:, :, way].astype(jnp.float32) for way in (FORWARDS, BACKWARDS))
    kept = (state * d_state).reshape(*between.shape[:2], p.heads, -1).sum(-1)
    d_initial = end[:, BACKWARDS, :, : state_tiles.panel].reshape(p.batch, p.heads, p.head_dim, p.state_dim)
    grads = kernel_grads.KernelGrads(
        x=of_heads(columns.out),
        B=of_groups(columns.own),
        C=of_groups(columns.other) + of_groups(rows.own),
        initial_state=d_initial,
        y=None if rows.out is None else of_heads(rows.out),
        sums=kernel_grads.Sums(wrote + wrote_too, left, read, passed, kept, skipped[0] if skipped else None),
    )
    return kernel_grads.assemble(p, inputs, d_out, decays, grads)


# Jitted, so that a model of many equal layers traces and lowers the kernel once.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _launch(way: Way, tiles: BlackwellBackwardTiles, p: Problem, operands: BackwardOperands) -> _Results:
    by_columns, gives_out = way == "columns", way == "columns" or p.gated
    ring, slices, state_dim = tiles.stages, tiles.slices, p.state_dim
    _, length, units, channels = operands.values.shape
    chunks = operands.factors.shape[1]
    units_of_head = units // p.heads
    per_block, rest = divmod(units, p.groups * slices)
    assert not rest, f"{slices=} must divide the {units // p.groups} units of a group"
    parts = slices * p.groups
    own_columns = ROWS // COMPUTE_WGS
    # With a gate, XLA has dy before it was rounded.
    sums_skipped = by_columns and p.skip == "head" and not p.gated
    share_name, direction = (LEAVING, BACKWARDS) if by_columns else (ENTERING, FORWARDS)
    tree = jax.tree.structure(operands)

    def results_of(x: Any) -> _Results:
        return _Results(**{"other": None, "out": None, **dict(zip(out_types, x, strict=True))})

    def kernel(*refs, **scratch):
        inputs: Any = jax.tree.unflatten(tree, refs[: tree.num_leaves])
        results = results_of(refs[tree.num_leaves :])
        for one, other in (("other_slot", "passing_slots"), ("weights", "passed")):
            if (union := scratch.pop(f"{one} or {other}", None)) is not None:
                scratch[one], scratch[other] = union
        for barriers in (EVENTS, EVENTS_OF_PAIRS):
            shared = scratch.pop(" and ".join(barriers))
            scratch |= {name: shared.at[i] for i, name in enumerate(barriers)}
        s = _Scratch(**{**dict.fromkeys(_Scratch._fields), **scratch})

        def take_pairs(wg: int):
            plgpu.set_max_registers(tiles.pair_registers, action="increase")
            over_pairs(wg, s, results, place())

        def take_channels():
            plgpu.set_max_registers(tiles.channel_registers, action="increase")
            over_channels(inputs, s, results, place())

        def take_products():
            plgpu.set_max_registers(tiles.multiply_registers, action="decrease")
            multiply(s)

        # A role each: which columns of tensor memory are meant must be known when compiling.
        pairs = [functools.partial(take_pairs, wg) for wg in range(COMPUTE_WGS)]
        # One choice, since who still asks for another role after its own keeps in registers what that role needs.
        lax.switch(lax.axis_index("warpgroup"), [*pairs, take_channels, take_products])

    kernel.__name__ = f"ssd_backward_{way}"

    def place() -> _Place:
        """Each role asks anew, since what is known before the roles part is kept in registers for all of them."""
        block = lax.axis_index("block")
        row, part = lax.div(block, parts), lax.rem(block, parts)
        slice_index, group = lax.div(part, p.groups), lax.rem(part, p.groups)
        first_unit = (group * slices + slice_index) * per_block
        return _Place(lax.div(row, chunks), lax.rem(row, chunks), group, part, first_unit)

    def load_projections(inputs: Any, s: _Scratch, at: _Place):
        plgpu.copy_gmem_to_smem(inputs.own.at[at.example, at.tokens, at.group], s.own_slot, s.projections_ready)
        plgpu.copy_gmem_to_smem(inputs.other.at[at.example, at.tokens, at.group], s.other_slot, s.projections_ready)
        if inputs.first is not None:
            plgpu.copy_gmem_to_smem(inputs.first.at[at.example, at.chunk], s.first_slot, s.projections_ready)

    def load_unit(inputs: Any, s: _Scratch, at: _Place, step):
        slot, unit = lax.rem(step, ring), at.first_unit + step
        ready = s.ready.at[slot]
        factors = inputs.factors.at[at.example, at.chunk, lax.div(unit, units_of_head)]
        plgpu.copy_gmem_to_smem(factors, s.factor_slots.at[slot], ready)
        plgpu.copy_gmem_to_smem(inputs.values.at[at.example, at.tokens, unit], s.value_slots.at[slot], ready)
        plgpu.copy_gmem_to_smem(inputs.others.at[at.example, at.tokens, unit], s.others_slots.at[slot], ready)
        state = inputs.between.at[at.example, at.chunk, direction, unit]
        plgpu.copy_gmem_to_smem(state, s.state_slots.at[slot], ready)

    def multiply(s: _Scratch):
        def multiply_pairs(step):
            slot = lax.rem(step, ring)
            plgpu.barrier_wait(s.ready.at[slot])
            if by_columns:
                pl.when(step > 0)(lambda: plgpu.barrier_wait(s.pairs_consumed))
            else:
                # The first of them were scores.
                plgpu.barrier_wait(s.pairs_consumed)
            plgpu.tcgen05_mma(s.pairs, s.value_slots.at[slot], s.others_slots.at[slot].T, accumulate=False)
            plgpu.tcgen05_commit_arrive(s.pairs_ready)

        def step(i, _):
            slot = lax.rem(i, ring)
            state = s.state_slots.at[slot]
            pl.when(i > 0)(lambda: plgpu.barrier_wait(s.inter_consumed))
            plgpu.tcgen05_mma(s.inter, s.own_slot, state.T, accumulate=False)
            plgpu.tcgen05_commit_arrive(s.inter_ready)
            plgpu.barrier_wait(s.scaled_ready)
            plgpu.tcgen05_mma(s.sums, s.scaled_slot, state, accumulate=i > 0)
            if not gives_out:
                plgpu.tcgen05_commit_arrive(s.unit_done)
            pl.when(i + 1 < per_block)(functools.partial(multiply_pairs, i + 1))
            if gives_out:
                plgpu.barrier_wait(s.weights_ready)
                plgpu.tcgen05_mma(s.inter, s.weights, s.others_slots.at[slot], accumulate=True)
                plgpu.tcgen05_commit_arrive(s.unit_done)
            if not by_columns:
                plgpu.barrier_wait(s.passing_ready)
                pl.when(i > 0)(lambda: plgpu.barrier_wait(s.passed_consumed))
                if gives_out:
                    # W, which was read until then, stands in the same place.
                    plgpu.barrier_wait(s.unit_done)
                for part in range(2):
                    plgpu.tcgen05_mma(s.passed, s.from_on, s.passing_slots.at[part], accumulate=part > 0)
                plgpu.tcgen05_commit_arrive(s.passed_ready)

        plgpu.barrier_wait(s.projections_ready)
        plgpu.tcgen05_mma(s.scores if by_columns else s.pairs, s.own_slot, s.other_slot.T, accumulate=False)
        plgpu.tcgen05_commit_arrive(s.scores_ready)
        multiply_pairs(jnp.int32(0))
        lax.fori_loop(0, per_block, step, None)
        if by_columns:
            plgpu.barrier_wait(s.d_scores_ready)
            plgpu.tcgen05_mma(s.sums, s.d_scores_slot, s.other_slot, accumulate=True)
            others = s.scores.at[:, pl.ds(0, state_dim)]
            plgpu.tcgen05_mma(others, s.d_scores_slot.T, s.own_slot, accumulate=False)
        plgpu.tcgen05_commit_arrive(s.sums_ready)

    def over_pairs(wg: int, s: _Scratch, results: Any, at: _Place):
        columns = column_slices(wg * own_columns, own_columns, PAIR_COLUMNS)
        ahead = ahead_of_columns()
        if s.first_slot is not None:
            plgpu.barrier_wait(s.projections_ready)
        plgpu.barrier_wait(s.scores_ready)
        # Documents are the same for all heads: scores between two of them are made 0 once.
        if by_columns:
            kept = [plgpu.layout_cast(jnp.zeros((ROWS, c.size), jnp.float32), STAGED) for c in columns]
            if s.first_slot is not None:
                for c in columns:
                    scores = plgpu.async_load_tmem(s.scores.at[:, c], layout=STAGED)
                    plgpu.wait_load_tmem()
                    plgpu.async_store_tmem(s.scores.at[:, c], of_one_document(s, scores, c))
                plgpu.commit_tmem()
        else:
            kept = [plgpu.async_load_tmem(s.pairs.at[:, c], layout=STAGED) for c in columns]
            plgpu.wait_load_tmem()
            plgpu.barrier_arrive(s.pairs_consumed)
            kept = [of_one_document(s, scores, c) for scores, c in zip(kept, columns, strict=True)]

        def step(i, kept):
            slot = lax.rem(i, ring)
            factors = s.factor_slots.at[slot]
            plgpu.barrier_wait(s.ready.at[slot])
            plgpu.barrier_wait(s.pairs_ready)
            if gives_out:
                pl.when(i > 0)(lambda: plgpu.barrier_wait(s.unit_done))
            if not by_columns:
                pl.when(i > 0)(lambda: plgpu.barrier_wait(s.passed_ready))
                if gives_out:
                    pl.when(i > 0)(lambda: plgpu.barrier_wait(s.passed_consumed))
            wrote, d_scores = None, []
            for part, c in zip(kept, columns, strict=True):
                pairs = plgpu.async_load_tmem(s.pairs.at[:, c], layout=STAGED)
                scores = plgpu.async_load_tmem(s.scores.at[:, c], layout=STAGED) if by_columns else part
                plgpu.wait_load_tmem()
                if c is columns[-1]:
                    plgpu.barrier_arrive(s.pairs_consumed)
                weights = pair_decays(s, ahead, factors, c)
                if by_columns:
                    pairs *= weights
                    dt = by_row(plgpu.load(factors.at[DT], layout=BY_ROW, optimized=False), c.size)
                    d_scores.append(part + pairs * dt)
                    pairs *= scores
                    wrote = pairs.sum(axis=1) if wrote is None else wrote + pairs.sum(axis=1)
                    weights *= dt
                weights *= scores
                if gives_out:
                    plgpu.async_store_tmem(s.weights.at[:, c], weights.astype(p.dtype))
                if not by_columns:
                    passing = pairs * weights
                    coarse = passing.astype(jnp.bfloat16)
                    s.passing_slots[0, :, c] = coarse
                    s.passing_slots[1, :, c] = (passing - coarse.astype(jnp.float32)).astype(jnp.bfloat16)
            if gives_out:
                plgpu.commit_tmem()
                plgpu.barrier_arrive(s.weights_ready)
            plgpu.commit_smem()
            if not by_columns:
                plgpu.barrier_arrive(s.passing_ready)
            plgpu.barrier_arrive(s.consumed.at[slot])
            if wrote is not None:
                results.sums.at[at.example, at.chunk, at.first_unit + i, 1 + wg][...] = wrote
            return d_scores if by_columns else kept

        kept = lax.fori_loop(0, per_block, step, kept)
        if by_columns:
            for d_scores, c in zip(kept, columns, strict=True):
                s.d_scores_slot[:, c] = of_one_document(s, d_scores, c).astype(p.dtype)
            plgpu.commit_smem()
            plgpu.barrier_arrive(s.d_scores_ready)

    def over_channels(inputs: Any, s: _Scratch, results: Any, at: _Place):
        parts_of_unit = column_slices(0, channels)
        load_projections(inputs, s, at)
        lax.fori_loop(0, min(ring, per_block), lambda step, _: load_unit(inputs, s, at, step), None)
        if not by_columns:
            for c in column_slices(0, ROWS):
                row, column = positions(c, STAGED)
                plgpu.async_store_tmem(s.from_on.at[:, c], (column >= row).astype(jnp.bfloat16))
            plgpu.commit_tmem()

        def load_next_into(step):
            """The slot of this unit, which this role has left."""

            @pl.when(step + ring < per_block)
            def _load():
                plgpu.barrier_wait(s.consumed.at[lax.rem(step, ring)])
                load_unit(inputs, s, at, step + ring)

        def step(i, _):
            slot, unit = lax.rem(i, ring), at.first_unit + i
            values_slot = s.value_slots.at[slot]
            to_sums = results.sums.at[at.example, at.chunk, unit]
            if gives_out:

                @pl.when(i > 0)
                def _out_has_left():
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    load_next_into(i - 1)

            plgpu.barrier_wait(s.ready.at[slot])
            share = plgpu.load(s.factor_slots.at[slot, share_name], layout=BY_ROW, optimized=False)
            for c in parts_of_unit:
                s.scaled_slot[:, c] = (load_part(values_slot, c) * by_row(share, c.size)).astype(p.dtype)
            plgpu.commit_smem()
            plgpu.barrier_arrive(s.scaled_ready)

            plgpu.barrier_wait(s.inter_ready)
            total = None
            for c in parts_of_unit:
                inter = plgpu.async_load_tmem(s.inter.at[:, c], layout=STAGED)
                plgpu.wait_load_tmem()
                sums = (inter * load_part(values_slot, c)).sum(axis=1)
                total = sums if total is None else total + sums
                if gives_out:
                    plgpu.async_store_tmem(s.inter.at[:, c], inter * by_row(share, c.size))
            if gives_out:
                plgpu.commit_tmem()
                plgpu.barrier_arrive(s.weights_ready)
            else:
                plgpu.barrier_arrive(s.inter_consumed)
            to_sums.at[0][...] = total

            plgpu.barrier_wait(s.unit_done)
            if gives_out:
                finish(inputs, s, to_sums, at, slot, unit)
                plgpu.copy_smem_to_gmem(values_slot, results.out.at[at.example, at.tokens, unit])
            else:
                plgpu.commit_smem()
                load_next_into(i)
            if not by_columns:
                to_sums.at[1][...] = sum_passed(s)

        lax.fori_loop(0, per_block, step, None)
        plgpu.barrier_wait(s.sums_ready)
        for ref, result in ((s.sums, results.own), (s.scores, results.other)):
            if result is None:
                continue
            for c in column_slices(0, state_dim):
                part = plgpu.async_load_tmem(ref.at[:, c], layout=STAGED)
                plgpu.wait_load_tmem()
                result.at[at.example, at.part, at.tokens, c][...] = part
        if gives_out:
            plgpu.wait_smem_to_gmem(0)

    def finish(inputs: Any, s: _Scratch, to_sums, at: _Place, slot, unit):
        """The slot of values is out's: each thread reads what it then overwrites."""
        parts = column_slices(0, channels)
        skipped = None
        for c in parts:
            out = plgpu.async_load_tmem(s.inter.at[:, c], layout=STAGED)
            plgpu.wait_load_tmem()
            if c is parts[-1]:
                plgpu.barrier_arrive(s.inter_consumed)
            if by_columns and inputs.D is not None:
                d_y = load_part(s.others_slots.at[slot], c)
                skip = plgpu.load(inputs.D.at[at.example, unit, c], layout=BY_COLUMN, optimized=False)
                out += d_y * by_column(skip, ROWS)
                if sums_skipped:
                    sums = (d_y * load_part(s.value_slots.at[slot], c)).sum(axis=1)
                    skipped = sums if skipped is None else skipped + sums
            s.value_slots[slot, :, c] = out.astype(p.dtype)
        plgpu.commit_smem()
        if skipped is not None:
            to_sums.at[1 + COMPUTE_WGS][...] = skipped

    def sum_passed(s: _Scratch):
        """Row k has the sums over all that was read from k on, of which those of columns before k are wanted."""
        plgpu.barrier_wait(s.passed_ready)
        total, parts = None, column_slices(0, ROWS)
        for c in parts:
            passed = plgpu.async_load_tmem(s.passed.at[:, c], layout=STAGED)
            plgpu.wait_load_tmem()
            if c is parts[-1]:
                plgpu.barrier_arrive(s.passed_consumed)
            row, column = positions(c, STAGED)
            sums = jnp.where(column < row, passed, 0.0).sum(axis=1)
            total = sums if total is None else total + sums
        return total

    def load_part(slot, c):
        return plgpu.load(slot.at[:, c], layout=STAGED, optimized=False).astype(jnp.float32)

    def of_one_document(s: _Scratch, pairs, c):
        """0 where the token that writes is of another document than the one that reads."""
        if s.first_slot is None:
            return pairs
        if by_columns:
            row = by_row(plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=BY_ROW), c.size)
            first = by_column(plgpu.load(s.first_slot.at[c], layout=BY_COLUMN, optimized=False), ROWS)
            return jnp.where(row >= first, pairs, 0.0)
        first = plgpu.load(s.first_slot, layout=BY_ROW, optimized=False)
        return jnp.where(where_ahead(operator.le, ahead_of_columns(first), c), pairs, 0.0)

    def pair_decays(s: _Scratch, ahead, factors, c):
        """From the token that writes to the one that reads; 0 where that is earlier. In rows times the dt of the one
        that writes."""
        by_row_name, by_column_name = (ROW_AGAIN, ROW) if by_columns else (ROW, COLUMN)
        at_row = by_row(plgpu.load(factors.at[by_row_name], layout=BY_ROW, optimized=False), c.size)
        at_column = by_column(plgpu.load(factors.at[by_column_name, c], layout=BY_COLUMN, optimized=False), ROWS)
        visible = where_ahead(operator.le if by_columns else operator.ge, ahead, c)
        log2_decay = at_column - at_row if by_columns else at_row - at_column
        if s.first_slot is not None:
            # Sums of decays begin anew in each document: between two, whose scores are 0, any number may stand.
            log2_decay = jnp.minimum(log2_decay, MOST_LOG2_DECAY)
        # Masked before exp2: before the writer it would overflow, and inf * 0 is NaN.
        return jnp.exp2(jnp.where(visible, log2_decay, -jnp.inf))

    def tensor_memory(columns: int, dtype: Any = jnp.float32, **options) -> Any:
        return plgpu.TMEM((ROWS, columns), dtype, **options)

    in_order: Any = functools.partial(plgpu.Barrier, orders_tensor_core=True)
    columns_of_part = min(channels, COLUMNS)
    scratch = {
        "own_slot": smem_tile(ROWS, state_dim, dtype=p.dtype),
        "value_slots": smem_tile(ring, ROWS, channels, dtype=p.dtype, columns=columns_of_part),
        "others_slots": smem_tile(ring, ROWS, channels, dtype=p.dtype, columns=columns_of_part),
        # A product over channels takes no fewer of them than a swizzled tile of its other operand has columns.
        "state_slots": smem_tile(ring, channels, state_dim, dtype=p.dtype, columns=math.gcd(state_dim, channels)),
        "factor_slots": plgpu.SMEM((ring, operands.factors.shape[3], ROWS), jnp.float32),
        "scaled_slot": smem_tile(ROWS, channels, dtype=p.dtype, columns=columns_of_part),
        "pairs": tensor_memory(ROWS),
        "inter": tensor_memory(channels),
        "sums": tensor_memory(state_dim),
        "projections_ready": plgpu.Barrier(num_arrivals=2 + (operands.first is not None)),
        "ready": plgpu.Barrier(num_arrivals=4, num_barriers=ring),
        "consumed": plgpu.Barrier(num_arrivals=COMPUTE_WGS, num_barriers=ring),
        " and ".join(EVENTS): in_order(num_barriers=len(EVENTS)),
        " and ".join(EVENTS_OF_PAIRS): in_order(num_arrivals=COMPUTE_WGS, num_barriers=len(EVENTS_OF_PAIRS)),
    }
    if operands.first is not None:
        scratch["first_slot"] = plgpu.SMEM((ROWS,), jnp.int32)
    weights = tensor_memory(ROWS, p.dtype, packed=True)
    other_slot = smem_tile(ROWS, state_dim, dtype=p.dtype)
    if gives_out:
        scratch["weights_ready"] = in_order(num_arrivals=COMPUTE_WGS + 1)
    if by_columns:
        scratch |= {
            "other_slot": other_slot,
            "d_scores_slot": smem_tile(ROWS, ROWS, dtype=p.dtype, columns=PAIR_COLUMNS),
            "scores": tensor_memory(ROWS),
            "weights": weights,
        }
    else:
        passed = tensor_memory(ROWS)
        passing_slots = smem_tile(2, ROWS, ROWS, dtype=jnp.bfloat16, columns=PAIR_COLUMNS)
        scratch |= {
            # Of `other` only scores are made.
            "other_slot or passing_slots": plgpu.RefUnion(other_slot, passing_slots),
            **({"weights or passed": plgpu.RefUnion(weights, passed)} if gives_out else {"passed": passed}),
            "from_on": tensor_memory(ROWS, jnp.bfloat16, packed=True),
        }

    def result(*shape: int, dtype: Any = jnp.float32):
        return jax.ShapeDtypeStruct((p.batch, *shape), dtype)

    by_group = result(parts, chunks * ROWS, state_dim)
    out_types = {
        "own": by_group,
        "sums": result(chunks, units, 1 + COMPUTE_WGS + sums_skipped if by_columns else 2, ROWS),
        **({"other": by_group} if by_columns else {}),
        **({"out": result(length, units, channels, dtype=p.dtype)} if gives_out else {}),
    }
    results = plgpu.kernel(
        kernel,
        out_type=tuple(out_types.values()),
        grid=(p.batch * chunks * parts,),
        grid_names=("block",),
        num_threads=COMPUTE_WGS + 2,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*jax.tree.leaves(operands))
    return results_of(results)


class _Place(NamedTuple):
    """Where a block stands."""

    example: Any
    chunk: Any
    group: Any
    part: Any
    first_unit: Any

    @property
    def tokens(self) -> Any:
        return pl.ds(self.chunk * ROWS, ROWS)


class _Scratch(NamedTuple):
    """What a block holds in shared and in tensor memory, and the barriers named after the event that they wait for;
    None where a kernel has none."""

    own_slot: Any
    other_slot: Any
    first_slot: Any
    value_slots: Any
    others_slots: Any
    state_slots: Any
    factor_slots: Any
    scaled_slot: Any
    d_scores_slot: Any
    passing_slots: Any
    scores: Any
    pairs: Any
    weights: Any
    inter: Any
    sums: Any
    passed: Any
    from_on: Any
    projections_ready: Any
    ready: Any
    consumed: Any
    scores_ready: Any
    pairs_ready: Any
    pairs_consumed: Any
    inter_ready: Any
    inter_consumed: Any
    scaled_ready: Any
    weights_ready: Any
    unit_done: Any
    passing_ready: Any
    passed_ready: Any
    passed_consumed: Any
    d_scores_ready: Any
    sums_ready: Any

"""The convolution for Hopper (sm_90a), forward and backward: one pass each over what must be read.

A block of one warpgroup goes down a segment of an example's positions, its threads side by side over the channels. What
an output needs of earlier positions stays in registers from one position to the next, so that each number is read once,
straight from global memory: some positions are loaded at a time, to have enough bytes on their way. Nothing is shared
between threads, hence no barriers.

    forward     y[t] = act(s[t]),  s[t] = b + sum_i w[i] x[t-h+i]
    backward    d_s[t] = d_y[t] act'(s[t]);  d_w[i] += d_s[t] x[t-h+i];  d_b += d_s[t]
                d_x[t-h] = sum_i w[i] d_s[t-i], once all that it needs is there

A backward block ends h positions late, and leaves its sums for d_w and d_b to XLA, which adds up those of all blocks in
one order. Within a block, positions loaded together are added up before they join the rest: in one chain of all of them
float32 loses more than in XLA's sums.

Axis letters: B examples, L positions, C channels, W taps, h = W - 1 positions of history, S segments of positions.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from fast_layers.kernel_parts.over_batch import over_batch
from fast_layers.ops.conv1d.config import HopperTiles
from fast_layers.ops.conv1d.history import final_state, hide_other_documents, with_history
from fast_layers.ops.conv1d.problem import Aux, Inputs, Outputs, Problem

LOG2_E = 1.4426950408889634


class Operands(NamedTuple):
    """Arrays as the kernels take them; what all examples share has 1 for B."""

    x: Float[Array, "B L C"]
    w: Float[Array, "1 W C"]
    b: Float[Array, "1 C"] | None
    state: Float[Array, "B h C"] | None
    reach: Int[Array, "B|1 L"] | None
    d_y: Float[Array, "B L C"] | None = None
    d_final: Float[Array, "B h C"] | None = None
    """Of the final state, with 0 for other documents."""


class Sums(NamedTuple):
    """What the backward kernel leaves: of x's gradient all, of those of w and b a row for each segment."""

    d_x: Float[Array, "B L C"]
    d_w: Float[Array, "B S W C"]
    d_b: Float[Array, "B S C"] | None
    d_state: Float[Array, "B h C"] | None


SHARED = frozenset({"w", "b", "reach"})


def forward(problem: Problem, inputs: Inputs, aux: Aux, tiles: HopperTiles | None = None) -> Outputs:
    p = problem
    launch: Any = over_batch(functools.partial(_launch_forward, tiles or HopperTiles.of(p, "forward")), SHARED)
    y = launch(p, _operands(inputs, aux))
    return Outputs(y, final_state(p, inputs, aux, with_history(p, inputs)) if p.final_state else None)


def backward(
    problem: Problem, inputs: Inputs, aux: Aux, gradients: Outputs, tiles: HopperTiles | None = None
) -> Inputs:
    """Gradients of all inputs, in the inputs' dtypes."""
    p = problem
    launch: Any = over_batch(functools.partial(_launch_backward, tiles or HopperTiles.of(p, "backward")), SHARED)
    operands = _operands(inputs, aux)._replace(d_y=gradients.y)
    if gradients.final_state is not None:
        d_final = gradients.final_state.swapaxes(1, 2).astype(jnp.float32)
        operands = operands._replace(d_final=hide_other_documents(p, aux, d_final))
    sums: Sums = launch(p, operands)
    b, state, d_state = inputs.b, inputs.initial_state, sums.d_state
    return Inputs(
        x=sums.d_x,
        w=sums.d_w.sum((0, 1)).astype(inputs.w.dtype),
        b=None if b is None or sums.d_b is None else sums.d_b.sum((0, 1)).astype(b.dtype),
        initial_state=None if state is None or d_state is None else d_state.swapaxes(1, 2).astype(state.dtype),
    )


def _operands(inputs: Inputs, aux: Aux) -> Operands:
    b, state = inputs.b, inputs.initial_state
    return Operands(
        x=inputs.x,
        w=inputs.w.astype(jnp.float32)[None],
        b=None if b is None else b.astype(jnp.float32)[None],
        state=None if state is None else state.swapaxes(1, 2).astype(jnp.float32),
        reach=aux.reach,
    )


class _Block(NamedTuple):
    """Where a block works, and the vectors over its channels that it keeps."""

    example: Any
    segment: Any
    first: Any
    """Its first position."""
    columns: Any
    w: list[Array]
    b: Array | None


def _block_of(tiles: HopperTiles, p: Problem, refs: Any, load: Any) -> _Block:
    index = lax.axis_index("block")
    across = p.channels // tiles.channels
    segments = -(-p.length // tiles.segment)
    column, down = lax.rem(index, across), lax.div(index, across)
    segment, example = lax.rem(down, segments), lax.div(down, segments)
    columns = pl.ds(column * tiles.channels, tiles.channels)
    own = example if refs.w.shape[0] > 1 else 0
    w = [load(refs.w.at[own, i, columns]) for i in range(p.width)]
    b = None if refs.b is None else load(refs.b.at[example if refs.b.shape[0] > 1 else 0, columns])
    return _Block(example, segment, segment * tiles.segment, columns, w, b)


def _history(p: Problem, refs: Any, block: _Block, load: Any) -> tuple[Array, ...]:
    """What stands before the block's first position, oldest first."""
    found = []
    for i in range(p.history):
        before = (
            jnp.zeros_like(block.w[0]) if refs.state is None else load(refs.state.at[block.example, i, block.columns])
        )
        here = load(refs.x.at[block.example, jnp.maximum(block.first - p.history + i, 0), block.columns])
        found.append(_choose(block.first > 0, here, before))
    return tuple(found)


def _reach(refs: Any, block: _Block, t: Any) -> Any:
    return None if refs.reach is None else refs.reach[block.example if refs.reach.shape[0] > 1 else 0, t]


def _seen(p: Problem, reach: Any, window: Sequence[Array]) -> list[Array]:
    """The window of a position, oldest first, with 0 for other documents: not multiplied, since those may hold NaN."""
    if reach is None:
        return list(window)
    *older, own = window
    return [*(_choose(reach >= p.history - i, x) for i, x in enumerate(older)), own]


def _sum(block: _Block, seen: Sequence[Array]) -> Array:
    total = functools.reduce(jnp.add, (w * x for w, x in zip(block.w, seen, strict=True)))
    return total if block.b is None else total + block.b


def _choose(condition: Any, x: Array, other: Array | None = None) -> Array:
    """By one condition for all of x; 0 without `other`."""
    # The compiler broadcasts neither a condition nor a number that is chosen.
    everywhere = lax.broadcast_in_dim(condition, x.shape, ())
    return jnp.where(everywhere, x, jnp.zeros_like(x) if other is None else other)


def _sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + jnp.exp2(x * -LOG2_E))


def _load(tiles: HopperTiles, ref: Any) -> Array:
    layout = plgpu.Layout.WG_STRIDED((tiles.channels,), tiles.channels_per_thread)
    return plgpu.load(ref, layout=layout).astype(jnp.float32)


def _over_rows(tiles: HopperTiles, p: Problem, count: Any, first: Any, rows: Any, carry: Any) -> Any:
    """`rows(how many, from where, carry)` from `first` on, `tiles.rows` at a time and the rest one by one."""
    whole = lax.div(count, tiles.rows)
    carry = lax.fori_loop(0, whole, lambda k, carry: rows(tiles.rows, first + k * tiles.rows, carry), carry)
    if p.length % tiles.segment % tiles.rows:
        carry = lax.fori_loop(whole * tiles.rows, count, lambda k, carry: rows(1, first + k, carry), carry)
    return carry


def _kernel(body: Any, tiles: HopperTiles, p: Problem, out_type: Any) -> Any:
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(p.batch * -(-p.length // tiles.segment) * (p.channels // tiles.channels),),
        grid_names=("block",),
        # A thread reads nothing that another writes.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )


# Jitted, so that a model of many equal layers traces and lowers the kernel once.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _launch_forward(tiles: HopperTiles, p: Problem, operands: Operands) -> Float[Array, "B L C"]:
    tree = jax.tree.structure(operands)
    load = functools.partial(_load, tiles)

    def conv_forward(*refs):
        *arrays, y_ref = refs
        inputs: Any = jax.tree.unflatten(tree, arrays)
        block = _block_of(tiles, p, inputs, load)

        def rows(count, start, history):
            reaches = [_reach(inputs, block, start + j) for j in range(count)]
            loaded = [load(inputs.x.at[block.example, start + j, block.columns]) for j in range(count)]
            for j, (x, reach) in enumerate(zip(loaded, reaches, strict=True)):
                window = (*history, x)
                y = _sum(block, _seen(p, reach, window))
                if p.activation is not None:
                    y *= _sigmoid(y)
                y_ref.at[block.example, start + j, block.columns][...] = y.astype(p.dtype)
                history = window[1:]
            return history

        count = jnp.minimum(tiles.segment, p.length - block.first)
        _over_rows(tiles, p, count, block.first, rows, _history(p, inputs, block, load))

    return _kernel(conv_forward, tiles, p, jax.ShapeDtypeStruct(operands.x.shape, p.dtype))(*jax.tree.leaves(operands))


class _Carry(NamedTuple):
    """From position to position: what the next ones need of those before, oldest first, and the block's sums."""

    history: tuple[Array, ...]
    sums: tuple[Array, ...]
    """Gradients of the positions' sums."""
    reaches: tuple[Any, ...]
    d_w: tuple[Array, ...]
    d_b: Array | None


@functools.partial(jax.jit, static_argnums=(0, 1))
def _launch_backward(tiles: HopperTiles, p: Problem, operands: Operands) -> Sums:
    tree = jax.tree.structure(operands)
    load = functools.partial(_load, tiles)
    segments = -(-p.length // tiles.segment)
    taps = range(p.width)

    def struct(*shape, dtype=jnp.float32) -> Any:
        return jax.ShapeDtypeStruct((p.batch, *shape), dtype)

    sums = Sums(
        d_x=struct(p.length, p.channels, dtype=p.dtype),
        d_w=struct(segments, p.width, p.channels),
        d_b=struct(segments, p.channels) if p.bias else None,
        d_state=struct(p.history, p.channels) if p.initial_state else None,
    )

    def conv_backward(*refs):
        inputs: Any = jax.tree.unflatten(tree, refs[: tree.num_leaves])
        outputs: Any = jax.tree.unflatten(jax.tree.structure(sums), refs[tree.num_leaves :])
        block = _block_of(tiles, p, inputs, load)
        zero = jnp.zeros_like(block.w[0])

        def row(t, x, d_y, carry: _Carry) -> tuple[list[Array], Array, Any]:
            """(what position t sees, the gradient of its sum, its reach)."""
            reach = _reach(inputs, block, t)
            seen = _seen(p, reach, (*carry.history, x))
            if p.activation is None:
                return seen, d_y, reach
            total = _sum(block, seen)
            gate = _sigmoid(total)
            return seen, d_y * (gate * (1.0 + total * (1.0 - gate))), reach

        def advance(t, x, d_sum, reach, carry: _Carry, *late: Array, may_be_early: bool) -> _Carry:
            """To position t + 1, with the gradient of x[t-h] stored, and in it what is `late`."""
            sums, reaches = (*carry.sums, d_sum), (*carry.reaches, reach)
            # The sum of t-i, which stands i from the end, has x[t-h] under tap i.
            parts = [
                block.w[i] * (d if r is None else _choose(r >= p.history - i, d))
                for i, d, r in zip(taps, sums[::-1], reaches[::-1], strict=True)
            ]
            store(t - p.history, functools.reduce(jnp.add, [*parts, *late]), may_be_early)
            return carry._replace(history=(*carry.history, x)[1:], sums=sums[1:], reaches=reaches[1:])

        def store(t, d_x, may_be_early: bool):
            def store_in_row():
                outputs.d_x.at[block.example, t, block.columns][...] = d_x.astype(p.dtype)

            if not may_be_early:
                store_in_row()
                return
            pl.when(t >= block.first)(store_in_row)
            if outputs.d_state is not None:

                @pl.when(t < 0)
                def _before_the_row():
                    outputs.d_state.at[block.example, t + p.history, block.columns][...] = d_x

        def load_both(t):
            return tuple(load(ref.at[block.example, t, block.columns]) for ref in (inputs.x, inputs.d_y))

        def rows(count, start, carry: _Carry) -> _Carry:
            loaded = [load_both(start + j) for j in range(count)]
            before, carry = carry, carry._replace(d_w=(zero,) * p.width, d_b=zero if p.bias else None)
            for j, (x, d_y) in enumerate(loaded):
                seen, d_sum, reach = row(start + j, x, d_y, carry)
                d_w = tuple(d + d_sum * x for d, x in zip(carry.d_w, seen, strict=True))
                carry = carry._replace(d_w=d_w, d_b=None if carry.d_b is None else carry.d_b + d_sum)
                carry = advance(start + j, x, d_sum, reach, carry, may_be_early=j < p.history)
            d_w, d_b = jax.tree.map(jnp.add, (before.d_w, before.d_b), (carry.d_w, carry.d_b))
            return carry._replace(d_w=d_w, d_b=d_b)

        carry = _Carry(
            history=_history(p, inputs, block, load),
            sums=(zero,) * p.history,
            reaches=(None if inputs.reach is None else jnp.int32(0),) * p.history,
            d_w=(zero,) * p.width,
            d_b=zero if p.bias else None,
        )
        count = jnp.minimum(tiles.segment, p.length - block.first)
        carry = _over_rows(tiles, p, count, block.first, rows, carry)
        for i in taps:
            outputs.d_w.at[block.example, block.segment, i, block.columns][...] = carry.d_w[i]
        if carry.d_b is not None:
            outputs.d_b.at[block.example, block.segment, block.columns][...] = carry.d_b
        # The last positions of x wait for sums of the next segment's first, or else are what the final state holds.
        for j in range(p.history):
            t = block.first + count + j
            x, d_y = load_both(jnp.minimum(t, p.length - 1))
            _, d_sum, reach = row(jnp.minimum(t, p.length - 1), x, d_y, carry)
            inside, late = t < p.length, ()
            if inputs.d_final is not None:
                d_final = load(inputs.d_final.at[block.example, jnp.maximum(t - p.length, 0), block.columns])
                late = (_choose(inside, jnp.zeros_like(d_final), d_final),)
            carry = advance(t, x, _choose(inside, d_sum), reach, carry, *late, may_be_early=True)

    structs, made = jax.tree.flatten(sums)
    return jax.tree.unflatten(made, _kernel(conv_backward, tiles, p, structs)(*jax.tree.leaves(operands)))

"""Pieces of work that the blocks of a persistent grid take one after another, each when it has loaded those before.

So no block waits for long at the end, whatever the pieces take. Pieces stand in their order; each block has the place
of its own number first. A queue's state is an array in the GPU's memory, of zeros at first: for each place the one that
its block takes next; how many were taken so; then marks, for each piece as many, each set by one warpgroup.

    who takes                                         who follows
    the piece of its place -> a slot      told        waits told
    its part in it                                    its part in it
    the next place, its piece likewise                -> heard
    waits heard of the slot

A second time the blocks go through pieces that are marked: which these are does not depend on who took them.

The simulator, which runs blocks one after another, has them take turns.

Source: the tile schedulers of Shah et al., "FlashAttention-3" (2024).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array, Float, Int

from fast_layers.kernel_parts.inline import simulate_by, thread

SLOTS = 2
"""For pieces' numbers, in shared memory."""
_BY_ROW = plgpu.Layout.WGMMA.reduce(1)
_NONE = -1
"""Instead of a piece, when all are taken."""


def new(pieces: int, marks: int) -> Int[Array, " state"]:
    """A queue's state, for a kernel to change."""
    return jnp.zeros((1 + marks) * pieces + 1, jnp.int32)


def barriers(followers: int) -> dict[str, Any]:
    """A block's, by their names in `PieceQueue`; `followers`: warpgroups, besides the one that takes pieces."""
    return {
        "piece_told": plgpu.Barrier(num_barriers=SLOTS),
        "piece_heard": plgpu.Barrier(num_arrivals=followers, num_barriers=SLOTS),
    }


class PieceQueue(NamedTuple):
    """In a kernel. Its methods go through the block's pieces: the last `state = role(turn, piece, state)`, and how many
    there were."""

    state: Any
    order: Any
    """An array in the GPU's memory, or None if pieces are taken by their numbers."""
    pieces: int
    blocks: int
    marks: int
    """Of each piece."""
    slots: Any
    """In shared memory, of a type that has room for pieces' numbers."""
    piece_told: Any
    piece_heard: Any

    def take(self, block: Any, role: Callable[[Any, Any, Any], Any], state: Any) -> tuple[Any, Any]:
        """By one warpgroup, which takes them."""

        def tell(turn, piece):
            slot = lax.rem(turn, SLOTS)
            pl.when(turn >= SLOTS)(lambda: plgpu.barrier_wait(self.piece_heard.at[slot]))
            self.slots[slot] = piece.astype(self.slots.dtype)
            plgpu.barrier_arrive(self.piece_told.at[slot])
            return piece

        def one(turn, piece, place, state):
            state = role(turn, piece, state)
            place = self._next(place)
            return turn + 1, tell(turn + 1, self._piece_at(place)), place, state

        return self._while_some(one, tell(jnp.int32(0), self._piece_at(block)), block, state)

    def follow(self, block: Any, role: Callable[[Any, Any, Any], Any], state: Any) -> tuple[Any, Any]:
        """By each other warpgroup, meanwhile."""
        del block

        def hear(turn):
            plgpu.barrier_wait(self.piece_told.at[lax.rem(turn, SLOTS)])
            return self._told(turn)

        def one(turn, piece, nothing, state):
            state = role(turn, piece, state)
            plgpu.barrier_arrive(self.piece_heard.at[lax.rem(turn, SLOTS)])
            return turn + 1, hear(turn + 1), nothing, state

        return self._while_some(one, hear(jnp.int32(0)), None, state)

    def again(self, block: Any, role: Callable[[Any, Any, Any], Any], state: Any) -> tuple[Any, Any]:
        """By all, when all are done, of the pieces that are marked; it is these that are counted."""

        def one(turn, piece, place, state):
            some = self.is_marked(piece, range(self.marks))
            turn, state = lax.cond(some, lambda: (turn + 1, role(turn, piece, state)), lambda: (turn, state))
            place = self.state[place]
            return turn, self._piece_at(place), place, state

        return self._while_some(one, self._piece_at(block), block, state)

    def mark(self, turn: Any, which: Any, rows: Float[Array, " 64"]) -> None:
        """By one who follows: the `which`-th mark of the piece of this `turn`, if any row is more than 0."""

        def store(_, ref, array):
            zero, i32 = utils.c(0.0, ir.F32Type.get()), ir.IntegerType.get_signless(32)
            above = [arith.cmpf(arith.CmpFPredicate.OGT, x, zero) for x in map(_number, array.registers.flat)]
            with utils.when(functools.reduce(arith.ori, above)):
                llvm.store(utils.c(1, i32), utils.memref_ptr(ref))

        simulate_by(store, lambda rows: (rows.max() > 0).astype(jnp.int32).reshape(1))
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _BY_ROW))(store)(self._marks(self._told(turn), which, 1), rows)

    def is_marked(self, piece: Any, which: Iterable[int]) -> Any:
        """When all are done: by any of these marks."""
        return functools.reduce(jnp.logical_or, (self._marks(piece, i, 1)[0] != 0 for i in which))

    def _marks(self, piece: Any, first: Any, count: int) -> Any:
        return self.state.at[pl.ds(self.pieces + 1 + piece * self.marks + first, count)]

    def _while_some(self, one: Callable[..., Any], first: Any, place: Any, state: Any) -> tuple[Any, Any]:
        """There are no more blocks than pieces, so each has a `first`."""
        start = jnp.int32(0), first, place, state
        turns, _, _, state = lax.while_loop(lambda carry: carry[1] >= 0, lambda carry: one(*carry), start)
        return turns, state

    def _told(self, turn: Any) -> Array:
        return self.slots[lax.rem(turn, SLOTS)].astype(jnp.int32)

    def _piece_at(self, place: Any) -> Array:
        some = place < self.pieces
        piece = place if self.order is None else self.order[jnp.where(some, place, 0)]
        return jnp.where(some, piece, _NONE)

    def _next(self, place: Any) -> Array:
        """Takes the next place, and writes it down for `again`."""

        def take(_, following, counter, place):
            del place
            counted, written = (utils.memref_ptr(ref) for ref in (counter, following))
            take = "atom.relaxed.gpu.global.add.u32 next, [$0], 1;"
            ptx = f"{{ .reg .b32 next; {take} add.u32 next, next, {self.blocks}; st.global.b32 [$1], next; }}"
            is_first = arith.cmpi(arith.CmpIPredicate.eq, thread(), utils.c(0, ir.IntegerType.get_signless(32)))
            with utils.when(is_first):
                llvm.inline_asm(
                    ir.Type.parse("!llvm.void"), [counted, written], ptx, "l,l,~{memory}", has_side_effects=True
                )
            utils.warpgroup_barrier()

        simulate_by(take, lambda _, place: jnp.reshape(place + self.blocks, (1,)))
        types = plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT(())
        call: Any = plgpu.inline_mgpu(arg_types=types)(take)
        call(*(self.state.at[pl.ds(at, 1)] for at in (place, self.pieces)), place)
        return self.state[place]


def _number(register: Any) -> Any:
    """Of one row, as a thread holds it."""
    if isinstance(register.type, ir.VectorType):
        return vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0]))
    return register

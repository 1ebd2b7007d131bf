"""dQ by blocks among those that leave dS, for attention's backward on Hopper (sm_90a) at depths up to 128.

What leaves dS waits for products, and what makes dQ of it for memory, so both are done at the same time. A launch has
blocks for tiles of keys, as in hopper_bwd.py, and for tiles of 256 queries, 128 for each of two compute warpgroups:

    load warpgroup                              each compute warpgroup, on its own 128 queries
    dS, K       -> ready        waits consumed      dQ += dS K, twice                 frees consumed
                                                    dQ * scale                        -> shared memory, then TMA

A block that makes dQ waits for all tiles of keys of its head, and one that leaves dS for dQ of the head whose place it
takes, if there is not place for all: at semaphores in the GPU's memory. A block waits for such alone as have lower
numbers. The hardware starts blocks in the order of their numbers, which CUDA does not promise, but CUB's scans rely on
too: so those are running or done, and nothing stands still. Mostly they are long done. Each row is summed by one block
in a fixed order.

Where query heads share keys, a block takes a tile of keys for one of them, and adds to dK and dV in float32 when those
of the heads before have, at semaphores, too: so these sums have one order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fast_layers.kernel_parts.inline import make_writes_seen
from fast_layers.kernel_parts.smem_tile import smem_tile
from fast_layers.ops.attention.hopper_bwd_scores import TILE, LeftScores
from fast_layers.ops.attention.hopper_bwd_sequence import TILES, Sequence
from fast_layers.ops.attention.hopper_call import ROWS
from fast_layers.ops.attention.hopper_d_query_parts import (
    WARPGROUPS,
    Scratch,
    exchange_mended_keys,
    send,
    turned,
)
from fast_layers.ops.attention.hopper_grad_parts import make_finite_in_chunks
from fast_layers.ops.attention.problem import Problem
from fast_layers.ops.attention.tile_mask import TileMask

KEYS = TILE // 2
"""Of a step."""
_STAGES = 4
_UNITS = TILES * TILE // ROWS
"""Of 64 queries, as dS has them."""


def scratch_types(p: Problem, depth: int) -> dict[str, Any]:
    """Of a block that makes dQ."""
    types = Scratch(
        score_slots=smem_tile(_STAGES, _UNITS, KEYS, ROWS, dtype=p.dtype),
        key_slots=smem_tile(_STAGES, KEYS, depth, dtype=p.dtype),
        result_slots=smem_tile(WARPGROUPS, ROWS, depth, dtype=p.dtype),
        ready=plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
        consumed=plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=_STAGES),
        keys_mended=plgpu.Barrier(num_arrivals=WARPGROUPS),
    )
    return types._asdict()


class Semaphores(NamedTuple):
    """In the GPU's memory."""

    of_sums: Any
    """For each pair and tile of keys, how many compute warpgroups have added to dK and dV; None where no query heads
    share keys."""
    of_heads: Any
    """For each head, how many compute warpgroups have left all dS of a tile of its keys; and how many blocks have read
    the dS for a tile of its dQ."""
    left: LeftScores
    sequence: Sequence

    @classmethod
    def of(cls, left: LeftScores, sequence: Sequence) -> Semaphores:
        """In a kernel."""

        def zeros(*shape: int) -> Any:
            return pl.get_global(plgpu.SemaphoreType.REGULAR(shape))

        pieces = sequence.pieces
        of_sums = zeros(sequence.pairs, pieces.tiles) if left.parts > 1 else None
        return cls(of_sums, zeros(2, pieces.heads), left, sequence)

    def add_in_order(self, head: Any, kv_index: Any, add: Callable[[], None]) -> None:
        """By each compute warpgroup: `add`s dK and dV of a tile of keys, if heads share it after those before."""
        if self.of_sums is None:
            add()
            return
        pair, before = self.sequence.pair(head)
        counted = self.of_sums.at[pair, kv_index]
        plgpu.semaphore_wait(counted, WARPGROUPS * before, decrement=False, memory_scope="gpu")
        make_writes_seen()
        add()
        plgpu.wait_smem_to_gmem(0)
        plgpu.semaphore_signal(counted, memory_scope="gpu")

    def tell_left(self, head: Any, copies_since: int) -> None:
        """By each compute warpgroup; `copies_since`: that it has begun after those of dS."""
        plgpu.wait_smem_to_gmem(copies_since)
        plgpu.semaphore_signal(self.of_heads.at[0, head], memory_scope="gpu")

    def wait_left(self, head: Any) -> None:
        """By the load warpgroup, for all dS of a head."""
        tiles = WARPGROUPS * self.sequence.pieces.tiles
        plgpu.semaphore_wait(self.of_heads.at[0, head], tiles, decrement=False, memory_scope="gpu")
        make_writes_seen()

    def tell_made(self, head: Any) -> None:
        """By one compute warpgroup."""
        if self._takes_places:
            plgpu.semaphore_signal(self.of_heads.at[1, head], memory_scope="gpu")

    def wait_made(self, head: Any) -> None:
        """By the load warpgroup, until there is a place for a head's dS."""
        if not self._takes_places:
            return

        @pl.when(head >= self.left.pairs)
        def _wait():
            before = self.of_heads.at[1, head - self.left.pairs]
            plgpu.semaphore_wait(before, self.sequence.q_tiles, decrement=False, memory_scope="gpu")
            make_writes_seen()

    @property
    def _takes_places(self) -> bool:
        return self.left.pairs < self.sequence.pieces.heads


class Maker(NamedTuple):
    """In a kernel: what a block is to do, if it makes dQ of a tile of queries."""

    scratch: Scratch
    d_scores: Any
    """In the GPU's memory, like those that follow."""
    key: Any
    d_query: Any
    semaphores: Semaphores
    pieces_before: Any
    """So many blocks before this one leave dS."""
    makes: Any
    """Whether this one makes dQ."""
    head: Any
    """In the order of the pieces."""
    q_index: Any

    @classmethod
    def of(cls, scratch: Scratch, d_scores: Any, key: Any, d_query: Any, semaphores: Semaphores, block: Any) -> Maker:
        sequence = semaphores.sequence
        pieces = sequence.pieces_before(block)
        makes = sequence.pieces_before(block + 1) == pieces
        place = sequence.locate_query(block - pieces)
        return cls(scratch, d_scores, key, d_query, semaphores, pieces, makes, *place)

    @property
    def problem(self) -> Problem:
        return self.semaphores.left.problem

    @property
    def query_head(self) -> Any:
        """Of all examples."""
        pair, which = self.semaphores.sequence.pair(self.head)
        return pair * self.problem.group + which

    @property
    def span(self) -> Any:
        """Of tiles of keys that the block's queries see."""
        return TileMask(self.problem, TILES * TILE, TILE, None).key_span(0, self.q_index)

    def load(self) -> None:
        """The load warpgroup."""
        p, s, left = self.problem, self.scratch, self.semaphores.left
        pair, _ = self.semaphores.sequence.pair(self.head)
        example, kv_head = lax.div(pair, p.kv_heads), lax.rem(pair, p.kv_heads)

        def step(i, _):
            j, half = lax.div(i, TILE // KEYS), lax.rem(i, TILE // KEYS)
            slot = lax.rem(i - first, _STAGES)
            pl.when(i - first >= _STAGES)(lambda: plgpu.barrier_wait(s.consumed.at[slot]))
            key = self.key.at[example, pl.ds(i * KEYS, KEYS), kv_head]
            plgpu.copy_gmem_to_smem(key, s.key_slots.at[slot], s.ready.at[slot])
            units = pl.ds(TILE // ROWS * left.row(left.place(self.head), j) + self.q_index * _UNITS, _UNITS)
            d_scores = self.d_scores.at[units, pl.ds(half * KEYS, KEYS)]
            plgpu.copy_gmem_to_smem(d_scores, s.score_slots.at[slot], s.ready.at[slot])

        first, last = (tile * (TILE // KEYS) for tile in (self.span.first, self.span.last))
        self.semaphores.wait_left(self.head)
        lax.fori_loop(first, last, step, None)

    def multiply(self, warpgroup: Any) -> None:
        """A compute warpgroup, on its own 128 queries."""
        p, s, span = self.problem, self.scratch, self.span
        depth, hides = self.key.shape[3], TileMask(p, TILE, TILE, None).hides
        own = TileMask(p, TILE, TILE, None).key_span(0, self.q_index * TILES + warpgroup)
        first, own_last, last = (tile * (TILE // KEYS) for tile in (span.first, own.last, span.last))

        def over_keys(*accs):
            def step(i, _, uses):
                slot = lax.rem(i - first, _STAGES)
                plgpu.barrier_wait(s.ready.at[slot])
                if hides:
                    pl.when(span.ragged(lax.div(i, TILE // KEYS)))(lambda: mend(slot))
                if uses:
                    key = s.key_slots.at[slot]
                    scores = [s.score_slots.at[slot, warpgroup * TILES + unit] for unit in range(TILES)]
                    for acc, factor in zip(accs, turned(scores, key), strict=True):
                        plgpu.wgmma(acc, factor, key)
                    plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(s.consumed.at[slot])

            lax.fori_loop(first, own_last, functools.partial(step, uses=True), None)
            if hides:
                lax.fori_loop(own_last, last, functools.partial(step, uses=False), None)
            return tuple(acc[...] for acc in accs)

        def mend(slot):
            # 0 times NaN is NaN; who sees a broken key has NaN in its dS.
            make_finite_in_chunks(s.key_slots.at[slot, pl.ds(warpgroup * (KEYS // WARPGROUPS), KEYS // WARPGROUPS)])
            exchange_mended_keys(s)

        accs = [plgpu.WGMMAAccumulatorRef((ROWS, depth), jnp.float32)] * TILES
        products = pl.run_scoped(over_keys, *accs)
        pl.when(warpgroup == 0)(lambda: self.semaphores.tell_made(self.head))
        for unit, product in enumerate(products):
            rows = pl.ds((self.q_index * TILES + warpgroup) * TILE + unit * ROWS, ROWS)
            send(p, product, s.result_slots.at[warpgroup], self.d_query, self.query_head, rows)

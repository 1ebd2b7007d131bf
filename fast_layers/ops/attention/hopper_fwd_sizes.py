"""The sizes of keys and values, which attention's forward for Hopper finds for its backward.

A size is the largest magnitude in a row. Where the backward sums dQ in integers, it needs one of each key and value,
and would read them all for it; the forward has them in shared memory. Its load warpgroup looks at a tile when all have
read it, before the next one comes into its slot.

Axis letters: B batch, S keys, K key/value heads; J tiles of keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fast_layers.kernel_parts.row_sizes import COLUMNS, ROWS, row_sizes, sizes_of
from fast_layers.ops.attention.config import known_before_the_call
from fast_layers.ops.attention.forward_parts import Piece, Work
from fast_layers.ops.attention.hopper_fwd_config import HopperForwardTiles
from fast_layers.ops.attention.problem import Inputs, Problem
from fast_layers.ops.attention.tile_mask import TileMask

_MOST_UNMASKED_KEYS = 2048
"""Without a mask the forward is slower by it, of more keys by as much as the backward is faster: bench/NOTES.md. In
float16 it was not timed there."""


def takes(p: Problem, tiles: HopperForwardTiles) -> bool:
    """Whether a kernel of these tiles finds them, at one depth, without a mask or under a causal one by which some
    query sees all keys."""
    depths, band = (p.qk_dim, p.v_dim), p.mask.band
    if depths != (COLUMNS, COLUMNS) or tiles.kv_tile != ROWS or p.kv_len % ROWS or not known_before_the_call(p):
        return False
    if tiles.splits > 1 or tiles.cluster > 1 or tiles.out_by_values:
        return False
    if band is None:
        return p.kv_len <= _MOST_UNMASKED_KEYS and tiles.first_maximum
    return tiles.last_keys_first and band.low is None and band.high is not None and p.q_len + band.high >= p.kv_len


def shape(p: Problem) -> tuple[int, int, int]:
    """By tiles of all keys: of keys, then of values."""
    return p.batch * p.kv_heads * (p.kv_len // ROWS), 2, ROWS


def by_xla(inputs: Inputs) -> jax.Array:
    """As `Residuals` has them."""
    both = jnp.stack([sizes_of(x).swapaxes(1, 2) for x in (inputs.key, inputs.value)], -2)
    tiles = both.reshape(*both.shape[:-1], -1, ROWS)
    return tiles.swapaxes(2, 3)


def by_head(p: Problem, sizes: jax.Array) -> jax.Array:
    """As `Residuals` has them."""
    return sizes.reshape(p.batch, p.kv_heads, -1, 2, ROWS)


class Measure(NamedTuple):
    """In a kernel: each tile is looked at in one piece of those that load it.

    The pieces of the first head of a group share them evenly, so that none takes long: under a causal mask each has the
    tiles that those before it do not see.
    """

    work: Work
    mask: TileMask
    sizes: Any
    """In the GPU's memory, of `shape`."""

    @property
    def nothing(self) -> tuple[Any, ...]:
        """The `in_slots` of a block that has loaded nothing."""
        return (jnp.int32(-1),) * self.work.tiles.stages

    def place(self, piece: Piece, j: Any) -> Any:
        """Of tile j among all, or less than 0 where another piece looks at it."""
        p, kv_tiles = self.work.problem, self.work.problem.kv_len // ROWS
        if self.mask.high is None:
            first, last = (lax.div((piece.q_index + d) * kv_tiles, self.work.q_tiles) for d in (0, 1))
        else:
            before = self.mask.key_span(piece.example, jnp.maximum(piece.q_index - 1, 0)).last
            first, last = jnp.where(piece.q_index == 0, 0, before), piece.span.last
        own = (j >= first) & (j < last) & (lax.rem(piece.head, p.group) == 0)
        kv_head = piece.example * p.kv_heads + lax.div(piece.head, p.group)
        return jnp.where(own, kv_head * kv_tiles + j, -1)

    def key(self, place: Any, slot: Any) -> None:
        """Of what stands in a slot for keys, if `place` is any."""
        self._look(0, place, slot)

    def value(self, place: Any, slot: Any) -> None:
        self._look(1, place, slot)

    def rest(self, s: Any, steps: Any, in_slots: tuple[Any, ...]) -> None:
        """Of what the block's last steps have left; `s` is the kernel's scratch."""
        for i, place in enumerate(in_slots):
            slot = lax.rem(steps + i, self.work.tiles.stages)

            @pl.when(place >= 0)
            def _of_slot(slot=slot, place=place):
                plgpu.barrier_wait(s.k_consumed.at[slot])
                self.key(place, s.k_slots.at[slot])
                plgpu.barrier_wait(s.v_consumed.at[slot])
                self.value(place, s.v_slots.at[slot])

    def _look(self, which: int, place: Any, slot: Any) -> None:
        @pl.when(place >= 0)
        def _own():
            self.sizes.at[place, which][...] = row_sizes(slot)
            plgpu.commit_smem()  # read by all, before the next tile comes

"""In which order the blocks of a grid take tiles, so that those running together share what they read."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jax import lax

# Half of an H100's or H200's 50 MB, since the two halves of the cache hold copies of what both read.
L2_BUDGET_BYTES = 24 << 20


@dataclasses.dataclass(frozen=True)
class TileOrder:
    """Heads in groups whose keys and values fit in L2 together; within a group tile by tile, its heads side by side.

    `heads` counts examples times heads; `tiles` those of one head.
    """

    heads: int
    tiles: int
    group: int

    @classmethod
    def of(cls, heads: int, tiles: int, sharing: int, bytes_per_shared: int, pieces: int = 1) -> TileOrder:
        """`sharing` neighbouring heads read the same `bytes_per_shared`.

        `pieces`: a group has at least so many, or all heads, even if what they read does not fit.
        """
        wanted = max(L2_BUDGET_BYTES // bytes_per_shared, 1) * sharing
        groups = [d for d in range(1, heads + 1) if heads % d == 0]
        fitting = max(d for d in groups if d <= wanted)
        return cls(heads, tiles, next((d for d in groups if d >= fitting and d * tiles >= pieces), heads))

    @property
    def total(self) -> int:
        return self.heads * self.tiles

    def locate(self, index: Any) -> tuple[Any, Any]:
        """(head, tile) of the `index`-th piece of work."""
        within = lax.rem(index, self.group * self.tiles)
        head = lax.div(index, self.group * self.tiles) * self.group + lax.rem(within, self.group)
        return head, lax.div(within, self.group)


def deal(durations: Iterable[float], blocks: int) -> np.ndarray:
    """int32 [blocks, turns + 2]: how many pieces each block takes, then which, in their order, then zeros.

    Each piece goes to the block that is free first, as the hardware's scheduler has it with a block for each piece.
    """
    taken: list[list[int]] = [[] for _ in range(blocks)]
    free = [(0.0, block) for block in range(blocks)]
    for piece, duration in enumerate(durations):
        since, block = free[0]
        taken[block].append(piece)
        heapq.heapreplace(free, (since + float(duration), block))
    return schedule_of(taken)


def schedule_of(taken: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
    """As `deal`, of the pieces that each block takes."""
    schedule = np.zeros((len(taken), max(map(len, taken)) + 2), np.int32)
    for row, pieces in zip(schedule, taken, strict=True):
        row[: len(pieces) + 1] = len(pieces), *pieces
    return schedule


def each_dealt(schedule: Any, block: Any, role: Callable[[Any, Any, Any], Any], state: Any) -> Any:
    """In a kernel: the last `state = role(turn, piece, state)` of what `schedule`, as `deal` says it, gives a block."""

    def take(i, carry):
        piece, state = carry
        following = schedule[block, i + 2]  # loaded long before it is needed
        return following, role(i, piece, state)

    return lax.fori_loop(0, schedule[block, 0], take, (schedule[block, 1], state))[1]


def snake(turn: Any, block: Any, blocks: int) -> Any:
    """The index that `block` takes in its `turn`-th turn: forwards and backwards alternately.

    Pieces of work of falling size then add up to nearly the same for all blocks.
    """
    forwards = 1 - lax.rem(turn, 2)
    return turn * blocks + lax.select(forwards == 1, block, blocks - 1 - block)


def turns(total: int, block: Any, blocks: int) -> Any:
    """How many turns `block` has in all until `total` pieces are done."""
    whole, rest = divmod(total, blocks)
    place = block if whole % 2 == 0 else blocks - 1 - block
    return whole + (place < rest).astype("int32")

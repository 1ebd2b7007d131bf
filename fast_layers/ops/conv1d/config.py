"""Tile choices of the kernels: frozen, self-rejecting, with the legality written once."""

from __future__ import annotations

import dataclasses

from fast_layers.dispatch import Pass
from fast_layers.ops.conv1d.problem import Problem

THREADS = 128
"""Of the one warpgroup that a block has."""
WIDTHS = (2, 3, 4)
_CHANNELS_PER_THREAD = (2, 1)
"""With 4 a multiprocessor has registers for two blocks, and an H200 was a tenth slower."""
_BYTES_LOADED_AT_A_TIME = 64
"""By a thread. With the four blocks for which a multiprocessor has registers 32 KiB are on their way together; the
memory's latency asks for 20."""
_MOST_ROWS = 16
"""They are unrolled."""
_SEGMENT = 256
"""A multiple of all rows loaded at a time. The positions where two segments meet are read twice, and the sums for d_w
and d_b are written and read: together 4 % of the backward's bytes. Longer ones make fewer blocks than fill a GPU."""


@dataclasses.dataclass(frozen=True)
class HopperTiles:
    """A block's shape: `channels` side by side, `rows` positions loaded at a time, of the `segment` it goes down."""

    channels: int
    rows: int
    segment: int = _SEGMENT

    def __post_init__(self):
        if self.channels not in [THREADS * each for each in _CHANNELS_PER_THREAD]:
            raise ValueError(f"{self.channels=} must be 128 or 256: 1 or 2 for each thread of a warpgroup")
        if self.rows < 1 or self.segment < 1 or self.segment % self.rows:
            raise ValueError(f"{self.segment=} must be a multiple of {self.rows=}, both at least 1")

    @property
    def channels_per_thread(self) -> int:
        return self.channels // THREADS

    @classmethod
    def of(cls, problem: Problem, pass_: Pass) -> HopperTiles:
        """As many channels as divide all. The backward loads x and d_y."""
        each = next(n for n in _CHANNELS_PER_THREAD if problem.channels % (THREADS * n) == 0)
        row = each * problem.dtype.itemsize * (1 if pass_ == "forward" else 2)
        return cls(THREADS * each, min(_MOST_ROWS, _BYTES_LOADED_AT_A_TIME // row))

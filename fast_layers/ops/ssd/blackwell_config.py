"""Tile choices of Blackwell's scan: frozen, self-rejecting. None of them has been timed."""

from __future__ import annotations

import dataclasses

from fast_layers.ops.ssd.problem import Problem

BLACKWELL_SMEM_BYTES = 227 << 10
BLACKWELL_TMEM_COLUMNS = 512
BLACKWELL_ROWS = 128
"""Lanes of tensor memory, rows of one matmul, and so tokens of a chunk."""
HEAD_DIMS = (32, 64, 128)
STATE_DIMS = (16, 32, 64, 96, 128)
COMPUTE_WGS = 2
WEIGHT_BUFFERS = 2
_DEEPEST_RING = 4
_WANTED_BLOCKS = 2 * 148
"""Of the backward's kernels of one chunk, twice a B200's multiprocessors: of fewer, the last ones' time would count."""


def unit_channels(head_dim: int) -> int:
    """Of one head, that the backward's kernels of one chunk take at a time: 128 have no room in tensor memory."""
    return min(head_dim, 64)


@dataclasses.dataclass(frozen=True)
class BlackwellForwardTiles:
    """The forward kernel's shape: a block has `heads` of one group, of `head_dim` channels each, at most 128 in all;
    `stages` slots for B and C, `x_stages` for what the heads have of their own."""

    heads: int
    head_dim: int
    stages: int = 1
    x_stages: int = 1

    def __post_init__(self):
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"{self.head_dim=} must be one of {HEAD_DIMS}")
        if self.heads not in (1, 2, 4) or self.panel > BLACKWELL_ROWS:
            raise ValueError(
                f"{self.heads=} must be 1, 2 or 4, with {self.head_dim=} at most {BLACKWELL_ROWS} channels"
            )
        if self.stages < 1 or self.x_stages < 1:
            raise ValueError(f"{self.stages=} and {self.x_stages=} must be at least 1")

    @property
    def panel(self) -> int:
        """Channels of a block."""
        return self.heads * self.head_dim

    @property
    def piece(self) -> int:
        """Channels that are loaded, stored and finished at a time: of one head, and as many for each warpgroup."""
        return min(self.head_dim, self.panel // COMPUTE_WGS, 64)

    @property
    def weight_buffers(self) -> int:
        return min(self.heads, WEIGHT_BUFFERS)

    @property
    def compute_registers(self) -> int:
        """Per thread, as the other two: what a block is launched with, dealt out anew in steps of 8."""
        return 152

    @property
    def state_registers(self) -> int:
        """More where a block has less than 128 channels: with states of 96 two of 80 were spilled."""
        return 80 if self.panel == BLACKWELL_ROWS else 96

    @property
    def issue_registers(self) -> int:
        """Of the load warpgroup and of the matmul warpgroup: what the others leave."""
        return 48 if self.panel == BLACKWELL_ROWS else 40

    def tmem_columns(self, state_dim: int) -> int:
        """Scores, weights in 16 bits, out, state."""
        return BLACKWELL_ROWS + self.weight_buffers * BLACKWELL_ROWS // 2 + self.panel + state_dim

    def smem_bytes(self, state_dim: int, gated: bool) -> int:
        """Of 16-bit tiles and the factors of decay; barriers and documents take less than the last 2 KiB."""
        rows = BLACKWELL_ROWS
        loaded = 2 * rows * (self.stages * 2 * state_dim + self.x_stages * (1 + gated) * self.panel)
        kept = 2 * rows * (rows + state_dim)
        factors = self.x_stages * self.heads * 4 * 4 * rows
        return loaded + kept + factors + (2 << 10)

    @classmethod
    def of(cls, problem: Problem) -> BlackwellForwardTiles:
        """As many heads as share a panel evenly; then what is loaded a chunk ahead, x before B and C."""
        p = problem
        heads = next(n for n in (4, 2, 1) if n * p.head_dim <= BLACKWELL_ROWS and p.heads_per_group % n == 0)
        choices = (cls(heads, p.head_dim, *stages) for stages in ((2, 2), (1, 2), (2, 1), (1, 1)))
        return next(tiles for tiles in choices if tiles.smem_bytes(p.state_dim, p.gated) <= BLACKWELL_SMEM_BYTES)


@dataclasses.dataclass(frozen=True)
class BlackwellStateTiles:
    """The shape of the kernel of the states between chunks: panels as the forward's, `stages` chunks on their way."""

    heads: int
    head_dim: int
    stages: int = 2

    def __post_init__(self):
        BlackwellForwardTiles(self.heads, self.head_dim, self.stages)

    @property
    def panel(self) -> int:
        return self.heads * self.head_dim

    @property
    def piece(self) -> int:
        """Channels that are loaded at a time, of one head."""
        return min(self.head_dim, 64)

    @property
    def compute_registers(self) -> int:
        """Per thread, as the other; a block is launched with 128 for each."""
        return 200

    @property
    def issue_registers(self) -> int:
        return 56

    def smem_bytes(self, state_dim: int) -> int:
        """Of 16-bit tiles and the factors of decay; barriers and alignment take less than the last 4 KiB."""
        rows = BLACKWELL_ROWS
        stage = 2 * rows * (state_dim + self.panel) + self.heads * 2 * 4 * rows
        kept = 2 * rows * (state_dim + rows)
        return self.stages * stage + kept + (4 << 10)

    @classmethod
    def of(cls, problem: Problem) -> BlackwellStateTiles:
        """The forward's heads, and as deep a ring as fits."""
        p = problem
        heads = BlackwellForwardTiles.of(p).heads
        rings = (cls(heads, p.head_dim, stages) for stages in range(_DEEPEST_RING, 0, -1))
        return next(tiles for tiles in rings if tiles.smem_bytes(p.state_dim) <= BLACKWELL_SMEM_BYTES)


@dataclasses.dataclass(frozen=True)
class BlackwellBackwardTiles:
    """The shape of the backward's kernels of one chunk each: `stages` units of at most 64 channels of one head on their
    way from memory, and a group's units in `slices`, each with a block, and its share of the gradients of B and C, of
    its own."""

    stages: int = 2
    slices: int = 1

    def __post_init__(self):
        if self.stages < 2:
            raise ValueError(f"{self.stages=} must be at least 2: a unit's pairs are multiplied during the one before")
        if self.slices < 1:
            raise ValueError(f"{self.slices=} must be at least 1")

    @property
    def pair_registers(self) -> int:
        """Per thread, as the other two: what a block is launched with, dealt out anew in steps of 8."""
        return 152

    @property
    def channel_registers(self) -> int:
        return 128

    @property
    def multiply_registers(self) -> int:
        return 80

    def tmem_columns(self, head_dim: int, state_dim: int) -> int:
        """Pairs, inter and sums; then of the kernel of columns scores, and weights in 16 bits, of that of rows what
        passes, or weights before, and a triangle in 16 bits."""
        rows = BLACKWELL_ROWS
        return rows + unit_channels(head_dim) + state_dim + rows + rows // 2

    def smem_bytes(self, head_dim: int, state_dim: int) -> int:
        """Of either kernel at most: 16-bit tiles, and the factors of decay; barriers, documents and
        alignment take less than the last 4 KiB."""
        rows, channels = BLACKWELL_ROWS, unit_channels(head_dim)
        stage = 2 * (2 * rows * channels + channels * state_dim) + 6 * 4 * rows
        columns = 2 * rows * state_dim + rows * rows
        by_rows = rows * state_dim + rows * max(2 * rows, state_dim)
        return self.stages * stage + 2 * (max(columns, by_rows) + rows * channels) + (4 << 10)

    @classmethod
    def of(cls, problem: Problem) -> BlackwellBackwardTiles:
        """As deep a ring as fits. As few slices as give each multiprocessor some blocks, since each writes sums of its
        own for XLA to add."""
        p = problem
        rings = (cls(stages) for stages in range(_DEEPEST_RING, 1, -1))
        fitting = next(tiles for tiles in rings if tiles.smem_bytes(p.head_dim, p.state_dim) <= BLACKWELL_SMEM_BYTES)
        units = p.heads_per_group * (p.head_dim // unit_channels(p.head_dim))
        blocks = p.batch * -(-p.length // BLACKWELL_ROWS) * p.groups
        slices = (n for n in range(1, units + 1) if units % n == 0 and (n * blocks >= _WANTED_BLOCKS or n == units))
        return cls(fitting.stages, next(slices))

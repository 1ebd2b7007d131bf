"""Tile choices of the kernels: frozen, self-rejecting, with the legality written once."""

from __future__ import annotations

import dataclasses

from fast_layers.ops.ssd.problem import Problem

HOPPER_SMEM_BYTES = 227 << 10
"""Shared memory that one block may have."""
ROWS = 64
"""Of one warpgroup's wgmma: tokens of a chunk, and channels of a panel."""
HEAD_DIMS = (32, 64, 128)
STATE_DIMS = (16, 32, 64, 128)
_DEEPEST_RING = 4


def panels(head_dim: int) -> int:
    """Of 64 channels each, of one head; 32 channels are padded."""
    return -(-head_dim // ROWS)


def padded_state(state_dim: int) -> int:
    """wgmma wants both its operands in rows of as many bytes, and those of x are 64 channels long."""
    return max(state_dim, ROWS)


@dataclasses.dataclass(frozen=True)
class HopperForwardTiles:
    """The forward kernel's shape: `compute_wgs` warpgroups, each with a panel of 64 channels of one head and all heads
    of one group, and `stages` chunks on their way from memory."""

    compute_wgs: int
    stages: int = 2

    def __post_init__(self):
        if self.compute_wgs not in (1, 2):
            raise ValueError(f"{self.compute_wgs=} must be 1 or 2: a third would leave too few registers for the state")
        if self.stages < 2:
            raise ValueError(f"{self.stages=} must be at least 2, or nothing is loaded while a chunk is computed")

    @property
    def compute_registers(self) -> int:
        """Per thread. What a block is launched with is dealt out anew, in steps of 8; a block that asks for more waits
        for ever."""
        return {1: 240, 2: 224}[self.compute_wgs]

    @property
    def load_registers(self) -> int:
        return {1: 208, 2: 56}[self.compute_wgs]

    def smem_bytes(self, state_dim: int, gated: bool) -> int:
        """Of 16-bit tiles; the factors of decay and the barriers take less than the last 8 KiB."""
        state_dim = padded_state(state_dim)
        own = (1 + gated) * ROWS
        stage = ROWS * (2 * state_dim + self.compute_wgs * own)
        kept = self.compute_wgs * ROWS * (state_dim + 2 * ROWS)
        return 2 * (self.stages * stage + kept) + (8 << 10)

    @classmethod
    def of(cls, problem: Problem) -> HopperForwardTiles:
        """Two warpgroups where a group's panels are even and all fits; then as deep a ring as fits."""
        p = problem
        even = p.heads_per_group * panels(p.head_dim) % 2 == 0
        choices = [(wgs, stages) for wgs in ((2, 1) if even else (1,)) for stages in range(_DEEPEST_RING, 1, -1)]
        fitting = (cls(*choice) for choice in choices)
        return next(tiles for tiles in fitting if tiles.smem_bytes(p.state_dim, p.gated) <= HOPPER_SMEM_BYTES)

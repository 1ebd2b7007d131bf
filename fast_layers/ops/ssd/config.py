"""Tile choices of the kernels: frozen, self-rejecting, with the legality written once."""

from __future__ import annotations

import dataclasses
import heapq
import math

from fast_layers.ops.ssd.problem import Problem

HOPPER_SMEM_BYTES = 227 << 10
"""Shared memory that one block may have."""
ROWS = 64
"""Of one warpgroup's wgmma: tokens of a chunk, and channels of a panel."""
HEAD_DIMS = (32, 64, 128)
STATE_DIMS = (16, 32, 64, 128, 256)
FORWARD_FACTORS, BACKWARD_FACTORS = 4, 6
"""Of a chunk and head: what the passes read of the decays, a float32 for each token each (`hopper_call.by_head`)."""
SPAN = 128
"""Of a state, the most that a warpgroup takes: of a panel's state in the forward, and of the gradients of B or C in the
backward, its registers hold as many columns."""
_OTHER_SMEM_BYTES = 7 << 10
"""What sums, documents, columns' numbers, barriers and Mosaic's own need take at most, each padded to a KiB."""
_DEEPEST_RING = 4
MULTIPROCESSORS = 132
"""Of an H100 (SXM) and an H200."""
_WANTED_BLOCKS = 2 * MULTIPROCESSORS
"""Of the backward's second kernel: of fewer, the last ones' time would count."""
_FEWEST_CHUNKS = 8
"""Of a split of the sequence."""
_BLOCK_COSTS, _SPLITTING_COSTS, _SPLITS_SQUARED_COSTS = 2, 4, 1 / 512
"""In chunks of what is split, by an H200: a block's start and end; what is launched only because of splits; and, for
each panel of an example and the splits' square (XLA's fusion begins anew for each), carrying states from one to the
next."""
_NEGLIGIBLE = 1.05
"""Such a part of the time is not worth more splits, nor a second launch."""
_LAUNCH_COSTS = 2
"""In chunks, of a second launch."""
_LATE_CHOICES = 64


def panels(head_dim: int) -> int:
    """Of 64 channels each, of one head; 32 channels are padded."""
    return -(-head_dim // ROWS)


def padded_state(state_dim: int) -> int:
    """wgmma wants both its operands in rows of as many bytes, and those of x are 64 channels long."""
    return max(state_dim, ROWS)


def spans(state_dim: int) -> int:
    """Of one state, each with a warpgroup of its own in the forward, and with blocks of its own in the backward."""
    return -(-state_dim // SPAN)


@dataclasses.dataclass(frozen=True)
class HopperForwardTiles:
    """The forward kernel's shape: `compute_wgs` warpgroups, each with a panel of 64 channels of one head and all heads
    of one group, or both with one panel, of whose state each has one of two `spans`; `stages` chunks on their way from
    memory, and the sequence in `splits` with blocks of their own. The last `late_chunks` of the last `late_blocks` are
    left to a second launch."""

    compute_wgs: int
    stages: int = 2
    splits: int = 1
    late_blocks: int = 0
    late_chunks: int = 0

    def __post_init__(self):
        if self.splits < 1:
            raise ValueError(f"{self.splits=} must be at least 1")
        if min(self.late_blocks, self.late_chunks) < 0 or (self.late_blocks == 0) != (self.late_chunks == 0):
            raise ValueError(f"{self.late_blocks=} and {self.late_chunks=} must both be 0 or both at least 1")
        if self.late_blocks and self.splits > 1:
            raise ValueError(f"{self.late_blocks=} must be 0 with {self.splits=}: each split has its own last chunk")
        if self.compute_wgs not in (1, 2):
            raise ValueError(f"{self.compute_wgs=} must be 1 or 2: a third would leave too few registers for the state")
        if self.stages < 2:
            raise ValueError(f"{self.stages=} must be at least 2, or nothing is loaded while a chunk is computed")

    @property
    def compute_registers(self) -> int:
        """Per thread. What a block is launched with is dealt out anew, in steps of 8; a block that asks for more waits
        for ever."""
        return {1: 248, 2: 224}[self.compute_wgs]

    @property
    def load_registers(self) -> int:
        return {1: 200, 2: 56}[self.compute_wgs]

    def panels(self, state_dim: int) -> int:
        """Of one block."""
        count, rest = divmod(self.compute_wgs, spans(state_dim))
        if rest:
            raise ValueError(f"{self.compute_wgs=} must be 2: a state of {state_dim} takes the registers of two")
        return count

    def smem_bytes(self, state_dim: int, gated: bool) -> int:
        """Of tiles of 16 bits, of the factors of decay, and at most of the rest."""
        panels = self.panels(state_dim)
        state_dim = padded_state(state_dim)
        own = (1 + gated) * ROWS + 2 * FORWARD_FACTORS
        stage = ROWS * (2 * state_dim + panels * own)
        kept = ROWS * panels * (state_dim + ROWS)
        return 2 * (self.stages * stage + kept) + _OTHER_SMEM_BYTES

    @classmethod
    def of(cls, problem: Problem) -> HopperForwardTiles:
        """Two panels where a group's are even and all fits; then as deep a ring as fits."""
        p = problem
        count = spans(p.state_dim)
        even = count == 1 and p.heads_per_group * panels(p.head_dim) % 2 == 0
        choices = [(each, stages) for each in ((2, 1) if even else (1,)) for stages in range(_DEEPEST_RING, 1, -1)]
        fitting = (cls(count * each, stages) for each, stages in choices)
        tiles = next(tiles for tiles in fitting if tiles.smem_bytes(p.state_dim, p.gated) <= HOPPER_SMEM_BYTES)
        splits, time = _splits(p, block_panels := tiles.panels(p.state_dim), sweeps=1, states_cost=0.35)
        late_chunks, late_time = _late_chunks(-(-p.length // ROWS), _blocks(p, block_panels))
        if late_time * _NEGLIGIBLE < time:
            return dataclasses.replace(tiles, late_blocks=MULTIPROCESSORS, late_chunks=late_chunks)
        return dataclasses.replace(tiles, splits=splits)


def _blocks(p: Problem, block_panels: int) -> int:
    return p.batch * p.heads * panels(p.head_dim) // block_panels


def _late_chunks(chunks: int, blocks: int) -> tuple[int, float]:
    """With one late block for each multiprocessor: its chunks, so that all end as early as they can, and when that is,
    in chunks in turn."""

    def chunks_in_turn(late: int) -> float:
        whole, early = chunks + _BLOCK_COSTS, chunks - late + _BLOCK_COSTS
        turns, more = divmod(blocks - MULTIPROCESSORS, MULTIPROCESSORS)
        ends = [turns * whole] * (MULTIPROCESSORS - more) + [(turns + 1) * whole] * more
        for _ in range(MULTIPROCESSORS):
            heapq.heapreplace(ends, ends[0] + early)
        return max(ends) + late + _BLOCK_COSTS + _LAUNCH_COSTS

    if blocks < MULTIPROCESSORS or chunks < 2 * _FEWEST_CHUNKS:
        return 0, math.inf
    step = max(chunks // _LATE_CHOICES, 1)
    times = {late: chunks_in_turn(late) for late in range(_FEWEST_CHUNKS, chunks - _FEWEST_CHUNKS + 1, step)}
    return min(times.items(), key=lambda choice: choice[1])


def _splits(p: Problem, block_panels: int, sweeps: int, states_cost: float) -> tuple[int, float]:
    """The fewest with which all blocks are expected to end as early as they can, and when that is, in chunks in turn.
    What each but the last adds to a state is found before, of which a chunk takes `states_cost` of a chunk of what is
    split."""
    chunks = -(-p.length // ROWS)
    blocks = sweeps * _blocks(p, block_panels)

    def chunks_in_turn(splits: int) -> float:
        one = -(-chunks // splits) + _BLOCK_COSTS
        scan, states = (-(-n * blocks // MULTIPROCESSORS) * one for n in (splits, splits - 1))
        if splits == 1:
            return scan
        return (
            scan + states_cost * states + _SPLITTING_COSTS + _SPLITS_SQUARED_COSTS * splits**2 * blocks * block_panels
        )

    times = [chunks_in_turn(n) for n in range(1, min(max(chunks // _FEWEST_CHUNKS, 1), MULTIPROCESSORS) + 1)]
    return next((n, time) for n, time in enumerate(times, 1) if time <= _NEGLIGIBLE * min(times))


@dataclasses.dataclass(frozen=True)
class HopperStateTiles:
    """The shape of the kernel of the states between chunks: as the forward's, with less to hold."""

    compute_wgs: int
    stages: int = 2
    splits: int = 1

    def __post_init__(self):
        if self.splits < 1:
            raise ValueError(f"{self.splits=} must be at least 1")
        if self.compute_wgs not in (1, 2):
            raise ValueError(f"{self.compute_wgs=} must be 1 or 2: a third would leave too few registers for the state")
        if self.stages < 2:
            raise ValueError(f"{self.stages=} must be at least 2, or nothing is loaded while a chunk is computed")

    compute_registers = HopperForwardTiles.compute_registers
    load_registers = HopperForwardTiles.load_registers

    def smem_bytes(self, state_dim: int) -> int:
        """As `HopperForwardTiles.smem_bytes`."""
        state_dim = padded_state(state_dim)
        stage = ROWS * (state_dim + self.compute_wgs * (ROWS + 2 * BACKWARD_FACTORS))
        kept = self.compute_wgs * ROWS * (state_dim + 2 * ROWS)
        return 2 * (self.stages * stage + kept) + _OTHER_SMEM_BYTES

    @classmethod
    def of(cls, problem: Problem) -> HopperStateTiles:
        """Two warpgroups where a group's panels are even."""
        wgs = 2 if problem.heads_per_group * panels(problem.head_dim) % 2 == 0 else 1
        splits, _ = _splits(problem, wgs, sweeps=2, states_cost=0.85)
        return cls.fitting(wgs, problem.state_dim, splits)

    @classmethod
    def fitting(cls, compute_wgs: int, state_dim: int, splits: int) -> HopperStateTiles:
        """As deep a ring as fits."""
        rings = (cls(compute_wgs, stages, splits) for stages in range(_DEEPEST_RING, 1, -1))
        return next(tiles for tiles in rings if tiles.smem_bytes(state_dim) <= HOPPER_SMEM_BYTES)


@dataclasses.dataclass(frozen=True)
class HopperBackwardTiles:
    """The backward kernel's shape: `stages` panels on their way from memory, and a group's panels in `slices`, each
    with blocks, one for each of a state's `spans`, and its share of the gradients of B and C, of its own."""

    stages: int = 2
    slices: int = 1

    def __post_init__(self):
        if self.stages < 2:
            raise ValueError(f"{self.stages=} must be at least 2, or nothing is loaded while a panel is computed")
        if self.slices < 1:
            raise ValueError(f"{self.slices=} must be at least 1")

    def smem_bytes(self, state_dim: int, gated: bool) -> int:
        """As `HopperForwardTiles.smem_bytes`. Of several spans, the outputs that a gate wants go to memory at once."""
        count = spans(state_dim)
        state_dim = padded_state(state_dim) // count
        stage = ROWS * (2 * ROWS + 2 * state_dim + 2 * BACKWARD_FACTORS)
        kept = ROWS * (2 * state_dim + (10 + (gated and count == 1)) * ROWS)
        return 2 * (self.stages * stage + kept) + _OTHER_SMEM_BYTES

    @classmethod
    def of(cls, problem: Problem) -> HopperBackwardTiles:
        """As deep a ring as fits. As few slices as give each multiprocessor some blocks, since each writes sums of its
        own for XLA to add."""
        p = problem
        rings = (cls(stages) for stages in range(_DEEPEST_RING, 1, -1))
        fitting = next(tiles for tiles in rings if tiles.smem_bytes(p.state_dim, p.gated) <= HOPPER_SMEM_BYTES)
        units = p.heads_per_group * panels(p.head_dim)
        blocks = p.batch * -(-p.length // ROWS) * p.groups * spans(p.state_dim)
        slices = (n for n in range(1, units + 1) if units % n == 0 and (n * blocks >= _WANTED_BLOCKS or n == units))
        return cls(fitting.stages, next(slices))

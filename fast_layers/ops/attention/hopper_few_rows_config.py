"""Tiles of attention's forward of few rows on Hopper: frozen, self-rejecting, with the legality written once."""

from __future__ import annotations

import dataclasses
import math

from fast_layers.ops.attention.config import (
    HOPPER_SMEM_BYTES,
    HOPPER_SMS,
    PART_COLUMNS,
    SWIZZLED_COLUMNS,
    TMA_COLUMNS,
)
from fast_layers.ops.attention.kernel_operands import padded_depth, round_up
from fast_layers.ops.attention.problem import Problem

_EIGHT = 8
"""Columns of wgmma's products come in multiples of it."""
_MOST_COLUMNS = 32
_FEW_COLUMNS, _DEPTH_OF_MANY = 16, 128
"""More columns are taken up to this depth. A step of them takes longer to compute than to load, which others hide where
several blocks share an SM."""
_FEWEST_SWIZZLED_COLUMNS = 32
_MOST_PLAIN_KEYS = 32_768
"""Of all heads, where depths are over `_TIMED_PLAIN_DEPTH`."""
_TIMED_PLAIN_DEPTH = 80
_RESERVED_BYTES = 1 << 10
"""Of an SM's shared memory, for each block."""
_STEP_BYTES = 32 << 10
"""Of keys and values, at most, where a step of 64 keys has fewer: two blocks of three such steps share an SM, or three
of two."""
_MANY_ROUNDS = 7
"""Of a block on each SM: with two slots, mostly three blocks on each at a time, they are 1 to 4 % faster then. Of fewer
it depends on the last."""
_MOST_KEYS_OF_THREE = 4096
"""For three blocks on an SM. At 16,384 keys one block with as much on its way was 1 % faster."""
_MOST_SPLITS = HOPPER_SMS // 2
_MOST_IN_CLUSTER = 8
"""Blocks, that any GPU of this kind runs as a cluster (CUDA C++ Programming Guide, "Thread Block Clusters")."""
# Measured on an H200 (bench/NOTES.md). The unit is a step's time in a block that has an SM to itself, where not all SMs
# load.
_ALL_SMS = 1.365
"""Of a step of one block on each SM."""
_START = 0.5
"""Of a block's first loads."""
_SPLITTING_COST, _PARTS_AT_ONCE, _EACH_COST = 3, 16, 0.75
"""Of storing parts and putting them together, and of each so many parts of a head."""
_JOINING_COST = 2.75
"""Of that in a cluster; less than its kernels alone show, as the launch of a second is in none."""
_WIDE_STEP_BYTES = 2 * _STEP_BYTES
_WIDER, _MORE_COLUMNS, _MORE_COLUMNS_IN_TWO_SLOTS = 0.29, 0.03, 0.08
"""How much longer a step takes a block that has an SM to itself, with as many keys again, and with as many columns as
there are at least; and with those where less is on its way meanwhile."""
_UNEVEN = 1.1
"""Likewise where blocks of clusters share SMs, or pairs of SMs, while others have none."""
_NEARLY_ALL = 0.9
"""Of the SMs, from which on pairs of blocks are on all pairs of SMs."""
_MOST_ALONE = 64
"""Blocks of clusters of more than two, so large that each has an SM to itself: all run at the same time."""


def takes(problem: Problem) -> bool:
    """Whether the call has few queries with few heads to a key/value head, of depths for which the cache needs no copy,
    and nothing for each score."""
    p = problem
    most = _MOST_COLUMNS if max(p.qk_dim, p.v_dim) <= _DEPTH_OF_MANY else _FEW_COLUMNS
    whole = p.qk_dim % TMA_COLUMNS == p.v_dim % TMA_COLUMNS == 0
    return p.q_len * p.group <= most and whole and not p.per_score and not _loads_slowly(p)


def _loads_slowly(problem: Problem) -> bool:
    """Whether few blocks would go through many deep keys in plain rows, which were timed at depth 80 alone: there they
    were 10 to 15 % faster than the kernel for all forwards, and before rows stood apart up to 12 % slower."""
    p = problem
    deep, heads = max(p.qk_dim, p.v_dim) > _TIMED_PLAIN_DEPTH, p.batch * p.kv_heads
    return _has_plain_rows(p) and deep and heads <= _MOST_ALONE and heads * p.kv_len > _MOST_PLAIN_KEYS


def _has_plain_rows(problem: Problem) -> bool:
    return not (is_swizzled(problem.qk_dim) and is_swizzled(problem.v_dim))


def is_swizzled(depth: int) -> bool:
    """Whether keys or values of this depth lie in swizzled tiles, else in plain rows.

    Of an odd multiple of 16 such tiles are so narrow that copies take longer: TMA takes its time for each row of a
    tile. Plain rows of an even one would have threads wait for the same banks of shared memory.
    """
    return depth % _FEWEST_SWIZZLED_COLUMNS == 0


def whole_depth(depth: int) -> int:
    """As many columns as can be rows of wgmma's products."""
    return padded_depth(depth, SWIZZLED_COLUMNS)


@dataclasses.dataclass(frozen=True)
class HopperFewRowsTiles:
    """The kernel's shape: `columns` hold all rows of a key/value head, `kv_tile` keys a step, `stages` slots for keys
    and values each, `splits` parts of the keys that they see, a block for each. Parts `in_cluster` are put together by
    their blocks, others by a second kernel. Plain `rows_apart` have no two of eight wait for the same banks of shared
    memory, but take TMA longer: few blocks wait for the former, and many for the latter."""

    columns: int
    kv_tile: int = 64
    stages: int = 2
    splits: int = 1
    in_cluster: bool = False
    rows_apart: bool = False

    def __post_init__(self):
        if self.columns % _EIGHT or not 0 < self.columns <= _MOST_COLUMNS:
            raise ValueError(f"{self.columns=} must be a multiple of {_EIGHT}, {_MOST_COLUMNS} at most")
        if self.kv_tile not in (64, 128):
            raise ValueError(f"{self.kv_tile=} must be 64 or 128: keys are rows of wgmma's products")
        if self.stages < 1 or self.splits < 1:
            raise ValueError(f"{self.stages=} and {self.splits=} must be at least 1")
        if self.in_cluster and not 1 < self.splits <= _MOST_IN_CLUSTER:
            raise ValueError(f"{self.splits=} must be 2 to {_MOST_IN_CLUSTER} in a cluster")

    # As of other forwards, for `forward_parts`.
    blocks = 0

    @property
    def q_tile(self) -> int:
        return self.columns

    @property
    def leaves_parts(self) -> bool:
        """In the GPU's memory, for a second kernel."""
        return self.splits > 1 and not self.in_cluster

    def out_columns(self, v_dim: int) -> int:
        """Of a row of out in shared memory."""
        return round_up(v_dim, PART_COLUMNS) if self.in_cluster else whole_depth(v_dim)

    def slot_columns(self, depth: int) -> int:
        """Of keys or values in shared memory. Eight more, which TMA fills with zeros, put plain rows an odd multiple of
        16 bytes apart."""
        return depth + _EIGHT if self.rows_apart and not is_swizzled(depth) else depth

    def rows_joined(self, rows: int) -> int:
        """Those that a block of a cluster puts together, of so many in all."""
        return math.ceil(rows / self.splits)

    def smem_bytes(self, qk_dim: int, v_dim: int) -> int:
        """The last for barriers, a row of lse and what warps exchange."""
        slots = self.stages * self.kv_tile * (self.slot_columns(qk_dim) + self.slot_columns(v_dim))
        inputs = 2 * (2 * self.columns * whole_depth(qk_dim) + slots)
        out_bytes, out_columns = 4 if self.splits > 1 else 2, self.out_columns(v_dim)
        joined = 2 * self.rows_joined(self.columns) * out_columns if self.in_cluster and out_columns > v_dim else 0
        return inputs + self.columns * (2 * self.kv_tile + out_bytes * out_columns) + joined + (2 << 10)

    def _blocks_per_sm(self, qk_dim: int, v_dim: int) -> int:
        return (HOPPER_SMEM_BYTES + _RESERVED_BYTES) // (self.smem_bytes(qk_dim, v_dim) + _RESERVED_BYTES)

    def _duration(self, problem: Problem, wide: float = 1) -> float:
        """In the time of a block's step; `wide`: how many times as long memory takes for a step as for one of
        `_STEP_BYTES`."""
        p, all_sms = problem, _ALL_SMS * wide
        steps = _START + math.ceil(math.ceil(p.kv_len / self.kv_tile) / self.splits)
        joining = _SPLITTING_COST + _EACH_COST * math.ceil(self.splits / _PARTS_AT_ONCE) if self.splits > 1 else 0
        blocks, per_sm = p.batch * p.heads * self.splits, self._blocks_per_sm(p.qk_dim, p.v_dim)
        if blocks <= HOPPER_SMS:
            return max(1, all_sms * blocks / HOPPER_SMS) * steps + joining
        full, rest = divmod(blocks, per_sm * HOPPER_SMS)
        shared = all_sms * rest / HOPPER_SMS
        # In the last round some SMs have a block more. The more rounds, the less do they begin it together.
        uneven = max(math.ceil(rest / HOPPER_SMS) - shared, 0) / (2 * (1 + full))
        return (all_sms * per_sm * full + shared + uneven) * steps + joining

    def _duration_in_cluster(self, problem: Problem) -> float:
        """Likewise; of blocks that all run at the same time."""
        p, wide = problem, self._wide(problem)
        blocks, alone = p.batch * p.heads * self.splits, self._blocks_per_sm(p.qk_dim, p.v_dim) == 1
        more_columns = _MORE_COLUMNS if self.stages > 2 else _MORE_COLUMNS_IN_TWO_SLOTS
        step = 1 + _WIDER * (wide - 1) + more_columns * (self.columns // _EIGHT - 1)
        step = max(step, _ALL_SMS * wide * blocks / HOPPER_SMS)
        uneven = not alone
        if self.splits == 2:
            uneven = blocks <= _MOST_ALONE or (alone and blocks < _NEARLY_ALL * HOPPER_SMS)
        steps = _START + math.ceil(math.ceil(p.kv_len / self.kv_tile) / self.splits)
        return step * (_UNEVEN if uneven else 1) * steps + _JOINING_COST

    def _wide(self, problem: Problem) -> float:
        """How many times as long memory takes for a step as for one of `_STEP_BYTES`."""
        return max(1, self.kv_tile * _bytes_per_key(problem) / _STEP_BYTES)

    def _runs_at_once(self, problem: Problem) -> bool:
        """Whether all blocks of all clusters do."""
        p = problem
        blocks, per_sm = p.batch * p.heads * self.splits, self._blocks_per_sm(p.qk_dim, p.v_dim)
        return per_sm > 0 and blocks <= (_MOST_ALONE if per_sm == 1 and self.splits > 2 else HOPPER_SMS)

    @classmethod
    def of(cls, problem: Problem) -> HopperFewRowsTiles:
        """For the problem as the kernel sees it, with heads packed into rows."""
        p, apart = problem, cls._apart(problem)
        joined = min(apart._in_clusters(p), key=lambda x: x._duration_in_cluster(p), default=apart)
        gains = joined.in_cluster and joined._duration_in_cluster(p) < apart._duration(p, apart._wide(p))
        return joined if gains else apart

    @classmethod
    def _apart(cls, problem: Problem) -> HopperFewRowsTiles:
        """The fastest that is no cluster."""
        p, columns, blocks = problem, round_up(problem.q_len, _EIGHT), problem.batch * problem.heads
        narrow = columns <= _FEW_COLUMNS
        kv_tile = 128 if narrow and 128 * _bytes_per_key(p) <= _STEP_BYTES else 64
        many = blocks >= _MANY_ROUNDS * HOPPER_SMS if narrow else blocks > HOPPER_SMS
        tiles = cls(columns, kv_tile, rows_apart=not many and _has_plain_rows(p))
        three_blocks = narrow and tiles._blocks_per_sm(p.qk_dim, p.v_dim) > 2
        crowded = many and three_blocks and p.kv_len > _MOST_KEYS_OF_THREE
        if crowded and _STEP_BYTES < 128 * _bytes_per_key(p) <= _WIDE_STEP_BYTES:
            tiles = dataclasses.replace(tiles, kv_tile=128)
        elif (crowded or not many) and kv_tile * _bytes_per_key(p) <= _STEP_BYTES:
            tiles = dataclasses.replace(tiles, stages=3)
        most = min(_MOST_SPLITS, math.ceil(p.kv_len / tiles.kv_tile))
        return min((dataclasses.replace(tiles, splits=n) for n in range(1, most + 1)), key=lambda x: x._duration(p))

    def _in_clusters(self, problem: Problem) -> list[HopperFewRowsTiles]:
        """Clusters of such blocks, and of larger ones that have an SM each."""
        p, shapes = problem, [self]
        if self.columns <= _FEW_COLUMNS:
            wide_tile = 128 if 128 * _bytes_per_key(p) <= _WIDE_STEP_BYTES else 64
            shapes = [dataclasses.replace(self, kv_tile=wide_tile, stages=3), self]
        found = [
            dataclasses.replace(shape, splits=n, in_cluster=True)
            for shape in shapes
            for n in (2, 4, _MOST_IN_CLUSTER)
            if n <= math.ceil(p.kv_len / shape.kv_tile)
        ]
        return [tiles for tiles in found if tiles._runs_at_once(p)]


def _bytes_per_key(problem: Problem) -> int:
    return 2 * (problem.qk_dim + problem.v_dim)

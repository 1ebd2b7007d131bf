"""Tiles of attention's forward of few rows on Hopper: frozen, self-rejecting, with the legality written once."""

from __future__ import annotations

import dataclasses
import math

from fast_layers.ops.attention import split_kv
from fast_layers.ops.attention.config import HOPPER_SMEM_BYTES, HOPPER_SMS, SWIZZLED_COLUMNS
from fast_layers.ops.attention.kernel_operands import round_up
from fast_layers.ops.attention.problem import Problem

_EIGHT = 8
"""Columns of wgmma's products come in multiples of it."""
_MOST_COLUMNS = 32
_COLUMNS_ALONE, _MANY_BLOCKS, _DEPTH_OF_MANY = 16, 512, 128
"""Of more columns a step takes longer to compute than to load, which others hide where several blocks share an SM: from
so many on, and up to this depth."""
_RESERVED_BYTES = 1 << 10
"""Of an SM's shared memory, for each block."""
_STEP_BYTES = 32 << 10
"""Of keys and values, at most, where a step of 64 keys has fewer: two blocks of three such steps share an SM, or three
of two."""
_MANY_ROUNDS = 7
"""Of a block on each SM: three on each at a time are 1 to 4 % faster then. Of fewer it depends on the last."""
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


def takes(problem: Problem) -> bool:
    """Whether the call has few queries with few heads to a key/value head, of depths in whole tiles, and nothing for
    each score."""
    p = problem
    blocks, depth = p.batch * p.kv_heads, max(p.qk_dim, p.v_dim)
    most = _MOST_COLUMNS if blocks >= _MANY_BLOCKS and depth <= _DEPTH_OF_MANY else _COLUMNS_ALONE
    whole = p.qk_dim % SWIZZLED_COLUMNS == p.v_dim % SWIZZLED_COLUMNS == 0
    return p.q_len * p.group <= most and whole and not p.per_score


@dataclasses.dataclass(frozen=True)
class HopperFewRowsTiles:
    """The kernel's shape: `columns` hold all rows of a key/value head, `kv_tile` keys a step, `stages` slots for keys
    and values each, `splits` parts of the keys that they see, a block for each. Parts `in_cluster` are put together by
    their blocks, others by a second kernel."""

    columns: int
    kv_tile: int = 64
    stages: int = 2
    splits: int = 1
    in_cluster: bool = False

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
        return round_up(v_dim, split_kv.COLUMNS) if self.in_cluster else v_dim

    def rows_joined(self, rows: int) -> int:
        """Those that a block of a cluster puts together, of so many in all."""
        return math.ceil(rows / self.splits)

    def smem_bytes(self, qk_dim: int, v_dim: int) -> int:
        """The last for barriers, a row of lse and what warps exchange."""
        inputs = 2 * (2 * self.columns * qk_dim + self.stages * self.kv_tile * (qk_dim + v_dim))
        out_bytes, out_columns = 4 if self.splits > 1 else 2, self.out_columns(v_dim)
        joined = 2 * self.rows_joined(self.columns) * out_columns if self.in_cluster else 0
        return inputs + self.columns * (2 * self.kv_tile + out_bytes * out_columns) + joined + (2 << 10)

    def _blocks_per_sm(self, qk_dim: int, v_dim: int) -> int:
        return (HOPPER_SMEM_BYTES + _RESERVED_BYTES) // (self.smem_bytes(qk_dim, v_dim) + _RESERVED_BYTES)

    def _duration(self, problem: Problem) -> float:
        """In the time of a block's step."""
        p = problem
        steps = _START + math.ceil(math.ceil(p.kv_len / self.kv_tile) / self.splits)
        joining = _SPLITTING_COST + _EACH_COST * math.ceil(self.splits / _PARTS_AT_ONCE) if self.splits > 1 else 0
        blocks, per_sm = p.batch * p.heads * self.splits, self._blocks_per_sm(p.qk_dim, p.v_dim)
        if blocks <= HOPPER_SMS:
            return max(1, _ALL_SMS * blocks / HOPPER_SMS) * steps + joining
        full, rest = divmod(blocks, per_sm * HOPPER_SMS)
        shared = _ALL_SMS * rest / HOPPER_SMS
        # In the last round some SMs have a block more. The more rounds, the less do they begin it together.
        uneven = max(math.ceil(rest / HOPPER_SMS) - shared, 0) / (2 * (1 + full))
        return (_ALL_SMS * per_sm * full + shared + uneven) * steps + joining

    @classmethod
    def of(cls, problem: Problem) -> HopperFewRowsTiles:
        """For the problem as the kernel sees it, with heads packed into rows."""
        p = problem
        bytes_per_key = 2 * (p.qk_dim + p.v_dim)
        columns = round_up(p.q_len, _EIGHT)
        narrow = columns <= _COLUMNS_ALONE
        kv_tile = 128 if narrow and 128 * bytes_per_key <= _STEP_BYTES else 64
        many = p.batch * p.heads >= _MANY_ROUNDS * HOPPER_SMS
        stages = 3 if narrow and not many and kv_tile * bytes_per_key <= _STEP_BYTES else 2
        tiles = cls(columns, kv_tile, stages)
        most = min(_MOST_SPLITS, math.ceil(p.kv_len / kv_tile))
        return min((dataclasses.replace(tiles, splits=n) for n in range(1, most + 1)), key=lambda x: x._duration(p))

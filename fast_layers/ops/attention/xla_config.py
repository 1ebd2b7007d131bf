"""Tiles of attention's XLA backend: frozen, self-rejecting."""

from __future__ import annotations

import dataclasses

from fast_layers.arch import Arch
from fast_layers.kernel_parts.dropout import KEYS_PER_BLOCK
from fast_layers.ops.attention.problem import Problem

_SMALLEST_TILE = 64


@dataclasses.dataclass(frozen=True)
class _Budget:
    """`scores`: of one tile, over batch and heads; `tile`: its largest side; `rows`: few queries are filled up to a
    multiple of it."""

    scores: int
    tile: int
    rows: int


# A core's share of the cache (2 MiB of float32); measured, see bench/NOTES.md.
_CPU = _Budget(scores=1 << 19, tile=256, rows=1)
# Few and large steps, since each launches several kernels: 128 MiB of float32. A guess, never timed on a GPU or TPU.
_ACCELERATOR = _Budget(scores=1 << 25, tile=1024, rows=8)


@dataclasses.dataclass(frozen=True)
class XlaTiles:
    """Rows of queries and of keys that the XLA backend handles at once."""

    q_tile: int
    kv_tile: int
    asks_each_tile: bool = False
    """Whether a single tile of queries asks of each tile of keys if any is hidden, and if not spares what keeps NaN of
    hidden keys away. Timed on a CPU alone."""

    def __post_init__(self):
        if self.q_tile < 1:
            raise ValueError(f"{self.q_tile=} must be at least 1")
        if self.kv_tile < 1 or self.kv_tile % KEYS_PER_BLOCK:
            raise ValueError(f"{self.kv_tile=} must be a positive multiple of {KEYS_PER_BLOCK}")

    @classmethod
    def of(cls, problem: Problem, arch: Arch) -> XlaTiles:
        budget = _CPU if arch.platform == "cpu" else _ACCELERATOR
        tile = budget.tile
        if isinstance(problem.batch, int):
            cells = max(problem.batch * problem.heads, 1)
            while tile > _SMALLEST_TILE and cells * tile * tile > budget.scores:
                tile //= 2
        return cls(
            q_tile=_fit(problem.q_len, tile, budget.rows),
            kv_tile=_fit(problem.kv_len, tile, KEYS_PER_BLOCK),
            asks_each_tile=arch.platform == "cpu",
        )


def _fit(length: int, tile: int, multiple: int) -> int:
    """No more rows than there are (a symbolic length takes the tile as it is)."""
    return min(tile, -(-length // multiple) * multiple) if isinstance(length, int) else tile

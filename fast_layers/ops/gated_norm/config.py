"""Tile choices of the kernels: frozen, self-rejecting, with the legality written once."""

from __future__ import annotations

import dataclasses

WARPS = 4
"""Of the one warpgroup that a block has."""
LANES = 32
VECTORS = (4, 2)
"""Features that a thread loads at once: the weight's are float32, of which 16 bytes are the most."""
MOST_PER_LANE = 32
"""Numbers of a row that a warp takes alone; what is longer is split over the four."""
MOST_PER_THREAD = 64
MOST_AT_ONCE = 16
"""Numbers that a thread has of one operand while it computes."""
LEGAL_GROUPS = "multiples of 64 up to 1024, and of 256 up to 8192,"
_BLOCKS = 1056
"""Eight for each multiprocessor of an H100 or H200."""


@dataclasses.dataclass(frozen=True)
class HopperTiles:
    """`rows` at a time, each normalised in a group of `features`, of which a thread has `vector` side by side. A group
    is gone through in `pieces`, or all of its operands would be in registers at once.
    """

    rows: int
    features: int
    vector: int
    pieces: int = 1

    def __post_init__(self):
        if self.rows not in (1, WARPS):
            raise ValueError(f"{self.rows=} must be 1, a row for the warpgroup, or {WARPS}, one for each warp")
        across = self.vector * LANES * (WARPS // self.rows)
        if self.vector not in VECTORS or self.features % (across * self.pieces):
            raise ValueError(
                f"{self.features=} must be a multiple of {across} for each of {self.pieces=}; {self.vector=} 2 or 4"
            )
        if self.per_thread > MOST_PER_THREAD:
            raise ValueError(
                f"{self.features=}: a thread would hold {self.per_thread} of a row, above {MOST_PER_THREAD}"
            )

    @property
    def per_thread(self) -> int:
        return self.features * self.rows // (LANES * WARPS)

    @property
    def piece(self) -> int:
        """Features of one."""
        return self.features // self.pieces

    @classmethod
    def of(cls, group_size: int) -> HopperTiles | None:
        """A warp for each row where it is short enough, and vectors as wide as fit; None where no choice is legal."""
        rows = WARPS if group_size <= MOST_PER_LANE * LANES else 1
        fewest = -(-group_size * rows // (LANES * WARPS * MOST_AT_ONCE))
        for vector in VECTORS:
            for pieces in range(fewest, MOST_PER_THREAD // vector + 1):
                try:
                    return cls(rows, group_size, vector, pieces)
                except ValueError:
                    continue
        return None

    def blocks(self, rows: int, others: int) -> int:
        """Over which `rows` are split, where there are `others` times as many; each has two tiles at least."""
        return max(1, min(_BLOCKS // others, -(-rows // self.rows) // 2))

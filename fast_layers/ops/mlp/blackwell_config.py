"""Tile choices of the MLP's matmul on Blackwell: frozen, self-rejecting. None of them has been timed."""

from __future__ import annotations

import dataclasses
import math

from fast_layers.ops.mlp.config import EpilogueNeeds

BLACKWELL_SMEM_BYTES = 227 << 10
"""Shared memory that one block may have."""
BLACKWELL_TMEM_COLUMNS = 512
BLACKWELL_SMS = 148
ROWS = 128
"""Of one block's tile: the lanes of tensor memory."""
DEPTH_BYTES = 128
"""Of one step: TMA's widest swizzle."""
BUFFERS = 2
"""Of products in tensor memory: one is multiplied into while the epilogue works on the other."""
_COLUMNS = (64, 128, 256)
_MOST_COLUMNS = 256
"""Of one matmul."""
_MOST_STAGES = 8
_ENOUGH_STAGES = 4
_ITEMSIZE = 2
_OPERATIONS_PER_CLOCK = 8192
_SMEM_BYTES_PER_CLOCK = 128
_RESERVED_BYTES = 2048
"""For barriers, for what the compiler keeps for reductions, and lost where arrays begin at multiples of 1024."""


@dataclasses.dataclass(frozen=True)
class BlackwellMatmulTiles:
    """The matmul kernel's shape. No choice among them has been timed.

    `columns` of each product; `stages` slots for operands, each 128 bytes deep; `collective`: two blocks of a cluster
    multiply together, each with half of the rows of one tile and half of what stands on the right; `epilogue_wgs`
    warpgroups, which share the columns; they take `piece` columns at a time, and have `pieces` reads and writes under
    way; `row_group` tiles of rows that are gone through side by side, for the sake of L2, and the next ones backwards.
    """

    columns: int
    stages: int = 4
    collective: bool = True
    epilogue_wgs: int = 2
    piece: int = 32
    pieces: int = 2
    row_group: int = 8

    def __post_init__(self):
        if self.columns not in _COLUMNS:
            raise ValueError(
                f"{self.columns=} must be 64, 128 or 256: tcgen05's widest is 256, and TMA's swizzle is 64"
            )
        if not 2 <= self.stages <= _MOST_STAGES:
            raise ValueError(f"{self.stages=} must be 2 to {_MOST_STAGES}: one multiplied while others are loaded")
        if self.epilogue_wgs not in (1, 2):
            raise ValueError(f"{self.epilogue_wgs=} must be 1 or 2: three would have too few registers")
        if self.piece not in (32, 64):
            raise ValueError(f"{self.piece=} must be 32 or 64: a thread holds that many of a row's numbers")
        if self.pieces not in (1, 2) or self.row_group < 1:
            raise ValueError(f"{self.pieces=} must be 1 or 2, and {self.row_group=} at least 1")
        if self.columns % (self.epilogue_wgs * self.piece * self.pieces):
            raise ValueError(
                f"{self.columns=} must be a multiple of {self.epilogue_wgs=} x {self.pieces=} x {self.piece=}: "
                "warpgroups have equal parts, and use their slots in turn"
            )

    @property
    def ranks(self) -> int:
        """Blocks that multiply together."""
        return 2 if self.collective else 1

    @property
    def tile_rows(self) -> int:
        return self.ranks * ROWS

    @property
    def epilogue_registers(self) -> int:
        """Per thread, as the other: what a block is launched with, dealt out anew in steps of 8."""
        return {1: 248, 2: 184}[self.epilogue_wgs]

    @property
    def issue_registers(self) -> int:
        """Of the two warpgroups that load and multiply."""
        return {1: 128, 2: 72}[self.epilogue_wgs]

    def block_columns(self, products: int) -> int:
        """Of what stands on the right, in one block's shared memory."""
        return products * self.columns // self.ranks

    def matmuls(self, products: int) -> int:
        """In a step: a pair has the columns of all products side by side."""
        return 1 if self.collective else products

    def matmul_columns(self, products: int) -> int:
        return products * self.columns // self.matmuls(products)

    def tmem_columns(self, products: int) -> int:
        return BUFFERS * products * self.columns

    def smem_bytes(self, needs: EpilogueNeeds) -> int:
        stage = DEPTH_BYTES * (ROWS + self.block_columns(needs.products))
        per_column = (needs.reads + needs.writes) * ROWS * _ITEMSIZE + needs.sums * 4
        return self.stages * stage + self.epilogue_wgs * self.pieces * self.piece * per_column + _RESERVED_BYTES

    def objection(self, needs: EpilogueNeeds, operand_bytes: int = 2) -> str | None:
        """Why this shape cannot have such an epilogue, or operands of so many bytes a number."""
        if (columns := needs.products * self.columns) > _MOST_COLUMNS:
            return f"{columns} columns of products exceed {_MOST_COLUMNS}: two buffers fill tensor memory; take fewer"
        if (slot := self.matmul_columns(needs.products) * operand_bytes // self.ranks) < DEPTH_BYTES:
            return f"{slot} bytes of columns in a slot are less than TMA's swizzle of {DEPTH_BYTES}: take more columns"
        if (smem := self.smem_bytes(needs)) > BLACKWELL_SMEM_BYTES:
            return f"{smem} bytes of shared memory exceed {BLACKWELL_SMEM_BYTES}: take fewer stages or pieces"
        return None

    def clocks(self, rows: int, columns: int, products: int) -> int:
        """Of a product's step of 128 bytes, times the rounds that the blocks go: a bound for choosing.

        From the tensor core's rate, and that of shared memory, which TMA writes and the tensor core reads.
        """
        tiles = math.ceil(rows / self.tile_rows) * math.ceil(columns / self.columns)
        rounds = math.ceil(tiles / (BLACKWELL_SMS // self.ranks))
        # Twice as deep with 8 bits, and twice as fast.
        operations = 2 * ROWS * products * self.columns * DEPTH_BYTES // _ITEMSIZE
        written = ROWS + self.block_columns(products)
        read = self.matmuls(products) * ROWS + self.block_columns(products)
        smem = DEPTH_BYTES * (written + read)
        return rounds * max(operations // _OPERATIONS_PER_CLOCK, smem // _SMEM_BYTES_PER_CLOCK)

    @classmethod
    def of(cls, rows: int, columns: int, needs: EpilogueNeeds, operand_bytes: int = 2) -> BlackwellMatmulTiles:
        """For a product of so many rows and columns: the least clocks, and among equals pairs and the widest."""
        possible = (
            cls(width, stages=2, collective=collective, pieces=1)
            for collective in (True, False)
            for width in reversed(_COLUMNS)
        )
        possible = [tiles for tiles in possible if tiles.objection(needs, operand_bytes) is None]
        return min(possible, key=lambda t: t.clocks(rows, columns, needs.products))._deepened(needs)

    def _deepened(self, needs: EpilogueNeeds) -> BlackwellMatmulTiles:
        """With as many stages as fit, if need be for fewer pieces under way."""
        most_pieces = 2 if self.columns % (2 * self.epilogue_wgs * self.piece) == 0 else 1
        possible = [
            dataclasses.replace(self, stages=stages, pieces=pieces)
            for pieces in range(most_pieces, 0, -1)
            for stages in range(_MOST_STAGES, 1, -1)
        ]
        possible = [tiles for tiles in possible if tiles.objection(needs) is None]
        enough = (tiles for tiles in possible if tiles.stages >= _ENOUGH_STAGES)
        return next(enough, None) or max(possible, key=lambda tiles: tiles.stages)

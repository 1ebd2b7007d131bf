"""Tile choices of the MLP's kernels: frozen, self-rejecting, with the legality written once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

HOPPER_SMEM_BYTES = 227 << 10
"""Shared memory that one block may have."""
HOPPER_SMS = 132
COMPUTE_WGS = 2
COMPUTE_REGISTERS = 232
LOAD_REGISTERS = 40
"""Per thread. Both come out of what three warpgroups are launched with; a block that asks for more waits for ever."""
DEPTH_TILE = 64
PIECE = 64
"""Rows and columns of what an epilogue works on at a time."""
FEW_ROWS = 64
TURNED_ROWS = 32
"""Up to which a product is computed turned; up to 64 an H200 was faster with tiles of 64 rows (bench/NOTES.md)."""
WEIGHT_COLUMNS = 64
"""Of a warpgroup, in the matmul of few rows."""
_ACCUMULATOR_REGISTERS = 128
_COLUMNS = (64, 128, 256)
_MOST_STAGES = 8
_MOST_STAGES_OF_FEW_ROWS = 12
_ENOUGH_STAGES = 5
_ITEMSIZE = 2
_PIECE_BYTES = PIECE * PIECE * _ITEMSIZE
_RESERVED_BYTES = 2048
"""For barriers, for what the compiler keeps for reductions, and lost where arrays begin at multiples of 1024."""


@dataclasses.dataclass(frozen=True)
class EpilogueNeeds:
    """What of an epilogue takes registers, shared memory and time: how many products, and arrays read, written and
    summed; and whether it does arithmetic."""

    products: int = 1
    reads: int = 0
    writes: int = 1
    sums: int = 0
    arithmetic: bool = False


@dataclasses.dataclass(frozen=True)
class HopperMatmulTiles:
    """The matmul kernel's shape.

    `rows` of one warpgroup and `columns` of each product; `stages` slots for operands, each 64 deep; `ping_pong`: the
    two warpgroups take tiles of their own in turns, so that one multiplies while the other is at its epilogue, instead
    of one tile of twice the rows together; `cluster` blocks below one another that share the loads of their columns;
    `pieces` of the epilogue's reads and writes under way at a time; `row_group` tiles of rows that are gone through
    side by side, for the sake of L2; `splits` of the depth, each of which has tiles of its own.
    """

    rows: int
    columns: int
    stages: int = 4
    ping_pong: bool = False
    cluster: int = 1
    pieces: int = 2
    row_group: int = 8
    splits: int = 1

    def __post_init__(self):
        if self.rows not in (64, 128):
            raise ValueError(f"{self.rows=} must be 64 or 128: one or two of wgmma's 64")
        if self.columns not in _COLUMNS:
            raise ValueError(f"{self.columns=} must be 64, 128 or 256: wgmma's widest is 256, and TMA's swizzle is 64")
        if not 2 <= self.stages <= _MOST_STAGES:
            raise ValueError(f"{self.stages=} must be 2 to {_MOST_STAGES}: one multiplied while others are loaded")
        if self.cluster not in (1, 2):
            raise ValueError(f"{self.cluster=} must be 1 or 2: {HOPPER_SMS} SMs are dealt out in pairs")
        if self.pieces not in (1, 2) or self.row_group < 1:
            raise ValueError(f"{self.pieces=} must be 1 or 2, and {self.row_group=} at least 1")
        if self.splits < 1:
            raise ValueError(f"{self.splits=} must be at least 1")
        if self.piece_count % self.pieces:
            raise ValueError(f"{self.pieces=} must divide the {self.piece_count} pieces of a warpgroup's tile")

    @property
    def block_rows(self) -> int:
        return self.rows if self.ping_pong else COMPUTE_WGS * self.rows

    @property
    def piece_count(self) -> int:
        """Of one warpgroup's tile."""
        return (self.rows // PIECE) * (self.columns // PIECE)

    def smem_bytes(self, needs: EpilogueNeeds) -> int:
        stage = _ITEMSIZE * DEPTH_TILE * (self.block_rows + needs.products * self.columns)
        # What is read lies where the results will; the parts of a sum leave in float32, before any epilogue.
        staged, sums = (max(needs.reads, needs.writes), needs.sums) if self.splits == 1 else (2 * needs.products, 0)
        staged = COMPUTE_WGS * self.pieces * staged * _PIECE_BYTES
        return self.stages * stage + staged + COMPUTE_WGS * sums * PIECE * 4 + _RESERVED_BYTES

    def objection(self, needs: EpilogueNeeds) -> str | None:
        """Why this shape cannot have such an epilogue."""
        registers = self.rows * self.columns * needs.products // 128
        if registers > _ACCUMULATOR_REGISTERS:
            return f"accumulators of {registers} registers exceed {_ACCUMULATOR_REGISTERS}: take fewer rows or columns"
        if (smem := self.smem_bytes(needs)) > HOPPER_SMEM_BYTES:
            return f"{smem} bytes of shared memory exceed {HOPPER_SMEM_BYTES}: take fewer stages or pieces"
        return None

    @classmethod
    def of(cls, rows: int, columns: int, depth: int, needs: EpilogueNeeds, terms: int = 1) -> HopperMatmulTiles:
        """For a product of [rows, depth] and [depth, columns], or the sum of so many `terms`: what an H200 was fastest
        with where it was timed (bench/NOTES.md)."""
        tiles = cls._unsplit(rows, columns, depth, needs)
        steps = terms * -(-depth // DEPTH_TILE)
        blocks = -(-rows // tiles.block_rows) * -(-columns // tiles.columns)
        most = min(HOPPER_SMS // blocks, steps // _FEWEST_STEPS)
        if most < 2:
            return tiles._halved_if_sooner(rows, columns, needs)
        widest = min(tiles.columns, 256 // needs.products)
        if widest == 256 and most == 2 and not needs.arithmetic:
            # Twice as many tiles of half the columns: as many blocks as two parts, with nothing to add up.
            return dataclasses.replace(tiles, columns=128, cluster=1)._deepened(needs)
        if widest == 256 and most >= 4:
            # Half as many parts, of half as many columns: half the bytes for XLA to add up.
            widest, most = 128, most // 2
        splits = -(-steps // -(-steps // most))  # none is empty
        return cls(64, widest, ping_pong=rows <= FEW_ROWS, pieces=1, splits=splits)._deepened(needs)

    @classmethod
    def of_several(cls, shapes: Sequence[tuple[int, int]], depth: int, needs: EpilogueNeeds) -> HopperMatmulTiles:
        """For products of these rows and columns and one depth, in one launch."""
        rows, columns = (min(sizes) for sizes in zip(*shapes, strict=True))
        return cls._unsplit(rows, columns, depth, needs)

    def rounds(self, *shapes: tuple[int, int]) -> int:
        """How many tiles the busiest block takes one after another, in a launch of products of these shapes."""
        of_each = (-(-r // (self.block_rows * self.cluster)) * -(-c // self.columns) for r, c in shapes)
        return -(-self.splits * sum(of_each) // (HOPPER_SMS // self.cluster))

    @classmethod
    def _unsplit(cls, rows: int, columns: int, depth: int, needs: EpilogueNeeds) -> HopperMatmulTiles:
        widest = min(256 // needs.products, next((c for c in _COLUMNS if c >= columns), _COLUMNS[-1]))
        if rows <= FEW_ROWS:
            # The weights' bytes are what it waits for: as many blocks as there are columns to load.
            narrow = columns <= HOPPER_SMS * 64
            return cls(64, min(64 if narrow else 128, widest), ping_pong=True, pieces=1)._deepened(needs)
        cluster = 2 if rows > 2 * 128 else 1
        if needs.products == 1 and not needs.arithmetic and depth <= _SHORT_DEPTH and widest >= 128:
            return cls(128, 128, ping_pong=True, pieces=1)._deepened(needs)
        if not needs.arithmetic or depth > _OVERLAPPED_DEPTH:
            return cls(64, widest, cluster=cluster, pieces=min(widest // PIECE, 2))._deepened(needs)
        if needs.products > 1:
            return cls(128, min(64, widest), ping_pong=True, cluster=cluster, pieces=1)._deepened(needs)
        pieces = 2 if needs.reads else 1
        return cls(128, min(128, widest), ping_pong=True, pieces=pieces)._deepened(needs)

    def _halved_if_sooner(self, rows: int, columns: int, needs: EpilogueNeeds) -> HopperMatmulTiles:
        """With tiles of half the size, where they need so much less than twice the rounds that it pays for their
        traffic."""
        if rows <= FEW_ROWS or needs.products > 1 or self.rows * self.columns < 128 * 128:
            return self
        smaller = {"rows": 64} if self.rows == 128 else {"columns": self.columns // 2}
        half = dataclasses.replace(self, **smaller, pieces=1)
        if _COST_OF_HALVES * half.rounds((rows, columns)) >= 2 * self.rounds((rows, columns)):
            return self
        return half._deepened(needs)

    def _deepened(self, needs: EpilogueNeeds) -> HopperMatmulTiles:
        """With as many stages as fit, if need be for fewer pieces under way."""
        possible = [
            dataclasses.replace(self, stages=stages, pieces=pieces)
            for pieces in range(self.pieces, 0, -1)
            for stages in range(_MOST_STAGES, 1, -1)
        ]
        possible = [tiles for tiles in possible if tiles.objection(needs) is None]
        enough = (tiles for tiles in possible if tiles.stages >= _ENOUGH_STAGES)
        return next(enough, None) or max(possible, key=lambda tiles: tiles.stages)


@dataclasses.dataclass(frozen=True)
class HopperFewRowsTiles:
    """The shape of the matmul of few rows: `rows`, a multiple of 8; `stages` slots for operands, each 64 deep; `splits`
    of the depth."""

    rows: int
    stages: int
    splits: int = 1

    def __post_init__(self):
        if self.rows not in (8, 16, TURNED_ROWS):
            raise ValueError(f"{self.rows=} must be 8, 16 or {TURNED_ROWS}")
        if not 2 <= self.stages <= _MOST_STAGES_OF_FEW_ROWS:
            raise ValueError(f"{self.stages=} must be 2 to {_MOST_STAGES_OF_FEW_ROWS}")
        if self.splits < 1:
            raise ValueError(f"{self.splits=} must be at least 1")

    def smem_bytes(self, needs: EpilogueNeeds) -> int:
        tile_columns = COMPUTE_WGS * WEIGHT_COLUMNS * needs.products
        stage = _ITEMSIZE * DEPTH_TILE * (self.rows + tile_columns)
        return self.stages * stage + 4 * self.rows * tile_columns + _RESERVED_BYTES

    @classmethod
    def of(cls, rows: int, columns: int, depth: int, needs: EpilogueNeeds) -> HopperFewRowsTiles:
        """With the fewest parts of the depth with which most SMs load weights to the end."""
        steps = -(-depth // DEPTH_TILE)
        tiles = -(-columns // (COMPUTE_WGS * WEIGHT_COLUMNS))

        def steps_of_busiest(splits: int) -> int:
            return -(-tiles * splits // HOPPER_SMS) * -(-steps // splits)

        # Those that leave no part empty.
        possible = [s for s in range(1, max(steps // _FEWEST_STEPS, 1) + 1) if (s - 1) * -(-steps // s) < steps]
        soonest = min(map(steps_of_busiest, possible))
        splits = next(s for s in possible if steps_of_busiest(s) <= _COST_OF_PARTS * soonest)
        turned = next(size for size in (8, 16, TURNED_ROWS) if rows <= size)
        shapes = (cls(turned, stages, splits) for stages in range(_MOST_STAGES_OF_FEW_ROWS, 1, -1))
        return next(shape for shape in shapes if shape.smem_bytes(needs) <= HOPPER_SMEM_BYTES)


_OVERLAPPED_DEPTH = 4096
"""Up to which an epilogue's time is a sizeable part of its tile's, so that it should not stand alone."""
_SHORT_DEPTH = 512
"""Up to which the same holds of an epilogue that only stores."""
_COST_OF_HALVES = 1.1
"""Of two tiles of half the size to one: more bytes through shared memory for the same product."""
_FEWEST_STEPS = 8
"""Of a split, or the sum over the splits takes longer than what they save."""
_COST_OF_PARTS = 1.5
"""The same, of few rows: so much longer may the busiest block take for fewer parts. 85 SMs load as fast as all."""

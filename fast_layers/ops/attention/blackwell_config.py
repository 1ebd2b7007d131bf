"""Tile choices of Blackwell's attention kernels: frozen, self-rejecting. None of them has been timed."""

from __future__ import annotations

import dataclasses

from fast_layers.ops.attention.config import num_splits
from fast_layers.ops.attention.problem import Problem

BLACKWELL_SMEM_BYTES = 227 << 10
BLACKWELL_TMEM_COLUMNS = 512
BLACKWELL_SMS = 148
_BLACKWELL_ROWS = 128
"""Lanes of tensor memory, and rows of one matmul."""
PANELS = 2
"""Parts of a tile of out that leave shared memory in turn where keys are split."""
PANEL_COLUMNS = 16
DQ_SLOTS = 2
"""For parts of dQ on their way to the sum in the GPU's memory."""
_DEEPEST_RING = 8


@dataclasses.dataclass(frozen=True)
class BlackwellForwardTiles:
    """The forward kernel's shape. No choice among them has been timed.

    `q_tiles` of 128 query rows, a softmax warpgroup for each; `kv_tile` keys a step; `stages` slots for keys and values
    each; `blocks` of a persistent grid, 0 for one block per tile of queries; `rescale_log2`: by how many powers of two
    a row's maximum must grow until its sums are rescaled, 0 for whenever it grows; `splits` parts of the keys that a
    block's queries see, a block for each; `polynomial_columns` of each 32 columns of scores take their exponentials on
    the multiply-add units; `dynamic`: whether a block that is done takes over one that has not begun.
    """

    q_tiles: int
    kv_tile: int
    stages: int = 2
    blocks: int = 0
    rescale_log2: float = 8.0
    splits: int = 1
    polynomial_columns: int = 0
    dynamic: bool = False

    q_slots = 1
    """For the queries of each tile."""
    mask_parts = 1
    """As `HopperForwardTiles.mask_parts`."""

    def __post_init__(self):
        if self.q_tiles not in (1, 2):
            raise ValueError(f"{self.q_tiles=} must be 1 or 2: tensor memory holds the scores of two tiles")
        if self.kv_tile not in (64, 128):
            raise ValueError(f"{self.kv_tile=} must be 64 or 128: a thread holds that many scores")
        if self.stages < 2:
            raise ValueError(f"{self.stages=} must be at least 2: a masked tile's keys wait for its values' slot")
        if self.blocks < 0:
            raise ValueError(f"{self.blocks=} must be at least 0")
        if not 0 <= self.rescale_log2 <= 8:
            raise ValueError(f"{self.rescale_log2=} must be from 0 to 8: weights grow up to 2 to its power")
        if self.splits < 1 or (self.splits > 1 and self.blocks):
            raise ValueError(f"{self.splits=} must be at least 1, and 1 in a persistent grid ({self.blocks=})")
        if self.dynamic and (self.blocks or self.splits > 1):
            raise ValueError(
                f"{self.dynamic=} takes a block for each tile of queries, not {self.blocks=} and {self.splits=}"
            )
        if self.polynomial_columns not in range(0, 33, 8):
            raise ValueError(f"{self.polynomial_columns=} must be 0, 8, 16, 24 or 32: of 32 columns")

    @property
    def q_tile(self) -> int:
        return _BLACKWELL_ROWS * self.q_tiles

    @property
    def registers(self) -> tuple[int, ...]:
        """Per thread: a softmax warpgroup for each tile of queries, one that loads, one that issues the products.

        What a block is launched with is dealt out anew in steps of 8.
        """
        return {1: (240, 160, 96), 2: (192, 192, 72, 56)}[self.q_tiles]

    def tmem_columns(self, v_dim: int) -> int:
        """Weights stand where their scores stood."""
        return self.q_tiles * (self.kv_tile + -(-v_dim // 16) * 16)

    def out_in_q_slot(self, qk_dim: int, v_dim: int) -> bool:
        """Whether out leaves through the queries' slot."""
        return qk_dim == v_dim

    def smem_bytes(self, qk_dim: int, v_dim: int) -> int:
        """Of 16-bit tiles, and of float32 panels where keys are split; the rest takes the last 4 KiB."""
        qk_dim, v_dim = (-(-depth // 16) * 16 for depth in (qk_dim, v_dim))
        out_bytes = 0 if self.out_in_q_slot(qk_dim, v_dim) else 2 * v_dim
        if self.splits > 1:
            out_bytes = 4 * PANELS * PANEL_COLUMNS
        inputs = 2 * (self.q_tile * qk_dim + self.stages * self.kv_tile * (qk_dim + v_dim))
        return inputs + self.q_tile * out_bytes + (4 << 10)

    @classmethod
    def of(cls, problem: Problem) -> BlackwellForwardTiles:
        """For the queries as the kernel gets them, with heads packed into rows or not."""
        p = problem
        tiles = cls.fitting(p)[0]
        pieces = p.batch * p.heads * -(-p.q_len // tiles.q_tile)
        keys = p.kv_len
        if p.mask.band is not None and p.mask.band.low is not None and p.mask.band.high is not None:
            keys = min(keys, p.mask.band.high - p.mask.band.low + tiles.q_tile)
        splits = 1 if pieces >= BLACKWELL_SMS else num_splits(pieces, -(-keys // tiles.kv_tile), BLACKWELL_SMS)
        return tiles if splits == 1 else (cls.fitting(p, splits) or [tiles])[0]

    @classmethod
    def fitting(cls, problem: Problem, splits: int = 1) -> list[BlackwellForwardTiles]:
        """Best first: two tiles of queries, so that one multiplies while the other exponentiates. Maybe none.

        Where keys are split memory is what is waited for, hence as many tiles on their way as fit.
        """
        p = problem
        causal = p.mask.band is not None and p.mask.band.high is not None
        # The hardware's own scheduler balances a causal mask's tiles, as measured on Hopper.
        blocks = 0 if causal or splits > 1 else BLACKWELL_SMS
        choices = [
            cls(q_tiles, kv_tile, stages, blocks, splits=splits)
            for q_tiles in ((1,) if p.q_len <= _BLACKWELL_ROWS else (2, 1))
            for kv_tile in (128, 64)
            for stages in range(4 if splits == 1 else _DEEPEST_RING, 1, -1)
        ]
        return [tiles for tiles in choices if tiles.fits(p)]

    def fits(self, problem: Problem) -> bool:
        p = problem
        return (
            self.smem_bytes(p.qk_dim, p.v_dim) <= BLACKWELL_SMEM_BYTES
            and self.tmem_columns(p.v_dim) <= BLACKWELL_TMEM_COLUMNS
        )


@dataclasses.dataclass(frozen=True)
class BlackwellBackwardTiles:
    """The shape of the backward kernels: a block owns 128 rows and goes through tiles of 64, or fused of 128.

    `stages` slots for what it goes through of queries or keys, `v_stages` for that of output gradients or values;
    `apart`: whether dK and dV have a kernel each; `fused`: whether one kernel makes all gradients, and sums dQ in
    floats in whatever order its blocks come.
    """

    stages: int = 4
    v_stages: int = 4
    apart: bool = False
    fused: bool = False

    def __post_init__(self):
        if self.fused:
            if self.apart:
                raise ValueError(f"{self.apart=} and {self.fused=}: one kernel makes all gradients, or several do")
            if self.stages not in (2, 3, 4) or self.v_stages not in (1, 2, 3, 4):
                raise ValueError(
                    f"{self.stages=} must be 2 to 4 and {self.v_stages=} 1 to 4: scores of a step are made before the "
                    f"step before is done with its queries"
                )
            return
        if self.stages not in (2, 4):
            raise ValueError(f"{self.stages=} must be 2 or 4: even, since two warpgroups take turns at the slots")
        if self.v_stages not in ((1, 2, 4) if self.apart else (2, 4)):
            raise ValueError(
                f"{self.v_stages=} must be 2 or 4, or with dK and dV apart also 1: one kernel for both multiplies by "
                f"two output gradients in turn"
            )

    @classmethod
    def of(cls, problem: Problem) -> BlackwellBackwardTiles:
        """One kernel where sums may come in any order and it fits; then the most slots that fit."""
        p = problem
        choices = [] if p.reproducible else [cls(*rings, fused=True) for rings in ((3, 2), (2, 2), (2, 1))]
        choices += [cls(*rings) for rings in ((4, 4), (4, 2), (2, 2))]
        choices += [cls(*rings, apart=True) for rings in ((4, 4), (4, 2), (2, 2), (2, 1))]
        return next(tiles for tiles in choices if tiles.misfit(p) is None)

    @property
    def step_tile(self) -> int:
        """With 64, two buffers of two products leave half of tensor memory to the sums of gradients."""
        return _BLACKWELL_ROWS if self.fused else 64

    def misfit(self, problem: Problem) -> str | None:
        """Why these tiles cannot be taken."""
        depths = problem.qk_dim, problem.v_dim
        for what, used, limit in (
            ("columns of tensor memory", self.tmem_columns(*depths), BLACKWELL_TMEM_COLUMNS),
            ("bytes of shared memory", self.smem_bytes(*depths), BLACKWELL_SMEM_BYTES),
        ):
            if used > limit:
                return f"depths {depths[0]} and {depths[1]} need {used} {what} of {limit}"
        return None

    def d_query_apart(self, qk_dim: int, v_dim: int) -> bool:
        """Of the fused kernel: whether dQ has columns of its own, or stands where dP stood."""
        return 2 * self.step_tile + 2 * qk_dim + v_dim <= BLACKWELL_TMEM_COLUMNS

    def tmem_columns(self, qk_dim: int, v_dim: int) -> int:
        """Of the kernel that needs most; what is made of scores stands in their place."""
        qk_dim, v_dim = (-(-depth // 16) * 16 for depth in (qk_dim, v_dim))
        if self.fused:
            products = self.step_tile + max(self.step_tile, qk_dim)
            return products + qk_dim + v_dim + (qk_dim if self.d_query_apart(qk_dim, v_dim) else 0)
        return 4 * self.step_tile + (max(qk_dim, v_dim) if self.apart else qk_dim + v_dim)

    def smem_bytes(self, qk_dim: int, v_dim: int) -> int:
        """Of 16-bit tiles, and of dQ's float32 panels; barriers and row vectors take the last 3 KiB, or 5."""
        qk_dim, v_dim = (-(-depth // 16) * 16 for depth in (qk_dim, v_dim))
        own = _BLACKWELL_ROWS * (qk_dim + v_dim)
        inputs = 2 * (own + self.step_tile * (self.stages * qk_dim + self.v_stages * v_dim))
        if not self.fused:
            return inputs + (3 << 10)
        panel = 32 if qk_dim % 32 == 0 else 16
        d_scores, d_query = 2 * _BLACKWELL_ROWS**2, 4 * DQ_SLOTS * _BLACKWELL_ROWS * panel
        return inputs + d_scores + d_query + ((3 if self.stages == 2 else 5) << 10)

    @property
    def compute_registers(self) -> int:
        """Per thread, as the other two: what a block is launched with, dealt out anew in steps of 8."""
        return 184 if self.fused else 192

    @property
    def load_registers(self) -> int:
        """In the fused kernel this warpgroup adds up dQ too."""
        return 80 if self.fused else 72

    @property
    def multiply_registers(self) -> int:
        return 64 if self.fused else 56

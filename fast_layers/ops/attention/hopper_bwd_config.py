"""Tiles of attention's backward for Hopper: frozen, self-rejecting, with the legality written once."""

from __future__ import annotations

import dataclasses

from fast_layers.ops.attention.config import (
    HOPPER_SMEM_BYTES,
    HOPPER_SMS,
    MAX_SHALLOW_DEPTH,
    MOST_DEALT_PIECES,
    SWIZZLED_COLUMNS,
    TMA_COLUMNS,
    known_before_the_call,
)
from fast_layers.ops.attention.hopper_bwd_groups import (
    LONGEST_WHOLE,
    scores_by_queries,
    scores_group,
    scores_in_parts,
    window_tiles,
)
from fast_layers.ops.attention.hopper_bwd_sequence import Sequence
from fast_layers.ops.attention.kernel_operands import has_narrow_tiles, padded_depth
from fast_layers.ops.attention.problem import Problem

_MOST_TWO_SLOT_TILES = 4
"""Of keys, for persistent blocks with two slots for queries where dQ is apart: an H100 was 1 to 3 % faster by three at
1,024 and 2,048 tokens and within windows, and at 512 was not."""
_MOST_SHALLOW_TILES = 64
"""Of keys, for a persistent grid of the backward at depths up to 64 without a mask; where that leaves few pieces to be
cut, twice as many."""
CUT_DEPTH = 64
"""At which pieces of the backward are cut by their queries (hopper_bwd_parts.py)."""
LONGEST_D_QUERY_APART = {64: 512, 128: 32_768}
"""By depth, the most queries and keys; where arrays tell what is hidden no more than `LONGEST_WHOLE`."""
WHOLE_HEADS_DEPTH = 64
"""Of queries and values, where a block may go through all keys of a head: there dQ, and its sum, have room."""
_MOST_ROWS_BY_HEAD = 1024
"""Of the query heads that share a key/value head, and of keys: the sums of 132 heads of more do not stay in the cache.
Without a mask, where blocks go through all of them with each tile of keys, half as many do."""
_LEAST_FILLED = 0.9
"""Of the turns in which all blocks take a head each, for whole heads to be worth it."""
CLUSTER_LAG = 2
"""How many steps a block of a cluster may be ahead of what another has told."""
CLUSTER_DELAY = CLUSTER_LAG + 1
"""How many steps the second is behind: so it may ask for a sum a step before it needs it."""
_LEAST_STEPS_APART = 2
"""Of a block that comes back to a tile of queries, to find that its sum is there."""
_LEAST_CLUSTER_STEPS = 1 + CLUSTER_DELAY + CLUSTER_LAG
"""Likewise of the first block of a cluster, to find what the second has added."""
WIDEST_WINDOW_APART = {128: 1152}
"""By depth, the most queries in the tiles that see a tile of keys of a window."""
_FEWEST_TILES_HELD = 16
"""Of keys, and of queries, without a mask, twice as many under a causal one, from which on a block for each tile of
keys, with half of it in registers, is faster than persistent blocks, which have no such registers left."""


@dataclasses.dataclass(frozen=True)
class HopperBackwardTiles:
    """The backward kernel's shape: `q_tile` queries a step, `stages` slots for queries and output gradients each.

    `blocks` of a persistent grid, 0 for one block per tile of keys.

    `ragged_apart`: the tiles that a causal mask or window cuts through have a loop of their own, instead of a branch in
    the one loop that keeps products from overlapping. At depths up to 64 under a causal mask alone it gained nothing.
    So with a soft cap, or where grouped heads hold keys; else hidden scores start from -inf, without such a branch.

    `d_query_apart`: dS goes to the GPU's memory, and another kernel makes dQ of it, where `leaves_d_scores`.

    `holds_keys`: with it, half of K's columns stay in registers, but for tiles whose scores a mask hides after the
    product; and dS of a group of query heads may be left in parts.

    `whole_heads`: a block goes through all keys of a head, where `takes_whole_heads`, and dQ is a sum of floats in the
    order of the keys. Or `cluster` blocks do, without a mask.
    """

    kv_tile = 128
    value_multiple = TMA_COLUMNS
    """Of the value's depth."""

    q_tile: int
    stages: int = 2
    ragged_apart: bool = False
    blocks: int = 0
    d_query_apart: bool = False
    holds_keys: bool = False
    whole_heads: bool = False
    cluster: int = 1

    def __post_init__(self):
        if self.q_tile not in (64, 128):
            raise ValueError(f"{self.q_tile=} must be 64 or 128: two warpgroups share dQ's tile of 64 or 128 rows")
        if self.stages < 1 or self.blocks < 0:
            raise ValueError(f"{self.stages=} must be at least 1 and {self.blocks=} at least 0")
        if self.holds_keys and not (self.d_query_apart and self.q_tile == 64):
            raise ValueError(
                f"{self.holds_keys=}: with dQ in the kernel or with 128 queries there are no registers left"
            )
        if self.whole_heads and (self.d_query_apart or self.q_tile != 128 or not self.blocks):
            raise ValueError(f"{self.whole_heads=}: with 128 queries in a persistent grid, and dQ in the kernel")
        if self.cluster not in (1, 2) or (self.cluster == 2 and (not self.whole_heads or self.blocks % 2)):
            raise ValueError(f"{self.cluster=} must be 1, or 2 with whole heads and an even number of blocks")

    @property
    def sums_d_query(self) -> bool:
        """Whether blocks add to dQ in whatever order they come."""
        return not (self.d_query_apart or self.whole_heads)

    @property
    def panels(self) -> int:
        """Of K's columns: dQ is a product of dS with K, of which with 64 rows each warpgroup takes half the columns."""
        return 1 if self.q_tile == 128 else 2

    @property
    def depth_multiple(self) -> int:
        """Of the query's depth."""
        return SWIZZLED_COLUMNS * self.panels

    def tile_columns(self, qk_dim: int, v_dim: int) -> tuple[int, int]:
        """Of tiles of queries and keys, and of values: as many as there are where dS is left, which else keys meet in
        shared memory."""
        if self.d_query_apart and qk_dim == v_dim > SWIZZLED_COLUMNS:
            return padded_depth(qk_dim), padded_depth(v_dim)
        return padded_depth(qk_dim, self.depth_multiple), padded_depth(v_dim, self.value_multiple)

    def smem_bytes(self, qk_dim: int, v_dim: int) -> int:
        """Of 16-bit tiles, of dQ's and of row vectors in 32 bits; barriers take less than the last KiB."""
        qk_dim, v_dim = self.tile_columns(qk_dim, v_dim)
        inputs = 2 * (self.kv_tile + self.stages * self.q_tile) * (qk_dim + v_dim)
        next_keys = 2 * self.kv_tile * qk_dim if self.blocks and not self.d_query_apart else 0
        d_query = 0 if self.d_query_apart else 4 * self.q_tile * qk_dim
        d_scores, vectors = 2 * 2 * self.q_tile * self.kv_tile, 3 if self.sums_d_query else 2
        results = 2 * self.q_tile * qk_dim if self.whole_heads else 0
        return inputs + next_keys + d_scores + d_query + results + vectors * 4 * self.stages * self.q_tile + (1 << 10)

    def for_call(self, problem: Problem) -> HopperBackwardTiles:
        """Without what this call has no use for."""
        p, apart = problem, self.d_query_apart and self.leaves_d_scores(problem)
        whole = self.whole_heads and self.takes_whole_heads(problem)
        tiles = dataclasses.replace(
            self,
            d_query_apart=apart,
            # dK and dV leave persistent blocks through dS's slots, which have other tiles.
            blocks=0 if apart and has_narrow_tiles(problem) else self.blocks,
            holds_keys=apart and self.holds_keys,
            whole_heads=whole,
            cluster=self.cluster if whole else 1,
        )
        # dQ in the kernel, and its keys, may take a slot's room.
        fits = tiles.smem_bytes(p.qk_dim, p.v_dim) <= HOPPER_SMEM_BYTES
        return tiles if fits else dataclasses.replace(tiles, stages=min(self.stages, 2))

    def sequence(self, problem: Problem) -> Sequence | None:
        """Of blocks, if some make dQ of the dS that others leave."""
        return Sequence.of(problem) if self.d_query_apart and self.holds_keys and not self.blocks else None

    def leaves_d_scores(self, problem: Problem) -> bool:
        """No mask, or over as many keys as queries a causal one or a window, and any intervals within; whole tiles; dS
        fits, of a group of heads, within a window of all, or of those whose dQ other blocks have not made yet."""
        p, band = problem, problem.mask.band
        own = band is None
        if band is not None and band.high is not None and p.q_len == p.kv_len:
            own = band.high == 0 if band.low is None else band.low <= 0 <= band.high
        whole = p.q_len % self.kv_tile == p.kv_len % self.kv_tile == 0 and p.qk_dim == p.v_dim
        if p.per_score or not own or not whole or _class_of_depth(p) not in (SWIZZLED_COLUMNS, MAX_SHALLOW_DEPTH):
            return False
        if scores_group(p) > 0:
            return True
        ways = scores_in_parts, scores_by_queries, self.sequence
        return self.holds_keys and any(way(p) is not None for way in ways)

    def takes_whole_heads(self, problem: Problem) -> bool:
        """At one depth, no mask or a causal one over as many keys as queries. A block comes back to a tile of queries
        when others' keys have been added. A table's choice is for rows up to twice as long as this file's, and heads
        for half of the blocks."""
        p, band = problem, problem.mask.band
        causal = band is not None and band.low is None and band.high == 0 and p.q_len == p.kv_len
        q_tiles, kv_tiles = -(-p.q_len // self.q_tile), -(-p.kv_len // self.kv_tile)
        if p.qk_dim != WHOLE_HEADS_DEPTH or p.v_dim != WHOLE_HEADS_DEPTH or not known_before_the_call(p):
            return False
        if p.batch * p.kv_heads * kv_tiles > MOST_DEALT_PIECES or not (causal or band is None):
            return False
        if max(p.group * p.q_len, p.kv_len) > 2 * _MOST_ROWS_BY_HEAD:
            return False
        if 2 * p.batch * p.kv_heads * self.cluster < self.blocks:
            return False
        if self.cluster == 1:
            return causal or kv_tiles == 1 or p.group * q_tiles >= _LEAST_STEPS_APART
        return band is None and kv_tiles % self.cluster == 0 and p.group * q_tiles >= _LEAST_CLUSTER_STEPS

    @classmethod
    def _of_whole_heads(cls, problem: Problem) -> HopperBackwardTiles | None:
        """None where others are faster."""
        p, rows = problem, problem.group * problem.q_len
        cluster = 2 if p.mask.band is None and 2 * rows > _MOST_ROWS_BY_HEAD else 1
        tiles = cls(128, blocks=HOPPER_SMS, whole_heads=True, cluster=cluster)
        pairs, at_a_time = p.batch * p.kv_heads, HOPPER_SMS // cluster
        fills = pairs >= _LEAST_FILLED * at_a_time * -(-pairs // at_a_time)
        short = max(rows, p.kv_len) <= _MOST_ROWS_BY_HEAD and p.softcap is None
        return tiles if fills and short and tiles.takes_whole_heads(p) else None

    @classmethod
    def of(cls, problem: Problem) -> HopperBackwardTiles:
        if whole := cls._of_whole_heads(problem):
            return whole
        p, band = problem, problem.mask.band
        shallow = max(p.qk_dim, p.v_dim) <= 64
        apart = band is not None and not p.mask.interval_arrays and not p.per_score
        if shallow and band is not None and band.low is None:
            apart = apart and p.softcap is not None
        kv_tiles = -(-p.kv_len // cls.kv_tile)
        # Measured on an H200, 2026-11-23: see bench/NOTES.md.
        tiles = cls(128 if shallow else 64, ragged_apart=apart)
        if window := window_tiles(p):
            short = window[0] * cls.kv_tile <= WIDEST_WINDOW_APART.get(_class_of_depth(p), 0)
        else:
            longest = LONGEST_D_QUERY_APART.get(_class_of_depth(p), 0)
            short = max(p.q_len, p.kv_len) <= (longest if known_before_the_call(p) else min(longest, LONGEST_WHOLE))
        timed = known_before_the_call(p) or _class_of_depth(p) == MAX_SHALLOW_DEPTH
        tiles_held = min(p.q_len, p.kv_len) // cls.kv_tile
        long = tiles_held >= _FEWEST_TILES_HELD * (1 if band is None else 2) or has_narrow_tiles(p)
        may_hold = long and not shallow and window is None and p.softcap is None and known_before_the_call(p)
        apart_tiles = dataclasses.replace(tiles, d_query_apart=True, holds_keys=may_hold)
        d_query_apart = short and timed and apart_tiles.leaves_d_scores(p)
        holds_keys = d_query_apart and may_hold
        if shallow:
            may_cut = p.qk_dim == p.v_dim == CUT_DEPTH
            few_left = may_cut and 0 < p.batch * p.kv_heads * kv_tiles % HOPPER_SMS <= HOPPER_SMS // 8
            gains = band is not None or kv_tiles <= _MOST_SHALLOW_TILES * (2 if few_left else 1)
        else:
            gains = band is None or (d_query_apart if band.low is None else p.group == 1)
        persistent = gains and known_before_the_call(p) and p.batch * p.kv_heads * kv_tiles <= MOST_DEALT_PIECES
        blocks = HOPPER_SMS if persistent and not holds_keys and not (d_query_apart and has_narrow_tiles(p)) else 0
        three = blocks and d_query_apart and not shallow and p.softcap is None and kv_tiles > _MOST_TWO_SLOT_TILES
        choice = {"blocks": blocks, "d_query_apart": d_query_apart, "holds_keys": holds_keys}
        return dataclasses.replace(tiles, stages=3 if three else tiles.stages, **choice)


def _class_of_depth(problem: Problem) -> int:
    """The depth whose timings hold for a call's."""
    depth = problem.qk_dim
    return MAX_SHALLOW_DEPTH if SWIZZLED_COLUMNS < depth <= MAX_SHALLOW_DEPTH else depth


@dataclasses.dataclass(frozen=True)
class HopperDeepBackwardTiles:
    """The shape of the backward kernel for depths over 128: tiles of 64 queries and 64 keys.

    `d_query_apart`: dS goes to the GPU's memory, and another kernel makes dQ of it, where `leaves_d_scores`. Elsewhere
    `d_query_slots` parts of dQ, each of as many `columns`, are on their way to the GPU's memory.
    """

    q_tile = kv_tile = 64
    depth_multiple = SWIZZLED_COLUMNS
    """Of the query's depth: dQ is made by panels of so many columns."""
    value_multiple = SWIZZLED_COLUMNS
    """Of the value's depth: dV is a product of weights with dO."""

    d_query_slots: int = 2
    columns: int = 32
    d_query_apart: bool = True

    @property
    def sums_d_query(self) -> bool:
        """As `HopperBackwardTiles.sums_d_query`."""
        return not self.d_query_apart

    def __post_init__(self):
        if self.d_query_slots < 1:
            raise ValueError(f"{self.d_query_slots=} must be at least 1")
        if self.columns not in (32, 64):
            raise ValueError(f"{self.columns=} must be 32 or 64: half a panel of dQ, or a whole one")

    def tile_columns(self, qk_dim: int, v_dim: int) -> tuple[int, int]:
        """Of tiles of queries and keys, and of values."""
        return padded_depth(qk_dim, self.depth_multiple), padded_depth(v_dim, self.value_multiple)

    def smem_bytes(self, qk_dim: int, v_dim: int) -> int:
        """Of 16-bit tiles, and of dQ's in 32 bits; row vectors take 2 KiB, barriers less than the last."""
        qk_dim, v_dim = self.tile_columns(qk_dim, v_dim)
        inputs = 2 * (self.kv_tile + 2 * self.q_tile) * (qk_dim + v_dim)
        weights_and_scores = 2 * 2 * self.q_tile * self.kv_tile
        return inputs + weights_and_scores + self.d_query_slots * 4 * self.q_tile * self.columns + (3 << 10)

    def for_call(self, problem: Problem) -> HopperDeepBackwardTiles:
        """Without what this call has no use for."""
        return dataclasses.replace(self, d_query_apart=self.d_query_apart and self.leaves_d_scores(problem))

    def leaves_d_scores(self, problem: Problem) -> bool:
        """No mask, or a causal one over as many keys as queries; lengths of whole tiles; one head's dS fits."""
        p, band = problem, problem.mask.band
        causal = band is not None and band.low is None and band.high == 0 and p.q_len == p.kv_len
        whole = p.q_len % 128 == p.kv_len % 128 == 0 and p.qk_dim % 64 == p.v_dim % 64 == 0
        takes = known_before_the_call(p) and p.softcap is None and (band is None or causal) and whole
        return takes and self.ring_of(p.qk_dim, p.v_dim) > 0 and scores_group(p) > 0

    @classmethod
    def ring_of(cls, qk_dim: int, v_dim: int) -> int:
        """How many slots fit for queries, output gradients, P and dS each, where dQ is apart; 0 if not two."""

        def fits(ring: int) -> bool:
            of_depth = 2 * (cls.kv_tile + ring * cls.q_tile) * (qk_dim + v_dim)
            return of_depth + ring * 2 * 2 * cls.q_tile * cls.kv_tile + (3 << 10) <= HOPPER_SMEM_BYTES

        return next((ring for ring in (3, 2) if fits(ring)), 0)

    @classmethod
    def of(cls, problem: Problem) -> HopperDeepBackwardTiles:
        return cls.of_depths(problem.qk_dim, problem.v_dim)

    @classmethod
    def of_depths(cls, qk_dim: int, v_dim: int) -> HopperDeepBackwardTiles:
        whole_panels = cls(d_query_slots=3, columns=64)
        # Measured on an H200, 2026-11-23: see bench/NOTES.md.
        three = padded_depth(qk_dim, cls.depth_multiple) == 192
        fits = whole_panels.smem_bytes(qk_dim, v_dim) <= HOPPER_SMEM_BYTES
        return whole_panels if three and fits else cls()

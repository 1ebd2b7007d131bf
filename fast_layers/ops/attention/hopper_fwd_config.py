"""Tiles of attention's forward for Hopper: frozen, self-rejecting, with the legality written once."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from fast_layers.ops.attention.config import (
    HOPPER_SMEM_BYTES,
    HOPPER_SMS,
    MOST_DEALT_PIECES,
    SWIZZLED_COLUMNS,
    TMA_COLUMNS,
    dealt_in_the_call,
    known_before_the_call,
    num_splits,
    sees_all,
)
from fast_layers.ops.attention.kernel_operands import has_narrow_tiles, padded_depth
from fast_layers.ops.attention.problem import Problem

FEW_ROWS = 64
"""Of one wgmma: calls of no more follow a rule of their own, whatever was measured."""
_DEEPEST_RING = 8
_FEW_ROWS_RING_BYTES = 96 << 10
"""Of keys and values on their way to a block of few rows, at the depths where an H200 was timed: bench/NOTES.md."""
_HELD_COLUMNS = (64, 128)
"""Of a forward's queries: panels of so many columns are multiplied by themselves."""
_MEASURED_HELD_COLUMNS = {(256, 256): (64, 0), (256, 128): (128, 128), (192, 192): (128, 0), (192, 128): (128, 128)}
"""Without a mask; under a causal one with `last_keys_first`. By the depths of queries and values: bench/NOTES.md."""

_MOST_BESIDE_128_KEYS = 160
"""Columns of out beside the scores of so many keys: with 176, and documents, 100 bytes of registers are spilled."""


_LONG_ROWS = {True: 4096, False: 8192}
"""By whether tiles are narrow, of which TMA takes as long for each row as for a wide one. From so many on, and within
windows, the larger tiles of three warpgroups need fewer rounds of all blocks than `_ROUNDS`."""
_FEW_ROUNDS, _ROUNDS = 2, 8
_LEAST_QUEUED_ROWS = 1024
_WIDEST_WINDOW = 1152
"""Keys that 128 queries see, for which three warpgroups were timed at depth 64."""


def _keys_seen(problem: Problem, queries: int) -> int:
    """Within a static window, by so many neighbouring queries."""
    keys, band = problem.kv_len, problem.mask.band
    if band is None or band.low is None or band.high is None:
        return keys
    return min(keys, band.high - band.low + queries)


def _is_causal(problem: Problem) -> bool:
    band = problem.mask.band
    return band is not None and band.high is not None


def _is_windowed(problem: Problem) -> bool:
    band = problem.mask.band
    return band is not None and band.low is not None


def _gains_by_64_keys(problem: Problem) -> bool:
    """Of many rows at depths up to 128: whether it pays if three warpgroups share tiles of 64 keys, each with spans of
    its own. Timed in bfloat16: in float16 sums are rescaled, which takes 3 % more with 64 keys. What is given for each
    score, and the keep decisions of dropout, have no registers there."""
    p, narrow = problem, has_narrow_tiles(problem)
    deeper, long = max(p.qk_dim, p.v_dim) > 64, max(p.q_len, p.kv_len) >= _LONG_ROWS[narrow]
    if p.per_score or p.dropout_rate or not (narrow or p.dtype == jnp.bfloat16):
        return False
    known = known_before_the_call(p)
    of_window = _is_windowed(p) and max(p.q_len, p.kv_len) > 512 and _keys_seen(p, 128) <= _WIDEST_WINDOW
    if known and not deeper and not of_window:
        return False
    if sees_all(p) and not (narrow and long):
        return False
    rounds = _FEW_ROUNDS if known and (long or _is_windowed(p)) else _ROUNDS
    return p.batch * p.heads * -(-p.q_len // (3 * 64)) >= rounds * HOPPER_SMS


def gains_by_a_queue(problem: Problem) -> bool:
    """Whether the blocks of a persistent grid end sooner if each takes a piece when it is free, though it is known when
    tracing which are long: timed under causal masks. To put the queue together takes a kernel before this one."""
    p = problem
    long = max(p.q_len, p.kv_len) >= _LEAST_QUEUED_ROWS and max(p.qk_dim, p.v_dim) <= 128
    return long and _is_causal(p) and not _is_windowed(p) and known_before_the_call(p)


def _is_persistent(problem: Problem) -> bool:
    """Of depths up to 128: whether blocks take several tiles of queries."""
    p = problem
    if _is_causal(p):
        return known_before_the_call(p) or dealt_in_the_call(p)
    return dealt_in_the_call(p) or p.kv_len <= 4096


def _out_by_values_pays(problem: Problem) -> bool:
    """Of a forward deeper than 128, as measured: with `first_maximum`, whose steps are short."""
    p = problem
    return p.dtype == jnp.bfloat16 and p.softcap is None


@dataclasses.dataclass(frozen=True)
class HopperForwardTiles:
    """The forward kernel's shape.

    `compute_wgs` warpgroups of 64 query rows each; `kv_tile` keys a step; `stages` slots for keys and values each;
    `q_slots` tiles of queries; `blocks` of a persistent grid, 0 for one block per tile of queries; `takes_turns`
    orders the warpgroups' products; `splits` parts of the keys that a tile of queries sees, a block for each;
    with `own_spans` a warpgroup passes over those tiles of keys within its block's that none of its own rows sees, of a
    mask that is known before the call; `cluster` blocks load keys and values together, where all queries see the same;
    with `last_keys_first` tiles of keys come from the last on, and no other needs a mask, where `one_ragged_tile`;
    `held_columns` of the queries stay in registers, where no step but the first of `last_keys_first` hides scores;
    with `first_maximum` weights are relative to the maximum of a row's first tile of keys, in bfloat16 alone, whose
    range is float32's, and with nothing given for each score, which might hide a row's first keys by large numbers;
    with it the exponentials of `keys_before_wait` of a tile stay before the wait for out's product, behind which ptxas
    might move them; with `out_by_values` out leaves by the slots of values instead of Q's or rows of its own, where
    depths differ only if one slot has room for it, and with `spare_values` there is one more, for the first values of
    the block's next tile of queries.
    """

    compute_wgs: int
    kv_tile: int
    stages: int = 2
    q_slots: int = 1
    blocks: int = 0
    takes_turns: bool = True
    splits: int = 1
    own_spans: bool = False
    cluster: int = 1
    last_keys_first: bool = False
    held_columns: int = 0
    first_maximum: bool = True
    keys_before_wait: int = 0
    out_by_values: bool = False
    spare_values: bool = False

    def __post_init__(self):
        if self.compute_wgs not in (1, 2, 3):
            raise ValueError(f"{self.compute_wgs=} must be 1, 2 or 3: four warpgroups share the registers")
        if self.kv_tile not in (64, 128, 192, 256):
            raise ValueError(f"{self.kv_tile=} must be 64, 128, 192 or 256: wgmma reads values 64 keys at a time")
        if self.stages < 2:
            raise ValueError(f"{self.stages=} must be at least 2: keys and values of two steps are in use at once")
        if self.q_slots < 1 or self.blocks < 0:
            raise ValueError(f"{self.q_slots=} must be at least 1 and {self.blocks=} at least 0")
        if self.splits < 1 or (self.splits > 1 and self.blocks):
            raise ValueError(f"{self.splits=} must be at least 1, and 1 in a persistent grid ({self.blocks=})")
        if self.own_spans and (self.takes_turns or self.splits > 1):
            raise ValueError(f"{self.own_spans=}: spans of its own leave a warpgroup no turns, nor parts of the keys")
        if self.last_keys_first and (self.splits > 1 or self.cluster > 1):
            raise ValueError(f"{self.last_keys_first=}: neither with parts of the keys nor with a cluster")
        if self.held_columns not in (0, *_HELD_COLUMNS) or (self.held_columns and self.compute_wgs != 2):
            raise ValueError(f"{self.held_columns=} must be 0, or with two warpgroups one of {_HELD_COLUMNS}")
        if self.keys_before_wait and not self.first_maximum:
            raise ValueError(f"{self.keys_before_wait=}: without first_maximum a tile is weighed in one piece")
        if self.keys_before_wait % 8 or not 0 <= self.keys_before_wait <= self.kv_tile:
            raise ValueError(f"{self.keys_before_wait=} must be a multiple of 8, {self.kv_tile} at most")
        alone = self.splits == self.cluster == self.q_slots == 1
        room = self.out_in_one_slot or self.compute_wgs <= self.stages
        if self.out_by_values and not (alone and self.blocks and room):
            raise ValueError(
                f"{self.out_by_values=}: in a persistent grid, with a slot for queries, one for the values of each "
                "warpgroup, and neither parts of the keys nor a cluster"
            )
        if self.spare_values and not self.out_by_values:
            raise ValueError(f"{self.spare_values=} must be False without out_by_values")
        if self.cluster not in (1, 2) or (self.cluster == 2 and (self.splits > 1 or self.own_spans or self.blocks % 2)):
            raise ValueError(f"{self.cluster=} must be 1 or 2, and 1 with splits, own spans or an odd number of blocks")

    @property
    def q_tile(self) -> int:
        return 64 * self.compute_wgs

    @property
    def takes_64_keys(self) -> bool:
        """Whether three warpgroups share tiles of so many; `_gains_by_64_keys` says where."""
        return self.compute_wgs == 3 and self.kv_tile == 64

    @property
    def mask_parts(self) -> int:
        """Of a tile of queries, of each of which a mask of arrays tells the keys."""
        return self.compute_wgs if self.own_spans else 1

    @property
    def out_in_one_slot(self) -> bool:
        """Of values, if it leaves by them: all warpgroups' rows."""
        return self.kv_tile >= self.q_tile

    @property
    def value_stages(self) -> int:
        return self.stages + self.spare_values

    @property
    def compute_registers(self) -> int:
        """Per thread. What a block is launched with, in three warpgroups 168 each, in four 128, is dealt out anew, in
        steps of 8; a block that asks for more waits for ever."""
        return {1: 240, 2: (3 * 168 - self.load_registers) // 2, 3: 160}[self.compute_wgs]

    @property
    def load_registers(self) -> int:
        two = 72 if self._leaves_registers else 40 if self.held_columns or self.out_by_values else 56
        return {1: 208, 2: two, 3: 32}[self.compute_wgs]

    @property
    def _leaves_registers(self) -> bool:
        """To the load warpgroup, whose second pass would else spill some: as chosen for keys deeper than 128 and values
        up to 128."""
        persistent = self.blocks > 0 and not self.out_by_values
        return self.compute_wgs == 2 and self.own_spans and self.last_keys_first and persistent

    def smem_bytes(self, qk_dim: int, v_dim: int) -> int:
        """Of 16-bit tiles, and of a float32 one where keys are split; the last 2.5 KiB for barriers and row vectors."""
        qk_dim, v_dim = (padded_depth(depth, TMA_COLUMNS) for depth in (qk_dim, v_dim))
        out_bytes = 4 if self.splits > 1 else 0 if qk_dim == v_dim or self.out_by_values else 2
        keys, values = self.stages * self.kv_tile, self.value_stages * self.kv_tile
        inputs = 2 * ((self.q_slots * self.q_tile + keys) * qk_dim + values * v_dim)
        return inputs + out_bytes * self.q_tile * v_dim + (5 << 9)

    def _fits(self, p: Problem) -> bool:
        return self.smem_bytes(p.qk_dim, p.v_dim) <= HOPPER_SMEM_BYTES

    def takes_loose_queries(self, problem: Problem) -> bool:
        """Whether there is room for a slot through which queries come as they lie in memory."""
        qk_dim = padded_depth(problem.qk_dim, TMA_COLUMNS)
        if self.compute_wgs > 1 or self.q_slots > 1 or self.blocks:
            return False
        return self.smem_bytes(qk_dim, problem.v_dim) + 2 * self.q_tile * qk_dim <= HOPPER_SMEM_BYTES

    @classmethod
    def of(cls, problem: Problem, measured: HopperForwardTiles | None = None) -> HopperForwardTiles:
        """For the queries as the kernel gets them, with heads packed into rows or not.

        `measured` stands in for the rule where there are enough rows to fill the GPU.
        """
        p = problem
        if p.q_len <= FEW_ROWS:
            return cls._of_few_rows(p)
        another_order = measured is not None and measured.last_keys_first and not measured.one_ragged_tile(p)
        another_way_out = measured is not None and measured.out_by_values and not _out_by_values_pays(p)
        another_share = measured is not None and measured.takes_64_keys and not _gains_by_64_keys(p)
        if measured is None or another_order or another_way_out or another_share:
            measured = cls._of_many_rows(p)  # what was measured is the fastest in that order and way alone
        tiles = measured.for_mask(p)
        if not tiles._fits(p):
            # Depths differ, so that the output has no room in the slot for queries.
            tiles = cls(1, 64, takes_turns=False)
        pieces = p.batch * p.heads * -(-p.q_len // tiles.q_tile)
        if HOPPER_SMS <= pieces <= MOST_DEALT_PIECES:
            return tiles
        # With rows of its own out may leave no room for as many keys.
        kv_tiles = (tiles.kv_tile, 64) if tiles.out_by_values else (tiles.kv_tile,)
        if pieces > MOST_DEALT_PIECES:
            apart = dataclasses.replace(tiles, blocks=0, out_by_values=False, spare_values=False)
            ways = [dataclasses.replace(apart, kv_tile=keys) for keys in kv_tiles]
        else:
            # Three warpgroups' share of the registers has no room for the part's bounds.
            wgs, turns = min(tiles.compute_wgs, 2), tiles.compute_wgs > 1
            ways = [cls(wgs, keys, takes_turns=turns)._split_for(p) for keys in kv_tiles]
            if ways[0].splits == 1:
                return tiles
        return next((way for way in ways if way._fits(p)), cls._of_few_rows(p))

    def one_ragged_tile(self, p: Problem) -> bool:
        """Whether, of the tiles of keys that rows see together, the last alone has hidden scores: under a causal mask
        where tiles of queries and of keys end together."""
        band, rows = p.mask.band, 64 if self.own_spans else self.q_tile
        if self.splits > 1 or not known_before_the_call(p) or band is None or band.low is not None:
            return False
        return band.high is not None and band.high >= 0 and band.high % rows == 0 and self.kv_tile % rows == 0

    def for_mask(self, p: Problem) -> HopperForwardTiles:
        """Without what this call's mask or its number of queries has no use for."""
        alike = sees_all(p) and -(-p.q_len // self.q_tile) % 2 == 0
        alone = self.cluster == 2 and not alike
        many = self.splits == 1 and p.q_len > 64  # few rows wait for memory, whatever their softmax does
        first_maximum = self.first_maximum and many and p.dtype == jnp.bfloat16 and not p.per_score
        last_keys_first = self.last_keys_first and self.one_ragged_tile(p)
        whole = (sees_all(p) or last_keys_first) and p.kv_len % self.kv_tile == 0
        # A second pass sends out through Q's slot, or where depths differ through the second one of values.
        by_values = self.out_by_values and (p.qk_dim == p.v_dim or self.out_in_one_slot)
        held = whole and p.softcap is None and self.held_columns < p.qk_dim and p.qk_dim % SWIZZLED_COLUMNS == 0
        return dataclasses.replace(
            self,
            own_spans=self.own_spans and (p.mask.band is not None or p.mask.interval_arrays or p.mask.segments),
            last_keys_first=last_keys_first,
            held_columns=self.held_columns if held else 0,
            first_maximum=first_maximum,
            keys_before_wait=self.keys_before_wait if first_maximum else 0,
            cluster=1 if alone else self.cluster,
            takes_turns=self.takes_turns or alone,
            out_by_values=by_values,
            spare_values=self.spare_values and by_values,
        )

    @classmethod
    def _of_few_rows(cls, p: Problem) -> HopperForwardTiles:
        """One warpgroup: memory is what such a problem waits for."""
        deepest = max(p.qk_dim, p.v_dim)
        tiles = cls(1, 128 if deepest <= 64 else 64, takes_turns=False)
        if not 64 <= deepest <= 128:
            return tiles._split_for(p)
        return tiles._split_for(p, _FEW_ROWS_RING_BYTES // (tiles.kv_tile * (p.qk_dim + p.v_dim) * p.dtype.itemsize))

    def _split_for(self, p: Problem, most_stages: int = _DEEPEST_RING) -> HopperForwardTiles:
        """These tiles with the keys split, and as many keys on their way as fit, in `most_stages` slots at most."""
        keys = _keys_seen(p, self.q_tile)
        pieces = p.batch * p.heads * -(-p.q_len // self.q_tile)
        tiles = dataclasses.replace(self, splits=num_splits(pieces, -(-keys // self.kv_tile)))
        deeper = (dataclasses.replace(tiles, stages=stages) for stages in range(most_stages, tiles.stages, -1))
        return next((t for t in deeper if t._fits(p)), tiles)

    @classmethod
    def _of_many_rows(cls, p: Problem) -> HopperForwardTiles:
        """As measured on H200s, 2026-11-22 to 28: bench/NOTES.md.

        A persistent grid hides a block's start, which short rows feel. Tiles of unequal length are dealt out evenly,
        when tracing or, of a mask of arrays, in the call.
        """
        deepest = max(p.qk_dim, p.v_dim)
        if deepest <= 64:
            return cls._of_depth_64(p)
        return cls._of_depth_128(p) if deepest <= 128 else cls._of_deeper(p)

    @classmethod
    def _of_depth_64(cls, p: Problem) -> HopperForwardTiles:
        longest, known = max(p.q_len, p.kv_len), _is_causal(p) and known_before_the_call(p)
        if _gains_by_64_keys(p):
            return cls(3, 64, 6, 2, HOPPER_SMS, takes_turns=False, own_spans=True)
        orders = {"takes_turns": False, "own_spans": True, "last_keys_first": True, "keys_before_wait": 64}
        own = cls(3, 128, 3, 2, HOPPER_SMS, **orders)
        gains = own.one_ragged_tile(p) or (_is_windowed(p) and _keys_seen(p, 128) <= _WIDEST_WINDOW)
        if known and (longest <= 512 or (longest > 1024 and gains)):
            return own
        if _is_causal(p) and longest <= 1024:
            turns = longest > 512
            return cls(2, 128, 3, 2, HOPPER_SMS, takes_turns=turns, last_keys_first=True, keys_before_wait=32)
        if p.mask.interval_arrays or p.per_score:  # the mask's registers do not fit in three warpgroups' share
            dealt = dealt_in_the_call(p)
            return cls(2, 128, stages=3, q_slots=2 if dealt else 1, blocks=HOPPER_SMS if dealt else 0)
        if sees_all(p):
            return cls(3, 128, 3, 2, HOPPER_SMS, takes_turns=False, keys_before_wait=16)
        persistent = _is_persistent(p)
        return cls(3, 128, stages=3, q_slots=2 if persistent else 1, blocks=HOPPER_SMS if persistent else 0)

    @classmethod
    def _of_depth_128(cls, p: Problem) -> HopperForwardTiles:
        if p.dropout_rate:
            return cls(2, 64, stages=4)  # the keep decisions' registers do not fit beside 128 scores a row
        own = cls(3, 64, 4, 2, HOPPER_SMS, takes_turns=False, own_spans=True, last_keys_first=True)
        if _gains_by_64_keys(p) and own._fits(p):
            return own
        if sees_all(p):
            return cls(2, 128, q_slots=2, blocks=HOPPER_SMS, takes_turns=False, cluster=2)
        persistent = _is_persistent(p)
        tiles = cls(2, 128, q_slots=2 if persistent else 1, blocks=HOPPER_SMS if persistent else 0)
        tiles = dataclasses.replace(tiles, last_keys_first=max(p.q_len, p.kv_len) > 1024)
        gains = tiles.last_keys_first and tiles.one_ragged_tile(p)
        turns = not (dealt_in_the_call(p) or gains)
        return dataclasses.replace(tiles, takes_turns=turns, keys_before_wait=32 if gains else 0)

    @classmethod
    def _of_deeper(cls, p: Problem) -> HopperForwardTiles:
        longest, causal, in_the_call = max(p.q_len, p.kv_len), _is_causal(p), dealt_in_the_call(p)
        known = causal and known_before_the_call(p)
        dealt = known and not _is_windowed(p)
        by_values = _out_by_values_pays(p) and (sees_all(p) or dealt or in_the_call)
        one_slot = cls(2, 128, blocks=HOPPER_SMS, takes_turns=False, last_keys_first=dealt, out_by_values=True)
        # Measured: under a causal mask alone, grouped heads were 1 to 3 % slower.
        in_one_slot = by_values and not (dealt and p.group > 1) and not p.dropout_rate
        if in_one_slot and p.v_dim <= min(p.qk_dim, _MOST_BESIDE_128_KEYS) and one_slot._fits(p):
            return dataclasses.replace(one_slot, keys_before_wait=32 if causal and longest > 1024 else 0)
        blocks = HOPPER_SMS if known or in_the_call else 0
        tiles = cls(2, 128, takes_turns=False, blocks=blocks)
        if p.v_dim <= 128 and tiles._fits(p):
            return tiles
        tiles = dataclasses.replace(tiles, kv_tile=64, own_spans=known)
        if by_values and p.qk_dim == p.v_dim:
            return dataclasses.replace(
                tiles,
                blocks=HOPPER_SMS,
                keys_before_wait=64 if dealt or p.v_dim > 192 else 0,
                out_by_values=True,
                spare_values=p.v_dim <= 192 if in_the_call else longest <= 2048,
            )
        gains = longest > 1024 and not 128 < p.v_dim <= 192 and tiles.one_ragged_tile(p)
        # Blocks that are not persistent gain by it, at depth 256 alone: 10 %.
        blocks = 0 if gains and p.v_dim > 192 else blocks
        unmasked, under_causal = _MEASURED_HELD_COLUMNS.get((p.qk_dim, p.v_dim), (0, 0))
        held_columns = 0 if longest < 1024 else under_causal if causal else unmasked
        few_steps = sees_all(p) and longest < 1024  # a block feels what its verdict takes
        return dataclasses.replace(
            tiles,
            last_keys_first=gains,
            blocks=blocks,
            held_columns=held_columns,
            first_maximum=not few_steps,
            keys_before_wait=64 if p.v_dim > 192 and not few_steps else 0,
        )

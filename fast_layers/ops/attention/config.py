"""Tile choices: frozen, self-rejecting, with the legality written once."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp

from fast_layers.arch import Arch
from fast_layers.kernel_parts.dropout import KEYS_PER_BLOCK
from fast_layers.ops.attention.kernel_operands import padded_depth
from fast_layers.ops.attention.problem import Problem

_SMALLEST_TILE = 64


@dataclasses.dataclass(frozen=True)
class _Budget:
    """`scores`: of one tile, over batch and heads; `tile`: its largest side."""

    scores: int
    tile: int


# A core's share of the cache (2 MiB of float32); measured, see bench/NOTES.md.
_CPU = _Budget(scores=1 << 19, tile=256)
# Few and large steps, since each launches several kernels: 128 MiB of float32. A guess, never timed on a GPU or TPU.
_ACCELERATOR = _Budget(scores=1 << 25, tile=1024)


@dataclasses.dataclass(frozen=True)
class XlaTiles:
    """Rows of queries and of keys that the XLA backend handles at once."""

    q_tile: int
    kv_tile: int

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
        return cls(q_tile=_fit(problem.q_len, tile, 8), kv_tile=_fit(problem.kv_len, tile, KEYS_PER_BLOCK))


def _fit(length: int, tile: int, multiple: int) -> int:
    """No more rows than there are (a symbolic length takes the tile as it is)."""
    return min(tile, -(-length // multiple) * multiple) if isinstance(length, int) else tile


HOPPER_SMEM_BYTES = 227 << 10
"""Shared memory that one block may have."""
HOPPER_SMS = 132
MAX_SHALLOW_DEPTH = 128
"""Of the backward with two equal warpgroups: beyond, dK and dV of 64 keys do not fit in one."""
_DEEPEST_RING = 8
_FEW_ROWS_RING_BYTES = 96 << 10
"""Of keys and values on their way to a block of few rows, at the depths where an H200 was timed: bench/NOTES.md."""
MOST_DEALT_PIECES = 1 << 18
"""Of a persistent grid: tracing a call deals them out in Python, and their list becomes a constant of the program."""
_MOST_TWO_SLOT_TILES = 4
"""Of keys, for persistent blocks with two slots for queries where dQ is apart: an H100 was 1 to 3 % faster by three at
1,024 and 2,048 tokens and within windows, and at 512 was not."""
_MOST_SHALLOW_TILES = 64
"""Of keys, for a persistent grid of the backward at depths up to 64 without a mask; where that leaves few pieces to be
cut, twice as many."""
CUT_DEPTH = 64
"""At which pieces of the backward are cut by their queries (hopper_bwd_parts.py)."""
LONGEST_D_QUERY_APART = {64: 512, 128: 16_384}
"""By depth, the most queries and keys."""
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
MOST_D_SCORES_BYTES = 1088 << 20
"""Of dS in memory at a time: two heads of 16,384 tokens in 16 bits, or four under a causal mask."""
_MOST_D_SCORES = 9 / 2
"""Of what dQ's integers would take; more than four times, for the whole tiles at both ends of a window."""
_MOST_UNEVEN_SCORES = 9
"""Likewise, where arrays say what is hidden; or a causal mask at depths up to 128, and no heads share keys: the longest
tiles of keys of few heads end after all others."""
_LEAST_TOLD_PIECES = 512
"""Tiles of keys in one of several groups of heads, where arrays tell their length: fewer leave SMs idle at the end.
Without a causal mask groups gained too little."""
_MOST_GROUPS_LOSE = 0.06
"""Of the time that all heads at once would take, for dQ apart to be worth it. Within windows groups were not timed."""
_LATE_FOR_MEMORY = 0.02
"""A group is smaller where all pairs are finished so little later."""
_GROUP_COST = 4
"""Of a group's kernels to start and end, in the time of a tile."""
_TMA_COLUMNS = 16
"""What depths are a multiple of where no product asks for more."""
_SWIZZLED_COLUMNS = 64
"""Of a tile of dS or weights in shared memory: what it is multiplied with there must be swizzled as it is."""
_HELD_COLUMNS = (64, 128)
"""Of a forward's queries: panels of so many columns are multiplied by themselves."""
_MEASURED_HELD_COLUMNS = {(256, 256): (64, 0), (256, 128): (128, 128), (192, 192): (128, 0), (192, 128): (128, 128)}
"""Without a mask; under a causal one with `last_keys_first`. By the depths of queries and values: bench/NOTES.md."""
_FEWEST_TILES_HELD = 16
"""Of keys, and of queries, without a mask, twice as many under a causal one, from which on a block for each tile of
keys, with half of it in registers, is faster than persistent blocks, which have no such registers left."""
_MOST_SPLITS = 128
_KEY_TILES_PER_SPLIT = 4
"""At least, where the keys are split."""
_SPLITTING_COST = 4
"""Of writing the parts' results and putting them together, in the time that a block takes for a tile of keys."""


def packs_heads(problem: Problem, rows: int = 64) -> bool:
    """Whether to make rows of the query heads that share a key/value head: if that saves a quarter of the tiles.

    `rows`: of one tile.
    """
    p = problem
    if p.group == 1 or p.per_score:
        return False
    apart, packed = p.group * -(-p.q_len // rows), -(-p.q_len * p.group // rows)
    return 4 * packed <= 3 * apart


def num_splits(pieces: int, key_tiles: int, sms: int = HOPPER_SMS) -> int:
    """Into how many parts to split the keys of each of so many pieces of work, to finish on all SMs soonest."""
    most = max(min(_MOST_SPLITS, key_tiles // _KEY_TILES_PER_SPLIT), 1)

    def duration(splits: int) -> int:
        rounds = -(-pieces * splits // sms)
        return rounds * (-(-key_tiles // splits) + (_SPLITTING_COST if splits > 1 else 0))

    return min(range(1, most + 1), key=duration)


def known_before_the_call(problem: Problem) -> bool:
    """Whether it is known when tracing which scores are hidden, and nothing is given for each score."""
    p = problem
    return not (p.mask.interval_arrays or p.mask.segments or p.per_score)


def dealt_in_the_call(problem: Problem) -> bool:
    """Whether arrays say which scores are hidden, and leave some tiles of queries far more keys than others."""
    mask = problem.mask
    told = (mask.interval_arrays or mask.segments) and not problem.per_score
    return told and not (mask.lengths_only and mask.band is None)


def sees_all(problem: Problem) -> bool:
    """Whether each query sees all keys, with nothing given for each score."""
    return problem.mask.band is None and known_before_the_call(problem)


def _keys_seen(problem: Problem, queries: int) -> int:
    """Within a static window, by so many neighbouring queries."""
    keys, band = problem.kv_len, problem.mask.band
    if band is None or band.low is None or band.high is None:
        return keys
    return min(keys, band.high - band.low + queries)


def _out_by_values_pays(problem: Problem) -> bool:
    """Of a forward deeper than 128, as measured: with `first_maximum`, whose steps are short."""
    p = problem
    return p.dtype == jnp.bfloat16 and p.softcap is None and p.qk_dim == p.v_dim


def window_tiles(problem: Problem) -> tuple[int, int] | None:
    """By tiles of 128: how many queries see a tile of keys of a static window, and how many of them stand before it."""
    band = problem.mask.band
    if band is None or band.low is None or band.high is None:
        return None
    before, behind = -(-band.high // 128), -(band.low // 128)
    return min(before + 1 + behind, problem.q_len // 128), before


def scores_tiles(problem: Problem) -> int:
    """Tiles of 128 queries and 128 keys that the backward leaves of a query head's dS."""
    q_tiles, kv_tiles = problem.q_len // 128, problem.kv_len // 128
    if window := window_tiles(problem):
        return window[0] * kv_tiles
    return q_tiles * kv_tiles if problem.mask.band is None else q_tiles * (q_tiles + 1) // 2


def _duration(problem: Problem, pairs: int, heads: int) -> float:
    """Of all pairs of an example and a key/value head, so many at a time, and of each so many query heads, in a tile's
    time on each SM; of no window."""
    p, kv_tiles = problem, problem.kv_len // 128
    work = pairs * scores_tiles(p) / HOPPER_SMS
    if p.mask.band is None:
        # Tiles of keys are alike, and a block takes one after the other; under a mask the short ones fill the end.
        work = -(-pairs * kv_tiles // HOPPER_SMS) * scores_tiles(p) / kv_tiles
    longest = max(work, p.q_len // 128)
    return -(-p.batch * p.kv_heads // pairs) * p.group // heads * (heads * longest + _GROUP_COST)


def most_scores_pairs(problem: Problem, heads: int) -> int:
    """How many pairs of an example and a key/value head may leave dS of so many of their query heads at a time, by
    memory alone."""
    p, total = problem, problem.batch * problem.kv_heads
    integers = 4 * p.batch * p.heads * p.q_len * p.qk_dim
    of_pair = heads * scores_tiles(p) * 128 * 128 * p.dtype.itemsize
    causal = p.mask.band is not None and p.mask.band.low is None
    uneven = causal and p.group == 1 and max(p.qk_dim, p.v_dim) <= MAX_SHALLOW_DEPTH
    integers *= _MOST_UNEVEN_SCORES if uneven or not known_before_the_call(p) else _MOST_D_SCORES
    return min(int(min(MOST_D_SCORES_BYTES, integers)) // of_pair, total)


@functools.cache
def scores_group(problem: Problem) -> int:
    """How many pairs of an example and a key/value head leave their dS at a time; 0 where not even one may, or where
    groups would lose too much.

    The fewest that finish all pairs nearly as soon as any other number.
    """
    p, total, most = problem, problem.batch * problem.kv_heads, most_scores_pairs(problem, problem.group)
    if window_tiles(p):
        return total if most == total else 0
    if most == 0:
        return 0
    fewest = -(-total // most)
    if not known_before_the_call(p):
        pairs = -(-total // fewest)
        several = p.mask.band is not None and pairs * (p.kv_len // 128) >= _LEAST_TOLD_PIECES
        return pairs if fewest == 1 or several else 0
    choices = {-(-total // groups) for groups in range(fewest, min(8 * fewest, total) + 1)}
    soonest = min(_duration(p, pairs, p.group) for pairs in choices)
    if soonest > (1 + _MOST_GROUPS_LOSE) * _duration(p, total, p.group):
        return 0
    return min(pairs for pairs in choices if _duration(p, pairs, p.group) <= (1 + _LATE_FOR_MEMORY) * soonest)


@functools.cache
def scores_in_parts(problem: Problem) -> tuple[int, int] | None:
    """(pairs of an example and a key/value head, query heads of each) that leave their dS at a time, fewer heads than
    share a key/value head. None where `scores_group` is of whole pairs, or where parts would lose too much."""
    p, total = problem, problem.batch * problem.kv_heads
    if scores_group(p) or window_tiles(p) or not known_before_the_call(p):
        return None
    # No pair may be done twice, since its parts are summed.
    choices = [
        (pairs, heads)
        for heads in range(1, p.group)
        for pairs in range(1, most_scores_pairs(p, heads) + 1)
        if p.group % heads == total % pairs == 0
    ]
    soonest = min(choices, key=lambda choice: _duration(p, *choice), default=None)
    if soonest is None or _duration(p, *soonest) > (1 + _MOST_GROUPS_LOSE) * _duration(p, total, p.group):
        return None
    return soonest


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
    might move them; with `out_by_values`, at one depth, out leaves by the slots of values instead of Q's.
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
        if self.out_by_values and not (alone and self.blocks and self.compute_wgs <= self.stages):
            raise ValueError(
                f"{self.out_by_values=}: in a persistent grid, with a slot for queries, one for the values of each "
                "warpgroup, and neither parts of the keys nor a cluster"
            )
        if self.cluster not in (1, 2) or (self.cluster == 2 and (self.splits > 1 or self.own_spans or self.blocks % 2)):
            raise ValueError(f"{self.cluster=} must be 1 or 2, and 1 with splits, own spans or an odd number of blocks")

    @property
    def q_tile(self) -> int:
        return 64 * self.compute_wgs

    @property
    def compute_registers(self) -> int:
        """Per thread. What a block is launched with, in three warpgroups 168 each, is dealt out anew, in steps of 8; a
        block that asks for more waits for ever."""
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
        qk_dim, v_dim = (padded_depth(depth, _TMA_COLUMNS) for depth in (qk_dim, v_dim))
        out_bytes = 4 if self.splits > 1 else 0 if qk_dim == v_dim else 2
        keys = self.stages * self.kv_tile
        inputs = 2 * ((self.q_slots * self.q_tile + keys) * qk_dim + keys * v_dim)
        return inputs + out_bytes * self.q_tile * v_dim + (5 << 9)

    def packs_in_kernel(self, problem: Problem) -> bool:
        """Whether there is room for a slot through which queries come as they lie in memory."""
        qk_dim = padded_depth(problem.qk_dim, _TMA_COLUMNS)
        if self.compute_wgs > 1 or self.q_slots > 1 or self.blocks:
            return False
        return self.smem_bytes(qk_dim, problem.v_dim) + 2 * self.q_tile * qk_dim <= HOPPER_SMEM_BYTES

    @classmethod
    def of(cls, problem: Problem, measured: HopperForwardTiles | None = None) -> HopperForwardTiles:
        """For the queries as the kernel gets them, with heads packed into rows or not.

        `measured` stands in for the rule where there are enough rows to fill the GPU.
        """
        p = problem
        if p.q_len <= 64:
            return cls._of_few_rows(p)
        another_order = measured is not None and measured.last_keys_first and not measured.one_ragged_tile(p)
        another_way_out = measured is not None and measured.out_by_values and not _out_by_values_pays(p)
        if measured is None or another_order or another_way_out:
            measured = cls._of_many_rows(p)  # what was measured is the fastest in that order and way alone
        tiles = measured.for_mask(p)
        if tiles.smem_bytes(p.qk_dim, p.v_dim) > HOPPER_SMEM_BYTES:
            # Depths differ, so that the output has no room in the slot for queries.
            tiles = cls(1, 64, takes_turns=False)
        pieces = p.batch * p.heads * -(-p.q_len // tiles.q_tile)
        if pieces > MOST_DEALT_PIECES:
            return dataclasses.replace(tiles, blocks=0, out_by_values=False)
        if pieces >= HOPPER_SMS:
            return tiles
        # Three warpgroups' share of the registers has no room for the part's bounds.
        split = cls(min(tiles.compute_wgs, 2), tiles.kv_tile, takes_turns=tiles.compute_wgs > 1)._split_for(p)
        if split.splits == 1:
            return tiles
        return split if split.smem_bytes(p.qk_dim, p.v_dim) <= HOPPER_SMEM_BYTES else cls._of_few_rows(p)

    def one_ragged_tile(self, p: Problem) -> bool:
        """Whether, of the tiles of keys that rows see together, the last alone has hidden scores: under a causal mask
        where tiles of queries and of keys end together."""
        band, rows = p.mask.band, 64 if self.own_spans else self.q_tile
        if self.splits > 1 or not known_before_the_call(p) or band is None or band.low is not None:
            return False
        return band.high is not None and band.high >= 0 and band.high % rows == 0 and self.kv_tile % rows == 0

    def for_mask(self, p: Problem) -> HopperForwardTiles:
        """Without what this call's mask or its number of queries has no use for."""
        arrays = p.mask.interval_arrays or p.mask.segments
        alike = sees_all(p) and -(-p.q_len // self.q_tile) % 2 == 0
        known = p.mask.band is not None and not arrays
        alone = self.cluster == 2 and not alike
        many = self.splits == 1 and p.q_len > 64  # few rows wait for memory, whatever their softmax does
        first_maximum = self.first_maximum and many and p.dtype == jnp.bfloat16 and not p.per_score
        last_keys_first = self.last_keys_first and self.one_ragged_tile(p)
        whole = (sees_all(p) or last_keys_first) and p.kv_len % self.kv_tile == 0
        held = whole and p.softcap is None and self.held_columns < p.qk_dim and p.qk_dim % _SWIZZLED_COLUMNS == 0
        return dataclasses.replace(
            self,
            own_spans=self.own_spans and known,
            last_keys_first=last_keys_first,
            held_columns=self.held_columns if held else 0,
            first_maximum=first_maximum,
            keys_before_wait=self.keys_before_wait if first_maximum else 0,
            cluster=1 if alone else self.cluster,
            takes_turns=self.takes_turns or alone,
            out_by_values=self.out_by_values and p.qk_dim == p.v_dim,
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
        return next((t for t in deeper if t.smem_bytes(p.qk_dim, p.v_dim) <= HOPPER_SMEM_BYTES), tiles)

    @classmethod
    def _of_many_rows(cls, problem: Problem) -> HopperForwardTiles:
        p = problem
        deepest = max(p.qk_dim, p.v_dim)
        causal = p.mask.band is not None and p.mask.band.high is not None
        longest = max(p.q_len, p.kv_len)
        # Measured on H200s, 2026-11-22 and 23: bench/NOTES.md. A persistent grid hides a block's start, which short
        # rows feel. Tiles of unequal length are dealt out evenly, when tracing or, of a mask of arrays, in the call.
        in_the_call, known = dealt_in_the_call(p), causal and known_before_the_call(p)
        deals = known or in_the_call
        windowed = p.mask.band is not None and p.mask.band.low is not None
        persistent = deals or (not causal and p.kv_len <= 4096)
        blocks = HOPPER_SMS if persistent else 0
        if deepest <= 64:
            orders = {"takes_turns": False, "own_spans": True, "last_keys_first": True, "keys_before_wait": 64}
            own = cls(3, 128, 3, 2, HOPPER_SMS, **orders)
            gains = own.one_ragged_tile(p) or (windowed and _keys_seen(p, 128) <= 1152)
            if known and (longest <= 512 or (longest > 1024 and gains)):
                return own
            if causal and longest <= 1024:
                turns = longest > 512
                return cls(2, 128, 3, 2, HOPPER_SMS, takes_turns=turns, last_keys_first=True, keys_before_wait=32)
            if p.mask.interval_arrays or p.per_score:  # the mask's registers do not fit in three warpgroups' share
                return cls(2, 128, stages=3, q_slots=2 if in_the_call else 1, blocks=HOPPER_SMS if in_the_call else 0)
            if sees_all(p):
                return cls(3, 128, 3, 2, HOPPER_SMS, takes_turns=False, keys_before_wait=16)
            return cls(3, 128, stages=3, q_slots=2 if persistent else 1, blocks=blocks)
        if deepest <= 128:
            if p.dropout_rate:
                return cls(2, 64, stages=4)  # the keep decisions' registers do not fit beside 128 scores a row
            if sees_all(p):
                return cls(2, 128, q_slots=2, blocks=HOPPER_SMS, takes_turns=False, cluster=2)
            tiles = cls(2, 128, q_slots=2 if persistent else 1, blocks=blocks, last_keys_first=longest > 1024)
            gains = tiles.last_keys_first and tiles.one_ragged_tile(p)
            return dataclasses.replace(
                tiles, takes_turns=not (in_the_call or gains), keys_before_wait=32 if gains else 0
            )
        blocks = HOPPER_SMS if deals else 0
        tiles = cls(2, 128, takes_turns=False, blocks=blocks)
        if p.v_dim <= 128 and tiles.smem_bytes(p.qk_dim, p.v_dim) <= HOPPER_SMEM_BYTES:
            return tiles
        tiles = dataclasses.replace(tiles, kv_tile=64, own_spans=known)
        longer = known and not windowed and longest > 512
        if _out_by_values_pays(p) and (sees_all(p) or (p.v_dim > 192 and (longer or in_the_call))):
            before_wait = 64 if p.v_dim > 192 else 0
            return dataclasses.replace(tiles, blocks=HOPPER_SMS, keys_before_wait=before_wait, out_by_values=True)
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
    value_multiple = _TMA_COLUMNS
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
        return _SWIZZLED_COLUMNS * self.panels

    def smem_bytes(self, qk_dim: int, v_dim: int) -> int:
        """Of 16-bit tiles, of dQ's and of row vectors in 32 bits; barriers take less than the last KiB."""
        qk_dim, v_dim = padded_depth(qk_dim, self.depth_multiple), padded_depth(v_dim, self.value_multiple)
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
            holds_keys=apart and self.holds_keys,
            whole_heads=whole,
            cluster=self.cluster if whole else 1,
        )
        # dQ in the kernel, and its keys, may take a slot's room.
        fits = tiles.smem_bytes(p.qk_dim, p.v_dim) <= HOPPER_SMEM_BYTES
        return tiles if fits else dataclasses.replace(tiles, stages=min(self.stages, 2))

    def leaves_d_scores(self, problem: Problem) -> bool:
        """No mask, or over as many keys as queries a causal one or a window, and any intervals within; whole tiles; dS
        fits, of a group of heads or, within a window, of all."""
        p, band = problem, problem.mask.band
        own = band is None
        if band is not None and band.high is not None and p.q_len == p.kv_len:
            own = band.high == 0 if band.low is None else band.low <= 0 <= band.high
        whole = p.q_len % self.kv_tile == p.kv_len % self.kv_tile == 0 and p.qk_dim == p.v_dim in (64, 128)
        if p.per_score or not own or not whole:
            return False
        return scores_group(p) > 0 or (self.holds_keys and scores_in_parts(p) is not None)

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
            short = window[0] * cls.kv_tile <= WIDEST_WINDOW_APART.get(p.qk_dim, 0)
        else:
            short = max(p.q_len, p.kv_len) <= LONGEST_D_QUERY_APART.get(p.qk_dim, 0)
        timed = known_before_the_call(p) or p.qk_dim == 128
        tiles_held = min(p.q_len, p.kv_len) // cls.kv_tile
        long = tiles_held >= _FEWEST_TILES_HELD * (1 if band is None else 2)
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
        blocks = HOPPER_SMS if persistent and not holds_keys else 0
        three = blocks and d_query_apart and not shallow and p.softcap is None and kv_tiles > _MOST_TWO_SLOT_TILES
        choice = {"blocks": blocks, "d_query_apart": d_query_apart, "holds_keys": holds_keys}
        return dataclasses.replace(tiles, stages=3 if three else tiles.stages, **choice)


@dataclasses.dataclass(frozen=True)
class HopperDeepBackwardTiles:
    """The shape of the backward kernel for depths over 128: tiles of 64 queries and 64 keys.

    `d_query_apart`: dS goes to the GPU's memory, and another kernel makes dQ of it, where `leaves_d_scores`. Elsewhere
    `d_query_slots` parts of dQ, each of as many `columns`, are on their way to the GPU's memory.
    """

    q_tile = kv_tile = 64
    depth_multiple = _SWIZZLED_COLUMNS
    """Of the query's depth: dQ is made by panels of so many columns."""
    value_multiple = _SWIZZLED_COLUMNS
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

    def smem_bytes(self, qk_dim: int, v_dim: int) -> int:
        """Of 16-bit tiles, and of dQ's in 32 bits; row vectors take 2 KiB, barriers less than the last."""
        qk_dim, v_dim = padded_depth(qk_dim, self.depth_multiple), padded_depth(v_dim, self.value_multiple)
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

"""How many heads leave their dS in the GPU's memory at a time, in attention's backward for Hopper."""

from __future__ import annotations

import functools
from typing import NamedTuple

from fast_layers.ops.attention.config import HOPPER_SMS, MAX_SHALLOW_DEPTH, SWIZZLED_COLUMNS, known_before_the_call
from fast_layers.ops.attention.kernel_operands import padded_depth
from fast_layers.ops.attention.problem import Problem

TILE = 128
"""Queries and keys of a tile."""
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
_SUM_COST = 0.014
"""Likewise, to add dK and dV of a tile of keys to what is there: 256 KiB to be read and written."""
_D_QUERY_COST = 0.3
"""Likewise, to make dQ of a tile of dS."""
LONGEST_WHOLE = 16_384
"""Rows up to here leave dS of all their queries: as measured."""
_LATE_FOR_PAIRS = 0.01
"""Parts are of more pairs where all are finished so little later: of few, all tiles of keys start at once."""
_LATE_FOR_QUERIES = 0.01
"""Likewise, parts of the queries are larger: 32 heads on 8, of 32,768 tokens, were 1 to 2 % faster with 128 or 64 tiles
of queries of one or two heads at a time than with 32 of four (bench/NOTES.md)."""


def window_tiles(problem: Problem) -> tuple[int, int] | None:
    """By tiles of 128: how many queries see a tile of keys of a static window, and how many of them stand before it."""
    band = problem.mask.band
    if band is None or band.low is None or band.high is None:
        return None
    before, behind = -(-band.high // TILE), -(band.low // TILE)
    return min(before + 1 + behind, problem.q_len // TILE), before


def scores_tiles(problem: Problem) -> int:
    """Tiles of 128 queries and 128 keys that the backward leaves of a query head's dS."""
    if window := window_tiles(problem):
        return window[0] * (problem.kv_len // TILE)
    q_tiles, kv_tiles = problem.q_len // TILE, problem.kv_len // TILE
    return q_tiles * kv_tiles if problem.mask.band is None else q_tiles * (q_tiles + 1) // 2


class Share(NamedTuple):
    """Of whom dS is left at a time."""

    pairs: int
    """Of an example and a key/value head."""
    heads: int
    """Of each pair's query heads."""
    q_tiles: int
    """Of 128 queries: all of them, or without a mask a part, of so many each."""

    def launches(self, problem: Problem) -> int:
        """Of a kernel that leaves dS, and one that makes dQ of it."""
        p, groups = problem, -(-problem.batch * problem.kv_heads // self.pairs)
        return groups * (p.group // self.heads) * (p.q_len // TILE // self.q_tiles)

    def duration(self, problem: Problem, sum_cost: float = 0.0) -> float:
        """Of all pairs, one share after the other, in a tile's time on each SM; of no window. `sum_cost`: of adding to
        dK and dV of a tile of keys."""
        p, kv_tiles = problem, problem.kv_len // TILE
        work = self.pairs * scores_tiles(p) / HOPPER_SMS
        if p.mask.band is None:
            # Tiles of keys are alike, and a block takes one after the other; else the short ones fill the end.
            work = -(-self.pairs * kv_tiles // HOPPER_SMS) * self.q_tiles
        longest = max(work, self.q_tiles)
        return self.launches(p) * (self.heads * longest + _GROUP_COST + self.pairs * kv_tiles * sum_cost)

    def d_query_duration(self, problem: Problem) -> float:
        """Likewise, of dQ without a mask."""
        turns = -(-self.pairs * self.heads * self.q_tiles // HOPPER_SMS)
        return self.launches(problem) * turns * _D_QUERY_COST * (problem.kv_len // TILE)


def _duration(problem: Problem, pairs: int, heads: int, sum_cost: float = 0.0) -> float:
    return Share(pairs, heads, problem.q_len // TILE).duration(problem, sum_cost)


def _most_tiles(problem: Problem) -> int:
    """Of dS in memory at a time."""
    p = problem
    integers = 4 * p.batch * p.heads * p.q_len * padded_depth(p.qk_dim, SWIZZLED_COLUMNS)
    causal = p.mask.band is not None and p.mask.band.low is None
    uneven = causal and p.group == 1 and max(p.qk_dim, p.v_dim) <= MAX_SHALLOW_DEPTH
    integers *= _MOST_UNEVEN_SCORES if uneven or not known_before_the_call(p) else _MOST_D_SCORES
    return int(min(MOST_D_SCORES_BYTES, integers)) // (TILE * TILE * p.dtype.itemsize)


def most_scores_pairs(problem: Problem, heads: int) -> int:
    """How many pairs of an example and a key/value head may leave dS of so many of their query heads at a time, by
    memory alone."""
    return min(most_scores_heads(problem) // heads, problem.batch * problem.kv_heads)


def most_scores_heads(problem: Problem) -> int:
    """Likewise, how many query heads."""
    return _most_tiles(problem) // scores_tiles(problem)


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
        several = p.mask.band is not None and pairs * (p.kv_len // TILE) >= _LEAST_TOLD_PIECES
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
    worth_it = (1 + _MOST_GROUPS_LOSE) * _duration(p, total, p.group)
    durations = {choice: _duration(p, *choice, _SUM_COST) for choice in choices if _duration(p, *choice) <= worth_it}
    in_time = (1 + _LATE_FOR_PAIRS) * min(durations.values(), default=0.0)
    return max((choice for choice, duration in durations.items() if duration <= in_time), default=None)


@functools.cache
def scores_by_queries(problem: Problem) -> Share | None:
    """For long rows of heads that share keys, without a mask, of which dS of a head is too much. None for others, and
    where parts of the queries would lose too much."""
    p, total, all_tiles = problem, problem.batch * problem.kv_heads, problem.q_len // TILE
    if p.q_len <= LONGEST_WHOLE or p.group == 1 or p.mask.band is not None or not known_before_the_call(p):
        return None
    choices = [
        Share(pairs, heads, q_tiles)
        for q_tiles in _divisors(all_tiles)
        for pairs in _divisors(total)
        for heads in _divisors(p.group)
        if pairs * heads * q_tiles * (p.kv_len // TILE) <= _most_tiles(p)
    ]

    def takes(share: Share, sum_cost: float) -> float:
        return share.duration(p, sum_cost) + share.d_query_duration(p)

    # Not as all at once would, in whole turns: then calls that `jax.vmap` joins would not do as each alone.
    worth_it = (1 + _MOST_GROUPS_LOSE) * (1 + _D_QUERY_COST) * total * p.group * scores_tiles(p) / HOPPER_SMS
    durations = {share: takes(share, _SUM_COST) for share in choices if takes(share, 0.0) <= worth_it}
    in_time = (1 + _LATE_FOR_QUERIES) * min(durations.values(), default=0.0)
    found = [share for share, duration in durations.items() if duration <= in_time]
    return max(found, key=lambda share: share.q_tiles, default=None)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]

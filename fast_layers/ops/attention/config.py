"""What the choices of attention's kernels share: facts of a GPU, and of a call."""

from __future__ import annotations

from fast_layers.ops.attention.problem import Problem

HOPPER_SMEM_BYTES = 227 << 10
"""Shared memory that one block may have."""
PART_COLUMNS = 128
"""The columns of parts of the keys come in multiples of a warpgroup's threads, where rows are put together."""
HOPPER_SMS = 132
MAX_SHALLOW_DEPTH = 128
"""Of the backward with two equal warpgroups: beyond, dK and dV of 64 keys do not fit in one."""
MOST_DEALT_PIECES = 1 << 18
"""Of a persistent grid: tracing a call deals them out in Python, and their list becomes a constant of the program."""
TMA_COLUMNS = 16
"""What depths are a multiple of where no product asks for more."""
SWIZZLED_COLUMNS = 64
"""Of a tile of dS or weights in shared memory: what it is multiplied with there must be swizzled as it is."""
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

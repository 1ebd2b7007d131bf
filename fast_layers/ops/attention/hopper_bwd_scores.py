"""dS in the GPU's memory, for attention's backward on Hopper: where its tiles lie, and one array for groups of heads.

A kernel leaves dS, its keys first, and another one makes dQ of it. All heads' dS at once would grow with the square of
the length. So a group of heads after the other leaves it in one bounded array, and all write into the same results. A
group is of neighbouring pairs of an example and a key/value head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from fast_layers.ops.attention.config import most_scores_pairs, scores_group, scores_tiles, window_tiles
from fast_layers.ops.attention.hopper_call import ROWS
from fast_layers.ops.attention.hopper_grad_parts import Operands
from fast_layers.ops.attention.problem import Problem

TILE = 128
"""Queries and keys of a tile."""


@dataclasses.dataclass(frozen=True)
class LeftScores:
    """Where a tile of dS lies: in order of its keys, then its queries, those that a mask hides left out."""

    problem: Problem

    @property
    def tiles(self) -> int:
        """Of one query head."""
        return scores_tiles(self.problem)

    @property
    def pairs(self) -> int:
        """Of a group."""
        total = self.problem.batch * self.problem.kv_heads
        # Calls that `jax.vmap` joins leave dS if each alone would, if not in the fewest groups.
        return scores_group(self.problem) or -(-total // -(-total // most_scores_pairs(self.problem)))

    @property
    def groups(self) -> int:
        return -(-self.problem.batch * self.problem.kv_heads // self.pairs)

    @property
    def shape(self) -> tuple[int, int, int]:
        """By 64 queries, which lie together for all keys of a tile."""
        return self.pairs * self.problem.group * self.tiles * (TILE // ROWS), TILE, ROWS

    def row(self, head: Any, kv_index: Any) -> Any:
        """The place of a query tile among all tiles, less its index; `head`: of the query heads in a group."""
        p, q_tiles = self.problem, self.problem.q_len // TILE
        if window := window_tiles(p):
            width, before = window
            return head * self.tiles + kv_index * width - jnp.maximum(kv_index - before, 0)
        if p.mask.band is None:
            return head * self.tiles + kv_index * q_tiles
        return head * self.tiles + lax.div(kv_index * (2 * q_tiles - 1 - kv_index), 2)

    def first_pair(self, turn_ref: Any) -> Any:
        """In a kernel: of the group; `turn_ref` as `in_groups` gives it."""
        if turn_ref is None:
            return jnp.int32(0)
        # The last group is as large as the others, and may do some pairs again.
        return jnp.minimum(turn_ref[0] * self.pairs, self.problem.batch * self.problem.kv_heads - self.pairs)

    def in_groups(self, run: Callable[[Any, Sequence[Any]], None], *results: Any) -> tuple[Array, ...]:
        """What `run(turn, refs)` writes for each group, of the shapes and dtypes of `results`.

        `turn`: an array of the group's number, None where there is one group.
        """

        def group(turn, results):
            refs = [jax.new_ref(result) for result in results]
            run(turn, refs)
            return tuple(ref[...] for ref in refs)

        empty = tuple(lax.empty(result.shape, result.dtype) for result in results)
        if self.groups == 1:
            return group(None, empty)
        return lax.fori_loop(0, self.groups, lambda i, results: group(i[None], results), empty)


def gradients(p: Problem, operands: Operands, leave: Callable[..., Array], d_query: Callable[..., None]):
    """(dQ, dK, dV), padded as the operands are, by two kernels for each group.

    `leave(left, operands, turn, d_key_ref, d_value_ref)` writes dK and dV, and gives dS;
    `d_query(left, d_scores, key, turn, d_query_ref)` writes dQ.
    """
    left = LeftScores(p)

    def run(turn, results):
        d_query_ref, d_key_ref, d_value_ref = results
        d_scores = leave(left, operands, turn, d_key_ref, d_value_ref)
        d_query(left, d_scores, operands.key, turn, d_query_ref)

    return left.in_groups(run, operands.query, operands.key, operands.value)

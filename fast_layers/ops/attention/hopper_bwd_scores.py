"""dS in the GPU's memory, for attention's backward on Hopper: where its tiles lie, and one array for groups of heads.

A kernel leaves dS, its keys first, and another one makes dQ of it. All heads' dS at once would grow with the square of
the length. So a group of heads after the other leaves it in one bounded array, and all write into the same results. A
group is of neighbouring pairs of an example and a key/value head. Where too few pairs would fit with all query heads
that share the key/value head, they come in parts of those heads, or of longer rows without a mask in parts of their
queries, one after the other, and add to dK and dV in float32, in that order in every run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from fast_layers.ops.attention.hopper_bwd_groups import (
    TILE,
    Share,
    most_scores_pairs,
    scores_by_queries,
    scores_group,
    scores_in_parts,
    scores_tiles,
    window_tiles,
)
from fast_layers.ops.attention.hopper_call import ROWS
from fast_layers.ops.attention.hopper_grad_parts import Operands
from fast_layers.ops.attention.problem import Problem


@dataclasses.dataclass(frozen=True)
class LeftScores:
    """Where a tile of dS lies: in order of its keys, then its queries, those that a mask hides left out."""

    problem: Problem
    may_sum: bool = False
    """Whether the kernel can add to dK and dV, so that a pair's query heads, or their queries, may come in parts."""
    places: int | None = None
    """For so many query heads' dS, if all are done in one launch: later ones take the places of those before."""

    @property
    def tiles(self) -> int:
        """Of one query head, or of the part of its queries."""
        if self.q_parts == 1:  # of which a mask may hide some
            return scores_tiles(self.problem)
        return self.q_tiles * (self.problem.kv_len // TILE)

    @property
    def q_tiles(self) -> int:
        """Of a query head, those that leave dS at a time."""
        return self._share.q_tiles

    @property
    def q_parts(self) -> int:
        """Into which the queries are divided: neighbours, as many in each."""
        return self.problem.q_len // TILE // self.q_tiles

    @functools.cached_property
    def _share(self) -> Share:
        """Of a group."""
        p, total = self.problem, self.problem.batch * self.problem.kv_heads
        if self.may_sum and self.places is None and (by_queries := scores_by_queries(p)):
            return by_queries
        return Share(*self._pairs_and_heads(p, total), p.q_len // TILE)

    def _pairs_and_heads(self, p: Problem, total: int) -> tuple[int, int]:
        if self.places is not None:
            return self.places, 1
        if pairs := scores_group(p):
            return pairs, p.group
        if self.may_sum and (in_parts := scores_in_parts(p)):
            return in_parts
        # Calls that `jax.vmap` joins leave dS if each alone would, if not in the fewest groups.
        if most := most_scores_pairs(p, p.group):
            return -(-total // -(-total // most)), p.group
        return max(n for n in range(1, most_scores_pairs(p, 1) + 1) if total % n == 0), 1

    @property
    def pairs(self) -> int:
        """Of a group; or query heads, for whose dS there are places."""
        return self._share.pairs

    @property
    def heads(self) -> int:
        """Of each pair's query heads, those whose dS is there at a time."""
        return self._share.heads

    @property
    def parts(self) -> int:
        """Into which the query heads of a pair, and their queries, are divided."""
        return self.problem.group // self.heads * self.q_parts

    @property
    def groups(self) -> int:
        """Of pairs, each in as many `parts`."""
        return -(-self.problem.batch * self.problem.kv_heads // self.pairs)

    @property
    def shape(self) -> tuple[int, int, int]:
        """By 64 queries, which lie together for all keys of a tile."""
        return self.pairs * self.heads * self.tiles * (TILE // ROWS), TILE, ROWS

    def results(self, operands: Operands) -> tuple[Array, Array, Array]:
        """For dQ, dK and dV: these two zeros in float32 where parts add to them."""

        def empty(like):
            return lax.empty(like.shape, like.dtype)

        keys = operands.key, operands.value
        d_key, d_value = (empty(x) if self.parts == 1 else jnp.zeros(x.shape, jnp.float32) for x in keys)
        return empty(operands.query), d_key, d_value

    def place(self, index: Any) -> Any:
        """Of a pair's dS, or a query head's, among all for which there is place."""
        return index if self.places is None else lax.rem(index, self.places)

    def row(self, head: Any, kv_index: Any, first_tile: Any = 0) -> Any:
        """The place of a query tile among all tiles, less its index; `head`: of the query heads at a time;
        `first_tile`: of the part of the queries."""
        p, first = self.problem, head * self.tiles
        if window := window_tiles(p):
            width, before = window
            return first + kv_index * width - jnp.maximum(kv_index - before, 0)
        if p.mask.band is None:
            return first + kv_index * self.q_tiles - first_tile
        return first + lax.div(kv_index * (2 * self.q_tiles - 1 - kv_index), 2)

    def first_pair(self, turn_ref: Any) -> Any:
        """In a kernel: of the group; `turn_ref` as `in_groups` gives it."""
        if turn_ref is None:
            return jnp.int32(0)
        group = turn_ref[0] if self.parts == 1 else lax.div(turn_ref[0], self.parts)
        # The last group is as large as the others, and may do some pairs again, but where parts are summed.
        return jnp.minimum(group * self.pairs, self.problem.batch * self.problem.kv_heads - self.pairs)

    def first_head(self, turn_ref: Any) -> Any:
        """In a kernel: of those that share a key/value head, the first of the part."""
        if turn_ref is None or self.heads == self.problem.group:
            return jnp.int32(0)
        return lax.div(lax.rem(turn_ref[0], self.parts), self.q_parts) * self.heads

    def first_tile(self, turn_ref: Any) -> Any:
        """In a kernel: of the part of the queries."""
        return jnp.int32(0) if self.q_parts == 1 else lax.rem(turn_ref[0], self.q_parts) * self.q_tiles

    def query_heads(self, turn_ref: Any) -> Callable[[Any], Any]:
        """In a kernel: which of all examples' query heads is the given one of those at a time."""
        first = self.first_pair(turn_ref) * self.problem.group + self.first_head(turn_ref)
        if self.heads == self.problem.group:
            return lambda head: first + head
        return lambda head: first + lax.div(head, self.heads) * self.problem.group + lax.rem(head, self.heads)

    def in_groups(self, run: Callable[[Any, Sequence[Any]], None], *results: Array) -> tuple[Array, ...]:
        """What `run(turn, refs)` makes of `results` for each group, part by part.

        `turn`: an array of its number, None where there is one.
        """

        def group(turn, results):
            refs = [jax.new_ref(result) for result in results]
            run(turn, refs)
            return tuple(ref[...] for ref in refs)

        if self.groups * self.parts == 1:
            return group(None, results)
        return lax.fori_loop(0, self.groups * self.parts, lambda i, results: group(i[None], results), results)


def gradients(
    p: Problem,
    operands: Operands,
    leave: Callable[..., Array],
    d_query: Callable[..., None],
    may_sum: bool = False,
):
    """(dQ, dK, dV), padded as the operands are, by two kernels for each group.

    `leave(left, operands, turn, d_key_ref, d_value_ref)` writes dK and dV, or adds to them where there are `parts`, and
    gives dS; `d_query(left, d_scores, key, turn, d_query_ref)` writes dQ.
    """
    left = LeftScores(p, may_sum)

    def run(turn, results):
        d_query_ref, d_key_ref, d_value_ref = results
        d_scores = leave(left, operands, turn, d_key_ref, d_value_ref)
        d_query(left, d_scores, operands.key, turn, d_query_ref)

    results = left.in_groups(run, *left.results(operands))
    return tuple(result.astype(p.dtype) for result in results)

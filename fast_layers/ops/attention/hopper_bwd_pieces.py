"""The pieces of work of attention's backward for Hopper at depths up to 128: one for each tile of keys.

In which order blocks take them, and which query tiles each goes through.

Axis letters: B batch; I pieces, J tiles of keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from fast_layers.kernel_parts.tile_order import TileOrder, deal, schedule_of
from fast_layers.ops.attention.config import HOPPER_SMS, MOST_DEALT_PIECES, known_before_the_call, sees_all
from fast_layers.ops.attention.hopper_bwd_config import CUT_DEPTH, HopperBackwardTiles
from fast_layers.ops.attention.hopper_bwd_scores import TILE
from fast_layers.ops.attention.hopper_bwd_visits import Visits, places
from fast_layers.ops.attention.hopper_grad_parts import folds_lse
from fast_layers.ops.attention.problem import Problem
from fast_layers.ops.attention.tile_mask import TileMask

KV_TILE = HopperBackwardTiles.kv_tile
_PIECES_TOGETHER = 2 * HOPPER_SMS
"""Of a group of heads, at least: two for each SM, since few long ones leave most SMs idle at the end."""
_SHORT_TILES = 8
_MANY_PIECES = 12 * HOPPER_SMS
"""The rows and pieces for which an H200 was timed to be faster with groups that fit in its cache: bench/NOTES.md."""
_MOST_PARTS = 16
"""Of a piece, which a warpgroup adds up in its registers."""
_CUT_GAINS = 0.8
"""Of the time that the pieces left take whole, what they may take cut."""
_JOIN_COST = 3.0
"""Of the kernel that adds them up, in the time of a step; like the gain, reckoned, not timed."""
_MANY_TILES = 64
"""Of keys, from which on pieces are put in order where the mask tells their length in the call only."""
_MOST_RANKED = 2048
"""Pieces of a group of heads: each is compared with each."""
_PIECE_COST = 0.7
"""Of what a piece of work takes besides its steps, in the time of one."""


def piece_order(pairs: int, kv_tiles: int, bytes_per_head: int, fits_first: bool = False) -> TileOrder:
    """Longest pieces first among the heads of a group, of which the last must leave no SM waiting for long.

    Or with `fits_first` among those whose queries and gradients fit in the cache together, and no more.
    """
    return TileOrder.of(pairs, kv_tiles, 1, bytes_per_head, 1 if fits_first else _PIECES_TOGETHER)


def fits_first(p: Problem, tiles: HopperBackwardTiles, kv_tiles: int) -> bool:
    """Where all pieces are alike, and where short rows have the cache wait for memory and pieces are many."""
    many = p.batch * p.kv_heads * kv_tiles >= _MANY_PIECES
    short_and_deep = kv_tiles <= _SHORT_TILES and max(p.qk_dim, p.v_dim) > 64
    return sees_all(p) or (known_before_the_call(p) and not tiles.blocks and short_and_deep and many)


def steps_of_each(p: Problem, q_tile: int, order: TileOrder) -> np.ndarray:
    """Of each piece, by the static band alone."""
    band, k_start = p.mask.band, np.arange(order.tiles) * KV_TILE
    first, last = np.zeros_like(k_start), np.full_like(k_start, p.q_len)
    if band is not None and band.high is not None:
        first = np.clip(k_start - band.high, 0, p.q_len)
    if band is not None and band.low is not None:
        last = np.clip(k_start + KV_TILE - band.low, 0, p.q_len)
    steps = p.group * np.maximum(-(-last // q_tile) - first // q_tile, 0)
    return steps[np.arange(order.total) % (order.group * order.tiles) // order.group]


class Cut(NamedTuple):
    """How the last pieces are cut by their queries, so that blocks end together (hopper_bwd_parts.py)."""

    whole: int
    """So many pieces are not cut; behind them the parts of the others are counted."""
    pieces: int
    parts: int
    """Of each piece."""
    steps: int
    """Of a part, for each query head."""

    @classmethod
    def of(cls, p: Problem, tiles: HopperBackwardTiles, order: TileOrder) -> Cut | None:
        """Where pieces are alike, and those that are left when all blocks have taken as many are done sooner so."""
        depths, alike = (p.qk_dim, p.v_dim), sees_all(p) and tiles.sums_d_query and tiles.panels == 1
        if not alike or depths != (CUT_DEPTH, CUT_DEPTH) or not 0 < tiles.blocks < order.total:
            return None
        rest, q_tiles = order.total % tiles.blocks, -(-p.q_len // tiles.q_tile)

        def takes(parts: int) -> float:
            rounds = -(-rest * parts // tiles.blocks)
            return rounds * (p.group * q_tiles / parts + _PIECE_COST) + (_JOIN_COST if parts > 1 else 0)

        parts = min((n for n in range(1, _MOST_PARTS + 1) if q_tiles % n == 0), key=takes)
        return cls(order.total - rest, rest, parts, q_tiles // parts) if takes(parts) < _CUT_GAINS * takes(1) else None


def schedule(p: Problem, tiles: HopperBackwardTiles, order: TileOrder, cut: Cut | None = None) -> np.ndarray | None:
    """Which pieces each block of a persistent grid takes, as `deal` says it; None for one block a piece."""
    if not 0 < tiles.blocks < order.total <= MOST_DEALT_PIECES or not known_before_the_call(p):
        return None
    steps = steps_of_each(p, tiles.q_tile, order)
    if cut is not None:
        steps = np.append(steps[: cut.whole], np.full(cut.pieces * cut.parts, p.group * cut.steps))
    # With a piece without steps the keys before the last would be in use still.
    return deal(steps + _PIECE_COST, tiles.blocks) if steps.min() > 0 else None


def clusters(p: Problem, tiles: HopperBackwardTiles) -> int:
    """Of blocks that share a head, or blocks alone, where they go through whole heads."""
    return min(tiles.blocks // tiles.cluster, p.batch * p.kv_heads)


def by_head(p: Problem, tiles: HopperBackwardTiles) -> tuple[TileOrder, np.ndarray]:
    """All tiles of keys of a pair for a block, or dealt to those of a cluster in turns; hopper_bwd_in_order.py has why
    in this order."""
    pairs, kv_tiles, step = p.batch * p.kv_heads, -(-p.kv_len // KV_TILE), clusters(p, tiles)
    kv_index = np.arange(kv_tiles) if sees_all(p) else np.arange(kv_tiles)[::-1]
    taken = [
        np.add.outer(np.arange(cluster, pairs, step) * kv_tiles, kv_index[rank :: tiles.cluster]).reshape(-1)
        for cluster in range(step)
        for rank in range(tiles.cluster)
    ]
    return TileOrder(pairs, kv_tiles, 1), schedule_of(taken)


def ranks(order: TileOrder) -> bool:
    """Whether pieces are put in order by their length, `longest_first`."""
    return order.tiles >= _MANY_TILES and order.group * order.tiles <= _MOST_RANKED


def longest_first(p: Problem, spans: Int[Array, "B|1 J 2"], order: TileOrder) -> Int[Array, " I"]:
    """The pieces of each group of heads by their length, which the mask tells in the call only."""
    # So many neighbouring heads have the same example's spans.
    alike = order.group if spans.shape[0] == 1 else math.gcd(order.group, p.kv_heads)
    units = order.group // alike
    steps = spans[..., 1] - spans[..., 0]
    if spans.shape[0] > 1:
        example = np.arange(order.heads // alike).reshape(-1, units) * alike // p.kv_heads
        steps = steps[example].swapaxes(1, 2).reshape(-1, units * order.tiles)
    size = steps.shape[1]
    place = jnp.arange(size, dtype=jnp.int32)
    rank = places(steps)
    first = jnp.arange(0, order.total, size * alike, dtype=jnp.int32)[:, None, None, None]
    found = first + place * alike + jnp.arange(alike, dtype=jnp.int32)[:, None]
    is_next = rank[:, None, None] == place[:, None, None]
    return jnp.where(is_next, found, 0).sum(-1, dtype=jnp.int32).reshape(-1)


def _hides_at_start(p: Problem, tiles: HopperBackwardTiles, mask: TileMask, heads: int) -> bool:
    """Whether hidden scores start from -inf, so that no branch stands between products.

    Where several query heads go by a tile of held keys, a loop for ragged tiles and one for the others are 3 to 4 %
    faster.
    """
    return folds_lse(p) and mask.is_band and not (tiles.holds_keys and heads > 1)


class Piece(NamedTuple):
    """The work on one tile of keys: its query tiles, for each query head of the group.

    With `ragged_apart` those that the mask cuts through come before the `full` ones of their head.
    """

    problem: Problem
    mask: TileMask
    hides_at_start: bool
    """Whether hidden scores start from -inf."""
    ragged_apart: bool
    heads: int
    """Of the query heads that share the key/value head, as many as are gone through."""
    left_index: Any
    """Of an example and a key/value head, within a group; or of a query head, in the order in which they leave dS."""
    example: Any
    kv_head: Any
    first_head: Any
    kv_index: Any
    first: Any
    last: Any
    full: tuple[Any, Any]
    start: Any
    """The query tile that comes first, before those behind it and then those before it."""
    part: Any = None
    """Which it is of all parts of pieces that are cut, less than 0 for a whole piece, None where none are cut. A part's
    query tiles are those from `start` on."""
    first_tile: Any = 0
    """Of 128 queries, of the part that leaves dS."""

    @classmethod
    def of(
        cls,
        p: Problem,
        tiles: HopperBackwardTiles,
        order: TileOrder,
        mask: TileMask,
        inputs: Any,
        whose: Callable[[Any], tuple[Any, Any]],
        heads: int,
        queries: tuple[int, Any] | None,
        cut: Cut | None,
        index: Any,
    ) -> Piece:
        """`whose`: of which pair of an example and a key/value head a head of `order` is, and from which of the pair's
        query heads on, of which the piece goes through `heads`. `queries`, of which dS is left at a time, if not of
        all: how many tiles of 128, and the first of them."""
        part: Any = None
        if cut is not None:
            part = index - cut.whole
            index = jnp.where(part < 0, index, cut.whole + lax.div(part, cut.parts))
        left_index, kv_index = order.locate(index)
        pair, first_head = whose(left_index)
        example, kv_head = lax.div(pair, p.kv_heads), lax.rem(pair, p.kv_heads)
        first, last = mask.query_span(example, kv_index, inputs.q_span)
        if tiles.d_query_apart:
            # dS is read by whole tiles.
            halves = TILE // tiles.q_tile
            first, last = lax.div(first, halves) * halves, lax.div(last + (halves - 1), halves) * halves
            if queries is not None:
                first, last = queries[1] * halves, (queries[1] + queries[0]) * halves
        at_start = _hides_at_start(p, tiles, mask, heads)
        apart = tiles.ragged_apart and mask.hides and mask.is_band and not at_start
        full = last, last
        if apart:
            full_first, full_last = mask.full_queries(kv_index * KV_TILE, KV_TILE)
            full = jnp.clip(full_first, first, last), jnp.clip(full_last, first, last)
        # Pieces that are all at the same queries would add to the same rows of dQ at once. A mask keeps them apart.
        # Where they leave dS instead, they share what they load.
        keeps_apart = sees_all(p) and tiles.sums_d_query
        start = lax.div(kv_index * last, order.tiles) if keeps_apart else jnp.int32(0)
        if cut is not None:
            start = jnp.where(part < 0, start, lax.rem(part, cut.parts) * cut.steps)
            last = jnp.where(part < 0, last, cut.steps)
        place = left_index, example, kv_head, kv_head * p.group + first_head, kv_index
        first_tile = 0 if queries is None else queries[1]
        return cls(p, mask, at_start, apart, heads, *place, first, last, full, start, part, first_tile)

    @classmethod
    def visited(
        cls,
        p: Problem,
        tiles: HopperBackwardTiles,
        mask: TileMask,
        visits: Visits,
        pairs: int,
        first_pair: Any,
        block: Any,
    ) -> Piece:
        pair, kv_index, first, last, *full = visits.of_keys(block, pairs, first_pair, p.kv_heads)
        example, kv_head = lax.div(first_pair + pair, p.kv_heads), lax.rem(first_pair + pair, p.kv_heads)
        first, last = (x * (TILE // tiles.q_tile) for x in (first, last))
        place = pair, example, kv_head, kv_head * p.group, kv_index
        return cls(p, mask, False, False, p.group, *place, first, last, (full[0], full[1]), first)

    def is_ragged(self, q_index: Any) -> Any:
        return (q_index < self.full[0]) | (q_index >= self.full[1])

    @property
    def steps(self) -> Any:
        return (self.last - self.first) * self.heads

    def each_query_tile(self, role: Callable[..., Any], state: Any, hold: Callable[[], Any] = list) -> Any:
        """The last `state = role(head, q_index, state, hides, held)`.

        `hides`: whether the mask may hide some scores; `held`: else what `hold()` gives before the loop, or nothing.
        """

        def some(head, begin, end, hides, place, state):
            held = hold() if not hides or self.hides_at_start else []
            return lax.fori_loop(begin, end, lambda i, state: role(head, place(i), state, hides, held), state)

        def of_head(head, state):
            if not self.ragged_apart:
                return some(head, self.first, self.last, self.mask.hides, self._from_start, state)
            # A branch between products would keep ptxas from overlapping them.
            full_first, full_last = self.full
            fulls, after_fulls = full_last - full_first, self.mask.low is not None
            ragged = (lambda i: i + jnp.where(i < full_first, 0, fulls)) if after_fulls else lambda i: i
            state = some(head, self.first, self.last - fulls, True, ragged, state)
            return some(head, full_first, full_last, False, lambda i: i, state)

        if self.heads == 1:
            return of_head(self.first_head, state)
        return lax.fori_loop(self.first_head, self.first_head + self.heads, of_head, state)

    def _from_start(self, i: Any) -> Any:
        if not sees_all(self.problem):
            return i
        last = self.last if self.part is None else -(-self.problem.q_len // self.mask.q_tile)
        i += self.start
        return jnp.where(i < last, i, i - last)

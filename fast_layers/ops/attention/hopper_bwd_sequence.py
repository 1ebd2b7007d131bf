"""Which blocks of attention's backward on Hopper leave dS, and which make dQ of it, in one launch.

hopper_bwd_beside.py has what they do.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from fast_layers.kernel_parts.tile_order import TileOrder
from fast_layers.ops.attention.config import HOPPER_SMS, known_before_the_call
from fast_layers.ops.attention.hopper_bwd_groups import TILE, most_scores_heads, window_tiles
from fast_layers.ops.attention.problem import Problem

TILES = 2
"""Of queries, that a block makes dQ of: so an SM loads less for as many products."""
_TILES_TOGETHER = 64
"""Of queries, at least, of as few heads as have them: what neighbours read lies near then."""
_AHEAD = HOPPER_SMS
"""So many tiles of keys more are begun before dQ of a head than stand before it: its own are done then."""
_SLACK = HOPPER_SMS // 2
"""And so many more before the head whose place it takes."""
_FEWEST_SHARED_TILES = 64
"""Of keys that query heads share, under a causal mask: of shorter rows, and without a mask, a kernel that goes through
several heads with a tile of keys, and another for dQ, were as fast or faster."""
_MOST_LEAD = 0.3
"""Of all tiles of keys, what is begun before any dQ is made; so much of dQ is made alone at the end."""


@dataclasses.dataclass(frozen=True)
class Sequence:
    """Which blocks leave dS and which make dQ of it, by their numbers.

    After the first `lead` blocks, that leave dS, the two kinds take turns so that of both as much of all is done.
    """

    pieces: TileOrder
    """That leave dS, of query heads: first of those that are the first of their key/value head, then of the second."""
    pairs: int
    """Of an example and a key/value head."""
    q_tiles: int
    """Of each head; each makes a block."""
    side: int
    """So many heads' dQ is made side by side."""

    @classmethod
    def of(cls, p: Problem) -> Sequence | None:
        """With as many heads side by side as have tiles of keys for all SMs: more, and fewer, were slower.

        None where persistent blocks, or a kernel of its own for dQ, are as fast (bench/NOTES.md), and where dS of so
        many heads takes more memory than there.
        """
        if p.q_len % (TILES * TILE) or not known_before_the_call(p) or window_tiles(p) is not None:
            return None
        heads, kv_tiles, q_tiles = p.batch * p.heads, p.kv_len // TILE, p.q_len // (TILES * TILE)
        if p.group > 1 and (p.mask.band is None or kv_tiles < _FEWEST_SHARED_TILES):
            return None
        group = max(d for d in range(1, heads + 1) if heads % d == 0 and (d == 1 or d * kv_tiles <= HOPPER_SMS))
        sides = [d for d in range(1, group + 1) if group % d == 0]
        side = next((d for d in sides if d * q_tiles * TILES >= _TILES_TOGETHER), group)
        found = cls(TileOrder(heads, kv_tiles, group), p.batch * p.kv_heads, q_tiles, side)
        lasts = found.lead <= _MOST_LEAD * found.pieces.total and found.places <= most_scores_heads(p)
        return found if lasts else None

    @property
    def places(self) -> int:
        """For so many heads' dS."""
        more = -(-(_AHEAD + _SLACK) // self.pieces.tiles)
        return min(2 * self.pieces.group + more, self.pieces.heads)

    @property
    def total(self) -> int:
        return self.pieces.heads * (self.pieces.tiles + self.q_tiles)

    @property
    def lead(self) -> int:
        """All tiles of keys that a group's dQ is made of, and some more."""
        return min(self.pieces.group * self.pieces.tiles + _AHEAD, self.pieces.total)

    def pieces_before(self, block: Any) -> Any:
        """How many of the blocks before this one leave dS."""
        shared = math.gcd(self.pieces.tiles, self.q_tiles)
        of_pieces, of_queries = self.pieces.tiles // shared, self.q_tiles // shared
        turn = of_pieces + of_queries
        later = jnp.maximum(block - self.lead, 0)
        queries = lax.div(later, turn) * of_queries + lax.div(lax.rem(later, turn) * of_queries, turn)
        return jnp.minimum(block - queries, self.pieces.total)

    def pair(self, head: Any) -> tuple[Any, Any]:
        """Of a head in the order of the pieces: its pair, and which it is of the pair's query heads."""
        if self.pairs == self.pieces.heads:
            return head, 0
        return lax.rem(head, self.pairs), lax.div(head, self.pairs)

    def locate_query(self, index: Any) -> tuple[Any, Any]:
        """(head, tile) of the `index`-th block that makes dQ, from the last tile to the first."""
        head, tiles_after = TileOrder(self.pieces.heads, self.q_tiles, self.side).locate(index)
        return head, self.q_tiles - 1 - tiles_after

"""Every piece of work is taken once, by one block, whatever the order."""

from __future__ import annotations

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from fast_layers.kernel_parts.tile_order import (
    L2_BUDGET_BYTES,
    TileOrder,
    deal,
    each_dealt,
    snake,
    turns,
)


@st.composite
def orders(draw) -> TileOrder:
    sharing = draw(st.integers(1, 4))
    heads = sharing * draw(st.integers(1, 12))
    bytes_per_shared = draw(st.sampled_from([1, L2_BUDGET_BYTES // 5, L2_BUDGET_BYTES // 2, 2 * L2_BUDGET_BYTES]))
    return TileOrder.of(heads, draw(st.integers(1, 9)), sharing, bytes_per_shared)


@hypothesis.given(orders())
def test_each_place_is_located_once(order: TileOrder):
    head, tile = order.locate(jnp.arange(order.total, dtype=jnp.int32))
    places = set(zip(head.tolist(), tile.tolist(), strict=True))
    assert places == {(h, t) for h in range(order.heads) for t in range(order.tiles)}
    assert len(places) == order.total == order.heads * order.tiles


@hypothesis.given(orders())
def test_a_group_is_done_before_the_next_and_tile_by_tile(order: TileOrder):
    assert order.heads % order.group == 0
    head, tile = (np.asarray(x) for x in order.locate(jnp.arange(order.total, dtype=jnp.int32)))
    groups = (head // order.group).reshape(-1, order.group * order.tiles)
    np.testing.assert_array_equal(groups, np.arange(len(groups))[:, None] * np.ones_like(groups))
    within = tile.reshape(-1, order.tiles, order.group)
    np.testing.assert_array_equal(within, np.broadcast_to(np.arange(order.tiles)[:, None], within.shape))


@pytest.mark.parametrize(
    ("heads", "sharing", "bytes_per_shared", "group"),
    [
        (32, 1, 1, 32),
        (32, 1, L2_BUDGET_BYTES // 5, 4),  # 5 fit, and 4 divides
        (32, 4, L2_BUDGET_BYTES // 5, 16),
        (7, 1, L2_BUDGET_BYTES // 5, 1),
        (6, 1, 2 * L2_BUDGET_BYTES, 1),  # not even one fits
        (6, 3, 2 * L2_BUDGET_BYTES, 3),
    ],
)
def test_a_group_is_what_fits_in_the_cache(heads, sharing, bytes_per_shared, group):
    assert TileOrder.of(heads, 5, sharing, bytes_per_shared).group == group


@pytest.mark.parametrize(("pieces", "group"), [(10, 2), (11, 4), (20, 4), (21, 8), (1000, 16)])
def test_a_group_has_pieces_enough(pieces, group):
    assert TileOrder.of(16, 5, 1, L2_BUDGET_BYTES // 3, pieces).group == group


def _indices(turn, block, blocks):
    # `blocks` is static in a kernel; its arithmetic is the same.
    return snake(turn, block, blocks)


@hypothesis.given(st.integers(1, 200), st.integers(1, 40))
def test_turns_take_each_piece_once(total: int, blocks: int):
    """Also with more blocks than pieces."""
    taken: list[int] = []
    for block in range(blocks):
        count = int(turns(total, jnp.int32(block), blocks))
        assert abs(count - total / blocks) < 1
        turn = jnp.arange(count, dtype=jnp.int32)
        taken += _indices(turn, jnp.full_like(turn, block), jnp.full_like(turn, blocks)).tolist()
    assert sorted(taken) == list(range(total))


@hypothesis.given(st.lists(st.floats(0.5, 100), min_size=1, max_size=60), st.integers(1, 12))
def test_a_deal_gives_each_piece_once_to_who_is_free_first(durations, blocks):
    schedule = deal(durations, blocks)
    shares = [row[1 : row[0] + 1] for row in schedule]
    assert sorted(np.concatenate(shares)) == list(range(len(durations)))
    assert all((np.diff(share) > 0).all() for share in shares)
    assert not any(row[row[0] + 1 :].any() for row in schedule)
    assert schedule.shape[1] == max(map(len, shares)) + 2  # a block reads one ahead
    longest = max(sum(durations[piece] for piece in share) for share in shares)
    assert longest <= sum(durations) / blocks + max(durations) + 1e-6


def test_a_block_goes_through_what_it_was_dealt():
    schedule = deal([3.0, 1.0, 1.0, 5.0], 3)
    for block, (count, *pieces) in enumerate(schedule.tolist()):
        nothing = jnp.full(3, -1, jnp.int32)
        taken = each_dealt(jnp.asarray(schedule), block, lambda turn, piece, taken: taken.at[turn].set(piece), nothing)
        assert taken.tolist() == pieces[:count] + [-1] * (3 - count)


def test_a_snake_evens_out_pieces_of_falling_size():
    blocks, rounds = 4, 6
    sizes = np.arange(blocks * rounds, 0, -1)
    sums = [
        sum(sizes[int(snake(jnp.int32(turn), jnp.int32(block), blocks))] for turn in range(rounds))
        for block in range(blocks)
    ]
    assert len(set(sums)) == 1

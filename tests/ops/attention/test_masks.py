"""Structured masks against the definitions, position by position; their algebra, their hulls, their pytrees."""

from __future__ import annotations

import functools
import operator
import sys

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from selection import examples

import fast_layers
from fast_layers import masks
from ops.attention import oracle

B, N = 2, 2


def _expected(mask, q_len, kv_len, q_offset=0):
    """[B, 1|N, T, S] from the definitions. `q_offset` is a scalar or [B]."""
    see = functools.partial(oracle.visible, B, q_len, kv_len)
    match mask:
        case masks.And(parts):
            return functools.reduce(operator.and_, (_expected(m, q_len, kv_len, q_offset) for m in parts))
        case masks.Offset(inner, offset) if isinstance(offset, str):
            assert offset == "bottom_right"
            return _expected(inner, q_len, kv_len, q_offset + kv_len - q_len)
        case masks.Offset(inner, offset):
            return _expected(inner, q_len, kv_len, q_offset + np.asarray(offset))
        case masks.Causal():
            return see(q_offset=q_offset, causal=True)
        case masks.LocalWindow(left, right):
            return see(q_offset=q_offset, window=(left, right))
        case masks.Prefix(lengths):
            return see(q_offset=q_offset, prefix=lengths)
        case masks.KeyLengths(lengths):
            return see(kv_lengths=lengths)
        case masks.QueryLengths(lengths):
            return see(q_lengths=lengths)
        case masks.Segments(query_ids, None):
            return see(q_ids=query_ids, kv_ids=query_ids)
        case masks.Segments(query_ids, key_ids):
            return see(q_ids=query_ids, kv_ids=key_ids)
        case masks.Dense(array):
            array = np.asarray(array)
            return see(dense=array)
    raise AssertionError(f"no definition for {mask}")


@st.composite
def calls(draw):
    """(mask, T, S): any mask, nested up to two deep."""
    q_len, kv_len = draw(st.integers(1, 9)), draw(st.integers(1, 9))

    def ints(shape, low, high):
        return np.asarray(
            draw(st.lists(st.integers(low, high), min_size=int(np.prod(shape)), max_size=int(np.prod(shape)))),
            np.int32,
        ).reshape(shape)

    def per_example(low, high):
        return ints((B,), low, high) if draw(st.booleans()) else draw(st.integers(low, high))

    def ids(length):
        return ints((length,) if draw(st.booleans()) else (B, length), -2, 3)

    def leaf():
        kinds = ["causal", "window", "prefix", "key lengths", "query lengths", "pair", "dense"]
        if q_len == kv_len:
            kinds.append("segments")
        match draw(st.sampled_from(kinds)):
            case "causal":
                return masks.Causal()
            case "window":
                side = st.none() | st.integers(0, 10)
                return masks.LocalWindow(draw(side), draw(side))
            case "prefix":
                return masks.Prefix(per_example(0, kv_len))
            case "key lengths":
                return masks.KeyLengths(per_example(0, kv_len + 2))
            case "query lengths":
                return masks.QueryLengths(per_example(0, q_len + 2))
            case "segments":
                return masks.Segments(ids(q_len))
            case "pair":
                return masks.Segments(ids(q_len), ids(kv_len))
            case _:
                shape = [draw(st.sampled_from([1, n])) for n in (B, N, q_len, kv_len)]
                rng = np.random.default_rng(draw(st.integers(0, 99)))
                return masks.Dense(rng.random(shape[draw(st.integers(0, 2)) :]) < 0.6)

    def maybe_offset(mask):
        kind = draw(st.sampled_from(["none", "none", "int", "array", "bottom_right"]))
        if kind == "none":
            return mask
        offset = {"int": lambda: draw(st.integers(-4, 9)), "array": lambda: ints((B,), -4, 9)}.get(kind, lambda: kind)()
        return masks.Offset(mask, offset)

    def conjunction(part):
        return functools.reduce(operator.and_, (part() for _ in range(draw(st.integers(1, 3)))))

    def inner():
        return maybe_offset(conjunction(leaf))

    return maybe_offset(conjunction(inner)), q_len, kv_len


def _array(mask, q_len, kv_len):
    array = np.asarray(mask.as_array(q_len, kv_len, batch=(B,)))
    assert array.dtype == bool
    return np.broadcast_to(array, (B, N, q_len, kv_len))


@examples(24)
@hypothesis.given(calls())
def test_any_mask_matches_its_definition(call):
    np.testing.assert_array_equal(_array(*call), np.broadcast_to(_expected(*call), _array(*call).shape))


@examples(20)
@hypothesis.given(calls())
def test_intervals_hold_every_visible_key(call):
    """What kernels skip by must never be too narrow."""
    mask, q_len, kv_len = call
    start, stop = mask.lower((B,), q_len, kv_len).intervals(q_len, kv_len)
    start = np.zeros((1, q_len)) if start is None else np.asarray(start)
    stop = np.full((1, q_len), kv_len) if stop is None else np.asarray(stop)
    assert ((start >= 0) & (start <= kv_len) & (stop >= 0) & (stop <= kv_len)).all()
    keys = np.arange(kv_len)
    hull = (keys >= start[:, None, :, None]) & (keys < stop[:, None, :, None])
    assert not (_expected(*call) & ~hull).any()


@examples(12)
@hypothesis.given(calls())
def test_masks_are_pytrees(call):
    """A mask goes through jit, and comes back, unchanged; static parts stay static."""
    mask, q_len, kv_len = call
    leaves, structure = jax.tree.flatten(mask)
    assert not any(isinstance(leaf, str) for leaf in leaves)
    rebuilt = jax.tree.unflatten(structure, leaves)
    np.testing.assert_array_equal(_array(rebuilt, q_len, kv_len), _array(mask, q_len, kv_len))
    hash(structure)
    through = jax.tree.unflatten(structure, [jnp.asarray(leaf) for leaf in leaves])
    np.testing.assert_array_equal(_array(through, q_len, kv_len), _array(mask, q_len, kv_len))


def test_segment_hulls_are_tight():
    """First to one past the last key of the row's segment, not the whole row."""
    form = masks.Segments(np.array([5, 5, 0, -1, 0, 7, 3])).lower((), 7, 7)
    np.testing.assert_array_equal(form.start, [[0, 0, 2, 0, 2, 5, 6]])
    np.testing.assert_array_equal(form.stop, [[2, 2, 5, 0, 5, 6, 7]])
    np.testing.assert_array_equal(form.scattered, [[False, False, True, False, True, False, False]])
    cross = masks.Segments(np.array([4, 1, 9]), np.array([1, 4, 4, 1, -1])).lower((), 3, 5)
    np.testing.assert_array_equal(cross.start, [[1, 0, 0]])
    np.testing.assert_array_equal(cross.stop, [[3, 4, 0]])
    np.testing.assert_array_equal(cross.scattered, [[False, True, False]])


def test_ids_of_one_bucket_share_a_hull():
    """Wider than their keys, which changes what is loaded and not what is seen."""
    ids = np.array([1, 1, 1 + 2**16, 1 + 2**16, 2])
    form = masks.Segments(ids).lower((), 5, 5)
    np.testing.assert_array_equal(form.start, [[0, 0, 0, 0, 4]])
    np.testing.assert_array_equal(form.stop, [[4, 4, 4, 4, 5]])
    np.testing.assert_array_equal(form.scattered, [[True, True, True, True, False]])
    np.testing.assert_array_equal(masks.Segments(ids[:2] + 2**16, ids[:2]).lower((), 2, 2).scattered, [[True, True]])
    np.testing.assert_array_equal(masks.Segments(ids).as_array(5, 5)[0, 0], ids[:, None] == ids)


def test_large_ids_stay_apart():
    """Ids up to the ends of int32: combining two sets must not multiply them into one another."""
    top = np.iinfo(np.int32).max
    a, b = np.array([top, top, 0, top - 1]), np.array([top, 0, top, top])
    both = masks.Segments(a) & masks.Segments(b)
    np.testing.assert_array_equal(both.as_array(4, 4)[0, 0], (a[:, None] == a) & (b[:, None] == b))


@examples(12)
@hypothesis.given(calls())
def test_and_is_associative_and_order_does_not_matter(call):
    a, q_len, kv_len = call
    b, c = masks.LocalWindow(3, None) & masks.QueryLengths(5), masks.Prefix(np.array([2, 0]))
    left, right, flipped = (a & b) & c, a & (b & c), c & (b & a)
    assert isinstance(left, masks.And)
    assert len(left.parts) == len(right.parts)
    for other in (right, flipped):
        np.testing.assert_array_equal(_array(left, q_len, kv_len), _array(other, q_len, kv_len))


@pytest.mark.parametrize(
    "mask",
    [
        masks.KeyLengths(np.arange(4)),
        masks.QueryLengths(np.arange(4)),
        masks.Prefix(np.arange(4)),
        masks.Segments(np.arange(24).reshape(4, 6) // 5),
        masks.Segments(np.arange(24).reshape(4, 6) // 5) & masks.Segments(np.arange(24).reshape(4, 6) // 7),
        masks.Offset(masks.Causal(), np.arange(4)),
        masks.Causal() & masks.KeyLengths(np.arange(4)),
        masks.Dense(np.arange(4 * 36).reshape(4, 1, 6, 6) % 5 > 1),
    ],
    ids=lambda mask: type(mask).__name__,
)
def test_vmap_over_a_mask(mask):
    """Mapped masks give what a loop over their members gives; jit inside."""
    arrays = jax.vmap(jax.jit(lambda m: m.as_array(6, 6)[0]))(mask)
    for i in range(4):
        member = jax.tree.map(lambda leaf, i=i: leaf[i], mask)
        np.testing.assert_array_equal(arrays[i], member.as_array(6, 6)[0])


def test_static_offsets_need_no_arrays():
    """A causal band at a known offset is two numbers, not an interval per row."""
    for mask in (
        masks.Causal(),
        masks.Offset(masks.Causal(), 3),
        masks.Offset(masks.Offset(masks.Causal(), "bottom_right"), -1) & masks.LocalWindow(5, None),
    ):
        assert jax.tree.leaves(mask) == []
        form = mask.lower((B,), 4, 9)
        assert jax.tree.leaves(form) == []
        assert form.band is not None


_TOP = 2**31 - 1
FAR_OFFSETS = [0, 3, -3, 5 - _TOP, _TOP - 5, 2**30 - 1, -(2**30), -_TOP]
FAR_SIZES = [None, 0, 2, 2**30 - 2, 2**30, _TOP - 6, _TOP - 5, _TOP, _TOP + 1, 2**32, sys.maxsize]


@pytest.mark.parametrize("kind", ["int", "array", "int and array", "two arrays"])
def test_far_offsets_and_windows_do_not_wrap(kind):
    """As in the integers: near the ends of int32 nothing that is seen is hidden, and nothing hidden is seen."""
    queries, keys = np.arange(4), np.arange(6)

    def offset_by(offset, mask):
        match kind:
            case "int":
                return masks.Offset(mask, offset)
            case "array":
                return masks.Offset(mask, jnp.int32(offset))
            case "int and array":
                return masks.Offset(masks.Offset(mask, jnp.int32(7)), offset - 7)
        return masks.Offset(masks.Offset(mask, jnp.int32(offset // 2)), jnp.int32(offset - offset // 2))

    for offset in FAR_OFFSETS:
        ahead = [[key - query - offset for key in keys.tolist()] for query in queries.tolist()]
        for left, right in [(size, None) for size in FAR_SIZES] + [(None, size) for size in FAR_SIZES]:
            expected = [[(left is None or x >= -left) and (right is None or x <= right) for x in row] for row in ahead]
            seen = offset_by(offset, masks.LocalWindow(left, right)).as_array(4, 6)[0, 0]
            np.testing.assert_array_equal(seen, expected, f"{offset=} {left=} {right=}")


def test_far_lengths_aligned_at_the_bottom_right():
    """The offset is a difference of lengths, each of which may be far, or unsigned."""
    x = np.ones((3, 4, 1, 2), np.float32)

    @jax.jit
    def lse(queries, keys):
        lengths = {"query_seq_lengths": queries, "key_value_seq_lengths": keys}
        options = {"is_causal": True, "q_offset": "bottom_right", "return_residual": True}
        return fast_layers.dot_product_attention(x, x, x, **lengths, **options)[1]

    def seen(queries, keys):
        return np.round(np.exp(lse(queries, keys)[..., 0] - np.sqrt(2)))

    expected = [[0, 0, 1, 2], [4, 4, 4, 4], [0, 0, 0, 0]]
    np.testing.assert_array_equal(seen(jnp.array([4, 4, _TOP]), jnp.array([2, _TOP, -_TOP - 1])), expected)
    np.testing.assert_array_equal(seen(jnp.full(3, 4, jnp.uint8), jnp.full(3, 2, jnp.uint8)), [expected[0]] * 3)


def test_far_prefix():
    for offset, sees in ((_TOP, True), (-_TOP, False)):
        for q_offset in (offset, jnp.int32(offset)):
            array = masks.Offset(masks.Prefix(1), q_offset).as_array(2, 3)[0, 0]
            np.testing.assert_array_equal(array, [[True, sees, sees]] * 2)


def test_a_window_beyond_all_keys_is_none():
    """And costs what no mask costs."""
    assert masks.LocalWindow(sys.maxsize, 2**31 - 5).lower((B,), 4, 9).is_empty
    assert masks.LocalWindow(sys.maxsize, 0).lower((B,), 4, 9).band == masks.Causal().lower((B,), 4, 9).band


def test_numbers_of_other_widths_are_not_cut():
    """Unsigned and 64-bit arrays, whose values nobody can look at while tracing."""
    far = jax.jit(lambda lengths: masks.KeyLengths(lengths).as_array(1, 4, batch=(2,)))
    np.testing.assert_array_equal(far(jnp.array([2**32 - 1, 2], jnp.uint32)).sum(-1)[:, 0, 0], [4, 2])
    assert masks.Offset(masks.Causal(), jnp.uint32(2**32 - 1)).as_array(2, 2).all()
    with jax.enable_x64(True):
        ids = jnp.array([0, 2**32, -(2**33), 2**32, 2**63 - 1])
        array = jax.jit(lambda ids: masks.Segments(ids).as_array(5, 5)[0, 0])(ids)
        np.testing.assert_array_equal(array, (ids[:, None] == ids) & (ids >= 0))
        lengths = jnp.array([2**32 + 2, 3, -(2**40)])
        np.testing.assert_array_equal(masks.KeyLengths(lengths).as_array(1, 4, batch=(3,)).sum((1, 2, 3)), [4, 3, 0])


def test_batch_dims_flatten_row_major():
    lengths = np.array([[1, 2, 3], [4, 0, 2]])
    array = masks.KeyLengths(lengths).as_array(1, 4, batch=(2, 3))
    np.testing.assert_array_equal(array.sum(-1).reshape(2, 3), lengths)


BAD = [
    (lambda: masks.LocalWindow(-1, 0), ValueError, r"LocalWindow left=-1: must be an int >= 0, or None"),
    (lambda: masks.LocalWindow(0, 1.5), ValueError, r"LocalWindow right=1\.5: must be an int >= 0"),
    (lambda: masks.LocalWindow(True), ValueError, r"LocalWindow left=True: must be an int"),
    (
        lambda: masks.Causal() & np.ones((3, 3), bool),
        TypeError,
        r"ndarray; wrap a boolean array: .*masks\.Dense",
    ),
    (lambda: masks.Causal() & None, TypeError, r"cannot combine a mask with NoneType"),
    (
        lambda: masks.Dense(np.ones((3, 3))).as_array(3, 3),
        ValueError,
        r"mask has dtype float\d\d: must be bool.*bias=",
    ),
    (
        lambda: masks.Dense(np.ones((2, 3), bool)).as_array(3, 3),
        ValueError,
        r"\(2, 3\): must be broadcastable to",
    ),
    (
        lambda: masks.Dense(np.ones((1, 1, 1, 3, 3), bool)).as_array(3, 3),
        ValueError,
        r"must be broadcastable to",
    ),
    (
        lambda: masks.KeyLengths(np.ones(3)).as_array(3, 3),
        ValueError,
        r"key lengths must be integers, got dtype float",
    ),
    (
        lambda: masks.KeyLengths(np.arange(3)).as_array(3, 3, batch=(2,)),
        ValueError,
        r"key lengths must have shape \(2,\) \(one per example\) or be a scalar, got \(3,\)",
    ),
    (
        lambda: masks.QueryLengths(np.arange(3)).as_array(3, 3),
        ValueError,
        r"query lengths must have shape \(\)",
    ),
    (
        lambda: masks.Prefix([[1]]).as_array(3, 3, batch=(1,)),
        ValueError,
        r"prefix lengths must have shape \(1,\)",
    ),
    (
        lambda: masks.Segments(np.zeros(4, int)).as_array(3, 3),
        ValueError,
        r"of the queries must have shape.*got \(4,\)",
    ),
    (
        lambda: masks.Segments(np.zeros(3, int)).as_array(3, 5),
        ValueError,
        r"segment_ids of the keys must have shape \(5,\), got \(3,\)",
    ),
    (
        lambda: masks.Segments(np.zeros(3, int)).as_array(3, 5, batch=(2,)),
        ValueError,
        r"segment_ids of the keys must have shape \(2, 5\) or \(5,\), got \(3,\)",
    ),
    (
        lambda: masks.Segments(np.zeros(3)).as_array(3, 3),
        ValueError,
        r"segment_ids of the queries must be integers",
    ),
    (
        lambda: masks.Offset(masks.Causal(), "top_left").as_array(3, 3),
        ValueError,
        r"q_offset='top_left': must be .*'bottom_right'",
    ),
    (lambda: masks.Offset(masks.Causal(), 1.5).as_array(3, 3), ValueError, r"q_offset must be integers"),
    (
        lambda: masks.Offset(masks.Causal(), np.arange(3)).as_array(3, 3, batch=(2,)),
        ValueError,
        r"q_offset must have",
    ),
    (lambda: np.ones((3, 3), bool) & masks.Causal(), TypeError, r"with ndarray; wrap a boolean array: mask & masks"),
    (lambda: jnp.ones((3, 3), bool) & masks.Causal(), TypeError, r"with ArrayImpl; wrap a boolean array: mask & masks"),
    (lambda: masks.Causal() and masks.LocalWindow(3), ValueError, r"neither true nor false: join masks by &, not"),
    (lambda: masks.Causal() or masks.LocalWindow(3), ValueError, r"neither true nor false: join masks by &, not by"),
    (lambda: masks.Causal() | masks.LocalWindow(3), TypeError, r"joined by & alone; .*masks\.Dense\(array\)"),
    (lambda: np.ones((3, 3), bool) | masks.Causal(), TypeError, r"joined by & alone; .*Dense\(array\), of"),
    (lambda: masks.Causal() ^ masks.LocalWindow(3), TypeError, r"joined by & alone; .*Dense\(array\), of mask"),
    (lambda: ~masks.Causal(), TypeError, r"joined by & alone; write out what else is wanted"),
    (lambda: masks.Mask().as_array(3, 3), ValueError, r"^Mask does not say .*: take one of And, Causal, Dense, .*Segm"),
    (lambda: masks.Causal().as_array(-1, 4), ValueError, r"as_array q_len=-1: must be an int >= 0"),
    (lambda: masks.Causal().as_array(4, 4.0), ValueError, r"as_array kv_len=4\.0: must be an int >= 0"),
]


@pytest.mark.parametrize(("make", "error", "message"), BAD, ids=[message[:30] for *_, message in BAD])
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_masks_built_alike_are_equal():
    """Numbers by value, arrays by identity; what is equal has one hash."""
    ids = np.zeros(4, int)
    makers = [
        masks.Causal,
        lambda: masks.LocalWindow(3, None),
        lambda: masks.Segments(ids),
        lambda: masks.Segments(ids, jnp.zeros(4, int)),
        lambda: masks.KeyLengths(3),
        lambda: masks.Offset(masks.Causal(), 2),
        lambda: masks.Offset(masks.Causal(), "bottom_right"),
        lambda: masks.Causal() & masks.Segments(ids),
    ]
    made = [make() for make in makers]
    for i, one in enumerate(made):
        assert [one == other for other in made] == [i == j for j in range(len(made))]
    for make in (makers[0], makers[1], makers[2], makers[5], makers[7]):
        assert make() == make()
        assert hash(make()) == hash(make())
    assert masks.Segments(ids) != masks.Segments(ids.copy())
    assert masks.Causal() != 3

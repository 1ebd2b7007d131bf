"""The keep decisions: known answers, the documented formula in scalar Python, tiles, and statistics."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fast_layers.kernel_parts import dropout

# Published test vectors of philox4x32 with 7 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
]


def _words(text):
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, answer):
    got = dropout.philox4x32([jnp.uint32(w) for w in _words(counter)], [jnp.uint32(w) for w in _words(key)])
    assert [int(word) for word in got] == _words(answer)
    assert _philox(_words(counter), _words(key)) == _words(answer)


def _philox(counter, key, rounds=7):
    c, (k0, k1) = list(counter), key
    for _ in range(rounds):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k0, b % 2**32, (a >> 32) ^ c[3] ^ k1, a % 2**32]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c


def _keep(words, b, h, q, k, rate):
    """One decision, as the documentation states it."""
    n, rest = divmod(k, 32)
    w, rest = divmod(rest, 8)
    c, p = divmod(rest, 2)
    word = _philox([q, 4 * n + c, h, b], words)[w]
    half = word >> 16 if p else word % 65536
    return half >= round(rate * 65536)


def _seed(batch=2, heads=3, key=0, broadcast=False):
    return dropout.make_seed(jax.random.key(key), batch, heads, broadcast=broadcast)


@pytest.mark.parametrize("rate", [0.1, 0.5, 1 / 3])
def test_documented_formula(rate):
    seed = _seed()
    words = [int(w) for w in seed.words]
    got = np.asarray(dropout.keep_tile(seed, 1000, 96, 4, 64, rate))
    want = [
        [[[_keep(words, b, h, q, k, rate) for k in range(96, 160)] for q in range(1000, 1004)] for h in range(3)]
        for b in range(2)
    ]
    np.testing.assert_array_equal(got, want)


def test_the_seed_comes_from_the_key_alone():
    rng = jax.random.key(7)
    seed = dropout.make_seed(rng, 2, 3, broadcast=False)
    np.testing.assert_array_equal(seed.words, jax.random.bits(rng, (2,), jnp.uint32))
    np.testing.assert_array_equal(seed.batch_index, [0, 1])
    np.testing.assert_array_equal(seed.head_index, [0, 1, 2])
    legacy = dropout.make_seed(jax.random.PRNGKey(7), 2, 3, broadcast=False)
    np.testing.assert_array_equal(legacy.words, seed.words)


@pytest.mark.parametrize(("q_tile", "kv_tile"), [(1, 32), (8, 64), (16, 128)])
def test_tiles_are_cut_from_one_whole(q_tile, kv_tile):
    seed = _seed()
    whole = np.asarray(dropout.keep_tile(seed, 0, 0, 32, 256, 0.4))
    tile = jax.jit(lambda q, k: dropout.keep_tile(seed, q, k, q_tile, kv_tile, 0.4))
    for q in range(0, 32, q_tile):
        for k in range(0, 256, kv_tile):
            np.testing.assert_array_equal(tile(q, k), whole[:, :, q : q + q_tile, k : k + kv_tile])


def test_a_shards_rows_are_those_of_the_whole():
    seed = _seed(4, 6)
    whole = np.asarray(dropout.keep_tile(seed, 0, 0, 8, 32, 0.5))
    shard = seed._replace(batch_index=seed.batch_index[2:], head_index=seed.head_index[3:5])
    np.testing.assert_array_equal(dropout.keep_tile(shard, 0, 0, 8, 32, 0.5), whole[2:, 3:5])


def test_broadcast_gives_one_mask_that_of_the_first_example_and_head():
    shared = dropout.keep_tile(_seed(broadcast=True), 0, 0, 16, 64, 0.5)
    assert shared.shape == (1, 1, 16, 64)
    np.testing.assert_array_equal(shared[0, 0], dropout.keep_tile(_seed(), 0, 0, 16, 64, 0.5)[0, 0])


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.25, 0.5, 0.9, 0.999])
def test_keep_fraction(rate):
    keep = np.asarray(dropout.keep_tile(_seed(4, 8), 0, 0, 256, 512, rate))
    sigma = np.sqrt(rate * (1 - rate) / keep.size)
    assert abs(keep.mean() - (1 - rate)) < 4 * sigma + 2**-17
    # Also by head, by row and by key: no place is special.
    for axes in ((0, 2, 3), (0, 1, 3), (0, 1, 2)):
        means = keep.mean(axes)
        spread = np.sqrt(rate * (1 - rate) / (keep.size / means.size))
        assert np.abs(means - (1 - rate)).max() < 5.5 * spread
        if means.size > 100:
            assert 0.8 < means.std() / spread < 1.2


def test_threshold_is_the_rate_in_steps_of_sixteen_bits():
    assert dropout.threshold(0.5) == 1 << 15
    assert dropout.threshold(1 - 2**-16) == (1 << 16) - 1
    assert dropout.threshold(1e-9) == 0


SHIFTS = {
    "example": (1, 0, 0, 0),
    "head": (0, 1, 0, 0),
    "row": (0, 0, 1, 0),
    "key": (0, 0, 0, 1),
    "pair of keys": (0, 0, 0, 2),
    "word": (0, 0, 0, 8),
    "block": (0, 0, 0, 32),
    "diagonal": (0, 0, 1, 1),
    "anti-diagonal": (0, 0, 1, -1),
}


def _correlation(a, b):
    """In standard deviations of independent draws."""
    a, b = (np.where(x, 1.0, -1.0) for x in (a, b))
    return (a * b).mean() * np.sqrt(a.size)


@pytest.mark.parametrize("shift", SHIFTS.values(), ids=SHIFTS)
def test_neighbours_are_uncorrelated(shift):
    keep = np.asarray(dropout.keep_tile(_seed(3, 4), 0, 0, 128, 256, 0.5))
    here = keep[tuple(slice(max(s, 0), n + min(s, 0)) for s, n in zip(shift, keep.shape, strict=True))]
    there = keep[tuple(slice(max(-s, 0), n + min(-s, 0)) for s, n in zip(shift, keep.shape, strict=True))]
    assert abs(_correlation(here, there)) < 4


def test_keys_and_splits_are_uncorrelated():
    rng = jax.random.key(3)
    keys = [jax.random.key(4), rng, *jax.random.split(rng), jax.random.fold_in(rng, 7)]
    masks = [dropout.keep_tile(dropout.make_seed(k, 2, 2, broadcast=False), 0, 0, 128, 256, 0.5) for k in keys]
    for i, a in enumerate(masks):
        for b in masks[:i]:
            assert abs(_correlation(a, b)) < 4


def test_rates_are_nested():
    """What a high rate keeps, a lower one keeps too: the same sixteen bits against another threshold."""
    low, high = (np.asarray(dropout.keep_tile(_seed(), 0, 0, 32, 64, rate)) for rate in (0.2, 0.6))
    assert not (high & ~low).any()

"""Dropout's keep decision as a pure function of position, equal on every backend bit for bit.

Axis letters: B batch, N heads, T queries, S keys.

    keep(seed, b, h, q, k) = u16 >= round(rate * 2**16)
    u16 = one of the eight halves of Philox4x32-7(counter = (q, group(k), h, b), key = seed)

Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); seven rounds pass BigCrush.
One Philox call serves eight keys of a row. They are chosen as a Hopper wgmma accumulator hands them to one thread
(pairs of neighbours, 8 columns apart, within 32 columns), so a kernel needs neither shuffles nor discarded bits:
for k = 32 n + 8 w + 2 c + p the group is 4 n + c, the word is w and p picks the low or the high half.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, UInt32

KEYS_PER_BLOCK = 32
"""Keys that share the group numbering: tiles start and end at multiples of this."""
_ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LEVELS = 1 << 16


class DropoutSeed(NamedTuple):
    """The seed and the global indices of the rows at hand (a shard carries its own part of them)."""

    words: UInt32[Array, " 2"]
    batch_index: UInt32[Array, " B|1"]
    head_index: UInt32[Array, " N|1"]


def make_seed(rng: Array, batch: int, heads: int, *, broadcast: bool) -> DropoutSeed:
    """`broadcast` gives all examples and heads the same decisions: those of example 0, head 0."""
    words = jax.random.bits(rng, (2,), jnp.uint32)
    batch_index, head_index = (jnp.arange(1 if broadcast else n, dtype=jnp.uint32) for n in (batch, heads))
    return DropoutSeed(words, batch_index, head_index)


def threshold(rate: float) -> int:
    """A key is kept if its 16 bits are at least this."""
    return round(rate * _LEVELS)


def keep_tile(
    seed: DropoutSeed, q_start, k_start, q_tile: int, kv_tile: int, rate: float
) -> Bool[Array, "B|1 N|1 T S"]:
    """Decisions for queries [q_start, q_start + q_tile) and keys [k_start, k_start + kv_tile).

    `k_start` and `kv_tile` must be multiples of `KEYS_PER_BLOCK`.
    """
    blocks = kv_tile // KEYS_PER_BLOCK
    u32 = functools.partial(jnp.asarray, dtype=jnp.uint32)
    query = u32(q_start) + jnp.arange(q_tile, dtype=jnp.uint32)
    group = u32(k_start) // 8 + jnp.arange(4 * blocks, dtype=jnp.uint32)
    words = philox4x32(
        (
            query[None, None, :, None],
            group[None, None, None, :],
            seed.head_index[None, :, None, None],
            seed.batch_index[:, None, None, None],
        ),
        (seed.words[0], seed.words[1]),
    )
    halves = jnp.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], -1)
    batch, heads = seed.batch_index.shape[0], seed.head_index.shape[0]
    by_key = halves.reshape(batch, heads, q_tile, blocks, 4, 4, 2).swapaxes(4, 5)
    return by_key.reshape(batch, heads, q_tile, kv_tile) >= threshold(rate)


def philox4x32(counter, key, rounds: int = _ROUNDS, multiply_wide=None):
    """Four uint32 arrays from a counter of four and a key of two, broadcast against each other.

    `multiply_wide(a, b)` gives the (high, low) words of a constant times an array, where there is a better way than by
    pieces of 16 bits.
    """
    multiply = _multiply_wide if multiply_wide is None else multiply_wide
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = multiply(_MULTIPLIERS[0], c0)
        high1, low1 = multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + jnp.uint32(_WEYL[0]), k1 + jnp.uint32(_WEYL[1])
    return c0, c1, c2, c3


def _multiply_wide(a: int, b: UInt32[Array, ...]):
    """(high, low) words of the 64-bit product, from 16-bit pieces: 64-bit integers need the x64 flag."""
    a_low, a_high = jnp.uint32(a & 0xFFFF), jnp.uint32(a >> 16)
    b_low, b_high = b & 0xFFFF, b >> 16
    low_low, low_high, high_low = a_low * b_low, a_low * b_high, a_high * b_low
    middle = (low_low >> 16) + (low_high & 0xFFFF) + (high_low & 0xFFFF)
    high = a_high * b_high + (low_high >> 16) + (high_low >> 16) + (middle >> 16)
    return high, jnp.uint32(a) * b

"""The keep decisions of `dropout` inside a kernel, bit for bit the same, where the scores stand.

In a wgmma's accumulator a thread holds pairs of neighbours in a row of scores, 8 columns apart. Where a row is a query,
one Philox call gives all that a thread needs of 32 keys. Where a row is a key, a thread uses two of the eight halves
that a call gives. Where a thread holds a whole row, these are four calls for 32 keys, and one of eight halves.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from fast_layers.kernel_parts.dropout import KEYS_PER_BLOCK, philox4x32, threshold

_PAIRS = 8
"""Columns from one of a thread's pairs to the next; each has another word of the same Philox call."""


def keep_in_registers(
    words: tuple[Any, Any], example: Any, head: Any, q_start: Any, k_start: Any, shape: tuple[int, int], q_axis: int,
    rate: float, layout: Any,
) -> Any:  # fmt: skip
    """Decisions for a tile of scores, bool in the tile's `layout`.

    Args:
      words: the seed, two uint32 scalars.
      example, head: uint32 scalars, the indices that the decisions depend on.
      q_start, k_start: int32; the tile's first query, and its first key, a multiple of `KEYS_PER_BLOCK`.
      shape: of the tile, its keys a multiple of `KEYS_PER_BLOCK`, or of half of it where they are the rows.
      q_axis: 0 where rows are queries, 1 where they are keys.
      rate: of dropping.
    """
    part = (shape[0], _PAIRS)
    row, column = (plgpu.broadcasted_iota(jnp.int32, part, axis, layout=layout) for axis in (0, 1))
    query, key = (row, column) if q_axis == 0 else (column, row)
    pair = (key & (_PAIRS - 1)) >> 1

    def halves(first_query, first_group):
        """For each of the four words the half that belongs to the key."""
        counter = [query + first_query, pair + first_group]
        counter = [x.astype(jnp.uint32) for x in counter] + [lax.broadcast_in_dim(x, part, []) for x in (head, example)]
        made = philox4x32(counter, words, multiply_wide=_multiply_wide)
        return [jnp.where((key & 1) == 0, word & 0xFFFF, word >> 16).astype(jnp.int32) for word in made]

    group = lax.div(k_start, 8)
    numbers = []
    # Few columns at a time: all at once would take more registers than there are.
    if q_axis == 0:
        for n in range(shape[1] // KEYS_PER_BLOCK):
            numbers += halves(q_start, group + 4 * n)
    else:
        word = (key >> 3) & 3
        for start in range(0, shape[1], _PAIRS):
            by_word = halves(q_start + start, group + ((key >> 5) << 2))
            low, high = (jnp.where((word & 1) == 0, by_word[w], by_word[w + 1]) for w in (0, 2))
            numbers.append(jnp.where(word < 2, low, high))
    return jnp.concatenate([x >= threshold(rate) for x in numbers], axis=1)


def _multiply_wide(a: int, b: Any) -> tuple[Any, Any]:
    """(high, low) words of the 64-bit product: one instruction, where 16-bit pieces take nine."""
    with jax.enable_x64(True):
        wide = lax.convert_element_type(b, jnp.uint64) * jnp.uint64(a)
        high = lax.convert_element_type(wide >> jnp.uint64(32), jnp.uint32)
        return high, lax.convert_element_type(wide, jnp.uint32)

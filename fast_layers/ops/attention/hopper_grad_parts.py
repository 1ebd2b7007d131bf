"""What Hopper's backward kernels of attention share.

Axis letters: B batch, T queries, S keys, N query heads, K key/value heads, H query/key depth, V value depth; I tiles of
queries, J tiles of keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from fast_layers.kernel_parts.nearest_integers import nearest_integers
from fast_layers.kernel_parts.smem_tile import each_chunk, swizzled_columns
from fast_layers.ops.attention.kernel_operands import RowMask, pad_axis, round_up
from fast_layers.ops.attention.masks import MaskForm
from fast_layers.ops.attention.problem import Problem
from fast_layers.ops.attention.tile_logits import LogitOperands
from fast_layers.ops.attention.tile_mask import WGMMA

BY_QUERY = WGMMA.reduce(0)
BY_ROW = WGMMA.reduce(1)
_COLUMNS = 8
"""From one pair of a row's scores that a thread holds to its next."""


class KeyRows(NamedTuple):
    """The queries [start, stop) that see each key, where every document is in one piece. Keys are in whole tiles; no
    query sees those that are added."""

    start: Int[Array, "B|1 S"]
    stop: Int[Array, "B|1 S"]
    say_all: Int[Array, " B|1"]
    """Whether it is so in an example; else only the queries' intervals and ids tell who sees a key."""

    @classmethod
    def of(cls, p: Problem, form: MaskForm, kv_tile: int) -> KeyRows | None:
        """None where documents have no part in the mask, or queries are others than keys; with a soft cap or something
        for each score, whose registers leave none for them."""
        if form.scattered is None or form.start is None or form.stop is None:
            return None
        if p.q_len != p.kv_len or p.softcap is not None or p.per_score:
            return None
        start, stop = jnp.broadcast_arrays(form.start, form.stop)
        index = jnp.arange(p.kv_len, dtype=jnp.int32)
        # A query that sees any key shares its interval with all queries in it, and with no others: then those that
        # see a key are the interval of the query in the key's place.
        sees_none, edge = start >= stop, jnp.zeros_like(start[:, :1], dtype=bool)
        goes_on = (start[:, 1:] == start[:, :-1]) & (stop[:, 1:] == stop[:, :-1])
        begins = (start == index) | jnp.concatenate((edge, goes_on), 1)
        ends = (stop == index + 1) | jnp.concatenate((goes_on, edge), 1)
        say_all = (sees_none | (begins & ends & ~form.scattered)).all(-1)
        band = p.mask.band
        if band is not None and band.high is not None:
            start = jnp.maximum(start, index - band.high)
        if band is not None and band.low is not None:
            stop = jnp.minimum(stop, index + (1 - band.low))
        whole = round_up(p.kv_len, kv_tile)
        return cls(pad_axis(start, whole, 1), pad_axis(stop, whole, 1), say_all.astype(jnp.int32))

    def load(self, example: Any, k_start: Any, keys: int) -> KeyRows:
        """In a kernel: of so many keys, in registers, and `say_all` of their example as a condition."""
        refs: Any = self
        at = (example if refs.start.shape[0] > 1 else 0), pl.ds(k_start, keys)
        start, stop = (plgpu.load(x.at[at], layout=BY_ROW, optimized=False) for x in (refs.start, refs.stop))
        return KeyRows(start, stop, refs.say_all[example if refs.say_all.shape[0] > 1 else 0] != 0)

    def visible(self, q_start: Any, queries: int) -> Any:
        """In a kernel, of what was loaded: [keys, queries]. A thread compares few numbers, of the first part's columns,
        with constants of each part."""
        part = (self.start.shape[0], _COLUMNS)
        query = q_start + plgpu.broadcasted_iota(jnp.int32, part, 1, layout=WGMMA)
        after, before = (query - lax.broadcast_in_dim(x, part, [0]) for x in (self.start, self.stop))
        return jnp.concatenate([(after >= -at) & (before < -at) for at in range(0, queries, _COLUMNS)], axis=1)


class Operands(NamedTuple):
    """lse and delta are what the products start from: -delta, and -lse / scale (with a soft cap or a bias, -lse)."""

    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K V"]
    d_out: Float[Array, "B T N V"]
    lse: Float[Array, "B N T"]
    delta: Float[Array, "B N T"]
    units: Float[Array, "B N T"] | None
    """How many of dQ's integers make 1; None where dQ is summed in floats."""
    mask: RowMask | None
    q_span: Int[Array, "B|1 J 2"] | None
    logits: LogitOperands
    broken_keys: Int[Array, "B K"] | None = None
    """Whether a key or value of the head may be NaN or inf; None where none is hidden."""
    broken_queries: Int[Array, "B N I"] | None = None
    """Whether a query or output gradient of a tile may be; None where it may meet all weights, or was mended before."""
    key_rows: KeyRows | None = None
    zeros: Int[Array, "B T N H"] | Float[Array, "B T N H"] | None = None
    """For dQ to be added to; None where there are none yet."""


def load_row(row: Any, slot: Any, ready: Any) -> None:
    """Numbers that lie together, all of which exist: then JAX copies without a TMA descriptor of the array, for each of
    which its version 0.11 takes some 40 ms to compile the call on the host."""
    plgpu.copy_gmem_to_smem(row, slot, ready, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)


def folds_lse(p: Problem) -> bool:
    """Whether lse is what the scores' product starts from; else it is subtracted later."""
    return p.softcap is None and p.bias is None


def summed_dtype(p: Problem) -> Any:
    """Of dQ, while blocks add to it."""
    return jnp.int32 if p.reproducible else jnp.float32


def as_summed(d_query: Float[Array, "t c"], units: Float[Array, " t"] | None) -> Array:
    return d_query if units is None else nearest_integers(d_query, lax.broadcast_in_dim(units, d_query.shape, [0]))


def make_finite(tile: Any) -> None:
    """Zeros in place of NaN and inf, one column of swizzled tiles at a time, to spare registers and code."""
    columns = swizzled_columns(tile.shape[1], tile.dtype)

    def mend(i, _):
        part = tile.at[:, pl.ds(i * columns, columns)]
        x = plgpu.load(part, layout=WGMMA, optimized=False)
        part[...] = jnp.where(jnp.abs(x) < jnp.inf, x, jnp.zeros_like(x))

    lax.fori_loop(0, tile.shape[1] // columns, mend, None)


def make_finite_in_chunks(tile: Any) -> None:
    """As `make_finite`, by less code that takes longer: for what few calls, or few steps, do."""

    def mend(layout, chunk):
        x = plgpu.load(chunk, layout=layout)
        chunk[...] = jnp.where(jnp.abs(x) < jnp.inf, x, jnp.zeros_like(x))

    each_chunk(tile, mend)

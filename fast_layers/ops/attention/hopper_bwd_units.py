"""The units of dQ's integers in attention's backward for Hopper: one a row, from a bound on what the row can sum to.

Axis letters: B batch, T queries, S keys, N query heads, K key/value heads.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from fast_layers.kernel_parts.kv_range import KvRange
from fast_layers.ops.attention.hopper_bwd_rows import RowSums
from fast_layers.ops.attention.masks import MaskForm
from fast_layers.ops.attention.problem import Problem, finite_or_zero

_BITS = 30
_LARGEST_EXPONENT = 120
_ROUNDING = 1.25
"""By how much the bound on dQ grows: weights and dS are rounded to 16 bits, and exp2 is approximate."""


def row_units(
    p: Problem, form: MaskForm, rows: RowSums, delta: Float[Array, "B N T"]
) -> tuple[Float[Array, "B N T"], Int[Array, "B K"]]:
    """A power of two for each row, by which |dQ| / scale and all its partial sums are less than 2^30; broken_keys.

    dQ / scale = sum_s P_s (dO . V_s - delta) K_s with weights that sum to at most 1; dO . V_s is 0 or more than itself
    where weights are dropped. What stands in padding, which no row sees, does not count. NaN where the bound overflows,
    and with it the row's dQ.
    """
    seen = _seen_keys(p, form)
    finite = rows.key_size < jnp.inf, rows.value_size < jnp.inf
    broken = ~(finite[0] & jnp.isfinite(rows.value_length))
    counts = finite if seen is None else tuple(x & seen[:, None] for x in finite)
    of_row = jnp.where(counts[0], rows.key_size, 0.0), jnp.where(counts[1], rows.value_length, 0.0)
    # One reduction, which XLA makes one kernel.
    key_size, value_length, broken_keys = lax.reduce(
        (*of_row, broken.astype(jnp.int32)),
        (jnp.float32(0), jnp.float32(0), jnp.int32(0)),
        lambda a, b: tuple(map(lax.max, a, b)),
        (2,),
    )
    largest_key, longest_value = (jnp.repeat(x, p.group, axis=1)[..., None] for x in (key_size, value_length))
    longest_value /= 1.0 - p.dropout_rate
    d_weight = rows.d_out_length * longest_value + jnp.abs(finite_or_zero(delta))
    bound = d_weight * largest_key * _ROUNDING
    exponent = jnp.ceil(jnp.log2(jnp.maximum(bound, jnp.finfo(jnp.float32).tiny)))
    exponent = jnp.clip(_BITS - exponent, -_LARGEST_EXPONENT, _LARGEST_EXPONENT).astype(jnp.int32)
    # By its bits: exp2 of an integer need not be exact.
    power = lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
    units = jnp.where(jnp.isfinite(bound), power, jnp.nan)
    return units, broken_keys


def _seen_keys(p: Problem, form: MaskForm) -> Bool[Array, "B|1 S"] | None:
    """The keys between the first and the last that any row of an example sees; None for all."""
    by_some_row = (
        None if form.dense is None else jnp.broadcast_to(form.dense.any((1, 2)), (form.dense.shape[0], p.kv_len))
    )
    if form.start is None and form.stop is None and form.key_segments is None and _band_shows_all_keys(p):
        return by_some_row
    start, stop = form.intervals(p.q_len, p.kv_len)
    start = jnp.zeros((1, p.q_len), jnp.int32) if start is None else start
    stop = jnp.full((1, p.q_len), p.kv_len, jnp.int32) if stop is None else stop
    first, last = KvRange.of(start, stop, p.q_len)
    keys = jnp.arange(p.kv_len, dtype=jnp.int32)
    seen = (keys >= first) & (keys < last)
    seen = seen if by_some_row is None else seen & by_some_row
    return seen if form.key_segments is None else seen & (form.key_segments >= 0)


def _band_shows_all_keys(p: Problem) -> bool:
    """Whether the static band hides neither the first keys nor the last from all rows."""
    low, high = (None, None) if p.mask.band is None else (p.mask.band.low, p.mask.band.high)
    first_seen = low is None or low <= 0
    return first_seen and (high is None or p.q_len - 1 + high >= p.kv_len - 1)

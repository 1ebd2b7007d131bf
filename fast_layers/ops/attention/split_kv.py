"""Attention over parts of the keys, put together: each part's softmax is normalised by itself and has its own lse.

Axis letters: B batch, P parts, R rows, K heads, T queries, N query heads, V value depth, C columns in memory.

Source: Dao et al., "Flash-Decoding" (2023).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from fast_layers.kernel_parts.online_softmax import LOG2_E, zero_where_empty
from fast_layers.ops.attention.config import PART_COLUMNS

_AT_ONCE = 16
"""Parts whose loads are on their way together."""


class Joined(NamedTuple):
    """Of a row, in a kernel: what the parts up to now give together."""

    most_log2: Any
    """Of the parts' lse times log2 e, a number, as is `total`: the sum of their shares, relative to it."""
    total: Any
    summed: Float[Array, " C"]
    """Of their outputs times the shares, for each column."""

    @classmethod
    def start(cls, columns: int, layout: Any) -> Joined:
        nothing = plgpu.layout_cast(jnp.zeros((columns,), jnp.float32), layout)
        return cls(jnp.float32(-jnp.inf), jnp.float32(0), nothing)

    def join(self, lse_log2: Sequence[Any], values: Sequence[Float[Array, " C"]]) -> Joined:
        """With more parts. Whatever the values are of one whose lse is -inf, they count as nothing."""
        most = functools.reduce(jnp.maximum, lse_log2, self.most_log2)
        base = zero_where_empty(most)
        rescale = jnp.exp2(self.most_log2 - base)
        total, summed = self.total * rescale, self.summed * self._everywhere(rescale)
        nothing = jnp.zeros_like(summed)
        for x, value in zip(lse_log2, values, strict=True):
            share = jnp.exp2(x - base)
            total += share
            everywhere = self._everywhere(share)
            summed += jnp.where(everywhere == 0, nothing, everywhere * value)
        return Joined(most, total, summed)

    @property
    def out(self) -> Float[Array, " C"]:
        return self.summed * self._everywhere(jnp.where(self.total == 0, 0.0, 1.0 / self.total))

    @property
    def lse(self) -> Any:
        """The natural logarithm."""
        return zero_where_empty(self.most_log2) * (1.0 / LOG2_E) + jnp.log(self.total)

    def _everywhere(self, x: Any) -> Float[Array, " C"]:
        return lax.broadcast_in_dim(x, self.summed.shape, [])


def combine_out(
    out: Float[Array, "B P R K C"], lse: Float[Array, "B P K R"], rows: int, v_dim: int, group: int, dtype
) -> Float[Array, "B T N V"]:
    """The output of all parts. Row r is query r // group of head k * group + r % group.

    A part in which a row sees nothing has lse -inf, and whatever stands in its `out` counts as nothing.
    """
    batch, parts, _, heads, columns = out.shape

    def combine_parts(out_ref, lse_ref, combined_ref, slot):
        example, head, row = (lax.axis_index(name) for name in ("example", "head", "row"))

        def some(i, joined):
            indices = [i * _AT_ONCE + n for n in range(_AT_ONCE)]
            within = [jnp.minimum(index, parts - 1) for index in indices]
            lse_log2 = [lse_ref[example, index, head, row] * LOG2_E for index in within]
            lse_log2 = [jnp.where(index < parts, x, -jnp.inf) for index, x in zip(indices, lse_log2, strict=True)]
            values = [
                plgpu.load(out_ref.at[example, index, row, head], layout=layout, optimized=False) for index in within
            ]
            return joined.join(lse_log2, values)

        joined = lax.fori_loop(0, math.ceil(parts / _AT_ONCE), some, Joined.start(columns, layout))
        store_row(joined.out.astype(dtype), combined_ref.at[example, *place_of_row(row, head, group)], slot)
        plgpu.wait_smem_to_gmem(0)

    layout = plgpu.Layout.WG_STRIDED((columns,), vec_size=columns // PART_COLUMNS)
    return plgpu.kernel(
        combine_parts,
        out_type=jax.ShapeDtypeStruct((batch, rows // group, heads * group, v_dim), dtype),
        grid=(rows, heads, batch),
        grid_names=("row", "head", "example"),
        scratch_types=[plgpu.SMEM((columns,), dtype)],
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(out, lse)


def place_of_row(row: Any, head: Any, group: int) -> tuple[Any, Any]:
    """(query, query head) of a key/value head's row."""
    return lax.div(row, group), head * group + lax.rem(row, group)


def store_row(x: Float[Array, " C"], to: Any, slot: Any) -> None:
    """In a kernel: as many of the columns as there are in `to`, in the GPU's memory; if not all, by way of a slot."""
    (v_dim,) = to.shape
    if v_dim == x.shape[0]:
        to[...] = x
        return
    slot[...] = x
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(slot.at[pl.ds(0, v_dim)], to)


def combine_lse(lse: Float[Array, "B P K R"]) -> Float[Array, "B K R"]:
    """That of all parts; in XLA, which leaves it out where nobody reads it."""
    most = zero_where_empty(lse.max(axis=1))
    return most + jnp.log(jnp.exp(lse - most[:, None]).sum(axis=1))


def join_sinks(out: Float[Array, "B T N V"], lse: Float[Array, "B N T"], sinks: Float[Array, " N"]):
    """(out, lse) after one more key of value 0 and this logit; a row that sees nothing stays so."""
    sees_none = lse == -jnp.inf
    with_sink = jnp.where(sees_none, -jnp.inf, jnp.logaddexp(lse, sinks.astype(lse.dtype)[None, :, None]))
    rescale = jnp.where(sees_none, 0.0, jnp.exp(lse - with_sink))
    return out * rescale.swapaxes(1, 2)[..., None], with_sink

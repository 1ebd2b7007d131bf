"""Attention over parts of the keys, put together: each part's softmax is normalised by itself and has its own lse.

Axis letters: B batch, P parts, R rows, K heads, T queries, N query heads, V value depth, C columns in memory.

Source: Dao et al., "Flash-Decoding" (2023).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from fast_layers.kernel_parts.online_softmax import LOG2_E, zero_where_empty

COLUMNS = 128
"""The parts' columns come in multiples of a warpgroup's threads."""
_AT_ONCE = 16
"""Parts whose loads are on their way together."""


def combine_out(
    out: Float[Array, "B P R K C"], lse: Float[Array, "B P K R"], rows: int, v_dim: int, group: int, dtype
) -> Float[Array, "B T N V"]:
    """The output of all parts. Row r is query r // group of head k * group + r % group.

    A part in which a row sees nothing has lse -inf, and whatever stands in its `out` counts as nothing.
    """
    batch, parts, _, heads, columns = out.shape

    def combine_parts(out_ref, lse_ref, combined_ref, slot):
        example, head, row = (lax.axis_index(name) for name in ("example", "head", "row"))

        def some(i, carry):
            most_log2, total, summed = carry
            indices = [i * _AT_ONCE + n for n in range(_AT_ONCE)]
            within = [jnp.minimum(index, parts - 1) for index in indices]
            lse_log2 = [lse_ref[example, index, head, row] * LOG2_E for index in within]
            lse_log2 = [jnp.where(index < parts, x, -jnp.inf) for index, x in zip(indices, lse_log2, strict=True)]
            values = [
                plgpu.load(out_ref.at[example, index, row, head], layout=layout, optimized=False) for index in within
            ]
            new_most = most_log2
            for x in lse_log2:
                new_most = jnp.maximum(new_most, x)
            base = zero_where_empty(new_most)
            rescale = jnp.exp2(most_log2 - base)
            total, summed = total * rescale, summed * everywhere(rescale)
            for x, value in zip(lse_log2, values, strict=True):
                share = jnp.exp2(x - base)
                total += share
                summed += jnp.where(everywhere(share) == 0, nothing, everywhere(share) * value)
            return new_most, total, summed

        def everywhere(x):
            return lax.broadcast_in_dim(x, (columns,), [])

        nothing = plgpu.layout_cast(jnp.zeros((columns,), jnp.float32), layout)
        start = (jnp.float32(-jnp.inf), jnp.float32(0), nothing)
        _, total, summed = lax.fori_loop(0, math.ceil(parts / _AT_ONCE), some, start)
        combined = (summed * everywhere(jnp.where(total == 0, 0.0, 1.0 / total))).astype(dtype)
        to = combined_ref.at[example, lax.div(row, group), head * group + lax.rem(row, group)]
        if v_dim == columns:
            to[...] = combined
        else:
            slot[...] = combined
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(slot.at[pl.ds(0, v_dim)], to)
            plgpu.wait_smem_to_gmem(0)

    layout = plgpu.Layout.WG_STRIDED((columns,), vec_size=columns // COLUMNS)
    return plgpu.kernel(
        combine_parts,
        out_type=jax.ShapeDtypeStruct((batch, rows // group, heads * group, v_dim), dtype),
        grid=(rows, heads, batch),
        grid_names=("row", "head", "example"),
        scratch_types=[plgpu.SMEM((columns,), dtype)],
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(out, lse)


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

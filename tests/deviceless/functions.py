"""Functions that the process which compiles imports."""

from __future__ import annotations

import os
import time

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from simulator import kernels

import fast_layers
from fast_layers import dispatch
from fast_layers.arch import lowering_targets

COLUMNS = 256  # an accumulator of 64 x 256 takes 128 registers of each thread


def many_accumulators(a: jax.Array, b: jax.Array, *, count: int) -> jax.Array:
    """a @ b `count` times, with every accumulator live until the last is done: two fill a thread's 255 registers."""

    def kernel(a_gmem, b_gmem, out_gmem, a_smem, b_smem, out_smem, loaded):
        plgpu.copy_gmem_to_smem(a_gmem, a_smem, loaded)
        plgpu.copy_gmem_to_smem(b_gmem, b_smem, loaded)
        plgpu.barrier_wait(loaded)

        def multiply(*accumulators):
            for acc in accumulators:
                plgpu.wgmma(acc, a_smem, b_smem)
            plgpu.wgmma_wait(0)
            values = [plgpu.wgmma_accumulator_load(acc, wait_n=None) for acc in accumulators]
            total = values[0]
            for i, value in enumerate(values[1:]):
                total = jnp.exp2(total) * (value + i)
            return total

        out_smem[...] = pl.run_scoped(multiply, *[plgpu.ACC((64, COLUMNS), jnp.float32)] * count)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_gmem)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((64, COLUMNS), jnp.float32),
        scratch_types={
            "a_smem": kernels.smem(64, 64),
            "b_smem": kernels.smem(64, COLUMNS),
            "out_smem": kernels.smem(64, COLUMNS, dtype=jnp.float32, transforms=()),
            "loaded": plgpu.Barrier(num_arrivals=2),
        },
    )(a, b)


def matmul_thrice(a: jax.Array, b: jax.Array) -> jax.Array:
    return kernels.matmul(a, b) + kernels.matmul(2 * a, b) + kernels.matmul(3 * a, b)


def tell_targets(x: jax.Array) -> jax.Array:
    """Raises with what dispatch takes itself to compile for, and whether `explain` sees the same."""
    q = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    explained = fast_layers.explain(fast_layers.dot_product_attention, q, q, q)
    raise ValueError(f"targets: {'; '.join(map(str, lowering_targets()))}\n{explained}")


def never_ends(x: jax.Array) -> jax.Array:
    time.sleep(600)
    return x


def doubled(x: jax.Array) -> jax.Array:
    """No kernel of ours."""
    return 2 * x


def attention_and_gradients(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    d_out: jax.Array,
    ids: jax.Array | None = None,
    reproducible: bool = True,
    **options,
):
    def attend(*operands):
        return fast_layers.dot_product_attention(*operands, segment_ids=ids, **options)

    with fast_layers.use_backends(reproducible=reproducible):
        out, pull = jax.vjp(attend, query, key, value)
        return out, pull(d_out)


def tell_settings(x: jax.Array) -> jax.Array:
    """Raises with what a caller may have set around `compile_for`."""
    policy = dispatch._policy.value
    raise ValueError(f"{policy.forbid=} {policy.reproducible=} {x.dtype=} {jax.config.jax_default_matmul_precision=}")


def leaves(x: jax.Array) -> jax.Array:
    raise SystemExit("usage: a program")


def ends_the_process(x: jax.Array) -> jax.Array:
    os._exit(3)

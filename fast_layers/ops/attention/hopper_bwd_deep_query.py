"""dQ by a product of its own, for attention's backward on Hopper (sm_90a) at depths over 128.

Axis letters: B batch, S keys, K key/value heads, H depth; L tiles of dS, of 128 keys and half as many queries.

The backward's main kernel leaves a group of heads' dS, its keys first, in the GPU's memory (`hopper_bwd_scores.py`),
and a block here goes through the keys that 128 queries see, 64 queries for each of its two compute warpgroups:

    load warpgroup                              each compute warpgroup, on its own 64 queries
    dS, K       -> ready        waits consumed      dQ += dS K                        frees consumed
                                                    dQ * scale                        -> shared memory, then TMA

The blocks are persistent, so that the next tile loads meanwhile. Those of a cluster have neighbouring queries, and load
one half each of the keys that both read. Each row is summed by one block in a fixed order.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from fast_layers.kernel_parts.tile_order import snake, turns
from fast_layers.ops.attention.config import HOPPER_SMS, sees_all
from fast_layers.ops.attention.hopper_bwd_deep_scores import part_of_scores
from fast_layers.ops.attention.hopper_bwd_scores import TILE, LeftScores
from fast_layers.ops.attention.hopper_call import ROWS
from fast_layers.ops.attention.hopper_d_query_parts import (
    FREEING,
    STAGES,
    WARPGROUPS,
    Scratch,
    exchange_mended_keys,
    scratch_types,
    send,
)
from fast_layers.ops.attention.hopper_grad_parts import make_finite_in_chunks


def d_query(
    left: LeftScores,
    d_scores: Float[Array, "L 128 64"],
    key: Float[Array, "B S K H"],
    turn: Int[Array, " 1"] | None,
    d_query_ref: Any,
):
    """Writes a group's dQ; `turn` as `LeftScores.in_groups` gives it."""
    p, depth = left.problem, key.shape[3]
    cluster = 2 if p.q_len // TILE % 2 == 0 else 1
    q_tiles, kv_tiles = p.q_len // TILE // cluster, p.kv_len // ROWS
    heads = left.pairs * left.heads
    pieces = heads * q_tiles
    blocks = min(pieces, HOPPER_SMS // cluster)
    causal = not sees_all(p)
    own_keys = ROWS // WARPGROUPS  # of a tile, that each warpgroup mends
    arrays, tree = jax.tree.flatten((d_scores, key, turn))

    def attention_backward_query(*refs, **scratch):
        d_scores_ref, key_ref, turn_ref = jax.tree.unflatten(tree, refs[: tree.num_leaves])
        d_query_ref = refs[tree.num_leaves]
        s = Scratch(**scratch)
        first_head = left.first_pair(turn_ref) * p.group
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        rank = lax.axis_index("rank") if cluster > 1 else 0

        def each_tile(role, state):
            """The last `state = role(head within the group, first 64 queries' tile, tiles of keys, state)`."""

            def take(turn, state):
                index = snake(turn, block, blocks)
                if causal:  # the longest of all heads first
                    head, q_index = lax.rem(index, heads), q_tiles - 1 - lax.div(index, heads)
                    seen = (q_index + 1) * cluster * WARPGROUPS
                else:
                    head, q_index, seen = lax.div(index, q_tiles), lax.rem(index, q_tiles), kv_tiles
                return role(head, (q_index * cluster + rank) * WARPGROUPS, seen, state)

            return lax.fori_loop(0, turns(pieces, block, blocks), take, state)

        @pl.when(warpgroup == WARPGROUPS)
        def _load():
            plgpu.set_max_registers(24, action="decrease")
            together: Any = {"collective_axes": "rank"} if cluster > 1 else {}

            def load(head, q_index, seen, step):
                example = lax.div(first_head + head, p.heads)
                kv_head = lax.div(lax.rem(first_head + head, p.heads), p.group)

                def tile(j, step):
                    slot, keys = lax.rem(step, STAGES), pl.ds(j * ROWS, ROWS)
                    pl.when(step >= STAGES)(lambda: plgpu.barrier_wait(s.consumed.at[slot]))
                    for i in range(WARPGROUPS):
                        part = d_scores_ref.at[part_of_scores(left, head, q_index + i, j)]
                        copy = functools.partial(plgpu.copy_gmem_to_smem, part, s.score_slots.at[slot, i])
                        if causal:
                            # Not by the copy's predicate: whether it arrives without copying is up to JAX's version.
                            exists = j <= q_index + i
                            pl.when(exists)(functools.partial(copy, s.ready.at[slot]))
                            pl.when(~exists)(functools.partial(plgpu.barrier_arrive, s.ready.at[slot]))
                        else:
                            copy(s.ready.at[slot])
                    key = key_ref.at[example, keys, kv_head]
                    plgpu.copy_gmem_to_smem(key, s.key_slots.at[slot], s.ready.at[slot], **together)
                    return step + 1

                return lax.fori_loop(0, seen, tile, step)

            steps = each_tile(load, jnp.int32(0))
            if cluster > 1:

                def drain(i, _):
                    """Blocks of a cluster free each other's slots, and must not end before that."""
                    plgpu.barrier_wait(s.consumed.at[lax.rem(i, STAGES)])

                lax.fori_loop(jnp.maximum(steps - STAGES, 0), steps, drain, None)

        @pl.when(warpgroup < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(240, action="increase")

            def free(step):
                if cluster > 1:
                    plgpu.commit_smem()  # for its barrier: one warp alone arrives at those of both blocks
                plgpu.barrier_arrive(s.consumed.at[lax.rem(step, STAGES)])

            def multiply(head, q_index, seen, step):
                # Before the tiles that a causal mask cuts through.
                whole = q_index if causal else seen

                def over_keys(acc):
                    def product(slot):
                        plgpu.wgmma(acc, s.score_slots.at[slot, warpgroup].T, s.key_slots.at[slot])

                    def tile(j, step):
                        slot = lax.rem(step, STAGES)
                        plgpu.barrier_wait(s.ready.at[slot])
                        product(slot)
                        plgpu.wgmma_wait(1)
                        pl.when(j > 0)(lambda: free(step - 1))
                        return step + 1

                    def cut(j, step):
                        slot = lax.rem(step, STAGES)
                        plgpu.barrier_wait(s.ready.at[slot])
                        mend(slot)

                        @pl.when(j <= warpgroup)
                        def _sees():
                            product(slot)
                            plgpu.wgmma_wait(0)

                        free(step)
                        return step + 1

                    def pass_over(j, step):
                        plgpu.barrier_wait(s.ready.at[lax.rem(step, STAGES)])
                        free(step)
                        return step + 1

                    step_after = lax.fori_loop(0, whole, tile, step)
                    plgpu.wgmma_wait(0)
                    pl.when(whole > 0)(lambda: free(step_after - 1))
                    if causal:
                        step_after = lax.fori_loop(0, WARPGROUPS, cut, step_after)
                        if cluster > 1:
                            step_after = lax.fori_loop(whole + WARPGROUPS, seen, pass_over, step_after)
                    return step_after, acc[...]

                step, product = pl.run_scoped(over_keys, plgpu.WGMMAAccumulatorRef((ROWS, depth), jnp.float32))
                rows = pl.ds((q_index + warpgroup) * ROWS, ROWS)
                send(p, product, s.result_slots.at[warpgroup], d_query_ref, first_head + head, rows)
                return step

            def mend(slot):
                # 0 times NaN is NaN; who sees a broken key has NaN in its dS.
                make_finite_in_chunks(s.key_slots.at[slot, pl.ds(warpgroup * own_keys, own_keys)])
                exchange_mended_keys(s)

            each_tile(multiply, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    consumed: Any = plgpu.Barrier(**FREEING)
    cluster_options: dict[str, Any] = {}
    if cluster > 1:
        consumed = plgpu.ClusterBarrier(collective_axes=("rank",), **FREEING)
        cluster_options = {"cluster": (cluster,), "cluster_names": ("rank",)}
    plgpu.kernel(
        attention_backward_query,
        grid=(blocks,),
        grid_names=("block",),
        **cluster_options,
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=scratch_types(p, ROWS, depth, consumed),
    )(*arrays, d_query_ref)

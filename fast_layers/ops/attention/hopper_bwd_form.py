"""One launch of attention's backward for Hopper at depths up to 128: what is known in tracing, and its scratch."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from fast_layers.kernel_parts.fragments import fragments_shape
from fast_layers.kernel_parts.smem_tile import smem_tile, swizzled_columns
from fast_layers.kernel_parts.tile_order import TileOrder
from fast_layers.ops.attention import hopper_bwd_beside, hopper_bwd_pieces
from fast_layers.ops.attention.config import SWIZZLED_COLUMNS, sees_all
from fast_layers.ops.attention.hopper_bwd_config import CLUSTER_LAG, HopperBackwardTiles
from fast_layers.ops.attention.hopper_bwd_pieces import KV_TILE, Cut
from fast_layers.ops.attention.hopper_bwd_scores import LeftScores
from fast_layers.ops.attention.hopper_bwd_sequence import Sequence
from fast_layers.ops.attention.hopper_call import ROWS
from fast_layers.ops.attention.hopper_grad_parts import Operands, summed_dtype
from fast_layers.ops.attention.problem import Problem
from fast_layers.ops.attention.tile_logits import TileLogits
from fast_layers.ops.attention.tile_mask import TileMask

WARPGROUPS = 2
_SUMMED_COLUMNS = 32
"""Of dK or dV in float32, that fit where a warpgroup's half of a step's dS does; fewer where depths are no multiple."""


@dataclasses.dataclass(frozen=True, eq=False)
class Form:
    """What follows from the problem, its tiles and the operands' shapes."""

    problem: Problem
    tiles: HopperBackwardTiles
    qk_dim: int
    """Of tiles, whose columns may be more than the arrays'; so `v_dim`."""
    v_dim: int
    left: LeftScores | None
    """Where dS is left, of which other blocks make dQ, or another kernel; None where this one does, with dS at hand."""
    with_units: bool
    """Of dQ's integers."""
    order: TileOrder
    schedule: np.ndarray | None
    """Of the pieces, for a persistent grid."""
    cut: Cut | None
    """Of the last pieces, if they are cut by their queries."""
    sequence: Sequence | None
    """Of blocks, if some of them make dQ of the dS that is left."""

    @classmethod
    def of(
        cls,
        p: Problem,
        tiles: HopperBackwardTiles,
        operands: Operands,
        left: LeftScores | None,
        sequence: Sequence | None = None,
    ) -> Form:
        qk_dim, v_dim = tiles.tile_columns(p.qk_dim, p.v_dim)
        heads, pairs = (p.group, p.batch * p.kv_heads) if left is None else (left.heads, left.pairs)
        kv_tiles = -(-p.kv_len // KV_TILE)
        bytes_per_head = heads * p.q_len * (2 * p.dtype.itemsize * (qk_dim + v_dim) + 4 * qk_dim)
        fits_first = hopper_bwd_pieces.fits_first(p, tiles, kv_tiles)
        order = hopper_bwd_pieces.piece_order(pairs, kv_tiles, bytes_per_head, fits_first)
        if sequence is not None:
            order = sequence.pieces
        cut = Cut.of(p, tiles, order)
        schedule = hopper_bwd_pieces.schedule(p, tiles, order, cut) if qk_dim == v_dim else None
        if tiles.whole_heads:
            order, schedule = hopper_bwd_pieces.by_head(p, tiles)
        cut = None if schedule is None else cut
        return cls(p, tiles, qk_dim, v_dim, left, operands.units is not None, order, schedule, cut, sequence)

    @property
    def persistent(self) -> bool:
        return self.schedule is not None

    @property
    def blocks(self) -> int:
        if self.sequence is not None:
            return self.sequence.total
        return self.order.total if self.schedule is None else len(self.schedule)

    @property
    def in_order(self) -> bool:
        """Whether dQ is summed in the order of the keys (hopper_bwd_in_order.py)."""
        return self.tiles.whole_heads

    @property
    def mends_keys(self) -> bool:
        """Whether keys and values are mended in any case, since nobody has looked whether they are broken."""
        return not (self.tiles.sums_d_query or sees_all(self.problem))

    @property
    def lags(self) -> bool:
        """Whether dQ is made here, a step behind."""
        return self.left is None

    @property
    def q_tile(self) -> int:
        return self.tiles.q_tile

    @property
    def ring(self) -> int:
        """Slots for queries and output gradients."""
        return self.tiles.stages

    @property
    def halves(self) -> int:
        """Of a tile of queries, by as many as dS has in one of its tiles."""
        return self.q_tile // ROWS

    @property
    def by_rows(self) -> bool:
        """Whether the warpgroups share dQ's tile by rows, where there are two times 64; else by columns."""
        return self.q_tile == WARPGROUPS * ROWS

    @property
    def panels(self) -> int:
        """Of K's columns."""
        narrow = swizzled_columns(self.qk_dim, self.problem.dtype)
        return self.tiles.panels if narrow == SWIZZLED_COLUMNS else self.qk_dim // narrow

    @property
    def panel(self) -> int:
        """Columns of one."""
        return self.qk_dim // self.panels

    @property
    def held_panels(self) -> int:
        """So many of the last are in registers."""
        return SWIZZLED_COLUMNS // self.panel if self.tiles.holds_keys else 0

    @property
    def pairs(self) -> int:
        """Of an example and a key/value head."""
        return self.order.heads

    @property
    def heads(self) -> int:
        """Of the query heads that share a key/value head, as many as are gone through."""
        return self.problem.group if self.left is None else self.left.heads

    @property
    def sums(self) -> bool:
        """Whether dK and dV are added to those of the other query heads, or queries."""
        return self.left is not None and self.left.parts > 1

    @property
    def result_parts(self) -> int:
        """Of dK and dV, by columns of 16 bits: as many as fit where as many columns of dQ do, or one that has a slot of
        its own."""
        return 1 if self.in_order else 2

    @property
    def keeps_barriers(self) -> bool:
        """Whether there are the barriers that JAX puts around what goes to shared memory.

        In a persistent grid they are not needed: what the warps of a warpgroup leave for one another, or for a copy,
        stands before a commit, and at the kernel's own barriers all of them arrive.
        """
        return not self.persistent

    def scratch_types(self) -> dict[str, Any]:
        """Of `Scratch`, but for those that share their memory, which are `told_apart`."""
        dtype, ring, lags = self.problem.dtype, self.ring, self.lags
        types = {
            "k_slots": smem_tile(2 if lags and self.persistent else 1, self.panels, KV_TILE, self.panel, dtype=dtype),
            "v_slot": smem_tile(WARPGROUPS, ROWS, self.v_dim, dtype=dtype),
            "q_slots": smem_tile(ring, self.q_tile, self.qk_dim, dtype=dtype),
            "d_out_slots": smem_tile(ring, self.q_tile, self.v_dim, dtype=dtype),
            "d_scores": smem_tile(
                *((2, self.halves, KV_TILE) if lags else (2 * self.halves * WARPGROUPS, ROWS)), ROWS, dtype=dtype
            ),
            "row_slots": plgpu.SMEM((2 + self.with_units, ring, self.q_tile), jnp.float32),
            "kv_ready": plgpu.Barrier(num_arrivals=self.panels + WARPGROUPS),
            "q_ready": plgpu.Barrier(num_arrivals=2, num_barriers=ring),
            "d_out_ready": plgpu.Barrier(num_arrivals=2 + self.with_units, num_barriers=ring),
            "q_consumed": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=ring),
            "d_out_consumed": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=ring),
            "queries_mended": plgpu.Barrier(num_arrivals=WARPGROUPS),
        }
        if self.persistent:
            types["kv_consumed"] = plgpu.Barrier(num_arrivals=WARPGROUPS)
        if lags:
            for name in ("scores_ready", "scores_consumed"):
                types[name] = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=2)
            of_sums = jnp.float32 if self.in_order else summed_dtype(self.problem)
            d_query_slots = plgpu.SMEM((WARPGROUPS, *fragments_shape(self.panel)), of_sums)
            if self.in_order:
                results = smem_tile(WARPGROUPS, self.result_parts, ROWS, self.panel, dtype=dtype)
                types |= {"d_query_slots": d_query_slots, "result_slots": results}
                types["sum_ready"] = plgpu.Barrier(num_barriers=WARPGROUPS)
            elif self.persistent:
                results = smem_tile(WARPGROUPS, self.result_parts, ROWS, self.panel, dtype=dtype)
                types["dQ or results"] = plgpu.RefUnion(d_query_slots, results)
            else:
                types |= {"d_query_slots": d_query_slots, "keys_left": plgpu.Barrier(num_arrivals=WARPGROUPS)}
        if self.tiles.cluster > 1:
            types["added"] = plgpu.ClusterBarrier(collective_axes=("rank",), num_barriers=WARPGROUPS * CLUSTER_LAG)
        if self.sums:
            columns = min(_SUMMED_COLUMNS, swizzled_columns(self.qk_dim, dtype))
            sum_slots = smem_tile(2 * WARPGROUPS, ROWS, columns, dtype=jnp.float32)
            if self.sequence is None:
                types["dS or sums"] = plgpu.RefUnion(types.pop("d_scores"), sum_slots)
            else:  # blocks that make dQ need more memory in any case
                types["sum_slots"] = sum_slots
        if self.sequence is not None:
            # A block has one of the two kinds of work.
            own, own_barriers = _tiles_and_barriers(types)
            makers, makers_barriers = _tiles_and_barriers(hopper_bwd_beside.scratch_types(self.problem, self.qk_dim))
            types = {**own_barriers, "maker": makers_barriers, "tiles of either": plgpu.RefUnion(own, makers)}
        return types

    def told_apart(self, refs: dict[str, Any]) -> dict[str, Any]:
        """In a kernel: what `scratch_types` made, by the names of `Scratch`."""
        refs = dict(refs)
        if self.sequence is not None:
            own, makers = refs.pop("tiles of either")
            refs |= {**own, "maker": hopper_bwd_beside.Scratch(**makers, **refs["maker"])}
        if self.persistent and self.lags and not self.in_order:
            refs["d_query_slots"], refs["result_slots"] = refs.pop("dQ or results")
        if self.sums and self.sequence is None:
            refs["d_scores"], refs["sum_slots"] = refs.pop("dS or sums")
        return refs

    def key_slot(self, turn: Any) -> Any:
        """In a kernel: of the slots for K, that of a block's `turn`-th piece."""
        return lax.rem(turn, 2) if self.lags and self.persistent else 0


def _tiles_and_barriers(types: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    barriers = {name: x for name, x in types.items() if isinstance(x, plgpu.Barrier)}
    return {name: x for name, x in types.items() if name not in barriers}, barriers


class Scratch(NamedTuple):
    """What a block holds in shared memory: tiles, and the barriers named after the event that they wait for."""

    k_slots: Any
    v_slot: Any
    q_slots: Any
    d_out_slots: Any
    d_scores: Any
    row_slots: Any
    kv_ready: Any
    q_ready: Any
    d_out_ready: Any
    q_consumed: Any
    d_out_consumed: Any
    queries_mended: Any
    scores_ready: Any = None
    scores_consumed: Any = None
    d_query_slots: Any = None
    result_slots: Any = None
    sum_slots: Any = None
    keys_left: Any = None
    kv_consumed: Any = None
    sum_ready: Any = None
    added: Any = None
    maker: Any = None
    """What a block that makes dQ has instead."""


class Role(NamedTuple):
    """A compute warpgroup in a launch."""

    form: Form
    inputs: Any
    scratch: Scratch
    mask: TileMask
    logits: TileLogits
    last_ref: Any
    """dQ in the GPU's memory, or its sums, or dS for it."""
    sums_ref: Any
    """dQ's sums where they are made in order."""
    parts_ref: Any
    """dK and dV of pieces that are cut, as `hopper_bwd_parts.empty`."""
    visits: Any
    warpgroup: Any
    own: Any
    """Its 64 of a tile of keys."""


class Before(NamedTuple):
    """The step before: how many there were up to it, its query head and tile, and the units of its rows.

    Where sums are made in order, whether its keys are the first or the last that see its queries.
    """

    steps: Any
    example: Any = None
    head: Any = None
    q_index: Any = None
    k_index: Any = None
    units: Any = None
    is_first: Any = None
    is_last: Any = None

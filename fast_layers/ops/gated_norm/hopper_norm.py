"""The gated norm for Hopper (sm_90a), forward and backward: one pass each over the rows.

A block of one warpgroup goes through some rows of one group of features, a row at a time or, where rows are short, four
with a warp for each. The forward reads a row into registers, sums it, and writes it; the backward reads a row twice,
the second time from the cache, since three operands are too much for the registers. There is nothing between threads
but the sums. The gradient of the weight stays in registers, and a row of it for each block is left to XLA, which adds
them up in one order.

    t = y silu(z), n = t / rms(t), out = n w             or, norm before gate:   t = y, out = n w silu(z)
    d_t = (d_n - n mean(d_n n)) / rms(t)

Axis letters: B examples, R rows of each, F features, K blocks over the rows; Q rows at a time, D features of a piece
of a group.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from fast_layers.kernel_parts.over_batch import over_batch
from fast_layers.ops.gated_norm.config import LANES, WARPS, HopperTiles
from fast_layers.ops.gated_norm.problem import Inputs, Problem

LOG2_E = 1.4426950408889634
SHARED = frozenset({"weight"})


@dataclasses.dataclass(frozen=True)
class Rows:
    """A problem whose leading dimensions are one, and one more that `jax.vmap` makes larger."""

    batch: int
    rows: int
    features: int
    dtype: jnp.dtype
    group_size: int
    eps: float
    norm_before_gate: bool

    @classmethod
    def of(cls, problem: Problem) -> Rows:
        p = problem
        return cls(1, math.prod(p.rows), p.features, p.dtype, p.group_size, p.eps, p.norm_before_gate)

    @property
    def groups(self) -> int:
        return self.features // self.group_size


class Operands(NamedTuple):
    """Arrays as the kernels take them."""

    y: Float[Array, "B R F"]
    z: Float[Array, "B R F"]
    weight: Float[Array, "B|1 F"]
    d_out: Float[Array, "B R F"] | None = None


class Gradients(NamedTuple):
    y: Float[Array, "B R F"]
    z: Float[Array, "B R F"]
    weight: Float[Array, "B K Q F"]


def forward(problem: Problem, inputs: Inputs, tiles: HopperTiles | None = None) -> Float[Array, "*rows F"]:
    launch, rows, operands = _prepare(problem, inputs, None, _launch_forward, tiles)
    return _whole(problem, launch(rows, operands))


def backward(
    problem: Problem, inputs: Inputs, d_out: Float[Array, "*rows F"], tiles: HopperTiles | None = None
) -> Inputs:
    """Gradients of all inputs, in the inputs' dtypes."""
    launch, rows, operands = _prepare(problem, inputs, d_out, _launch_backward, tiles)
    made: Gradients = launch(rows, operands)
    weight = made.weight.sum((0, 1, 2)).astype(inputs.weight.dtype)
    return Inputs(_whole(problem, made.y), _whole(problem, made.z), weight)


def _prepare(p: Problem, inputs: Inputs, d_out: Array | None, launch: Any, tiles: HopperTiles | None) -> Any:
    """(the launch, its problem, its operands)."""
    tiles = tiles or HopperTiles.of(p.group_size)
    assert tiles is not None, "was not asked whether it takes this"
    rows = Rows.of(p)
    missing = max(0, tiles.rows - rows.rows)

    def flat(x: Array | None) -> Array | None:
        return None if x is None else jnp.pad(x.reshape(1, -1, p.features), ((0, 0), (0, missing), (0, 0)))

    weight = inputs.weight.astype(jnp.float32)[None]
    operands = Operands(flat(inputs.y), flat(inputs.z), weight, flat(d_out))  # pyright: ignore[reportArgumentType]
    larger = dataclasses.replace(rows, rows=rows.rows + missing)
    return over_batch(functools.partial(launch, tiles), SHARED), larger, operands


def _whole(p: Problem, x: Float[Array, "1 R F"]) -> Float[Array, "*rows F"]:
    return x[0, : math.prod(p.rows)].reshape(*p.rows, p.features)


# Jitted, so that a model of many equal layers traces and lowers the kernel once.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _launch_forward(tiles: HopperTiles, p: Rows, operands: Operands) -> Float[Array, "B R F"]:
    def gated_norm_forward(y_ref, z_ref, w_ref, out_ref):
        block = _Block.of(tiles, p, w_ref)

        def step(tile, _):
            kept = []
            for at in block.pieces(tile):
                y, z = (block.load(ref.at[at]) for ref in (y_ref, z_ref))
                gate = z * _sigmoid(z)
                kept.append((y, gate) if p.norm_before_gate else (y * gate, None))
            inverse_rms = block.inverse_rms([row * row for row, _ in kept])
            for piece, (at, (row, gate)) in enumerate(zip(block.pieces(tile), kept, strict=True)):
                out = row * block.along_row(inverse_rms) * block.weight(piece)
                out_ref.at[at][...] = (out if gate is None else out * gate).astype(p.dtype)

        lax.fori_loop(block.first, block.stop, step, None)

    return _kernel(gated_norm_forward, tiles, p, jax.ShapeDtypeStruct(operands.y.shape, p.dtype))(*operands[:3])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _launch_backward(tiles: HopperTiles, p: Rows, operands: Operands) -> Gradients:
    def gated_norm_backward(y_ref, z_ref, w_ref, d_out_ref, d_y_ref, d_z_ref, d_w_ref):
        block = _Block.of(tiles, p, w_ref)

        def read(at):
            """(y, z, d_out, sigmoid(z), the row that is normalised, the gradient of that times w once it is)."""
            y, z, d_out = (block.load(ref.at[at]) for ref in (y_ref, z_ref, d_out_ref))
            squashed = _sigmoid(z)
            if p.norm_before_gate:
                return y, z, d_out, squashed, y, d_out * z * squashed
            return y, z, d_out, squashed, y * z * squashed, d_out

        def step(tile, d_w):
            squares, products = [], []
            for piece, at in enumerate(block.pieces(tile)):
                *_, row, d_scaled = read(at)
                squares.append(row * row)
                products.append(d_scaled * block.weight(piece) * row)
            inverse_rms = block.inverse_rms(squares)
            along = block.along_row(block.mean(products) * inverse_rms)
            inverse_rms = block.along_row(inverse_rms)
            d_w = list(d_w)
            for piece, at in enumerate(block.pieces(tile)):
                y, z, d_out, squashed, row, d_scaled = read(at)
                normalised, weight = row * inverse_rms, block.weight(piece)
                # The normalised row has length 1, so the gradient loses its part along the row.
                d_row = (d_scaled * weight - normalised * along) * inverse_rms
                d_gate = d_out * normalised * weight if p.norm_before_gate else d_row * y
                d_y_ref.at[at][...] = (d_row if p.norm_before_gate else d_row * z * squashed).astype(p.dtype)
                d_z_ref.at[at][...] = (d_gate * squashed * (1.0 + z * (1.0 - squashed))).astype(p.dtype)
                d_w[piece] += block.once(tile, d_scaled * normalised)
            return tuple(d_w)

        nothing = jnp.zeros((tiles.rows, tiles.piece), jnp.float32)
        d_w = lax.fori_loop(block.first, block.stop, step, (nothing,) * tiles.pieces)
        for piece, part in enumerate(d_w):
            d_w_ref.at[block.example, block.index, :, block.columns(piece)][...] = part

    blocks = tiles.blocks(p.rows, p.batch * p.groups)
    out_type = (
        *(jax.ShapeDtypeStruct(operands.y.shape, p.dtype),) * 2,
        jax.ShapeDtypeStruct((p.batch, blocks, tiles.rows, p.features), jnp.float32),
    )
    return Gradients(*_kernel(gated_norm_backward, tiles, p, out_type)(*operands))


@dataclasses.dataclass(frozen=True)
class _Block:
    """Where a block works, and how."""

    tiles: HopperTiles
    p: Rows
    w_ref: Any
    example: Any
    index: Any
    """Of the blocks over the rows."""
    group: Any
    first: Any
    """Its first tile of rows, and that behind its last."""
    stop: Any

    @classmethod
    def of(cls, tiles: HopperTiles, p: Rows, w_ref: Any) -> _Block:
        blocks, count = tiles.blocks(p.rows, p.batch * p.groups), -(-p.rows // tiles.rows)
        index = lax.axis_index("block")
        group, down = lax.rem(index, p.groups), lax.div(index, p.groups)
        index, example = lax.rem(down, blocks), lax.div(down, blocks)
        first, stop = (lax.div(i * count, blocks) for i in (index, index + 1))
        return cls(tiles, p, w_ref, example, index, group, first, stop)

    @property
    def layout(self) -> Any:
        return _layout(self.tiles)

    def columns(self, piece: int) -> Any:
        return pl.ds(self.group * self.tiles.features + piece * self.tiles.piece, self.tiles.piece)

    def pieces(self, tile: Any) -> list[Any]:
        """Where they are. The last tile may overlap the one before, which is of the same block."""
        rows = pl.ds(jnp.minimum(tile * self.tiles.rows, self.p.rows - self.tiles.rows), self.tiles.rows)
        return [(self.example, rows, self.columns(piece)) for piece in range(self.tiles.pieces)]

    def once(self, tile: Any, x: Float[Array, "Q D"]) -> Float[Array, "Q D"]:
        """x, with 0 in rows that the tile before had."""
        if self.p.rows % self.tiles.rows == 0:
            return x
        row = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=self.layout)
        had = tile * self.tiles.rows - jnp.minimum(tile * self.tiles.rows, self.p.rows - self.tiles.rows)
        return jnp.where(row >= lax.broadcast_in_dim(had, x.shape, ()), x, jnp.zeros_like(x))

    def load(self, ref: Any) -> Float[Array, "Q D"]:
        # JAX 0.11 calls no load from global memory in such a layout optimised; these are, by their vectors.
        return plgpu.load(ref, layout=self.layout, optimized=False).astype(jnp.float32)

    def weight(self, piece: int) -> Float[Array, "Q D"]:
        """Of the cache, in each step anew, for it would take as many registers as a row."""
        own = self.example if self.w_ref.shape[0] > 1 else 0
        at = self.w_ref.at[own, self.columns(piece)]
        weight = plgpu.load(at, layout=self.layout.reduce(0), optimized=False)
        return lax.broadcast_in_dim(weight, (self.tiles.rows, self.tiles.piece), [1])

    def mean(self, pieces: list[Array]) -> Float[Array, " Q"]:
        """Of a row in pieces."""
        return functools.reduce(jnp.add, pieces).sum(1) * (1.0 / self.tiles.features)

    def inverse_rms(self, squares: list[Array]) -> Float[Array, " Q"]:
        return lax.rsqrt(self.mean(squares) + self.p.eps)

    def along_row(self, x: Float[Array, " Q"]) -> Float[Array, "Q D"]:
        return lax.broadcast_in_dim(x, (self.tiles.rows, self.tiles.piece), [0])


def _layout(tiles: HopperTiles) -> Any:
    """Vectors along a row, then lanes; warps below each other, or where a row is all of them side by side."""
    if tiles.rows == WARPS:
        tiling = ((WARPS, LANES * tiles.vector), (tiles.vector,))
    else:
        tiling = ((1, WARPS * LANES * tiles.vector), (LANES * tiles.vector,), (tiles.vector,))
    return plgpu.Layout.TILED(plgpu.Tiling(tiling), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def _sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + jnp.exp2(x * -LOG2_E))


def _kernel(body: Any, tiles: HopperTiles, p: Rows, out_type: Any) -> Any:
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(p.batch * tiles.blocks(p.rows, p.batch * p.groups) * p.groups,),
        grid_names=("block",),
        # A thread reads nothing that another writes, but for sums, which wait for one another by themselves.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )

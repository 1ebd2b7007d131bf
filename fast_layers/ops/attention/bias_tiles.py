"""The bias' gradient: which scores a block sums up, in which order, and the call around the kernel.

A block owns a tile of the bias and goes through all tiles of scores that it was added to: those of other examples and
heads if it serves them all, and those of all queries, or all keys, if it is the same for them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jaxtyping import Array

from fast_layers.ops.attention.kernel_operands import RowMask
from fast_layers.ops.attention.problem import Aux, Inputs, Problem
from fast_layers.ops.attention.tile_logits import LogitOperands
from fast_layers.ops.attention.tile_mask import TileMask


def attend_grad(tiles: BiasTiles, inputs: Inputs, aux: Aux, operands: Any, launch: Callable[..., Array]) -> Array:
    """The gradient in bias' shape and dtype; `launch(problem, operands)` with those of the backward."""
    bias: Any = inputs.bias
    mask = RowMask.of(tiles.problem, aux.mask, tiles.q_tile, tiles.kv_tile)
    logits = LogitOperands.of(inputs, aux, tiles.q_tile, tiles.kv_tile)
    operands = operands._replace(mask=mask, q_span=None, logits=logits)
    d_bias = sequential_vmap(functools.partial(launch, tiles.problem))(operands)
    for axis in (2, 3):
        if bias.shape[axis] == 1:
            d_bias = d_bias.sum(axis, keepdims=True)
    return d_bias[:, :, : bias.shape[2], : bias.shape[3]].astype(bias.dtype)


@dataclasses.dataclass(frozen=True)
class BiasTiles:
    problem: Problem
    q_tile: int
    kv_tile: int

    grid_names = ("keys", "queries", "head", "example")

    @property
    def bias(self) -> tuple[int, ...]:
        assert self.problem.bias is not None
        return self.problem.bias

    @property
    def q_tiles(self) -> int:
        return -(-self.problem.q_len // self.q_tile)

    @property
    def kv_tiles(self) -> int:
        return -(-self.problem.kv_len // self.kv_tile)

    @property
    def grid(self) -> tuple[int, int, int, int]:
        batch, heads, queries, keys = self.bias
        return (self.kv_tiles if keys > 1 else 1, self.q_tiles if queries > 1 else 1, heads, batch)

    @property
    def out_type(self) -> jax.ShapeDtypeStruct:
        """Along queries or keys that share a bias one tile is left, to be summed."""
        keys, queries, heads, batch = self.grid
        return jax.ShapeDtypeStruct((batch, heads, queries * self.q_tile, keys * self.kv_tile), jnp.float32)

    def out_index(self) -> tuple[Any, ...]:
        """Of the block's tile in the result."""
        keys, queries, head, example = (lax.axis_index(name) for name in self.grid_names)
        return example, head, queries, keys

    def each(self, mask: TileMask, role: Callable[..., Any], carry: Any) -> Any:
        """`role(step, example, head, q_index, k_index, carry)` for all tiles of scores; returns the last carry."""
        own = dict(zip(("example", "head", "queries", "keys"), self.out_index(), strict=True))
        batch, heads, queries, keys = self.bias

        def span(name, of_bias, of_scores):
            """[first, last) of what the block goes through along one axis."""
            return (0, of_scores) if of_bias == 1 else (own[name], own[name] + 1)

        def of_head(example, head, state):
            def of_queries(q_index, state):
                visited = mask.key_span(example, q_index)
                first, last = visited.first, visited.last
                if keys > 1:
                    first, last = jnp.maximum(first, own["keys"]), jnp.minimum(last, own["keys"] + 1)

                def of_keys(k_index, state):
                    step, carry = state
                    return step + 1, role(step, example, head, q_index, k_index, carry)

                return lax.fori_loop(first, last, of_keys, state)

            return lax.fori_loop(*span("queries", queries, self.q_tiles), of_queries, state)

        def of_example(example, state):
            of_this = functools.partial(of_head, example)
            return lax.fori_loop(*span("head", heads, self.problem.heads), of_this, state)

        start = (jnp.int32(0), carry)
        return lax.fori_loop(*span("example", batch, self.problem.batch), of_example, start)[1]

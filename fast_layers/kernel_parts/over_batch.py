"""A kernel under `jax.vmap`: one launch on a larger batch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap


def over_batch(run: Callable[[Any, Any], Any], shared: frozenset[str] = frozenset()) -> Callable[[Any, Any], Any]:
    """`run(problem, operands)`, which `jax.vmap` calls once on a larger batch.

    `problem` is a dataclass with a field `batch`. Each array in `operands`, a named tuple, and each result has the
    batch as its first dimension; those of the names in `shared` may have 1, for what all examples share.
    """

    def call(problem: Any, operands: Any) -> Any:
        mapped = custom_vmap(functools.partial(run, problem))

        @mapped.def_vmap
        def _fold(axis_size, in_batched, operands):
            def fold(name, x, batched):
                if not batched and x.shape[0] == 1 and name in shared:
                    return x
                x = x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))
                x = jnp.broadcast_to(x, (axis_size, problem.batch, *x.shape[2:]))
                return x.reshape(axis_size * problem.batch, *x.shape[2:])

            larger = dataclasses.replace(problem, batch=axis_size * problem.batch)
            fields = zip(operands._fields, operands, in_batched[0], strict=True)
            folded = type(operands)(*(jax.tree.map(functools.partial(fold, name), x, b) for name, x, b in fields))
            out = call(larger, folded)
            unfolded = jax.tree.map(lambda x: x.reshape(axis_size, problem.batch, *x.shape[1:]), out)
            return unfolded, jax.tree.map(lambda _: True, unfolded)

        return mapped(operands)

    return call

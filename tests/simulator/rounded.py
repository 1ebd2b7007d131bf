"""Kernels of the simulator by the one tolerance rule, where there is no `Case` for what is asked."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from closeness import assert_close

from fast_layers.ops.attention import api, reference, xla
from fast_layers.ops.attention.problem import Aux, Inputs, Problem, Residuals
from fast_layers.testing import simulate
from simulator.attention import draw


def op_and_gradients(backend: Any, query: Any, key: Any, value: Any, d_out: Any, *others: Any, **options: Any):
    """(out, lse, gradients) by the backend's own forward; `others` are more operands, as `_prepare` takes them."""
    inputs, aux, given, _ = api._prepare(query, key, value, *others, **options)
    problem = given.problem(inputs, aux)
    out, lse = backend.forward(problem, inputs, aux)
    residuals = Residuals(inputs, aux, out, lse)
    return out, lse, backend.backward(problem, residuals, d_out.reshape(out.shape), jnp.zeros_like(lse))


def assert_rounded(got: Any, call: Callable[..., Any], *operands: Any, rows: Any = np.s_[:]) -> None:
    """`got`, `rows` of each of its leaves, is what `call(backend, *operands)` gives by a kernel.

    The oracle is the reference on the same numbers in float64, the yardstick the xla backend. Rows along the last axis
    in which the oracle is not finite are to be so in all, and else are not compared: which column is NaN depends on the
    order of sums.
    """
    plain = jax.jit(functools.partial(call, xla))(*operands)
    with jax.enable_x64(True):
        oracle = jax.tree.map(np.asarray, call(reference, *(_in_float64(x) for x in operands)))
    others = zip(jax.tree.leaves(oracle), jax.tree.leaves(plain), strict=True)
    for (path, have), (want, yardstick) in zip(jax.tree.leaves_with_path(got), others, strict=True):
        name = jax.tree_util.keystr(path)
        have, want, yardstick = (np.asarray(x)[rows] for x in (have, want, yardstick))
        whole = np.isfinite(want).all(-1)
        for other in (have, yardstick):
            np.testing.assert_array_equal(np.isfinite(other).all(-1), whole, err_msg=name)
        assert whole.any(), name
        assert_close(have[whole], want[whole], yardstick[whole], name=name)


def assert_forward(got: Any, problem: Problem, inputs: Inputs, aux: Aux) -> None:
    """`got` is a kernel's (out, lse). The oracle is the reference in float64, the yardstick the reference as it is."""
    yardstick = reference.forward(problem, inputs, aux)
    with jax.enable_x64(True):
        exact = dataclasses.replace(problem, dtype=jnp.dtype(jnp.float64)), jax.tree.map(_in_float64, inputs), aux
        oracle = reference.forward(*exact)
    for name, *arrays in zip(("out", "lse"), got, oracle, yardstick, strict=True):
        assert_close(*arrays, name=name)


def _in_float64(x: Any) -> Any:
    return jnp.asarray(x, jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def check_broken_inputs(kernel: Any, kv_heads: int) -> None:
    """One example each: a query, a key and a value with NaN or inf, in the second of three documents."""
    query, key, value, d_out = draw(batch=3)
    query = query.at[0, 55, 0, 3].set(jnp.nan)
    key = key[:, :, :kv_heads].at[1, 60, -1, 63].set(jnp.nan)
    value = value[:, :, :kv_heads].at[2, 51, 0, 0].set(jnp.inf)

    def both(backend, *operands):
        out, lse, grads = op_and_gradients(backend, *operands, segment_ids=np.repeat([0, 1, 2], [50, 30, 20]))
        return out, lse[..., None], grads.query, grads.key, grads.value

    operands = query, key, value, d_out
    got = simulate(functools.partial(both, kernel), *operands).check()
    assert all(not np.isfinite(x).all() for x in got)
    assert_rounded(got, both, *operands)

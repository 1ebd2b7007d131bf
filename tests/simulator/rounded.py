"""Kernels of the simulator by the one tolerance rule, where there is no `Case` for what is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from closeness import assert_close

from fast_layers.ops.attention import reference, xla


def assert_rounded(got: Any, call: Callable[..., Any], *operands: Any, rows: Any = np.s_[:]) -> None:
    """`got` is what `call(backend, *operands)` gives by a kernel; only `rows`, for leaves of several axes.

    The oracle is the reference on the same numbers in float32, the yardstick the xla backend. Rows of the last axis in
    which the oracle is not finite are to be so in all, and else are not compared: which column is NaN depends on the
    order of sums. What is float32 anyway, as lse, has no wider oracle here: 1e-4 more than twice the yardstick's error.
    """
    plain = jax.jit(lambda *operands: call(xla, *operands))(*operands)
    oracle = call(reference, *(_in_float32(x) for x in operands))
    others = zip(jax.tree.leaves(oracle), jax.tree.leaves(plain), strict=True)
    for (path, have), (want, yardstick) in zip(jax.tree.leaves_with_path(got), others, strict=True):
        name = jax.tree_util.keystr(path)
        have, want, yardstick = (np.asarray(x)[rows] for x in (have, want, yardstick))
        whole = np.isfinite(want).all(-1)
        for other in (have, yardstick):
            np.testing.assert_array_equal(np.isfinite(other).all(-1), whole, err_msg=name)
        assert whole.any(), name
        if have.dtype == np.float32:
            allowed = 2 * np.abs(yardstick[whole] - want[whole]).max()
            np.testing.assert_allclose(have[whole], want[whole], rtol=1e-4, atol=1e-4 + allowed, err_msg=name)
        else:
            assert_close(have[whole], want[whole], yardstick[whole], name=name)


def _in_float32(x: Any) -> Any:
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x

"""The one tolerance rule of this project: what "correct to rounding" means for a kernel.

    max |result - oracle| <= 2 * max |yardstick - oracle| + 1 ulp

The oracle is the same mathematics in a wider type, the yardstick a plain implementation in the result's own type: a
result may be about as wrong as honest rounding makes the obvious code, and no more. The ulp is that of the largest
magnitude in the oracle, in the result's type, so that a yardstick that happens to be exact does not ask for the same.

Rounding is luck, and few numbers have more of it. So small arrays are judged together over a few draws of the inputs
(`assert_close_over_draws`; the more draws, the less luck, on both sides of the rule), and where there are several plain
implementations (say, sums in another order) the worst of them is the yardstick.

    from fast_layers.testing import closeness
    verdict = closeness.judge(result, oracle, yardstick)      # .error, .limit, .failure
    closeness.assert_close(result, oracle, yardstick, name="grad of key")
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FACTOR = 2
# A yardstick further off than this part of the largest magnitude measures nothing: it is a wrong implementation.
_WORST_YARDSTICK = 0.1


def ulp(magnitude: float, dtype: Any) -> float:
    """Distance between neighbouring numbers of `dtype` at `magnitude`."""
    info = jnp.finfo(dtype)
    exponent = np.floor(np.log2(max(float(magnitude), float(info.tiny))))
    return float(info.eps) * 2.0**exponent


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Of one array: `error` and `limit`, both None where they could not be measured; `failure` in words, or None."""

    error: float | None
    limit: float | None
    failure: str | None

    @property
    def ok(self) -> bool:
        return self.failure is None


def judge(result: Any, oracle: Any, *yardsticks: Any, name: str = "result") -> Verdict:
    """The rule of this module for one array; NaN, inf and -inf must stand at the same places everywhere.

    `result` and each yardstick have the dtype under test, `oracle` a wider one. All have one shape. What does not fit
    is a failure as well.
    """
    if not yardsticks:
        return _unmeasured("no yardstick given: pass a plain implementation's result in the dtype under test")
    result, oracle, *plain = (np.asarray(x) for x in (result, oracle, *yardsticks))
    dtype = result.dtype
    for what, array in (("result", result), *(("yardstick", x) for x in plain)):
        if array.shape != oracle.shape:
            return _unmeasured(f"{name}: {what} has shape {array.shape}, the oracle {oracle.shape}")
        if array.dtype != dtype:
            return _unmeasured(f"{name}: dtype {dtype}, the yardstick has {array.dtype}")
    if not jnp.finfo(oracle.dtype).eps < jnp.finfo(dtype).eps:
        return _unmeasured(f"{name}: an oracle of {oracle.dtype} cannot judge {dtype}; compute it in a wider type")
    result, *plain = (x.astype(oracle.dtype) for x in (result, *plain))
    for what, array in (("result", result), *(("yardstick", x) for x in plain)):
        if strange := _different_non_finite(array, oracle, f"{name} ({what})"):
            return _unmeasured(strange)
    finite = np.isfinite(oracle)
    if not finite.any():
        return Verdict(0.0, 0.0, None)
    errors, *plain_errors = (np.abs(np.where(finite, x, 0) - np.where(finite, oracle, 0)) for x in (result, *plain))
    allowed = max(x.max() for x in plain_errors)
    largest = np.abs(oracle[finite]).max()
    one_ulp = ulp(largest, dtype)
    if allowed > max(_WORST_YARDSTICK * largest, one_ulp):
        return _unmeasured(
            f"{name}: the yardstick is off by {float(allowed):.3g} where the largest magnitude is "
            f"{float(largest):.3g}; it is wrong, and no measure of anything"
        )
    error, limit = float(errors.max()), float(FACTOR * allowed + one_ulp)
    if error <= limit:
        return Verdict(error, limit, None)
    worst = np.unravel_index(errors.argmax(), errors.shape)
    return Verdict(
        error,
        limit,
        f"{name}: max error {error:.3g} exceeds {limit:.3g} = {FACTOR} x the yardstick's "
        f"{float(allowed):.3g} + 1 ulp {one_ulp:.3g} ({dtype} at {float(largest):.3g}); worst at "
        f"{tuple(map(int, worst))}: got {float(result[worst]):.9g}, want {float(oracle[worst]):.9g}; "
        f"{int((errors > limit).sum())} of {errors.size} entries are beyond the limit",
    )


def _unmeasured(failure: str) -> Verdict:
    return Verdict(None, None, failure)


def assert_close(result: Any, oracle: Any, *yardsticks: Any, name: str = "result") -> None:
    """Raise AssertionError with the verdict's words unless `judge` is content."""
    if failure := judge(result, oracle, *yardsticks, name=name).failure:
        raise AssertionError(failure)


def assert_trees_close(result: Any, oracle: Any, *yardsticks: Any, name: str = "") -> None:
    """`assert_close` for each leaf of pytrees of one structure."""
    structures = [jax.tree.structure(tree) for tree in (result, oracle, *yardsticks)]
    if any(s != structures[0] for s in structures):
        raise AssertionError(f"{name}: structures differ: {structures}")
    others = zip(*(jax.tree.leaves(tree) for tree in (oracle, *yardsticks)), strict=True)
    for (path, got), expected in zip(jax.tree.leaves_with_path(result), others, strict=True):
        assert_close(got, *expected, name=f"{name}{jax.tree_util.keystr(path)}")


def assert_close_over_draws(make: Callable[[int], tuple[Any, ...]], name: str = "", draws: int = 6) -> None:
    """`assert_trees_close` on `make(0)`, ... stacked; `make(draw)` returns (result, oracle, *yardsticks).

    A failure is looked at again over eight times as many draws, all judged together: what is only bad luck goes away,
    what is systematic stays.
    """
    made = [make(draw) for draw in range(draws)]
    try:
        assert_trees_close(*map(stack, zip(*made, strict=True)), name=name)
    except AssertionError:
        made += [make(draw) for draw in range(draws, 8 * draws)]
        assert_trees_close(*map(stack, zip(*made, strict=True)), name=name)


def stack(trees: Any) -> Any:
    """One pytree from several: leaves gain a leading axis."""
    return jax.tree.map(lambda *leaves: np.stack([np.asarray(x) for x in leaves]), *trees)


def assert_bitwise_equal(result: Any, expected: Any, name: str = "") -> None:
    """Same structure, shapes, dtypes and values; NaN equals NaN, and 0 equals -0."""
    if jax.tree.structure(result) != jax.tree.structure(expected):
        raise AssertionError(f"{name}: structures differ")
    for (path, got), want in zip(jax.tree.leaves_with_path(result), jax.tree.leaves(expected), strict=True):
        got, want = np.asarray(got), np.asarray(want)
        where = f"{name}{jax.tree_util.keystr(path)}"
        if got.dtype != want.dtype:
            raise AssertionError(f"{where}: dtype {got.dtype}, expected {want.dtype}")
        np.testing.assert_array_equal(got, want, err_msg=where)


def _different_non_finite(array: np.ndarray, oracle: np.ndarray, name: str) -> str | None:
    for what, got, want in (
        ("NaN", np.isnan(array), np.isnan(oracle)),
        ("+inf", np.isposinf(array), np.isposinf(oracle)),
        ("-inf", np.isneginf(array), np.isneginf(oracle)),
    ):
        if (got != want).any():
            first = tuple(map(int, np.argwhere(got != want)[0]))
            return (
                f"{name}: {what} at {int(got.sum())} places, expected at {int(want.sum())}; they differ at "
                f"{int((got != want).sum())}, first at {first}: got {float(array[first])}, want {float(oracle[first])}"
            )
    return None

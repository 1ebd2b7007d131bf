"""Checks of options that must be known when tracing; shared by the ops."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fast_layers.ops.operands import is_integer, is_real


def flag(name: str, value: Any) -> None:
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name}={value!r}: must be True or False, known when tracing")


def one_of(name: str, value: Any, known: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name}={value!r}: must be {' or '.join(map(repr, known))}")


def check_size(name: str, value: Any) -> None:
    if not is_integer(value) or value < 1:
        raise ValueError(f"{name}={value!r}: must be an int, at least 1")


def check_dropout_rate(value: Any) -> None:
    if not is_real(value) or not 0.0 <= value < 1.0:
        raise ValueError(
            f"dropout_rate={value!r}: must be a number in [0, 1) of Python or NumPy, known when tracing; of a jax "
            "array take float(dropout_rate)"
        )


@functools.cache
def _try_precision(precision: Any) -> None:
    one = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    jax.eval_shape(functools.partial(jnp.matmul, precision=precision), one, one)


def hashable_precision(precision: Any) -> Any:
    """As part of a Problem, where a kernel would not look at it: so what JAX does not take is refused here."""
    precision = tuple(precision) if isinstance(precision, list) else precision
    if precision is None or isinstance(precision, (jax.lax.DotAlgorithm, jax.lax.DotAlgorithmPreset)):
        return precision
    try:
        _try_precision(precision)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"precision={precision!r}: must be None or what jax.lax.dot_general takes, such as 'highest', "
            "jax.lax.Precision.HIGH or a pair of these"
        ) from error
    return precision

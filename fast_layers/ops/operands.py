"""What callers give as arrays, as arrays; shared by the ops."""

from __future__ import annotations

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fast_layers.kernel_parts.kv_range import INT_MAX

INT_MIN = -INT_MAX - 1


def to_array(name: str, given: Any, wanted: str = "an array") -> Array:
    try:
        return jnp.asarray(given)
    except (TypeError, ValueError, OverflowError) as error:
        shown = repr(given) if given is None or isinstance(given, (str, type)) else type(given).__name__
        raise ValueError(f"{name} is {shown}: must be {wanted}") from error


def is_wide_float(dtype: Any) -> bool:
    """Floats of 16 bits and more: narrower ones want a scale beside them."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.dtype(dtype).itemsize >= 2


def floating(name: str, given: Any, narrow: bool = False) -> Array:
    """As an array; `narrow`: floats of 8 bits and less are taken, too."""
    array = to_array(name, given)
    if not (jnp.issubdtype(array.dtype, jnp.floating) if narrow else is_wide_float(array.dtype)):
        raise ValueError(
            f"{name} has dtype {array.dtype}: must be floating point (bfloat16, float16, float32, float64); "
            f"cast it, e.g. {name}.astype(jnp.bfloat16)"
        )
    return array


def is_integer(number: Any) -> bool:
    """An int or numpy integer, but no bool."""
    return isinstance(number, numbers.Integral) and not isinstance(number, bool)


def is_real(number: Any) -> bool:
    """A number of Python or numpy, but no bool."""
    return isinstance(number, numbers.Real) and not isinstance(number, bool)


def integers(name: str, values: Any, way_out: str = "") -> Array:
    """Numbers as JAX has them. Those known here that do not fit in int32, to which JAX would cut them, are refused."""
    if isinstance(values, (np.ndarray, np.generic, list, tuple, int)) and not any(
        isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(values)
    ):
        try:
            known = np.asarray(values)
        except ValueError as error:
            raise ValueError(f"{name} is a list of unequal lists: must be integers, as many in each") from error
        if known.size and (known.dtype.kind in "iu" or all(map(is_integer, known.flat))):
            least, most = int(known.min()), int(known.max())
            if least < INT_MIN or most > INT_MAX:
                raise ValueError(
                    f"{name} must fit in int32, got {least if least < INT_MIN else most}{way_out and f'; {way_out}'}"
                )
            known = known.astype(np.int32)
        values = known
    array = to_array(name, values, "integers")
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, got dtype {array.dtype}")
    return array


def document_ids(ids: Any) -> Array:
    """Ids that JAX would cut to 32 bits, so that two documents could become one, are refused."""
    return integers("segment_ids", ids, "number them: np.unique(ids, return_inverse=True)[1].reshape(ids.shape)")

"""What reverse mode goes through once: an identity whose transposed says why, and what to do instead."""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_identity = Primitive("once_in_reverse")
_identity.def_impl(lambda x, **_: x)
_identity.def_abstract_eval(lambda x, **_: x)


def once_in_reverse(gradients: Any, reason: str) -> Any:
    """The arrays of a tree, which JAX can derive in a direction; where it would transpose that, a ValueError says the
    reason. For gradients made by loops, of which JAX has no other words than that they are loops."""
    return jax.tree.map(lambda x: _identity.bind(x, reason=reason), gradients)


def _refuse(cotangent: Any, x: Any, *, reason: str) -> Any:
    raise ValueError(reason)


ad.deflinear2(_identity, _refuse)
batching.defvectorized(_identity)
mlir.register_lowering(_identity, lambda context, x, **_: [x])

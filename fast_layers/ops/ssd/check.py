"""What a caller can get wrong, as ValueErrors; shared by `ssd` and `ssd_step`."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from fast_layers.ops.operands import document_ids, floating, is_integer, is_real
from fast_layers.ops.ssd.problem import Inputs


def sequence(x, dt, A, B, C, D, z, dt_bias, initial_state) -> Inputs:
    """The operands of `ssd` as arrays."""
    given = _arrays(x, dt, A, B, C, D, z, dt_bias, initial_state)
    if given.x.ndim != 4:
        raise ValueError(f"x must be [batch, length, heads, head_dim], got {given.x.shape}; vmap over further dims")
    if given.x.shape[1] == 0:
        raise ValueError(f"length is 0: must be at least 1; leave the call out for empty inputs (x {given.x.shape})")
    _check(given, ("batch", "length"))
    return given


def step(state, x, dt, A, B, C, D, z, dt_bias) -> Inputs:
    """The operands of `ssd_step` as arrays."""
    given = _arrays(x, dt, A, B, C, D, z, dt_bias, state, state="state")
    if given.x.ndim != 3:
        raise ValueError(f"x must be [batch, heads, head_dim], got {given.x.shape}: ssd_step takes one token")
    _check(given, ("batch",), state="state")
    return given


def segment_ids(ids: Any, batch: int, length: int) -> Int[Array, "B L"] | None:
    if ids is None:
        return None
    ids = document_ids(ids)
    if ids.shape not in ((batch, length), (length,)):
        raise ValueError(
            f"segment_ids must have shape (batch, length) = {(batch, length)} or (length,), got {ids.shape}"
        )
    return jnp.broadcast_to(ids, (batch, length))


def chunk_size(chunk: Any, default: int, length: int) -> int:
    if chunk is None:
        chunk = default
    if not is_integer(chunk) or chunk < 1:
        raise ValueError(f"chunk_size={chunk!r}: must be an int >= 1, or None for the default")
    return min(int(chunk), length) if isinstance(length, int) else int(chunk)


def dt_limit(limit: Any) -> tuple[float, float]:
    wanted = "must be a pair of numbers (low, high) with low <= high, known when tracing"
    if not isinstance(limit, (tuple, list)) or len(limit) != 2:
        raise ValueError(f"dt_limit={limit!r}: {wanted}")
    if not all(map(is_real, limit)):
        raise ValueError(f"dt_limit={limit!r}: {wanted}")
    low, high = map(float, limit)
    if math.isnan(low) or math.isnan(high) or low > high:
        raise ValueError(f"dt_limit={limit!r}: {wanted}")
    return low, high


OPTIONAL = ("D", "z", "dt_bias", "initial_state")


def _arrays(x, dt, A, B, C, D, z, dt_bias, initial_state, state: str = "initial_state") -> Inputs:
    names = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", state)
    operands = (x, dt, A, B, C, D, z, dt_bias, initial_state)
    named = zip(names, operands, strict=True)
    arrays: list[Any] = [None if v is None and n in OPTIONAL else floating(n, v) for n, v in named]
    return Inputs(*arrays)


def _check(given: Inputs, rows: tuple[str, ...], state: str = "initial_state") -> None:
    """`rows` are the dims before heads."""
    *leading, heads, head_dim = given.x.shape
    for name in ("B", "C", "z"):
        operand = getattr(given, name)
        if operand is not None and operand.dtype != given.x.dtype:
            raise ValueError(
                f"x, B, C and z must have the same dtype, got x {given.x.dtype} and {name} {operand.dtype}; "
                "cast them to one"
            )
    if given.B.ndim != given.x.ndim or given.B.shape[:-2] != tuple(leading):
        raise ValueError(
            f"B must be [{', '.join(rows)}, groups, state_dim] with x {given.x.shape}, got {given.B.shape}"
        )
    groups, state_dim = given.B.shape[-2:]
    shown = f"x {given.x.shape}, B {given.B.shape}"
    for name, size in (
        ("heads", heads),
        ("head_dim", head_dim),
        ("groups", groups),
        ("state_dim", state_dim),
    ):
        if isinstance(size, int) and size == 0:
            raise ValueError(f"{name} is 0: must be at least 1; leave the call out for empty inputs ({shown})")
    if heads % groups:
        raise ValueError(f"heads must be a multiple of groups, got {heads} and {groups} ({shown})")
    wanted = {
        "dt": ((*leading, heads), (*rows, "heads")),
        "A": ((heads,), ("heads",)),
        "C": (given.B.shape, (*rows, "groups", "state_dim")),
        "z": (given.x.shape, (*rows, "heads", "head_dim")),
        "dt_bias": ((heads,), ("heads",)),
        "initial_state": ((leading[0], heads, head_dim, state_dim), ("batch", "heads", "head_dim", "state_dim")),
    }
    for name, (shape, letters) in wanted.items():
        operand = getattr(given, name)
        if operand is not None and operand.shape != shape:
            shown_name = state if name == "initial_state" else name
            raise ValueError(f"{shown_name} must have shape ({', '.join(letters)}) = {shape}, got {operand.shape}")
    if given.D is not None and given.D.shape not in ((heads,), (heads, head_dim)):
        raise ValueError(
            f"D must have shape (heads,) = {(heads,)} or (heads, head_dim) = {(heads, head_dim)}, got {given.D.shape}"
        )

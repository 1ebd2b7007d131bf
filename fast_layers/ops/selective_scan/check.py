"""What a caller can get wrong, as ValueErrors; shared by `selective_scan` and `selective_scan_step`."""

from __future__ import annotations

from typing import Any

from fast_layers.ops.operands import floating
from fast_layers.ops.selective_scan.problem import Inputs
from fast_layers.ops.ssd.check import OPTIONAL

_NAMES = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias")


def operands(x, dt, A, B, C, D, z, dt_bias, state, *, rows: tuple[str, ...], state_name: str) -> Inputs:
    """The operands as arrays, B and C with a dimension of groups; `rows` are x's dims before its channels."""
    named = zip((*_NAMES, state_name), (x, dt, A, B, C, D, z, dt_bias, state), strict=True)
    arrays: list[Any] = [None if v is None and name in OPTIONAL else floating(name, v) for name, v in named]
    given = Inputs(*arrays)
    if given.x.ndim != len(rows) + 1:
        raise ValueError(f"x must be [{', '.join(rows)}, channels], got {given.x.shape}; the channels come last")
    *leading, channels = given.x.shape
    if given.A.ndim != 2 or given.A.shape[0] != channels:
        raise ValueError(f"A must have shape (channels, state_dim) with {channels} channels, got {given.A.shape}")
    state_dim = given.A.shape[1]
    for name, size in (*zip(rows[1:], leading[1:], strict=True), ("channels", channels), ("state_dim", state_dim)):
        if isinstance(size, int) and size == 0:
            raise ValueError(
                f"{name} is 0: must be at least 1; leave the call out for empty inputs (x {given.x.shape})"
            )
    for name in ("B", "C", "z"):
        operand = getattr(given, name)
        if operand is not None and operand.dtype != given.x.dtype:
            raise ValueError(
                f"x, B, C and z must have the same dtype, got x {given.x.dtype} and {name} {operand.dtype}; "
                "cast them to one"
            )
    given = given._replace(**{name: _with_groups(name, given, rows) for name in ("B", "C")})
    if given.B.shape != given.C.shape:
        raise ValueError(f"B and C must have the same groups, got {given.B.shape[-2]} and {given.C.shape[-2]}")
    groups = given.B.shape[-2]
    if not groups or channels % groups:
        raise ValueError(f"channels must be a multiple of groups, got {channels} and {groups}")
    wanted = {
        "dt": (given.x.shape, (*rows, "channels")),
        "z": (given.x.shape, (*rows, "channels")),
        "D": ((channels,), ("channels",)),
        "dt_bias": ((channels,), ("channels",)),
        "initial_state": ((leading[0], channels, state_dim), ("batch", "channels", "state_dim")),
    }
    for name, (shape, letters) in wanted.items():
        operand = getattr(given, name)
        if operand is not None and operand.shape != shape:
            shown = state_name if name == "initial_state" else name
            raise ValueError(f"{shown} must have shape ({', '.join(letters)}) = {shape}, got {operand.shape}")
    return given


def _with_groups(name: str, given: Inputs, rows: tuple[str, ...]):
    operand, leading = getattr(given, name), given.x.shape[:-1]
    state_dim = given.A.shape[1]
    if operand.shape == (*leading, state_dim):
        return operand[..., None, :]
    if operand.ndim == len(leading) + 2 and operand.shape[:-2] == leading and operand.shape[-1] == state_dim:
        return operand
    raise ValueError(
        f"{name} must be [{', '.join(rows)}, state_dim] or [{', '.join(rows)}, groups, state_dim] with x "
        f"{given.x.shape} and A {given.A.shape}, got {operand.shape}"
    )

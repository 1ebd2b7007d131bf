"""How long the tools wait."""

from __future__ import annotations

from typing import Any

from fast_layers.ops.operands import is_real

_MOST_SECONDS = 1e8
"""Three years: the clocks of threads and processes take little more."""


def seconds(timeout: Any) -> float:
    if not is_real(timeout) or not 0 < timeout <= _MOST_SECONDS:
        raise ValueError(f"timeout={timeout!r}: must be a positive number of seconds, {_MOST_SECONDS:g} at most")
    return float(timeout)

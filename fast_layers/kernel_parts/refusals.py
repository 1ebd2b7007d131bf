"""Refusals that the kernels of several ops share: the reason, or None."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from fast_layers.arch import Arch
from fast_layers.kernel_parts import automatic_axes

_HOPPER = (9, 0)
_BLACKWELL = ((10, 0), (10, 3))

MOST_NUMBERS = 2**31 - 1
"""In one array, where a kernel's offsets have 32 bits."""


def not_hopper(arch: Arch) -> str | None:
    if arch.platform == "cuda" and arch.capability == _HOPPER:
        return _wide_integers()
    return f"needs an NVIDIA GPU of compute capability 9.0 (H100, H200), got {arch}"


def not_blackwell(arch: Arch) -> str | None:
    if arch.platform == "cuda" and arch.capability in _BLACKWELL:
        return _wide_integers()
    return f"needs an NVIDIA GPU of compute capability 10.0 (B200) or 10.3 (B300), got {arch}"


def _wide_integers() -> str | None:
    """Mosaic's indices have 32 bits, which other integers then would not have."""
    if jax.config.jax_enable_x64:
        return "needs integers of 32 bits, but jax_enable_x64 is on; call it `with jax.enable_x64(False)`"
    return None


def too_many(numbers: int) -> bool:
    """For one array; where XLA splits the call they are those of all devices, and each is asked about its own."""
    return numbers > MOST_NUMBERS and not automatic_axes.xla_splits()


def symbolic(sizes: Iterable[Any]) -> str | None:
    """Of `jax.export`: a kernel's tiles and grid follow from the sizes."""
    unknown = ", ".join(str(size) for size in sizes if not isinstance(size, int))
    return f"needs sizes known when tracing, got symbolic {unknown}" if unknown else None

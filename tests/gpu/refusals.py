"""What a kernel may refuse on its own GPU: a test that meets any other refusal there fails, and is not skipped."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NoReturn

import pytest

from fast_layers.arch import Arch, lowering_targets
from fast_layers.testing import ParityTable

OWN_GPUS = {"hopper": {(9, 0)}, "blackwell": {(10, 0), (10, 3)}}
# The limits that the docs name, as they read in a refusal. cuDNN's depend on its version, and are not held to them.
DOCUMENTED = (
    "takes features in multiples of (8|16),",
    "takes heads of 32, 64, 128 channels",
    "takes states of 16, 32, 64, 96, 128, got 256",
    "works in chunks of ",
    "takes 2 to 4 taps",
    "takes channels in multiples of 128",
    "takes groups of multiples of 64 up to 1024",
)


def check(backend: str, arch: Arch, refusals: Iterable[str | None]) -> None:
    """Fail for a refusal that is not documented, of a backend whose GPU is here."""
    if arch.capability not in OWN_GPUS.get(backend, ()):
        return
    for reason in filter(None, refusals):
        if not any(re.match(limit, reason) for limit in DOCUMENTED):
            pytest.fail(f"{backend} must take this on {arch}, and refuses: {reason}", pytrace=False)


def settle(backend: str, table: ParityTable) -> None:
    """Fail for what is wrong in `check_parity`'s table of a backend, or may not be refused; skip if all is refused."""
    assert table.ok, f"\n{table}"
    arch, reasons = lowering_targets()[0], [row.refusal for row in table.refusals]
    check(backend, arch, reasons)
    if len(reasons) == len(table.rows):
        skip(backend, arch, reasons)


def skip(backend: str, arch: Arch, refusals: Iterable[str | None]) -> NoReturn:
    """Skip with the reasons, if `check` lets them pass."""
    reasons = list(dict.fromkeys(filter(None, refusals)))
    check(backend, arch, reasons)
    pytest.skip("; ".join(reasons))

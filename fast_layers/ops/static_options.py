"""Checks of options that must be known when tracing; shared by the ops."""

from __future__ import annotations

from typing import Any

import numpy as np


def flag(name: str, value: Any) -> None:
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name}={value!r}: must be True or False, known when tracing")

"""How much of a test each run does: pytest's parameters and hypothesis' examples."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

import hypothesis
import pytest

EXAMPLES_OF_CI = 10


def some_each_run(names: Iterable[str], each_run: Set[str]) -> list[Any]:
    """For pytest's parametrize: those that are not in `each_run` are marked exhaustive."""
    names = list(names)
    assert each_run <= set(names), each_run - set(names)
    return [pytest.param(name, marks=() if name in each_run else pytest.mark.exhaustive) for name in names]


def examples(in_ci: int) -> hypothesis.settings:
    """That many examples in the profile "ci", and as many times more or fewer as another profile has."""
    return hypothesis.settings(max_examples=max(2, in_ci * hypothesis.settings.default.max_examples // EXAMPLES_OF_CI))

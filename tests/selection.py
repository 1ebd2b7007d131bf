"""How much of a test each run does: pytest's parameters and hypothesis' examples."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

import hypothesis
import pytest

EXAMPLES_OF_CI = 10


def some_each_run(cases: Iterable[str | tuple], each_run: Set[str | tuple]) -> list[Any]:
    """For pytest's parametrize, a tuple for several arguments: those not in `each_run` are marked exhaustive."""
    cases = list(cases)
    assert each_run <= set(cases), each_run - set(cases)

    def marked(case):
        arguments = case if isinstance(case, tuple) else (case,)
        return pytest.param(*arguments, marks=() if case in each_run else pytest.mark.exhaustive)

    return [marked(case) for case in cases]


def examples(in_ci: int) -> hypothesis.settings:
    """That many examples in the profile "ci", and as many times more or fewer as another profile has."""
    return hypothesis.settings(max_examples=max(2, in_ci * hypothesis.settings.default.max_examples // EXAMPLES_OF_CI))

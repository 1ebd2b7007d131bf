"""Values and all gradients of every backend, over every combination of arguments."""

from __future__ import annotations

import numpy as np
import pytest
from closeness import assert_close_over_draws

from ops.ssd.cases import TESTED, Case, build, runner


def _check(case: Case, implementation: str, *, dtype=np.float32, optimise=True, draws=4):
    run = runner(implementation, optimise=optimise)
    plain = [runner("reference", optimise=optimise)] if implementation != "reference" else []

    def make(draw):
        built = build(case, dtype, draw)
        return run(built), built.oracle(), *(f(built) for f in plain), built.oracle(dtype)

    assert_close_over_draws(make, f"{implementation} on {case!r}: ", draws)


@pytest.mark.parametrize("implementation", ["reference", *TESTED])
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(length=1, initial_state=True),
        Case(length=65, groups=3, D="head", z=True),
        Case(length=119, heads=6, groups=2, D="channel", softplus=True, dt_bias=True, initial_state=True),
        Case(length=130, heads=4, groups=2, segments="rows", initial_state=True, chunk_size=32),
        Case(length=119, dt="extreme", A="very negative", initial_state=True),
        Case(length=119, dt="extreme", softplus=True, segments="shared"),
        Case(length=119, A="near 0", initial_state=True, limit=(0.01, 0.08)),
    ],
    ids=str,
)
def test_fixed_cases(implementation, case):
    """One feature at a time: when these fail too, they say which."""
    _check(case, implementation, optimise=False)

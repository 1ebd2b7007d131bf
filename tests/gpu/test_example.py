"""The gradients of the example's model, in rows of packed documents, on the GPU at hand."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from bench import train_step


@pytest.mark.parametrize("arch", ["transformer", "hybrid"])
def test_twenty_runs_give_the_same_bits(arch):
    sizes = train_step.from_flags({"preset": "125M", "arch": arch})
    config = dataclasses.replace(sizes, layers=2, batch_size=4, accumulate=1, dtype="bfloat16")
    case = train_step.Case(config, "packed")
    operands = case.operands()
    run = jax.jit(lambda operands: train_step.gradients(case)(**operands))
    first = jax.tree.map(np.asarray, run(operands))
    for _ in range(19):
        for name, found in run(operands).items():
            np.testing.assert_array_equal(found, first[name], err_msg=name)

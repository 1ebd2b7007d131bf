"""With `jax_enable_x64` an index, a loop's counter or a constant has 64 bits where nobody says how many."""

from __future__ import annotations

import jax
import pytest

from fast_layers.testing.parity import SUITES, check_parity

FEW = {
    "dot_product_attention": ("everything",),
    "mlp": ("geglu with bias",),
    "ssd": ("everything",),
    "selective_scan": ("initial state",),
    "causal_conv1d": ("states", "documents"),
    "gated_rms_norm": ("groups, norm before gate",),
}
"""Cases with most operands."""


@pytest.fixture(autouse=True)
def _64_bits():
    """In all threads, unlike the context."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def _check(op, cases=None):
    table = check_parity(op, "xla", cases)
    assert table.ok, str(table)


@pytest.mark.parametrize("op", FEW)
def test_parity(op):
    _check(op, FEW[op])


@pytest.mark.exhaustive
@pytest.mark.parametrize("op", SUITES)
def test_parity_of_all(op):
    _check(op)

"""Relative to a first maximum all is as by the plain online softmax, or told to have failed."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from fast_layers.kernel_parts.first_maximum_softmax import FirstMaximumSoftmax, failed

TO_LOG2 = 0.7
PIECES = {
    "finite": [[3.0, -2.0], [1.0, 5.0], [-4.0, 0.5]],
    "first piece hidden": [[-np.inf, -np.inf], [1.0, 5.0], [-np.inf, 0.5]],
    "grows far": [[3.0, -2.0], [100.0, 110.0], [-4.0, 0.5]],
    "far below 0": [[-60.0, -65.0], [-70.0, -61.0], [-80.0, -63.0]],
}
TOO_MUCH = {
    "grows too far": [[3.0, -2.0], [1.0, 300.0]],
    "the sum does": [[3.0, -2.0], [184.4, 184.4]],
    "too far below 0": [[-100.0, -120.0], [-110.0, -130.0]],
    "nothing seen": [[-np.inf, -np.inf], [-np.inf, -np.inf]],
}


def _summed(pieces):
    """(state, the sum of all weights beside it, logits)."""
    scores = np.repeat(np.asarray(pieces, np.float32), 8, axis=1)[:, None]  # [pieces, 1, 16]
    state, summed = FirstMaximumSoftmax(), np.zeros(1, np.float32)
    for piece in scores:
        state, weights, rescale = state.step(jnp.asarray(piece), TO_LOG2)
        assert rescale is None
        with np.errstate(over="ignore"):
            summed = summed + np.asarray(weights).sum(1)
    return state.whole(), summed, scores.astype(np.float64).ravel() * TO_LOG2 * np.log(2)


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
def test_weights_sums_and_lse_by_definition(pieces):
    state, summed, logits = _summed(pieces)
    assert not failed(state.row_sum, jnp.zeros(1), None).any()
    normaliser, lse = state.finish()
    np.testing.assert_allclose(lse, [logits.max() + np.log(np.exp(logits - logits.max()).sum())], rtol=1e-5)
    np.testing.assert_allclose(summed * np.asarray(normaliser), [1.0], rtol=1e-5)


@pytest.mark.parametrize("pieces", TOO_MUCH.values(), ids=TOO_MUCH)
def test_a_row_that_floats_do_not_hold_fails(pieces):
    state, _, _ = _summed(pieces)
    assert failed(state.row_sum, jnp.zeros(1), None).all()


def test_what_else_may_be_no_finite_number_is_no_failure():
    nan, some = jnp.array([jnp.nan]), jnp.array([3.0])
    assert not failed(nan, nan, None).any()  # a score was NaN
    assert not failed(some, nan, None).any()  # a value was
    assert failed(some * 2.0**30, nan, None).all()  # what was summed may have overflowed
    nothing = jnp.zeros(1)
    assert not failed(nothing, nothing, jnp.array([False])).any()
    assert failed(nothing, nothing, jnp.array([True])).all()

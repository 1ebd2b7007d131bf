"""Sums kept in lanes give what the plain online softmax gives, also where all scores of a piece are -inf."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from fast_layers.kernel_parts import lane_softmax
from fast_layers.kernel_parts.lane_softmax import LaneSoftmax

TO_LOG2 = 0.7
PIECES = {
    "finite": [[3.0, -2.0], [1.0, 5.0], [-4.0, 0.5]],
    "first piece -inf": [[-np.inf, -np.inf], [1.0, 5.0], [-np.inf, 0.5]],
    "all -inf": [[-np.inf, -np.inf]] * 3,
    "least numbers": [[-3e38, -3e38], [-3e38, -3.1e38], [-np.inf, -3e38]],
}


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
def test_weights_sums_and_lse_by_definition(pieces, monkeypatch):
    monkeypatch.setattr(lane_softmax.plgpu, "layout_cast", lambda x, layout: x)  # there are lanes in kernels only
    scores = np.repeat(np.asarray(pieces, np.float32), 8, axis=1)[:, None]  # [pieces, 1, 16]
    state, summed = LaneSoftmax.start(1), np.zeros(1, np.float32)
    for piece in scores:
        state, weights, rescale = state.step(jnp.asarray(piece), TO_LOG2)
        summed = summed * np.asarray(rescale) + np.asarray(weights).sum(1)
    normaliser, lse = state.whole().finish()
    logits = scores.astype(np.float64).ravel() * TO_LOG2 * np.log(2)
    top = logits.max()
    want = top + np.log(np.exp(logits - top).sum()) if np.isfinite(top) else -np.inf
    np.testing.assert_allclose(lse, [want], rtol=1e-5)
    np.testing.assert_allclose(summed * np.asarray(normaliser), [float(np.isfinite(top))], rtol=1e-5)


def test_a_maximum_that_is_kept(monkeypatch):
    monkeypatch.setattr(lane_softmax.plgpu, "layout_cast", lambda x, layout: x)
    scores = jnp.repeat(jnp.array([[3.0, 1.0]]), 8, axis=1)
    first, _, _ = LaneSoftmax.start(1).step(scores, TO_LOG2)
    kept, weights, rescale = first.step(scores + 2, TO_LOG2, keeps_maximum=jnp.bool_(True))
    np.testing.assert_array_equal(kept.row_max_log2, first.row_max_log2)
    np.testing.assert_array_equal(rescale, [1.0])
    np.testing.assert_allclose(weights.max(), 2 ** (2 * TO_LOG2), rtol=1e-6)
    grown, _, _ = first.step(scores + 2, TO_LOG2, keeps_maximum=jnp.bool_(False))
    np.testing.assert_allclose(grown.row_max_log2, [5 * TO_LOG2], rtol=1e-6)

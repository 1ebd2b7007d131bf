"""What both passes of the forward do with a tile of scores besides its softmax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from fast_layers.kernel_parts.online_softmax import LOG2_E
from fast_layers.kernel_parts.tanh import tanh
from fast_layers.ops.attention.problem import Problem
from fast_layers.ops.attention.tile_logits import TileLogits


def log2_logits(p: Problem, logits: TileLogits, scores: Any, at: Mapping[str, Any]) -> tuple[Any, float]:
    """(scores, to_log2), whose product are logits times log2 e, with soft cap and bias; `at` is the tile's place."""
    to_log2 = p.scale * LOG2_E
    if p.softcap is not None:
        scores, to_log2 = tanh(scores * (p.scale / p.softcap)), p.softcap * LOG2_E
    if p.bias is not None:
        scores = scores * (to_log2 / LOG2_E) + logits.bias(shape=scores.shape, **at)
        to_log2 = LOG2_E
    return scores, to_log2


def dropped(p: Problem, logits: TileLogits, weights: Any, at: Mapping[str, Any]) -> Any:
    """Weights less those that dropout takes."""
    if not p.dropout_rate:
        return weights
    return jnp.where(logits.keep(shape=weights.shape, **at), weights, 0.0)

"""The ring of slots through which operands come, of which each step of the depth takes the next."""

from __future__ import annotations

from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def freed_slot(consumed: Any, step: Any, stages: int) -> Any:
    """The one of `stages` slots that `step` loads into, once the step that had it before is done with it."""
    slot = lax.rem(step, stages)

    @pl.when(step >= stages)
    def _wait():
        plgpu.barrier_wait(consumed.at[slot])

    return slot

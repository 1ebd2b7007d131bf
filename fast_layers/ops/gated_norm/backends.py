"""The backends of the gated norm, best first. A new one: its files beside this one, and a line here."""

from __future__ import annotations

from fast_layers.dispatch import Backend
from fast_layers.ops.gated_norm import hopper_call, reference, sharding, xla

BACKENDS: tuple[Backend, ...] = (
    Backend(
        "hopper",
        hopper_call.supports,
        hopper_call.forward,
        hopper_call.backward,
        by_name_only=hopper_call.by_name_only,
        is_kernel=True,
        split=sharding.by_xla,
    ),
    Backend("xla", xla.supports, xla.forward, xla.backward),
    Backend("reference", reference.supports, reference.forward, reference.backward, automatic=False),
)

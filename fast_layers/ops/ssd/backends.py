"""The backends of the state-space scan, best first. A new one: its files beside this one, and a line here."""

from __future__ import annotations

from fast_layers.dispatch import Backend
from fast_layers.ops.ssd import blackwell_call, hopper_call, reference, sharding, xla

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
    Backend(
        "blackwell",
        blackwell_call.supports,
        blackwell_call.forward,
        blackwell_call.backward,
        automatic=False,
        is_kernel=True,
        split=sharding.by_xla,
    ),
    Backend("xla", xla.supports, xla.forward, xla.backward),
    Backend("reference", reference.supports, reference.forward, reference.backward, automatic=False),
)

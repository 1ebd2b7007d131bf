"""The backends of attention, best first. A new one: its two files beside this one, and a line here."""

from __future__ import annotations

from fast_layers.dispatch import Backend
from fast_layers.ops.attention import blackwell_call, cudnn, hopper_call, reference, sharding, xla

BACKENDS: tuple[Backend, ...] = (
    Backend(
        "hopper",
        hopper_call.supports,
        hopper_call.forward,
        hopper_call.backward,
        saves=hopper_call.saves,
        fwd_saving=hopper_call.forward_saving,
        is_kernel=True,
        split=sharding.by_xla,
    ),
    Backend(
        "blackwell",
        blackwell_call.supports,
        blackwell_call.forward,
        blackwell_call.backward,
        by_name_only=blackwell_call.by_name_only,
        is_kernel=True,
        split=sharding.by_xla,
    ),
    Backend("cudnn", cudnn.supports, cudnn.forward, cudnn.backward, is_kernel=True),
    Backend("xla", xla.supports, xla.forward, xla.backward, fallback_on=frozenset({"cuda", "rocm"})),
    Backend("reference", reference.supports, reference.forward, reference.backward, automatic=False),
)

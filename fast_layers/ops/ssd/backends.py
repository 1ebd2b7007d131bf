"""The backends of the state-space scan, best first. A new one: its files beside this one, and a line here."""

from __future__ import annotations

from fast_layers.dispatch import Backend
from fast_layers.ops.ssd import reference, xla

BACKENDS: tuple[Backend, ...] = (
    Backend("xla", xla.supports, xla.forward, xla.backward, fallback_on=frozenset({"cuda"})),
    Backend("reference", reference.supports, reference.forward, reference.backward, automatic=False),
)

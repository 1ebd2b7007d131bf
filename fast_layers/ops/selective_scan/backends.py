"""The backends of the selective scan, best first."""

from __future__ import annotations

from fast_layers.dispatch import Backend
from fast_layers.ops.selective_scan import recurrence

_chunked_backward = recurrence.backward_of(recurrence.chunked)
_reference_backward = recurrence.backward_of(recurrence.reference)

BACKENDS: tuple[Backend, ...] = (
    Backend("xla", recurrence.supports, recurrence.chunked, _chunked_backward),
    Backend("reference", recurrence.supports, recurrence.reference, _reference_backward, automatic=False),
)

"""State-space duality, the scan of Mamba-2: one op, several backends. Start at `api.py`."""

from fast_layers.ops.ssd.api import ssd as ssd
from fast_layers.ops.ssd.step import ssd_step as ssd_step

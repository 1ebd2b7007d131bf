"""The selective scan of Mamba-1: one op, two backends. Start at `api.py`."""

from fast_layers.ops.selective_scan.api import selective_scan as selective_scan
from fast_layers.ops.selective_scan.step import selective_scan_step as selective_scan_step

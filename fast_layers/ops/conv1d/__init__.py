"""Causal depthwise convolution: one op, several backends. Start at `api.py`; `backends.py` lists them."""

from fast_layers.ops.conv1d.api import causal_conv1d as causal_conv1d
from fast_layers.ops.conv1d.api import causal_conv1d_step as causal_conv1d_step

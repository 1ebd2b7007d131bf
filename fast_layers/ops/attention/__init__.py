"""Attention: one op, several backends. Start at `api.py`; a new backend is a line in `backends.py`."""

from fast_layers.ops.attention.api import RESIDUAL_NAMES as RESIDUAL_NAMES
from fast_layers.ops.attention.api import attention_weights as attention_weights
from fast_layers.ops.attention.api import dot_product_attention as dot_product_attention

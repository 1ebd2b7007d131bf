"""The MLP: one op, several backends. Start at `api.py`; a new backend is a line in `backends.py`."""

from fast_layers.ops.mlp.api import RESIDUAL_NAMES as RESIDUAL_NAMES
from fast_layers.ops.mlp.api import linear as linear
from fast_layers.ops.mlp.api import mlp as mlp

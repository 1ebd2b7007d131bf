"""Drop-in Flax layers for language models. See https://arxiv.org/abs/2307.08691 for the idea behind FlashMHA."""

import importlib
import typing

from fast_layers import masks as masks
from fast_layers._version import __version__ as __version__
from fast_layers.dispatch import Explanation as Explanation
from fast_layers.dispatch import explain as explain
from fast_layers.dispatch import use_backends as use_backends
from fast_layers.layers import FlashMHA as FlashMHA
from fast_layers.layers import FusedMLP as FusedMLP
from fast_layers.layers import Llama3Scaling as Llama3Scaling
from fast_layers.layers import Mamba2 as Mamba2
from fast_layers.layers import Mamba2State as Mamba2State
from fast_layers.layers import Rope as Rope
from fast_layers.layers import nnx_attention_fn as nnx_attention_fn
from fast_layers.ops.attention import RESIDUAL_NAMES as ATTENTION_RESIDUAL_NAMES
from fast_layers.ops.attention import attention_weights as attention_weights
from fast_layers.ops.attention import dot_product_attention as dot_product_attention
from fast_layers.ops.conv1d import causal_conv1d as causal_conv1d
from fast_layers.ops.conv1d import causal_conv1d_step as causal_conv1d_step
from fast_layers.ops.gated_norm import gated_rms_norm as gated_rms_norm
from fast_layers.ops.mlp import RESIDUAL_NAMES as MLP_RESIDUAL_NAMES
from fast_layers.ops.mlp import linear as linear
from fast_layers.ops.mlp import mlp as mlp
from fast_layers.ops.selective_scan import selective_scan as selective_scan
from fast_layers.ops.selective_scan import selective_scan_step as selective_scan_step
from fast_layers.ops.ssd import ssd as ssd
from fast_layers.ops.ssd import ssd_step as ssd_step

if typing.TYPE_CHECKING:
    from fast_layers import checkpoints as checkpoints
    from fast_layers import linen as linen
    from fast_layers import testing as testing

_LOADED_WHEN_ASKED_FOR = ("checkpoints", "linen", "testing")

__all__ = [
    "ATTENTION_RESIDUAL_NAMES",
    "MLP_RESIDUAL_NAMES",
    "Explanation",
    "FlashMHA",
    "FusedMLP",
    "Llama3Scaling",
    "Mamba2",
    "Mamba2State",
    "Rope",
    "attention_weights",
    "causal_conv1d",
    "causal_conv1d_step",
    "dot_product_attention",
    "explain",
    "gated_rms_norm",
    "linear",
    "masks",
    "mlp",
    "nnx_attention_fn",
    "selective_scan",
    "selective_scan_step",
    "ssd",
    "ssd_step",
    "use_backends",
]


def __getattr__(name: str) -> typing.Any:
    if name not in _LOADED_WHEN_ASKED_FOR:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")

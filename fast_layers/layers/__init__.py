"""Flax NNX modules, and what they share with those of `fast_layers.linen`."""

from fast_layers.layers.attention_fn import nnx_attention_fn as nnx_attention_fn
from fast_layers.layers.flash_mha import FlashMHA as FlashMHA
from fast_layers.layers.fused_mlp import FusedMLP as FusedMLP
from fast_layers.layers.mamba2 import Mamba2 as Mamba2
from fast_layers.layers.mamba2_mixer import Mamba2State as Mamba2State
from fast_layers.layers.rope import Llama3Scaling as Llama3Scaling
from fast_layers.layers.rope import Rope as Rope

"""The layers for Flax Linen; not imported by `import fast_layers`."""

from fast_layers.linen.flash_mha import FlashMHA as FlashMHA
from fast_layers.linen.flash_mha import MultiHeadAttention as MultiHeadAttention
from fast_layers.linen.flash_mha import MultiHeadDotProductAttention as MultiHeadDotProductAttention
from fast_layers.linen.fused_mlp import FusedMLP as FusedMLP
from fast_layers.linen.hook import attention_fn as attention_fn
from fast_layers.linen.mamba2 import Mamba2 as Mamba2

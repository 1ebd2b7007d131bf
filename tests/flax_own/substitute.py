"""A pytest plugin that puts our layers and hooks in the place of Flax's, before test files import Flax.

Loaded with `-p substitute` in a process of its own; tells at the end how often our attention was called.
"""

import collections

import flax.linen as nn
import flax.nnx.nn.attention
from flax import nnx

import fast_layers
from fast_layers import linen
from fast_layers.layers import attention_fn

_calls = collections.Counter()


def _counted(name):
    original = getattr(attention_fn, name)

    def call(*args, **kwargs):
        _calls[name] += 1
        return original(*args, **kwargs)

    setattr(attention_fn, name, call)


for _name in ("dot_product_attention", "attention_weights"):
    _counted(_name)

for _module in (nnx, flax.nnx.nn.attention):
    _module.MultiHeadAttention = fast_layers.FlashMHA
    _module.dot_product_attention = fast_layers.nnx_attention_fn

for _module in (nn, nn.attention):
    _module.MultiHeadDotProductAttention = linen.MultiHeadDotProductAttention
    _module.MultiHeadAttention = linen.MultiHeadAttention
    _module.dot_product_attention = linen.attention_fn


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"our attention was called {sum(_calls.values())} times")

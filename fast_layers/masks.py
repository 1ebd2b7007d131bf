"""Structured attention masks; see `fast_layers.ops.attention.masks`."""

from fast_layers.ops.attention.masks import And as And
from fast_layers.ops.attention.masks import Causal as Causal
from fast_layers.ops.attention.masks import Dense as Dense
from fast_layers.ops.attention.masks import KeyLengths as KeyLengths
from fast_layers.ops.attention.masks import LocalWindow as LocalWindow
from fast_layers.ops.attention.masks import Mask as Mask
from fast_layers.ops.attention.masks import Offset as Offset
from fast_layers.ops.attention.masks import Prefix as Prefix
from fast_layers.ops.attention.masks import QueryLengths as QueryLengths
from fast_layers.ops.attention.masks import Segments as Segments

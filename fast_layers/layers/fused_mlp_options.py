"""What NNX's and Linen's `FusedMLP` check before they compute."""

from __future__ import annotations

from typing import Any

from fast_layers import dispatch
from fast_layers.ops.mlp.backends import BACKENDS
from fast_layers.ops.mlp.problem import SAVES
from fast_layers.ops.static_options import check_dropout_rate, check_size, flag, one_of


def check_settings(
    *,
    gated: Any,
    use_bias: Any,
    dropout_rate: Any,
    save: Any,
    implementation: Any,
    **sizes: Any,
) -> None:
    """`sizes`: of features, by their names."""
    for name, given in sizes.items():
        check_size(name, given)
    flag("gated", gated)
    flag("use_bias", use_bias)
    check_dropout_rate(dropout_rate)
    one_of("save", save, SAVES)
    dispatch.check_name("mlp", BACKENDS, implementation)

"""The Hopper kernels of the convolution and the gated norm in the simulator: as backends for `check_parity`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from fast_layers.arch import Arch
from fast_layers.dispatch import Backend
from fast_layers.ops.conv1d import hopper_call as conv_call
from fast_layers.ops.conv1d import hopper_conv
from fast_layers.ops.gated_norm import hopper_call as norm_call
from fast_layers.ops.gated_norm import hopper_norm
from fast_layers.testing import ParityTable, _parity_conv1d, _parity_gated_norm, check_parity, simulate

H200 = Arch("cuda", "NVIDIA H200", (9, 0))
_KERNELS: dict[str, tuple[Any, Any]] = {
    "causal_conv1d": (conv_call, hopper_conv),
    "gated_rms_norm": (norm_call, hopper_norm),
}


class ConvCase(_parity_conv1d.Case):
    """Drawn once: the yardstick rounds more than the kernel does, so that luck does not matter, and time does."""

    draws = 1


class NormCase(_parity_gated_norm.Case):
    """Drawn once, likewise."""

    draws = 1


def parity(op: str, case: Any, dtype: Any = jnp.bfloat16, tiles: Any = None) -> ParityTable:
    """Both passes simulated, with races looked for, and judged against the reference. `tiles` in place of the kernel's
    own choice."""
    call, kernels = _KERNELS[op]
    more = {} if tiles is None else {"tiles": tiles}

    def simulated(fn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: simulate(fn, *args).check()

    backend = Backend(
        "hopper",
        lambda problem, arch, pass_: call.supports(problem, H200, pass_),
        lambda *args: kernels.forward(*args, **more),
        lambda *args: kernels.backward(*args, **more),
    )
    table = check_parity(op, backends=[backend], cases={"case": case}, dtypes=[dtype], run=simulated)
    assert not table.refusals, f"\n{table}"
    return table

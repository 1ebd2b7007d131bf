"""Verification of GPU kernels on a machine without a GPU: `simulate` runs them, `compile_for` compiles them.

Importing this module is light; each tool is loaded when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fast_layers.testing.deviceless import (
        Compilation,
        CompileError,
        CompileReport,
        KernelReport,
        compile_all_for,
        compile_for,
    )
    from fast_layers.testing.parity import ParityTable, check_parity
    from fast_layers.testing.simulator import Simulation, SimulationError, simulate

_HOME = {
    "Compilation": "deviceless",
    "CompileError": "deviceless",
    "CompileReport": "deviceless",
    "KernelReport": "deviceless",
    "compile_all_for": "deviceless",
    "compile_for": "deviceless",
    "ParityTable": "parity",
    "check_parity": "parity",
    "Simulation": "simulator",
    "SimulationError": "simulator",
    "simulate": "simulator",
}

__all__ = [
    "Compilation",
    "CompileError",
    "CompileReport",
    "KernelReport",
    "ParityTable",
    "Simulation",
    "SimulationError",
    "check_parity",
    "compile_all_for",
    "compile_for",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)

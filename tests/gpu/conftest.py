"""Everything in this folder is marked `gpu`, skipped where there is no NVIDIA GPU, and run on the first of several."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from fast_layers.arch import Arch, lowering_targets
from fast_layers.kernel_parts import automatic_axes

REASON = "no NVIDIA GPU"


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    own = [item for item in items if here in item.path.parents]
    if not own:
        return
    present = Arch.of_device(jax.devices()[0]).platform == "cuda"
    for item in own:
        item.add_marker(pytest.mark.gpu)
        if not present:
            item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(autouse=True)
def _on_one_device():
    """Beside other GPUs and without a mesh, XLA might split a call, which kernels refuse."""
    with automatic_axes.on_one_device():
        yield


@pytest.fixture
def warpgroups():
    """For kernels that need them, or clusters."""
    capability = lowering_targets()[0].capability
    if capability is None or capability < (9, 0):
        pytest.skip("needs a GPU with warpgroups and clusters, from compute capability 9.0 on")

"""Everything in this folder is marked `gpu`, and skipped where there is no NVIDIA GPU."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from fast_layers.arch import Arch

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

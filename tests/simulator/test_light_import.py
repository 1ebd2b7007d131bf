"""The package does not load Pallas for its verification tools, nor do the tools before they are used."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.simulator

_PROGRAM = """
import sys
import fast_layers
assert "fast_layers.testing" not in sys.modules, "fast_layers imports fast_layers.testing"
import fast_layers.testing
loaded = [name for name in sys.modules if name.startswith(("jax.experimental.pallas", "fast_layers.testing."))]
assert not loaded, loaded
assert callable(fast_layers.testing.simulate)
assert "fast_layers.testing.simulator" in sys.modules
"""


def test_tools_are_loaded_on_use():
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

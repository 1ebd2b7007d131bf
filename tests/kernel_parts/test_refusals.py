"""What the kernels of several ops refuse."""

from __future__ import annotations

import jax
import pytest

from fast_layers.arch import Arch
from fast_layers.kernel_parts import refusals


@pytest.mark.parametrize(
    ("refusal", "arch"),
    [
        (refusals.not_hopper, Arch("cuda", "NVIDIA H200", (9, 0))),
        (refusals.not_blackwell, Arch("cuda", "NVIDIA B200", (10, 0))),
    ],
)
def test_64_bits_are_refused_with_the_way_out(refusal, arch):
    assert refusal(arch) is None
    with jax.enable_x64(True):
        assert "with jax.enable_x64(False)" in refusal(arch)
        with jax.enable_x64(False):
            assert refusal(arch) is None

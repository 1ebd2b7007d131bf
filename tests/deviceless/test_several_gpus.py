"""Kernels that XLA spreads over eight GPUs that are not here: each gets its device's batch and heads, and none more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fast_layers.testing.deviceless import missing_wheels

pytestmark = [
    pytest.mark.deviceless,
    pytest.mark.skipif(bool(missing_wheels()) and not os.environ.get("CI"), reason=missing_wheels() or ""),
]

# What each kernel of the op gives, of a mesh of two by four.
OUT, CONVOLVED, SCANNED, NORMALISED = "2,512,2,128", "2,256,256", "2,256,2,64", "1,512,256"
# What a forward finds for the backward; where it is a part's alone that does not, as it is small, XLA does.
SIZES, SMALL_OUT = "64,2,128", "2,2048,2,64"
OPS = {"attention": OUT, "fewer_key_heads": OUT, "depth_64": SIZES, "few_heads": SMALL_OUT}
OPS |= {"scan": SCANNED, "conv1d": CONVOLVED, "conv1d_of_2^31_numbers": "32,4096,2048", "norm": NORMALISED}
EACH_RUN = {"fewer_key_heads", "depth_64", "scan", "norm"}
ON_BLACKWELL = ("attention", "scan")


@pytest.mark.parametrize(
    ("gpu", "op"),
    [
        *[pytest.param("h200", op, marks=() if op in EACH_RUN else pytest.mark.exhaustive) for op in OPS],
        *[pytest.param("b200", op, marks=pytest.mark.exhaustive) for op in ON_BLACKWELL],
    ],
)
def test_each_device_has_its_part(gpu, op):
    script = Path(__file__).with_name("several_gpus.py")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    done = subprocess.run([sys.executable, str(script), gpu, op], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["kernels"]) >= 2
    assert any(OPS[op] in shapes for shapes in found["kernels"])
    assert not found["gathered"]

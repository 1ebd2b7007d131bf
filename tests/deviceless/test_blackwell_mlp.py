"""The Blackwell matmul of the MLP in all its tile choices, compiled by the real assembler."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import jax.numpy as jnp
import pytest

from deviceless.mlp import LAUNCHES, MORE, Launch
from fast_layers.ops.mlp.blackwell_config import BLACKWELL_SMEM_BYTES, BlackwellMatmulTiles
from fast_layers.ops.mlp.epilogue import Activate, Differentiate, Epilogue, Plain
from fast_layers.testing import compile_all_for
from fast_layers.testing.deviceless import missing_wheels

pytestmark = [
    pytest.mark.deviceless,
    pytest.mark.skipif(bool(missing_wheels()) and not os.environ.get("CI"), reason=missing_wheels() or ""),
]

Launches = dict[str, tuple[Launch, BlackwellMatmulTiles]]


def _as_chosen(launches: dict[str, Launch]) -> Launches:
    return {name: (x, _chosen(x)) for name, x in launches.items()}


def _chosen(x: Launch) -> BlackwellMatmulTiles:
    return BlackwellMatmulTiles.of(x.rows, x.columns, x.matmul.needs, x.matmul.operand_bytes)


CHOSEN = _as_chosen(LAUNCHES)
LEAN = {"backward, gelu": CHOSEN["backward, gelu"]}
# What is not chosen for any of these sizes: blocks alone, and other fields than the usual.
TOKENS = 8192
UP = Launch(TOKENS, 8192, 2048, Activate("gelu_tanh", (True,)))
GATED = Launch(TOKENS, 5504, 2048, Activate("silu", (True, True)))
BACKWARD = Launch(TOKENS, 8192, 2048, Differentiate("gelu_tanh", (True,)), b_turned=True)
BACKWARD_GATED = Launch(TOKENS, 5504, 2048, Differentiate("silu", (True, True)), b_turned=True)
FIELDS: Launches = {
    "alone": (UP, BlackwellMatmulTiles(256, 3, collective=False)),
    "alone, gated": (GATED, BlackwellMatmulTiles(128, 3, collective=False, pieces=1)),
    "alone, backward": (BACKWARD, BlackwellMatmulTiles(128, collective=False)),
    "alone, backward, gated": (BACKWARD_GATED, BlackwellMatmulTiles(128, collective=False, pieces=1)),
    "alone, 64 columns": (UP, BlackwellMatmulTiles(64, collective=False, pieces=1)),
    "alone, A turned": (Launch(2048, 8192, TOKENS, a_turned=True), BlackwellMatmulTiles(256, collective=False)),
    "one epilogue warpgroup": (UP, BlackwellMatmulTiles(256, epilogue_wgs=1)),
    "one epilogue warpgroup, backward": (BACKWARD_GATED, BlackwellMatmulTiles(256, epilogue_wgs=1)),
    "pieces of 64": (UP, BlackwellMatmulTiles(256, piece=64, pieces=1)),
    "64 columns of each product": (GATED, BlackwellMatmulTiles(64, pieces=1)),
}
FLOAT8 = _as_chosen(
    {
        "e4m3": Launch(TOKENS, 8192, 2048, Activate("gelu_tanh", (True,)), float8=jnp.float8_e4m3fn),
        "e5m2, gated": Launch(TOKENS, 5504, 2048, Activate("silu", (True, True)), float8=jnp.float8_e5m2),
    }
)
REST = {**{name: x for name, x in CHOSEN.items() if name not in LEAN}, **_as_chosen(MORE), **FIELDS, **FLOAT8}
# Which biases there are changes no choice, but how many of them have gradients to be summed.
EPILOGUES: dict[str, Epilogue] = {
    "plain": Plain((True,)),
    "two products": Plain((True, False)),
    "activate": Activate("gelu_tanh", (True,)),
    "activate, nothing saved": Activate("gelu_tanh", (True,), saves=False),
    "activate, gated": Activate("silu", (True, False)),
    "activate, gated, nothing saved": Activate("silu", (True, False), saves=False),
    "differentiate": Differentiate("gelu_tanh"),
    "differentiate, a bias": Differentiate("gelu_tanh", (True,)),
    "differentiate, gated": Differentiate("silu", (False, False)),
    "differentiate, gated, a bias": Differentiate("silu", (True, False)),
    "differentiate, gated, two biases": Differentiate("silu", (True, True)),
}


def _launches(rows: tuple[int, ...], columns: tuple[int, ...]) -> Iterator[tuple[str, Launch]]:
    for (name, epilogue), row, column in itertools.product(EPILOGUES.items(), rows, columns):
        backward = isinstance(epilogue, Differentiate)
        yield f"{name}, {row} x {column}", Launch(row, column, 2048, epilogue, b_turned=backward)
        if not backward:  # 8 bits are the forward's only
            yield (
                f"{name}, {row} x {column}, 8 bits",
                Launch(row, column, 2048, epilogue, float8=jnp.float8_e4m3fn),
            )


def _kernel(launch: Launch, tiles: BlackwellMatmulTiles):
    """What of a launch and its tiles makes another kernel, arithmetic and orientation apart."""
    return launch.matmul.needs, launch.matmul.operand_bytes, tiles


COMPILED = {_kernel(*x) for x in (LEAN | REST).values()}
for name, launch in _launches((1, 8192), (64, 2048, 8192, 16384, 65536)):
    if (kernel := _kernel(launch, _chosen(launch))) not in COMPILED:
        COMPILED.add(kernel)
        REST[name] = launch, _chosen(launch)
MOST_SECONDS = 90.0


def test_every_choice_of_tiles_is_compiled():
    rows = (1, 8, 64, 128, 129, 300, 512, 1024, 2048, 4096, 8192, 16384)
    columns = (8, 64, 72, 128, 200, 512, 1024, 2048, 4096, 5504, 8192, 16384, 32768, 65536)
    for name, launch in _launches(rows, columns):
        assert _kernel(launch, _chosen(launch)) in COMPILED, name


@pytest.mark.parametrize(
    ("gpu", "launches"),
    [
        pytest.param("b200", LEAN, id="b200"),
        pytest.param("b200", REST, id="b200-rest", marks=pytest.mark.exhaustive),
        pytest.param("b300", LEAN | REST, id="b300", marks=pytest.mark.exhaustive),
    ],
)
def test_kernels_compile_well(gpu, launches: Launches):
    compilations = [launch.compilation("blackwell_matmul", tiles) for launch, tiles in launches.values()]
    faults = []
    for (name, (launch, tiles)), report in zip(launches.items(), compile_all_for(gpu, compilations), strict=True):
        print(f"{name}: lowered and compiled in {report.seconds:.1f} s, {tiles}")
        if report.failure is not None:
            faults.append(f"{name}: {report.failure}")
            continue
        kernel, needs = report.kernel, launch.matmul.needs
        print(
            f"  {kernel.live_registers} registers of {max(kernel.register_budgets)}, {kernel.smem_bytes} bytes of "
            f"shared memory, {kernel.tmem_columns} columns of tensor memory, {kernel.spill_store_bytes} spilled, "
            f"{kernel.total_instructions} instructions: {dict(kernel.instructions)}"
        )
        if report.seconds > MOST_SECONDS:
            faults.append(f"{name}: {report.seconds:.0f} s")
        if kernel.smem_bytes is None or kernel.smem_bytes > BLACKWELL_SMEM_BYTES:
            faults.append(f"{name}: {kernel.smem_bytes} bytes of shared memory exceed {BLACKWELL_SMEM_BYTES}")
        elif kernel.smem_bytes > tiles.smem_bytes(needs):
            faults.append(f"{name}: {kernel.smem_bytes} bytes of shared memory are more than blackwell_config reckons")
        if kernel.tmem_columns != tiles.tmem_columns(needs.products):
            faults.append(f"{name}: {kernel.tmem_columns} columns of tensor memory, and its tiles say otherwise")
        if kernel.spills:
            faults.append(f"{name}: {kernel.spill_store_bytes} bytes are spilled")
    assert not faults, "\n".join(faults)

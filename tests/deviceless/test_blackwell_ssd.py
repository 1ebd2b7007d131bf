"""The Blackwell scan, both passes, taken by name and compiled by the real assembler."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from deviceless import blackwell_ssd_functions
from fast_layers.ops.ssd.blackwell_config import (
    BLACKWELL_SMEM_BYTES,
    BLACKWELL_TMEM_COLUMNS,
    HEAD_DIMS,
    STATE_DIMS,
    BlackwellBackwardTiles,
    BlackwellForwardTiles,
    BlackwellStateTiles,
)
from fast_layers.ops.ssd.problem import Problem
from fast_layers.testing import Compilation, compile_all_for
from fast_layers.testing.deviceless import missing_wheels

pytestmark = [
    pytest.mark.deviceless,
    pytest.mark.skipif(bool(missing_wheels()) and not os.environ.get("CI"), reason=missing_wheels() or ""),
]


@dataclasses.dataclass(frozen=True)
class Call:
    heads: int = 80
    groups: int = 1
    head_dim: int = 64
    state_dim: int = 128
    length: int = 4096
    batch: int = 2
    options: tuple[str, ...] = ()
    forward_alone: bool = False

    @property
    def kernels(self) -> set[str]:
        return {"ssd_forward"} if self.forward_alone else KERNELS

    @property
    def problem(self) -> Problem:
        """As far as the choice of tiles goes."""
        sizes = self.batch, self.length, self.heads, self.head_dim, self.groups, self.state_dim
        return Problem(*sizes, jnp.dtype(jnp.bfloat16), 128, gated="z" in self.options)

    def compilation(self) -> Compilation:
        def shape(*sizes, dtype=jnp.bfloat16):
            return jax.ShapeDtypeStruct(sizes, dtype)

        batch, rows = self.batch, (self.batch, self.length, self.heads)
        by_group = (batch, self.length, self.groups, self.state_dim)
        operands = {
            "x": shape(*rows, self.head_dim),
            "dt": shape(*rows),
            "A": shape(self.heads, dtype=jnp.float32),
            "B": shape(*by_group),
            "C": shape(*by_group),
        }
        optional = {
            "D": shape(self.heads, dtype=jnp.float32),
            "D of each channel": shape(self.heads, self.head_dim, dtype=jnp.float32),
            "z": shape(*rows, self.head_dim),
            "dt_bias": shape(self.heads, dtype=jnp.float32),
            "initial_state": shape(batch, self.heads, self.head_dim, self.state_dim, dtype=jnp.float32),
            "segment_ids": shape(batch, self.length, dtype=jnp.int32),
        }
        operands |= {name.removesuffix(" of each channel"): optional[name] for name in self.options}
        if self.forward_alone:
            return Compilation(blackwell_ssd_functions.scan, (operands,))
        state = shape(batch, self.heads, self.head_dim, self.state_dim, dtype=jnp.float32)
        cotangents = (shape(*rows, self.head_dim), state)
        return Compilation(blackwell_ssd_functions.scan_and_gradients, (operands, cotangents))


KERNELS = {"ssd_forward", "ssd_states", "ssd_backward_columns", "ssd_backward_rows"}
EVERYTHING = ("D", "z", "dt_bias", "initial_state", "segment_ids")
LEAN = {
    "P64 N128, everything": Call(options=EVERYTHING),
}
REST = {
    # Fewer channels to sum over than a swizzled tile of a state would have columns.
    **{f"P32 N{state_dim}, one head": Call(heads=1, head_dim=32, state_dim=state_dim) for state_dim in (64, 128)},
    # The first with several units for each block of the backward, the other with one.
    **{
        f"P{head_dim} N{state_dim}, {name}": dataclasses.replace(call, head_dim=head_dim, state_dim=state_dim)
        for head_dim, state_dim in itertools.product(HEAD_DIMS, STATE_DIMS)
        for name, call in {
            "four heads, everything": Call(heads=4, batch=16, options=EVERYTHING),
            "three heads, odd length": Call(heads=3, length=1001),
        }.items()
    },
    **{
        f"P{head_dim} N128, four heads, {option}": Call(heads=4, batch=16, head_dim=head_dim, options=(option,))
        for head_dim, option in [
            *((64, option) for option in (*EVERYTHING, "D of each channel")),
            (32, "D"),
            (128, "D"),
        ]
    },
    "P64 N128": Call(),
    "P64 N64": Call(state_dim=64),
    "P64 N128, a group for each head": Call(heads=3, groups=3, options=EVERYTHING),
    "P128 N64, three heads, everything, odd length": Call(3, 1, 128, 64, 1001, options=EVERYTHING),
    **{
        f"P32 N{state_dim}, two heads, everything": Call(2, head_dim=32, state_dim=state_dim, options=EVERYTHING)
        for state_dim in STATE_DIMS
    },
    "P32 N32, one head": Call(heads=1, head_dim=32, state_dim=32),
}


def _choices(call: Call) -> dict[str, object]:
    """What makes other kernels: by pass, the tiles and sizes. How many slices there are is a grid's size only."""
    p = call.problem
    forward = BlackwellForwardTiles.of(p), p.state_dim, p.gated
    if call.forward_alone:
        return {"forward": forward}
    backward = BlackwellBackwardTiles.of(p).stages, p.head_dim, p.state_dim, p.gated
    return {"forward": forward, "states": (BlackwellStateTiles.of(p), p.state_dim), "backward": backward}


def _each_size() -> Iterator[tuple[str, Call]]:
    for head_dim, state_dim, heads, gated in itertools.product(HEAD_DIMS, STATE_DIMS, (4, 2, 1), (False, True)):
        name = f"P{head_dim} N{state_dim}, {heads} heads{', z' * gated}, forward"
        yield name, Call(heads, 1, head_dim, state_dim, options=("z",) * gated, forward_alone=True)


COMPILED = {choice for call in (LEAN | REST).values() for choice in _choices(call).items()}
for name, call in _each_size():
    if not _choices(call).items() <= COMPILED:
        COMPILED.update(_choices(call).items())
        REST[name] = call


def test_every_choice_of_tiles_is_compiled():
    for name, call in _each_size():
        for length, groups in itertools.product((1, 4096), (1, call.heads)):
            whole = dataclasses.replace(call, length=length, groups=groups, forward_alone=False)
            assert _choices(whole).items() <= COMPILED, name


def expected_smem_bytes(kernel: str, p: Problem) -> int:
    """By what the choice of tiles goes."""
    match kernel:
        case "ssd_forward":
            return BlackwellForwardTiles.of(p).smem_bytes(p.state_dim, p.gated)
        case "ssd_states":
            return BlackwellStateTiles.of(p).smem_bytes(p.state_dim)
        case _:
            return BlackwellBackwardTiles.of(p).smem_bytes(p.head_dim, p.state_dim)


@pytest.mark.parametrize(
    ("gpu", "calls"),
    [
        pytest.param("b200", LEAN, id="b200"),
        pytest.param("b200", REST, id="b200-rest", marks=pytest.mark.exhaustive),
        pytest.param("b300", LEAN | REST, id="b300", marks=pytest.mark.exhaustive),
    ],
)
def test_the_kernels_compile_well(gpu, calls):
    reports = compile_all_for(gpu, [call.compilation() for call in calls.values()])
    faults = []
    for (name, call), report in zip(calls.items(), reports, strict=True):
        if report.failure is not None:
            faults.append(f"{name}: {report.failure}")
            continue
        if (found := {kernel.name for kernel in report.kernels}) != call.kernels:
            faults.append(f"{name}: kernels {found}")
        for kernel in report.kernels:
            label = f"{name}, {kernel.name}"
            print(
                f"{label}: {kernel.live_registers} registers of {max(kernel.register_budgets)}, {kernel.smem_bytes} "
                f"bytes of shared memory, {kernel.tmem_columns} columns of tensor memory, {kernel.spill_store_bytes} "
                f"spilled; in {report.seconds:.1f} s; {dict(kernel.instructions)}"
            )
            most = min(BLACKWELL_SMEM_BYTES, expected_smem_bytes(kernel.name, call.problem))
            if kernel.smem_bytes is None or kernel.smem_bytes > most:
                faults.append(f"{label}: {kernel.smem_bytes} bytes of shared memory exceed {most}")
            if kernel.tmem_columns is None or kernel.tmem_columns > BLACKWELL_TMEM_COLUMNS:
                faults.append(f"{label}: {kernel.tmem_columns} columns exceed {BLACKWELL_TMEM_COLUMNS}")
            if kernel.spills:
                faults.append(f"{label}: {kernel.spill_store_bytes} bytes are spilled")
    assert not faults, "\n".join(faults)

"""The state-space scan against its peers in one run: forward, backward, and both.

    python -m bench ssd --quick --out bench/results/cpu/ssd.json

All peers that the machine has take turns, so that drift hits all alike; the median counts, and the first backend runs
twice (the second as "again"): their distance is the noise of the run. `recurrence` is the plain `lax.scan` over tokens
with JAX's own gradient. Times are of the device where CUPTI answers (see `bench/timing.py`), else of the wall clock.
`backward` is the gradients alone, from what the forward saved; where that is nothing, it computes the states anew.
Programs return all that they compute. A peer that cannot run is listed with its reason, one whose outputs lie off the
first one's is marked.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import importlib
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

import fast_layers
from bench import timing
from bench.report import TOLERANCE, environment

PASSES = ("forward", "backward", "both")


@dataclasses.dataclass(frozen=True)
class Case:
    """Of x [batch, length, heads, head_dim] and B, C [batch, length, groups, state_dim]."""

    batch: int
    length: int
    heads: int
    head_dim: int
    state_dim: int
    groups: int = 1
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        sizes = f"B{self.batch} L{self.length} H{self.heads} P{self.head_dim} N{self.state_dim} G{self.groups}"
        return f"{sizes} {self.dtype}"

    def operands(self) -> dict[str, jax.Array]:
        keys = jax.random.split(jax.random.key(0), 6)
        rows, by_group = (self.batch, self.length), (self.groups, self.state_dim)
        low, high = np.log(1e-3), np.log(1e-1)
        dt = jnp.exp(jax.random.uniform(keys[1], (*rows, self.heads), minval=low, maxval=high))
        return {
            "x": jax.random.normal(keys[0], (*rows, self.heads, self.head_dim), self.dtype),
            "dt": dt,
            "A": -jax.random.uniform(keys[2], (self.heads,), minval=1.0, maxval=16.0),
            "B": jax.random.normal(keys[3], (*rows, *by_group), self.dtype),
            "C": jax.random.normal(keys[4], (*rows, *by_group), self.dtype),
            "d_out": jax.random.normal(keys[5], (*rows, self.heads, self.head_dim), self.dtype),
        }


GPU = (
    Case(8, 4096, 80, 64, 128),
    Case(8, 4096, 80, 64, 128, groups=8),
    Case(1, 32_768, 80, 64, 128),
    Case(8, 4096, 64, 64, 128),
)
CPU = (Case(1, 4096, 8, 64, 64, dtype="float32"), Case(1, 1024, 8, 64, 64, dtype="float32"))
TINY = (Case(1, 96, 2, 8, 4, dtype="float32"),)


@dataclasses.dataclass(frozen=True)
class Program:
    """`seconds()` times once; `outputs` is y as numpy; `temp_bytes` as the compiler tells, where it does."""

    seconds: Callable[[], tuple[float, str]]
    outputs: np.ndarray
    temp_bytes: int | None


def jax_program(scan: Callable[..., Any], case: Case, pass_: str, watch: timing.Stopwatch) -> Program:
    operands = case.operands()
    d_out = operands.pop("d_out")

    def forward(operands):
        return scan(**operands)

    def both(operands, d_out):
        out, pull = jax.vjp(forward, operands)
        return out, pull(d_out)

    def save(operands):
        return jax.vjp(forward, operands)

    if pass_ == "forward":
        fn, arguments = forward, (operands,)
    elif pass_ == "both":
        fn, arguments = both, (operands, d_out)
    else:
        _, pull = jax.jit(save)(operands)
        fn, arguments = (lambda pull, d_out: pull(d_out)), (pull, d_out)
    compiled = jax.jit(fn).lower(*arguments).compile()
    roughly = watch.warm_up(compiled, [arguments])

    def seconds():
        taken, method = watch.seconds(compiled, [arguments], roughly)
        return statistics.median(taken), method

    analysis = compiled.memory_analysis()
    out = np.asarray(jax.jit(forward)(operands), np.float32)
    return Program(seconds, out, None if analysis is None else analysis.temp_size_in_bytes)


def torch_program(make: Callable[..., Any], case: Case, pass_: str, watch: timing.Stopwatch) -> Program:
    del watch
    torch = importlib.import_module("torch")
    scan = make()
    stream = torch.cuda.Stream()
    given = {name: torch.from_numpy(np.array(v, np.float32)).cuda() for name, v in case.operands().items()}
    narrow = getattr(torch, case.dtype)
    given = {name: v.to(narrow) if name in ("x", "B", "C", "d_out") else v for name, v in given.items()}
    d_out = given.pop("d_out")
    for v in given.values():
        v.requires_grad_(pass_ != "forward")
    wanted = list(given.values())
    with torch.cuda.stream(stream):
        out = scan(**given)

    def call():
        if pass_ == "forward":
            return scan(**given)
        if pass_ == "both":
            return torch.autograd.grad(scan(**given), wanted, d_out)
        return torch.autograd.grad(out, wanted, d_out, retain_graph=True)

    def seconds():
        taken, method = timing.torch_seconds(torch, call, [()], stream)
        return statistics.median(taken), method

    torch.cuda.synchronize()
    return Program(seconds, out.detach().float().cpu().numpy(), None)


def mamba_ssm() -> Callable[..., Any]:
    scan = importlib.import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
    return functools.partial(scan, chunk_size=256)


def simple_gla() -> Callable[..., Any]:
    """fla's linear attention with one decay a head: queries C, keys B, values dt x, log decays dt A."""
    scan = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla

    def call(x, dt, A, B, C):
        B, C = (v.repeat_interleave(x.shape[2] // v.shape[2], dim=2) for v in (B, C))
        out, _ = scan(q=C, k=B, v=(x * dt[..., None]).to(x.dtype), g=dt * A, scale=1.0)
        return out

    return call


def ours(implementation: str) -> Callable[..., Any]:
    return functools.partial(fast_layers.ssd, implementation=implementation)


PEERS: dict[str, Callable[..., Program]] = {
    "fast_layers xla": functools.partial(jax_program, ours("xla")),
    "fast_layers hopper": functools.partial(jax_program, ours("hopper")),
    "again": functools.partial(jax_program, ours("xla")),
    "recurrence": functools.partial(jax_program, ours("reference")),
    "mamba_ssm": functools.partial(torch_program, mamba_ssm),
    "fla simple_gla": functools.partial(torch_program, simple_gla),
}


def run_cell(case: Case, pass_: str, repeats: int, watch: timing.Stopwatch) -> list[dict[str, Any]]:
    rows, programs = [], {}
    for name, build in PEERS.items():
        row: dict[str, Any] = {"case": case.name, "pass": pass_, "name": name}
        rows.append(row)
        try:
            programs[name] = build(case, pass_, watch)
        except Exception as error:
            # A peer may fail in any way, and that must not end the run.
            row["refused"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    taken: dict[str, list[float]] = {name: [] for name in programs}
    methods = {}
    for _ in range(repeats):
        for name, program in programs.items():
            seconds, methods[name] = program.seconds()
            taken[name].append(seconds)
    first = next(iter(programs.values())).outputs
    for row in rows:
        name = row["name"]
        if name in programs:
            off = float(np.linalg.norm(programs[name].outputs - first) / np.linalg.norm(first))
            row |= {
                "seconds": statistics.median(taken[name]),
                "all_seconds": taken[name],
                "method": methods[name],
                "temp_bytes": programs[name].temp_bytes,
                "relative_error": off,
                "comparable": off <= TOLERANCE,
            }
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{rows[0]['case']}, {rows[0]['pass']}")
    base = rows[0].get("seconds")
    for row in rows:
        if "refused" in row:
            print(f"  {row['name']:<20} {row['refused'][:110]}")
            continue
        memory = "" if row["temp_bytes"] is None else f", {row['temp_bytes'] / 1e6:.0f} MB"
        ratio = "" if not base else f", {row['seconds'] / base:.2f} of the first's"
        wrong = "" if row["comparable"] else f", computes something else (off by {row['relative_error']:.2g})"
        print(f"  {row['name']:<20} {1e3 * row['seconds']:.3f} ms ({row['method']}){memory}{ratio}{wrong}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the first case only, few repeats")
    parser.add_argument("--tiny", action="store_true", help="a case that only shows that all works")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    args = parser.parse_args()
    cases = TINY if args.tiny else GPU if timing.on_gpu() else CPU
    repeats = min(args.repeats, 3) if args.quick else args.repeats
    watch, rows = timing.Stopwatch(), []
    for case in cases[:1] if args.quick else cases:
        for pass_ in PASSES:
            found = run_cell(case, pass_, repeats, watch)
            show(found)
            rows += found
    if args.out:
        command = f"python -m bench ssd {' '.join(sys.argv[1:])}".strip()
        report = environment(command, datetime.date.today().isoformat()) | {"rows": rows}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

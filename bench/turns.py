"""Functions of named arrays, in JAX or PyTorch, that are timed in turns: what the benchmarks of Mamba-2 share.

All peers of a cell get the same operands and take turns there and back, so that drift hits all alike; the median
counts. An untimed call stands before each timed one on a CPU, where the first call after one that gave back a
gigabyte is slow. Times are of the device where CUPTI answers (see `bench/timing.py`), else of the wall clock.
Programs return all that they compute. A peer that cannot run is listed with its reason; one whose output lies off the
first one's, or any of its gradients, is marked.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib
import importlib.util
import json
import math
import os
import statistics
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp

from bench import options, timing
from bench.attention import Clock, attempt, measure_roofs
from bench.report import TOLERANCE, environment, shorten

Pass = Literal["forward", "backward", "both", "step"]
"""A step is a function that gives all of its results by name, gradients too."""
PASSES: tuple[Pass, ...] = ("forward", "backward", "both")
Operands = dict[str, jax.Array]


class Case(Protocol):
    """What is computed, and on which arrays."""

    @property
    def name(self) -> str: ...

    def operands(self) -> Operands:
        """By the names of the function's arguments; where a pass differentiates, the output's gradient as `d_out`."""
        ...

    def bytes(self, pass_: Pass) -> int | None:
        """That no program can do without reading or writing; None where memory is not what bounds it."""
        ...


@dataclasses.dataclass(frozen=True)
class Peer:
    """`make(case)` gives a function of the case's operands by name, or raises for a reason that is then listed."""

    name: str
    make: Callable[[Any], Callable[..., Any]]
    framework: Literal["jax", "torch"] = "jax"


@dataclasses.dataclass(frozen=True)
class Program:
    """`seconds()` times once; `outputs` is the function's result, as "out" if it has no names of its own, and the
    gradients that the pass has, by the names of the operands; `temp_bytes` as the compiler tells, where it does."""

    seconds: Callable[[], tuple[float, str]]
    outputs: dict[str, jax.Array]
    temp_bytes: int | None = None
    hlo: str | None = None


def jax_program(fn: Callable[..., Any], operands: Operands, pass_: Pass, watch: timing.Stopwatch) -> Program:
    operands = dict(operands)
    d_out = operands.pop("d_out", None)

    def forward(operands):
        return fn(**operands)

    def both(operands, d_out):
        out, pull = jax.vjp(forward, operands)
        return out, pull(d_out)

    def save(operands):
        return jax.vjp(forward, operands)

    if pass_ in ("forward", "step"):
        program, arguments = forward, (operands,)
    elif pass_ == "both":
        program, arguments = both, (operands, d_out)
    else:
        out, pull = jax.jit(save)(operands)
        program, arguments = (lambda pull, d_out: pull(d_out)), (pull, d_out)
    compiled = jax.jit(program).lower(*arguments).compile()
    found = compiled(*arguments)
    if pass_ in ("forward", "step"):
        outputs = named_outputs(found)
    elif pass_ == "both":
        out, (gradients,) = found
        outputs = named_outputs(out, gradients)
    else:
        outputs = named_outputs(out, found[0])
    roughly = watch.warm_up(compiled, [arguments])

    def seconds():
        if not timing.on_gpu():
            jax.block_until_ready(compiled(*arguments))
        taken, method = watch.seconds(compiled, [arguments], roughly)
        return statistics.median(taken), method

    analysis = compiled.memory_analysis()
    temp_bytes = None if analysis is None else analysis.temp_size_in_bytes
    return Program(seconds, outputs, temp_bytes, compiled.as_text())


def named_outputs(
    out: jax.Array | dict[str, jax.Array], gradients: dict[str, jax.Array] | None = None
) -> dict[str, jax.Array]:
    named = out if isinstance(out, dict) else {"out": out}
    return {**named, **{f"d_{name}": x for name, x in (gradients or {}).items()}}


def torch_program(fn: Callable[..., Any], operands: Operands, pass_: Pass, watch: timing.Stopwatch) -> Program:
    del watch
    torch = importlib.import_module("torch")
    stream = torch.cuda.Stream()
    given = {name: torch.from_dlpack(v).detach() for name, v in jax.block_until_ready(operands).items()}
    d_out = given.pop("d_out")
    for v in given.values():
        v.requires_grad_(pass_ != "forward")
    wanted = list(given.values())
    with torch.cuda.stream(stream):
        out = fn(**given)

    def call():
        if pass_ == "forward":
            return fn(**given)
        if pass_ == "both":
            return torch.autograd.grad(fn(**given), wanted, d_out)
        return torch.autograd.grad(out, wanted, d_out, retain_graph=True)

    def seconds():
        taken, method = timing.torch_seconds(torch, call, [()], stream)
        return statistics.median(taken), method

    with torch.cuda.stream(stream):
        found = () if pass_ == "forward" else torch.autograd.grad(out, wanted, d_out, retain_graph=True)
        found = [x.detach().contiguous() for x in (out, *found)]
    torch.cuda.synchronize()
    first, *gradients = map(jnp.from_dlpack, found)
    return Program(seconds, named_outputs(first, dict(zip(given, gradients, strict=bool(gradients)))))


PROGRAMS = {"jax": jax_program, "torch": torch_program}


def source_module(name: str) -> Any:
    """A module by name, if need be without running its package's own start, which for some wants compiled code that a
    folder of sources does not have."""
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ImportError:
        spec = importlib.util.find_spec(package) if package not in sys.modules else None
        if spec is None or spec.submodule_search_locations is None:
            raise
    bare = types.ModuleType(package)
    bare.__path__ = list(spec.submodule_search_locations)
    sys.modules[package] = bare
    return importlib.import_module(name)


def run_cell(
    case: Case,
    pass_: Pass,
    peers: Sequence[Peer],
    repeats: int,
    watch: timing.Stopwatch,
    copy_roof: float | None = None,
    hlo: Path | None = None,
) -> list[dict[str, Any]]:
    operands = case.operands()
    rows, programs, first = [], {}, {}
    errors: dict[str, dict[str, float]] = {}
    for peer in peers:
        row: dict[str, Any] = {"case": case.name, "pass": pass_, "name": peer.name}
        rows.append(row)
        build = PROGRAMS[peer.framework]
        program, refusal = attempt(lambda p=peer, build=build: build(p.make(case), operands, pass_, watch))
        if refusal is not None:
            row["refused"] = shorten(refusal, 300)
            continue
        programs[peer.name] = program
        first = first or dict(program.outputs)
        errors[peer.name] = {what: relative_error(x, first[what]) for what, x in program.outputs.items()}
        program.outputs.clear()
        if hlo is not None and program.hlo is not None:
            hlo.mkdir(parents=True, exist_ok=True)
            (hlo / f"{case.name} {pass_} {peer.name}.hlo.txt".replace(" ", "_")).write_text(program.hlo)
    taken: dict[str, list[float]] = {name: [] for name in programs}
    methods = {}
    for name in timing.turns_of(list(programs), repeats):
        seconds, methods[name] = programs[name].seconds()
        taken[name].append(seconds)
    moved = case.bytes(pass_)
    for row in rows:
        name = row["name"]
        if name in programs:
            off = max(errors[name].values(), key=lambda error: (math.isnan(error), error))
            row |= {
                "seconds": (seconds := statistics.median(taken[name])),
                "all_seconds": taken[name],
                "method": methods[name],
                "temp_bytes": programs[name].temp_bytes,
                "relative_error": off,
                "relative_errors": errors[name],
                "comparable": off <= TOLERANCE,
            }
            if moved is not None:
                row |= {"bytes": moved, "GB/s": (rate := 1e-9 * moved / seconds)}
                row["share_of_copy"] = None if copy_roof is None else rate / copy_roof
    return rows


def relative_error(x: jax.Array, yardstick: jax.Array) -> float:
    """In norm, or absolute where the yardstick is 0; NaN where either has one."""
    return float(_relative_error(x, yardstick)) if x.shape == yardstick.shape else math.inf


@jax.jit
def _relative_error(x, yardstick):
    x, yardstick = x.astype(jnp.float32), yardstick.astype(jnp.float32)
    off, size = jnp.linalg.norm(x - yardstick), jnp.linalg.norm(yardstick)
    return jnp.where(size == 0, off, off / size)


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{rows[0]['case']}, {rows[0]['pass']}")
    base = rows[0].get("seconds")
    for row in rows:
        if "refused" in row:
            print(f"  {row['name']:<26} {shorten(row['refused'], 200)}")
            continue
        memory = "" if row["temp_bytes"] is None else f", {row['temp_bytes'] / 1e6:.0f} MB"
        rate = f", {row['GB/s']:.0f} GB/s" if "GB/s" in row else ""
        rate += f" ({row['share_of_copy']:.0%} of copy)" if row.get("share_of_copy") else ""
        ratio = "" if not base else f", {row['seconds'] / base:.2f} of the first's"
        off = {what: error for what, error in row["relative_errors"].items() if not error <= TOLERANCE}
        parts = ", ".join(f"{what} off by {error:.2g}" for what, error in off.items())
        wrong = f", computes something else ({parts})" if off else ""
        print(f"  {row['name']:<26} {1e3 * row['seconds']:.3f} ms ({row['method']}){rate}{memory}{ratio}{wrong}")


def run(
    cells: Iterable[tuple[Case, Pass, Sequence[Peer]]],
    command: str,
    *,
    repeats: int,
    path: Path | None = None,
    hlo: Path | None = None,
    clock: Clock | None = None,
) -> dict[str, Any]:
    """Measure and print; the report is written after each cell, and returned."""
    clock, watch = clock or Clock(None), timing.Stopwatch()
    roofs = measure_roofs(watch)
    print(", ".join(f"{name}: {value:.4g}" for name, value in roofs.items()))
    facts = environment(command, datetime.date.today().isoformat())
    report: dict[str, Any] = {**facts, "roofs": roofs, "rows": [], "not_reached": []}
    for case, pass_, peers in cells:
        if clock.left <= 0:
            report["not_reached"].append(f"{case.name}, {pass_}")
            continue
        found = run_cell(case, pass_, peers, repeats, watch, roofs["copy GB/s"], hlo)
        show(found)
        report["rows"] += found
        _write(report, path)
    if watch.note:
        report["note"] = f"some calls were timed by the wall clock: {watch.note}"
    if report["not_reached"]:
        print(f"not reached: {len(report['not_reached'])} cells, from {report['not_reached'][0]} on")
    _write(report, path)
    return report


def parser(doc: str | None) -> argparse.ArgumentParser:
    """With the options that the benchmarks share."""
    made = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    made.add_argument("--quick", action="store_true", help="the first case of each kind only, few repeats")
    made.add_argument("--tiny", action="store_true", help="cases that only show that all works")
    made.add_argument("--repeats", type=int, default=9)
    made.add_argument("--peers", nargs="+", help="only peers whose names contain one of these; the first is always in")
    made.add_argument("--time-limit", type=float, help="seconds after which no other cell is begun")
    made.add_argument("--hlo", type=Path, help="folder for the compiled programs as text")
    made.add_argument("--out", type=Path, help="write the results here as JSON, after each cell")
    return made


def parse(made: argparse.ArgumentParser, names: Callable[[argparse.Namespace], Iterable[str]]) -> argparse.Namespace:
    """The command's arguments; `names(args)` are those of the peers that they leave."""
    args = made.parse_args()
    options.check_numbers(made, args, repeats=1, time_limit=0)
    options.check_peers(made, args.peers, names(args))
    options.check_folder(made, "--hlo", args.hlo)
    options.check_file(made, args.out)
    return args


def selected(peers: Sequence[Peer], wanted: Sequence[str] | None) -> list[Peer]:
    first, *others = peers
    return [first, *(peer for peer in others if wanted is None or any(part in peer.name for part in wanted))]


def repeats_of(args: argparse.Namespace) -> int:
    return min(args.repeats, 3) if args.quick else args.repeats


def share_memory_with_torch() -> None:
    """To be called before JAX first looks for a device."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.7")


def normal(key: jax.Array, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> jax.Array:
    return jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype)


def _write(report: dict[str, Any], path: Path | None) -> None:
    """All at once, so that a run that is killed leaves the last whole state."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(report, indent=1) + "\n")
    unfinished.replace(path)

"""The MLP against its peers in one run: forward, and forward with backward.

    python -m bench mlp --quick --out bench/results/h200
    uv run bench/mlp.py --out bench/results/cpu/mlp.json

Everything that the machine has takes part. On a GPU single calls of all JAX peers stand in one row, in an order that
changes, since a matmul's clock falls with what the chip has done before; the median counts. PyTorch, and all on a CPU,
take turns of several calls.
fast_layers runs twice (the second as "again"): their distance is the noise of the run. Forward with backward returns
the output as well, or XLA would leave out the product that makes it. A peer that cannot run a case is listed with its
reason, one whose values lie off the first's is marked and not counted. `--out` is a folder for mlp.json, or the name
of the JSON file; it is rewritten after each cell, and beside it stands a picture. `--hlo DIR` writes what XLA made of
each JAX program. `--widths 8192 2048` measures these of the set's input features only, in this order.

Axis letters: M tokens, I input features, F hidden features.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import itertools
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

import fast_layers
from bench import options, timing
from bench.attention import Clock, attempt, measure_roofs
from bench.peers import importable
from bench.report import TOLERANCE, environment, shorten
from fast_layers.arch import lowering_targets
from fast_layers.ops.mlp.backends import BACKENDS

Pass = Literal["forward", "forward+backward"]
PASSES: tuple[Pass, Pass] = ("forward", "forward+backward")
JSON_NAME = "mlp.json"

Weights = dict[str, dict[str, jax.Array]]
"""As Flax holds them: {"up", "gate", "down"} -> {"kernel", "bias"}; less what a case does not have."""


@dataclasses.dataclass(frozen=True)
class Case:
    """An MLP, or with `hidden=None` the bare matmul [M, I] x [I, I]."""

    tokens: int
    width: int
    hidden: int | None
    gated: bool = False
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        kind = "matmul" if self.hidden is None else f"{'swiglu' if self.gated else 'gelu'} F{self.hidden}"
        return f"M{self.tokens} I{self.width} {kind}"

    @property
    def activation(self) -> str:
        return "silu" if self.gated else "gelu_tanh"

    def shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        if self.hidden is None:
            return {"up": {"kernel": (self.width, self.width)}}
        widening = {"kernel": (self.width, self.hidden)}
        if self.gated:
            return {"up": widening, "gate": widening, "down": {"kernel": (self.hidden, self.width)}}
        down = {"kernel": (self.hidden, self.width), "bias": (self.width,)}
        return {"up": {**widening, "bias": (self.hidden,)}, "down": down}

    def flops(self, pass_: Pass) -> float:
        """Of the matmuls; each has two of its size in the backward."""
        weights = sum(math.prod(layer["kernel"]) for layer in self.shapes().values())
        return 2.0 * self.tokens * weights * (1 if pass_ == "forward" else 3)


def swiglu_width(width: int) -> int:
    """8/3 of the width, rounded to 128: as many parameters as with 4 times the width and no gate."""
    return 128 * round(8 * width / 3 / 128)


def grid(tokens: Iterable[int], widths: Iterable[int]) -> list[Case]:
    cells = [(m, d) for d in widths for m in tokens]
    mlps = [Case(m, d, hidden, gated) for m, d in cells for hidden, gated in ((4 * d, False), (swiglu_width(d), True))]
    return mlps + [Case(d, d, None) for d in widths]


SETS: dict[str, Callable[[], list[Case]]] = {
    "all": lambda: grid((16_384, 8192, 512), (2048, 4096, 8192)),
    "quick": lambda: grid((8192,), (2048, 4096)),
    "cpu": lambda: grid((512,), (512,)),
    "decode": lambda: [case for case in grid((64, 16, 1), (4096, 8192)) if case.hidden is not None],
    "tiny": lambda: [Case(16, 8, 32), Case(16, 8, 24, gated=True), Case(8, 8, None)],
}


def of_widths(cases: Sequence[Case], widths: Iterable[int]) -> list[Case]:
    """Those with so many input features, in this order."""
    there = list(dict.fromkeys(case.width for case in cases))
    widths = list(widths)
    if unknown := [width for width in widths if width not in there]:
        raise ValueError(
            f"--widths {unknown[0]}: no case has so many input features; this set has {', '.join(map(str, there))}, "
            "others by --cases"
        )
    return [case for width in widths for case in cases if case.width == width]


@dataclasses.dataclass(frozen=True)
class Peer:
    """`apply(case, weights, x)` in JAX, or in PyTorch on tensors; `refuses(case, pass_)` is None or the reason."""

    name: str
    apply: Callable[[Case, Any, Any], Any]
    refuses: Callable[[Case, Pass], str | None] = lambda case, pass_: None
    ours: bool = False
    framework: Literal["jax", "torch"] = "jax"


def _ours(case: Case, weights: Weights, x, **options: Any):
    if case.hidden is None:
        return fast_layers.linear(x, weights["up"]["kernel"], **options)
    bias = {f"b_{name}": layer.get("bias") for name, layer in weights.items()}
    gate = weights.get("gate", {}).get("kernel")
    kernels = (weights["up"]["kernel"], weights["down"]["kernel"])
    return fast_layers.mlp(x, *kernels, w_gate=gate, activation=case.activation, **bias, **options)


def _flax(case: Case, weights: Weights, x):
    import flax.linen as nn

    def dense(name, x) -> Any:
        features = weights[name]["kernel"].shape[1]
        layer = nn.Dense(features, use_bias="bias" in weights[name], dtype=case.dtype)
        return layer.apply({"params": weights[name]}, x)

    if case.hidden is None:
        return dense("up", x)
    if case.gated:
        return dense("down", nn.silu(dense("gate", x)) * dense("up", x))
    return dense("down", nn.gelu(dense("up", x)))


def _tokamax(case: Case, weights: Weights, x):
    import tokamax  # pyright: ignore[reportMissingImports]

    pair = (weights["gate"]["kernel"], weights["up"]["kernel"])
    return tokamax.gated_linear_unit(x, pair, activation=jax.nn.silu) @ weights["down"]["kernel"]


def _mgpu_matmul(tile_m: int, tile_n: int, case: Case, weights: Weights, x):
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as theirs

    config = theirs.TuningConfig(tile_m=tile_m, tile_n=tile_n, tile_k=64, max_concurrent_steps=4, grid_tile_width=8)
    return theirs.matmul(x, weights["up"]["kernel"], None, config)


def _torch(case: Case, weights: Any, x):
    from torch.nn import functional as F  # pyright: ignore[reportMissingImports]

    def dense(name, x):
        out = x @ weights[name]["kernel"]
        return out + weights[name]["bias"] if "bias" in weights[name] else out

    if case.hidden is None:
        return dense("up", x)
    if case.gated:
        return dense("down", F.silu(dense("gate", x)) * dense("up", x))
    return dense("down", F.gelu(dense("up", x), approximate="tanh"))


def find() -> tuple[list[Peer], dict[str, str]]:
    """(the peers present, {absent peer: reason}). The first is the yardstick for the values."""
    gpu = timing.on_gpu()
    peers = [
        Peer("flax", _flax),
        Peer("fast_layers", _ours, ours=True),
        Peer("again", _ours, ours=True),
        Peer("fast_layers saving inputs", functools.partial(_ours, save="inputs"), _only_mlps_backward, ours=True),
    ]
    for backend in BACKENDS:
        if backend.name != "reference":
            refuses = functools.partial(_refuses_backend, backend)
            apply = functools.partial(_ours, implementation=backend.name)
            peers.append(Peer(f"fast_layers {backend.name}", apply, refuses, ours=True))
    absent = {}
    if importable("tokamax"):
        peers.append(Peer("tokamax", _tokamax, lambda case, _: None if case.gated else "has gated MLPs only"))
    else:
        absent["tokamax"] = "tokamax is not importable here"
    hopper = lowering_targets()[0].capability == (9, 0)
    for tile_m, tile_n in ((128, 128), (128, 64), (256, 128)):
        name = f"jax mgpu {tile_m}x{tile_n}"
        if hopper:
            peers.append(Peer(name, functools.partial(_mgpu_matmul, tile_m, tile_n), _bare_forward))
        else:
            absent[name] = "needs a Hopper GPU"
    if gpu and importable("torch"):
        peers.append(Peer("torch", _torch, framework="torch"))
    else:
        absent["torch"] = "torch is not importable here" if gpu else "no NVIDIA GPU here"
    return peers, absent


def _only_mlps_backward(case: Case, pass_: Pass) -> str | None:
    return "the same as fast_layers here" if case.hidden is None or pass_ == "forward" else None


def _bare_forward(case: Case, pass_: Pass) -> str | None:
    return None if case.hidden is None and pass_ == "forward" else "a matmul without gradient, and nothing around it"


def _refuses_backend(backend, case: Case, pass_: Pass) -> str | None:
    (plan,) = fast_layers.explain(functools.partial(_ours, case, implementation="reference"), *_abstract(case)).plans
    needed = ("forward",) if pass_ == "forward" else ("forward", "backward")
    arch = lowering_targets()[0]
    return next(filter(None, (backend.supports(plan.problem, arch, each) for each in needed)), None)


def _abstract(case: Case) -> tuple[Any, jax.ShapeDtypeStruct]:
    """(weights, x) as shapes."""
    struct = functools.partial(jax.ShapeDtypeStruct, dtype=case.dtype)
    weights = jax.tree.map(struct, case.shapes(), is_leaf=lambda x: isinstance(x, tuple))
    return weights, struct((case.tokens, case.width))


def inputs_of(case: Case) -> tuple[Weights, jax.Array, jax.Array]:
    """(weights, x, the output's gradient), random normal, kernels scaled as initialisers do."""
    weights, x = _abstract(case)
    leaves, tree = jax.tree.flatten((weights, x, x))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    drawn = [jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
    drawn, x, d_out = jax.tree.unflatten(tree, drawn)
    for layer in drawn.values():
        layer["kernel"] = layer["kernel"] * jnp.asarray(layer["kernel"].shape[0] ** -0.5, case.dtype)
    return drawn, x, d_out


def kept_bytes(peer: Peer, case: Case) -> int:
    """Activations that JAX's forward keeps for its backward, x included: residuals with a row for each token.

    Counted for a number of tokens that no weight has as a dimension, or the two could not be told apart.
    """
    probe = dataclasses.replace(case, tokens=max(case.width, case.hidden or 0) + 1)
    apply = functools.partial(peer.apply, probe)
    pull = jax.eval_shape(lambda weights, x: jax.vjp(apply, weights, x)[1], *_abstract(probe))
    rows = [a for a in jax.tree.leaves(pull) if a.shape[:1] == (probe.tokens,)]
    return case.tokens * sum(math.prod(a.shape[1:]) * a.dtype.itemsize for a in rows)


class JaxProgram:
    """A peer's compiled call."""

    def __init__(self, peer: Peer, case: Case, pass_: Pass):
        apply = functools.partial(peer.apply, case)

        def both(weights, x, d_out):
            out, pull = jax.vjp(apply, weights, x)
            return out, pull(d_out)

        weights, x = _abstract(case)
        self.pass_ = pass_
        arguments = (weights, x) if pass_ == "forward" else (weights, x, x)
        self.compiled = jax.jit(apply if pass_ == "forward" else both).lower(*arguments).compile()
        self.roughly: float | None = None

    def results(self, inputs: tuple) -> Any:
        return jax.block_until_ready(self.compiled(*self._arguments(inputs)))

    def seconds(self, inputs: tuple, watch: timing.Stopwatch) -> tuple[list[float], str]:
        arguments = [self._arguments(inputs)]
        if self.roughly is None:
            self.roughly = watch.warm_up(self.compiled, arguments)
        return watch.seconds(self.compiled, arguments, self.roughly)

    def call(self, inputs: tuple) -> Callable[[], Any]:
        return functools.partial(self.compiled, *self._arguments(inputs))

    def _arguments(self, inputs: tuple) -> tuple:
        return inputs[:2] if self.pass_ == "forward" else inputs


class _Row(jax.stages.Wrapped):
    """Calls one after another; the last one's result."""

    def __init__(self, calls: Sequence[Callable[[], Any]]):
        self._calls = calls

    def __call__(self):
        result = None
        for call in self._calls:
            result = call()
        return result

    def trace(self, *args, **kwargs):
        raise NotImplementedError("is compiled already")

    lower = trace


def seconds_in_one_row(calls: Mapping[str, Callable[[], Any]], turns: int) -> dict[str, list[float]]:
    """On the device, by CUPTI: so many single calls of each. Raises RuntimeError where it cannot tell them apart."""

    def kernels(row: Sequence[Callable[[], Any]]) -> list[tuple[str, float]]:
        found: Any = profiler.Cupti(finalize=False).measure(_Row(row), aggregate=False)()[1]
        return found or []

    alone = {name: [kernel for kernel, _ in kernels([call])] for name, call in calls.items()}
    order = list(timing.turns_of(list(calls), turns))
    remaining = iter(kernels([calls[name] for name in order]))
    found: dict[str, list[float]] = {name: [] for name in calls}
    for name in order:
        own = list(itertools.islice(remaining, len(alone[name])))
        if not own or [kernel for kernel, _ in own] != alone[name]:
            raise RuntimeError(f"the kernels of {name} in the row are not those of a call alone")
        found[name].append(1e-3 * sum(milliseconds for _, milliseconds in own))
    return found


class TorchProgram:
    """The same in PyTorch, on a stream of its own; shares the memory of JAX's arrays."""

    def __init__(self, peer: Peer, case: Case, pass_: Pass):
        import torch  # pyright: ignore[reportMissingImports]

        torch.cuda.empty_cache()  # what the cell before had, which JAX cannot take
        self.torch, self.stream = torch, torch.cuda.Stream()
        self.apply, self.pass_ = functools.partial(peer.apply, case), pass_

    def results(self, inputs: tuple) -> Any:
        with self.torch.cuda.stream(self.stream):
            found = self._call(*self._arguments(inputs))
            self.stream.synchronize()
        return jax.tree.map(lambda x: jnp.from_dlpack(x.contiguous()), found)

    def seconds(self, inputs: tuple, watch: timing.Stopwatch) -> tuple[list[float], str]:
        return timing.torch_seconds(self.torch, self._call, [self._arguments(inputs)], self.stream)

    def _arguments(self, inputs: tuple) -> tuple:
        weights, x, d_out = jax.tree.map(self.torch.from_dlpack, inputs)
        if self.pass_ == "forward":
            return weights, x, d_out
        weights, x = jax.tree.map(lambda a: a.detach().requires_grad_(), (weights, x))
        return weights, x, d_out

    def _call(self, weights, x, d_out):
        if self.pass_ == "forward":
            with self.torch.no_grad():
                return self.apply(weights, x)
        out = self.apply(weights, x)
        leaves, tree = jax.tree.flatten((weights, x))
        return out.detach(), jax.tree.unflatten(tree, self.torch.autograd.grad(out, leaves, d_out))


def distance(results: Any, yardstick: Any) -> float:
    """The largest norm(a - b) / norm(b) over the arrays."""

    def one(a, b):
        a, b = (x.astype(jnp.float32) for x in (a, b))
        return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))

    return max(jax.tree.leaves(jax.tree.map(one, results, yardstick)))


@dataclasses.dataclass
class Row:
    """One peer on one case and pass. `seconds` is the median; None where `refused` says why there is no time."""

    case: str
    pass_: Pass
    name: str
    ours: bool
    tokens: int
    width: int
    hidden: int | None
    gated: bool
    dtype: str
    flops: float
    seconds: float | None = None
    fastest: float | None = None
    slowest: float | None = None
    calls: int = 0
    method: str | None = None
    tflops: float | None = None
    share_of_matmul: float | None = None
    kept_bytes: int | None = None
    distance: float | None = None
    backend: str | None = None
    ratio: float | None = None
    """To the best peer's time: above 1 this row is faster."""
    refused: str | None = None

    @property
    def agrees(self) -> bool:
        return self.distance is not None and self.distance <= TOLERANCE

    def as_json(self) -> dict[str, Any]:
        row = dataclasses.asdict(self)
        row["pass"] = row.pop("pass_")
        if self.distance is not None and not math.isfinite(self.distance):
            row["distance"] = None
        return {**row, "agrees": self.agrees}


def measure_cell(
    case: Case,
    pass_: Pass,
    peers: list[Peer],
    rounds: int,
    watch: timing.Stopwatch,
    roof: float,
    hlo: Path | None = None,
) -> list[Row]:
    facts = (case.tokens, case.width, case.hidden, case.gated, case.dtype, case.flops(pass_))
    rows = {peer.name: Row(case.name, pass_, peer.name, peer.ours, *facts) for peer in peers}
    inputs, no_inputs = attempt(lambda: jax.block_until_ready(inputs_of(case)))
    programs: dict[str, JaxProgram | TorchProgram] = {}
    taken: dict[str, list[float]] = {}
    yardstick = None
    for peer in peers:
        row = rows[peer.name]
        refusal, failure = attempt(lambda p=peer: p.refuses(case, pass_))
        row.refused = refusal or failure or no_inputs
        if row.refused:
            continue
        program: Any = next((programs[p.name] for p in peers if p.apply is peer.apply and p.name in programs), None)
        if program is None:
            kind = TorchProgram if peer.framework == "torch" else JaxProgram
            program, row.refused = attempt(lambda p=peer, kind=kind: kind(p, case, pass_))
        if row.refused:
            continue
        results, row.refused = attempt(lambda p=program: p.results(inputs))
        if row.refused:
            continue
        yardstick = results if yardstick is None else yardstick
        row.distance = distance(results, yardstick)
        programs[peer.name], taken[peer.name] = program, []
        if isinstance(program, JaxProgram):
            if pass_ != "forward":
                row.kept_bytes, _ = attempt(lambda p=peer: kept_bytes(p, case))
            if hlo is not None:
                hlo.mkdir(parents=True, exist_ok=True)
                name = f"{case.name} {pass_} {peer.name}.hlo.txt".replace(" ", "_")
                (hlo / name).write_text(program.compiled.as_text() or "")
        if peer.ours:
            row.backend = _chosen(peer, case)
    in_row: dict[str, JaxProgram] = {name: p for name, p in programs.items() if isinstance(p, JaxProgram)}
    found = _in_one_row(in_row, inputs, rounds, watch) if timing.on_gpu() else None
    for name, times in (found or {}).items():
        taken[name], rows[name].method = times, "cupti"
    for name in timing.turns_of(list(programs), rounds):
        program = programs[name]
        if rows[name].refused is None and name not in (found or {}):
            timed, rows[name].refused = attempt(lambda p=program: p.seconds(inputs, watch))
            if timed is not None:
                taken[name] += timed[0]
                rows[name].method = timed[1]
    for name, times in taken.items():
        row = rows[name]
        if times and row.refused is None:
            row.seconds, row.calls = statistics.median(times), len(times)
            row.fastest, row.slowest = min(times), max(times)
            row.tflops = row.flops * 1e-12 / row.seconds
            row.share_of_matmul = row.tflops / roof
    timed = [(row, row.seconds) for row in rows.values() if row.seconds is not None]
    best = min((seconds for row, seconds in timed if not row.ours and row.agrees), default=None)
    for row, seconds in timed:
        row.ratio = None if best is None else best / seconds
    return list(rows.values())


def _in_one_row(
    programs: Mapping[str, JaxProgram], inputs: tuple, rounds: int, watch: timing.Stopwatch
) -> dict[str, list[float]] | None:
    """None where they have to be timed one by one; `watch` then says why."""
    calls = {name: program.call(inputs) for name, program in programs.items()}
    warmed, failure = attempt(lambda: [watch.warm_up(call, [()]) for call in calls.values()])
    if failure:
        watch.note = f"not in one row: {failure}"
    if not warmed or max(warmed) > timing.SLOW_SECONDS:
        return None
    roughly = max(warmed)
    turns = min(timing.MOST_CALLS, max(3, math.ceil(timing.BATCH_SECONDS / roughly)))
    found, failure = attempt(lambda: seconds_in_one_row(calls, rounds * turns))
    watch.note = f"not in one row: {failure}" if failure else watch.note
    return found


def _chosen(peer: Peer, case: Case) -> str:
    """The backends of forward and backward, one name where they are the same."""
    (plan,) = fast_layers.explain(functools.partial(peer.apply, case), *_abstract(case)).plans
    names = dict.fromkeys(choice.backend.name for choice in (plan.forward[0], plan.backward[0]) if choice.backend)
    return ", ".join(names)


def table(rows: list[Row]) -> str:
    lines = [f"{rows[0].case} {rows[0].pass_}"]
    for row in rows:
        if row.seconds is None:
            continue
        kept = "" if row.kept_bytes is None else f" keeps {row.kept_bytes / 2**20:8.1f} MiB"
        ratio = "" if row.ratio is None else f" {row.ratio:6.3f}x"
        share = f"{row.share_of_matmul:5.1%}"
        line = f"  {row.name:<26} {1e3 * row.seconds:9.4f} ms {row.tflops:8.4g} TFLOP/s {share}{ratio}{kept}"
        line += f"  by {row.backend}" if row.backend else ""
        lines.append(line if row.agrees else f"{line}  VALUES DIFFER: distance {row.distance:.3g}")
    lines += [f"  {row.name:<26} {shorten(row.refused, 160)}" for row in rows if row.refused]
    return "\n".join(lines)


def run(
    cases: Iterable[Case],
    peers: list[Peer],
    facts: dict[str, Any],
    path: Path | None = None,
    *,
    passes: Iterable[Pass] = PASSES,
    rounds: int = 3,
    clock: Clock | None = None,
    hlo: Path | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure; the report is written after each cell, and returned."""
    clock, watch = clock or Clock(None), timing.Stopwatch()
    roofs = measure_roofs(watch)
    report = {**facts, "roofs": roofs, "rows": [], "not_reached": []}
    for case in cases:
        for pass_ in passes:
            if clock.left <= 0:
                report["not_reached"].append(f"{case.name} {pass_}")
                continue
            rows = measure_cell(case, pass_, peers, rounds, watch, roofs["matmul TFLOP/s"], hlo)
            say(table(rows))
            report["rows"] += [row.as_json() for row in rows]
            _write(report, path)
    if watch.note:
        report["note"] = f"some calls were timed by the wall clock: {watch.note}"
    _write(report, path)
    return report


def _write(report: dict[str, Any], path: Path | None) -> None:
    """All at once, so that a run that is killed leaves the last whole state."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(report, indent=1) + "\n")
    unfinished.replace(path)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench mlp", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", choices=SETS, help="default: all on a GPU, cpu elsewhere")
    parser.add_argument("--quick", action="store_true", help="a few cells, in about a minute")
    parser.add_argument("--widths", nargs="+", type=int, help="only cases of these input features, in this order")
    parser.add_argument("--passes", nargs="+", default=PASSES, choices=PASSES)
    parser.add_argument("--peers", nargs="+", help="only peers whose names contain one of these; ours are always in")
    parser.add_argument("--out", type=Path, help="folder for the JSON, or its own name")
    parser.add_argument("--hlo", type=Path, help="folder for the compiled programs as text")
    parser.add_argument("--time-limit", type=float, help="seconds after which no other cell is begun")
    parser.add_argument("--repeats", type=int, default=4, help="rounds of turns")
    args = parser.parse_args(argv)
    if args.quick and args.cases:
        parser.error("--quick names its own cases: leave out --cases")
    options.check_numbers(parser, args, repeats=1, time_limit=0)
    clock = Clock(args.time_limit)
    # PyTorch allocates beside JAX in this process, and at the widest cells more, since it keeps its graphs' memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    gpu = timing.on_gpu()
    names = "all" if gpu else "cpu"
    cases = SETS["quick" if args.quick and gpu else args.cases or names]()
    if args.widths:
        try:
            cases = of_widths(cases, args.widths)
        except ValueError as error:
            parser.error(str(error))
    peers, absent = find()
    if args.peers:
        options.check_peers(parser, args.peers, [*absent, *(peer.name for peer in peers)])
        peers = [peer for peer in peers if peer.ours or any(part in peer.name for part in args.peers)]
    path = None if args.out is None else args.out if args.out.suffix == ".json" else args.out / JSON_NAME
    options.check_folder(parser, "--hlo", args.hlo)
    options.check_file(parser, path)
    command = f"python -m bench mlp {' '.join(sys.argv[1:] if argv is None else argv)}".strip()
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    facts = {**environment(command, now), "absent": absent}
    report = run(cases, peers, facts, path, passes=args.passes, rounds=args.repeats, clock=clock, hlo=args.hlo)
    for name, reason in absent.items():
        print(f"not here: {name}: {reason}")
    if not_reached := report["not_reached"]:
        print(f"not reached: {len(not_reached)} cells, from {not_reached[0]} on")
    if path is not None:
        from bench import plots

        picture = path.with_name(f"{path.stem}_bars.png")
        drawn = plots.mlp_bars(report, picture)
        print(f"wrote {path} and {picture.name}" if drawn else f"wrote {path}; no cell was reached")


if __name__ == "__main__":
    main()

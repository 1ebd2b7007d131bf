"""Attention against its peers in one run: forward and backward, each timed alone.

    python -m bench attention --quick --out bench/results/h200
    uv run bench/attention.py --out bench/results/cpu/attention.json

Everything that the machine has takes part (see `bench/peers.py`), the peers taking turns there and back so that drift
and heat hit all alike; the median counts. fast_layers runs twice (the second as "again"): their distance is the noise
of the run. Inputs are random normal; where they would fit the cache there are several sets. A peer that cannot run a
case is listed with its reason, one whose values lie off the others' is marked and not counted. `--out` is a folder for
attention.json, bars.png and roofline.png, or the name of the JSON file; it is rewritten after each cell.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp

from bench import cases as cases_
from bench import options, programs, timing
from bench import peers as peers_
from bench.cases import Case, Pass
from bench.peers import Peer
from bench.report import NOT_REACHED, Cell, Report, Row, environment, shorten

JSON_NAME = "attention.json"
DTYPES = ("float32", "bfloat16", "float16")
CACHE_BYTES = 150e6
"""Input sets together exceed this, several times the L2 of a Hopper GPU (50 MB)."""
MOST_SETS = 16
MEMORY_SHARE = 0.85


class Clock:
    """When to stop."""

    def __init__(self, limit: float | None):
        self.started, self.limit = time.monotonic(), limit

    @property
    def left(self) -> float:
        return float("inf") if self.limit is None else self.limit - (time.monotonic() - self.started)


class DeviceLost(RuntimeError):
    """After a peer's failure the device answers nobody any more."""


def bytes_free() -> int:
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def attempt(do: Callable[[], Any]) -> tuple[Any, str | None]:
    """(result, None), or (None, the reason). A peer may fail in any way, and that must not end the run."""
    try:
        return do(), None
    except Exception as error:
        text = " ".join(str(error).split()) or "no message"
        return None, shorten(f"{type(error).__name__}: {text}", 800)


def check_device(row: Row) -> None:
    """After a failure: an illegal access, for one, leaves the process without a device."""
    _, reason = attempt(lambda: jax.block_until_ready(jnp.ones(8) + 1))
    if reason:
        raise DeviceLost(f"{reason}; it was lost by {row.name}, {row.case} {row.pass_}: {row.refused}")


def build_all(
    cells: list[tuple[Case, Pass]], peers: list[Peer], jobs: int, clock: Clock
) -> dict[tuple[Case, Pass, str], tuple[Any, str | None]]:
    """Trace and compile, `jobs` at a time: (program, None) or (None, reason) for each cell and peer."""

    def build(case: Case, pass_: Pass, peer: Peer) -> tuple[Any, str | None]:
        reason, failure = attempt(lambda: peer.refuses(case, pass_))
        reason = reason or failure
        return (None, reason) if reason else attempt(lambda: programs.build(peer, case, pass_))

    wanted: list[tuple[Case, Pass, Peer]] = [
        (case, pass_, peer) for case, pass_ in cells for peer in peers if peer.twin_of is None
    ]
    pool = concurrent.futures.ThreadPoolExecutor(jobs)
    futures: dict[tuple[Case, Pass, str], concurrent.futures.Future] = {}
    for case, pass_, peer in wanted:
        futures[case, pass_, peer.name] = pool.submit(build, case, pass_, peer)
    built: dict[tuple[Case, Pass, str], tuple[Any, str | None]] = {}
    for at, future in futures.items():
        try:
            built[at] = future.result(None if clock.limit is None else max(0.0, clock.left))
        except concurrent.futures.TimeoutError:
            built[at] = None, f"{NOT_REACHED}: the time limit came while it was compiled"
    pool.shutdown(wait=False, cancel_futures=True)
    return built


def measure_cell(
    case: Case, pass_: Pass, peers: list[Peer], built: dict, rounds: int, watch: timing.Stopwatch, clock: Clock
) -> Cell:
    rows = {peer.name: Row.of(case, pass_, peer.name, peer.ours) for peer in peers}
    cell = Cell(list(rows.values()))
    contenders: dict[str, programs.Contender] = {}
    yardstick: list[jax.Array] = []
    inputs, reason = attempt(lambda: input_sets(case))
    extras = {name: jnp.asarray(x) for name, x in peers_.extras_of(case).items()}

    def enter(program) -> tuple[programs.Contender, float]:
        nonlocal yardstick
        contender, results = programs.enter(program, inputs, extras, watch)
        yardstick = yardstick or results
        return contender, programs.distance(case, results, yardstick)

    for peer in peers:
        row = rows[peer.name]
        program, row.refused = built[case, pass_, peer.twin_of or peer.name]
        row.refused = row.refused or reason
        if row.refused:
            continue
        row.temp_bytes = temp_bytes = program.temp_bytes
        if temp_bytes > MEMORY_SHARE * bytes_free():
            row.refused = f"needs {temp_bytes / 2**30:.1f} GiB, free are {bytes_free() / 2**30:.1f} GiB"
            continue
        if clock.left <= 0:
            row.refused = f"{NOT_REACHED}: the time limit"
            continue
        if peer.name in ("fast_layers", "again"):
            row.backend = peers_.automatic_backend(case, pass_)
        entered, row.refused = attempt(lambda p=program: enter(p))
        if row.refused:
            check_device(row)
            continue
        contenders[peer.name], row.distance = entered
    for name in timing.turns_of(list(contenders), rounds):
        contender = contenders[name]
        if rows[name].refused or (contender.taken and (contender.slow or clock.left <= 0)):
            continue
        _, rows[name].refused = attempt(contender.measure)
        if rows[name].refused:
            check_device(rows[name])
    for name, contender in contenders.items():
        if contender.taken and not rows[name].refused:
            rows[name].time(contender.taken)
            rows[name].method, rows[name].batch_seconds = contender.method, contender.batch_seconds
    return cell


def input_sets(case: Case) -> list[list[jax.Array]]:
    sets = 1
    if timing.on_gpu():
        sets = int(min(MOST_SETS, max(1, -(-CACHE_BYTES // case.bytes("forward")))))
    needed = sets * case.bytes("forward")
    if needed > MEMORY_SHARE * bytes_free():
        raise MemoryError(f"the inputs need {needed / 2**30:.1f} GiB, free are {bytes_free() / 2**30:.1f} GiB")
    return jax.block_until_ready([peers_.make_inputs(case, seed) for seed in range(sets)])


def copied_mebibytes(cases: Iterable[Case]) -> list[int]:
    """What the calls move whose speed is told in bytes, where that is so little that a kernel's start and end show."""
    sizes = {round(case.bytes("forward") / 2**20) for case in cases if case.q_len != case.kv_len}
    return sorted(size for size in sizes if 1 <= size <= 300)


def measure_roofs(watch: timing.Stopwatch, copies: Iterable[int] = ()) -> dict[str, float]:
    """A large matmul in bfloat16, and a large elementwise kernel that reads and writes each byte once.

    Such kernels of `copies` MiB in all, too, over arrays that together are more than the cache holds.
    """
    size, words = (8192, 2**29) if timing.on_gpu() else (512, 2**22)

    def seconds(call, sets) -> float:
        compiled = jax.jit(call).lower(*sets[0]).compile()
        roughly = watch.warm_up(compiled, sets)
        return statistics.median(each for _ in range(3) for each in watch.seconds(compiled, sets, roughly)[0])

    def copied(words: int, sets: int) -> float:
        return 8e-9 * words / seconds(lambda x: x ^ 1, [(jnp.full(words, i, jnp.int32),) for i in range(sets)])

    a, b = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in jax.random.split(jax.random.key(0)))
    roofs = {"matmul TFLOP/s": 2e-12 * size**3 / seconds(jnp.matmul, [(a, b)]), "copy GB/s": copied(words, 1)}
    for mebibytes in copies:
        moved = mebibytes * 2**20
        roofs[f"copy GB/s, {mebibytes} MiB"] = copied(moved // 8, int(CACHE_BYTES / moved) + 1)
    return roofs


def run(
    cases: Iterable[Case],
    peers: list[Peer],
    report: Report,
    *,
    passes: Sequence[str] = ("forward", "backward", "forward+backward"),
    rounds: int = 4,
    jobs: int = 1,
    clock: Clock | None = None,
    say: Callable[[str], None] = print,
) -> Report:
    """Measure; `report` is filled, and written after each cell."""
    clock = clock or Clock(None)
    watch, cases = timing.Stopwatch(), list(cases)
    report.roofs = measure_roofs(watch, copied_mebibytes(cases))
    cells: list[tuple[Case, Pass]] = [(case, pass_) for case in cases for pass_ in case.passes if pass_ in passes]
    # As many cells at a time as keep the compiling threads busy: nothing compiles while something is timed.
    chunk = max(1, 2 * jobs // max(1, len(peers)))
    done = 0
    try:
        for some in itertools.batched(cells, chunk):
            if clock.left <= 0:
                break
            built = build_all(list(some), peers, jobs, clock)
            for case, pass_ in some:
                if clock.left <= 0:
                    break
                cell = measure_cell(case, pass_, peers, built, rounds, watch, clock)
                report.cells.append(cell)
                done += 1
                say(cell.text())
                for peer in peers:
                    built.pop((case, pass_, peer.name), None)
                report.not_reached = [f"{case.name} {pass_}" for case, pass_ in cells[done:]]
                report.write()
    except DeviceLost as lost:
        report.notes.append(f"stopped after {done} cells: the device answers no more: {lost}")
    if watch.note:
        report.notes.append(f"some calls were timed by the wall clock: {watch.note}")
    report.not_reached = [f"{case.name} {pass_}" for case, pass_ in cells[done:]]
    report.write()
    return report


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench attention", description=(__doc__ or "").splitlines()[0])
    groups = ", ".join([*cases_.GROUPS, "main", "all", "quick", "tiny"])
    parser.add_argument(
        "--cases", nargs="+", help=f"{groups}; or lengths x heads (4096x8), which is the default on CPU"
    )
    parser.add_argument("--quick", action="store_true", help="a few cells from everywhere, in about two minutes")
    parser.add_argument("--passes", nargs="+", default=["forward", "backward", "forward+backward"])
    parser.add_argument(
        "--peers", nargs="+", help="only peers whose names contain one of these; fast_layers is always in"
    )
    parser.add_argument("--out", type=Path, help="folder for the JSON and the pictures, or the JSON's own name")
    parser.add_argument("--time-limit", type=float, help="seconds after which to stop and write what there is")
    parser.add_argument("--repeats", type=int, help="rounds of turns, there and back (default 4)")
    parser.add_argument("--jobs", type=int, help="threads that compile (default: the cores, at most 16)")
    parser.add_argument("--tune-tokamax", action="store_true", help="let tokamax tune itself per shape: minutes more")
    parser.add_argument("--depth", type=int, default=64, help="head dim of cases such as 4096x8")
    parser.add_argument("--dtype", default="float32", help="dtype of cases such as 4096x8")
    args = parser.parse_args(argv)
    known = {"forward", "backward", "forward+backward"}
    if not set(args.passes) <= known:
        parser.error(f"--passes {' '.join(args.passes)}: take some of {', '.join(sorted(known))}")
    if args.quick and args.cases:
        parser.error("--quick names its own cases: leave out --cases, or take --cases quick with others behind it")
    options.check_numbers(parser, args, repeats=1, jobs=1, time_limit=0, depth=1)
    if args.dtype not in DTYPES:
        parser.error(f"--dtype {args.dtype}: take one of {', '.join(DTYPES)}")
    options.check_file(parser, json_path(args))
    return args


def json_path(args: argparse.Namespace) -> Path | None:
    if args.out is None or args.out.suffix == ".json":
        return args.out
    return args.out / JSON_NAME


def select_peers(wanted: list[str] | None, found: list[Peer], absent: dict[str, str]) -> list[Peer]:
    if not wanted:
        return found
    taken = [peer for peer in found if peer.ours or any(part in peer.name for part in wanted)]
    for part in wanted:
        if not any(part in name for name in [*absent, *(peer.name for peer in found)]):
            names = ", ".join([*absent, *(peer.name for peer in found)])
            raise ValueError(f"--peers {part}: no peer's name contains it; the names are {names}")
    return taken


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    clock = Clock(args.time_limit)
    # PyTorch allocates beside JAX in this process.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75")
    gpu = timing.on_gpu()
    names = args.cases or (["quick"] if args.quick else ["all"] if gpu else ["4096x8", "16384x2"])
    try:
        cases = cases_.select(names, depth=args.depth, dtype=args.dtype)
        found, absent = peers_.find(gpu=gpu, tune_tokamax=args.tune_tokamax)
        peers = select_peers(args.peers, found, absent)
    except ValueError as error:
        raise SystemExit(f"bench attention: {error}") from None
    if not any(pass_ in args.passes for case in cases for pass_ in case.passes):
        have = ", ".join(dict.fromkeys(pass_ for case in cases for pass_ in case.passes))
        raise SystemExit(f"bench attention: --passes {' '.join(args.passes)}: these cases are timed in {have}")
    path = json_path(args)
    command = f"python -m bench attention {' '.join(sys.argv[1:] if argv is None else argv)}".strip()
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    report = Report(environment(command, now), absent, path)
    # Tuning runs kernels on the device, so one at a time.
    jobs = args.jobs or (1 if args.tune_tokamax else min(16, os.cpu_count() or 1))
    run(
        cases,
        peers,
        report,
        passes=args.passes,
        rounds=args.repeats or 4,
        jobs=jobs,
        clock=clock,
    )
    print(report.summary())
    if path is not None:
        from bench import plots

        stem = f"{path.stem}_" if path == args.out else ""
        roofline, bars = path.with_name(f"{stem}roofline.png"), path.with_name(f"{stem}bars.png")
        plots.roofline(report, roofline)
        drawn = plots.bars(report, bars)
        print(f"wrote {path}, {roofline.name} and {bars.name if drawn else 'no bars, since nothing was timed'}")
    if report.ours_failed:
        raise SystemExit("bench attention: fast_layers was timed in no cell; the reasons stand above")


if __name__ == "__main__":
    main()

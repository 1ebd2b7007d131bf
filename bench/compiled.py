"""What the real assembler makes of every Blackwell kernel, compiled for GPUs that are not here: nothing runs.

    python -m bench compiled ssd --gpus b200 --out bench/results/deviceless/blackwell_ssd_b200.json

The calls are those of tests/deviceless/test_blackwell_*.py, which go over every choice of tiles. For each of their
kernels and each GPU: registers (live, and those that its roles are given), bytes spilled, bytes of shared memory,
columns of tensor memory, and how often the instructions that bound its speed stand in it. Fails where anything is
spilled or exceeds a block's memory.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from bench import options
from bench.report import environment
from fast_layers.ops.ssd.blackwell_config import BLACKWELL_SMEM_BYTES, BLACKWELL_TMEM_COLUMNS
from fast_layers.testing import Compilation, CompileReport, compile_all_for

GPUS = ("b200", "b300")
OPS = ("attention", "mlp", "ssd")
TOGETHER = 8
"""Calls in one process, whose start takes some seconds: what they are found to be is told after so many."""
COUNTED = (
    *("UTCHMMA", "UTCQMMA", "MUFU", "FFMA", "FFMA2", "FMUL", "FMUL2", "FADD", "FADD2", "FMNMX", "FMNMX3", "F2FP"),
    *("LDTM", "STTM", "LDS", "LDSM", "STS", "STSM", "UTMALDG", "UTMASTG", "UTMAREDG"),
)
"""Products of 16 and of 8 bits, arithmetic on scores, then tensor memory, shared memory and TMA."""


def calls_of(op: str) -> dict[str, Compilation]:
    tests: Any = importlib.import_module(f"deviceless.test_blackwell_{op}")
    if op == "mlp":
        launches = tests.LEAN | tests.REST
        return {name: launch.compilation("blackwell_matmul", tiles) for name, (launch, tiles) in launches.items()}
    calls = tests.LEAN | getattr(tests, "LEAN_B300", {}) | tests.REST
    return {name: call.compilation() for name, call in calls.items()}


def rows(op: str, gpus: list[str], named: str = "") -> Iterator[dict[str, Any]]:
    calls = [(name, call) for name, call in calls_of(op).items() if re.search(named, name)]
    for gpu, first in itertools.product(gpus, range(0, len(calls), TOGETHER)):
        names, compilations = zip(*calls[first : first + TOGETHER], strict=True)
        for call, report in zip(names, compile_all_for(gpu, compilations), strict=True):
            yield from rows_of(report, op=op, call=call)


def rows_of(report: CompileReport, **what: Any) -> Iterator[dict[str, Any]]:
    """One for each kernel, or for a failure."""
    if report.failure is not None or not report.kernels:
        yield {"gpu": report.gpu, **what, "fault": report.failure or "no kernel"}
    for kernel in report.kernels:
        faults = list(kernel.faults)
        for held, most, what_of in (
            (kernel.smem_bytes, BLACKWELL_SMEM_BYTES, "bytes of shared memory"),
            (kernel.tmem_columns, BLACKWELL_TMEM_COLUMNS, "columns of tensor memory"),
        ):
            if held is None or held > most:
                faults.append(f"{held} {what_of}, of {most}")
        yield {
            "gpu": report.gpu,
            **what,
            "kernel": kernel.name,
            "live_registers": kernel.live_registers,
            "register_budgets": kernel.register_budgets,
            "spill_store_bytes": kernel.spill_store_bytes,
            "spill_load_bytes": kernel.spill_load_bytes,
            "smem_bytes": kernel.smem_bytes,
            "tmem_columns": kernel.tmem_columns,
            "instructions": kernel.total_instructions,
            "counts": {name: kernel.instructions[name] for name in COUNTED if name in kernel.instructions},
            "fault": "; ".join(faults) or None,
        }


def write(path: Path, about: dict[str, Any], found: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # A row a line.
    lines = ",\n".join(f"  {json.dumps(made)}" for made in found)
    path.write_text(f'{json.dumps(about, indent=1)[:-2]},\n "rows": [\n{lines}\n ]\n}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench compiled", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("op", choices=OPS)
    parser.add_argument("--gpus", nargs="+", choices=GPUS, default=list(GPUS))
    parser.add_argument("--calls", default="", help="only calls in whose names this regular expression is found")
    parser.add_argument("--out", type=Path, help="write JSON there, as rows come")
    args = parser.parse_args()
    try:
        re.compile(args.calls)
    except re.error as error:
        parser.error(f"--calls {args.calls!r} is no regular expression: {error}")
    options.check_file(parser, args.out)
    command = f"python -m bench compiled {' '.join(sys.argv[1:])}"
    about = environment(command, datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
    if not any(re.search(args.calls, name) for name in calls_of(args.op)):
        parser.error(f"--calls {args.calls!r} is in no name of {args.op}'s, which are: {'; '.join(calls_of(args.op))}")
    found = []
    for made in rows(args.op, args.gpus, args.calls):
        found.append(made)
        print(", ".join(f"{name} {value}" for name, value in made.items() if value is not None), flush=True)
        if args.out is not None:
            write(args.out, about, found)
    if faults := [made for made in found if made["fault"]]:
        raise SystemExit(f"{len(faults)} of {len(found)} kernels have a fault")


if __name__ == "__main__":
    main()

"""Attention against its peers in one run: forward, and forward with backward.

    uv run bench/attention.py --out bench/results/cpu/attention.json

Each case is compiled, run once, then timed `--repeats` times, the competitors taking turns so that drift hits all
alike; the median counts. fast_layers runs twice (the second as "again"): their distance is the noise of the run.
Inputs are random normal. A peer that needs more memory than the machine has free is left out, with the reason.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import fast_layers

PEERS: dict[str, Callable] = {
    "fast_layers": fast_layers.dot_product_attention,
    "jax.nn": jax.nn.dot_product_attention,
    "again": fast_layers.dot_product_attention,
}


def make_passes(attend: Callable, causal: bool) -> dict[str, Callable]:
    def forward(q, k, v, weights):
        return attend(q, k, v, is_causal=causal)

    def loss(q, k, v, weights):
        return (attend(q, k, v, is_causal=causal).astype(jnp.float32) * weights).sum()

    return {"forward": forward, "forward+backward": jax.grad(loss, (0, 1, 2))}


def bytes_free() -> int:
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def seconds(run: Callable, inputs) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run(*inputs))
    return time.perf_counter() - start


def measure_case(length: int, heads: int, depth: int, dtype: str, causal: bool, repeats: int) -> list[dict]:
    keys = jax.random.split(jax.random.key(0), 4)
    inputs = [jax.random.normal(key, (1, length, heads, depth), dtype) for key in keys]
    rows = []
    for pass_ in ("forward", "forward+backward"):
        runs, refused, temp_bytes = {}, {}, {}
        for name, attend in PEERS.items():
            compiled = jax.jit(make_passes(attend, causal)[pass_]).lower(*inputs).compile()
            analysis = compiled.memory_analysis()
            assert analysis is not None, "this backend of JAX does not report memory"
            temp_bytes[name] = analysis.temp_size_in_bytes
            if temp_bytes[name] > 0.8 * bytes_free():
                refused[name] = f"needs {temp_bytes[name] / 2**30:.1f} GiB, free {bytes_free() / 2**30:.1f} GiB"
                continue
            jax.block_until_ready(compiled(*inputs))
            runs[name] = compiled
        taken = {name: [] for name in runs}
        for _ in range(repeats):
            for name, run in runs.items():
                taken[name].append(seconds(run, inputs))
        for name in PEERS:
            rows.append(
                {
                    "length": length,
                    "heads": heads,
                    "depth": depth,
                    "dtype": dtype,
                    "causal": causal,
                    "pass": pass_,
                    "name": name,
                    "seconds": statistics.median(taken[name]) if name in taken else None,
                    "refused": refused.get(name),
                    "temp_bytes": temp_bytes[name],
                }
            )
    return rows


def show(rows: list[dict]) -> None:
    table = Table("T", "heads", "mask", "pass", "name", "ms", "temp MiB", "fast_layers is faster by")
    base = {key(row): row["seconds"] for row in rows if row["name"] == "fast_layers"}
    for row in rows:
        mine, theirs = base[key(row)], row["seconds"]
        table.add_row(
            str(row["length"]),
            str(row["heads"]),
            "causal" if row["causal"] else "full",
            row["pass"],
            row["name"],
            row["refused"] or f"{1e3 * theirs:.0f}",
            f"{row['temp_bytes'] / 2**20:.0f}",
            f"{theirs / mine:.2f}x" if theirs and mine else "-",
        )
    Console().print(table)


def key(row: dict) -> tuple:
    return row["length"], row["heads"], row["causal"], row["pass"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=["4096x8", "16384x2"], help="sequence length x heads")
    parser.add_argument("--depth", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    args = parser.parse_args()
    rows = []
    for case in args.cases:
        length, heads = (int(part) for part in case.split("x"))
        for causal in (False, True):
            rows += measure_case(length, heads, args.depth, args.dtype, causal, args.repeats)
            show(rows[-2 * len(PEERS) :])
    if args.out:
        report = {
            "command": f"bench/attention.py {' '.join(sys.argv[1:])}",
            "date": datetime.date.today().isoformat(),
            "device": jax.devices()[0].device_kind,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "versions": {"jax": jax.__version__, "fast_layers": fast_layers.__version__},
            "rows": rows,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

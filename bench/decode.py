"""One decode step against a cache, by how much of it is filled: fast_layers and jax.nn in one run.

    uv run bench/decode.py --out bench/results/cpu/decode.json

The best of `--repeats` counts, since a step takes a millisecond and anything else on the machine shows.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp

import fast_layers
from bench import options


@jax.jit
def ours(query, key, value, filled):
    return fast_layers.dot_product_attention(query, key, value, is_causal=True, q_offset=filled - 1)


@jax.jit
def theirs(query, key, value, filled):
    return jax.nn.dot_product_attention(query, key, value, key_value_seq_lengths=filled[None])


def milliseconds(step, *inputs, repeats: int) -> float:
    jax.block_until_ready(step(*inputs))
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(step(*inputs))
        taken.append(time.perf_counter() - start)
    return 1e3 * min(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--capacity", type=int, default=16_384)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    args = parser.parse_args()
    # The shortest step sees a 1024th of the cache.
    options.check_numbers(parser, args, capacity=1024, heads=1, depth=1, repeats=1)
    options.check_file(parser, args.out)
    query_key, cache_key = jax.random.split(jax.random.key(0))
    query = jax.random.normal(query_key, (1, 1, args.heads, args.depth))
    cache = jax.random.normal(cache_key, (1, args.capacity, args.heads, args.depth))
    rows = []
    for filled in (args.capacity // 1024, args.capacity // 8, args.capacity):
        row = {"filled": filled}
        for name, step in (("fast_layers", ours), ("jax.nn", theirs)):
            row[name] = milliseconds(step, query, cache, cache, jnp.int32(filled), repeats=args.repeats)
        rows.append(row)
        print(f"{filled:6d} of {args.capacity}: fast_layers {row['fast_layers']:.2f} ms, jax.nn {row['jax.nn']:.2f} ms")
    if args.out:
        report = {
            "command": f"bench/decode.py {' '.join(sys.argv[1:])}",
            "date": datetime.date.today().isoformat(),
            "device": jax.devices()[0].device_kind,
            "cores": os.cpu_count(),
            "jax": jax.__version__,
            "milliseconds": rows,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

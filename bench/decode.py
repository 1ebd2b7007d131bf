"""Steps of decoding against a cache, by how much of it is filled: fast_layers and jax.nn in turns, in one run.

    uv run bench/decode.py --out bench/results/cpu/decode.json
    python -m bench decode --batch 1 16 128 --capacity 2048 --heads 32 --kv-heads 8 --depth 128 --out decode.json
    python -m bench decode --queries 4 --heads 32 --kv-heads 8 --depth 128

How many keys there are is an array, as it is to a model that decodes: `fast_layers` gets it as the offset of queries
under a causal mask, which is what FlashMHA makes of its cache, `fast_layers lengths` as each example's length, which
all queries see. So does jax.nn: by cuDNN in bfloat16 on a GPU, by XLA in float32 on a CPU. On a GPU the median of the
device's times counts (bench/timing.py), on a CPU the best, since a step takes a millisecond and anything else on the
machine shows.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp

import fast_layers
from bench import options, timing

SETS_BYTES, MOST_SETS = 256 << 20, 8
"""Of caches that take turns, so that a GPU's own cache holds none of what is read."""


def by_offset(query, key, value, filled):
    return fast_layers.dot_product_attention(query, key, value, is_causal=True, q_offset=filled - query.shape[1])


def by_lengths(query, key, value, filled):
    lengths = jnp.broadcast_to(filled, query.shape[:1])
    return fast_layers.dot_product_attention(query, key, value, key_value_seq_lengths=lengths)


def by_jax(query, key, value, filled, implementation=None):
    lengths = jnp.broadcast_to(filled, query.shape[:1])
    return jax.nn.dot_product_attention(query, key, value, key_value_seq_lengths=lengths, implementation=implementation)


def steps() -> dict[str, Callable[..., jax.Array]]:
    ours = {"fast_layers": by_offset, "fast_layers lengths": by_lengths}
    if timing.on_gpu():
        return ours | {"jax.nn cudnn": functools.partial(by_jax, implementation="cudnn")}
    return ours | {"jax.nn": by_jax}


def milliseconds(batch: int, filled: int, args: argparse.Namespace) -> dict[str, float | str]:
    """Of one step by each, or why it takes none."""
    dtype = jnp.dtype(jnp.bfloat16 if timing.on_gpu() else jnp.float32)
    shape = batch, args.capacity, args.kv_heads or args.heads, args.depth
    count = -(-SETS_BYTES // (2 * batch * filled * shape[2] * args.depth * dtype.itemsize)) if timing.on_gpu() else 1

    def operands(seed):
        keys = jax.random.split(jax.random.key(seed), 3)
        query = jax.random.normal(keys[0], (batch, args.queries, args.heads, args.depth), dtype)
        return query, *(jax.random.normal(key, shape, dtype) for key in keys[1:]), jnp.int32(filled)

    sets = [operands(seed) for seed in range(min(count, MOST_SETS))]
    watch, results, programs = timing.Stopwatch(), {}, {}
    for name, step in steps().items():
        try:
            programs[name] = jax.jit(step).lower(*sets[0]).compile()
        except (ValueError, RuntimeError, NotImplementedError) as error:
            results[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    roughly = {name: watch.warm_up(call, sets) for name, call in programs.items()}
    taken: dict[str, list[float]] = {name: [] for name in programs}
    for name in timing.turns_of(list(programs), args.repeats):
        taken[name] += watch.seconds(programs[name], sets, roughly[name])[0]
    pick = statistics.median if timing.on_gpu() else min
    return results | {name: 1e3 * pick(each) for name, each in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--queries", type=int, default=1, help="tokens of each example in a step")
    parser.add_argument("--capacity", type=int, default=16_384)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, help="default: as many as heads")
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    args = parser.parse_args()
    # The shortest step sees a 1024th of the cache, or its own tokens.
    options.check_numbers(parser, args, batch=1, queries=1, capacity=1024, heads=1, kv_heads=1, depth=1, repeats=1)
    if args.heads % (args.kv_heads or args.heads):
        parser.error(f"--heads {args.heads} --kv-heads {args.kv_heads}: heads must be a multiple of key heads")
    if args.queries > args.capacity // 8:
        parser.error(f"--queries {args.queries}: take at most an eighth of --capacity {args.capacity}")
    options.check_file(parser, args.out)
    queries = "1 query" if args.queries == 1 else f"{args.queries} queries"
    print(f"{queries} of {args.heads} heads on {args.kv_heads or args.heads} of depth {args.depth}")
    rows = []
    for batch in args.batch:
        for filled in (max(args.capacity // 1024, args.queries), args.capacity // 8, args.capacity):
            taken = milliseconds(batch, filled, args)
            rows.append({"batch": batch, "filled": filled, **taken})
            told = (f"{name} {x}" if isinstance(x, str) else f"{name} {x:.4f} ms" for name, x in taken.items())
            print(f"batch {batch}, {filled:6d} of {args.capacity}: {', '.join(told)}", flush=True)
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

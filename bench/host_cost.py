"""What the host pays before a program runs: tracing, lowering and compiling attention, forward with backward.

    python -m bench host_cost --out bench/results/h200/host_cost.json

Each configuration in a process of its own, which has started its back end and compiled a small product before, and
finds nothing in a cache; as one layer, and as many as `--layers` says. With a GPU for it, or else for one that is not
here (`--gpu`), whose wheels docs/verification.md names. Seconds of the wall clock, and in brackets of all processors'
time, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import fast_layers
from bench import options, timing
from bench.report import environment
from fast_layers.testing._deviceless_targets import TARGETS

TOKENS, HIDDEN = 16_384, 2048
PHASES = ("trace", "lower", "compile")
TIMES_OUT = 300.0
HERE = "here"
KERNELS = {"h": "hopper", "b": "blackwell"}


def gradients(x: jax.Array, dout: jax.Array, *, layers: int, causal: bool, backend: str | None) -> Any:
    """Of so many equal layers of attention, one after the other, each with its input added. [B, T, heads, depth]"""

    def model(x):
        for _ in range(layers):
            x = x + fast_layers.dot_product_attention(x, x, x, is_causal=causal, implementation=backend)
        return x

    out, pull = jax.vjp(model, x)
    return out, pull(dout)


def _clock() -> tuple[float, float]:
    spent = os.times()
    return time.perf_counter(), spent.user + spent.system + spent.children_user + spent.children_system


def measure(depth: int, length: int, mask: str, layers: int, gpu: str, backend: str | None) -> dict[str, Any]:
    """Seconds per phase, and how many kernels went in, in this process, which has not compiled the same before."""
    with contextlib.ExitStack() as stack:
        sharding = None
        if gpu != HERE:
            from fast_layers.testing import _deviceless_child

            sharding = stack.enter_context(_deviceless_child.described(TARGETS[gpu]))
        square = jax.ShapeDtypeStruct((128, 128), jnp.float32, sharding=sharding)
        jax.jit(lambda x: x @ x).lower(square).compile()
        shape = (max(1, TOKENS // length), length, HIDDEN // depth, depth)
        x = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)
        call = jax.jit(lambda *args: gradients(*args, layers=layers, causal=mask == "causal", backend=backend))
        clocks = [_clock()]
        traced = call.trace(x, x)
        clocks.append(_clock())
        lowered = traced.lower()
        clocks.append(_clock())
        lowered.compile()
        clocks.append(_clock())
    spent = {
        phase: [after - before for before, after in zip(clocks[at], clocks[at + 1], strict=True)]
        for at, phase in enumerate(PHASES)
    }
    kernels = len(re.findall(r"custom_call @\w*mosaic_gpu\w*", lowered.as_text()))
    return {"depth": depth, "length": length, "mask": mask, "layers": layers, "kernels": kernels, "seconds": spent}


def measure_apart(depth: int, length: int, mask: str, layers: int, gpu: str, backend: str | None) -> dict[str, Any]:
    """`measure` in a new process; `failure` in the result says why there are no seconds."""
    environ = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    environ |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_TRACEBACK_FILTERING": "off"}
    if gpu != HERE:
        # The plugin of a GPU that is not here looks for cuDNN, which nothing calls.
        environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    what = (depth, length, mask, layers, gpu, backend)
    called = [sys.executable, "-m", "bench.host_cost", "--child", json.dumps(what)]
    try:
        child = subprocess.run(called, capture_output=True, env=environ, timeout=TIMES_OUT, check=False)
    except subprocess.TimeoutExpired:
        return {"what": what, "failure": f"not compiled after {TIMES_OUT:g} s"}
    if child.returncode != 0:
        return {"what": what, "failure": _complaint(child.stderr.decode(errors="replace"))}
    return json.loads(child.stdout)


def _complaint(stderr: str) -> str:
    """The error that ended a process, without the way to it."""
    lines = stderr.strip().splitlines()
    raised = [at for at, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return "\n".join(lines[raised[-1] if raised else -1 :])


def _line(row: dict[str, Any]) -> str:
    if "failure" in row:
        return f"{row['what']}: {row['failure']}"
    wall, busy = (sum(column) for column in zip(*row["seconds"].values(), strict=True))
    parts = ", ".join(f"{phase} {spent[0]:.1f}" for phase, spent in row["seconds"].items())
    name = f"depth {row['depth']}, {row['length']} tokens, {row['mask']}, layers {row['layers']}"
    return f"{name}: {wall:.1f} s ({busy:.1f}): {parts}; kernels in the program: {row['kernels']}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench host_cost", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", choices=(HERE, *TARGETS), help="default: the one that is here, or h200")
    parser.add_argument("--depths", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 4096])
    parser.add_argument("--masks", nargs="+", choices=("causal", "full"), default=["causal", "full"])
    parser.add_argument("--layers", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--out", type=Path, help="write JSON there")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(*args.child)))
        return
    options.check_numbers(parser, args, depths=1, lengths=1, layers=1)
    if max(args.depths) > HIDDEN:
        parser.error(f"--depths {' '.join(map(str, args.depths))}: take at most {HIDDEN}, which is all heads' together")
    options.check_file(parser, args.out)
    gpu = args.gpu or (HERE if timing.on_gpu() else "h200")
    about = environment(
        " ".join(["python -m bench host_cost", *sys.argv[1:]]),
        datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    found = []
    for depth, length, mask, layers in itertools.product(args.depths, args.lengths, args.masks, args.layers):
        found.append(measure_apart(depth, length, mask, layers, gpu, KERNELS.get(gpu[0]) if gpu != HERE else None))
        print(_line(found[-1]), flush=True)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps({**about, "for": gpu, "rows": found}, indent=1) + "\n")
    if any("failure" in row for row in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

"""What a training step needs of a GPU's memory, compiled for GPUs that are not here: nothing runs.

    python -m bench memory --out bench/results/deviceless/memory.json

`step` is the whole step of examples/train_lm.py (loss, gradients, optimiser; the state is donated) for one GPU, with
the backends that are taken by themselves, and with the GPU's own kernels by name. `mlp` are four SwiGLU layers one
after the other, forward and gradients, by FusedMLP and by Flax's layers. Bytes are XLA's account of the compiled
program (`CompileReport`); the wheels that this needs are in docs/verification.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import jax
import jax.numpy as jnp
from flax import nnx
from lm.config import CHOICES, PRESETS, Config, from_flags
from lm.model import MLP
from lm.training import Trainer

import fast_layers
from bench import options
from bench.report import environment
from fast_layers.testing import Compilation, CompileReport, compile_all_for

KERNELS = {"h100": "hopper", "h200": "hopper", "b200": "blackwell", "b300": "blackwell"}
LAYERS, TOKENS, WIDTH, HIDDEN = 4, 8192, 2048, 5504
MIB = 2**20


def train_step(state: Any, batch: Any, *, config: Config, backend: str | None) -> Any:
    """On the device that it is compiled for."""
    with fast_layers.use_backends(backend):
        return Trainer(config, jax.sharding.get_abstract_mesh()).update(state, batch)


def step_of(config: Config, backend: str | None) -> Compilation:
    state = Trainer(config, jax.sharding.AbstractMesh((1,), ("one",))).abstract_state()
    shape = (config.accumulate, config.batch_size // config.accumulate, config.seq_len)
    types = {"tokens": jnp.int32, "targets": jnp.int32, "segment_ids": jnp.int32, "weights": jnp.float32}
    batch = {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in types.items()}
    return Compilation(train_step, (state, batch), {"config": config, "backend": backend}, donated=(0,))


def mlp_gradients(layers: Any, x: Any, *, kind: str, scanned: bool) -> Any:
    """Of the layers' parameters, and of x [tokens, features]. `kind` as in the example's MLP."""
    graph = nnx.split(nnx.eval_shape(lambda: _mlp(kind)))[0]

    def block(x, params):
        return x + nnx.merge(graph, params)(x), None

    def loss(layers, x):
        if scanned:
            x, _ = jax.lax.scan(block, x, layers)
        else:
            for params in layers:
                x, _ = block(x, params)
        return (x.astype(jnp.float32) ** 2).sum()

    return jax.grad(loss, argnums=(0, 1))(layers, x)


def _mlp(kind: str) -> nnx.Module:
    init = nnx.initializers.lecun_normal()
    return MLP[kind](WIDTH, HIDDEN, down_kernel_init=init, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))


def mlp_of(kind: str, scanned: bool) -> Compilation:
    """The layers one after the other as written, or as `lax.scan` over their stacked parameters."""
    params = jax.eval_shape(lambda: nnx.state(_mlp(kind), nnx.Param))
    stacked = jax.tree.map(lambda p: jax.ShapeDtypeStruct((LAYERS, *p.shape), p.dtype), params)
    x = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.bfloat16)
    layers = stacked if scanned else [params] * LAYERS
    return Compilation(mlp_gradients, (layers, x), {"kind": kind, "scanned": scanned})


def row(report: CompileReport, **what: Any) -> dict[str, Any]:
    kernels = [
        {
            "name": kernel.name,
            "live_registers": kernel.live_registers,
            "spill_store_bytes": kernel.spill_store_bytes,
            "smem_bytes": kernel.smem_bytes,
            "tmem_columns": kernel.tmem_columns,
        }
        for kernel in report.kernels
    ]
    sizes = {name: getattr(report, name) for name in ("argument_bytes", "result_bytes", "temp_bytes")}
    total = {"total_bytes": sum(sizes.values())}
    return {"gpu": report.gpu, **what, **sizes, **total, "kernels": kernels, "failure": report.failure}


def rows(gpus: list[str], preset: str, archs: list[str], mlp: bool) -> Iterator[dict[str, Any]]:
    for gpu in gpus:
        todo: list[tuple[dict[str, Any], Compilation]] = [
            (
                {"group": "step", "preset": preset, "arch": arch, "backend": backend or "automatic"},
                step_of(from_flags({"preset": preset, "arch": arch}), backend),
            )
            for arch in archs
            for backend in (None, KERNELS[gpu])
        ]
        if mlp:
            todo += [
                ({"group": "mlp", "layers": kind, "scanned": scanned}, mlp_of(kind, scanned))
                for scanned in (False, True)
                for kind in MLP
            ]
        reports = compile_all_for(gpu, [compilation for _, compilation in todo], timeout=600.0)
        yield from (row(report, **what) for (what, _), report in zip(todo, reports, strict=True))


_WHAT = ("gpu", "group", "preset", "arch", "backend", "layers", "scanned")
_SIZES = ("argument_bytes", "result_bytes", "temp_bytes", "total_bytes")


def _line(made: dict[str, Any]) -> str:
    sizes = ", ".join(f"{name.removesuffix('_bytes')} {made[name] / MIB:,.0f} MiB" for name in _SIZES)
    return f"{', '.join(f'{name} {made[name]}' for name in _WHAT if name in made)}: {made['failure'] or sizes}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench memory", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", nargs="+", choices=KERNELS, default=["h200", "b200"])
    parser.add_argument("--preset", choices=PRESETS, default="1B")
    parser.add_argument("--archs", nargs="*", choices=CHOICES["arch"], default=["transformer"])
    parser.add_argument("--mlp", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, help="write JSON there")
    args = parser.parse_args()
    if not (args.archs or args.mlp):
        parser.error("--no-mlp without any of --archs leaves nothing to compile: name some, or leave out --no-mlp")
    options.check_file(parser, args.out)
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found = []
    for made in rows(args.gpus, args.preset, args.archs, args.mlp):
        found.append(made)
        print(_line(made), flush=True)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        command = f"python -m bench memory {' '.join(sys.argv[1:])}".strip()
        args.out.write_text(json.dumps({**environment(command, date), "rows": found}, indent=1) + "\n")
    if any(made["failure"] for made in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

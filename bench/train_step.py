"""A language model's loss and gradients, whole: with our layers, and with others', in one run.

    python -m bench train_step --out bench/results/h200/train_step.json
    python -m bench train_step --presets 350M 1B --seq-len 8192 --tokens 65536 --rows packed

The model is that of examples/train_lm.py, in its presets' sizes; the optimiser, which is the same for all, is left out.
Rows are `whole`, one document each, or `packed`, of some four documents of random lengths, which cuDNN's attention does
not take. How programs are timed is said in `bench/turns.py`. A peer's loss and gradients, by parameter, are compared
with the first one's. All peers have the same parameters, with the same values.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "examples"))

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType
from lm import model
from lm.config import CHOICES, PRESETS, VOCAB, Config, from_flags
from lm.training import Batch, Trainer

import fast_layers
from bench import options, timing, turns
from bench.attention import Clock
from bench.turns import Operands, Pass, Peer

ROWS = ("whole", "packed")
DOCUMENTS = 4
"""Of a packed row, where its length has room for them."""
BATCH = ("tokens", "targets", "weights", "segment_ids")
TINY = {"layers": 2, "width": 32, "heads": 2, "kv_heads": 1, "mlp_width": 64, "ssm_state": 8, "ssm_head_dim": 8}


def _by_cudnn(query, key, value, *, rope: nnx.RoPE, mask: jax.Array | None, is_causal: bool, **defaults):
    del defaults
    if mask is not None:
        raise NotImplementedError("takes no documents")
    turn = jax.vmap(rope, in_axes=-2, out_axes=-2)
    query, key = (turn(x, None).astype(value.dtype) for x in (query, key))
    return jax.nn.dot_product_attention(query, key, value, is_causal=is_causal, implementation="cudnn")


class CudnnAttention(model.FlaxAttention):
    """Flax's layer with cuDNN's attention."""

    attend = staticmethod(_by_cudnn)


model.ATTENTION["cudnn"] = CudnnAttention


@dataclasses.dataclass(frozen=True)
class Case:
    config: Config
    rows: str

    @property
    def name(self) -> str:
        c = self.config
        return f"{c.arch} {c.preset}, {c.layers} layers, {c.batch_size} x {c.seq_len} {self.rows}, {c.dtype}"

    def trainer(self) -> Trainer:
        mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
        return Trainer(self.config, mesh)

    def operands(self) -> Operands:
        """The parameters by their paths, and the batch."""
        shape = self.config.batch_size, self.config.seq_len
        rng = np.random.default_rng(0)
        text = rng.integers(VOCAB, size=(shape[0], shape[1] + 1), dtype=np.int32)
        batch = {"tokens": text[:, :-1], "targets": text[:, 1:], "weights": np.ones(shape, np.float32)}
        if self.rows == "packed":
            borders = rng.random(shape) < DOCUMENTS / shape[1]
            batch["segment_ids"] = np.cumsum(borders, axis=1, dtype=np.int32)
        trainer = self.trainer()
        return {**_by_path(trainer.initial_state().params), **trainer.put(batch)}

    def bytes(self, pass_: Pass) -> None:
        return None


def gradients(
    case: Case, attention: str = "flash", mlp: str = "fused", backend: str | None = None
) -> Callable[..., dict[str, jax.Array]]:
    """Loss, and gradients by the parameters' paths. `attention` and `mlp`: the example's; `backend`: of our ops."""
    config = dataclasses.replace(case.config, attention=attention, mlp=mlp)
    trainer = dataclasses.replace(case, config=config).trainer()
    like = trainer.abstract_state().params

    def call(**operands):
        batch: Batch = {name: operands.pop(name, None) for name in BATCH}
        params = jax.tree.unflatten(jax.tree.structure(like), [operands[path] for path in _by_path(like)])
        with fast_layers.use_backends(force=backend):
            loss, grads = trainer.loss_and_grads(params, batch)
        return {"loss": loss, **_by_path(grads)}

    return call


def _by_path(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in jax.tree.leaves_with_path(tree)}


_by_xla = functools.partial(gradients, backend="xla")
PEERS = (
    Peer("fast_layers", gradients),
    Peer("fast_layers attention alone", functools.partial(gradients, mlp="flax")),
    Peer("fast_layers xla", _by_xla),
    Peer("again", gradients),
    Peer("cudnn attention", functools.partial(gradients, attention="cudnn", mlp="flax")),
    Peer("flax", functools.partial(gradients, attention="flax", mlp="flax")),
)


def peers_of(case: Case) -> list[Peer]:
    """Of Mamba-2 alone there are ours: the example's, position by position, is there to be compared with."""
    return [peer for peer in PEERS if case.config.arch != "mamba2" or peer.make in (gradients, _by_xla)]


def parser() -> argparse.ArgumentParser:
    made = turns.parser(__doc__)
    made.add_argument("--presets", nargs="+", choices=PRESETS, default=["1B" if timing.on_gpu() else "cpu-small"])
    made.add_argument("--archs", nargs="+", choices=CHOICES["arch"], default=list(CHOICES["arch"]))
    made.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    made.add_argument("--seq-len", type=int, help="bytes of a row; default: the preset's")
    made.add_argument("--tokens", type=int, help="bytes in all; default: of the preset's micro-batch")
    made.add_argument("--layers", type=int, help="fewer layers, or more, than the preset has")
    made.add_argument("--remat", action="store_true", help="recompute each block in the backward pass")
    return made


def main() -> None:
    made = parser()
    args = turns.parse(made, lambda args: (peer.name for peer in PEERS))
    options.check_numbers(made, args, seq_len=2, tokens=2, layers=1)
    turns.run(
        ((case, "step", turns.selected(peers_of(case), args.peers)) for case in cases(args)),
        f"python -m bench train_step {' '.join(sys.argv[1:])}".strip(),
        repeats=turns.repeats_of(args),
        path=args.out,
        hlo=args.hlo,
        clock=Clock(args.time_limit),
    )


def cases(args: argparse.Namespace) -> Iterator[Case]:
    for preset in args.presets[:1] if args.quick else args.presets:
        for arch in args.archs:
            given = {"preset": preset, "arch": arch, "remat": args.remat}
            sizes = from_flags(given | (TINY if args.tiny else {}))
            length = args.seq_len or (32 if args.tiny else sizes.seq_len)
            tokens = args.tokens or (4 * length if args.tiny else sizes.batch_size // sizes.accumulate * sizes.seq_len)
            own = {"seq_len": length, "batch_size": math.ceil(tokens / length), "accumulate": 1}
            layers = {} if args.layers is None else {"layers": args.layers}
            for rows in args.rows:
                yield Case(dataclasses.replace(sizes, **own, **layers), rows)


if __name__ == "__main__":
    main()

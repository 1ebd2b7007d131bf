"""Trains a byte-level language model with fast_layers, on real text that is on every machine.

    python examples/train_lm.py                          # two minutes on a laptop, into runs/lm
    python examples/train_lm.py --arch mamba2            # a Mamba-2 in place of the transformer, or --arch hybrid
    python examples/train_lm.py --resume                 # continues it after a kill, on a CPU bit for bit
    python examples/train_lm.py --preset 350M --data ~/books --out runs/books     # on a GPU
    python examples/train_lm.py --verify-gradients       # the whole model's gradient against Flax

The parts lie beside this file in lm/: config, data, model, training, checkpoints, run_dir, report, sampling
flax_mamba2 and gradient_check.
"""

import argparse
import dataclasses
import math
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import jax
from grain import DatasetIterator
from lm import gradient_check, model
from lm.checkpoints import Checkpoints
from lm.config import CHOICES, Config, UserError, flag, from_flags
from lm.data import Corpus, batches, read_corpus
from lm.report import Reporter, plot_losses
from lm.run_dir import RunDir
from lm.sampling import printable, sample
from lm.training import Trainer, TrainState
from rich.console import Console


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _parser() -> _Parser:
    parser = _Parser(
        prog="train_lm.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--resume", action="store_true", help="continue the run in --out; start it if there is none")
    mode.add_argument("--overwrite", action="store_true", help="delete the run in --out first")
    mode.add_argument(
        "--verify-gradients",
        action="store_true",
        help="compare the gradient with Flax's layers in float32, and in the run's dtype if that is another,\n"
        "instead of training; fails on excess",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/lm"), help="directory of the run (%(default)s)")
    parser.add_argument("--checkpoint-every", type=int, default=40, help="steps between checkpoints (%(default)s)")
    parser.add_argument(
        "--log-every", type=int, default=10, help="steps between lines when not on a terminal (%(default)s)"
    )
    parser.add_argument("--prompt", default="def ", help="text to continue at the end (%(default)r)")
    parser.add_argument(
        "--sample-bytes", type=int, help="bytes to write after it; 0 for none (what fits a row, at most 200)"
    )
    parser.add_argument("--temperature", type=float, default=0.7, help="of sampling; 0 is greedy (%(default)s)")
    run = parser.add_argument_group("what decides the losses (fixed for a run; presets override the defaults)")
    for field in dataclasses.fields(Config):
        # Left out of the result when not given, so that presets and resumed runs know what was asked for.
        settings: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
        shown = "" if field.default is None else f" ({field.default})"
        settings["help"] = field.metadata["help"] + shown
        if field.type is bool:
            settings["action"] = argparse.BooleanOptionalAction
        elif field.name in CHOICES:
            settings["choices"] = CHOICES[field.name]
        else:
            settings["type"] = field.type if field.type in (int, float) else str
        run.add_argument(flag(field.name), **settings)
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    console = Console(highlight=False, markup=False)  # paths and samples may hold [brackets]
    fields = {field.name for field in dataclasses.fields(Config)}
    given = {name: value for name, value in vars(args).items() if name in fields}
    if "data" in given:
        given["data"] = str(Path(given["data"]).absolute())  # a run may be resumed from elsewhere
    try:
        if args.verify_gradients:
            return verify_gradients(from_flags(given), console)
        return run(args, given, console)
    except UserError as error:
        parser.error(" ".join(str(error).split()))


def verify_gradients(config: Config, console: Console) -> int:
    """In float32, where rounding hides nothing, and as the run computes, with the kernels that it takes."""
    corpus = _read(config, console)
    batch = next(gradient_check.packed_batches(config, corpus))
    errors = gradient_check.gradient_errors(config, batch)
    console.print(gradient_check.table(errors, batch))
    excess = [error.group for error in errors if not error.ok]
    if excess:
        console.print(f"gradients differ from Flax: {', '.join(excess)}", style="bold red", soft_wrap=True)
    if config.dtype == "float32":
        return 1 if excess else 0

    rounded = gradient_check.rounding_errors(config, gradient_check.packed_batches(config, corpus))
    console.print(gradient_check.rounding_table(rounded, config.dtype))
    console.print(str(gradient_check.backends(config, batch)), soft_wrap=True)
    failed = [error for error in rounded if not error.verdict.ok]
    if failed:
        groups = ", ".join(error.group for error in failed)
        console.print(f"gradients differ from Flax in {config.dtype}: {groups}", style="bold red", soft_wrap=True)
        for error in failed:
            console.print(f"  {error.verdict.failure}", soft_wrap=True)
    return 1 if excess or failed else 0


def run(args: argparse.Namespace, given: dict[str, Any], console: Console) -> int:
    """Trains from the start or from the newest checkpoint, plots the losses and samples."""
    run_dir = RunDir(args.out)
    config = run_dir.settle_config(given, resume=args.resume, overwrite=args.overwrite)
    prompt, sample_bytes = _check_options(args, config)
    trainer = Trainer(config)
    corpus = _read(config, console)
    run_dir.begin(config, corpus, overwrite=args.overwrite)

    data = batches(corpus, config)
    checkpoints = Checkpoints(run_dir.checkpoints)
    restored = checkpoints.restore_newest(trainer.abstract_state(), data)
    if restored is None:
        state, start = trainer.initial_state(), 0
    else:
        state, start = restored.state, restored.step
        for place, reason in restored.damaged.items():
            console.print(f"damaged checkpoint set aside in {place}: {reason}", style="bold red", soft_wrap=True)
        console.print(f"resuming after step {start}")
    run_dir.truncate_metrics(start)

    console.print(
        f"{config.arch}, {model.parameter_count(config):,} parameters, {_layers(config)}, "
        f"{config.dtype}, {jax.device_count()} x {jax.devices()[0].device_kind}"
    )
    try:
        with Reporter(
            console,
            run_dir.metrics,
            done=start,
            last=config.steps,
            flops_per_token=model.flops_per_token(config),
            every=args.log_every,
        ) as reporter:
            state = train(trainer, state, data, checkpoints, reporter, args.checkpoint_every)
    except KeyboardInterrupt:
        console.print(f"interrupted; --resume --out {args.out} continues after the last checkpoint")
        return 130
    except FloatingPointError as error:
        console.print(f"{error}; start anew with a lower --learning-rate", style="bold red", soft_wrap=True)
        return 1

    first, last = plot_losses(run_dir.metrics, run_dir.plot)
    console.print(f"loss {first:.3f} -> {last:.3f} nats per byte; {run_dir.plot}", soft_wrap=True)
    if sample_bytes:
        text = printable(prompt + sample(config, state.params, prompt, sample_bytes, args.temperature))
        encoding = console.encoding  # a terminal may know fewer characters than the model
        console.rule("sample")
        console.print(text.encode(encoding, "replace").decode(encoding), soft_wrap=True)
    return 0


def _layers(config: Config) -> str:
    """Which implementations the model is made of."""
    attention = [f"{config.attention} attention", f"{config.mlp} MLP"] if config.arch != "mamba2" else []
    return ", ".join([*attention, *([f"{config.mamba} Mamba-2"] if config.arch != "transformer" else [])])


def train(
    trainer: Trainer,
    state: TrainState,
    data: DatasetIterator,
    checkpoints: Checkpoints,
    reporter: Reporter,
    checkpoint_every: int,
) -> TrainState:
    """Runs the remaining steps. Raises FloatingPointError when one is not finite."""
    start, last = int(state.step), trainer.config.steps
    for step in range(start + 1, last + 1):
        batch = next(data)
        placed = trainer.put(batch)
        if step == start + 1:
            trainer.compile(state, placed)
            reporter.restart_clock()
        # Returns at once: the host reads the next batch while the devices compute this one.
        state, scalars = trainer.step(state, placed)
        reporter.add(step, int((batch["segment_ids"] >= 0).sum()), scalars)
        if step % checkpoint_every == 0 or step == last:
            reporter.flush()  # first, because metrics.jsonl must have every step that a checkpoint has
            checkpoints.save(step, state, data)
            reporter.restart_clock()
    return state


def _read(config: Config, console: Console) -> Corpus:
    corpus = read_corpus(config.data, config.max_bytes)
    cut = f", cut at --max-bytes {corpus.cut_at}" if corpus.cut_at else ""
    console.print(
        f"{len(corpus.documents):,} documents, {corpus.size:,} bytes from {corpus.source}{cut}",
        soft_wrap=True,
    )
    return corpus


def _check_options(args: argparse.Namespace, config: Config) -> tuple[bytes, int]:
    """Validates what is not part of the Config; returns the prompt and how many bytes to sample after it."""
    for name in ("checkpoint_every", "log_every"):
        if getattr(args, name) < 1:
            raise UserError(f"{flag(name)} {getattr(args, name)}: must be at least 1")
    if not 0 <= args.temperature < math.inf:
        raise UserError(f"--temperature {args.temperature}: must be a number, 0 or more")
    prompt = os.fsencode(args.prompt)
    room = config.seq_len - len(prompt)
    if args.sample_bytes == 0:
        return prompt, 0
    if not prompt:
        raise UserError("--prompt is empty: sampling continues at least one byte; or use --sample-bytes 0")
    if args.sample_bytes is None:
        return prompt, min(200, max(room, 0))
    if not 0 < args.sample_bytes <= room:
        raise UserError(
            f"--sample-bytes {args.sample_bytes}: must be at least 0 and, with the {len(prompt)} bytes of "
            f"--prompt, fit the {config.seq_len} bytes of a row (--seq-len), the positions the model learns"
        )
    return prompt, args.sample_bytes


if __name__ == "__main__":
    sys.exit(main())

"""What a run shows and writes: progress, metrics.jsonl, loss.png."""

import json
import math
import time
from pathlib import Path
from typing import Any

import jax
import matplotlib
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

matplotlib.use("Agg")
from matplotlib import pyplot

# Dense bfloat16 peak in FLOP/s, from NVIDIA's data sheets, by jax.Device.device_kind; the first prefix that
# fits.
_PEAK_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA L4": 121e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
}


def utilisation(flops_per_s: float, device: Any, count: int) -> str:
    """Model FLOP utilisation of count such devices: a percentage, '-' on a CPU, or 'unknown device'."""
    if device.platform == "cpu":
        return "-"
    for kind, peak in _PEAK_FLOPS.items():
        if device.device_kind == kind or device.device_kind.startswith((kind + " ", kind + "-")):
            return f"{flops_per_s / (peak * count):.1%}"
    return "unknown device"


class Reporter:
    """Writes one line of metrics per step, and shows a live bar on a terminal or a plain line now and then
    elsewhere.

    A step is reported when the next one has been started, so waiting for its loss leaves no device idle.
    """

    def __init__(self, console: Console, metrics: Path, *, done: int, last: int, flops_per_token: float, every: int):
        self._console = console
        self._metrics = metrics.open("a", buffering=1)  # by line: a kill loses no complete one
        self._last = last
        self._flops_per_token = flops_per_token
        self._every = every
        self._pending: tuple[int, int, dict[str, jax.Array]] | None = None
        self._since = time.perf_counter()
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=last, completed=done, text="")

    def __enter__(self):
        self._bar.start()
        return self

    def __exit__(self, *_):
        self._bar.stop()
        self._metrics.close()

    def restart_clock(self) -> None:
        """Leaves the time since the last step out of the next one's speed."""
        self._since = time.perf_counter()

    def add(self, step: int, tokens: int, scalars: dict[str, jax.Array]) -> None:
        """Takes the loss, grad_norm and lr of a step just started, and reports the step before it."""
        self.flush()
        self._pending = step, tokens, scalars

    def flush(self) -> None:
        """Waits for the newest step and reports it. Raises FloatingPointError if it is not finite."""
        if self._pending is None:
            return
        (step, tokens, scalars), self._pending = self._pending, None
        loss, grad_norm, lr = (float(scalars[name]) for name in ("loss", "grad_norm", "lr"))
        if not math.isfinite(loss + grad_norm):
            raise FloatingPointError(f"step {step} has loss {loss} and gradient norm {grad_norm}")
        seconds = time.perf_counter() - self._since
        self.restart_clock()
        tokens_per_s = tokens / seconds
        record = {"step": step, "loss": loss, "grad_norm": grad_norm, "lr": lr, "tokens_per_s": tokens_per_s}
        self._metrics.write(json.dumps(record) + "\n")
        mfu = utilisation(self._flops_per_token * tokens_per_s, jax.devices()[0], jax.device_count())
        text = f"loss {loss:.3f}  {tokens_per_s:,.0f} tokens/s  MFU {mfu}"
        self._bar.update(self._task, completed=step, text=text)
        if not self._console.is_terminal and (step % self._every == 0 or step in (1, self._last)):
            self._console.print(f"step {step}/{self._last}  {text}", soft_wrap=True)


def plot_losses(metrics: Path, image: Path) -> tuple[float, float]:
    """Draws loss over steps; returns the first and the last loss."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = [record["loss"] for record in records]
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot([record["step"] for record in records], losses, linewidth=1)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", ylim=(0, None))
    axes.grid(alpha=0.3)
    figure.savefig(image, dpi=150)
    pyplot.close(figure)
    return losses[0], losses[-1]

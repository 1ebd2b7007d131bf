"""What a run found: the JSON, and the lines on the screen."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import re
import statistics
import subprocess
from pathlib import Path
from typing import Any

import jax

import fast_layers
from bench.cases import Case, Pass

SCHEMA = 1
ROOT = Path(__file__).parents[1]
TOLERANCE = 0.03
"""A peer whose values lie further from the yardstick's (relative, in norm) computes something else: it cannot win."""
PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "flax",
    "tokamax",
    "torch",
    "triton",
    "flash-attn-4",
    "flash-linear-attention",
    "jax-linear-attention",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12",
    "nvidia-cuda-nvcc",
)


def environment(command: str, date: str) -> dict[str, Any]:
    versions = {"fast_layers": fast_layers.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "schema": SCHEMA,
        "command": command,
        "date": date,
        "device": jax.devices()[0].device_kind,
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        **tree_facts(ROOT),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": versions,
    }


def tree_facts(root: Path) -> dict[str, Any]:
    """`commit` of the tree that is measured, and whether it is `dirty`: package or benchmarks differ from the commit's.

    A copy by `git archive` has no .git, and git might answer for one further up; there archived_commit.txt says the
    commit, which git wrote into it (.gitattributes), and nothing knows whether the copy was changed since. So the
    variable BENCH_COMMIT may say both, as "COMMIT" or "COMMIT-dirty".
    """
    if said := os.environ.get("BENCH_COMMIT"):
        return {"commit": said.removesuffix("-dirty"), "dirty": said.endswith("-dirty")}
    top = _first_line("git", "rev-parse", "--show-toplevel", cwd=root)
    if top is not None and Path(top).resolve() == root.resolve():
        changed = _output("git", "status", "--porcelain", "--", "fast_layers", "bench", cwd=root)
        commit = _first_line("git", "rev-parse", "HEAD", cwd=root)
        return {"commit": commit, "dirty": None if changed is None else bool(changed)}
    written = root / "bench" / "archived_commit.txt"
    commit = written.read_text().strip() if written.exists() else ""
    return {"commit": commit if re.fullmatch("[0-9a-f]{40}", commit) else None, "dirty": None}


def _first_line(*command: str, cwd: Path | None = None) -> str | None:
    """A fact about the machine or the tree that some do not have."""
    return next(iter((_output(*command, cwd=cwd) or "").splitlines()), None)


def _output(*command: str, cwd: Path | None = None) -> str | None:
    """None if it failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=cwd)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@dataclasses.dataclass
class Row:
    """One peer in one cell. `seconds` is the median over `calls`; None where `refused` says why there is no time.

    `batch_seconds` is the wall clock's view, per call in a batch of calls with one wait: far above `seconds`, the
    host or something that is no kernel takes the time. `tiles` are those of 128 queries and 128 keys of any head that
    the mask does not hide whole: time over tiles is what a call may be measured by where a mask hides most of them.
    """

    group: str
    case: str
    batch: int
    length: int
    kv_length: int
    heads: int
    kv_heads: int
    depth: int
    v_depth: int
    dtype: str
    mask: str
    causal: bool
    pass_: Pass
    name: str
    ours: bool
    flops: float
    bytes: int
    tiles: int
    seconds: float | None = None
    fastest: float | None = None
    slowest: float | None = None
    calls: int = 0
    batch_seconds: float | None = None
    method: str | None = None
    distance: float | None = None
    backend: str | None = None
    temp_bytes: int | None = None
    refused: str | None = None

    @classmethod
    def of(cls, case: Case, pass_: Pass, name: str, ours: bool, **more: Any) -> Row:
        return cls(
            case.group,
            case.name,
            case.batch,
            case.q_len,
            case.kv_len,
            case.heads,
            case.kv_heads,
            *case.depths,
            case.dtype,
            case.mask,
            case.causal,
            pass_,
            name,
            ours,
            case.flops(pass_),
            case.bytes(pass_),
            case.visible_tiles() * case.heads,
            **more,
        )

    def time(self, taken: list[float]) -> None:
        self.seconds, self.calls = statistics.median(taken), len(taken)
        self.fastest, self.slowest = min(taken), max(taken)

    @property
    def agrees(self) -> bool:
        return self.distance is None or self.distance <= TOLERANCE

    @property
    def rate(self) -> float:
        """TFLOP/s, or GB/s where a few queries read a long cache."""
        assert self.seconds is not None
        work = self.bytes * 1e-9 if self.in_bytes else self.flops * 1e-12
        return work / self.seconds

    @property
    def in_bytes(self) -> bool:
        return self.length != self.kv_length

    @property
    def unit(self) -> str:
        return "GB/s" if self.in_bytes else "TFLOP/s"

    def as_json(self) -> dict[str, Any]:
        row = dataclasses.asdict(self)
        row["pass"] = row.pop("pass_")
        if self.distance is not None and not math.isfinite(self.distance):
            row["distance"] = None
        row["agrees"] = self.agrees
        row["rate"] = self.rate if self.seconds else None
        row["unit"] = self.unit
        return row


@dataclasses.dataclass
class Cell:
    """All peers on one case and pass."""

    rows: list[Row]

    def row(self, name: str) -> Row | None:
        return next((row for row in self.rows if row.name == name and row.seconds is not None), None)

    @property
    def best_peer(self) -> Row | None:
        timed = [row for row in self.rows if not row.ours and row.seconds is not None and row.agrees]
        return min(timed, key=lambda row: row.seconds or 0.0, default=None)

    @property
    def ratio(self) -> float | None:
        """How many times as fast as the best peer fast_layers is."""
        ours, best = self.row("fast_layers"), self.best_peer
        if ours is None or best is None or not ours.agrees:
            return None
        assert ours.seconds is not None
        assert best.seconds is not None
        return best.seconds / ours.seconds

    @property
    def group_and_pass(self) -> tuple[str, str]:
        return self.rows[0].group, self.rows[0].pass_

    def text(self) -> str:
        head = f"{self.rows[0].group}: {self.rows[0].case} {self.rows[0].pass_}"
        best = self.best_peer
        lines = []
        for row in self.rows:
            if row.seconds is None:
                continue
            line = f"  {row.name:<20} {1e3 * row.seconds:9.4f} ms {row.rate:8.4g} {row.unit}"
            if best is not None and best.seconds is not None:
                line += f" {best.seconds / row.seconds:6.2f}x"
            if row.backend:
                line += f"  by {row.backend}"
            if not row.agrees:
                line += f"  VALUES DIFFER: distance {row.distance:.3g}"
            lines.append(line)
        return "\n".join([head, *lines])


NOT_REACHED = "not reached"


def shorten(text: str, length: int) -> str:
    """The beginning and the end: a wrapped traceback has its reason last."""
    half = length // 2
    return text if len(text) <= length else f"{text[:half]} [..] {text[-half:]}"


def geometric_mean(ratios: list[float]) -> float:
    return math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))


@dataclasses.dataclass
class Report:
    environment: dict[str, Any]
    absent: dict[str, str]
    path: Path | None = None
    roofs: dict[str, float] = dataclasses.field(default_factory=dict)
    cells: list[Cell] = dataclasses.field(default_factory=list)
    not_reached: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def means(self) -> dict[str, float]:
        """Geometric means of the ratios to the best peer, by "group pass"."""
        groups: dict[str, list[float]] = {}
        for cell in self.cells:
            if cell.ratio is not None:
                groups.setdefault(" ".join(cell.group_and_pass), []).append(cell.ratio)
                if cell.group_and_pass[0] in ("d64", "d128", "d256"):
                    groups.setdefault(f"main {cell.group_and_pass[1]}", []).append(cell.ratio)
        return {name: geometric_mean(ratios) for name, ratios in groups.items()}

    @property
    def ours_failed(self) -> bool:
        """Whether fast_layers' turn came and it was timed nowhere."""
        refusals = [row.refused for cell in self.cells for row in cell.rows if row.ours]
        reached = [refused for refused in refusals if not (refused or "").startswith(NOT_REACHED)]
        return bool(reached) and None not in reached

    def as_json(self) -> dict[str, Any]:
        return {
            **self.environment,
            "roofs": self.roofs,
            "absent": self.absent,
            "not_reached": self.not_reached,
            "notes": self.notes,
            "ratio_to_best_peer": self.means(),
            "rows": [row.as_json() for cell in self.cells for row in cell.rows],
        }

    def write(self) -> None:
        """All at once, so that a run that is killed leaves the last whole state."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(self.as_json(), indent=1) + "\n")
        unfinished.replace(self.path)

    def summary(self) -> str:
        lines = ["", f"{'cell':<58} {'fast_layers':>11} {'again':>8} {'best peer':>9} {'ns/tile':>8}  ratio"]
        for cell in self.cells:
            ours, again, best = cell.row("fast_layers"), cell.row("again"), cell.best_peer
            rates = [f"{row.rate:.4g}" if row else "-" for row in (ours, again, best)]
            ratio = f"{cell.ratio:.3f} {best.name}" if cell.ratio and best else f"-     {best.name if best else ''}"
            name = f"{cell.rows[0].case} {cell.rows[0].pass_}"
            each = f"{1e9 * ours.seconds / ours.tiles:.4g}" if ours and ours.seconds else "-"
            lines.append(f"{name:<58} {rates[0]:>11} {rates[1]:>8} {rates[2]:>9} {each:>8}  {ratio}")
        lines += ["", "geometric means of the ratio to the best peer (more than 1: fast_layers is faster):"]
        lines += [f"  {name:<28} {ratio:.3f}" for name, ratio in self.means().items()] or ["  no cell has both"]
        lines += [f"roof: {name} {value:.4g}" for name, value in self.roofs.items()]
        reasons: dict[tuple[str, str], int] = {}
        for cell in self.cells:
            for row in cell.rows:
                if row.refused:
                    at = row.name, shorten(row.refused, 240)
                    reasons[at] = reasons.get(at, 0) + 1
        lines += [f"not here: {name}: {reason}" for name, reason in self.absent.items()]
        lines += [f"refused: {name}: {reason} ({count} cells)" for (name, reason), count in reasons.items()]
        lines += [f"note: {note}" for note in self.notes]
        if self.not_reached:
            lines.append(f"not reached: {len(self.not_reached)} cells, from {self.not_reached[0]} on")
        return "\n".join(lines)

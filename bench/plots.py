"""The pictures of a run: bars per shape, and for attention the roofline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Patch

from bench.cases import depths_name
from bench.report import Cell, Report

COLUMNS = 4


class Bar(NamedTuple):
    rate: float
    agrees: bool


class Panel(NamedTuple):
    title: str
    unit: str
    groups: list[tuple[str, dict[str, Bar]]]
    """Their labels, and a bar for each name."""


def _title(facts: dict[str, Any]) -> str:
    return f"{facts['device']}, jax {facts['versions']['jax']}, {facts['date'][:10]}"


def bars(report: Report, path: Path) -> bool:
    """One panel per group, depth, mask and pass; a bar per peer and length. False, and no picture, where nothing was
    timed."""
    panels: dict[str, list[Cell]] = {}
    for cell in report.cells:
        if any(row.seconds is not None for row in cell.rows):
            row = cell.rows[0]
            depths = depths_name(row.depth, row.v_depth)
            panels.setdefault(f"{row.group} {depths} {row.mask}, {row.pass_}, {row.unit}", []).append(cell)
    drawn = []
    for title, cells in panels.items():
        cells.sort(key=lambda cell: (cell.rows[0].kv_length, cell.rows[0].heads, cell.rows[0].batch))
        groups = []
        for cell in cells:
            timed = [row for row in cell.rows if row.seconds is not None]
            groups.append((_label(cell), {row.name: Bar(row.rate, row.agrees) for row in timed}))
        drawn.append(Panel(title, cells[0].rows[0].unit, groups))
    draw_bars(drawn, _title(report.environment), path)
    return bool(drawn)


def mlp_bars(report: dict[str, Any], path: Path) -> bool:
    """One panel per width, kind and pass; a bar per peer and number of tokens. `report` is what `bench mlp` writes.

    False, and no picture, where nothing was timed.
    """
    panels: dict[str, Panel] = {}
    groups: dict[tuple[str, str], dict[str, Bar]] = {}
    for row in report["rows"]:
        if row["seconds"] is None:
            continue
        title = f"{row['case'].partition(' ')[2]}, {row['pass']}"
        panel = panels.setdefault(title, Panel(title, "TFLOP/s", []))
        label = f"{row['tokens']} tokens"
        if (title, label) not in groups:
            groups[title, label] = {}
            panel.groups.append((label, groups[title, label]))
        groups[title, label][row["name"]] = Bar(row["tflops"], row["agrees"])
    draw_bars(list(panels.values()), _title(report), path)
    return bool(panels)


def draw_bars(panels: Sequence[Panel], title: str, path: Path) -> None:
    if not panels:
        return
    names = list(dict.fromkeys(name for panel in panels for _, bars in panel.groups for name in bars))
    colours = dict(zip(names, plt.get_cmap("tab20")(np.linspace(0, 1, 20)), strict=False))
    colours |= {"fast_layers": "black", "again": "dimgray"}
    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure, axes = plt.subplots(rows, columns, figsize=(6 * columns, 3.2 * rows), squeeze=False, layout="constrained")
    for ax in axes.flat[len(panels) :]:
        ax.axis("off")
    for ax, panel in zip(axes.flat, panels, strict=False):
        width = 0.85 / len(names)
        for position, (_, bars) in enumerate(panel.groups):
            for offset, name in enumerate(names):
                if name in bars:
                    bar, at = bars[name], position + (offset - (len(names) - 1) / 2) * width
                    ax.bar(at, bar.rate, width, color=colours[name], hatch=None if bar.agrees else "//")
        ax.set_xticks(range(len(panel.groups)), [label for label, _ in panel.groups], fontsize=7)
        ax.set_ylabel(panel.unit)
        ax.set_title(panel.title, fontsize=9)
    handles = [Patch(color=colours[name]) for name in names]
    figure.legend(handles, names, loc="outside lower center", ncols=6, fontsize=8)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _label(cell: Cell) -> str:
    row = cell.rows[0]
    if row.in_bytes:
        return f"B{row.batch} q{row.length}\n{row.kv_length}"
    return f"{row.length}" if row.heads == row.kv_heads else f"{row.length}\n{row.heads}/{row.kv_heads}"


def roofline(report: Report, path: Path) -> None:
    """Arithmetic intensity against TFLOP/s, under the roofs that this run measured."""
    figure, ax = plt.subplots(figsize=(8, 5.5), layout="constrained")
    intensities = []
    for who, marker in (("best peer", "o"), ("fast_layers", "x")):
        for pass_, colour in (("forward", "tab:blue"), ("backward", "tab:red"), ("forward+backward", "tab:purple")):
            points = []
            for cell in report.cells:
                row = cell.best_peer if who == "best peer" else cell.row(who)
                if row is not None and row.seconds is not None and row.pass_ == pass_:
                    points.append((row.flops / row.bytes, row.flops * 1e-12 / row.seconds))
            if points:
                ax.scatter(
                    *zip(*points, strict=True), marker=marker, s=28, alpha=0.7, c=colour, label=f"{who}, {pass_}"
                )
                intensities += [x for x, _ in points]
    matmul, copy = report.roofs["matmul TFLOP/s"], report.roofs["copy GB/s"]
    low, high = min([1.0, *intensities]) / 2, max([1e4, *intensities]) * 2
    x = np.geomspace(low, high, 200)
    ax.plot(
        x, np.minimum(matmul, x * copy * 1e-3), "k-", lw=1, label=f"matmul {matmul:.3g} TFLOP/s, copy {copy:.4g} GB/s"
    )
    ax.set(xscale="log", yscale="log", xlabel="FLOPs per byte of inputs and outputs", ylabel="TFLOP/s")
    ax.set_title(_title(report.environment))
    ax.grid(True, which="both", alpha=0.2)
    ax.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)

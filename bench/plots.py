"""The two pictures of a run: bars per shape, and the roofline."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Patch

from bench.report import Cell, Report

COLUMNS = 4


def _title(report: Report) -> str:
    versions = report.environment["versions"]
    return f"{report.environment['device']}, jax {versions['jax']}, {report.environment['date'][:10]}"


def bars(report: Report, path: Path) -> None:
    """One panel per group, depth, mask and pass; a bar per peer and length."""
    panels: dict[str, list[Cell]] = {}
    for cell in report.cells:
        if any(row.seconds is not None for row in cell.rows):
            row = cell.rows[0]
            panels.setdefault(f"{row.group} D{row.depth} {row.mask}, {row.pass_}, {row.unit}", []).append(cell)
    if not panels:
        return
    names = list(dict.fromkeys(row.name for cell in report.cells for row in cell.rows if row.seconds is not None))
    colours = dict(zip(names, plt.get_cmap("tab20")(np.linspace(0, 1, 20)), strict=False))
    colours |= {"fast_layers": "black", "again": "dimgray"}
    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure, axes = plt.subplots(rows, columns, figsize=(6 * columns, 3.2 * rows), squeeze=False, layout="constrained")
    for ax in axes.flat[len(panels) :]:
        ax.axis("off")
    for ax, (title, cells) in zip(axes.flat, panels.items(), strict=False):
        cells = sorted(cells, key=lambda cell: (cell.rows[0].kv_length, cell.rows[0].heads, cell.rows[0].batch))
        width = 0.85 / len(names)
        for position, cell in enumerate(cells):
            for offset, name in enumerate(names):
                row = cell.row(name)
                if row is not None:
                    at = position + (offset - (len(names) - 1) / 2) * width
                    ax.bar(at, row.rate, width, color=colours[name], hatch=None if row.agrees else "//")
        ax.set_xticks(range(len(cells)), [_label(cell) for cell in cells], fontsize=7)
        ax.set_ylabel(cells[0].rows[0].unit)
        ax.set_title(title, fontsize=9)
    handles = [Patch(color=colours[name]) for name in names]
    figure.legend(handles, names, loc="outside lower center", ncols=6, fontsize=8)
    figure.suptitle(_title(report))
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
    ax.set_title(_title(report))
    ax.grid(True, which="both", alpha=0.2)
    ax.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)

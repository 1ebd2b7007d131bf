"""`python -m fast_layers doctor`: is this machine able to run the kernels, and are their results right here?

One screen of 24 lines where all is well: the device, the versions that matter, a table of a parity run of every op and
backend, and which backends a typical call does not take, and why. What fails is told below, in full. The exit code is 1
if a backend is wrong or breaks down, else 0; known-bad versions are warnings. `--json` gives the same as data, with the
typical calls and each error. `--all` also runs what calls take by name only. Nearly all of its time goes by compiling,
in as many threads as there are cores; stderr says what is begun and done.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fast_layers import dispatch
from fast_layers._version import __version__
from fast_layers.arch import Arch, lowering_targets
from fast_layers.kernel_parts import automatic_axes
from fast_layers.testing import parity

_PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "jax-cuda12-plugin",
    "jax-cuda12-pjrt",
    "flax",
    "nvidia-cuda-nvcc",
    "nvidia-cuda-nvcc-cu12",
)
_SAFE_PTXAS = (13, 3)
_PTXAS_OF_FENCES = (12, 7)
"""The first of PTX ISA 8.6, with `fence.acquire` and `.sync_restrict`: 12.6 refuses both, 12.8 takes them."""
# Major versions, by docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html.
_OLDEST_DRIVERS = {"jax-cuda13-plugin": (13, 580), "jax-cuda12-plugin": (12, 525)}
_OLDER_CUDA = {13: ", install jax[cuda12] instead of jax[cuda13]"}
# First and first good version of the compiler that JAX refuses causal attention with: CUDA 12.8.0 to 12.9.0.
_MISCOMPILES_CAUSAL = ((12, 8, 0), (12, 9, 86))
_WIDTH = 100
_NO_BACKEND = "-"
_LEGEND = {
    "ok": "ok n%: worst error, in percent of its limit",
    "/": "n/m: took n of m passes",
    "by name": "by name: runs with --all",
    _NO_BACKEND: f"{_NO_BACKEND}: no such backend",
}
"""What cells of the table with these marks mean."""
_TAKES_LONGEST = "ssd"
"""To compile, so it is begun with."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="check device, versions, backends, and the kernels' results",
        description=(__doc__ or "").partition("\n\n")[2],
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--all", action="store_true", help="run backends too that calls take by name only")
    parser.set_defaults(run=lambda arguments: run(as_json=arguments.json, by_name=arguments.all))


def run(*, as_json: bool = False, by_name: bool = False) -> int:
    """Examine, print, and return the exit code."""
    report = examine(by_name=by_name)
    print(json.dumps(report.as_data(), indent=1) if as_json else report)
    return 0 if report.ok else 1


@dataclasses.dataclass(frozen=True)
class BackendReport:
    """One backend of one op: whether it takes the op's typical call, and its parity over the quick cases.

    Why it refuses that call, per pass: `refusals` where the call names no backend (or, with `--all`, as in `by_name`),
    `by_name` where it names this one.
    """

    name: str
    refusals: dict[str, str | None]
    by_name: dict[str, str | None]
    parity: parity.ParityTable

    @property
    def measured(self) -> tuple[parity.Row, ...]:
        return tuple(row for row in self.parity.rows if row.quantity is not None)

    @property
    def worst_share(self) -> float:
        """The largest error, as a part of its limit."""
        shares = [row.error / row.limit for row in self.measured if row.error is not None and row.limit]
        return max(shares, default=0.0)

    def cell(self) -> str:
        """All of it in a word or two."""
        if not self.parity.ok:
            return "FAILED"
        asked = len({(row.case, row.dtype, row.pass_) for row in self.parity.rows})
        taken = asked - len(self.parity.refusals)
        if taken:
            words = f"ok {self.worst_share:.0%}"
        elif None in self.refusals.values():
            words = "usable"
        else:
            return "by name" if None in self.by_name.values() else "refused"
        return words if taken == asked else f"{words} {taken}/{asked}"

    def objections(self, op: str) -> Iterator[tuple[str, str, str]]:
        """(reason, to what, pass) of what it refuses: the typical call, and cases in passes that it takes that one in.

        What it refuses even by name is the better reason: naming it would not help.
        """
        for pass_, refusal in self.refusals.items():
            if refusal is not None:
                yield self.by_name[pass_] or refusal, op, pass_
        for row in self.parity.refusals:
            if row.refusal is not None and self.refusals[row.pass_] is None:
                yield row.refusal, f"{op} ({row.case})", row.pass_


@dataclasses.dataclass(frozen=True)
class OpReport:
    """All backends of one op but the reference; `typical` describes the call that they are asked about."""

    op: str
    typical: str
    cases: int
    backends: tuple[BackendReport, ...]

    def cells(self, names: Sequence[str]) -> list[str]:
        """The op's row of the table whose columns are the backends of these names."""
        own = {backend.name: backend.cell() for backend in self.backends}
        return [self.op, str(self.cases), *(own.get(name, _NO_BACKEND) for name in names)]


@dataclasses.dataclass(frozen=True)
class Report:
    """What `examine` found; `str()` of it is the screen to read."""

    devices: tuple[str, ...]
    arch: Arch
    versions: dict[str, str]
    warnings: tuple[str, ...]
    ops: tuple[OpReport, ...]

    @property
    def ok(self) -> bool:
        return all(backend.parity.ok for op in self.ops for backend in op.backends)

    def as_data(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "devices": list(self.devices),
            "platform": self.arch.platform,
            "capability": None if self.arch.capability is None else list(self.arch.capability),
            "versions": self.versions,
            "warnings": list(self.warnings),
            "backends": [
                {
                    "op": op.op,
                    "typical": op.typical,
                    "name": backend.name,
                    "refusals": backend.refusals,
                    "parity": json.loads(backend.parity.to_json()),
                }
                for op in self.ops
                for backend in op.backends
            ],
        }

    def __str__(self) -> str:
        lines = _wrapped("device", ", ".join(self.devices))
        lines += _wrapped("versions", ", ".join(_versions_in_words(self.versions)))
        for warning in self.warnings:
            lines += _wrapped("WARNING", warning)
        lines += ["", *_table(self.ops), *_reasons(self.ops), ""]
        if failures := _failures(self.ops):
            lines += [*failures, ""]
        return "\n".join([*lines, *textwrap.wrap(self._verdict(), _WIDTH)])

    def _verdict(self) -> str:
        if not self.ok:
            wrong = (f"{b.name} of {op.op}" for op in self.ops for b in op.backends if not b.parity.ok)
            return f"FAILED: do not trust {', '.join(wrong)}"
        measured = sum(len(backend.measured) for op in self.ops for backend in op.backends)
        doubt = ", but for the warnings above" if self.warnings else ""
        return f"all is well{doubt}: {measured} quantities are within their limits"


def _wrapped(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, break_on_hyphens=False, initial_indent=f"{label:<9} ", subsequent_indent=" " * 10
    )


def _versions_in_words(versions: dict[str, str]) -> list[str]:
    """Neighbours of one version together: jax/jaxlib 0.12.0."""
    return [f"{'/'.join(names)} {version}" for version, names in itertools.groupby(versions, versions.__getitem__)]


def _table(ops: Sequence[OpReport]) -> list[str]:
    """A row for each op, a column for each backend; and what the cells mean, as far as they are there."""
    names = list(dict.fromkeys(backend.name for op in ops for backend in op.backends))
    rows = [["op", "cases", *names], *(op.cells(names) for op in ops)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    cells = [cell for row in rows[1:] for cell in row[2:]]
    meanings = [meaning for mark, meaning in _LEGEND.items() if any(mark in cell for cell in cells)]
    return [*lines, *textwrap.wrap("; ".join(meanings), _WIDTH, break_on_hyphens=False)]


def _reasons(ops: Sequence[OpReport]) -> list[str]:
    """Each reason of a backend once, and before it what it refuses for that."""
    ops_of: dict[str, list[str]] = {}
    passes_at: dict[tuple[str, str], dict[str, list[str]]] = {}
    for op in ops:
        for backend in op.backends:
            ops_of.setdefault(backend.name, []).append(op.op)
            for reason, place, pass_ in backend.objections(op.op):
                passes_at.setdefault((backend.name, reason), {}).setdefault(place, []).append(pass_)
    order = list(ops_of)
    lines = []
    for name, reason in sorted(passes_at, key=lambda found: order.index(found[0])):
        refused = passes_at[name, reason]
        places = [place if len(passes) > 1 else f"{place} {passes[0]}" for place, passes in refused.items()]
        where = "all its ops" if places == ops_of[name] and len(places) > 1 else ", ".join(places)
        lines += _wrapped(name, f"{where}: {reason}")
    if not lines:
        return ["every backend takes a call as in training a language model (--json shows it)"]
    return ["why not, for a call as in training a language model (--json shows it), or for a case of the run:", *lines]


def _failures(ops: Sequence[OpReport]) -> list[str]:
    return [
        line
        for op in ops
        for backend in op.backends
        for row in backend.parity.failures
        for line in _wrapped("FAILED", f"{op.op}, {row.backend}, {row.case}, {row.dtype}, {row.pass_}: {row.failure}")
    ]


def examine(*, by_name: bool = False) -> Report:
    """Look at everything; runs the quick parity cases of every op and backend on the default device.

    Backends that a typical call gets by name only, most of which no GPU has run, are left out unless `by_name`, and so
    are a pass's cases; those that it gets by itself take all cases, though calls of their size may be left to XLA.
    """
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - started:5.1f} s  {text}", file=sys.stderr, flush=True)

    arch = lowering_targets()[0]
    versions = _versions(arch)
    with parity.compilers() as pool, automatic_axes.on_one_device():
        checks = {op: _Examination(suite, arch, by_name, pool) for op, suite in parity.SUITES.items()}
        for op in sorted(checks, key=_TAKES_LONGEST.__ne__):
            say(f"checking {op}: {checks[op].begin()}")
        for op, check in checks.items():
            say(f"compiled {op}{check.wait()}")
        ops = []
        for op, check in checks.items():
            ops.append(check.finish())
            say(f"ran {op}")
    return Report(_devices(), arch, versions, warnings_of(versions), tuple(ops))


class _Examination:
    """One op: made, `begin` and `finish`, so that the programs of all ops are compiled at the same time."""

    def __init__(self, suite: parity.Suite, arch: Arch, by_name: bool, pool: parity.Compilers):
        self._suite, self._arch, self._problem = suite, arch, suite.typical()
        self._backends = [backend for backend in suite.backends() if backend.name != "reference"]
        self._asked = [_asked(backend, self._problem, arch, by_name) for backend in self._backends]
        self._check = parity.Check(suite.op, pool, self._asked, suite.quick, [jnp.bfloat16])

    def begin(self) -> str:
        """What there is to be run, in words."""
        names = ", ".join(backend.name for backend in self._asked)
        return f"{names}; {self._check.lower().programs} programs"

    def wait(self) -> str:
        """What is compiled later, in words."""
        self._check.wait()
        later = self._check.left_for_later
        return f", all but {later} of its programs, which wait until they run" if later else ""

    def finish(self) -> OpReport:
        table = self._check.table()
        backends = tuple(
            BackendReport(backend.name, self._refusals(asked), self._refusals(backend), table.of_backend(backend.name))
            for backend, asked in zip(self._backends, self._asked, strict=True)
        )
        return OpReport(self._suite.op, self._problem.describe(), len(self._suite.quick), backends)

    def _refusals(self, backend: dispatch.Backend) -> dict[str, str | None]:
        return {pass_: backend.supports(self._problem, self._arch, pass_) for pass_ in dispatch.PASSES}


def _asked(backend: dispatch.Backend, typical: Any, arch: Arch, by_name: bool) -> dispatch.Backend:
    """The backend as it is to be examined: what its `supports` says of a case depends on the typical call."""
    taken = {pass_: by_name or backend.refuses(typical, arch, pass_) is None for pass_ in dispatch.PASSES}

    def supports(problem: Any, arch: Arch, pass_: dispatch.Pass) -> str | None:
        return backend.refuses(problem, arch, pass_, by_name=taken[pass_])

    return dataclasses.replace(backend, supports=supports)


def _devices() -> tuple[str, ...]:
    kinds: dict[str, int] = {}
    for device in jax.devices():
        name = str(Arch.of_device(device))
        kinds[name] = kinds.get(name, 0) + 1
    return tuple(f"{count} x {name}" if count > 1 else name for name, count in kinds.items())


def _versions(arch: Arch) -> dict[str, str]:
    versions = {"fast_layers": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if arch.platform == "cuda":
        versions |= _cuda_versions()
    driver = _driver()
    if driver is not None or arch.platform == "cuda":
        versions["driver"] = driver or "unknown"
    if (found := _ptxas()) is not None:
        path, version = found
        versions |= {"ptxas": version, "ptxas path": path}
    return versions


def _cuda_versions() -> dict[str, str]:
    from jax._src.lib import cuda_versions

    if cuda_versions is None:
        return {}
    found = {}
    for name, read in (
        ("CUDA runtime", "cuda_runtime_get_version"),
        ("CUDA of the driver", "cuda_driver_get_version"),
        ("cuDNN", "cudnn_get_version"),
    ):
        try:
            found[name] = str(getattr(cuda_versions, read)())
        except (AttributeError, RuntimeError) as error:
            found[name] = f"unknown ({error})"
    return found


def _ptxas() -> tuple[str, str] | None:
    """(path, version) of the ptxas that XLA is likely to run: of the wheels, of CUDA_HOME, or on the path."""
    candidates = []
    for package in ("nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12"):
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        candidates += [str(file.locate()) for file in files if file.name == "ptxas"]
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            candidates.append(str(Path(home, "bin", "ptxas")))
    candidates += [path for path in (shutil.which("ptxas"), "/usr/local/cuda/bin/ptxas") if path]
    for path in candidates:
        try:
            done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue  # not there, or not runnable: the next one
        if match := re.search(r"V(\d+(?:\.\d+)+)", done.stdout):
            return path, match[1]
    return None


def _driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return None if match is None else match[1]


def warnings_of(versions: dict[str, str]) -> tuple[str, ...]:
    """What is known to go wrong with these versions."""
    return (*_warnings_of_driver(versions), *_warnings_of_ptxas(versions))


def _warnings_of_driver(versions: dict[str, str]) -> tuple[str, ...]:
    text = versions.get("driver", "")
    if not (major := text.partition(".")[0]).isdigit():
        return ()
    return tuple(
        f"the NVIDIA driver {text} is older than {oldest}, the first that runs CUDA {cuda}, which {plugin} is made "
        f"for; update the driver{_OLDER_CUDA.get(cuda, '')}, or install NVIDIA's forward compatibility package"
        for plugin, (cuda, oldest) in _OLDEST_DRIVERS.items()
        if plugin in versions and int(major) < oldest
    )


def _warnings_of_ptxas(versions: dict[str, str]) -> tuple[str, ...]:
    if "ptxas" not in versions:
        return ()
    text = versions["ptxas"]
    ptxas = tuple(int(part) for part in text.split("."))
    found = []
    if ptxas < _SAFE_PTXAS:
        found.append(
            f"ptxas {text} is older than 13.3: it can overwrite register operands of a wgmma in flight (seen with "
            "12.8, 12.9 and 13.0), so Hopper kernels may be wrong; pip install -U nvidia-cuda-nvcc"
        )
    if ptxas < _PTXAS_OF_FENCES:
        found.append(
            f"ptxas {text} is of CUDA 12.6 or earlier, which does not know the fences of some Hopper kernels (decoding "
            "with few examples, long backwards): they do not compile; update to CUDA 12.9.1 or later"
        )
    first, first_good = _MISCOMPILES_CAUSAL
    if first <= ptxas < first_good:
        found.append(
            f"ptxas {text} is of CUDA 12.8.0 to 12.9.0, which miscompiles causal attention kernels; update to CUDA "
            "12.9.1 or later"
        )
    return tuple(found)

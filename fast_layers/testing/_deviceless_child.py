"""The process that compiles: `python -m fast_layers.testing._deviceless_child JOB RESULT`.

JOB and RESULT are files of pickles. Each compilation runs in a fork of its own, taken after the slow imports and
before any back end starts, so that it finds no kernel in a cache, may crash, and may be ended when it takes too long.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib
import math
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.experimental.pallas.mosaic_gpu
import numpy as np
from jax.experimental import topologies
from jax.experimental.mosaic.gpu import utils as mgpu_utils

from fast_layers.testing import _deviceless_sass as sass
from fast_layers.testing._deviceless_targets import Target
from fast_layers.testing.deviceless import Compilation, CompileReport, KernelReport


@dataclasses.dataclass(frozen=True, slots=True)
class _DeviceWithCapability(jax.sharding.AbstractDevice):
    """What an abstract mesh tells those who ask what is compiled for: JAX's kernels and this package's dispatch."""

    compute_capability: str = ""


def main(job_path: str, result_path: str) -> None:
    gpu, target, timeout, backends, settings, jobs = pickle.loads(Path(job_path).read_bytes())
    warnings.filterwarnings("ignore", message=".*os.fork.*", category=RuntimeWarning)
    for name, value in settings.items():
        jax.config.update(name, value)
    with backends():
        reports = [_compile_in_fork(gpu, target, timeout, pickled) for pickled in jobs]
    Path(result_path).write_bytes(pickle.dumps(reports))


def _compile_in_fork(gpu: str, target: Target, timeout: float, pickled: bytes) -> CompileReport:
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        process = os.fork()
        log, written = Path(folder) / "log", Path(folder) / "report"
        if process == 0:
            _report_and_exit(gpu, target, timeout, pickled, log, written)
        _, status = os.waitpid(process, 0)
        if written.exists():
            report = pickle.loads(written.read_bytes())
        elif os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
            report = CompileReport(gpu, failure=f"not compiled after {timeout:g} s")
        else:
            code = os.waitstatus_to_exitcode(status)
            report = CompileReport(gpu, failure=f"the process ended before it could report (exit code {code})")
        if report.failure is not None and (said := _complaints(log)):
            report = dataclasses.replace(report, failure=f"{report.failure}\nThe compiler said:\n{said}")
    return dataclasses.replace(report, seconds=time.monotonic() - started)


def _report_and_exit(gpu: str, target: Target, timeout: float, pickled: bytes, log: Path, written: Path) -> NoReturn:
    """Never returns, lest this process went on as the one that it was forked from."""
    try:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
        signal.alarm(max(1, round(timeout)))
        report = _compile(gpu, target, pickled, log.parent)
        unfinished = written.with_suffix(".unfinished")
        unfinished.write_bytes(pickle.dumps(report))
        unfinished.replace(written)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    # Threads of XLA may still run; there is nothing left to tidy.
    os._exit(0)


def _complaints(log: Path) -> str:
    """The last lines of the log that are about errors: jax 0.11 tells no more than that a pass failed."""
    lines = (line.strip() for line in log.read_text(errors="replace").splitlines())
    return "\n".join([line for line in lines if "error" in line.lower()][-10:])


def _compile(gpu: str, target: Target, pickled: bytes, folder: Path) -> CompileReport:
    # Not MOSAIC_GPU_DUMP_TO: by that all passes' results would be written, which takes as long as making them. Others
    # would be printed among the PTX.
    for name in [name for name in os.environ if name.startswith("MOSAIC_GPU_DUMP_")]:
        del os.environ[name]
    os.environ |= {"MOSAIC_GPU_DUMP_RESOURCES": "1", "MOSAIC_GPU_DUMP_PTX": "1"}
    resources: dict[str, str] = {}
    mgpu_utils.dump_to_file_or_stdout = lambda content, name, path: resources.update({name: content})
    ptx = folder / "ptx"
    os.dup2(os.open(ptx, os.O_WRONLY | os.O_CREAT), sys.stdout.fileno())
    try:
        compiled = _lower_and_compile(target, pickle.loads(pickled))
        kernels = _kernel_reports(resources, _kernels_in(ptx, folder), target)
    except (Exception, SystemExit) as error:
        # Whatever the function or the compiler objects to is the result; a module may be a program, and end.
        return CompileReport(gpu, failure=f"{type(error).__name__}: {error}")
    memory = compiled.memory_analysis()
    return CompileReport(
        gpu,
        kernels,
        temp_bytes=memory.temp_size_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        result_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
    )


def _lower_and_compile(target: Target, job: Compilation) -> Any:
    fn = _import(job.fn) if isinstance(job.fn, str) else job.fn
    with described(target) as replicated:
        args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), job.shapes)
        call = jax.jit(lambda *args: fn(*args, **job.static), donate_argnums=job.donated)
        return call.lower(*args).compile()


@contextlib.contextmanager
def described(target: Target, mesh: Mapping[str, int] | None = None) -> Iterator[jax.sharding.NamedSharding]:
    """What is compiled in here is compiled for one such GPU, or for those of a `mesh` of automatic axes: the sharding
    that whole arguments must have."""
    axes = dict(mesh or {"one": 1})
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target.xla_description, topology=f"1x1x{math.prod(axes.values())}"
    )
    devices = np.array(topology.devices).reshape(tuple(axes.values()))
    gpus = jax.sharding.Mesh(devices, tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes))
    known = gpus.abstract_mesh.abstract_device
    device = _DeviceWithCapability(
        known.device_kind, known.num_cores, known.platform, ".".join(map(str, target.capability))
    )
    with jax.sharding.use_abstract_mesh(gpus.abstract_mesh.update(abstract_device=device)):
        yield jax.sharding.NamedSharding(gpus, jax.sharding.PartitionSpec())


def _import(reference: str) -> Any:
    module, _, name = reference.partition(":")
    value = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value


_PTX_BEGINS = "// Generated by LLVM NVPTX Back-End"
_PTX_ENTRY = re.compile(r"^\.visible \.entry (\w+)_mosaic_gpu_kernel\(", re.MULTILINE)


def _kernels_in(printed: Path, folder: Path) -> list[tuple[str, Path]]:
    """Each kernel's name, and a file with its PTX."""
    kernels = []
    for i, text in enumerate(printed.read_text().split(_PTX_BEGINS)[1:]):
        path = folder / f"{i}.ptx"
        path.write_text(text)
        if (entry := _PTX_ENTRY.search(text)) is None:
            raise RuntimeError(f"the compiler printed PTX without a kernel's entry, which begins {text[:200]!r}")
        kernels.append((entry[1], path))
    return kernels


def _kernel_reports(
    resources: Mapping[str, str], kernels: list[tuple[str, Path]], target: Target
) -> tuple[KernelReport, ...]:
    """One for each different kernel. What it allocates was told when it was lowered, under a number of its own."""
    allocations = collections.defaultdict(set)
    for name, text in resources.items():
        allocations[re.sub(r"_\d+\.resources\.txt$", "", name)].add(_shared_and_tensor_memory(text))
    if missing := sorted(set(allocations) - {name for name, _ in kernels}):
        raise RuntimeError(f"the compiler printed no PTX of {', '.join(missing)}")
    reports: list[KernelReport] = []
    for name, path in sorted(kernels):
        # Kernels of one name that allocate differently cannot be told apart.
        smem_bytes, tmem_columns = min(allocations[name]) if len(allocations[name]) == 1 else (None, None)
        assembly = sass.assemble(path, target.ptx_name)
        fields = {field.name: getattr(assembly, field.name) for field in dataclasses.fields(assembly)}
        report = KernelReport(name, smem_bytes=smem_bytes, tmem_columns=tmem_columns, **fields)
        if report not in reports:
            reports.append(report)
    return tuple(reports)


def _shared_and_tensor_memory(resources: str) -> tuple[int, int]:
    """Bytes of shared memory, barriers included, and columns of tensor memory."""

    def number(name: str) -> int:
        found = re.search(rf"\b{name}=(\d+)", resources)
        return int(found.group(1)) if found else 0

    barriers = re.findall(r"Barrier\([^)]*num_barriers=(\d+)[^)]*\): (\d+)", resources)
    barrier_bytes = sum(8 * int(count) * int(times) for count, times in barriers)
    columns = number("tmem_scratch_cols") + number("tmem_collective_scratch_cols")
    return number("smem_scratch_bytes") + barrier_bytes, columns


if __name__ == "__main__":
    main(*sys.argv[1:])

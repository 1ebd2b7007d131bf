"""Compile for GPUs that are not here, with the real assembler, and read what came out."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import pickle
import pickletools
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from fast_layers import dispatch
from fast_layers.testing import _deviceless_sass as sass
from fast_layers.testing import _timeout
from fast_layers.testing._deviceless_targets import TARGETS

_NOT_INHERITED = ("JAX_COMPILATION_CACHE_DIR", "JAX_DISABLE_MOST_OPTIMIZATIONS")
"""A program from a cache has no report, and reports are of what runs on a GPU."""
_CARRIED = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_numpy_dtype_promotion",
)
"""Settings of JAX's that change what a function means."""


class CompileError(RuntimeError):
    """A function did not compile, or its kernels spill registers or serialise their matmuls."""


@dataclasses.dataclass(frozen=True)
class Compilation:
    """A function and what to compile it for, as `compile_for` takes them; for `compile_all_for`.

    `Compilation("package.module:function", (x, y), {"tile": 64})`

    `donated` are positions in `shapes` whose memory the results may take, as jit's `donate_argnums`.
    """

    fn: Callable[..., Any] | str
    shapes: tuple[Any, ...]
    static: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    donated: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """One Mosaic-GPU kernel as the assembler made it.

    Attributes:
      name: the kernel body's function name.
      registers: of a thread, as ptxas allots them. A kernel that sets the registers of its warpgroups is given what
        its number of threads leaves (168 for three warpgroups); `live_registers` says more.
      live_registers: the most that are live at any instruction.
      register_budgets: what warpgroups set their registers to.
      spill_store_bytes, spill_load_bytes: as ptxas counts them.
      serialised_wgmma: ptxas' warnings C7510 to C7517, each with its reason.
      smem_bytes, tmem_columns: what the kernel allocates, barriers included; None if several kernels have this name.
      instructions: how many of each there are, by name up to the first dot: HGMMA, MUFU, FFMA, ...
    """

    name: str
    registers: int
    live_registers: int
    register_budgets: tuple[int, ...]
    spill_store_bytes: int
    spill_load_bytes: int
    serialised_wgmma: tuple[str, ...]
    smem_bytes: int | None
    tmem_columns: int | None
    instructions: Mapping[str, int]

    @property
    def local_stores(self) -> int:
        """STL instructions: with LDL, what a spill is made of."""
        return self.instructions.get("STL", 0)

    @property
    def local_loads(self) -> int:
        return self.instructions.get("LDL", 0)

    @property
    def spills(self) -> bool:
        return bool(self.spill_store_bytes or self.spill_load_bytes or self.local_stores or self.local_loads)

    @property
    def total_instructions(self) -> int:
        return sum(self.instructions.values())

    @property
    def faults(self) -> tuple[str, ...]:
        found = [f"wgmma serialised, {warning}" for warning in self.serialised_wgmma]
        if self.spills:
            found.append(
                f"spills {self.spill_store_bytes} bytes of stores and {self.spill_load_bytes} of loads, in "
                f"{self.local_stores} STL and {self.local_loads} LDL instructions"
            )
        return tuple(f"{self.name}: {fault}" for fault in found)


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """A function compiled for one GPU.

    Attributes:
      gpu: as `compile_for` was asked.
      kernels: each different Mosaic-GPU kernel in the function once; what XLA makes itself is not among them.
      temp_bytes: memory that XLA allots besides arguments and results.
      argument_bytes: memory of the arguments.
      result_bytes: memory of the results that take over none of an argument that is donated.
      failure: why there is no result, or None.
      seconds: wall time.
    """

    gpu: str
    kernels: tuple[KernelReport, ...] = ()
    temp_bytes: int = 0
    argument_bytes: int = 0
    result_bytes: int = 0
    failure: str | None = None
    seconds: float = 0.0

    @property
    def kernel(self) -> KernelReport:
        """The only kernel. Raises CompileError if there is none, or more."""
        if self.failure is None and len(self.kernels) == 1:
            return self.kernels[0]
        names = ", ".join(kernel.name for kernel in self.kernels) or "none"
        raise CompileError(self.failure or f"for {self.gpu}: one kernel was expected, the function has {names}")

    @property
    def faults(self) -> tuple[str, ...]:
        """A failure, spills, and serialised matmuls, to be read."""
        own = () if self.failure is None else (self.failure,)
        return own + tuple(fault for kernel in self.kernels for fault in kernel.faults)

    def check(self) -> CompileReport:
        """This report. Raises CompileError if there is any fault."""
        if self.faults:
            raise CompileError(f"for {self.gpu}: " + "\n".join(self.faults))
        return self


def compile_for(gpu: str, fn: Callable[..., Any] | str, *shapes: Any, **static: Any) -> CompileReport:
    """Compile `fn(*arrays, **static)` for a GPU that need not be here.

        report = compile_for("h200", "my_package.kernels:matmul", a, b, tile=128)
        assert not report.check().kernel.spills

    Code that asks what it is compiled for (`fast_layers.explain`, the choice of backends) is answered with this GPU.
    `fast_layers.use_backends` holds for it as it does here, and so do JAX's 64 bits, matmul precision, kind of keys and
    dtype promotion.

    Args:
      gpu: "h100", "h200", "b200" or "b300".
      fn: a function that another process can import: defined at the top of a module, or "module:function".
      shapes: arrays, `jax.ShapeDtypeStruct`s, or trees of them.
      static: keyword arguments that are no arrays; must be picklable.

    Returns:
      What was compiled, or in `failure` why the function could not be traced or compiled, or not in time. Call
      `.check()` to raise for that and for slow code.

    Raises:
      ValueError: for an unknown GPU, a function that cannot be imported elsewhere, arguments that are no arrays, or
        missing wheels.
      CompileError: the process that compiles ended before it could report.

    Each call starts a process, which takes some seconds; `compile_all_for` shares one.
    """
    return compile_all_for(gpu, [Compilation(fn, shapes, static)])[0]


def compile_all_for(
    gpu: str, compilations: Sequence[Compilation], *, timeout: float = 300.0
) -> tuple[CompileReport, ...]:
    """As `compile_for`, for many functions or settings, in one process. `timeout` in seconds is for each of them.

    Raises:
      ValueError: as `compile_for`, for no compilations, a `Compilation` of other types than its fields say, and for
        donated positions that `shapes` does not have.
      CompileError: as `compile_for`.
    """
    if not isinstance(gpu, str) or gpu not in TARGETS:
        raise ValueError(f"gpu={gpu!r}: must be one of {', '.join(map(repr, TARGETS))}")
    if missing := missing_wheels():
        raise ValueError(missing)
    timeout = _timeout.seconds(timeout)
    if isinstance(compilations, Compilation):
        raise ValueError("compilations is a single Compilation: give a list, [compilation]")
    compilations = list(compilations)
    if not compilations:
        raise ValueError("compilations is empty, so nothing would be compiled")
    if wrong := [job for job in compilations if not isinstance(job, Compilation)]:
        raise ValueError(f"compilations has {wrong[0]!r}: must be of Compilation(fn, shapes, options)")
    settings = {name: getattr(jax.config, name) for name in _CARRIED}
    jobs = [_pickled(compilation) for compilation in compilations]
    with tempfile.TemporaryDirectory() as folder:
        job, result = Path(folder) / "job", Path(folder) / "result"
        job.write_bytes(pickle.dumps((gpu, TARGETS[gpu], timeout, dispatch.carried(), settings, jobs)))
        done = subprocess.run(
            [sys.executable, "-m", "fast_layers.testing._deviceless_child", str(job), str(result)],
            env=_environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise CompileError(f"the process that compiles for {gpu} ended:\n{done.stderr.strip()[-4000:]}")
        return tuple(pickle.loads(result.read_bytes()))


def missing_wheels() -> str | None:
    """Why nothing can be compiled here, with the way out; None if all is in place."""
    wanted = jax.__version__
    way_out = (
        f"On Linux x86_64: uv pip install jax-cuda13-plugin=={wanted} jax-cuda13-pjrt=={wanted} nvidia-cuda-nvcc "
        "nvidia-cuda-nvdisasm (in a clone of this project: uv sync --group deviceless)."
    )
    for wheel in ("jax-cuda13-plugin", "jax-cuda13-pjrt"):
        try:
            found = importlib.metadata.version(wheel)
        except importlib.metadata.PackageNotFoundError:
            return f"Compiling for a GPU that is not here needs the wheel {wheel}, which is not installed. {way_out}"
        if found != wanted:
            return f"{wheel} is {found}, and jax is {wanted}: they must be the same. {way_out}"
    for program, wheel in (("ptxas", "nvidia-cuda-nvcc"), ("nvdisasm", "nvidia-cuda-nvdisasm")):
        if sass.tool(program) is None:
            return f"Compiling for a GPU that is not here needs {program} of the wheel {wheel}. {way_out}"
    return None


def _pickled(job: Compilation) -> bytes:
    def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise ValueError(
                f"{leaf!r} is no array: give arrays or jax.ShapeDtypeStructs by position, and all else by keyword"
            )
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

    fn = job.fn
    for name, given, wanted in (
        ("shapes", job.shapes, (tuple, list)),
        ("static", job.static, Mapping),
        ("donated", job.donated, (tuple, list)),
    ):
        if not isinstance(given, wanted):
            kind = "a mapping from names" if wanted is Mapping else "a tuple, (x,) of a single one"
            raise ValueError(f"{name} of a Compilation is of type {type(given).__name__}: must be {kind}")
    if isinstance(fn, str):
        module, colon, name = fn.partition(":")
        if not (module and colon and name):
            raise ValueError(f'fn={fn!r}: must be "module:function", or the function itself')
    elif not callable(fn):
        raise ValueError(f'fn={fn!r}: must be a function, or the name of one, "module:function"')
    shapes = jax.tree.map(abstract, tuple(job.shapes))
    if absent := [position for position in job.donated if position not in range(len(shapes))]:
        raise ValueError(f"donated={job.donated!r}: {absent} are not among the {len(shapes)} positions of shapes")
    static = dict(job.static)
    try:
        pickled = pickle.dumps(Compilation(fn, shapes, static, tuple(job.donated)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"another process must be able to import {fn!r} and to read {static!r}, and cannot: {error}. Define the "
            'function at the top of a module, or name it as "module:function"; give settings by keyword.'
        ) from error
    in_main = any(argument == "__main__" for _, argument, _ in pickletools.genops(pickled))
    if in_main or (isinstance(fn, str) and fn.startswith("__main__:")):
        raise ValueError(
            f"{fn!r}, or something in {static!r}, is defined in the program that runs: move it into a module of its own"
        )
    return pickled


def _environment() -> dict[str, str]:
    """The child's: no GPU is looked for, and modules are found as here."""
    return {
        **{name: value for name, value in os.environ.items() if name not in _NOT_INHERITED},
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "PYTHONDONTWRITEBYTECODE": "1",
    }

"""What the real assembler makes of a kernel: registers, spills, warnings and instructions."""

from __future__ import annotations

import collections
import dataclasses
import re
import subprocess
import sysconfig
from collections.abc import Mapping
from pathlib import Path

# ptxas says with these that it made wgmmas wait for one another, and why.
_SERIALISED = re.compile(r"\((C751[0-7])\)\s*([^\n]*)")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_BUDGETS = re.compile(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)")

# An instruction with its address, a predicate if any, its name up to the first dot, and the number of general
# registers that are live there.
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)[^\n]*?//\s*\|\s*(\d*)")


@dataclasses.dataclass(frozen=True)
class Assembly:
    """See `KernelReport` for the fields."""

    registers: int
    live_registers: int
    register_budgets: tuple[int, ...]
    spill_store_bytes: int
    spill_load_bytes: int
    serialised_wgmma: tuple[str, ...]
    instructions: Mapping[str, int]


def tool(name: str) -> Path | None:
    """ptxas or nvdisasm, from the wheels nvidia-cuda-nvcc and nvidia-cuda-nvdisasm."""
    found = sorted(Path(sysconfig.get_paths()["purelib"]).glob(f"nvidia/*/bin/{name}"))
    return found[-1] if found else None


def assemble(ptx: Path, ptx_name: str) -> Assembly:
    """Runs ptxas and nvdisasm on a file of PTX that holds one kernel."""
    cubin = ptx.with_suffix(".cubin")
    log = _run("ptxas", f"-arch={ptx_name}", "-O3", "-v", str(ptx), "-o", str(cubin), stream="stderr")
    listing = _run("nvdisasm", "--print-life-ranges", "--life-range-mode", "count", str(cubin), stream="stdout")
    cubin.unlink()
    instructions = _INSTRUCTION.findall(listing)
    if not instructions:
        raise RuntimeError(f"nvdisasm's listing of {ptx.name} has no instruction in the form that is known")
    stores, loads = map(sum, zip(*(map(int, pair) for pair in _SPILLS.findall(log)), strict=True))
    return Assembly(
        registers=max(map(int, _REGISTERS.findall(log))),
        live_registers=max(int(live or 0) for _, live in instructions),
        register_budgets=tuple(sorted({int(count) for count in _BUDGETS.findall(ptx.read_text())})),
        spill_store_bytes=stores,
        spill_load_bytes=loads,
        serialised_wgmma=tuple(f"{code}: {text}" for code, text in dict.fromkeys(_SERIALISED.findall(log))),
        instructions=dict(collections.Counter(name for name, _ in instructions)),
    )


def _run(name: str, *arguments: str, stream: str) -> str:
    program = tool(name)
    if program is None:
        raise RuntimeError(f"{name} is not installed")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} refused: {done.stderr.strip()[-2000:]}")
    return getattr(done, stream)

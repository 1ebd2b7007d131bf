"""Runs of examples/train_lm.py on a model so small that a run is mostly start-up."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(_ROOT / "examples"))

# Kept of the settings from outside: tiny models run for less time than they compile, and several runs compile the same.
_KEPT = ("JAX_DISABLE_MOST_OPTIMIZATIONS", "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_")
# A micro-batch of 8 rows can be split over any number of devices that a test run is likely to see.
# Real text of a fixed interpreter: the sources of its json package, a few documents longer than a row.
_DATA = Path(json.__file__).parent
TINY = (
    *("--layers", "1", "--width", "32", "--heads", "4", "--kv-heads", "2", "--mlp-width", "32"),
    *("--seq-len", "32", "--batch-size", "16", "--accumulate", "2", "--steps", "30", "--data", str(_DATA)),
)
_COMMAND = (sys.executable, str(_ROOT / "examples" / "train_lm.py"), "--checkpoint-every", "5")


@pytest.fixture(scope="session")
def tiny() -> tuple[str, ...]:
    """The flags of the tiny model and its data."""
    return TINY


@pytest.fixture(scope="session")
def start():
    """Starts train_lm.py in a process of its own, with settings that no other conftest has touched."""

    def start(*flags: str, **env: str) -> subprocess.Popen[str]:
        clean = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(_KEPT) or not name.startswith(("XLA_", "JAX_"))
        }
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), str(_ROOT)]))
        return subprocess.Popen(
            [*_COMMAND, *flags],
            env=clean | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path} | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


@pytest.fixture(scope="session")
def run(start):
    """Runs train_lm.py to its end and returns its output; fails the test if it fails."""

    def run(*flags: str, **env: str) -> str:
        process = start(*flags, **env)
        output, _ = process.communicate(timeout=180)
        assert process.returncode == 0, output
        return output

    return run


@pytest.fixture(scope="session")
def uninterrupted(run, tmp_path_factory) -> tuple[Path, str]:
    """The directory and the output of a whole run. Copy it before changing it."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # of all workers of this test run: the first to come runs it for the others
    out, output = shared / "uninterrupted", shared / "uninterrupted.txt"
    with (shared / "uninterrupted.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not output.exists():
            output.write_text(run(*TINY, "--out", str(out)))
    return out, output.read_text()


@pytest.fixture(scope="session")
def losses():
    """Reads the losses of a run by step; each step must be there once."""

    def losses(out: Path) -> dict[int, float]:
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert [record["step"] for record in records] == list(range(1, len(records) + 1))
        return {record["step"]: record["loss"] for record in records}

    return losses

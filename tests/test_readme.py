"""What the README tells a newcomer to type, and what it says will come out."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import fast_layers

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[list[str]]:
    lines = [line for block in blocks("console") for line in block.splitlines()]
    return [shlex.split(line) for line in lines]


def run(*arguments: str, timeout: int = 900) -> subprocess.CompletedProcess:
    own = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    environment = os.environ | own
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
    )


def namespace() -> dict:
    q = k = v = jnp.ones((1, 8, 2, 16), jnp.bfloat16)
    return {
        "fast_layers": fast_layers,
        "document_ids": jnp.zeros((1, 8), jnp.int32),
        **dict.fromkeys(("query", "key", "value"), q),
        "q": q,
        "k": k,
        "v": v,
    }


def test_the_python_blocks_run():
    found = blocks("python")
    assert len(found) >= 4
    names = namespace()
    for block in found:
        exec(compile(block, "README.md", "exec"), names)
    assert names["out"].shape == (1, 8, 2, 16)
    assert isinstance(names["attention"], fast_layers.FlashMHA)


def test_explain_prints_what_the_readme_shows():
    (shown,) = blocks("text")
    q = jax.ShapeDtypeStruct((1, 4096, 8, 64), jnp.bfloat16)
    with jax.default_device(jax.devices("cpu")[0]):
        explained = fast_layers.explain(fast_layers.dot_product_attention, q, q, q, is_causal=True)
    assert str(explained) == shown.strip()


def test_every_command_names_something_that_is_there():
    found = commands()
    assert len(found) >= 4
    for command in found:
        assert command[:2] == ["uv", "run"], command
        script_or_tool, *rest = command[2:]
        assert script_or_tool == "pytest" or (ROOT / script_or_tool).is_file(), command
        for argument in rest:
            if argument.startswith("--"):
                assert argument in run(script_or_tool, "--help").stdout, command
            else:
                assert (ROOT / argument).exists(), command


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target


def test_the_benchmark_runs_and_writes_its_results(tmp_path):
    out = tmp_path / "results.json"
    done = run("bench/attention.py", "--cases", "64x2", "--repeats", "1", "--out", str(out))
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    seconds = {(row["name"], row["pass"], row["causal"]): row["seconds"] for row in rows}
    for name in ("fast_layers", "jax.nn xla", "again"):
        for pass_ in ("forward", "forward+backward"):
            assert min(seconds[name, pass_, False], seconds[name, pass_, True]) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "promised"),
    [
        pytest.param([], 2.5, id="the default run, whole", marks=pytest.mark.exhaustive),
        # The frequencies of single bytes give 3.1.
        pytest.param(["--steps", "60"], 2.9, id="its schedule in fewer steps"),
    ],
)
def test_the_example_learns_as_promised(flags, promised, tmp_path):
    """Minutes, not seconds."""
    done = run("examples/train_lm.py", "--out", str(tmp_path / "run"), *flags)
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert 5.3 < losses[0] < 5.8
    assert sum(losses[-10:]) / 10 < promised
    assert (tmp_path / "run" / "loss.png").stat().st_size > 1000

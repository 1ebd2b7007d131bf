"""What compiling costs the host: the seconds of each phase are told, and so is why a configuration has none."""

from __future__ import annotations

import json
import os
import sys

import pytest

from bench import __main__ as bench_main
from bench import host_cost
from fast_layers.testing.deviceless import missing_wheels


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(host_cost, "TOKENS", 32)
    monkeypatch.setattr(host_cost, "HIDDEN", 16)


def _run(monkeypatch, *options):
    given = ["host_cost", "--gpu", "here", "--depths", "8", "--lengths", "32", "--masks", "causal", *options]
    monkeypatch.setattr(sys, "argv", ["bench", *given])
    bench_main.main()


def test_each_phase_of_each_number_of_layers_is_written(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(host_cost, "measure_apart", host_cost.measure)
    out = tmp_path / "deep" / "host_cost.json"
    _run(monkeypatch, "--layers", "1", "2", "--out", str(out))
    written = json.loads(out.read_text())
    assert written["for"] == "here"
    assert written["command"].startswith("python -m bench host_cost --gpu here")
    assert [row["layers"] for row in written["rows"]] == [1, 2]
    for row in written["rows"]:
        assert list(row["seconds"]) == list(host_cost.PHASES)
        assert all(wall > 0 for wall, _ in row["seconds"].values())
        assert row["kernels"] == 0  # on a CPU
    assert capsys.readouterr().out.count("kernels in the program: 0") == 2


def test_a_process_that_fails_says_why(tmp_path, monkeypatch, capsys):
    found = host_cost.measure_apart(8, 32, "causal", 1, "here", "hopper")
    assert "hopper" in found["failure"]
    monkeypatch.setattr(host_cost, "measure_apart", lambda *what: found)
    with pytest.raises(SystemExit, match="1"):
        _run(monkeypatch, "--layers", "1", "--out", str(tmp_path / "found.json"))
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["rows"] == [{"what": [8, 32, "causal", 1, "here", "hopper"], "failure": found["failure"]}]
    assert found["failure"] in capsys.readouterr().out


@pytest.mark.deviceless
@pytest.mark.skipif(bool(missing_wheels()) and not os.environ.get("CI"), reason=missing_wheels() or "")
def test_a_gpu_that_is_not_here_is_compiled_for(monkeypatch):
    for name in ("JAX_PLATFORMS", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"):
        monkeypatch.delenv(name, raising=False)
    found = host_cost.measure_apart(64, 128, "full", 1, "h200", "hopper")
    assert "failure" not in found
    assert found["kernels"] >= 2

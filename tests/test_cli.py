"""`python -m fast_layers`: what the commands print, and their exit codes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

import fast_layers
from fast_layers import doctor
from fast_layers.cli import main
from fast_layers.dispatch import Backend
from fast_layers.ops.attention import api, xla
from fast_layers.testing import (
    _parity_conv1d,
    _parity_gated_norm,
    _parity_mlp,
    _parity_selective_scan,
    _parity_ssd,
    parity,
)

ROOT = Path(__file__).parents[1]


SMALL = {
    "dot_product_attention": parity.Case(batch=1, q_len=40, kv_len=40, qk_dim=16, v_dim=16, is_causal=True),
    "mlp": _parity_mlp.Case(7, 16, 24, 16, "silu", gated=True),
}
SMALL_OF_THE_OTHERS = {
    "ssd": _parity_ssd.Case(batch=1, length=7, heads=2, head_dim=4, state_dim=3),
    "selective_scan": _parity_selective_scan.Case(batch=1, length=7, channels=4, state_dim=3),
    "causal_conv1d": _parity_conv1d.Case(length=7, channels=8),
    "gated_rms_norm": _parity_gated_norm.Case(rows=(7,), features=16),
}
SUITES = parity.SUITES


def _take(monkeypatch, cases):
    suites = {
        op: dataclasses.replace(SUITES[op], cases={"small": case}, quick=("small",), also_float16=frozenset())
        for op, case in cases.items()
    }
    monkeypatch.setattr(parity, "SUITES", suites)


@pytest.fixture(autouse=True)
def two_ops_with_one_small_case(monkeypatch):
    _take(monkeypatch, SMALL)


@pytest.fixture
def every_op(monkeypatch):
    _take(monkeypatch, SMALL | SMALL_OF_THE_OTHERS)


@pytest.fixture
def plant(monkeypatch):
    """Put a backend before the package's own."""

    def put(fwd=xla.forward, bwd=xla.backward):
        monkeypatch.setattr(api, "BACKENDS", (Backend("planted", lambda *_: None, fwd, bwd), *api.BACKENDS))

    return put


def _off(problem, inputs, aux):
    out, lse = xla.forward(problem, inputs, aux)
    return out * jnp.asarray(1.1, out.dtype), lse


@pytest.mark.usefixtures("every_op")
def test_doctor_on_one_screen(capsys):
    assert set(parity.SUITES) == set(SUITES)
    assert main(["doctor"]) == 0
    text, progress = capsys.readouterr()
    said = [line.partition(" s  ")[2] for line in progress.splitlines()]
    begun, done = said[: len(SUITES)], said[len(SUITES) :]
    assert {line.split(":")[0] for line in begun} == {f"checking {op}" for op in SUITES}
    assert all(line.endswith("; 2 programs") for line in begun)  # of xla; the others are for GPUs
    assert done == [f"{what} {op}" for what in ("compiled", "ran") for op in SUITES]
    lines = text.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 120
    assert lines[0].startswith("device    ")
    assert f"fast_layers {fast_layers.__version__}" in text
    assert "  xla       usable" in text
    assert "  xla       5 quantities, worst error" in text
    for op in SUITES:
        assert f"parity    {op}, against the reference, 1 cases\n" in text
    assert lines[-1] == "all is well"


@pytest.mark.usefixtures("every_op")
def test_doctor_names_every_backend_and_its_reason(capsys):
    main(["doctor"])
    text = " ".join(capsys.readouterr().out.split())
    arch = doctor.lowering_targets()[0]
    for suite in parity.SUITES.values():
        problem = suite.typical()
        assert f"backends {suite.op}, for {problem.describe()}" in text
        for backend in suite.backends():
            if backend.name != "reference":
                reason = backend.refuses(problem, arch, "forward") or "usable"
                assert f"{backend.name} {' '.join(reason.split())}" in text


def test_passes_that_differ_are_told_apart():
    refusals = {"forward": None, "backward": "no backward yet"}
    report = doctor.BackendReport("planted", refusals, parity.ParityTable((), "nothing"))
    assert report.usable() == "forward: usable; backward: no backward yet"


def test_json_is_valid_and_says_the_same(capsys):
    assert main(["doctor", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] is True
    assert data["versions"]["fast_layers"] == fast_layers.__version__
    assert {"jax", "jaxlib", "flax", "python"} <= set(data["versions"])
    assert {backend["op"] for backend in data["backends"]} == set(SMALL)
    by_name = {b["name"]: b for b in data["backends"] if b["op"] == "dot_product_attention"}
    assert list(by_name) == [backend.name for backend in api.BACKENDS if backend.name != "reference"]
    assert by_name["xla"]["refusals"] == {"forward": None, "backward": None}
    assert {row["quantity"] for row in by_name["xla"]["parity"]["rows"]} == {"out", "lse", "dq", "dk", "dv"}


def test_exit_code_1_for_a_wrong_kernel(capsys, plant):
    plant(fwd=_off)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "FAILED small, bfloat16, forward: out: max error" in " ".join(text.split())
    assert text.splitlines()[-1].startswith("FAILED")
    assert main(["doctor", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] is False
    assert [backend["name"] for backend in data["backends"] if not backend["parity"]["ok"]] == ["planted"]


def test_exit_code_1_for_a_kernel_that_breaks_down(capsys, plant, monkeypatch):
    def explode(*_):
        raise RuntimeError("ptxas exploded")

    plant(bwd=explode)
    monkeypatch.setattr(parity, "_COMPILED_ALONE", ("planted",))
    assert main(["doctor"]) == 1
    text, progress = capsys.readouterr()
    assert "raised RuntimeError: ptxas exploded" in text
    assert "compiled dot_product_attention, all but 1 of its programs, which wait until they run\n" in progress
    assert "compiled mlp\n" in progress


def test_exit_code_1_and_a_whole_screen_where_an_oracle_breaks_down(capsys, monkeypatch):
    def explode(draws):
        raise RuntimeError("INTERNAL: Failed to launch ptxas")

    suite = parity.SUITES["mlp"]
    monkeypatch.setitem(parity.SUITES, "mlp", dataclasses.replace(suite, expect=explode))
    assert main(["doctor"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "FAILED small, bfloat16, forward: no oracle: RuntimeError: INTERNAL: Failed to launch ptxas" in text
    assert "xla 5 quantities, worst error" in text


@pytest.mark.parametrize(
    ("plugins", "driver", "words"),
    [
        ("13", "580.159.04", []),
        ("13", "575.57.08", ["driver 575.57.08 is older than 580", "CUDA 13", "install jax[cuda12]"]),
        ("12", "575.57.08", []),
        ("12", "470.82.01", ["driver 470.82.01 is older than 525", "CUDA 12", "update the driver"]),
        ("13", "unknown", []),
        ("13", None, []),
        ("", "470.82.01", []),
    ],
)
def test_drivers_that_are_too_old_are_flagged(plugins, driver, words):
    versions = {f"jax-cuda{plugins}-plugin": "0.12.0"} if plugins else {}
    warnings = doctor.warnings_of(versions | ({} if driver is None else {"driver": driver}))
    assert len(warnings) == bool(words)
    assert all(word in warnings[0] for word in words)


@pytest.mark.parametrize(
    ("ptxas", "words"),
    [
        (None, []),
        ("13.5.37", []),
        ("13.3.0", []),
        ("13.0.88", ["older than 13.3"]),
        ("12.9.86", ["older than 13.3"]),
        ("12.9.41", ["older than 13.3", "miscompiles causal"]),
        ("12.8.61", ["older than 13.3", "miscompiles causal"]),
        ("12.6.20", ["older than 13.3"]),
    ],
)
def test_known_bad_compilers_are_flagged(ptxas, words):
    found = doctor.warnings_of({} if ptxas is None else {"ptxas": ptxas})
    assert len(found) == len(words)
    for text, word in zip(found, words, strict=True):
        assert word in text
        assert ptxas in text


def test_warnings_show_and_do_not_fail(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_ptxas", lambda: ("/usr/bin/ptxas", "12.8.61"))
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.count("warning") == 2


def test_ptxas_is_asked_for_its_version(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "ptxas"
    fake.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.61'\n")
    fake.chmod(0o755)
    monkeypatch.setattr(doctor.importlib.metadata, "files", lambda package: [])
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert doctor._ptxas() == (str(fake), "12.8.61")


@pytest.mark.parametrize("arguments", [[], ["nonsense"]])
def test_usage_errors(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "doctor" in capsys.readouterr().err


def test_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "fast_layers", "doctor", "--help"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout


def test_importing_the_package_does_not_import_the_tools():
    program = "import sys, fast_layers; print([m for m in sys.modules if 'testing' in m and 'fast_layers' in m])"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.strip() == "[]"

"""`python -m fast_layers`: what the commands print, and their exit codes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import fast_layers
from fast_layers import doctor
from fast_layers.arch import Arch
from fast_layers.cli import main
from fast_layers.dispatch import PASSES, Backend, Pass
from fast_layers.kernel_parts import refusals
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


SAFE_PTXAS = ("/home/somebody/project/.venv/lib/python3.12/site-packages/nvidia/cu13/bin/ptxas", "13.5.37")


def _assert_one_screen(lines):
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100


def _words(text):
    """Without line breaks and indents."""
    return " ".join(text.split())


@pytest.mark.usefixtures("every_op")
def test_doctor_on_one_screen(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_ptxas", lambda: SAFE_PTXAS)
    assert set(parity.SUITES) == set(SUITES)
    assert main(["doctor"]) == 0
    text, progress = capsys.readouterr()
    said = [line.partition(" s  ")[2] for line in progress.splitlines()]
    begun, done = said[: len(SUITES)], said[len(SUITES) :]
    assert {line.split(":")[0] for line in begun} == {f"checking {op}" for op in SUITES}
    assert all(line.endswith("; 2 programs") for line in begun)  # of xla; the others are for GPUs
    assert done == [f"{what} {op}" for what in ("compiled", "ran") for op in SUITES]
    lines = text.splitlines()
    _assert_one_screen(lines)
    assert lines[0] == f"device    {jax.device_count()} x cpu"
    assert f"fast_layers {fast_layers.__version__}" in text
    header, *rows = lines[lines.index("") + 1 :][: 1 + len(SUITES)]
    assert header.split() == ["op", "cases", "hopper", "blackwell", "cudnn", "xla"]
    cells = {op: cells for op, *cells in map(str.split, rows)}
    assert list(cells) == list(SUITES)
    assert cells["dot_product_attention"][:5] == ["1", "refused", "refused", "refused", "ok"]
    assert cells["causal_conv1d"][:5] == ["1", "refused", "-", "-", "ok"]
    assert all(0 < int(row[5].rstrip("%")) <= 100 for row in cells.values())
    assert lines[-1].startswith("all is well: ")


@pytest.mark.usefixtures("every_op")
def test_doctor_tells_every_reason_once(capsys):
    main(["doctor"])
    text = _words(capsys.readouterr().out)
    arch = doctor.lowering_targets()[0]
    reasons = {
        (backend.name, backend.supports(suite.typical(), arch, "forward"))
        for suite in parity.SUITES.values()
        for backend in suite.backends()
        if backend.name != "reference"
    }
    for name, reason in reasons - {("xla", None)}:
        where = "dot_product_attention" if name == "cudnn" else "all its ops"
        assert text.count(f"{name} {where}: {_words(reason)}") == text.count(_words(reason)) == 1


TAKES = dict.fromkeys(PASSES)


def _row(share, case="small", pass_: Pass = "forward"):
    return parity.Row(case, "bfloat16", "planted", pass_, "out", share, 1.0)


def _refused(reason, case="small", pass_: Pass = "forward"):
    return parity.Row(case, "bfloat16", "planted", pass_, refusal=reason)


def _failed(failure, case="small", pass_: Pass = "forward"):
    return parity.Row(case, "bfloat16", "planted", pass_, failure=failure)


def _backend(name, *rows, refuses=TAKES, by_name=None):
    rows = tuple(dataclasses.replace(row, backend=name) for row in rows)
    table = parity.ParityTable(rows, "nothing")
    return doctor.BackendReport(name, refuses, refuses if by_name is None else by_name, table)


def _report(ops, versions=None, arch=Arch("cpu")):
    versions = versions or {}
    reports = tuple(doctor.OpReport(op, "a call", 1, tuple(backends)) for op, backends in ops.items())
    return doctor.Report((str(arch),), arch, versions, doctor.warnings_of(versions), reports)


@pytest.mark.parametrize(
    ("cell", "backend"),
    [
        ("ok 39%", _backend("b", _row(0.2), _row(0.39, pass_="backward"))),
        ("ok 20% 1/2", _backend("b", _row(0.2), _refused("too deep", pass_="backward"))),
        ("FAILED", _backend("b", _row(0.2), _failed("crashed", pass_="backward"))),
        ("usable 0/1", _backend("b", _refused("too short"))),
        ("refused", _backend("b", _refused("no GPU"), refuses=dict.fromkeys(PASSES, "no GPU"))),
        ("by name", _backend("b", _refused("name it"), refuses=dict.fromkeys(PASSES, "name it"), by_name=TAKES)),
        (
            "refused",
            _backend(
                "b",
                _refused("name it"),
                refuses=dict.fromkeys(PASSES, "name it"),
                by_name=dict.fromkeys(PASSES, "no GPU"),
            ),
        ),
    ],
)
def test_a_cell_says_all_of_a_backend(cell, backend):
    assert backend.cell() == cell
    assert f"an op  1      {cell}\n" in str(_report({"an op": [backend]}))


@pytest.mark.parametrize(
    ("backend", "told"),
    [
        (_backend("b", refuses={"forward": None, "backward": "no backward"}), "b op backward: no backward"),
        (
            _backend("b", refuses={"forward": "no GPU", "backward": "no backward"}),
            "b op forward: no GPU b op backward: no backward",
        ),
        (
            _backend("b", *(_refused("too long", case="long", pass_=pass_) for pass_ in PASSES)),
            "b op (long): too long",
        ),
        (_backend("b", _refused("too long", case="long")), "b op (long) forward: too long"),
        (_backend("b", refuses=dict.fromkeys(PASSES, "name it"), by_name=TAKES), "b op: name it"),
        (_backend("b", refuses=dict.fromkeys(PASSES, "name it"), by_name=dict.fromkeys(PASSES, "no GPU")), "b op: no"),
    ],
)
def test_a_reason_comes_with_what_is_refused(backend, told):
    text = str(_report({"op": [backend]}))
    assert f"of the run: {told}" in _words(text)


def test_without_a_refusal_there_is_no_reason():
    text = str(_report({"op": [_backend("b", _row(0.2))]}))
    assert "why not" not in text
    assert "every backend takes" in text


H200 = Arch("cuda", "NVIDIA H200", (9, 0))
H200_VERSIONS = {
    "fast_layers": "0.1.0",
    "python": "3.12.3",
    "jax": "0.12.0.1",
    "jaxlib": "0.12.0.1",
    "jax-cuda13-plugin": "0.12.0.1",
    "jax-cuda13-pjrt": "0.12.0.1",
    "flax": "0.12.12",
    "nvidia-cuda-nvcc": "13.5.37",
    "CUDA runtime": "13000",
    "CUDA of the driver": "13000",
    "cuDNN": "91900",
    "driver": "580.159.04",
    "ptxas": SAFE_PTXAS[1],
    "ptxas path": SAFE_PTXAS[0],
}


def _as_on_an_h200():
    """The shares of bench/results/h200/gpu_suites_2026_11_24.txt, and its refusals."""
    other_gpu = dict.fromkeys(PASSES, refusals.not_blackwell(H200))
    named = dict.fromkeys(PASSES, 'taken only by name: implementation="blackwell"')
    of_documents = [_refused("segment ids: cuDNN has no mask for them", "documents", pass_) for pass_ in PASSES]
    taken = [_row(0.48, f"case {i}", pass_) for i in range(4) for pass_ in PASSES]
    blackwell = _backend("blackwell", _refused("named"), refuses=named, by_name=other_gpu)
    return {
        "dot_product_attention": [
            _backend("hopper", _row(0.49)),
            _backend("blackwell", _refused("other GPU"), refuses=other_gpu),
            _backend("cudnn", *taken, *of_documents),
            _backend("xla", _row(0.41)),
        ],
        "mlp": [_backend("hopper", _row(0.3)), blackwell, _backend("xla", _row(0.4))],
        "ssd": [_backend("hopper", _row(0.55)), blackwell, _backend("xla", _row(0.55))],
        "selective_scan": [_backend("xla", _row(0.75))],
        "causal_conv1d": [_backend("hopper", _row(0.23)), _backend("xla", _row(0.23))],
        "gated_rms_norm": [_backend("hopper", _row(0.18)), _backend("xla", _row(0.18))],
    }


def test_a_gpu_fits_on_one_screen():
    report = _report(_as_on_an_h200(), H200_VERSIONS, H200)
    lines = str(report).splitlines()
    _assert_one_screen(lines)
    assert lines[0] == "device    cuda (NVIDIA H200, sm_90)"
    start = lines.index("")
    assert lines[start + 1 : start + 8] == [
        "op                     cases  hopper  blackwell  cudnn        xla",
        "dot_product_attention  1      ok 49%  refused    ok 48% 8/10  ok 41%",
        "mlp                    1      ok 30%  refused    -            ok 40%",
        "ssd                    1      ok 55%  refused    -            ok 55%",
        "selective_scan         1      -       -          -            ok 75%",
        "causal_conv1d          1      ok 23%  -          -            ok 23%",
        "gated_rms_norm         1      ok 18%  -          -            ok 18%",
    ]
    text = _words(str(report))
    assert f"blackwell all its ops: {refusals.not_blackwell(H200)} cudnn" in text
    assert "cudnn dot_product_attention (documents): segment ids: cuDNN has no mask for them all is well" in text


def test_a_gpu_with_kernels_by_name_fits_as_well():
    b200 = Arch("cuda", "NVIDIA B200", (10, 0))

    def asked(op, backend):
        problem = SUITES[op].typical()
        refuses = {pass_: backend.refuses(problem, b200, pass_) for pass_ in PASSES}
        named = {pass_: backend.supports(problem, b200, pass_) for pass_ in PASSES}
        rows = [_refused(refuses[pass_], pass_=pass_) if refuses[pass_] else _row(0.4, pass_=pass_) for pass_ in PASSES]
        return _backend(backend.name, *rows, refuses=refuses, by_name=named)

    cudnn = next(backend for backend in _as_on_an_h200()["dot_product_attention"] if backend.name == "cudnn")
    ops = {
        op: [
            cudnn if backend.name == "cudnn" else asked(op, backend)
            for backend in suite.backends()
            if backend.name != "reference"
        ]
        for op, suite in SUITES.items()
    }
    lines = str(_report(ops, H200_VERSIONS, b200)).splitlines()
    _assert_one_screen(lines)
    assert "mlp                    1      refused  by name    -            ok 40%" in lines
    assert 'blackwell mlp, ssd: taken only by name: implementation="blackwell"' in lines


def test_packages_of_one_version_stand_together():
    text = str(_report({}, {"jax": "0.12.0", "jaxlib": "0.12.0", "flax": "0.12.1"}))
    assert "versions  jax/jaxlib 0.12.0, flax 0.12.1\n" in text


def test_a_gpu_with_a_known_bad_compiler_fits_as_well():
    versions = {**H200_VERSIONS, "ptxas": "13.0.88", "ptxas path": "/usr/local/cuda/bin/ptxas"}
    lines = str(_report(_as_on_an_h200(), versions, H200)).splitlines()
    _assert_one_screen(lines)
    assert [line for line in lines if line.startswith("WARNING   ptxas 13.0.88 is older than 13.3")]
    assert lines[-1].startswith("all is well, but for the warnings above: ")


def test_a_failure_is_told_in_full():
    failure = f"out: max error 3 exceeds 1; {' '.join(f'entry {i} is off' for i in range(100))}"
    ops = _as_on_an_h200()
    ops["mlp"].append(_backend("planted", _row(0.2), _failed(failure, "tiny", "backward")))
    report = _report(ops, H200_VERSIONS, H200)
    assert not report.ok
    text = _words(str(report))
    assert f"FAILED mlp, planted, tiny, bfloat16, backward: {failure} FAILED: do not trust planted of mlp" in text
    assert max(map(len, str(report).splitlines())) <= 100


def test_json_is_valid_and_says_the_same(capsys):
    assert main(["doctor", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] is True
    assert list(data) == ["ok", "devices", "platform", "capability", "versions", "warnings", "backends"]
    assert all(list(b) == ["op", "typical", "name", "refusals", "parity"] for b in data["backends"])
    assert all(list(b["parity"]) == ["device", "ok", "rows"] for b in data["backends"])
    blackwell = next(b for b in data["backends"] if (b["op"], b["name"]) == ("mlp", "blackwell"))
    assert blackwell["typical"] == parity.SUITES["mlp"].typical().describe()
    assert blackwell["refusals"] == dict.fromkeys(PASSES, 'taken only by name: implementation="blackwell"')
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
    assert "FAILED dot_product_attention, planted, small, bfloat16, forward: out: max error" in _words(text)
    attention = next(line for line in text.splitlines() if line.startswith("dot_product_attention"))
    assert attention.split()[:6] == ["dot_product_attention", "1", "FAILED", "refused", "refused", "refused"]
    assert text.splitlines()[-1] == "FAILED: do not trust planted of dot_product_attention"
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
    assert "dot_product_attention, planted, small, bfloat16, backward: raised RuntimeError: ptxas exploded" in _words(
        text
    )
    assert "compiled dot_product_attention, all but 1 of its programs, which wait until they run\n" in progress
    assert "compiled mlp\n" in progress


def test_exit_code_1_and_a_whole_screen_where_an_oracle_breaks_down(capsys, monkeypatch):
    def explode(draws):
        raise RuntimeError("INTERNAL: Failed to launch ptxas")

    suite = parity.SUITES["mlp"]
    monkeypatch.setitem(parity.SUITES, "mlp", dataclasses.replace(suite, expect=explode))
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    failed = "FAILED mlp, xla, small, bfloat16, forward: no oracle: RuntimeError: INTERNAL: Failed to launch ptxas"
    assert failed in _words(text)
    rows = {line.split()[0]: line for line in text.splitlines() if line.startswith(tuple(SMALL))}
    assert rows["mlp"].endswith("FAILED")
    assert "ok " in rows["dot_product_attention"]


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
        ("12.6.20", ["older than 13.3", "does not know the fences"]),
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
    text = capsys.readouterr().out
    assert text.count("\nWARNING   ptxas 12.8.61 ") == 2
    assert text.splitlines()[-1].startswith("all is well, but for the warnings above: ")


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

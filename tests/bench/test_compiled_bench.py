"""What is written of compiled Blackwell kernels, and which of them have a fault. Nothing is compiled."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest

from bench import __main__ as bench_main
from bench import compiled
from fast_layers.testing.deviceless import CompileReport, KernelReport

KERNEL = KernelReport("good", 128, 100, (72, 136, 152), 0, 0, (), 200_000, 512, {"UTCHMMA": 4, "BRA": 9})


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, None),
        ({"spill_store_bytes": 4}, "spills 4 bytes"),
        ({"instructions": {"LDL": 1}}, "1 LDL"),
        ({"smem_bytes": 300_000}, "300000 bytes of shared memory"),
        ({"tmem_columns": 528}, "528 columns"),
        ({"tmem_columns": None}, "None columns"),
    ],
)
def test_faults_of_a_kernel(change, fault):
    (row,) = compiled.rows_of(CompileReport("b300", (dataclasses.replace(KERNEL, **change),)), op="ssd", call="some")
    assert row["fault"] is None if fault is None else fault in row["fault"]
    assert (row["gpu"], row["call"], row["kernel"]) == ("b300", "some", "good")
    assert row["counts"] == ({} if "instructions" in change else {"UTCHMMA": 4})


@pytest.mark.parametrize("report", [CompileReport("b200", failure="no room"), CompileReport("b200")])
def test_a_call_without_a_kernel_is_a_fault(report):
    (row,) = compiled.rows_of(report)
    assert row["fault"] == (report.failure or "no kernel")


@pytest.mark.parametrize("op", compiled.OPS)
def test_the_command_writes_each_call_and_gpu(op, tmp_path, monkeypatch, capsys):
    def compile_all_for(gpu, compilations):
        return [CompileReport(gpu, (KERNEL, dataclasses.replace(KERNEL, name="other"))) for _ in compilations]

    monkeypatch.setattr(compiled, "compile_all_for", compile_all_for)
    out = tmp_path / "deep" / "compiled.json"
    monkeypatch.setattr(sys, "argv", ["bench", "compiled", op, "--out", str(out)])
    bench_main.main()
    written = json.loads(out.read_text())
    assert written["command"] == f"python -m bench compiled {op} --out {out}"
    keys = [(row["gpu"], row["call"], row["kernel"]) for row in written["rows"]]
    assert len(set(keys)) == len(keys) == 4 * len(compiled.calls_of(op)) > 0
    assert capsys.readouterr().out.count("tmem_columns 512") == len(keys)


def test_a_fault_ends_the_command_in_failure(monkeypatch):
    monkeypatch.setattr(compiled, "compile_all_for", lambda gpu, calls: [CompileReport(gpu, failure="no")] * len(calls))
    monkeypatch.setattr(sys, "argv", ["bench", "compiled", "mlp"])
    with pytest.raises(SystemExit, match="have a fault"):
        bench_main.main()


def test_calls_may_be_chosen(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "compile_all_for", lambda gpu, calls: [CompileReport(gpu, (KERNEL,))] * len(calls))
    out = tmp_path / "compiled.json"
    command = ["bench", "compiled", "ssd", "--gpus", "b200", "--out", str(out), "--calls"]
    monkeypatch.setattr(sys, "argv", [*command, "^P64 N128, four heads, (D|z)$"])
    bench_main.main()
    rows = json.loads(out.read_text())["rows"]
    assert [row["call"] for row in rows] == ["P64 N128, four heads, D", "P64 N128, four heads, z"]

    monkeypatch.setattr(sys, "argv", [*command, "P65"])
    with pytest.raises(SystemExit):
        bench_main.main()

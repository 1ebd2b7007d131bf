"""The scan's benchmark on a tiny case: what it writes, and that no peer can end a run."""

from __future__ import annotations

import json
import sys

import pytest

from bench import __main__ as bench_main
from bench import ssd


def test_the_command_writes_every_peer_and_pass(tmp_path, monkeypatch, capsys):
    def broken(case, pass_, watch):
        raise RuntimeError("no such\nlibrary")

    monkeypatch.setattr(ssd, "PEERS", {**ssd.PEERS, "broken": broken})
    out = tmp_path / "deep" / "ssd.json"
    monkeypatch.setattr(sys, "argv", ["bench", "ssd", "--tiny", "--quick", "--repeats", "1", "--out", str(out)])
    bench_main.main()
    report = json.loads(out.read_text())
    assert report["command"] == f"python -m bench ssd --tiny --quick --repeats 1 --out {out}"
    rows = {(row["pass"], row["name"]): row for row in report["rows"]}
    assert {pass_ for pass_, _ in rows} == set(ssd.PASSES)
    for pass_ in ssd.PASSES:
        for name in ("fast_layers xla", "again", "recurrence"):
            row = rows[pass_, name]
            assert row["seconds"] > 0
            assert row["comparable"]
            assert row["relative_error"] < 1e-5
        assert rows[pass_, "broken"]["refused"] == "RuntimeError: no such library"
        assert "needs an NVIDIA GPU" in rows[pass_, "fast_layers hopper"]["refused"]
    assert all(rows["both", name]["temp_bytes"] > 0 for name in ("fast_layers xla", "recurrence"))
    shown = capsys.readouterr().out
    assert "B1 L96 H2 P8 N4 G1 float32, backward" in shown
    assert "no such library" in shown


def test_a_peer_that_computes_something_else_is_marked(monkeypatch, capsys):
    def doubled(**operands):
        return 2 * ssd.ours("xla")(**operands)

    wrong = ssd.functools.partial(ssd.jax_program, doubled)
    monkeypatch.setattr(ssd, "PEERS", {"fast_layers xla": ssd.PEERS["fast_layers xla"], "wrong": wrong})
    rows = ssd.run_cell(ssd.TINY[0], "forward", 1, ssd.timing.Stopwatch())
    assert [row["comparable"] for row in rows] == [True, False]
    assert rows[1]["relative_error"] == pytest.approx(1, rel=1e-4)
    ssd.show(rows)
    assert "computes something else (off by 1)" in capsys.readouterr().out

"""The benchmarks of the scan and of the layer around it on tiny cases: what they write, and that no peer ends a run."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from bench import __main__ as bench_main
from bench import mamba2, report, ssd, turns
from bench.timing import Stopwatch


def _run(monkeypatch, out, command, *more):
    options = [command, "--tiny", "--quick", "--repeats", "1", *more, "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["bench", *options])
    bench_main.main()
    written = json.loads(out.read_text())
    assert written["command"] == f"python -m bench {' '.join(options)}"
    assert written["roofs"]["copy GB/s"] > 0
    return written


def test_the_command_writes_every_peer_and_pass(tmp_path, monkeypatch, capsys):
    def broken(case):
        raise RuntimeError("no such\nlibrary")

    monkeypatch.setattr(ssd, "PEERS", (*ssd.PEERS, turns.Peer("broken", broken)))
    written = _run(monkeypatch, tmp_path / "deep" / "ssd.json", "ssd")
    rows = {(row["pass"], row["name"]): row for row in written["rows"]}
    assert {pass_ for pass_, _ in rows} == set(turns.PASSES)
    for pass_ in turns.PASSES:
        for name in ("fast_layers xla", "again", "recurrence", "jax chunked"):
            row = rows[pass_, name]
            assert row["seconds"] > 0
            assert row["comparable"]
            assert row["relative_error"] < 1e-5
            assert row["GB/s"] == pytest.approx(1e-9 * ssd.TINY[0].bytes(pass_) / row["seconds"])
        assert rows[pass_, "broken"]["refused"] == "RuntimeError: no such library"
        assert "needs an NVIDIA GPU" in rows[pass_, "fast_layers hopper"]["refused"]
    assert all(rows["both", name]["temp_bytes"] > 0 for name in ("fast_layers xla", "recurrence"))
    shown = capsys.readouterr().out
    assert "B1 L96 H2 P8 N4 G1 float32, backward" in shown
    assert "no such library" in shown


@pytest.mark.parametrize("passes", [("forward",), pytest.param(("both",), marks=pytest.mark.exhaustive)])
def test_the_layer_and_its_parts(tmp_path, monkeypatch, capsys, passes):
    hlo = tmp_path / "hlo"
    monkeypatch.setattr(mamba2.Layer, "passes", passes)
    found = _run(monkeypatch, tmp_path / "mamba2.json", "mamba2", "--hlo", str(hlo), "--peers", "jax", "hopper")
    rows = {(row["case"].split()[0], row["pass"], row["name"]): row for row in found["rows"]}
    assert {key[:2] for key in rows} == {
        (kind, pass_) for kind, cases in mamba2.TINY.items() for pass_ in cases[0].passes
    }
    for (kind, pass_, name), row in rows.items():
        if "hopper" in name:
            assert "ValueError" in row["refused"]
            continue
        assert row["comparable"], (kind, pass_, name)
        assert row["relative_error"] < 1e-5
        assert ("share_of_copy" in row) == (kind != "layer")
    assert ("conv", "both", "jax grouped") in rows
    assert ("layer", passes[0], "again") not in rows  # it was not asked for
    written = {path.name for path in hlo.iterdir()}
    assert "norm_R12_F16_G2_float32_backward_fast_layers_xla.hlo.txt" in written
    assert f"layer B1 L48 d8 H4 P4 N4 G1 float32, {passes[0]}" in capsys.readouterr().out


def test_a_peer_that_computes_something_else_is_marked(capsys):
    def doubled(case):
        return lambda **operands: 2 * ssd.ours("xla")(**operands)

    first = next(peer for peer in ssd.PEERS if peer.name == "fast_layers xla")
    peers = (first, turns.Peer("wrong", doubled))
    rows = turns.run_cell(ssd.TINY[0], "forward", peers, 1, Stopwatch())
    assert [row["comparable"] for row in rows] == [True, False]
    assert rows[1]["relative_error"] == pytest.approx(1, rel=1e-4)
    turns.show(rows)
    assert "computes something else (out off by 1)" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_a_peer_with_another_gradient_is_marked(capsys):
    def other_gradient(case):
        @jax.custom_jvp
        def tripled(x):
            return x

        tripled.defjvp(lambda primals, tangents: (primals[0], 3 * tangents[0]))
        return lambda **operands: ssd.ours("xla")(**operands | {"B": tripled(operands["B"])})

    first = next(peer for peer in ssd.PEERS if peer.name == "fast_layers xla")
    rows = turns.run_cell(ssd.TINY[0], "backward", (first, turns.Peer("wrong", other_gradient)), 1, Stopwatch())
    assert rows[1]["relative_errors"] == pytest.approx(
        dict.fromkeys(rows[1]["relative_errors"], 0) | {"d_B": 2}, abs=1e-4
    )
    assert set(rows[1]["relative_errors"]) == {"out", "d_x", "d_dt", "d_A", "d_B", "d_C"}
    assert not rows[1]["comparable"]
    turns.show(rows)
    assert "computes something else (d_B off by 2)" in capsys.readouterr().out


def test_the_measured_commit_is_known_in_a_copy_too(tmp_path, monkeypatch):
    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(("git", *who, *words), cwd=tree, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    monkeypatch.delenv("BENCH_COMMIT", raising=False)
    tree, copy = tmp_path / "tree", tmp_path / "copy"
    (tree / "bench").mkdir(parents=True)
    for name in (".gitattributes", "bench/archived_commit.txt"):
        (tree / name).write_text((report.ROOT / name).read_text())
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "all")
    commit = git("rev-parse", "HEAD")
    assert report.tree_facts(tree) == {"commit": commit, "dirty": False}
    git("archive", "-o", str(tmp_path / "tree.tar"), "HEAD")
    shutil.unpack_archive(tmp_path / "tree.tar", copy, filter="data")
    assert report.tree_facts(copy) == {"commit": commit, "dirty": None}
    (tree / "README.md").write_text("Words alone change no measurement.\n")
    assert report.tree_facts(tree) == {"commit": commit, "dirty": False}
    (tree / "bench" / "report.py").write_text("")
    assert report.tree_facts(tree) == {"commit": commit, "dirty": True}
    assert report.tree_facts(tree / "bench") == {"commit": None, "dirty": None}  # of a copy within another's checkout
    monkeypatch.setenv("BENCH_COMMIT", "abc-dirty")
    assert report.tree_facts(copy) == {"commit": "abc", "dirty": True}


def test_cells_beyond_the_time_are_listed():
    cells = [(ssd.TINY[0], "forward", ssd.PEERS)]
    found = turns.run(cells, "", repeats=1, clock=turns.Clock(-1.0))
    assert found["not_reached"] == ["B1 L96 H2 P8 N4 G1 float32, forward"]
    assert found["rows"] == []


def test_the_chunked_form_in_plain_jax():
    """Several chunks, heads in groups."""
    operands = ssd.Case(2, 24, 4, 8, 4, groups=2, dtype="float32").operands()
    del operands["d_out"]
    want = ssd.ours("reference")(**operands)
    got = functools.partial(ssd.jax_chunked, most=8)(**operands)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_sources_run_without_their_package_and_its_compiled_code(tmp_path, monkeypatch):
    package = tmp_path / "package_of_sources"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("import a_compiled_extension_that_is_not_here\n")
    (package / "deep" / "__init__.py").write_text("")
    (package / "deep" / "kernel.py").write_text("ANSWER = 42\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        turns.source_module("nowhere.deep.kernel")
    for name in ("package_of_sources", "package_of_sources.deep", "package_of_sources.deep.kernel"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert turns.source_module("package_of_sources.deep.kernel").ANSWER == 42

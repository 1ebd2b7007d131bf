"""The MLP benchmark on a CPU: what it counts, what it writes, and that no peer can end a run."""

from __future__ import annotations

import json
from typing import ClassVar

import jax.numpy as jnp
import pytest

from bench import mlp, timing
from bench.mlp import Case, Peer

GELU, SWIGLU, MATMUL = mlp.SETS["tiny"]()


def quiet(text: str) -> None:
    pass


def named(*names: str) -> list[Peer]:
    return [peer for peer in mlp.find()[0] if peer.name in names]


def test_the_grid_is_that_of_the_issue():
    cases = mlp.SETS["all"]()
    assert {c.tokens for c in cases if c.hidden} == {512, 8192, 16_384}
    assert {(c.width, c.hidden) for c in cases if c.hidden and not c.gated} == {(d, 4 * d) for d in (2048, 4096, 8192)}
    assert {(c.width, c.hidden) for c in cases if c.gated} == {(2048, 5504), (4096, 10_880), (8192, 21_888)}
    assert [c.width for c in cases if c.hidden is None] == [2048, 4096, 8192]


def test_flops_by_hand():
    assert GELU.flops("forward") == 2 * 16 * (8 * 32 + 32 * 8)
    assert SWIGLU.flops("forward+backward") == 3 * 2 * 16 * (3 * 8 * 24)
    assert MATMUL.flops("forward") == 2 * 8 * 8 * 8


def test_kept_bytes_by_hand():
    flax, ours, inputs = named("flax", "fast_layers", "fast_layers saving inputs")
    row = 16 * 2
    assert mlp.kept_bytes(ours, SWIGLU) == row * (8 + 2 * 24)
    assert mlp.kept_bytes(ours, GELU) == row * (8 + 32)
    assert mlp.kept_bytes(inputs, SWIGLU) == row * 8
    assert mlp.kept_bytes(ours, MATMUL) == 8 * 8 * 2
    assert mlp.kept_bytes(ours, SWIGLU) <= 2 / 3 * mlp.kept_bytes(flax, SWIGLU)


def test_every_cell_of_a_tiny_run(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench"])
    out, hlo = tmp_path / "results" / "mlp.json", tmp_path / "hlo"
    mlp.main(["--cases", "tiny", "--repeats", "1", "--out", str(out), "--hlo", str(hlo), "--peers", "flax"])
    found = json.loads(out.read_text())
    assert found["schema"] == 1
    assert "torch" in found["absent"]
    rows = {(row["case"], row["pass"], row["name"]): row for row in found["rows"]}
    for case in (GELU, SWIGLU, MATMUL):
        for pass_ in mlp.PASSES:
            for name in ("flax", "fast_layers", "again", "fast_layers xla"):
                row = rows[case.name, pass_, name]
                assert row["refused"] is None
                assert row["agrees"], row
                assert row["seconds"] > 0
                assert row["ratio"] > 0
                assert row["tflops"] == pytest.approx(case.flops(pass_) * 1e-12 / row["seconds"])
                assert row["share_of_matmul"] > 0
    assert rows[GELU.name, "forward+backward", "fast_layers"]["backend"] == "xla"
    assert rows[MATMUL.name, "forward", "fast_layers saving inputs"]["refused"] == "the same as fast_layers here"
    assert out.with_name("mlp_bars.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    texts = [path.read_text() for path in hlo.iterdir()]
    assert texts
    assert all("HloModule" in text for text in texts)


class FakeCupti:
    """Tells what `calls` have noted since the last time, as (kernel, milliseconds)."""

    launched: ClassVar[list[tuple[str, float]]] = []

    def __init__(self, finalize: bool):
        pass

    def measure(self, row, aggregate: bool):
        def measured():
            self.launched.clear()
            return row(), list(self.launched)

        return measured


def test_single_calls_stand_in_one_row(monkeypatch):
    monkeypatch.setattr(mlp.profiler, "Cupti", FakeCupti)
    kernels = {"a": ["matmul"], "b": ["matmul", "add"], "c": ["other"]}
    times = iter(range(1000))

    def call(name):
        FakeCupti.launched.extend((kernel, float(next(times))) for kernel in kernels[name])

    calls = {name: lambda name=name: call(name) for name in kernels}
    assert "".join(timing.turns_of(list(calls), 5)) == "acbbcabaccabcba"
    found = mlp.seconds_in_one_row(calls, 2)  # 0 to 3 alone; then a c bb bb c a
    assert found == {"a": [4e-3, 11e-3], "b": [pytest.approx(13e-3), pytest.approx(17e-3)], "c": [5e-3, 10e-3]}
    kernels["c"] = []
    with pytest.raises(RuntimeError, match="the kernels of c in the row"):
        mlp.seconds_in_one_row(calls, 1)


def test_a_peer_that_fails_or_is_wrong_does_not_count():
    def explode(case, weights, x):
        raise RuntimeError("no such instruction")

    def wrong(case, weights, x):
        return x * jnp.asarray(1.5, x.dtype)

    there = [*named("flax", "fast_layers"), Peer("fails", explode), Peer("wrong", wrong)]
    rows = mlp.measure_cell(GELU, "forward", there, 1, timing.Stopwatch(), roof=1.0)
    by_name = {row.name: row for row in rows}
    assert by_name["fails"].refused == "RuntimeError: no such instruction"
    assert not by_name["wrong"].agrees
    assert by_name["flax"].ratio == 1.0
    text = mlp.table(rows)
    assert "VALUES DIFFER" in text
    assert "no such instruction" in text


def test_the_time_limit_is_kept_and_told():
    report = mlp.run([GELU], [], {}, clock=mlp.Clock(0.0), say=quiet)
    assert report["rows"] == []
    assert report["not_reached"] == [f"{GELU.name} {pass_}" for pass_ in mlp.PASSES]


def test_widths_are_taken_in_the_order_asked_for():
    cases = mlp.of_widths(mlp.SETS["all"](), (8192, 2048))
    assert list(dict.fromkeys(case.width for case in cases)) == [8192, 2048]
    assert [case.tokens for case in cases if case.width == 8192] == [16_384, 16_384, 8192, 8192, 512, 512, 8192]


@pytest.mark.parametrize(
    "arguments",
    [["--cases", "huge"], ["--quick", "--cases", "tiny"], ["--peers", "numpy"], ["--cases", "cpu", "--widths", "8192"]],
)
def test_usage_errors(arguments):
    with pytest.raises(SystemExit):
        mlp.main(arguments)


def test_cases_say_what_they_are():
    assert [case.name for case in (GELU, SWIGLU, MATMUL)] == ["M16 I8 gelu F32", "M16 I8 swiglu F24", "M8 I8 matmul"]
    assert Case(1, 2, 3).activation == "gelu_tanh"

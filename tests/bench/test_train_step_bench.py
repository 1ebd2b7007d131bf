"""The benchmark of a whole model on a CPU: that peers compute the same, and what it writes and refuses."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from bench import __main__ as bench_main
from bench import train_step


def _run(monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["bench", "train_step", "--tiny", "--repeats", "1", *options])
    bench_main.main()


def test_the_command_writes_all_peers_with_loss_and_gradients(tmp_path, monkeypatch, capsys):
    out = tmp_path / "step.json"
    _run(monkeypatch, "--archs", "transformer", "--peers", "alone", "xla", "flax", "cudnn", "--out", str(out))
    rows = {(row["case"].split()[-2], row["name"]): row for row in json.loads(out.read_text())["rows"]}
    for kind in ("whole,", "packed,"):
        for name in ("fast_layers", "fast_layers attention alone", "fast_layers xla", "flax"):
            row = rows[kind, name]
            assert row["seconds"] > 0
            assert row["relative_error"] < 1e-5
            assert {"loss", "embed.embedding.value", "blocks.1.mlp.down.kernel.value"} < set(row["relative_errors"])
        assert "seconds" not in rows[kind, "cudnn attention"]
    assert rows["packed,", "cudnn attention"]["refused"] == "NotImplementedError: takes no documents"
    assert "transformer cpu-small, 2 layers, 4 x 32 packed, float32, step" in capsys.readouterr().out


def test_of_mamba_there_are_our_own():
    (case,) = _cases("--archs", "mamba2", "--rows", "packed")
    assert [peer.name for peer in train_step.peers_of(case)] == ["fast_layers", "fast_layers xla", "again"]
    operands = case.operands()
    (ours, xla) = (train_step.gradients(case, backend=backend)(**operands) for backend in (None, "xla"))
    assert ours.keys() == xla.keys() == {"loss", *operands} - set(train_step.BATCH)
    assert np.isfinite(ours["loss"])


def test_a_packed_row_has_several_documents():
    (case,) = _cases("--archs", "transformer", "--rows", "packed", "--seq-len", "512", "--tokens", "4096")
    ids = np.asarray(case.operands()["segment_ids"])[0]
    assert ids.shape == (8, 512)
    assert (np.diff(ids, axis=1) >= 0).all()
    assert 2 < np.mean([len(set(row)) for row in ids]) < 8


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--seq-len", "1"], "--seq-len 1: take at least 2"),
        (["--layers", "0"], "--layers 0: take at least 1"),
        (["--peers", "nobody"], "no peer's name contains it"),
        (["--presets", "2B"], "invalid choice: '2B'"),
    ],
)
def test_what_is_asked_for_wrongly_is_a_usage_error(options, words, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        _run(monkeypatch, *options)
    assert words in capsys.readouterr().err


def _cases(*options):
    return list(train_step.cases(train_step.parser().parse_args(["--tiny", *options])))

"""What a benchmark is asked is checked before it measures: wrong options end as usage errors, without a traceback."""

from __future__ import annotations

import sys

import pytest

from bench.__main__ import COMMANDS
from bench.__main__ import main as bench_main


@pytest.fixture
def refused(monkeypatch, capsys):
    """What the command says that refuses these options."""

    def run(*options):
        monkeypatch.setattr(sys, "argv", ["bench", *options])
        with pytest.raises(SystemExit, match="2"):
            bench_main()
        return capsys.readouterr().err

    return run


WRONG = {
    "ssd --tiny --repeats 0": "--repeats 0: take at least 1",
    "ssd --tiny --time-limit nan": "--time-limit nan: take at least 0",
    "ssd --tiny --peers fla numpy": "--peers numpy: no peer's name contains it; the names are fast_layers xla, ",
    "mamba2 --tiny --kinds norm --peers conv": "--peers conv: no peer's name contains it",
    "mamba2 --tiny --repeats -3": "--repeats -3: take at least 1",
    "mlp --cases tiny --repeats 0": "--repeats 0: take at least 1",
    "mlp --cases tiny --peers numpy": "--peers numpy: no peer's name contains it",
    "mlp --widths 3": "error: --widths 3: no case has so many",
    "decode --capacity 1000": "--capacity 1000: take at least 1024",
    "decode --queries 200 --capacity 1024": "--queries 200: take at most an eighth of --capacity 1024",
    "decode --repeats 0": "--repeats 0: take at least 1",
    "decode --batch 1 0": "--batch 1 0: take at least 1",
    "decode --kv-heads 3": "--heads 8 --kv-heads 3: heads must be a multiple of key heads",
    "host_cost --depths 64 0": "--depths 64 0: take at least 1",
    "host_cost --depths 4096": "--depths 4096: take at most 2048",
    "host_cost --lengths 0": "--lengths 0: take at least 1",
    "memory --archs --no-mlp": "leaves nothing to compile",
    "compiled ssd --calls (": "'(' is no regular expression",
}


@pytest.mark.parametrize(("command", "message"), WRONG.items(), ids=WRONG)
def test_wrong_options(command, message, refused):
    assert message in refused(*command.split())


OF_COMMAND = {"compiled": ["ssd"], "ssd": ["--tiny"], "mamba2": ["--tiny"]}


@pytest.mark.parametrize("command", COMMANDS)
def test_what_cannot_be_written_is_told_before_anything_is_measured(command, refused, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.json").mkdir()
    options = OF_COMMAND.get(command, [])
    for out in (tmp_path / "file" / "out.json", tmp_path / "folder.json"):
        assert f"--out {out}: cannot be written" in refused(command, *options, "--out", str(out))
    if command in ("ssd", "mamba2", "mlp"):
        assert "cannot be a folder" in refused(command, *options, "--hlo", str(tmp_path / "file"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.json"]

"""Mistakes cost one line and exit code 2, before anything is computed or overwritten."""

import json
import shutil

import pytest
import train_lm


def fails(capsys, *flags: str) -> str:
    """The error line of a command line that is refused."""
    with pytest.raises(SystemExit) as exit:
        train_lm.main(list(flags))
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("train_lm.py: error: ")
    assert error.count("\n") == 1, "one line"
    return error


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--data", "/no/such/place"], "--data /no/such/place: no such file or folder"),
        (["--seq-len", "1"], "--seq-len 1: a row needs at least 2 bytes"),
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--layers", "-1"], "--layers -1: must be at least 1"),
        (["--heads", "5"], "--width 128 is not divisible by --heads 5"),
        (["--kv-heads", "3"], "--heads 4 is not divisible by --kv-heads 3"),
        (["--width", "12"], "heads of 3 features"),
        (["--accumulate", "3"], "--batch-size 16 is not divisible by --accumulate 3"),
        (["--learning-rate", "0"], "--learning-rate 0.0: must be a positive number"),
        (["--learning-rate", "nan"], "--learning-rate nan: must be a positive number"),
        (["--clip-norm", "-1"], "--clip-norm -1.0: must be a positive number"),
        (["--weight-decay", "-1"], "--weight-decay -1.0: must be a number, 0 or more"),
        (["--warmup", "1"], "--warmup 1.0: must be a fraction"),
        (["--seed", "-1"], "--seed -1: must be at least 0"),
        (["--max-bytes", "-1"], "--max-bytes -1: must be 0 (no limit) or more"),
        (["--steps", "many"], "invalid int value: 'many'"),
        (["--preset", "7B"], "invalid choice: '7B'"),
        (["--resume", "--overwrite"], "not allowed with argument"),
        (["--checkpoint-every", "0"], "--checkpoint-every 0: must be at least 1"),
        (["--log-every", "0"], "--log-every 0: must be at least 1"),
        (["--temperature", "-1"], "--temperature -1.0: must be a number, 0 or more"),
        (["--prompt", ""], "--prompt is empty"),
        (["--sample-bytes", "300"], "--sample-bytes 300: must be at least 0 and, with the 4 bytes"),
    ],
)
def test_bad_flags(capsys, tmp_path, flags, words):
    out = tmp_path / "run"
    assert words in fails(capsys, "--out", str(out), *flags)
    assert not out.exists()


def test_bad_paths(capsys, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    out = str(tmp_path / "run")
    assert "no text found" in fails(capsys, "--out", out, "--data", str(tmp_path / "file"))
    assert "no text found" in fails(capsys, "--out", out, "--data", str(tmp_path / "folder"))
    assert "is a file; name a directory" in fails(capsys, "--out", str(tmp_path / "file"))


@pytest.fixture
def finished(uninterrupted, tmp_path):
    """A copy of a finished run."""
    return shutil.copytree(uninterrupted[0], tmp_path / "run")


def test_a_run_is_not_overwritten(capsys, finished):
    before = (finished / "metrics.jsonl").read_bytes()
    error = fails(capsys, "--out", str(finished))
    for way_out in ("--resume", "--overwrite", "another --out"):
        assert way_out in error
    assert (finished / "metrics.jsonl").read_bytes() == before


def test_resuming_with_other_settings_is_refused(capsys, finished):
    error = fails(capsys, "--resume", "--out", str(finished), "--steps", "40")
    assert f"--steps 40: the run in {finished} has 30" in error


def test_resuming_with_other_text_is_refused(capsys, finished):
    facts = json.loads((finished / "config.json").read_text())
    facts["data"]["sha256"] = "0" * 64
    (finished / "config.json").write_text(json.dumps(facts))
    assert "is not the text that the run" in fails(capsys, "--resume", "--out", str(finished))


def test_resuming_without_a_usable_config_is_refused(capsys, finished):
    for text in ("{", "[]", '{"config": {"layers": 1}}', '{"config": {"depth": 1}}'):
        (finished / "config.json").write_text(text)
        assert "not the config of a run" in fails(capsys, "--resume", "--out", str(finished))
    (finished / "config.json").unlink()
    assert "no config.json to resume by" in fails(capsys, "--resume", "--out", str(finished))


def test_overwrite_starts_anew(capsys, finished, tiny):
    flags = [*tiny, "--steps", "2", "--out", str(finished), "--overwrite", "--sample-bytes", "0"]
    assert train_lm.main(flags) == 0
    assert len((finished / "metrics.jsonl").read_text().splitlines()) == 2
    assert [step.name for step in (finished / "checkpoints").iterdir()] == ["2"]


def test_a_diverging_run_stops(capsys, tmp_path, tiny):
    flags = [*tiny, "--steps", "6", "--out", str(tmp_path / "run"), "--learning-rate", "1e30"]
    assert train_lm.main(flags) == 1
    assert "lower --learning-rate" in capsys.readouterr().out
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))

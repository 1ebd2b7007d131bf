"""Killing, damaging and resuming runs."""

import json
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from lm.checkpoints import Checkpoints
from lm.config import Config, UserError
from lm.data import Corpus, batches
from lm.run_dir import RunDir
from lm.training import TrainState


def kill_when(process, condition: Callable[[], bool], seconds: float = 120):
    """SIGKILLs a process as soon as a condition holds; it must still be running then."""
    give_up = time.monotonic() + seconds
    while not condition() and process.poll() is None:
        assert time.monotonic() < give_up, "the moment to kill never came"
    process.send_signal(signal.SIGKILL)
    output, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, output


def test_a_run_killed_twice_has_the_losses_of_an_uninterrupted_one(start, run, uninterrupted, losses, tiny, tmp_path):
    out = tmp_path / "run"
    metrics, checkpoints = out / "metrics.jsonl", out / "checkpoints"
    flags = (*tiny, "--out", str(out), "--sample-bytes", "0", "--resume")

    # Before the first checkpoint, and while writing the third, when there are metrics past the second.
    kill_when(start(*flags), lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 2)
    assert not list(checkpoints.glob("[0-9]*"))
    kill_when(start(*flags), lambda: (checkpoints / ".saving-15").exists())
    assert len(metrics.read_text().splitlines()) >= 15
    output = run(*flags)

    assert "resuming after step 10" in output
    assert losses(out) == losses(uninterrupted[0])  # equal floats, not close ones


def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_is_used(run, uninterrupted, losses, tmp_path):
    out = tmp_path / "run [red]"
    shutil.copytree(uninterrupted[0], out)
    (array,) = sorted((out / "checkpoints" / "30").rglob("*"), key=lambda path: path.stat().st_size)[-1:]
    array.write_bytes(array.read_bytes()[:-100])

    output = run("--resume", "--out", str(out), "--sample-bytes", "0")
    assert f"damaged checkpoint set aside in {out}/checkpoints-damaged/30.0: state/" in output
    assert f"{array.name} is not as it was written" in output
    assert "resuming after step 25" in output
    assert losses(out) == losses(uninterrupted[0])
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["20", "25", "30"]


def delete(file: Path) -> None:
    file.unlink()


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip_a_bit(file: Path) -> None:
    text = bytearray(file.read_bytes())
    text[len(text) // 2] ^= 1
    file.write_bytes(text)


@pytest.fixture
def saved(tmp_path):
    """A folder with checkpoints of steps 1 and 2 of something small, and what reads them."""
    data = batches(Corpus([b"text"] * 9, ""), Config(seq_len=4, batch_size=2))
    state = TrainState({"w": jnp.arange(4.0)}, (), jnp.zeros((), jnp.int32))
    folder = tmp_path / "checkpoints"
    checkpoints = Checkpoints(folder)
    for step in (1, 2):
        next(data)
        checkpoints.save(step, state._replace(step=jnp.int32(step)), data)
    return folder, lambda: Checkpoints(folder).restore_newest(state, data)


@pytest.mark.parametrize("damage", [delete, truncate, flip_a_bit])
def test_any_damaged_file_is_noticed(saved, damage):
    folder, restore = saved
    files = [file.relative_to(folder / "2") for file in (folder / "2").rglob("*") if file.is_file()]
    assert len(files) > 4
    for number, file in enumerate(files):
        sound = folder.with_name("sound")
        shutil.copytree(folder / "2", sound)
        damage(folder / "2" / file)
        restored = restore()
        assert restored.step == int(restored.state.step) == 1
        ((place, reason),) = restored.damaged.items()
        assert place == str(folder.with_name("checkpoints-damaged") / f"2.{number}")
        assert str(file) in reason or file.name == "SHA256SUMS"
        sound.rename(folder / "2")
    assert restore().step == 2


def test_without_a_sound_checkpoint_nothing_is_moved_and_all_are_named(saved):
    folder, restore = saved
    for step in ("1", "2"):
        delete(folder / step / "data.json")
    with pytest.raises(UserError, match="no usable checkpoint") as error:
        restore()
    for step in ("1", "2"):
        assert f"{folder / step}: data.json is missing" in str(error.value)
        assert (folder / step).exists()


def test_restoring_sets_the_position_of_the_data(tmp_path):
    config, corpus = Config(seq_len=8, batch_size=2), Corpus([bytes(range(200))], "")
    data, again = batches(corpus, config), batches(corpus, config)
    state = TrainState({"w": jnp.arange(4.0)}, (), jnp.zeros((), jnp.int32))
    next(data)
    Checkpoints(tmp_path).save(1, state, data)
    Checkpoints(tmp_path).restore_newest(state, again)
    assert np.array_equal(next(data)["tokens"], next(again)["tokens"])


def test_leftovers_of_a_kill_are_removed_and_only_the_newest_kept(saved):
    folder, restore = saved
    (folder / ".saving-3" / "state").mkdir(parents=True)
    checkpoints = Checkpoints(folder)
    assert [entry.name for entry in folder.glob(".*")] == []
    restored = restore()
    data = batches(Corpus([b"text"] * 9, ""), Config(seq_len=4, batch_size=2))
    for step in (3, 4):
        checkpoints.save(step, restored.state, data)
    assert checkpoints.steps() == [2, 3, 4]


def test_metrics_past_the_checkpoint_and_half_lines_are_dropped(tmp_path):
    run_dir = RunDir(tmp_path)
    lines = [json.dumps({"step": step, "loss": 1.5}) for step in range(1, 8)]
    run_dir.metrics.write_text("\n".join([*lines, '{"step": 2']))
    run_dir.truncate_metrics(5)
    assert run_dir.metrics.read_text().splitlines() == lines[:5]
    run_dir.metrics.write_text("\n".join([*lines[:3], lines[3][:-4]]))
    run_dir.truncate_metrics(3)
    assert run_dir.metrics.read_text().splitlines() == lines[:3]
    with pytest.raises(UserError, match="does not have each step up to that of the checkpoint, 4, once"):
        run_dir.truncate_metrics(4)

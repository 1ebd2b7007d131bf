"""Saves and restores all that a run needs to continue: parameters, optimiser state, step, input position. Bit for bit,
as far as the program, compiled again, computes the same.

    checkpoints/120/state/      Orbax: parameters, optimiser state, step
    checkpoints/120/data.json   the position of the input iterator
    checkpoints/120/SHA256SUMS  of every other file; `sha256sum -c` reads it too

A checkpoint is written under a hidden name and renamed when complete, so a kill leaves none half-written.
Damage to files at rest is found by the sums before Orbax reads anything: a flipped bit in an array file is no
error to Orbax.
"""

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import grain
import orbax.checkpoint as ocp

from .config import UserError
from .training import TrainState

_KEPT = 3  # newest checkpoints that stay
_SUMS = "SHA256SUMS"


class _Damaged(Exception):
    """Why a checkpoint cannot be trusted."""


@dataclasses.dataclass(frozen=True)
class Restored:
    state: TrainState
    step: int
    damaged: dict[str, str]  # newer checkpoints that were passed over: where they lie now, and what is wrong


class Checkpoints:
    """The checkpoints in one folder, named by their step."""

    def __init__(self, folder: Path):
        self._folder = folder.absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        for pattern in (".saving-*", ".deleting-*"):
            for leftover in self._folder.glob(pattern):
                shutil.rmtree(leftover)
        self._orbax = ocp.Checkpointer(ocp.StandardCheckpointHandler())

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, damaged or not, in rising order."""
        return sorted(int(entry.name) for entry in self._folder.iterdir() if entry.name.isdecimal())

    def save(self, step: int, state: TrainState, data: grain.DatasetIterator) -> None:
        """Writes a checkpoint, drops the oldest, and returns when done: the next step reuses the memory."""
        unfinished = self._folder / f".saving-{step}"
        unfinished.mkdir()
        self._orbax.save(unfinished / "state", args=ocp.args.StandardSave(state))
        (unfinished / "data.json").write_text(json.dumps(data.get_state()))
        sums = {file.relative_to(unfinished): _sha256(file) for file in _files(unfinished)}
        (unfinished / _SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in sums.items()))
        unfinished.rename(self._folder / str(step))
        for old in self.steps()[:-_KEPT]:
            # Hidden first, so that a kill in between leaves no half-deleted checkpoint.
            hidden = (self._folder / str(old)).rename(self._folder / f".deleting-{old}")
            shutil.rmtree(hidden)

    def restore_newest(self, like: TrainState, data: grain.DatasetIterator) -> Restored | None:
        """Restores the newest sound checkpoint and sets the position of data; None if there is no checkpoint
        yet.

        Damaged newer ones are moved to the folder <folder>-damaged, because their steps will be saved again.
        Raises UserError, and moves nothing, if all are damaged.
        """
        damaged: dict[int, str] = {}
        for step in reversed(self.steps()):
            folder = self._folder / str(step)
            try:
                _verify(folder)
            except _Damaged as error:
                damaged[step] = str(error)
                continue
            state = self._orbax.restore(folder / "state", args=ocp.args.StandardRestore(like))
            data.set_state(json.loads((folder / "data.json").read_text()))
            return Restored(state, step, {str(self._set_aside(s)): reason for s, reason in damaged.items()})
        if damaged:
            reasons = "; ".join(f"{self._folder / str(step)}: {reason}" for step, reason in damaged.items())
            raise UserError(f"no usable checkpoint: {reasons}. Start anew with --overwrite or another --out")
        return None

    def _set_aside(self, step: int) -> Path:
        shelf = self._folder.with_name(self._folder.name + "-damaged")
        shelf.mkdir(exist_ok=True)
        earlier = len(list(shelf.glob(f"{step}.*")))
        return (self._folder / str(step)).rename(shelf / f"{step}.{earlier}")


def _verify(checkpoint: Path) -> None:
    """Raises _Damaged unless the files are exactly those that were written."""
    try:
        lines = (line.partition("  ") for line in (checkpoint / _SUMS).read_text().splitlines())
        written = {name: digest for digest, _, name in lines}
        found = {str(file.relative_to(checkpoint)): file for file in _files(checkpoint) if file.name != _SUMS}
        for name in sorted(written | found):
            if name not in found:
                raise _Damaged(f"{name} is missing")
            if _sha256(found[name]) != written.get(name):
                raise _Damaged(f"{name} is not as it was written")
    except FileNotFoundError as error:
        raise _Damaged(f"{_SUMS} is missing") from error
    except (OSError, UnicodeDecodeError) as error:  # a disk that fails to read, a list that is no text
        raise _Damaged(str(error)) from error


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

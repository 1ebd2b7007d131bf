"""The output directory of a run: config.json, metrics.jsonl, loss.png and checkpoints/."""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

from .config import Config, UserError, flag, from_flags
from .data import Corpus

# In the order of their removal: without config.json there is no run, whatever else is left by a kill in
# between.
_PARTS = ("config.json", "metrics.jsonl", "loss.png", "checkpoints", "checkpoints-damaged")


class RunDir:
    def __init__(self, path: Path):
        if path.exists() and not path.is_dir():
            raise UserError(f"--out {path}: is a file; name a directory")
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.plot = path / "loss.png"
        self.checkpoints = path / "checkpoints"
        self._config = path / "config.json"

    def settle_config(self, given: dict[str, Any], *, resume: bool, overwrite: bool) -> Config:
        """The Config of a new run from the flags given, or with resume that of the run that is here.

        A run killed before it wrote config.json did nothing yet, so resume then starts it. Raises UserError
        when flags contradict the run to be resumed, or when a new run would write over an old one.
        """
        if resume and self._config.exists():
            config = self._saved()[0]
            for name, value in given.items():
                if value != (saved := getattr(config, name)):
                    raise UserError(
                        f"{flag(name)} {value}: the run in {self.path} has {saved}; "
                        "leave the flag out to resume it, or start another run with another --out"
                    )
            return config
        config = from_flags(given)
        old = [part for part in _PARTS if (self.path / part).exists()]
        if old and not overwrite:
            way_out = "delete it with --overwrite or choose another --out"
            if resume:
                raise UserError(f"--out {self.path}: has {old[0]} but no config.json to resume by; {way_out}")
            raise UserError(f"--out {self.path}: holds a run already; continue it with --resume, {way_out}")
        return config

    def begin(self, config: Config, corpus: Corpus, *, overwrite: bool) -> None:
        """Makes the directory that of this run, or checks that the data is still that of the run."""
        data = {"source": corpus.source, "bytes": corpus.size, "sha256": corpus.digest()}
        if overwrite:
            for part in _PARTS:
                remove = shutil.rmtree if (self.path / part).is_dir() else Path.unlink
                if (self.path / part).exists():
                    remove(self.path / part)
        if self._config.exists():
            saved = self._saved()[1]
            if saved["sha256"] != data["sha256"]:
                raise UserError(
                    f"--data: {corpus.source} ({corpus.size:,} bytes) is not the text that the run in "
                    f"{self.path} was started with ({saved['source']}, {saved['bytes']:,} bytes); "
                    "restore the text or use another --out"
                )
        else:
            self.path.mkdir(parents=True, exist_ok=True)
            facts = {"config": dataclasses.asdict(config), "data": data}
            _replace(self._config, json.dumps(facts, indent=2) + "\n")

    def _saved(self) -> tuple[Config, dict[str, Any]]:
        """The Config of the run, and the source, bytes and sha256 of its text."""
        try:
            facts = json.loads(self._config.read_text())
            return Config(**facts["config"]), {name: facts["data"][name] for name in ("source", "bytes", "sha256")}
        except (ValueError, TypeError, KeyError) as error:  # no JSON, or not with these fields
            raise UserError(
                f"{self._config}: not the config of a run of this version ({error!r}); use another --out"
            ) from error

    def truncate_metrics(self, last_step: int) -> None:
        """Drops the metrics of steps that will be repeated, and a last line that a kill left half-written."""
        lines = self.metrics.read_text().splitlines() if self.metrics.exists() else []
        kept = [line for line in lines if _step_of(line) <= last_step]
        if [_step_of(line) for line in kept] != list(range(1, last_step + 1)):
            raise UserError(
                f"{self.metrics}: does not have each step up to that of the checkpoint, {last_step}, once; "
                "restore the file, or start anew with --overwrite or another --out"
            )
        _replace(self.metrics, "".join(line + "\n" for line in kept))


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _replace(file: Path, text: str) -> None:
    """Writes a file that is either the old or the new one at any moment."""
    new = file.with_name(f".{file.name}.new")
    new.write_text(text)
    os.replace(new, file)

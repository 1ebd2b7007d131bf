"""Checks of what a benchmark was asked, before minutes go into measuring. What is wrong ends it as a usage error."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from pathlib import Path


def check_numbers(parser: argparse.ArgumentParser, args: argparse.Namespace, **least: int) -> None:
    """Of the options that are given, each number must be at least so much; NaN is not."""
    for name, smallest in least.items():
        given = getattr(args, name)
        numbers = given if isinstance(given, list) else [] if given is None else [given]
        if not all(number >= smallest for number in numbers):
            told = " ".join(map(str, numbers))
            parser.error(f"--{name.replace('_', '-')} {told}: take at least {smallest}")


def check_file(parser: argparse.ArgumentParser, path: Path | None) -> None:
    """That `--out` can be written as this file, in a folder that is made where there is none."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError("it is read-only")
        unfinished = path.with_suffix(".unfinished")
        unfinished.touch()
        unfinished.unlink()
    except OSError as error:
        parser.error(f"--out {path}: cannot be written ({error}); take another")


def check_folder(parser: argparse.ArgumentParser, option: str, path: Path | None) -> None:
    if path is None:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"{option} {path}: cannot be a folder ({error}); take another")


def check_peers(parser: argparse.ArgumentParser, wanted: Iterable[str] | None, names: Iterable[str]) -> None:
    """That each is a part of some peer's name."""
    names = list(dict.fromkeys(names))
    for part in wanted or ():
        if not any(part in name for name in names):
            parser.error(f"--peers {part}: no peer's name contains it; the names are {', '.join(names)}")

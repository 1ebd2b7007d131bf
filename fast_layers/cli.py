"""The command line: `python -m fast_layers <command>`.

A command is a module with `add_parser(subparsers)`, which sets `run=` to a function from the parsed arguments to an
exit code; and an entry in `_COMMANDS`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fast_layers import doctor, tune
from fast_layers._version import __version__

_COMMANDS = (doctor, tune)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m fast_layers", description="fast_layers on the device at hand.")
    parser.add_argument("--version", action="version", version=f"fast_layers {__version__}")
    subparsers = parser.add_subparsers(required=True, dest="command")
    for command in _COMMANDS:
        command.add_parser(subparsers)
    parsed = parser.parse_args(arguments)
    return parsed.run(parsed)

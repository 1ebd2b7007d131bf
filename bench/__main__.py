"""`python -m bench attention [options]`, and `compiled`, `decode`, `host_cost`, `mamba2`, `memory`, `mlp`, `ssd` or
`train_step` in its place."""

from __future__ import annotations

import importlib
import sys

COMMANDS = ("attention", "compiled", "decode", "host_cost", "mamba2", "memory", "mlp", "ssd", "train_step")


def main() -> None:
    usage = f"python -m bench {{{' | '.join(COMMANDS)}}} [options]"
    if sys.argv[1:] in (["--help"], ["-h"]):
        print(f"{usage}; --help behind a name shows its options")
        return
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        given = " ".join(sys.argv[1:]) or "nothing"
        raise SystemExit(f"{usage}: got {given}; --help behind a name shows its options")
    command = sys.argv.pop(1)
    importlib.import_module(f"bench.{command}").main()


if __name__ == "__main__":
    main()

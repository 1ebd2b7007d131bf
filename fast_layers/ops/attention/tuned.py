"""Tiles that were measured: the table that comes with the package, and the user's own, which comes first.

`python -m fast_layers tune attention` writes the user's, to FAST_LAYERS_TILES if that is set (an empty value means no
user table), else to fast_layers/attention_tiles.json below XDG_CONFIG_HOME or ~/.config, if there is a home. A call
that stands in neither takes the rules in `hopper_fwd_config.py` and `hopper_bwd_config.py`. Tables are read once per
process, when the first kernel is traced.

A table is a JSON object, `{"format": 7, "device": ..., "date": ..., "command": ..., "entries": [...]}`. An entry says
which calls it is for (`arch`, `pass`, `qk_dim`, `v_dim`, `mask`, and `longest`, the most queries or keys, null for any
number) and their `tiles`, as the class takes them. What is damaged is reported and ignored, as a whole.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fast_layers.ops.attention.config import HOPPER_SMEM_BYTES, MAX_SHALLOW_DEPTH
from fast_layers.ops.attention.hopper_bwd_config import HopperBackwardTiles, HopperDeepBackwardTiles
from fast_layers.ops.attention.hopper_fwd_config import HopperForwardTiles
from fast_layers.ops.attention.problem import Problem

FORMAT = 7
"""Of the file. Tables of earlier formats were measured with other kernels."""
USER_TABLE = "FAST_LAYERS_TILES"
MASKS = ("full", "causal", "window", "arrays")
HOPPER = "sm_90"
_RETUNE = "delete it, or write it anew with `python -m fast_layers tune attention`"

Tiles = HopperForwardTiles | HopperBackwardTiles | HopperDeepBackwardTiles


@dataclasses.dataclass(frozen=True)
class Entry:
    """`tiles` for all calls of this kind whose longer side has at most `longest` rows; None is for any length."""

    arch: str
    pass_: str
    qk_dim: int
    v_dim: int
    mask: str
    longest: int | None
    tiles: Tiles

    def __post_init__(self):
        if self.arch != HOPPER:
            raise ValueError(f"arch={self.arch!r} must be {HOPPER!r}")
        if self.mask not in MASKS:
            raise ValueError(f"mask={self.mask!r} must be one of {', '.join(MASKS)}")
        if self.longest is not None and (type(self.longest) is not int or self.longest < 1):
            raise ValueError(f"{self.longest=} must be a positive integer, or null for any length")
        wanted = tiles_class(self.pass_, self.qk_dim, self.v_dim)
        if not isinstance(self.tiles, wanted):
            raise ValueError(f"the {self.pass_} pass takes {wanted.__name__}, got {type(self.tiles).__name__}")
        if isinstance(self.tiles, HopperForwardTiles) and self.tiles.splits != 1:
            raise ValueError(f"splits={self.tiles.splits} must be 1: how often keys are split follows from the call")
        smem_bytes = self.tiles.smem_bytes(self.qk_dim, self.v_dim)
        if smem_bytes > HOPPER_SMEM_BYTES:
            raise ValueError(f"{self.tiles} needs {smem_bytes} bytes of shared memory, of {HOPPER_SMEM_BYTES}")

    @property
    def kind(self) -> tuple:
        return self.arch, self.pass_, self.qk_dim, self.v_dim, self.mask

    def as_json(self) -> dict[str, Any]:
        fields = {("pass" if name == "pass_" else name): value for name, value in vars(self).items()}
        return fields | {"tiles": dataclasses.asdict(self.tiles)}

    @classmethod
    def of_json(cls, raw: Any) -> Entry:
        names = {"arch", "pass", "qk_dim", "v_dim", "mask", "longest", "tiles"}
        if not isinstance(raw, Mapping) or set(raw) != names:
            raise ValueError(f"an entry must have exactly {', '.join(sorted(names))}, got {raw!r}")
        fields = dict(raw)
        pass_, tiles = fields.pop("pass"), fields.pop("tiles")
        return cls(pass_=pass_, tiles=_tiles_of_json(tiles_class(pass_, raw["qk_dim"], raw["v_dim"]), tiles), **fields)


def _tiles_of_json(kind: type[Tiles], raw: Any) -> Tiles:
    known = {field.name: field.default for field in dataclasses.fields(kind)}
    if not isinstance(raw, Mapping) or not set(raw) <= set(known):
        raise ValueError(f"tiles must have {', '.join(known)}, got {raw!r}")
    for name, value in raw.items():
        wanted = bool if isinstance(known[name], bool) else int
        if type(value) is not wanted:
            raise ValueError(f"tiles' {name} must be of type {wanted.__name__}, got {value!r}")
    try:
        return kind(**raw)
    except TypeError as error:  # one is missing
        raise ValueError(f"tiles {raw!r}: {error}") from error


def tiles_class(pass_: str, qk_dim: int, v_dim: int) -> type[Tiles]:
    if any(type(depth) is not int or depth < 1 for depth in (qk_dim, v_dim)):
        raise ValueError(f"{qk_dim=} and {v_dim=} must be positive integers")
    if pass_ == "forward":
        return HopperForwardTiles
    if pass_ != "backward":
        raise ValueError(f"pass={pass_!r} must be forward or backward")
    return HopperBackwardTiles if max(qk_dim, v_dim) <= MAX_SHALLOW_DEPTH else HopperDeepBackwardTiles


def mask_kind(problem: Problem) -> str | None:
    """One of `MASKS`; None where each score has something of its own, which no table covers."""
    mask = problem.mask
    if problem.per_score:
        return None
    if mask.interval_arrays or mask.segments:
        return "arrays"
    if mask.band is None:
        return "full"
    return "causal" if mask.band.low is None else "window"


def find(problem: Problem, pass_: str) -> Any:
    """The tiles that were measured for such a call, or None."""
    p = problem
    longest = max(p.q_len, p.kv_len)
    kind = (HOPPER, pass_, p.qk_dim, p.v_dim, mask_kind(p))
    for table in (user_table(), shipped_table()):
        fitting = [e for e in table if e.kind == kind and (e.longest is None or longest <= e.longest)]
        if fitting:
            return min(fitting, key=lambda entry: (entry.longest is None, entry.longest)).tiles
    return None


def user_path() -> Path | None:
    """Where the user's table is, or will be; None for nowhere."""
    named = os.environ.get(USER_TABLE)
    if named is not None:
        return Path(named) if named else None
    base = os.environ.get("XDG_CONFIG_HOME")
    try:
        return (Path(base) if base else Path.home() / ".config") / "fast_layers" / "attention_tiles.json"
    except RuntimeError:  # a user without a home, as in many containers
        return None


@functools.cache
def shipped_table() -> tuple[Entry, ...]:
    text = importlib.resources.files("fast_layers.ops.attention").joinpath("tuned_tiles.json").read_text()
    return parse(text)


@functools.cache
def user_table() -> tuple[Entry, ...]:
    """Empty if there is none, and with a warning if it is damaged, or is not where FAST_LAYERS_TILES says."""
    path = user_path()
    if path is None:
        return ()
    try:
        return parse(path.read_text())
    except FileNotFoundError:
        if USER_TABLE in os.environ:
            warnings.warn(
                f"{USER_TABLE} names the table of tiles {path}, which is not there: correct or unset it, or write the "
                "table with `python -m fast_layers tune attention`",
                stacklevel=2,
            )
        return ()
    except (OSError, ValueError) as error:
        warnings.warn(f"the table of tiles in {path} is ignored: {error}; {_RETUNE}", stacklevel=2)
        return ()


def parse(text: str) -> tuple[Entry, ...]:
    """Raises ValueError for what is no table."""
    try:
        raw = json.loads(text)
    except RecursionError:
        raise ValueError("it nests too deep") from None
    if not isinstance(raw, Mapping) or raw.get("format") != FORMAT or not isinstance(raw.get("entries"), list):
        raise ValueError(f'it must be an object with "format": {FORMAT} and a list "entries"')
    entries = tuple(Entry.of_json(entry) for entry in raw["entries"])
    places = [(entry.kind, entry.longest) for entry in entries]
    if len(set(places)) < len(places):
        raise ValueError("two entries are for the same calls")
    return entries


def dump(entries: Sequence[Entry], **origin: str) -> str:
    """A table's text; `origin` says on which device, when and how it was measured."""
    return json.dumps({"format": FORMAT, **origin, "entries": [e.as_json() for e in entries]}, indent=1) + "\n"

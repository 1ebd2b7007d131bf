"""`python -m fast_layers tune attention`: which tiles are fastest on the GPU at hand, written to the user's table.

For each pass, depth, mask and length every legal shape of tiles is timed, and of the three fastest shapes all grids and
orders; the tiles of the built-in rule always, so that no entry is slower than it. They are compiled in threads before
any is timed. The fastest choice whose results also pass the parity suite's rule becomes an entry;
`fast_layers.ops.attention.tuned` reads them. The table is written after each pass, depth and mask; what stands in it
for other calls stays. What fails is told and passed over, and the exit code is 1 then. About a minute for each
combination, of which there are 54 by default, nearly all of it spent compiling; stderr tells what is being done.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fast_layers.arch import lowering_targets
from fast_layers.dispatch import PASSES, Backend
from fast_layers.ops.attention import api, tuned
from fast_layers.ops.attention.config import HOPPER_SMEM_BYTES, HOPPER_SMS
from fast_layers.ops.attention.hopper_bwd_config import (
    WHOLE_HEADS_DEPTH,
    WIDEST_WINDOW_APART,
    HopperBackwardTiles,
    HopperDeepBackwardTiles,
)
from fast_layers.ops.attention.hopper_fwd_config import FEW_ROWS, HopperForwardTiles
from fast_layers.ops.attention.kernel_call import MAX_DEPTH
from fast_layers.ops.attention.problem import Aux, Inputs, Problem, Residuals
from fast_layers.testing import parity

HIDDEN = 2048
"""Heads times depth of the calls that are timed."""
MASKS = ("full", "causal", "window")
WINDOW = 1024
"""Keys that a query sees under a window, its own position among them."""
_SHAPES: dict[type, tuple[str, ...]] = {
    HopperForwardTiles: ("compute_wgs", "kv_tile", "stages"),
    HopperBackwardTiles: ("q_tile", "stages"),
    HopperDeepBackwardTiles: ("d_query_slots", "columns"),
}
"""What of the tiles decides most of their speed: shared memory, and work for each step."""
_BEST_SHAPES = 3
_MINUTES_EACH = 1
"""On an H200's 16 cores, for the estimate that is told."""
_RUNS = 5
_SECONDS_PER_RUN = 0.02
_MOST_CALLS = 200


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "tune", help="time the kernels' tiles on this GPU, and write a table of the fastest", description=__doc__
    )
    parser.add_argument("op", choices=["attention"])
    parser.add_argument("--depths", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384], help="the last stands for more")
    parser.add_argument("--masks", choices=MASKS, nargs="+", default=list(MASKS))
    parser.add_argument("--passes", choices=PASSES, nargs="+", default=list(PASSES))
    parser.add_argument("--tokens", type=int, default=16384, help="examples times length of what is timed")
    parser.add_argument("--out", type=Path, default=None, help=f"default: {tuned.USER_TABLE}, else in ~/.config")
    parser.set_defaults(run=run)


def run(arguments: Any) -> int:
    a = arguments
    arch = lowering_targets()[0]
    if arch.capability != (9, 0):
        print(f"tune attention: only Hopper's kernels (H100, H200) have tiles to choose, and here is {arch}")
        return 1
    path = a.out or tuned.user_path()
    if path is None:
        why = f"{tuned.USER_TABLE} is empty" if tuned.USER_TABLE in os.environ else "there is no home folder"
        print(f"tune attention: {why}, which means no user table; name a file by {tuned.USER_TABLE}, or give --out")
        return 1
    if problem := _unusable(a, path):
        print(f"tune attention: {problem}")
        return 1
    lengths = sorted(set(a.lengths))
    kinds = list(itertools.product(a.passes, a.depths, a.masks))
    _tell(f"{len(kinds) * len(lengths)} calls to tune: about {len(kinds) * len(lengths) * _MINUTES_EACH} minutes")
    failed, made, held = Failures(), 0, 0
    for pass_, depth, mask in kinds:
        entries = tune_kind(pass_, depth, mask, lengths, a.tokens, failed)
        made, held = made + len(entries), _write(path, arch.name, entries)
    print(f"{made} entries written to {path}, which holds {held}; {failed.count} failures")
    return 1 if failed.count else 0


def _unusable(arguments: Any, path: Path) -> str | None:
    """What in the arguments would only fail later, after minutes of timing."""
    a = arguments
    if min(*a.lengths, a.tokens) < 1 or min(a.depths) < 1 or max(a.depths) > MAX_DEPTH:
        given = f"--lengths {a.lengths}, --tokens {a.tokens} and --depths {a.depths}"
        return f"{given}: lengths and tokens must be at least 1, depths from 1 to {MAX_DEPTH}"
    if "forward" in a.passes and min(a.lengths) <= FEW_ROWS:
        return (
            f"--lengths {a.lengths}: a forward of up to {FEW_ROWS} queries follows a rule and reads no table; take "
            "longer ones, or --passes backward"
        )
    path = path.resolve()  # a link to no file yet would else be removed with the file that the trial makes
    is_new = not path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
        if is_new:
            path.unlink()
        _unfinished(path).open("a").close()
        _unfinished(path).unlink()
    except OSError as error:
        return f"the table cannot be written: {error}; give another --out"
    return None


@dataclasses.dataclass
class Failures:
    """Counted for the exit code."""

    count: int = 0

    def raised(self, where: object, error: Exception) -> None:
        self.count += 1
        print(f"  {where}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")


def _unfinished(path: Path) -> Path:
    return path.with_name(f"{path.name}.unfinished")


def _write(path: Path, device: str, entries: list[tuned.Entry]) -> int:
    """How many the table holds then. All at once: what breaks while it writes leaves the earlier table, and a link to
    it stays one."""
    path = path.resolve()
    merged = _merged(path, entries)
    path.parent.mkdir(parents=True, exist_ok=True)
    origin = {
        "device": device,
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "command": "python -m fast_layers tune attention",
    }
    unfinished = _unfinished(path)
    unfinished.write_text(tuned.dump(merged, **origin))
    unfinished.replace(path)
    return len(merged)


def _merged(path: Path, entries: list[tuned.Entry]) -> list[tuned.Entry]:
    """The file's entries for other calls, and these."""
    kinds = {entry.kind for entry in entries}
    try:
        earlier = tuned.parse(path.read_text())
    except FileNotFoundError:
        earlier = ()
    except ValueError as error:
        print(f"{path} was damaged and is replaced: {error}")
        earlier = ()
    return [*(entry for entry in earlier if entry.kind not in kinds), *entries]


def tune_kind(
    pass_: str, depth: int, mask: str, lengths: list[int], tokens: int, failed: Failures
) -> list[tuned.Entry]:
    """Entries from short to long; neighbours with the same tiles are one."""
    entries: list[tuned.Entry] = []
    for length in lengths:
        where = f"{pass_}, depth {depth}, {mask}, length {length}"
        call = pass_, depth, mask, length, max(tokens // length, 1)
        try:
            with parity.compilers() as pool:
                prepare = stopwatch(*call, pool)
                choices = (_for_call(tiles, *call) for tiles in candidates(pass_, depth, mask))
                timed = _times([rule(*call), *choices], prepare, where, failed)
        except Exception as error:
            failed.raised(where, error)
            continue
        _tell(f"{where}: comparing the fastest with the reference")
        best = next(((tiles, ms) for tiles, ms in timed if _works(pass_, depth, mask, tiles, failed)), None)
        if best is None:
            print(f"{where}: no tiles work; the rule stays")
            continue
        print(f"{where}: {best[1]:.3f} ms with {best[0]}, the fastest of {len(timed)}")
        if entries and entries[-1].tiles == best[0]:
            entries.pop()
        entries.append(tuned.Entry(tuned.HOPPER, pass_, depth, depth, mask, length, best[0]))
    if entries and entries[-1].longest == lengths[-1]:
        last = entries.pop()
        entries.append(tuned.Entry(tuned.HOPPER, pass_, depth, depth, mask, None, last.tiles))
    return entries


def _tell(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


def _times(
    choices: Iterable[tuned.Tiles], prepare: Prepare, where: str, failed: Failures
) -> list[tuple[tuned.Tiles, float]]:
    """(tiles, milliseconds), the fastest first: the first of each shape that works, and all of the fastest shapes."""
    untimed: dict[Any, list[tuned.Tiles]] = {}
    for tiles in dict.fromkeys(choices):
        untimed.setdefault(_shape(tiles), []).append(tiles)
    timed: dict[tuned.Tiles, float] = {}
    while True:
        known = set(map(_shape, timed))
        firsts = [group.pop(0) for shape, group in untimed.items() if group and shape not in known]
        if not firsts:
            break
        timed |= _time_all(firsts, prepare, f"{where}: shapes", failed)
    best = sorted(timed, key=timed.__getitem__)[:_BEST_SHAPES]
    others = [tiles for first in best for tiles in untimed[_shape(first)]]
    timed |= _time_all(others, prepare, f"{where}: grids and orders of the fastest", failed)
    return sorted(timed.items(), key=lambda pair: pair[1])


def _shape(tiles: tuned.Tiles) -> tuple[int, ...]:
    return tuple(getattr(tiles, name) for name in _SHAPES[type(tiles)])


def _time_all(
    choices: Sequence[tuned.Tiles], prepare: Prepare, where: str, failed: Failures
) -> dict[tuned.Tiles, float]:
    if not choices:
        return {}
    _tell(f"{where}, compiling {len(choices)}")
    begun, timed = {}, {}
    for tiles in choices:
        try:
            begun[tiles] = prepare(tiles)
        except Exception as error:
            failed.raised(tiles, error)
    futures.wait([compiling.future for compiling in begun.values()])
    _tell(f"{where}, timing")
    for tiles, compiling in begun.items():
        try:
            timed[tiles] = compiling.result()()
        except Exception as error:
            failed.raised(tiles, error)
    return timed


def candidates(pass_: str, depth: int, mask: str) -> Iterator[tuned.Tiles]:
    """All that fit in shared memory."""
    kind = tuned.tiles_class(pass_, depth, depth)
    if kind is HopperForwardTiles:
        grids = ((1, 0), (1, HOPPER_SMS), (2, HOPPER_SMS))
        # Beyond depth 64 the output's rows fit in the share of three warpgroups beside 64 keys alone.
        shares = [(2, 64), (2, 128), *([(3, 64)] if depth <= 128 else []), *([(3, 128)] if depth <= 64 else [])]
        orders: list[dict[str, Any]] = [{"takes_turns": True}, {"takes_turns": False}]
        orders += (
            [{**o, "cluster": 2} for o in orders] if mask == "full" else [{"takes_turns": False, "own_spans": True}]
        )
        orders += [{**o, "last_keys_first": True} for o in orders] if mask == "causal" else []
        held = [{"takes_turns": False, "held_columns": columns} for columns in (64, 128)]
        orders += held if mask == "full" and depth > 128 else []
        before_wait = (0, 16, 32, 64) if depth <= 64 else (0, 32) if depth <= 128 else (0, 64)
        orders = [{**o, "keys_before_wait": keys} for o in orders for keys in before_wait]
        orders += [{"takes_turns": False, "first_maximum": False}]
        choices = itertools.product(shares, (2, 3, 4, 6), grids, orders)
        made = [kind(*share, stages, *grid, **order) for share, stages, grid, order in choices]
        if depth > 128:
            by_values = [t for t in made if t.blocks and t.q_slots == t.cluster == 1 and not t.takes_turns]
            ways: Any = itertools.product(by_values, (False, True))
            made += [dataclasses.replace(t, out_by_values=True, spare_values=spare) for t, spare in ways]
    elif kind is HopperBackwardTiles:
        grids = 0, HOPPER_SMS
        leaves = {False, mask != "window" or depth in WIDEST_WINDOW_APART}
        holds_keys = {False, depth > 64 and mask != "window"}
        choices = itertools.product((64, 128), (1, 2, 3), leaves, {False, mask != "full"}, grids, holds_keys)
        made = [
            kind(queries, stages, ragged, blocks, d_query_apart=apart, holds_keys=holds)
            for queries, stages, apart, ragged, blocks, holds in choices
            if not holds or (apart and queries == 64)
        ]
        clusters = {"full": (1, 2), "causal": (1,)}.get(mask, ()) if depth == WHOLE_HEADS_DEPTH else ()
        made += [
            kind(128, stages, blocks=HOPPER_SMS, whole_heads=True, cluster=cluster)
            for stages, cluster in itertools.product((1, 2), clusters)
        ]
    else:
        parts = itertools.product((1, 2, 3), (32, 64))
        deep = HopperDeepBackwardTiles
        made = [deep.of_depths(depth, depth), *(deep(*part, d_query_apart=False) for part in parts)]
    return (tiles for tiles in made if tiles.smem_bytes(depth, depth) <= HOPPER_SMEM_BYTES)


Prepare = Callable[[tuned.Tiles], parity.Begun]
"""Traces, and starts to compile; what comes of it times one call, in milliseconds."""


def rule(pass_: str, depth: int, mask: str, length: int, batch: int) -> tuned.Tiles:
    """What such a call takes if no table has it."""
    return tuned.tiles_class(pass_, depth, depth).of(_problem(depth, mask, length, batch))


def _for_call(tiles: tuned.Tiles, _pass: str, depth: int, mask: str, length: int, batch: int) -> tuned.Tiles:
    """What becomes of these tiles in such a call."""
    if isinstance(tiles, HopperForwardTiles):
        return tiles
    return tiles.for_call(_problem(depth, mask, length, batch))


def _problem(depth: int, mask: str, length: int, batch: int) -> Problem:
    def call(*arrays: jax.Array) -> None:
        problems.append(_call(mask, *arrays)[0])

    problems: list[Problem] = []
    jax.eval_shape(call, *3 * [jax.ShapeDtypeStruct(_shape_of_arrays(depth, length, batch), jnp.bfloat16)])
    return problems[0]


def _shape_of_arrays(depth: int, length: int, batch: int) -> tuple[int, ...]:
    return batch, length, max(HIDDEN // depth, 1), depth


def _call(mask: str, query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[Problem, Inputs, Aux]:
    window = (WINDOW - 1, 0) if mask == "window" else None
    inputs, aux, options, _ = api._prepare(query, key, value, is_causal=mask == "causal", local_window_size=window)
    return options.problem(inputs, aux), inputs, aux


def stopwatch(pass_: str, depth: int, mask: str, length: int, batch: int, pool: parity.Compilers) -> Prepare:
    """On random normal inputs in bfloat16."""
    shape = _shape_of_arrays(depth, length, batch)
    query, key, value, d_out = (
        jax.random.normal(k, shape, jnp.bfloat16) for k in jax.random.split(jax.random.key(0), 4)
    )
    problem, inputs, aux = _call(mask, query, key, value)
    args: tuple[Any, ...] = (inputs,)
    if pass_ == "backward":
        from fast_layers.ops.attention import hopper_fwd

        out, lse = jax.jit(lambda inputs: hopper_fwd.attend(problem, inputs, aux))(inputs)
        args = Residuals(inputs, aux, out, lse), d_out

    def prepare(tiles: Any) -> parity.Begun:
        run = with_tiles(pass_, tiles)

        def forward(inputs):
            return run(problem, inputs, aux)

        def backward(residuals, d_out):
            return run(problem, residuals, d_out, jnp.zeros_like(residuals.lse))

        # Tracing holds the interpreter's lock, so that a thread would not help it; compiling does not.
        lowered = jax.jit(forward if pass_ == "forward" else backward).lower(*args)
        return pool.begin(f"{tiles}: compiling", lambda: functools.partial(_milliseconds, lowered.compile(), *args))

    return prepare


def with_tiles(pass_: str, tiles: Any) -> Callable[..., Any]:
    """The Hopper backend's function for one pass, with these tiles. Pallas is imported when it is called."""

    def fwd(problem, inputs, aux):
        from fast_layers.ops.attention import hopper_fwd

        return hopper_fwd.attend(problem, inputs, aux, tiles)

    def bwd(problem, residuals, d_out, d_lse):
        from fast_layers.ops.attention import hopper_bwd_call

        return hopper_bwd_call.attend_grad(problem, residuals, d_out, d_lse, tiles)

    return fwd if pass_ == "forward" else bwd


def _milliseconds(call: Callable[..., Any], *args: Any) -> float:
    """The median of several runs of many calls with one wait each, after a first call alone."""

    def seconds(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls - 1):
            call(*args)
        jax.block_until_ready(call(*args))
        return time.perf_counter() - start

    seconds(1)
    calls = min(max(math.ceil(_SECONDS_PER_RUN / seconds(1)), 1), _MOST_CALLS)
    return 1e3 * statistics.median(seconds(calls) / calls for _ in range(_RUNS))


def _works(pass_: str, depth: int, mask: str, tiles: Any, failed: Failures) -> bool:
    try:
        right = agrees(pass_, depth, mask, tiles)
    except Exception as error:
        failed.raised(tiles, error)
        return False
    failed.count += not right
    return right


def agrees(pass_: str, depth: int, mask: str, tiles: Any) -> bool:
    """Whether the kernel with these tiles passes the parity suite's rule, on a small case of this kind.

    Its tiles of queries are even in number, for pairs of blocks, and more than a persistent grid has blocks.
    """
    # Queries are held in registers for whole tiles of keys only.
    length = 640 if isinstance(tiles, HopperForwardTiles) and tiles.held_columns else 700
    case = parity.Case(
        batch=1, q_len=length, kv_len=length, heads=32, kv_heads=32, qk_dim=depth, v_dim=depth,
        is_causal=mask == "causal", window=(200, 0) if mask == "window" else None,
    )  # fmt: skip
    backend = Backend(
        "tiles",
        lambda problem, arch, asked: None if asked == pass_ else "not asked for",
        with_tiles("forward", tiles),
        with_tiles("backward", tiles),
    )
    table = parity.check_parity(backends=[backend], cases={"tiles": case}, dtypes=[jnp.bfloat16])
    if not table.ok:
        print(f"  {tiles} is wrong:\n{table}")
    return table.ok

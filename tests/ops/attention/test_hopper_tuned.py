"""The tables of measured tiles, and the command that writes one. Runs anywhere: nothing is timed."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import pwd

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fast_layers import tune
from fast_layers.arch import Arch
from fast_layers.cli import main
from fast_layers.ops.attention import api, tuned
from fast_layers.ops.attention.config import HOPPER_SMEM_BYTES
from fast_layers.ops.attention.hopper_bwd_config import HopperBackwardTiles, HopperDeepBackwardTiles
from fast_layers.ops.attention.hopper_fwd_config import HopperForwardTiles
from fast_layers.testing import parity

H200 = Arch("cuda", "NVIDIA H200", (9, 0))

pytestmark = pytest.mark.filterwarnings("ignore:FAST_LAYERS_TILES names the table")


def _problem(length=2048, depth=64, v_dim=None, heads=16, group=1, **options):
    def call(query, key, value):
        inputs, aux, given, _ = api._prepare(query, key, value, **options)
        problems.append(given.problem(inputs, aux))

    problems = []
    sizes = (heads, depth), (heads // group, depth), (heads // group, v_dim or depth)
    jax.eval_shape(call, *(jax.ShapeDtypeStruct((8, length, *size), jnp.bfloat16) for size in sizes))
    return problems[0]


@pytest.mark.parametrize(
    ("depths", "tiles"), [((192, 128), HopperDeepBackwardTiles(3, 64)), ((256, 256), HopperDeepBackwardTiles(2, 32))]
)
def test_the_deep_backward_sends_whole_panels_where_three_fit(depths, tiles):
    assert HopperDeepBackwardTiles.of(_problem(depth=depths[0], v_dim=depths[1])) == tiles


@pytest.fixture
def user_file(tmp_path, monkeypatch):
    """Where the user's table is; the process has read none yet."""
    path = tmp_path / "config" / "tiles.json"
    monkeypatch.setenv(tuned.USER_TABLE, str(path))
    tuned.user_table.cache_clear()
    yield path
    tuned.user_table.cache_clear()


def _write(path, *entries):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tuned.dump(entries, device="none"))


def _entry(tiles, longest=None, pass_="forward", depth=64, mask="causal"):
    return tuned.Entry("sm_90", pass_, depth, depth, mask, longest, tiles)


MINE = HopperForwardTiles(2, 64, stages=4)


def test_the_shipped_table_and_the_rules_agree(user_file):
    """The rules extend what was measured, so they must say the same of it."""
    assert tuned.shipped_table()
    for entry in tuned.shipped_table():
        problem = _problem(entry.longest or 16384, entry.qk_dim, is_causal=entry.mask == "causal")
        assert tuned.find(problem, entry.pass_) == entry.tiles
        assert type(entry.tiles).of(problem) == entry.tiles


def test_the_users_table_comes_first_and_covers_what_it_covers(user_file):
    _write(user_file, _entry(MINE, longest=1024), _entry(HopperForwardTiles(2, 128, stages=2), longest=3000))
    causal = {"is_causal": True}
    assert tuned.find(_problem(1024, **causal), "forward") == MINE
    assert tuned.find(_problem(1025, **causal), "forward") == HopperForwardTiles(2, 128, stages=2)
    shipped = tuned.find(_problem(4096, **causal), "forward")
    assert shipped in {entry.tiles for entry in tuned.shipped_table()}
    assert tuned.find(_problem(1024), "forward") not in (None, MINE)
    assert HopperForwardTiles.of(_problem(1024, **causal), MINE) == MINE


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "full"),
        ({"is_causal": True}, "causal"),
        ({"is_causal": True, "q_offset": 3}, "causal"),
        ({"local_window_size": (5, 0)}, "window"),
        ({"segment_ids": np.zeros(2048, int)}, "arrays"),
        ({"key_value_seq_lengths": np.full(8, 3)}, "arrays"),
        ({"bias": np.zeros((1, 1), np.float32)}, None),
        ({"mask": np.ones((1, 2048), bool)}, None),
        ({"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}, None),
    ],
    ids=str,
)
def test_kinds_of_masks(options, kind, user_file):
    problem = _problem(**options)
    assert tuned.mask_kind(problem) == kind
    if kind is None:
        assert tuned.find(problem, "forward") is None


@pytest.mark.parametrize(
    ("options", "cluster", "own_spans"),
    [
        ({}, 2, False),
        ({"length": 2047}, 2, False),
        ({"length": 1920}, 1, False),  # 15 tiles of queries
        ({"is_causal": True}, 1, True),
        ({"is_causal": True, "segment_ids": np.zeros(2048, int)}, 1, True),
        ({"key_value_seq_lengths": np.full(8, 3)}, 1, True),
        ({"bias": np.zeros((1, 1), np.float32)}, 1, False),
    ],
    ids=str,
)
def test_only_calls_with_a_use_for_it_get_a_cluster_or_spans_of_their_own(options, cluster, own_spans):
    problem = _problem(depth=128, **options)
    assert HopperForwardTiles.of(problem, HopperForwardTiles(2, 128, cluster=2)).cluster == cluster
    wanted = HopperForwardTiles(2, 64, takes_turns=False, own_spans=True)
    assert HopperForwardTiles.of(problem, wanted).own_spans == own_spans


def test_what_no_table_has_takes_the_rule(user_file):
    assert tuned.find(_problem(depth=96), "forward") is None
    assert tuned.find(_problem(v_dim=128), "backward") is None


def _damaged(**changes):
    return {**_entry(MINE).as_json(), **changes}


DAMAGED = {
    "no JSON": ("{", "Expecting"),
    "a list": ([], 'must be an object with "format": 7'),
    "another format": ({"format": 6, "entries": []}, '"format": 7'),
    "an entry without tiles": ([{"arch": "sm_90"}], "an entry must have exactly"),
    "another GPU": ([_damaged(arch="sm_100")], "must be 'sm_90'"),
    "an unknown mask": ([_damaged(mask="striped")], "must be one of full, causal, window, arrays"),
    "an unknown pass": ([_damaged(**{"pass": "sideways"})], "must be forward or backward"),
    "tiles that reject themselves": ([_damaged(tiles={"compute_wgs": 4, "kv_tile": 128})], "must be 1, 2 or 3"),
    "tiles of a wrong type": ([_damaged(tiles={"compute_wgs": 2, "kv_tile": "128"})], "must be of type int"),
    "an int for a bool": ([_damaged(tiles={"compute_wgs": 2, "kv_tile": 64, "takes_turns": 1})], "of type bool"),
    "a tile too few": ([_damaged(tiles={"compute_wgs": 2})], "kv_tile"),
    "a tile too many": ([_damaged(tiles={"compute_wgs": 2, "kv_tile": 64, "colour": 1})], "tiles must have"),
    "tiles of the other pass": ([_damaged(**{"pass": "backward"})], "tiles must have q_tile"),
    "too much shared memory": ([_damaged(tiles={"compute_wgs": 3, "kv_tile": 256, "stages": 4})], "shared memory"),
    "splits": ([_damaged(tiles={"compute_wgs": 2, "kv_tile": 64, "splits": 2})], "splits=2 must be 1"),
    "a depth of text": ([_damaged(qk_dim="64")], "must be positive integers"),
    "no depth, backward": ([_damaged(**{"pass": "backward", "v_dim": None})], "must be positive integers"),
    "lists in lists": ("[" * 100_000, "nests too deep"),
    "no length": ([_damaged(longest=0)], "longest"),
    "one thing said twice": ([_damaged(), _damaged()], "two entries"),
}


@pytest.mark.parametrize(("content", "words"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_table_is_reported_and_ignored(content, words, user_file):
    if isinstance(content, list) and content:
        content = {"format": 7, "entries": content}
    user_file.parent.mkdir()
    user_file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.warns(UserWarning, match="is ignored") as warned:
        assert tuned.user_table() == ()
    assert words in str(warned[0].message)
    assert "python -m fast_layers tune attention" in str(warned[0].message)
    assert tuned.find(_problem(), "forward") is not None


def test_where_the_users_table_is(monkeypatch, tmp_path):
    monkeypatch.delenv(tuned.USER_TABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert tuned.user_path() == tmp_path / "fast_layers" / "attention_tiles.json"
    monkeypatch.setenv(tuned.USER_TABLE, "")
    assert tuned.user_path() is None


def test_a_table_that_is_not_where_it_is_said_to_be_is_told(user_file):
    with pytest.warns(UserWarning, match=r"FAST_LAYERS_TILES names the table of tiles .*, which is not there"):
        assert tuned.user_table() == ()


def _no_home(monkeypatch):
    for name in (tuned.USER_TABLE, "XDG_CONFIG_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)


def test_who_has_no_home_has_no_table(monkeypatch):
    _no_home(monkeypatch)
    tuned.user_table.cache_clear()
    assert tuned.find(_problem(), "forward") is not None
    tuned.user_table.cache_clear()


OPTIONS = {"full": {}, "causal": {"is_causal": True}, "window": {"local_window_size": (tune.WINDOW - 1, 0)}}


@pytest.mark.parametrize("mask", tune.MASKS)
@pytest.mark.parametrize("depth", [64, 128, 192, 256])
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_candidates_fit_and_hold_the_rules_choice(pass_, depth, mask):
    made = list(tune.candidates(pass_, depth, mask))
    assert len(set(made)) == len(made)
    assert all(tiles.smem_bytes(depth, depth) <= HOPPER_SMEM_BYTES for tiles in made)
    kind = tuned.tiles_class(pass_, depth, depth)
    assert {kind.of(_problem(length, depth, **OPTIONS[mask])) for length in (16384, 1024)} <= set(made)


def test_what_is_timed_has_the_mask_that_it_is_filed_under(monkeypatch):
    problems = []

    def run(problem, inputs, aux):
        problems.append(problem)
        return inputs.query[0, 0, 0, 0]

    monkeypatch.setattr(tune, "with_tiles", lambda *_: run)
    with parity.compilers() as pool:
        ready = [tune.stopwatch("forward", 64, mask, 64, 1, pool)(MINE) for mask in tune.MASKS]
        assert all(each.result()() > 0 for each in ready)
    assert [tuned.mask_kind(problem) for problem in problems] == list(tune.MASKS)


def test_the_rules_tiles_are_of_what_is_timed():
    by_rule = {mask: tune.rule("backward", 64, mask, 16384, 8) for mask in tune.MASKS}
    assert by_rule == {
        mask: HopperBackwardTiles.of(_problem(16384, 64, heads=32, **options)) for mask, options in OPTIONS.items()
    }
    assert len(set(by_rule.values())) > 1


def _stopwatch(milliseconds):
    """As `tune.stopwatch`, of (length, tiles)."""

    def stopwatch(pass_, depth, mask, length, batch, pool):
        return lambda tiles: pool.begin("tiles", lambda: lambda: milliseconds(length, tiles))

    return stopwatch


class TestTune:
    @pytest.fixture(autouse=True)
    def pretended(self, monkeypatch, user_file):
        """A Hopper GPU on which fewer stages, and fewer queries a step, are faster."""

        monkeypatch.setattr(tune, "lowering_targets", lambda: (H200,))
        monkeypatch.setattr(tune, "stopwatch", _stopwatch(lambda length, tiles: sum(vars(tiles).values()) * length))
        monkeypatch.setattr(tune, "agrees", lambda *_: True)

    def test_writes_a_table_that_is_read(self, user_file, capsys):
        assert main(["tune", "attention", "--lengths", "1024", "512"]) == 0
        said = capsys.readouterr()
        assert "18 entries written" in said.out
        assert "36 calls to tune: about 36 minutes" in said.err
        assert "backward, depth 256, window, length 512: shapes, timing" in said.err
        raw = json.loads(user_file.read_text())
        assert raw["device"] == "NVIDIA H200"
        assert {entry["longest"] for entry in raw["entries"]} == {None}  # the same tiles at both lengths
        assert tuned.find(_problem(is_causal=True), "forward") == HopperForwardTiles(
            2, 64, stages=2, takes_turns=False, first_maximum=False
        )
        assert tuned.find(_problem(depth=128), "backward") == HopperBackwardTiles(64, stages=1)
        assert tuned.find(_problem(depth=256), "backward") == HopperDeepBackwardTiles(1, d_query_apart=False)

    def test_keeps_what_it_did_not_time(self, user_file):
        other = _entry(MINE, mask="window")
        _write(user_file, other, _entry(MINE))
        assert main(["tune", "attention", "--depths", "64", "--masks", "causal", "--passes", "forward"]) == 0
        assert other in tuned.user_table()
        assert _entry(MINE) not in tuned.user_table()
        assert len(tuned.user_table()) == 2

    def test_tiles_that_differ_by_length(self, monkeypatch):
        def milliseconds(length, tiles):
            return abs(tiles.stages - (2 if length < 4096 else 3)) + dataclasses.astuple(tiles)[1]

        monkeypatch.setattr(tune, "stopwatch", _stopwatch(milliseconds))
        entries = tune.tune_kind("forward", 64, "full", [512, 1024, 4096, 8192], 8192, tune.Failures())
        assert [(entry.longest, entry.tiles.stages) for entry in entries] == [(1024, 2), (None, 3)]

    def test_times_grids_and_orders_of_the_fastest_shapes_only(self, monkeypatch):
        timed = []

        def milliseconds(length, tiles):
            timed.append(tiles)
            return tiles.stages + tiles.kv_tile + tiles.compute_wgs - 0.1 * tiles.own_spans

        monkeypatch.setattr(tune, "stopwatch", _stopwatch(milliseconds))
        (entry,) = tune.tune_kind("forward", 64, "causal", [512], 512, tune.Failures())
        assert entry.tiles.own_spans
        assert (entry.tiles.compute_wgs, entry.tiles.kv_tile, entry.tiles.stages) == (2, 64, 2)
        made = list(tune.candidates("forward", 64, "causal"))
        assert len(set(timed)) == len(timed) < len(made) / 2
        assert {tune._shape(tiles) for tiles in timed} == {tune._shape(tiles) for tiles in made}
        wanted = {(2, 64, 2), (2, 64, 3), (3, 64, 2)}  # the three fastest
        assert {tiles for tiles in made if tune._shape(tiles) in wanted} <= set(timed)

    def test_passes_over_what_is_wrong_or_fails(self, monkeypatch, capsys):
        def milliseconds(length, tiles):
            if tiles.stages == 1:
                raise jax.errors.JaxRuntimeError("no such kernel")
            return tiles.stages

        monkeypatch.setattr(tune, "stopwatch", _stopwatch(milliseconds))
        monkeypatch.setattr(tune, "agrees", lambda pass_, depth, mask, tiles: tiles.q_tile == 64)
        failed = tune.Failures()
        (entry,) = tune.tune_kind("backward", 64, "full", [512], 512, failed)
        assert entry.tiles == HopperBackwardTiles(64, stages=2)
        assert "no such kernel" in capsys.readouterr().out
        assert failed.count > 0

    def test_a_shape_is_judged_by_the_first_of_its_choices_that_works(self):
        def milliseconds(length, tiles):
            if tiles.blocks == 0:
                raise ZeroDivisionError
            return 1.0

        failed, made = tune.Failures(), list(tune.candidates("backward", 64, "window"))
        with parity.compilers() as pool:
            prepare = _stopwatch(milliseconds)("backward", 64, "window", 512, 1, pool)
            timed = tune._times(made, prepare, "here", failed)
        assert {tune._shape(tiles) for tiles, _ in timed} == {tune._shape(tiles) for tiles in made}
        assert failed.count == len(timed) == len({*map(tune._shape, made)}) + tune._BEST_SHAPES

    def test_the_rules_tiles_are_timed_though_their_shape_is_slow_in_its_plain_form(self, monkeypatch):
        rule = tune.rule("forward", 64, "full", 4096, 4)
        assert rule != next(t for t in tune.candidates("forward", 64, "full") if tune._shape(t) == tune._shape(rule))

        def milliseconds(length, tiles):
            return 1 if tiles == rule else 3 if tune._shape(tiles) == tune._shape(rule) else 2

        monkeypatch.setattr(tune, "stopwatch", _stopwatch(milliseconds))
        (entry,) = tune.tune_kind("forward", 64, "full", [4096], 16384, tune.Failures())
        assert entry.tiles == rule

    def test_what_was_tuned_before_something_broke_is_written(self, monkeypatch, user_file, capsys):
        def stopwatch(pass_, depth, mask, *args):
            if mask == "window":
                held.append(len(tuned.parse(user_file.read_text())))
                raise MemoryError("no room for the inputs")
            return well(pass_, depth, mask, *args)

        def agrees(pass_, depth, mask, tiles):
            if mask == "causal":
                raise OSError("no oracle")
            return True

        held, well = [], tune.stopwatch
        monkeypatch.setattr(tune, "stopwatch", stopwatch)
        monkeypatch.setattr(tune, "agrees", agrees)
        command = ["tune", "attention", "--depths", "64", "--passes", "backward", "--lengths", "512", "--masks"]
        assert main([*command, "full"]) == 0
        assert main([*command, "full", "causal", "window"]) == 1
        assert held == [1]
        said = capsys.readouterr().out
        assert "no tiles work; the rule stays" in said
        assert "backward, depth 64, window, length 512: MemoryError: no room for the inputs" in said

    def test_needs_a_hopper_gpu(self, monkeypatch, capsys, user_file):
        monkeypatch.setattr(tune, "lowering_targets", lambda: (Arch("cpu"),))
        assert main(["tune", "attention"]) == 1
        assert "here is cpu" in capsys.readouterr().out
        assert not user_file.exists()

    @pytest.mark.parametrize("wrong", [["--lengths", "0"], ["--depths", "300"], ["--tokens", "-5"]], ids=" ".join)
    def test_wrong_sizes_are_told_before_anything_is_timed(self, wrong, capsys, user_file):
        assert main(["tune", "attention", *wrong]) == 1
        assert "must be at least 1, depths from 1 to 256" in capsys.readouterr().out
        assert not user_file.exists()

    def test_lengths_that_read_no_table_are_told(self, capsys, user_file):
        assert main(["tune", "attention", "--lengths", "64", "1024"]) == 1
        assert "--lengths [64, 1024]: a forward of up to 64 queries" in capsys.readouterr().out
        assert not user_file.exists()

    def test_a_table_that_cannot_be_written_is_told_before_anything_is_timed(self, capsys, tmp_path):
        (tmp_path / "file").write_text("")
        assert main(["tune", "attention", "--out", str(tmp_path / "file" / "table.json")]) == 1
        assert "cannot be written" in capsys.readouterr().out

    def test_needs_a_place(self, monkeypatch, capsys):
        monkeypatch.setenv(tuned.USER_TABLE, "")
        assert main(["tune", "attention"]) == 1
        assert "FAST_LAYERS_TILES is empty" in (said := capsys.readouterr().out)
        assert "give --out" in said
        _no_home(monkeypatch)
        assert main(["tune", "attention"]) == 1
        assert "there is no home folder" in capsys.readouterr().out

    def test_a_broken_write_leaves_the_earlier_table(self, monkeypatch, user_file):
        _write(user_file, _entry(MINE))
        earlier = user_file.read_text()

        def breaks(path, text):
            path.open("w").write(text[:10])
            raise OSError("no space left")

        monkeypatch.setattr(pathlib.Path, "write_text", breaks)
        with pytest.raises(OSError, match="no space left"):
            tune._write(user_file, "H200", [_entry(MINE, mask="window")])
        assert user_file.read_text() == earlier

    def test_a_link_to_the_table_stays_one(self, user_file, tmp_path):
        user_file.parent.mkdir()
        user_file.symlink_to(tmp_path / "kept.json")
        assert main(["tune", "attention", "--depths", "64", "--masks", "full", "--passes", "forward"]) == 0
        assert user_file.is_symlink()
        assert len(tuned.parse((tmp_path / "kept.json").read_text())) == 1

"""The attention benchmark on a CPU: what it counts, what it writes, and that no peer can end a run."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import struct
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import __main__ as bench_main
from bench import attention, cases, peers, timing
from bench.report import Report, environment
from fast_layers import dispatch

CAUSAL, FULL, WINDOW, PACKED, PADDED, SOFTCAP, DEPTHS, DECODE = cases.TINY


def visible(case: cases.Case) -> np.ndarray:
    """[B, T, S], by definition."""
    row, column = np.arange(case.q_len)[:, None], np.arange(case.kv_len)
    seen = np.ones((case.batch, case.q_len, case.kv_len), bool)
    if case.causal:
        seen &= column <= row
    if case.window:
        seen &= column > row - case.window
    ids, lengths = case.document_ids(), case.lengths()
    if ids is not None:
        seen &= ids[:, None] == ids
    if lengths is not None:
        seen &= (row < lengths[:, None, None]) & (column < lengths[:, None, None])
    return seen


@pytest.mark.parametrize("count", range(2, 8))
def test_each_peer_comes_as_often_after_each_of_the_others(count):
    names = "abcdefg"[:count]
    order = list(timing.turns_of(names, 2 * count))
    turns = [order[start : start + count] for start in range(0, len(order), count)]
    assert all(sorted(turn) == list(names) for turn in turns)
    after = collections.Counter(pair for turn in turns for pair in itertools.pairwise(turn))
    assert after == dict.fromkeys(itertools.permutations(names, 2), 2)


@pytest.mark.parametrize(
    "case",
    [
        *(FULL, WINDOW, PACKED, PADDED, DECODE),
        dataclasses.replace(PACKED, causal=False),
        dataclasses.replace(PADDED, causal=True, batch=5),
        dataclasses.replace(WINDOW, documents=3, q_len=100, kv_len=100),
    ],
    ids=lambda case: case.mask,
)
def test_pairs_and_tiles_are_those_of_the_mask(case, monkeypatch):
    assert case.visible_pairs() == visible(case).sum()
    monkeypatch.setattr(cases, "TILE", 8)
    short = [(0, 0), (0, -case.q_len % 8), (0, -case.kv_len % 8)]
    by_tile = np.pad(visible(case), short).reshape(case.batch, -(-case.q_len // 8), 8, -1, 8)
    assert case.visible_tiles() == by_tile.any((2, 4)).sum()


def test_a_causal_mask_alone_counts_half_of_the_square():
    assert CAUSAL.visible_pairs() == FULL.visible_pairs() / 2
    assert visible(CAUSAL).sum() - CAUSAL.visible_pairs() == CAUSAL.batch * CAUSAL.q_len / 2


def test_flops_and_bytes_by_hand():
    case = cases.square("d128", 128, 1024, causal=True)
    assert (case.batch, case.heads) == (16, 16)
    assert case.flops("forward") == 2 * 2 * 16 * 16 * 1024 * 1024 * 128 / 2
    assert case.flops("backward") == 2.5 * case.flops("forward")
    assert case.bytes("forward") == 4 * 16 * 1024 * 16 * 128 * 2
    mla = dataclasses.replace(case, depth=192, v_depth=128)
    pairs = 16 * 16 * 1024 * 1024 / 2
    assert mla.flops("forward") == 2 * pairs * (192 + 128)
    assert mla.flops("backward") == 2 * pairs * (3 * 192 + 2 * 128)
    assert mla.flops("forward+backward") == mla.flops("forward") + mla.flops("backward")
    assert mla.bytes("forward") == 2 * 16 * 1024 * 16 * (2 * 192 + 2 * 128)
    assert mla.bytes("backward") == 2 * mla.bytes("forward")
    assert mla.name == "B16 T1024 N16 D192/128 causal"
    step = cases.decode(16, 1, 2048)
    assert step.bytes("forward") == 2 * 128 * 16 * (2 * 32 + 2 * 2048 * 8)


def test_documents_cover_the_tokens_and_differ_in_length():
    _, lengths = np.unique(PACKED.document_ids(), return_counts=True)
    assert lengths.sum() == PACKED.q_len
    assert len(set(lengths)) == PACKED.documents == len(lengths)


def test_small_copies_stand_beside_calls_that_move_as_much():
    few = [cases.decode(1, q_len, kv_len) for kv_len in (2048, 16_384, 131_072) for q_len in (1, 16)]
    assert attention.copied_mebibytes([*few, *cases.GROUPS["d128"]]) == [8, 64]
    roofs = attention.measure_roofs(timing.Stopwatch(), [2])
    assert set(roofs) == {"matmul TFLOP/s", "copy GB/s", "copy GB/s, 2 MiB"}
    assert min(roofs.values()) > 0


def test_the_grid_is_whole():
    main = cases.select(["main"], depth=64, dtype="float32")
    assert len(main) == 3 * 6 * 2
    assert {case.batch * case.q_len for case in main} == {cases.TOKENS}
    assert {case.heads * case.depth for case in main} == {cases.HIDDEN}
    assert {c.depths for c in cases.GROUPS["mla"]} == {(192, 128)}
    assert {(c.heads, c.kv_heads) for c in cases.GROUPS["gqa"]} == {(32, 8), (64, 8)}
    assert {(c.batch, c.q_len) for c in cases.GROUPS["decode"]} == {(b, q) for b in (1, 16, 128) for q in (1, 4, 16)}


@pytest.fixture
def report(tmp_path) -> Report:
    return Report(environment("a test", "2026-01-01"), {}, tmp_path / "attention.json")


def here(*names: str) -> list[peers.Peer]:
    return [peer for peer in peers.find(gpu=False)[0] if peer.name in names]


def read(report: Report) -> dict:
    assert report.path is not None
    return json.loads(report.path.read_text())


def quiet(text: str) -> None:
    pass


def png_size(path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


def test_the_command_writes_json_and_both_pictures(tmp_path, capsys):
    attention.main(["--cases", "tiny", "--repeats", "1", "--jobs", "2", "--out", str(tmp_path), "--peers", "xla"])
    found = json.loads((tmp_path / "attention.json").read_text())
    assert found["schema"] == 1
    assert found["device"] == "cpu"
    assert found["versions"]["jax"] == jax.__version__
    assert "--cases tiny" in found["command"]
    assert set(found["roofs"]) == {"matmul TFLOP/s", "copy GB/s"}
    assert min(found["roofs"].values()) > 0
    assert found["not_reached"] == []
    assert found["absent"]["torch cudnn"] == "no NVIDIA GPU here"
    rows = found["rows"]
    assert {(row["case"], row["pass"]) for row in rows} == {
        (case.name, pass_) for case in cases.TINY for pass_ in case.passes
    }
    for row in rows:
        assert (row["seconds"] is None) == (row["refused"] is not None), row
        assert row["seconds"] is None or (row["seconds"] > 0 and row["rate"] > 0 and row["method"] == "wall")
        assert row["agrees"], row
    timed = [row["name"] for row in rows if row["seconds"]]
    # jax.nn refuses the cells with a soft cap and those with two depths by name, and nothing else.
    assert timed.count("fast_layers") == timed.count("again") == timed.count("jax.nn xla") + 4 == 15
    assert {row["unit"] for row in rows if row["length"] != row["kv_length"]} == {"GB/s"}
    assert set(found["ratio_to_best_peer"]) == {"tiny forward", "tiny backward"}
    for picture in ("bars.png", "roofline.png"):
        assert min(png_size(tmp_path / picture)) > 300
    screen = capsys.readouterr().out
    assert "geometric means" in screen
    assert "jax.nn.dot_product_attention has no softcap (2 cells)" in screen
    assert "values of the keys' depth only (2 cells)" in screen


def raises(case, q, k, v, extras):
    raise KeyError("this peer knows no heads")


def fails_when_run(case, q, k, v, extras):
    def fail(q):
        raise OSError("out of luck")

    return jax.pure_callback(fail, jax.ShapeDtypeStruct(q.shape, q.dtype), q)


def doubles(case, q, k, v, extras):
    return 2 * jax.nn.dot_product_attention(q, k, v, is_causal=case.causal)


def not_a_number(case, q, k, v, extras):
    return jnp.full_like(q, jnp.nan)


def test_a_failing_peer_is_listed_with_its_reason_and_a_wrong_one_does_not_count(report):
    wrong = {"raises": raises, "fails": fails_when_run, "doubles": doubles, "nan": not_a_number}
    there = here("jax.nn xla", "fast_layers") + [peers.Peer(name, attend) for name, attend in wrong.items()]
    there.append(peers.Peer("declines", doubles, lambda case, pass_: f"declines {case.mask}"))
    attention.run([CAUSAL], there, report, passes=["forward"], rounds=1, say=quiet)
    (cell,) = report.cells
    refused = {row.name: row.refused for row in cell.rows}
    assert refused["raises"] == "KeyError: 'this peer knows no heads'"
    assert "out of luck" in refused["fails"]
    assert refused["declines"] == "declines causal"
    assert cell.best_peer is not None
    assert cell.best_peer.name == "jax.nn xla"
    assert "VALUES DIFFER: distance 1" in cell.text()
    agrees = {row["name"]: row["agrees"] for row in read(report)["rows"]}
    assert not agrees["doubles"]
    assert not agrees["nan"]
    assert agrees["fast_layers"]
    assert "refused: raises: KeyError" in report.summary()


def test_a_run_in_which_fast_layers_was_timed_nowhere_fails(monkeypatch, capsys):
    theirs, ours = here("jax.nn xla", "fast_layers")
    there = [theirs, dataclasses.replace(ours, attend=raises)]
    monkeypatch.setattr(peers, "find", lambda **options: (there, {}))
    with pytest.raises(SystemExit, match="fast_layers was timed in no cell"):
        attention.main(["--cases", "16x2", "--passes", "forward", "--repeats", "1", "--depth", "16"])
    assert "refused: fast_layers: KeyError: 'this peer knows no heads'" in capsys.readouterr().out


def test_the_backward_is_checked_and_timed_alone(report, monkeypatch):
    """A peer whose forward is right and whose gradients are not."""

    @jax.custom_vjp
    def attend(q, k, v):
        return jax.nn.dot_product_attention(q, k, v)

    attend.defvjp(lambda q, k, v: (attend(q, k, v), (q, k, v)), lambda saved, g: saved)
    there = [*here("jax.nn xla"), peers.Peer("wrong", lambda case, q, k, v, extras: attend(q, k, v))]
    attention.run([dataclasses.replace(FULL, kv_heads=4)], there, report, rounds=1, say=quiet)
    forward, backward = report.cells
    assert [row.agrees for row in forward.rows] == [True, True]
    assert [row.agrees for row in backward.rows] == [True, False]


def test_a_peer_without_a_scale_and_with_its_own_dtype_is_compared_like_the_others(report):
    def unscaled(case, q, k, v, extras):
        assert q.dtype == k.dtype == v.dtype == jnp.float16
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))  # a CPU has no float16 matmul on every jax
        return jax.nn.dot_product_attention(q, k, v, scale=1.0).astype(jnp.float16)

    there = [*here("jax.nn xla"), peers.Peer("unscaled", unscaled, scaled_query=True, dtype="float16")]
    attention.run([FULL], there, report, rounds=1, say=quiet)
    rows = [row for cell in report.cells for row in cell.rows if row.name == "unscaled"]
    assert [row.pass_ for row in rows] == ["forward", "backward"]
    for row in rows:
        assert row.refused is None
        assert row.distance is not None
        assert 0 < row.distance < 0.02


def test_each_of_jaxs_own_kernels_runs_where_it_can():
    there = [peer for peer in peers.find(gpu=True)[0] if peer.name.startswith("jax mgpu")]

    def taking(case: cases.Case, pass_: cases.Pass) -> int:
        return sum(peer.refuses(case, pass_) is None for peer in there)

    for depth, forward in ((64, 2), (128, 2), (256, 1)):
        for causal in (False, True):
            case = cases.square("d", depth, 1024, causal=causal)
            assert taking(case, "forward") == forward
            assert taking(case, "backward") == (0 if causal else 1)
    assert taking(WINDOW, "forward") == taking(PACKED, "forward") == taking(SOFTCAP, "forward") == 0


def test_a_peers_options_reach_its_compiler(report):
    """XLA refuses one that it does not know; what runs without is timed."""
    (plain,) = here("jax.nn xla")
    there = [plain, dataclasses.replace(plain, name="odd", compiler_options=(("xla_of_no_such_name", True),))]
    attention.run([FULL], there, report, passes=["backward"], rounds=1, say=quiet)
    (cell,) = report.cells
    assert [row.refused is None for row in cell.rows] == [True, False]
    assert "xla_of_no_such_name" in str(cell.rows[1].refused)
    same_bits = next(peer for peer in peers.find(gpu=True)[0] if peer.compiler_options)
    assert [same_bits.refuses(FULL, pass_) is None for pass_ in ("forward", "backward")] == [False, True]


def test_sums_in_any_order_are_asked_for_where_they_make_a_difference(monkeypatch):
    asked = []
    monkeypatch.setattr(peers, "_ours", lambda *_: asked.append(dispatch.reproducible()))
    (peer,) = here("fast_layers any order")
    peer.attend(FULL, None, None, None, {})
    assert asked == [False]
    assert dispatch.reproducible()
    for backend, passes in {"hopper": ("backward", "forward+backward"), "cudnn": (), "xla": ()}.items():
        monkeypatch.setattr(peers, "automatic_backend", lambda case, pass_, backend=backend: backend)
        taken = [pass_ for pass_ in typing.get_args(cases.Pass) if peer.refuses(FULL, pass_) is None]
        assert taken == [*passes], backend


def test_the_time_limit_ends_the_run_and_keeps_what_there_is(report):
    clock = attention.Clock(1e6)

    def stop_after_the_first_cell(text: str) -> None:
        clock.limit = 0.0

    there = here("jax.nn xla", "fast_layers")
    attention.run([CAUSAL, FULL], there, report, rounds=1, clock=clock, say=stop_after_the_first_cell)
    assert [cell.rows[0].pass_ for cell in report.cells] == ["forward"]
    found = read(report)
    assert len(found["rows"]) == 2
    assert found["not_reached"] == [f"{CAUSAL.name} backward", f"{FULL.name} forward", f"{FULL.name} backward"]


def test_a_lost_device_ends_the_run_and_is_reported(report, monkeypatch):
    def lost(row):
        raise attention.DeviceLost(f"gone with {row.name}")

    monkeypatch.setattr(attention, "check_device", lost)
    there = [*here("fast_layers"), peers.Peer("fails", fails_when_run)]
    attention.run([CAUSAL, FULL], there, report, rounds=1, say=quiet)
    found = read(report)
    assert found["rows"] == []
    assert len(found["not_reached"]) == 4
    assert "gone with fails" in found["notes"][0]


class FakeCupti:
    """Calls the function as CUPTI's session does and says how many milliseconds each call took."""

    answers: float | Exception | None = 2.0

    def __init__(self, finalize: bool):
        pass

    def measure(self, call, *, iterations: int):
        assert isinstance(call, jax.stages.Wrapped)

        def run():
            for _ in range(iterations):
                call()
            if isinstance(self.answers, Exception):
                raise self.answers
            return None, None if self.answers is None else [self.answers] * iterations

        return run


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(timing, "on_gpu", lambda: True)
    monkeypatch.setattr(timing.profiler, "Cupti", FakeCupti)
    monkeypatch.setattr(timing, "LOAD_SECONDS", 0.0)


def count(seen: list[int], at: int) -> int:
    seen.append(at)
    return at


def test_kernel_times_come_from_cupti_and_calls_rotate_over_the_input_sets(gpu):
    seen: list[int] = []
    watch = timing.Stopwatch()
    taken, method = watch.seconds(functools.partial(count, seen), [(0,), (1,), (2,)], roughly=0.004)
    assert (taken, method) == ([0.002] * 5, "cupti")
    assert seen == [0, 1, 2, 0, 1]


def test_a_program_loads_the_gpu_before_it_is_timed(gpu, monkeypatch):
    monkeypatch.setattr(timing, "LOAD_SECONDS", 0.05)
    seen: list[int] = []
    taken, _ = timing.Stopwatch().seconds(functools.partial(count, seen), [(0,), (1,)], roughly=0.02)
    assert len(taken) == 3
    assert len(seen) > 2 * len(taken)


def test_a_slow_call_is_not_repeated(gpu):
    seen: list[int] = []
    taken, method = timing.Stopwatch().seconds(functools.partial(count, seen), [(0,)], roughly=1.5)
    assert (taken, method, seen) == ([1.5], "wall", [])


@pytest.mark.parametrize("answers", [RuntimeError("another subscriber"), None])
def test_without_cupti_the_wall_clock_counts_and_the_reason_is_kept(gpu, monkeypatch, answers):
    monkeypatch.setattr(FakeCupti, "answers", answers)
    watch = timing.Stopwatch()
    (taken,), method = watch.seconds(lambda x: x, [(jnp.ones(3),)], roughly=0.01)
    assert method == "wall"
    assert 0 < taken < 1
    assert watch.note in ("CUPTI: another subscriber", "CUPTI saw no kernel")


def test_the_package_says_which_benchmarks_there_are(monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench", "conv"])
    with pytest.raises(SystemExit, match=r"attention \| compiled \| decode.*got conv"):
        bench_main.main()


class FakeTorch:
    """A stream on which each call takes 1 ms; a graph records the calls and replays them."""

    def __init__(self, capturable: bool):
        self.now, self.capturable, self.recorded = 0.0, capturable, None
        self.cuda = self
        outer = self

        class Event:
            def __init__(self, enable_timing: bool):
                assert enable_timing

            def record(self, stream):
                self.at = outer.now

            def synchronize(self):
                pass

            def elapsed_time(self, other) -> float:
                return other.at - self.at

        class CUDAGraph:
            def replay(self):
                outer.now += outer.recorded

        self.Event, self.CUDAGraph = Event, CUDAGraph

    def synchronize(self):
        pass

    @contextlib.contextmanager
    def stream(self, stream):
        yield

    @contextlib.contextmanager
    def graph(self, graph, stream, capture_error_mode):
        before = self.now
        if not self.capturable:
            raise RuntimeError("operation not permitted when stream is capturing")
        yield
        self.recorded, self.now = self.now - before, before


@pytest.mark.parametrize(("capturable", "method"), [(True, "graph"), (False, "events")])
def test_torch_is_timed_by_events_around_a_batch_of_calls(gpu, capturable, method):
    torch = FakeTorch(capturable)
    seen: list[int] = []

    def call(at: int) -> None:
        torch.now += 1.0
        count(seen, at)

    taken, how = timing.torch_seconds(torch, call, [(0,), (1,)], torch)
    assert how == method
    assert taken == pytest.approx([1e-3] * 3)
    assert seen[:4] == [0, 0, 1, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases", "d96"], "--cases d96: unknown; take d128"),
        (["--cases", "tiny", "--peers", "numpy"], "--peers numpy: no peer's name contains it; the names are"),
        (["--cases", "0x4"], "--cases 0x4: take lengths from 1 to "),
        (["--cases", "64x0"], "and at least 1 head"),
        (["--cases", "99999999999x1"], "--cases 99999999999x1: take lengths from 1 to "),
        (["--cases", "tiny", "--passes", "forward+backward"], "these cases are timed in forward, backward$"),
    ],
)
def test_a_wrong_name_says_which_there_are(arguments, message):
    with pytest.raises(SystemExit, match=message):
        attention.main(arguments)


@pytest.mark.parametrize(
    "wrong",
    [["--repeats", "0"], ["--jobs", "-1"], ["--time-limit", "nan"], ["--depth", "0"], ["--dtype", "foo"]],
    ids=" ".join,
)
def test_a_wrong_number_or_dtype_ends_before_anything_is_timed(wrong, capsys):
    with pytest.raises(SystemExit, match="2"):
        attention.main(wrong)
    assert f"{' '.join(wrong)}: take " in capsys.readouterr().err


def test_without_time_no_bars_are_claimed(tmp_path, capsys):
    attention.main(["--cases", "tiny", "--time-limit", "0", "--out", str(tmp_path)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attention.json", "roofline.png"]
    assert "and no bars, since nothing was timed" in capsys.readouterr().out

"""`check_parity` must see planted errors, and report refusals and breakdowns instead of hiding them."""

from __future__ import annotations

import dataclasses
import json
import threading
from concurrent.futures import wait
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fast_layers
from fast_layers.arch import Arch
from fast_layers.dispatch import PASSES, Backend
from fast_layers.ops.attention import api, xla
from fast_layers.ops.attention.hopper_fwd_config import HopperForwardTiles
from fast_layers.ops.mlp import xla as mlp_xla
from fast_layers.ops.mlp.activations import ACTIVATIONS
from fast_layers.testing import (
    ParityTable,
    _parity_attention,
    _parity_conv1d,
    _parity_gated_norm,
    _parity_mlp,
    _parity_selective_scan,
    _parity_ssd,
    check_parity,
    parity,
)
from fast_layers.testing.parity import CASES, QUICK, SUITES, Case

SMALL = {
    "small": Case(q_len=40, kv_len=40, qk_dim=16, v_dim=16, is_causal=True),
    "poisoned": Case(
        q_len=40, kv_len=40, qk_dim=16, v_dim=16, key_lengths=(33, 0), query_lengths=(40, 17), poisoned_padding=True
    ),
    "learned": Case(
        q_len=40, kv_len=40, qk_dim=16, v_dim=16, bias=(1, 4, 40, 40), sinks=True, softcap=5.0, lse_gradient=True
    ),
}


@pytest.mark.parametrize("fn", [_parity_attention._oracle, _parity_attention._plain])
def test_attention_head_by_head(fn, monkeypatch):
    """What is expected of large calls, for which all heads at once would take too much memory."""
    case = dataclasses.replace(SMALL["poisoned"], kv_heads=2, v_dim=24, is_causal=True, lse_gradient=True)
    draw = _parity_attention._Draw.of(case, jnp.dtype(jnp.float32), 0)
    p = draw.problem
    given = draw.clean, draw.clean_d_out, draw.d_lse, draw.visible, None

    def expected():
        with jax.enable_x64(True):
            by_head = _parity_attention._head_by_head(fn)
            call = jax.jit(lambda *given: by_head((p.scale, None, 0.0), *given))
            return call(*given), str(jax.make_jaxpr(call)(*given))

    at_once, all_heads = expected()
    monkeypatch.setattr(_parity_attention, "_MOST_SCORES", 0)
    one_by_one, head_by_head = expected()
    assert "scan" in head_by_head
    assert "scan" not in all_heads
    for got, want in zip(jax.tree.leaves(one_by_one), jax.tree.leaves(at_once), strict=True):
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def _planted(forward=lambda out, lse, inputs: (out, lse), backward=lambda grads, residuals: grads, supports=None):
    """The xla backend with something done to its results."""
    return Backend(
        "planted",
        supports or (lambda problem, arch, pass_: None),
        lambda problem, inputs, aux: forward(*xla.forward(problem, inputs, aux), inputs),
        lambda problem, residuals, *cotangents: backward(xla.backward(problem, residuals, *cotangents), residuals),
    )


def _scale(name, factor):
    return lambda grads, residuals: grads._replace(**{name: getattr(grads, name) * factor})


def _leak(grads, residuals):
    """0 * NaN, as a kernel does that multiplies by the weight of a masked key."""
    return grads._replace(query=grads.query + 0 * residuals.inputs.key.sum(1, keepdims=True))


def test_draws_are_made_under_the_callers_use_backends():
    """They are made in threads, and an op's problem holds what `use_backends` says."""
    seen = []
    backend = _planted(supports=lambda problem, arch, pass_: seen.append(problem.reproducible))
    for reproducible in (False, True):
        seen.clear()
        with fast_layers.use_backends(reproducible=reproducible):
            assert check_parity(backends=[backend], cases={"small": SMALL["small"]}).ok
        assert set(seen) == {reproducible}


FAULTS = {
    "out off": (_planted(forward=lambda out, lse, _: (out * jnp.asarray(1.01, out.dtype), lse)), "small", "out"),
    "lse off": (_planted(forward=lambda out, lse, _: (out, lse + 1e-4)), "small", "lse"),
    "lse in base 2": (_planted(forward=lambda out, lse, _: (out, lse / np.log(2))), "small", "lse"),
    "dq off": (_planted(backward=_scale("query", 1.01)), "small", "dq"),
    "dk off": (_planted(backward=_scale("key", 1.01)), "small", "dk"),
    "dv off": (_planted(backward=_scale("value", 0.99)), "small", "dv"),
    "dbias off": (_planted(backward=_scale("bias", 1.01)), "learned", "dbias"),
    "dsinks off": (_planted(backward=_scale("sinks", 1.02)), "learned", "dsinks"),
    "NaN leaks forward": (
        _planted(forward=lambda out, lse, inputs: (out + 0 * inputs.value.sum(1, keepdims=True), lse)),
        "poisoned",
        "out",
    ),
    "NaN leaks backward": (_planted(backward=_leak), "poisoned", "dq"),
    "empty rows not 0": (
        _planted(forward=lambda out, lse, _: (jnp.where(lse.swapaxes(1, 2)[..., None] == -jnp.inf, 1, out), lse)),
        "poisoned",
        "out",
    ),
    "no dsinks": (_planted(backward=lambda grads, _: grads._replace(sinks=None)), "learned", "dsinks"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_reported_where_it_is(fault):
    backend, case, quantity = FAULTS[fault]
    table = check_parity(backends=[backend], cases={case: SMALL[case]}, dtypes=[jnp.float16])
    assert not table.ok
    assert quantity in {row.quantity for row in table.failures}
    assert {row.pass_ for row in table.failures} <= {
        "forward" if quantity in ("out", "lse") else "backward",
        "backward",
    }
    first_failure = str(table).splitlines()[1]
    assert first_failure.startswith(f"FAILED planted, {case}, float16, ")


def test_without_a_fault_all_is_well():
    table = check_parity(backends=["xla", _planted()], cases=SMALL, dtypes=["bfloat16", "float16"])
    assert table.ok, str(table)
    assert not table.refusals
    measured = {(row.backend, row.case, row.dtype, row.quantity) for row in table.rows}
    assert len(measured) == len(table.rows) == 2 * 2 * (5 + 5 + 7)
    assert all(0 <= row.error <= row.limit for row in table.rows)


def test_backward_alone_takes_the_residuals_of_xla():
    backward_only = _planted(supports=lambda p, arch, pass_: None if pass_ == "backward" else "no forward yet")
    table = check_parity(backends=[backward_only], cases={"small": SMALL["small"]}, dtypes=["bfloat16"])
    assert table.ok
    assert [(row.pass_, row.refusal) for row in table.refusals] == [("forward", "no forward yet")]
    assert {row.quantity for row in table.rows if row.refusal is None} == {"dq", "dk", "dv"}
    assert "refused                       no forward yet" in str(table)


def test_a_backend_that_refuses_everything_is_not_run_and_not_wrong():
    def explode(*_):
        raise AssertionError("called after a refusal")

    backend = Backend("never", lambda p, arch, pass_: f"never the {pass_} pass", explode, explode)
    table = check_parity(backends=[backend], cases={"small": SMALL["small"]}, dtypes=["bfloat16"])
    assert table.ok
    assert [row.refusal for row in table.rows] == ["never the forward pass", "never the backward pass"]


def test_a_breakdown_is_a_failure_and_the_next_backend_is_still_measured():
    def explode(*_):
        raise RuntimeError("no such instruction\nlong tail")

    broken = Backend("broken", lambda p, arch, pass_: None, explode, xla.backward)
    table = check_parity(backends=[broken, "xla"], cases={"small": SMALL["small"]}, dtypes=["bfloat16"])
    assert {row.failure for row in table.failures} == {"raised RuntimeError: no such instruction"}
    assert {row.pass_ for row in table.failures} == {"forward", "backward"}
    assert table.of_backend("xla").ok
    assert len(table.of_backend("xla").rows) == 5


def test_cudnn_is_left_until_no_other_thread_uses_the_gpu():
    with parity.compilers() as pool:
        small = {"small": SMALL["small"]}
        for name, futures, later in (("planted", 4, 0), ("cudnn", 2, 2)):  # inputs and answer, and two programs
            backend = dataclasses.replace(_planted(), name=name)
            check = parity.Check("dot_product_attention", pool, [backend], small, ["bfloat16"]).lower()
            assert [len(case.under_way) for case in check._cases] == [futures]
            assert (check.programs, check.left_for_later) == (2, later)
            assert check.table().ok


def test_what_fails_in_a_thread_is_done_once_more(capsys):
    class Busy(parity.Compilers):
        def submit(self, fn, /, *args, **kwargs):
            return super().submit(_fail)

    def _fail():
        failed.append(1)
        raise RuntimeError("failed to launch the compiler")

    failed = []
    with Busy(1) as pool:
        check = parity.Check("dot_product_attention", pool, ["xla"], {"small": SMALL["small"]}, ["bfloat16"])
        assert check.lower().table().ok
    assert len(failed) == 4  # inputs and answer, and two programs
    where, after = "dot_product_attention, small", "done once more, alone, after RuntimeError: failed to launch"
    assert [line.partition(" the compiler")[0] for line in capsys.readouterr().err.splitlines()] == [
        f"{where}: inputs: {after}",
        f"{where}: oracle: {after}",
        *2 * [f"{where}, xla: compiling: {after}"],
    ]


def test_what_fails_is_done_once_more_when_the_other_threads_are_done():
    def fail():
        seen.append(ended.is_set())
        raise RuntimeError("no memory")

    def end_when_told():
        told.wait(5)
        ended.set()

    seen, told, ended = [], threading.Event(), threading.Event()
    with parity.compilers() as pool:
        begun = pool.begin("this", fail)
        pool.begin("another", end_when_told)
        wait([begun.future])
        threading.Timer(0.1, told.set).start()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no memory"):
                begun.result()
    assert seen == [False, True]


@pytest.mark.parametrize(("stage", "missing"), [("expect", "oracle"), ("draw", "inputs")])
def test_what_there_is_nothing_to_judge_by_fails_and_the_next_case_is_still_measured(monkeypatch, stage, missing):
    suite = SUITES["gated_rms_norm"]
    cases = {"wide": _parity_gated_norm.Case((7,), 16), "narrow": _parity_gated_norm.Case((7,), 8)}

    def fail_on_the_wide_one(given, *args):
        if (given.features if stage == "draw" else given[0].problem.features) == 16:
            raise RuntimeError("INTERNAL: failed to launch ptxas\nlong tail")
        return getattr(suite, stage)(given, *args)

    monkeypatch.setitem(SUITES, suite.op, dataclasses.replace(suite, **{stage: fail_on_the_wide_one}))
    table = check_parity(suite.op, backends=["xla"], cases=cases, dtypes=["bfloat16"])
    assert [(row.case, row.pass_, row.failure) for row in table.failures] == [
        ("wide", pass_, f"no {missing}: RuntimeError: INTERNAL: failed to launch ptxas") for pass_ in PASSES
    ]
    assert {row.quantity for row in table.rows if row.case == "narrow"} == {"out", "dy", "dz", "dweight"}


def test_a_program_that_never_compiles_is_compiled_once_more_only(monkeypatch):
    def fail(lowered):
        compiled.append(lowered)
        raise RuntimeError("out of registers")

    compiled = []
    monkeypatch.setattr(jax.stages.Lowered, "compile", fail)
    for name, times in (("planted", 2), ("cudnn", 1)):
        compiled.clear()
        backend = dataclasses.replace(_planted(), name=name)
        table = check_parity(backends=[backend], cases={"small": SMALL["small"]}, dtypes=["bfloat16"])
        assert [row.failure for row in table.rows] == 2 * ["raised RuntimeError: out of registers"]
        forward = compiled[0]
        assert sum(lowered is forward for lowered in compiled) == times


def test_json_holds_what_the_table_holds():
    table = check_parity(backends=[FAULTS["dk off"][0]], cases={"small": SMALL["small"]}, dtypes=["float16"])
    data = json.loads(table.to_json())
    assert data["ok"] is False
    assert data["device"] == table.device
    rows = {row["quantity"]: row for row in data["rows"]}
    assert [name for name, row in rows.items() if not row["ok"]] == ["dk"]
    assert rows["dk"]["pass"] == "backward"
    assert rows["dk"]["error"] > rows["dk"]["limit"] > 0
    assert rows["dk"]["refusal"] is None


def test_default_backends_are_the_ops_own(monkeypatch):
    monkeypatch.setattr(api, "BACKENDS", (_planted(), *api.BACKENDS))
    table = check_parity(cases={"small": SMALL["small"]}, dtypes=["bfloat16"])
    assert list(dict.fromkeys(row.backend for row in table.rows)) == [
        backend.name for backend in api.BACKENDS if backend.name != "reference"
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"op": "relu"}, "op='relu': parity is known for 'dot_product_attention', 'mlp'"),
        ({"backends": ["flash"]}, r"backends \['flash'\] are unknown; those of .* xla, reference"),
        ({"cases": ["causal d64", "causal"]}, r"cases \['causal'\] are unknown; there are full d64, "),
        ({"backends": "flash"}, r"backends \['flash'\] are unknown"),
        ({"cases": []}, "cases is empty, so nothing would be compared"),
        ({"cases": 3}, "cases=3: must be one of them, or several in a list"),
        ({"backends": 3}, "backends=3: must be one of them, or several in a list"),
        ({"backends": [3]}, r"backends \[3\] are unknown"),
        ({"cases": {}}, "cases is empty"),
        ({"backends": ()}, "backends is empty"),
        ({"dtypes": []}, "dtypes is empty"),
        ({"dtypes": ["brain"]}, "dtypes has 'brain'"),
        ({"dtypes": [jnp.int32]}, "must be floating point"),
        ({"dtypes": [jnp.float32, jnp.float64]}, "the oracle is in float64, and judges what is narrower"),
        ({"op": ["mlp"]}, r"op=\['mlp'\]: parity is known for"),
        ({"cases": [["causal d64"]]}, r"cases \[\['causal d64'\]\] are unknown"),
        ({"cases": {3: SMALL["small"]}}, "cases has the name 3: names must be strings"),
        ({"run": "jit"}, "run='jit': must make a function"),
    ],
    ids=str,
)
def test_unknown_names_and_nothing_to_compare(arguments, message):
    with pytest.raises(ValueError, match=message):
        check_parity(**arguments)


@pytest.mark.parametrize("returned", [True, False])
def test_a_reason_is_in_words(returned):
    backend = Backend("mine", lambda problem, arch, pass_: returned, xla.forward, xla.backward)
    with pytest.raises(ValueError, match=f"supports of mine returned {returned}: must be None, or the reason"):
        check_parity(backends=[backend], cases={"small": SMALL["small"]})


def test_the_table_covers_what_it_should():
    assert set(QUICK) <= set(CASES)
    assert {case.qk_dim for case in CASES.values()} >= {32, 40, 64, 80, 128, 144, 192, 208, 256}
    assert {1, 7, 129, 1000} <= {case.q_len for case in CASES.values()}
    for option in ("window", "documents", "key_lengths", "prefix", "softcap", "sinks", "dropout_rate", "dense_mask"):
        assert any(getattr(case, option) for case in CASES.values()), option
    assert ParityTable((), "nothing").ok


def test_the_quick_cases_have_the_form_with_clusters_and_those_without():
    problems = [SUITES["dot_product_attention"].draw(CASES[name], jnp.bfloat16, 0).problem for name in QUICK]
    forms = [HopperForwardTiles.of(problem) for problem in problems]
    assert {tiles.cluster for tiles in forms} == {1, 2}


@pytest.mark.parametrize("name", QUICK[:1])
def test_xla_is_within_the_limit_here(name):
    table = check_parity(backends=["xla"], cases=[name])
    assert table.ok, str(table)


class TestMLP:
    cases: ClassVar = {
        "gated": _parity_mlp.Case(7, 16, 24, 8, "silu", gated=True, bias=True),
        "linear": _parity_mlp.Case(7, 16, 24, None, bias=True, save="inputs"),
    }

    @pytest.mark.parametrize("quantity", ["out", "pre_gate", "dx", "dw_gate", "db_down"])
    def test_planted_fault_is_reported_where_it_is(self, quantity):
        def off(name, x):
            return x if x is None or name != quantity else x * jnp.asarray(1.05, x.dtype)

        def forward(problem, inputs):
            out, (up, gate) = mlp_xla.forward(problem, inputs)
            return off("out", out), (off("pre_up", up), off("pre_gate", gate))

        def backward(*args):
            grads = mlp_xla.backward(*args)
            return grads._replace(**{name: off(f"d{name}", x) for name, x in grads._asdict().items()})

        backend = Backend("planted", lambda *_: None, forward, backward)
        table = check_parity("mlp", backends=[backend], cases={"gated": self.cases["gated"]}, dtypes=["bfloat16"])
        assert quantity in {row.quantity for row in table.failures}
        # What is saved wrongly makes the gradients wrong, nothing else does.
        assert {row.quantity for row in table.failures if row.pass_ == "forward"} <= {quantity}

    def test_without_a_fault_all_is_well(self):
        table = check_parity("mlp", cases=self.cases, backends=["xla"], dtypes=["bfloat16", "float16"])
        assert table.ok, str(table)
        quantities = {row.case: {r.quantity for r in table.rows if r.case == row.case} for row in table.rows}
        grads = {"dx", "dw_up", "db_up"}
        assert quantities["linear"] == {"out", *grads}
        assert quantities["gated"] == {
            *("out", "pre_up", "pre_gate"),
            *grads,
            *("dw_gate", "dw_down", "db_gate", "db_down"),
        }

    def test_the_table_covers_what_it_should(self):
        suite = SUITES["mlp"]
        assert set(suite.quick) | suite.also_float16 <= set(suite.cases)
        assert {case.activation for case in suite.cases.values()} == set(ACTIVATIONS)
        assert {1, 7, 130, 1000} <= {case.tokens for case in suite.cases.values()}
        assert "x [8192, 2048], hidden 5504, out 2048, bfloat16, silu gate" in suite.typical().describe()

    def test_xla_is_within_the_limit_here(self):
        table = check_parity("mlp", backends=["xla"], cases=("swiglu", "odd features"))
        assert table.ok, str(table)

    @pytest.mark.exhaustive
    def test_xla_is_within_the_limit_everywhere(self):
        table = check_parity("mlp", backends=["xla"])
        assert table.ok, str(table)


class TestStateSpaceOps:
    """The scans of Mamba-2 and Mamba-1, and the two ops around them."""

    cases: ClassVar = {
        "ssd": _parity_ssd.Case(
            *(1, 9, 4, 4, 2, 3), skip="head", gated=True, softplus=True, initial_state=True, documents=(5, 4), chunk=4
        ),
        "selective_scan": _parity_selective_scan.Case(
            *(1, 9, 8, 2, 3), skip=True, gated=True, softplus=True, initial_state=True, documents=(5, 4), chunk=4
        ),
        "causal_conv1d": _parity_conv1d.Case(2, 9, 8, initial_state=True, final_state=True, documents=(5, 4)),
        "gated_rms_norm": _parity_gated_norm.Case((7,), 16, group_size=8, norm_before_gate=True),
    }
    quantities: ClassVar = {
        "ssd": {"out", "final_state", *(f"d{x}" for x in ("x", "dt", "A", "B", "C", "D", "z"))}
        | {"ddt_bias", "dinitial_state"},
        "selective_scan": {"out", "final_state", *(f"d{x}" for x in ("x", "dt", "A", "B", "C", "D", "z"))}
        | {"ddt_bias", "dinitial_state"},
        "causal_conv1d": {"y", "final_state", "dx", "dw", "db", "dinitial_state"},
        "gated_rms_norm": {"out", "dy", "dz", "dweight"},
    }

    @pytest.mark.parametrize(
        ("op", "value", "gradient"),
        [
            ("ssd", "final_state", "A"),
            ("selective_scan", "final_state", "A"),
            ("causal_conv1d", "y", "w"),
            ("gated_rms_norm", "out", "z"),
        ],
        ids=list(cases),
    )
    def test_planted_faults_are_reported_where_they_are_and_xla_is_well(self, op, value, gradient):
        (own,) = (backend for backend in SUITES[op].backends() if backend.name == "xla")

        def off(returned, name):
            if not isinstance(returned, tuple):
                return returned * jnp.asarray(1.05, returned.dtype)
            fields: Any = returned
            return fields._replace(**{name: off(getattr(fields, name), name)})

        planted = Backend(
            "planted",
            lambda *_: None,
            lambda *operands: off(own.fwd(*operands), value),
            lambda *residuals: off(own.bwd(*residuals), gradient),
        )
        table = check_parity(op, backends=["xla", planted], cases={"small": self.cases[op]}, dtypes=["bfloat16"])
        assert {(row.backend, row.quantity) for row in table.failures} == {
            ("planted", value),
            ("planted", f"d{gradient}"),
        }
        for name in ("xla", "planted"):
            assert {row.quantity for row in table.of_backend(name).rows} == self.quantities[op]

    def test_the_tables_cover_what_they_should(self):
        for op in self.cases:
            suite = SUITES[op]
            assert set(suite.quick) | suite.also_float16 <= set(suite.cases)
        ssd, mamba1, conv, norm = (SUITES[op].cases.values() for op in self.cases)
        for option in ("skip", "gated", "softplus", "initial_state", "documents", "chunk"):
            assert any(getattr(case, option) for case in ssd), option
            assert any(getattr(case, option) for case in mamba1), option
        for option in ("activation", "bias", "initial_state", "final_state", "documents"):
            assert {bool(getattr(case, option)) for case in conv} == {False, True}, option
        assert {bool(case.norm_before_gate) for case in norm} == {False, True}
        assert {1, 7, 65, 1000} <= {case.length for case in ssd}

    def test_the_hopper_scan_takes_what_doctor_asks(self):
        """On an H200 it is judged although a call takes it only by name, in the sizes of Mamba-2 too."""
        suite, h200 = SUITES["ssd"], Arch("cuda", "NVIDIA H200", (9, 0))
        (hopper,) = (backend for backend in suite.backends() if backend.name == "hopper")
        problems = [suite.draw(suite.cases[name], jnp.bfloat16, 0).problem for name in suite.quick]
        assert (64, 128) in {(problem.head_dim, problem.state_dim) for problem in problems}
        for problem in (suite.typical(), *problems):
            assert [hopper.supports(problem, h200, pass_) for pass_ in PASSES] == [None, None]

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("op", cases)
    def test_xla_is_within_the_limit_everywhere(self, op):
        table = check_parity(op, backends=["xla"])
        assert table.ok, str(table)

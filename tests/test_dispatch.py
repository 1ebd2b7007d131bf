"""The choice of backend: per pass, per device, with reasons; steered by name, context and environment."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fast_layers
from fast_layers import dispatch
from fast_layers.dispatch import Backend
from fast_layers.ops.attention import api, reference, xla

X = np.random.default_rng(0).normal(size=(2, 8, 2, 4)).astype(np.float32)
REASON = "head_dim=4 is no multiple of 16; pad it"
cpu_only = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the text names the device")


def _fake(name, supports=lambda problem, arch, pass_: None, **options):
    """A backend that computes what the reference does and writes down that it was asked."""
    calls = []

    def fwd(problem, inputs, aux):
        calls.append("forward")
        return reference.forward(problem, inputs, aux)

    def bwd(problem, residuals, d_out, d_lse):
        calls.append("backward")
        return reference.backward(problem, residuals, d_out, d_lse)

    return Backend(name, supports, fwd, bwd, **options), calls


def _only(pass_):
    return lambda problem, arch, asked: None if asked == pass_ else f"this kernel is for the {pass_} pass"


@pytest.fixture
def backends(monkeypatch):
    """Put backends before the package's own."""

    def put(*new):
        monkeypatch.setattr(api, "BACKENDS", (*new, *api.BACKENDS))

    return put


def _fresh(fn):
    """`fn` as jax has not seen it: what it compiled with other backends in place must not come back."""
    return lambda x: fn(x)


def _loss(x, **options):
    return jnp.sin(fast_layers.dot_product_attention(x, x, x, is_causal=True, **options)).sum()


class TestChoice:
    def test_first_without_an_objection(self, backends):
        refusing, refused_calls = _fake("refusing", lambda *_: REASON)
        taking, calls = _fake("taking")
        backends(refusing, taking)
        _loss(X)
        assert (refused_calls, calls) == ([], ["forward"])

    def test_forward_of_one_meets_backward_of_another(self, backends):
        first, first_calls = _fake("first", _only("forward"))
        second, second_calls = _fake("second", _only("backward"))
        backends(first, second)
        grad = jax.grad(_loss)(X)
        assert (first_calls, second_calls) == (["forward"], ["backward"])
        np.testing.assert_allclose(grad, jax.grad(_loss)(X, implementation="reference"), rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("pass_", ["forward", "backward"])
    def test_one_pass_falls_back_to_xla(self, backends, pass_):
        fake, calls = _fake("fake", _only(pass_))
        backends(fake)
        grad = jax.grad(_loss)(X)
        assert calls == [pass_]
        np.testing.assert_allclose(grad, jax.grad(_loss)(X, implementation="reference"), rtol=1e-5, atol=1e-6)

    def test_a_value_without_gradient_asks_no_backward(self, backends):
        fake, calls = _fake("fake", _only("forward"))
        backends(fake)
        _loss(X, implementation="fake")
        assert calls == ["forward"]

    def test_named_backend_that_refuses_says_why_and_what_to_do(self, backends):
        backends(_fake("fake", lambda *_: REASON)[0])
        message = (
            r"no backend takes the forward pass on .*fake: head_dim=4 .*pad it\. "
            r'Leave implementation=None to let fast_layers choose, or take implementation="xla"\.$'
        )
        with pytest.raises(ValueError, match=message):
            _loss(X, implementation="fake")

    def test_named_backend_that_refuses_the_backward_raises_at_the_gradient(self, backends):
        backends(_fake("fake", _only("forward"))[0])
        _loss(X, implementation="fake")
        with pytest.raises(ValueError, match=r"no backend takes the backward pass .*fake: this kernel is for"):
            jax.grad(_loss)(X, implementation="fake")

    def test_unknown_name_lists_the_known(self):
        known = ", ".join(backend.name for backend in api.BACKENDS)
        with pytest.raises(ValueError, match=f"implementation 'flash' is unknown; .* are {known}$"):
            _loss(X, implementation="flash")

    def test_reference_is_taken_only_by_name(self):
        with (
            fast_layers.use_backends(forbid="xla"),
            pytest.raises(ValueError, match=r"xla: forbidden.*reference: taken"),
        ):
            _loss(X)
        with fast_layers.use_backends(forbid="xla"):
            _loss(X, implementation="reference")

    def test_supports_gets_the_problem(self, backends):
        seen = []
        backends(_fake("fake", lambda problem, arch, pass_: seen.append((problem, arch, pass_)) or REASON)[0])
        _loss(X)
        problem, arch, pass_ = seen[0]
        assert (problem.batch, problem.q_len, problem.heads, problem.qk_dim) == (2, 8, 2, 4)
        assert problem.mask.band.high == 0
        assert arch.platform == jax.default_backend()
        assert {p for *_, p in seen} == {"forward", "backward"}
        assert pass_ == "forward"


class TestUseBackends:
    def test_force(self, backends):
        fake, calls = _fake("fake", automatic=False)
        backends(fake)
        _loss(X)
        assert calls == []
        with fast_layers.use_backends("fake"):
            _loss(X)
            assert calls == ["forward"]
            _loss(X, implementation="xla")
        _loss(X)
        assert calls == ["forward"]

    def test_force_of_an_unknown_name(self):
        with (
            fast_layers.use_backends("nonsense"),
            pytest.raises(ValueError, match="forced backend 'nonsense' is unknown"),
        ):
            _loss(X)

    def test_force_leaves_ops_alone_that_lack_the_backend(self):
        """Of all ops only attention has cudnn; a call's own implementation counts as everywhere."""
        x, w = jnp.ones((2, 8)), jnp.ones((8, 8))
        with fast_layers.use_backends("cudnn"):
            np.testing.assert_array_equal(fast_layers.mlp(x, w, w), fast_layers.mlp(x, w, w, implementation="xla"))
        with fast_layers.use_backends("nonsense"):
            fast_layers.mlp(x, w, w, implementation="xla")

    def test_forbid_adds_up_when_nested(self, backends):
        (a, a_calls), (b, b_calls) = _fake("a"), _fake("b")
        backends(a, b)
        with fast_layers.use_backends(forbid="a"):
            _loss(X)
            assert (a_calls, b_calls) == ([], ["forward"])
            with fast_layers.use_backends(forbid=["b"]):
                _loss(X)
                assert (a_calls, b_calls) == ([], ["forward"])
            _loss(X)
            assert (a_calls, b_calls) == ([], ["forward"] * 2)
        _loss(X)
        assert a_calls == ["forward"]

    def test_forbidding_an_unknown_name(self):
        with (
            fast_layers.use_backends(forbid=["xla", "hoper"]),
            pytest.raises(ValueError, match=r"^'hoper' is forbidden by .*, and unknown; there are .*hopper, "),
        ):
            _loss(X)

    @pytest.mark.parametrize("option", [{"force": ["xla"]}, {"force": 3}], ids=str)
    def test_force_is_one_name(self, option):
        with pytest.raises(ValueError, match=r"^force=(\['xla'\]|3): must be the name of one backend, or None$"):
            fast_layers.use_backends(**option)

    @pytest.mark.parametrize("forbid", [None, 3, [["xla"]], ["xla", None]], ids=str)
    def test_forbid_is_names(self, forbid):
        with pytest.raises(ValueError, match=r"^forbid=.*: must be the name of a backend or a sequence of names"):
            fast_layers.use_backends(forbid=forbid)

    def test_a_forced_backend_that_refuses_says_who_forced_it(self, backends):
        backends(_fake("fake", lambda *_: REASON)[0])
        with (
            fast_layers.use_backends("fake"),
            pytest.raises(
                ValueError,
                match=r"pad it\. Leave out use_backends\(force='fake'\) to let .*, or take implementation=\"xla\"\.$",
            ),
        ):
            _loss(X)

    @cpu_only
    @pytest.mark.parametrize(
        ("steer", "options", "way_out"),
        [
            ({"forbid": "xla"}, {}, 'Take implementation="reference", or allow xla again.'),
            ({"forbid": ["xla", "reference"]}, {}, "Allow xla again."),
            ({"force": "xla", "forbid": "xla"}, {}, 'Take implementation="reference", or allow xla again.'),
            ({"force": "fake", "forbid": "xla"}, {}, 'Take implementation="reference".'),
            ({"forbid": ["xla", "reference"]}, {"implementation": "fake"}, "Change the call as the reasons say."),
        ],
        ids=str,
    )
    def test_what_is_forbidden_is_not_advised(self, backends, steer, options, way_out):
        backends(_fake("fake", lambda *_: REASON)[0])
        with fast_layers.use_backends(**steer), pytest.raises(ValueError, match=r"no backend takes") as caught:
            _loss(X, **options)
        assert str(caught.value).endswith(f". {way_out}")

    @pytest.mark.parametrize("option", [{"strict": "no"}, {"reproducible": 0}], ids="-".join)
    def test_flags_are_bools(self, option):
        with pytest.raises(ValueError, match=r"^(strict='no'|reproducible=0): must be True or False"):
            fast_layers.use_backends(**option)

    def test_forbidden_by_context_and_asked_by_name(self):
        with (
            fast_layers.use_backends(forbid="xla"),
            pytest.raises(ValueError, match="xla: forbidden by use_backends"),
        ):
            _loss(X, implementation="xla")

    def test_contexts_retrace_a_jitted_function(self, backends):
        """Going in and out of a context; coming back takes the function compiled before."""
        fake, calls = _fake("fake")
        backends(fake)
        loss = jax.jit(_fresh(_loss))
        loss(X)
        loss(X)
        assert calls == ["forward"]
        with fast_layers.use_backends(forbid="fake"):
            loss(X)
        assert calls == ["forward"]
        loss(X)
        assert calls == ["forward"]
        with fast_layers.use_backends("fake"):
            loss(X)
        assert calls == ["forward"] * 2

    def test_strict_refuses_a_fallback_in_either_pass(self, backends, monkeypatch):
        platform = jax.default_backend()
        fallback = Backend("plain", xla.supports, xla.forward, xla.backward, fallback_on=frozenset({platform}))
        fake, _ = _fake("fake", _only("forward"))
        monkeypatch.setattr(api, "BACKENDS", (fake, fallback))
        _loss(X)
        message = r"strict mode, and the backward pass on \w+ would fall back to plain\. fake: this kernel is for the"
        with fast_layers.use_backends(strict=True):
            with pytest.raises(ValueError, match=message):
                _loss(X)
            _loss(X, implementation="plain")
            with fast_layers.use_backends(strict=False):
                _loss(X)
            with fast_layers.use_backends(forbid="cudnn"), pytest.raises(ValueError, match="strict mode"):
                _loss(X)

    def test_strict_is_silent_where_xla_is_what_is_expected(self):
        with fast_layers.use_backends(strict=True):
            _loss(X)

    def test_reproducible_reaches_the_kernels_and_nests(self):
        def asked():
            (plan,) = fast_layers.explain(_loss, X).plans
            return plan.problem.reproducible

        assert asked()
        with fast_layers.use_backends(reproducible=False):
            assert not asked()
            with fast_layers.use_backends("xla"):
                assert not asked()
            with fast_layers.use_backends(reproducible=True):
                assert asked()

    def test_what_holds_where_a_context_is_entered_stays(self):
        kept = fast_layers.use_backends("reference")

        def call(x):
            with kept:
                return _loss(x)

        assert "reference" in str(fast_layers.explain(call, X))
        with fast_layers.use_backends(forbid="reference"), pytest.raises(ValueError, match="reference: forbidden by"):
            call(X)

    def test_one_context_within_itself_and_in_two_threads(self):
        outer, kept = dispatch._policy.value, fast_layers.use_backends("reference")
        with kept, kept:
            pass
        assert dispatch._policy.value == outer
        both_are_in = threading.Barrier(2, timeout=60)

        def enter(number):
            with fast_layers.use_backends(reproducible=bool(number)):
                mine = dispatch._policy.value
                both_are_in.wait()
                if number:
                    kept.__enter__()
                both_are_in.wait()
                if not number:
                    kept.__enter__()
                both_are_in.wait()
                kept.__exit__(None, None, None)
                return dispatch._policy.value == mine

        with futures.ThreadPoolExecutor(2) as pool:
            assert list(pool.map(enter, range(2))) == [True, True]
        assert dispatch._policy.value == outer

    def test_leaves_the_context_after_an_exception(self):
        outer = dispatch._policy.value
        with pytest.raises(ZeroDivisionError), fast_layers.use_backends("xla"):
            1 / 0  # noqa: B018
        assert dispatch._policy.value == outer


_PROGRAM = """
import numpy as np, fast_layers
x = np.ones((1, 2, 1, 4), np.float32)
try:
    print(fast_layers.explain(fast_layers.dot_product_attention, x, x, x))
except ValueError as error:
    print("ValueError:", error)
try:
    fast_layers.dot_product_attention(x, x, x)
    print("ran")
except ValueError as error:
    print("ValueError:", error)
"""


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (
            {"FAST_LAYERS_BACKEND": "reference"},
            ["forward  on cpu: reference", "backward on cpu: reference", "ran"],
        ),
        (
            {"FAST_LAYERS_FORBID": "xla , cudnn"},
            ["xla: forbidden by use_backends or FAST_LAYERS_FORBID", "ValueError", "or allow xla again"],
        ),
        ({"FAST_LAYERS_BACKEND": "hopper"}, ["ValueError", "Leave out FAST_LAYERS_BACKEND=hopper to let"]),
        (
            {"FAST_LAYERS_BACKEND": "nonsense"},
            ["forced backend 'nonsense' is unknown, for which FAST_LAYERS_BACKEND=nonsense asks"],
        ),
        ({"FAST_LAYERS_STRICT": "yes"}, ["FAST_LAYERS_STRICT='yes': must be 0 or 1"]),
        (
            {"FAST_LAYERS_STRICT": "1", "FAST_LAYERS_BACKEND": "", "FAST_LAYERS_REPRODUCIBLE": "0"},
            ["on cpu: xla", "sums in any order", "ran"],
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_environment(environment, expected):
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    for text in expected:
        assert text in done.stdout + done.stderr


HEADER = "dot_product_attention: query [2, 8, 2, 4], key [2, 8, 2, 4], float32, mask band [.., 0]"
GOLDEN = f"""{HEADER}
  forward  on cpu: xla
  backward on cpu: xla"""


class Attend(nnx.Module):
    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.ones(4))
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        self.calls[...] += 1
        x = self.drop(x * self.scale)
        return fast_layers.dot_product_attention(x, x, x, is_causal=True)

    def decode(self, x, twice=False):
        x = self(x)
        return self(x) if twice else x


@cpu_only
class TestExplain:
    @pytest.fixture(autouse=True)
    def two_plain_backends(self, monkeypatch):
        """The texts below stay the same whatever kernels refuse a CPU."""
        plain = tuple(backend for backend in api.BACKENDS if backend.name in ("xla", "reference"))
        monkeypatch.setattr(api, "BACKENDS", plain)

    def test_functions_of_all_kinds(self):
        shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
        for fn in (_loss, jax.jit(_loss), lambda x: _loss(x), jax.grad(_loss), jax.jit(jax.grad(_loss))):
            for x in (X, jnp.asarray(X), shape):
                assert str(fast_layers.explain(fn, x)) == GOLDEN

    def test_op_itself_with_options(self):
        explained = fast_layers.explain(fast_layers.dot_product_attention, X, X, X, is_causal=True)
        assert str(explained) == repr(explained) == GOLDEN
        assert [plan.op for plan in explained.plans] == ["dot_product_attention"]
        # numpy's scalars are options like Python's.
        options = {"is_causal": np.True_, "scale": np.float32(0.5)}
        assert str(fast_layers.explain(fast_layers.dot_product_attention, X, X, X, **options)) == GOLDEN
        # So are arrays of no dims, which the op itself takes as numbers.
        for scale in (jnp.float32(0.5), np.array(0.5)):
            explained = fast_layers.explain(fast_layers.dot_product_attention, X, X, X, is_causal=True, scale=scale)
            assert str(explained) == GOLDEN

    def test_a_result_in_place_of_the_function(self):
        with pytest.raises(ValueError, match=r"^explain was given .* ArrayImpl, .*: give the function and its arg"):
            fast_layers.explain(fast_layers.dot_product_attention(X, X, X))

    def test_a_jitted_function_that_ran_before(self):
        """Its compiled form is not enough: explaining must trace anew."""
        loss = jax.jit(_loss)
        loss(X)
        assert str(fast_layers.explain(loss, X)) == GOLDEN
        assert str(fast_layers.explain(loss, X)) == GOLDEN
        inner = jax.jit(_loss)
        inner(X)
        assert str(fast_layers.explain(lambda x: inner(x) * 2, X)) == GOLDEN

    def test_module_and_method_leave_its_state_alone(self):
        module = Attend(nnx.Rngs(0))
        before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.RngKey))))
        assert str(fast_layers.explain(module, X)) == GOLDEN
        assert str(fast_layers.explain(module.decode, X)) == GOLDEN
        assert str(fast_layers.explain(module.decode, X, twice=True)) == GOLDEN.replace(HEADER, HEADER + "  (2 calls)")
        after = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.RngKey))))
        jax.tree.map(np.testing.assert_array_equal, before, after)

    def test_nnx_jit_and_grad(self):
        module = Attend(nnx.Rngs(0))
        step = nnx.jit(nnx.grad(lambda module, x: module(x).sum()))
        assert str(fast_layers.explain(step, module, X)) == GOLDEN

    def test_refusals_with_reasons(self, backends):
        backends(_fake("fast", lambda *_: REASON)[0], _fake("forward_only", _only("forward"))[0])
        assert str(fast_layers.explain(_loss, X)) == (
            f"{HEADER}\n"
            "  forward  on cpu: forward_only\n"
            f"           not fast: {REASON}\n"
            "  backward on cpu: xla\n"
            f"           not fast: {REASON}\n"
            "           not forward_only: this kernel is for the forward pass"
        )

    def test_other_devices(self, backends):
        def on_cuda(problem, arch, pass_):
            return None if arch.platform == "cuda" else f"runs on cuda, not on {arch}"

        backends(_fake("hopper", on_cuda)[0])
        assert str(fast_layers.explain(_loss, X)) == (
            f"{HEADER}\n"
            "  forward  on cpu: xla\n"
            "           not hopper: runs on cuda, not on cpu\n"
            "           lowered for cuda instead: hopper\n"
            "  backward on cpu: xla\n"
            "           not hopper: runs on cuda, not on cpu\n"
            "           lowered for cuda instead: hopper"
        )

    def test_a_named_backend_that_refuses_is_explained_not_raised(self, backends):
        backends(_fake("fast", lambda *_: REASON)[0])
        text = str(fast_layers.explain(lambda x: _loss(x, implementation="fast"), X))
        assert f"forward  on cpu: no backend\n           not fast: {REASON}" in text

    def test_strict_mode_does_not_stop_an_explanation(self, backends):
        with fast_layers.use_backends(strict=True):
            assert str(fast_layers.explain(_loss, X)) == GOLDEN

    def test_everything_is_in_the_problem_line(self):
        def call(x):
            return fast_layers.dot_product_attention(
                x,
                x[:, :, :1],
                x[:, :, :1, :3],
                jnp.zeros((2, 1, 8)),
                np.ones((8, 8), bool),
                segment_ids=np.zeros(8, int),
                local_window_size=(3, None),
                softcap=2.0,
                sinks=jnp.zeros(2),
                dropout_rate=0.1,
                dropout_rng=jax.random.key(0),
            )

        assert str(fast_layers.explain(call, X)).splitlines()[0] == (
            "dot_product_attention: query [2, 8, 2, 4], key [2, 8, 1, 4], value depth 3, float32, "
            "mask band [-3, ..] & segments & dense [1, 1, 8, 8], bias [1, 2, 1, 8], softcap 2, sinks, dropout 0.1"
        )

    def test_nothing_to_explain(self):
        assert str(fast_layers.explain(jnp.sin, X)) == "No fast_layers op was called."


class TestLowering:
    """The backend is that of the device lowered for, not of the device at hand."""

    @staticmethod
    def _marked(platform):
        """Supports one platform; its marker in the lowered text is a cosine forward and an arc tangent backward."""

        def supports(problem, arch, pass_):
            return None if arch.platform == platform else f"runs on {platform}, not on {arch}"

        def fwd(problem, inputs, aux):
            out, lse = reference.forward(problem, inputs, aux)
            return jnp.cos(out), lse

        def bwd(problem, residuals, d_out, d_lse):
            return jax.tree.map(lambda x: jnp.arctan2(x, x), residuals.inputs)

        return Backend("marked", supports, fwd, bwd)

    @pytest.mark.parametrize(
        ("fn", "x"),
        [(_loss, X), (jax.grad(_loss), X), (jax.vmap(_loss), np.stack([X, X]))],
        ids=["value", "grad", "vmap"],
    )
    def test_marker_only_where_it_belongs(self, backends, fn, x):
        backends(self._marked("cuda"))
        traced = jax.jit(_fresh(fn)).trace(x)
        cuda = traced.lower(lowering_platforms=("cuda",)).as_text()
        cpu = traced.lower(lowering_platforms=("cpu",)).as_text()
        assert "stablehlo.cosine" in cuda
        # The gradient of the loss' own sine is a cosine, but of nothing else.
        assert cuda.count("stablehlo.cosine") == cpu.count("stablehlo.cosine") + 1

    def test_both_at_once_and_export(self, backends):
        backends(self._marked("cuda"))
        text = jax.jit(_fresh(_loss)).trace(X).lower(lowering_platforms=("cpu", "cuda")).as_text()
        assert "stablehlo.cosine" in text
        exported = jax.export.export(jax.jit(_fresh(_loss)), platforms=("cpu", "cuda"))(X)
        assert "stablehlo.cosine" in exported.mlir_module()
        np.testing.assert_allclose(exported.call(X), _loss(X, implementation="reference"), rtol=1e-5)

    def test_runs_here_with_the_backend_for_here(self, backends):
        backends(self._marked("cuda" if jax.default_backend() == "cpu" else "cpu"))
        np.testing.assert_allclose(_loss(X), _loss(X, implementation="reference"), rtol=1e-5)
        grads = jax.grad(_loss)(X), jax.grad(_loss)(X, implementation="reference")
        np.testing.assert_allclose(*grads, rtol=1e-4, atol=1e-5)


class TestSaving:
    """A forward that saves more for its own backward, which others never see."""

    @staticmethod
    def _saving(platform=None, forward_alone=False):
        """A backend for one platform, or all: its gradients are the inputs times what it saved; what its bwd got."""
        seen = []

        def supports(problem, arch, pass_):
            if forward_alone and pass_ == "backward":
                return "has no backward"
            return None if platform in (None, arch.platform) else f"runs on {platform}, not on {arch}"

        def saving(problem, inputs, aux):
            out, lse = reference.forward(problem, inputs, aux)
            return (out, lse), jnp.full((3,), 7.0) + 0 * out.sum()  # not to be had without the forward

        def fwd(problem, inputs, aux):
            return reference.forward(problem, inputs, aux)

        def bwd(problem, residuals, d_out, d_lse):
            seen.append(residuals.sizes)
            factor = 0.0 if residuals.sizes is None else residuals.sizes.sum()
            return jax.tree.map(lambda x: x * factor, residuals.inputs)

        return Backend("saving", supports, fwd, bwd, saves=lambda _: True, fwd_saving=saving), seen

    def test_its_own_backward_gets_it(self, backends):
        saving, seen = self._saving()
        backends(saving)
        np.testing.assert_allclose(jax.grad(_fresh(_loss))(X), 63 * X, rtol=1e-5)  # query, key and value are X
        assert [x.shape for x in seen] == [(3,)]

    def test_no_other_backward_does(self, backends):
        saving, seen = self._saving(forward_alone=True)
        other, calls = _fake("other", _only("backward"))
        backends(saving, other)
        plan = dispatch.plan("op", api.BACKENDS, *_problem_and_none())
        inputs, aux = _inputs()
        _, saved = plan.run_saving(inputs, aux)
        assert saved is None
        grads = jax.grad(_fresh(_loss))(X), jax.grad(_loss)(X, implementation="reference")
        np.testing.assert_allclose(*grads, rtol=1e-4, atol=1e-5)
        assert (seen, calls) == ([], ["backward"])

    @pytest.mark.parametrize("here", [True, False])
    def test_wherever_it_is_lowered(self, backends, here):
        """With another backend for other platforms; what is likeliest to run elsewhere saves nothing anywhere."""
        cpu = jax.default_backend() == "cpu"
        saving, seen = self._saving("cpu" if cpu == here else "cuda")
        backends(saving)
        wanted = 63 * X if here else jax.grad(_loss)(X, implementation="reference")
        np.testing.assert_allclose(jax.jit(jax.grad(_fresh(_loss)))(X), wanted, rtol=1e-4, atol=1e-5)
        assert [x is not None for x in seen] == [here]

    def test_saved_by_name_under_remat(self, backends):
        """What is saved has lse's name, so that the forward does not run again for it."""
        saving, _ = self._saving()
        runs = []
        counted = dataclasses.replace(saving, fwd_saving=lambda *args: (runs.append(1), saving.fwd_saving(*args))[1])
        backends(counted)
        named = jax.checkpoint_policies.save_only_these_names(*fast_layers.ATTENTION_RESIDUAL_NAMES)
        loss = jax.checkpoint(_fresh(_loss), policy=named)
        text = str(jax.make_jaxpr(jax.grad(loss))(X))
        plain = str(jax.make_jaxpr(jax.grad(_fresh(_loss)))(X))
        assert runs
        assert text.count("dot_general") == plain.count("dot_general")


def _inputs():
    inputs, aux, _, _ = api._prepare(X, X, X, is_causal=True)
    return inputs, aux


def _problem_and_none():
    inputs, aux, options, _ = api._prepare(X, X, X, is_causal=True)
    return options.problem(inputs, aux), None

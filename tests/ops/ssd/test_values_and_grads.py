"""Values and all gradients of every backend, over every combination of arguments."""

from __future__ import annotations

import dataclasses

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_bitwise_equal, assert_close_over_draws, assert_trees_close
from selection import examples

import fast_layers
from ops.ssd import oracle
from ops.ssd.cases import TESTED, Case, build, cases, runner


def _check(case: Case, implementation: str, *, dtype=np.float32, optimise=False, draws=4):
    run = runner(implementation, optimise=optimise)
    plain = [runner("reference", optimise=optimise)] if implementation != "reference" else []

    def make(draw):
        built = build(case, dtype, draw)
        yardsticks = [built.oracle(dtype, in_order=in_order) for in_order in (False, True)]
        return run(built), built.oracle(), *(f(built) for f in plain), *yardsticks

    assert_close_over_draws(make, f"{implementation} on {case!r}: ", draws)


@pytest.mark.parametrize("implementation", TESTED)
@examples(6)
@hypothesis.given(case=cases())
def test_any_arguments_float32(implementation, case):
    _check(case, implementation)


@examples(6)
@hypothesis.given(case=cases(lengths=(1, 5, 65)))
def test_any_arguments_reference_float32(case):
    _check(case, "reference")


@pytest.mark.exhaustive
@pytest.mark.parametrize("implementation", TESTED)
@hypothesis.settings(max_examples=200)
@hypothesis.given(case=cases(lengths=(1, 63, 64, 65, 119, 256, 1000)))
def test_many_arguments_float32(implementation, case):
    _check(case, implementation)


@pytest.mark.parametrize("implementation", TESTED)
@examples(4)
@hypothesis.given(case=cases(lengths=(65, 119)))
def test_any_arguments_float64(implementation, case):
    """Beyond doubt: the formulas themselves, to 15 digits."""
    with jax.enable_x64(True):
        built = build(case, np.float64)
        got, want = runner(implementation, optimise=False)(built), built.oracle()
    for (path, x), y in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == np.float64
        np.testing.assert_allclose(
            x, y, rtol=0, atol=1e-11 * max(1, np.abs(y).max()), err_msg=f"{case!r}{jax.tree_util.keystr(path)}"
        )


@pytest.mark.parametrize("implementation", ["reference", *TESTED])
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(length=1, initial_state=True),
        Case(length=65, groups=3, D="head", z=True),
        Case(length=119, heads=6, groups=2, D="channel", softplus=True, dt_bias=True, initial_state=True),
        Case(length=130, heads=4, groups=2, segments="rows", initial_state=True, chunk_size=32),
        Case(length=119, dt="extreme", A="very negative", initial_state=True),
        Case(length=119, dt="extreme", softplus=True, segments="shared"),
        Case(length=119, A="near 0", initial_state=True, limit=(0.01, 0.08)),
    ],
    ids=str,
)
def test_fixed_cases(implementation, case):
    """One feature at a time: when these fail too, they say which."""
    _check(case, implementation)


@pytest.mark.parametrize("implementation", TESTED)
def test_a_thousand_tokens(implementation):
    _check(Case(batch=1, length=1000, heads=13, head_dim=19, state_dim=16, softplus=True), implementation, draws=2)


def test_two_tokens_by_hand():
    """Decays of 1/2: no formula of ours in between."""
    x = np.array([1.0, 10.0], np.float32).reshape(1, 2, 1, 1)
    dt = np.ones((1, 2, 1), np.float32)
    A = np.array([-np.log(2)], np.float32)
    B = np.array([[3.0, 0.0], [0.0, 5.0]], np.float32).reshape(1, 2, 1, 2)
    C = np.array([[1.0, 7.0], [1.0, 2.0]], np.float32).reshape(1, 2, 1, 2)
    for implementation in ("reference", *TESTED):
        y, state = fast_layers.ssd(x, dt, A, B, C, return_final_state=True, implementation=implementation)
        np.testing.assert_allclose(y.ravel(), [3.0, 1.5 + 100.0], rtol=1e-6)
        np.testing.assert_allclose(state.ravel(), [1.5, 50.0], rtol=1e-6)
        y = fast_layers.ssd(x, dt, A, B, C, initial_state=np.ones((1, 1, 1, 2)), implementation=implementation)
        np.testing.assert_allclose(y.ravel(), [3.0 + 0.5 + 3.5, 1.5 + 100.0 + 0.25 + 0.5], rtol=1e-6)


@pytest.mark.parametrize("implementation", ["reference", *TESTED])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_low_precision(implementation, dtype):
    """On the CPU the matmuls are in float32; on others in x's dtype, which tests/gpu judges."""
    case = Case(length=119, heads=6, groups=2, head_dim=19, state_dim=16, D="head", z=True, softplus=True, dt_bias=True)
    run = runner(implementation, optimise=False)

    def make(draw):
        built = build(dataclasses.replace(case, initial_state=True), dtype, draw)
        got = run(built)
        assert (got.out.dtype, got.final_state.dtype) == (dtype, np.float32)
        assert [g.dtype for g in got.grads] == [v.dtype for v in built.operands]
        return got, built.oracle(), _plain(built)

    assert_close_over_draws(make, f"{implementation}: ", draws=2)


def _plain(built) -> oracle.Answer:
    """The recurrence in float32, results in the inputs' dtypes."""
    answer = built.oracle(np.float32, in_order=True)
    grads = oracle.Operands(*(g.astype(v.dtype) for g, v in zip(answer.grads, built.operands, strict=True)))
    return oracle.Answer(answer.out.astype(built.operands.x.dtype), answer.final_state, grads)


@pytest.mark.parametrize("implementation", ["reference", *TESTED])
def test_nothing_is_nan_at_the_extremes(implementation):
    """dt from 0 to 1e4 and A from -1e-30 to -1e8 in one call, with boundaries and a tail."""
    built = build(Case(length=119, heads=6, softplus=True, segments="rows", initial_state=True, z=True))
    dt = np.resize(np.float32([0, 50, -50, 1e4, -1e4, 19.99, 20.01, 1e-8]), built.operands.dt.shape)
    A = np.float32([-1e-30, -1e-4, -1, -16, -1e4, -1e8])
    built = dataclasses.replace(built, operands=built.operands._replace(dt=dt, A=A))
    got = runner(implementation, optimise=False)(built)
    for path, x in jax.tree.leaves_with_path(got):
        assert np.isfinite(x).all(), jax.tree_util.keystr(path)


class TestDocuments:
    case = Case(batch=1, length=150, heads=3, head_dim=5, state_dim=4, D="head", z=True, initial_state=True)
    lengths = (37, 27, 64, 22)  # boundaries inside chunks and at the edge of one

    def _packed(self):
        built = build(self.case)
        return dataclasses.replace(built, segment_ids=np.repeat([0, 1, 0, 5], self.lengths).astype(np.int32)[None])

    @pytest.mark.parametrize("implementation", TESTED)
    def test_packed_is_each_alone(self, implementation):
        built = self._packed()
        packed = runner(implementation, optimise=False)(built)
        stops = np.cumsum(self.lengths)
        for i, (start, stop) in enumerate(zip(stops - self.lengths, stops, strict=True)):
            alone = self._alone(built, slice(start, stop), first=i == 0, last=i == len(self.lengths) - 1)
            got = runner(implementation, optimise=False)(alone)
            rows = (packed.out, *(packed.grads[k] for k in (0, 1, 3, 4, 6)))
            want, plain = alone.oracle(), alone.oracle(np.float32)
            assert_trees_close(
                tuple(x[:, start:stop] for x in rows),
                (want.out, *(want.grads[k] for k in (0, 1, 3, 4, 6))),
                (plain.out, *(plain.grads[k] for k in (0, 1, 3, 4, 6))),
                (got.out, *(got.grads[k] for k in (0, 1, 3, 4, 6))),
            )

    @staticmethod
    def _alone(built, rows, first, last):
        o = built.operands
        operands = o._replace(
            **{name: getattr(o, name)[:, rows] for name in ("x", "dt", "B", "C", "z")},
            initial_state=o.initial_state if first else np.zeros_like(o.initial_state),
        )
        d_final = built.d_final if last else np.zeros_like(built.d_final)
        case = dataclasses.replace(built.case, length=rows.stop - rows.start)
        return dataclasses.replace(
            built, case=case, operands=operands, segment_ids=None, d_out=built.d_out[:, rows], d_final=d_final
        )

    @pytest.mark.parametrize("implementation", ["reference", *TESTED])
    def test_other_documents_change_no_bit(self, implementation):
        """Values and gradients of the second document, with the others replaced."""
        built, other = self._packed(), build(dataclasses.replace(self.case, seed=1, dt="extreme", A="usual"))
        own = slice(37, 64)

        def mixed(name):
            x, y = getattr(built.operands, name), getattr(other.operands, name).copy()
            y[:, own] = x[:, own]
            return y

        run = runner(implementation, optimise=False)
        operands = built.operands._replace(**{name: mixed(name) for name in ("x", "dt", "B", "C", "z")})
        operands = operands._replace(initial_state=other.operands.initial_state)
        d_out = other.d_out.copy()
        d_out[:, own] = built.d_out[:, own]
        first, second = (
            run(built),
            run(dataclasses.replace(built, operands=operands, d_out=d_out, d_final=3 * built.d_final)),
        )
        for k in (0, 1, 3, 4, 6):
            assert_bitwise_equal(second.grads[k][:, own], first.grads[k][:, own], oracle.Operands._fields[k])
        assert_bitwise_equal(second.out[:, own], first.out[:, own], "out")

    @pytest.mark.parametrize("implementation", ["reference", *TESTED])
    def test_no_gradient_crosses_a_boundary(self, implementation):
        built = self._packed()
        d_out = np.zeros_like(built.d_out)
        d_out[:, 37:64] = 1
        got = runner(implementation, optimise=False)(
            dataclasses.replace(built, d_out=d_out, d_final=np.zeros_like(built.d_final))
        )
        for k in (0, 1, 3, 4, 6):
            outside = np.delete(np.asarray(got.grads[k]), np.s_[37:64], axis=1)
            np.testing.assert_array_equal(outside, 0)
            assert np.abs(got.grads[k][:, 37:64]).max() > 0
        np.testing.assert_array_equal(got.grads.initial_state, 0)


@pytest.mark.parametrize("implementation", TESTED)
def test_a_split_sequence_is_the_whole(implementation):
    """With the state passed on, and its gradient passed back."""
    built = build(Case(length=119, heads=4, groups=2, D="head", initial_state=True))
    x, dt, A, B, C, D, _, _, initial = built.operands

    def call(rows, x, dt, A, B, C, D, state):
        return fast_layers.ssd(
            *(x[:, rows], dt[:, rows], A, B[:, rows], C[:, rows]),
            D=D,
            initial_state=state,
            return_final_state=True,
            implementation=implementation,
        )

    def split(*operands):
        *shared, state = operands
        first, state = call(slice(0, 50), *shared, state)
        second, state = call(slice(50, 119), *shared, state)
        return jnp.concatenate([first, second], 1), state

    operands = (x, dt, A, B, C, D, initial)
    got, pull = jax.vjp(split, *operands)
    want, plain = built.oracle(), built.oracle(np.float32)
    assert_trees_close(
        (got, pull((built.d_out, built.d_final))),
        *(((a.out, a.final_state), (*a.grads[:6], a.grads.initial_state)) for a in (want, plain)),
    )


@pytest.mark.parametrize("implementation", TESTED)
def test_chunk_size_is_a_matter_of_rounding(implementation):
    case = Case(length=119, heads=4, groups=2, segments="rows", softplus=True)
    for chunk_size in (1, 7, 119, 500):
        _check(dataclasses.replace(case, chunk_size=chunk_size), implementation, draws=2)

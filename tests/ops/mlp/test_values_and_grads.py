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
from fast_layers.ops.mlp.activations import ACTIVATIONS, ALIASES
from ops.attention.tracing import equations
from ops.mlp import oracle
from ops.mlp.cases import ALL, TESTED, Case, build, cases, runner

WITHOUT_ERF = tuple(name for name in ACTIVATIONS if name != "gelu")  # numpy has no erf in extended precision


def _check(case: Case, implementation: str, *, dtype=np.float32, wide=np.float64, draws=4):
    """Against numpy in a wider type, with numpy in the type under test as the yardstick."""
    refusal = build(case, dtype).refusal(implementation) if implementation != "reference" else None
    if refusal:
        hypothesis.reject() if hypothesis.currently_in_test_context() else pytest.skip(refusal)
    run = runner(implementation)

    def make(draw):
        built = build(case, dtype, draw)
        got = run(built)
        assert {a.dtype for a in jax.tree.leaves(got)} == {np.dtype(dtype)}
        return got, built.oracle(wide), *built.yardsticks()

    assert_close_over_draws(make, f"{implementation} on {case!r}: ", draws)


@pytest.mark.parametrize("implementation", TESTED)
@examples(16)
@hypothesis.given(case=cases())
def test_any_arguments_float32(implementation, case):
    _check(case, implementation)


@examples(8)
@hypothesis.given(case=cases())
def test_any_arguments_reference_float32(case):
    _check(case, "reference")


@pytest.mark.parametrize("implementation", TESTED)
@examples(6)
@hypothesis.given(case=cases(activations=WITHOUT_ERF))
def test_any_arguments_float64(implementation, case):
    with jax.enable_x64(True):
        _check(case, implementation, dtype=np.float64, wide=np.longdouble, draws=2)


@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@examples(6)
@hypothesis.given(case=cases(kinked_bias=False))
def test_any_arguments_low_precision(implementation, dtype, case):
    _check(case, implementation, dtype=dtype)


@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(implementation, activation):
    """One at a time, gated by it: when these fail too, they say which."""
    _check(Case(activation=activation, gated=True, biases=(True, True, True)), implementation, draws=2)


@pytest.mark.parametrize("implementation", TESTED)
@pytest.mark.parametrize("tokens", [1, 7, 130])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_odd_numbers_of_tokens(implementation, tokens, gated):
    case = Case((tokens,), 40, 72, 24, "silu" if gated else "gelu", gated, (True, True, True))
    _check(case, implementation, dtype=jnp.bfloat16, draws=2)


def test_by_hand():
    """Two features, no formula of ours in between: relu(2 - 3) = 0 and relu(2 + 1) = 3; 0 * 5 + 3 * 7 + 1."""
    x, w_up, w_down = np.array([2.0, 1.0]), np.array([[1.0, 1.0], [-3.0, 1.0]]), np.array([[5.0], [7.0]])
    x, w_up, w_down, b_down = (a.astype(np.float32) for a in (x, w_up, w_down, np.array([1.0])))
    for implementation in ALL:
        options = {"activation": "relu", "implementation": implementation}
        assert fast_layers.mlp(x, w_up, w_down, b_down=b_down, **options) == np.array([22.0])
        # Gated: relu(2 * 1 + 1 * 2) * -1 = -4 and relu(0) * 3 = 0.
        w_gate = np.array([[1.0, 1.0], [2.0, -2.0]], np.float32)
        np.testing.assert_array_equal(fast_layers.linear(x, w_up, gate=w_gate, **options), [-4.0, 0.0])
        assert fast_layers.mlp(x, w_up, w_down, w_gate=w_gate, **options) == np.array([-20.0])


@pytest.mark.parametrize("alias", ALIASES)
def test_aliases(alias):
    x, w = build(Case()).operands[:2]
    got, want = (fast_layers.linear(x, w, activation=name) for name in (alias, ALIASES[alias]))
    assert_bitwise_equal(got, want)
    assert_bitwise_equal(fast_layers.linear(x, w), fast_layers.linear(x, w, activation="identity"))


def test_activations_are_those_of_jax():
    """Also where they saturate; and a NaN stays one."""
    theirs = {
        "identity": lambda x: x,
        "relu": jax.nn.relu,
        "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
        "gelu": lambda x: jax.nn.gelu(x, approximate=False),
        "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
        "silu": jax.nn.silu,
        "sigmoid": jax.nn.sigmoid,
    }
    assert set(theirs) == set(ACTIVATIONS)

    def of_jax(x):
        return {name: jax.jvp(function, (x,), (jnp.ones_like(x),)) for name, function in theirs.items()}

    def ours(x):
        return {name: tuple(f(x) for f in activation) for name, activation in ACTIVATIONS.items()}

    for x in (np.linspace(-12, 12, 241), np.array([-1e15, -1e4, -90.0, -1e-4, 0.0, 90.0, 1e4, 1e15])):
        with jax.enable_x64(True):
            wide = jax.device_get(jax.jit(of_jax)(x))
        narrow = x.astype(np.float32)
        assert_trees_close(jax.jit(ours)(narrow), wide, jax.jit(of_jax)(narrow))
    for name, (value, _) in jax.jit(ours)(jnp.array([jnp.nan])).items():
        assert np.isnan(value).all(), name


def test_far_out_no_derivative_is_nan():
    """By the rule of the backends, and through the reference."""
    limits = {
        "identity": (1, 1),
        "relu": (0, 1),
        "gelu": (0, 1),
        "gelu_tanh": (0, 1),
        "silu": (0, 1),
        "sigmoid": (0, 0),
    }

    @jax.jit
    def slopes(x):
        one = jnp.ones((1, 1), x.dtype)

        def by_reference(name):
            def activate(x):
                return fast_layers.linear(x[:, None], one, activation=name, implementation="reference").sum()

            return jax.grad(activate)(x)

        return [(ACTIVATIONS[name].derivative(x), by_reference(name)) for name in limits]

    far = np.array([89.0, 1e14, 1e20, 3e38], np.float32)
    for side, x in enumerate((-far, far)):
        for (name, wanted), found in zip(limits.items(), slopes(x), strict=True):
            for got in found:
                np.testing.assert_allclose(got, np.full_like(far, wanted[side]), atol=1e-30, err_msg=name)


def test_far_out_no_second_derivative_is_nan():
    far = np.array([30.0, 89.0, 1e4, 1e14], np.float32)
    far = np.concatenate((-far, far))
    for name in ("gelu", "gelu_tanh", "silu", "sigmoid"):
        _, found = jax.jit(lambda x, f=ACTIVATIONS[name].derivative: jax.jvp(f, (x,), (jnp.ones_like(x),)))(far)
        np.testing.assert_allclose(found, np.zeros_like(far), atol=1e-11, err_msg=name)


@pytest.mark.parametrize("implementation", TESTED)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_both_ways_of_saving_give_the_same_bits(implementation, dtype):
    """And so does a call that nobody differentiates: the activation comes from rounded values everywhere."""
    case = Case((130,), 40, 72, 24, "silu", True, (True, True, True))
    built = build(case, dtype)
    run = runner(implementation, optimise=True)
    saved = run(built)
    recomputed = run(dataclasses.replace(built, case=dataclasses.replace(case, save="inputs")))
    assert_bitwise_equal(saved, recomputed)
    out = jax.jit(lambda operands: case.call(operands, implementation=implementation))(built.operands)
    assert_bitwise_equal(out, saved.out)


@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize("save", ["pre_activation", "inputs"])
def test_precision_reaches_every_matmul(implementation, save):
    """Also those of the gradients."""
    case = Case(gated=True, save=save)
    operands = build(case).operands

    def loss(operands, precision):
        return case.call(operands, implementation=implementation, precision=precision).sum()

    for precision in (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGH):
        jaxpr = jax.make_jaxpr(jax.grad(loss), static_argnums=1)(operands, precision)
        found = [eqn.params["precision"] for eqn in equations(jaxpr) if eqn.primitive.name == "dot_general"]
        assert len(found) >= 9
        assert all(p == (precision, precision) for p in found), found


@pytest.mark.parametrize("implementation", ALL)
def test_strict_promotion_of_dtypes_and_ranks(implementation):
    case = Case((2, 3), gated=True, biases=(True, True, True))
    for dtype in (np.float32, jnp.bfloat16):
        with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
            runner(implementation)(build(case, dtype))


def test_the_oracle_agrees_with_automatic_differentiation():
    """The numpy gradients are the measure of everything above; so they are measured once."""
    case = Case((5,), 3, 4, 2, "silu", True, (True, True, True))
    with jax.enable_x64(True):
        built = build(case, np.float64)

        def plain(operands):
            x, w_up, w_gate, w_down, b_up, b_gate, b_down = operands
            return (jax.nn.silu(x @ w_gate + b_gate) * (x @ w_up + b_up)) @ w_down + b_down

        out, pull = jax.vjp(plain, jax.tree.map(jnp.asarray, built.operands))
        want = oracle.Answer(out, *pull(built.d_out))
        jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-12), built.oracle(), want)

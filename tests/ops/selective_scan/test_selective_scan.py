"""Mamba-1's scan: values and all gradients against a recurrence in numpy float64, documents, states, the step."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close_over_draws, assert_trees_close
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fast_layers
from ops.ssd import oracle

NAMES = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_state")


@dataclasses.dataclass(frozen=True)
class Case:
    batch: int = 2
    length: int = 7
    channels: int = 6
    groups: int | None = None  # None: B and C without that dimension
    state_dim: int = 4
    seed: int = 0
    given: tuple[str, ...] = ()  # of the optional operands
    softplus: bool = False
    segments: bool = False
    chunk_size: int | None = None
    extreme: bool = False


def _build(case: Case, draw: int = 0) -> dict[str, Any]:
    c = case
    rng = np.random.default_rng((c.seed, draw))

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    rows = (c.batch, c.length)
    by_group = (*rows, c.state_dim) if c.groups is None else (*rows, c.groups, c.state_dim)
    dt = np.exp(rng.uniform(np.log(1e-3), np.log(0.1), (*rows, c.channels)))
    dt = np.where(rng.random(dt.shape) < 0.1, 50.0, dt) if c.extreme else dt
    dt = np.where(dt > 1, dt, np.log(np.expm1(np.minimum(dt, 1)))) if c.softplus else dt
    operands = {
        "x": normal(*rows, c.channels),
        "dt": dt.astype(np.float32),
        "A": -rng.uniform(1e-3, 16, (c.channels, c.state_dim)).astype(np.float32),
        "B": normal(*by_group),
        "C": normal(*by_group),
        "D": normal(c.channels),
        "z": normal(*rows, c.channels),
        "dt_bias": 0.1 * np.abs(normal(c.channels)),
        "initial_state": normal(c.batch, c.channels, c.state_dim),
    }
    return {name: x for name, x in operands.items() if name in NAMES[:5] or name in c.given}


def _ids(case: Case) -> np.ndarray | None:
    steps = np.random.default_rng(case.seed).random((case.batch, case.length)) < 0.1
    return np.cumsum(steps, -1).astype(np.int32) if case.segments else None


def _cotangents(case: Case, draw: int):
    rng = np.random.default_rng((case.seed, draw, 1))
    shapes = ((case.batch, case.length, case.channels), (case.batch, case.channels, case.state_dim))
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


def _oracle(case: Case, operands, cotangents, dtype=np.float64):
    """Of `ssd`'s recurrence, of which this is the case of a head for each state and channel: P = 1, N = 1."""
    c = case
    o = dict.fromkeys(NAMES) | operands
    groups = c.groups or 1
    lanes = c.channels * c.state_dim

    def spread(v):  # [.., D] to [.., D N]
        return None if v is None else np.repeat(v, c.state_dim, axis=-1)

    def of_group(v):
        v = v.reshape(c.batch, c.length, groups, 1, c.state_dim)
        v = np.broadcast_to(v, (c.batch, c.length, groups, c.channels // groups, c.state_dim))
        return v.reshape(c.batch, c.length, lanes, 1)

    ids = _ids(c)
    starts = None if ids is None else np.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)))
    flat = oracle.Operands(
        x=spread(o["x"])[..., None],
        dt=spread(o["dt"]),
        A=o["A"].ravel(),
        B=of_group(o["B"]),
        C=of_group(o["C"]),
        dt_bias=spread(o["dt_bias"]),
        initial_state=None if o["initial_state"] is None else o["initial_state"].reshape(c.batch, lanes, 1, 1),
    )
    x, D, z = (None if o[k] is None else o[k].astype(dtype) for k in ("x", "D", "z"))
    gate, d_gate = 1.0, 0.0
    if z is not None:
        sigmoid = 1 / (1 + np.exp(-z))
        gate, d_gate = z * sigmoid, sigmoid * (1 + z * (1 - sigmoid))
    d_out, d_final = (v.astype(dtype) for v in cotangents)
    d_read = d_out * gate
    limit = (-np.inf, np.inf)
    answer = oracle.scan(
        flat,
        spread(d_read)[..., None],
        d_final.reshape(c.batch, lanes, 1, 1),
        softplus=c.softplus,
        limit=limit,
        starts=starts,
        dtype=dtype,
    )

    def gather(v):  # [.., D N, 1] to [.., D], summed
        return v.reshape(*v.shape[:2], c.channels, c.state_dim).sum(-1)

    def to_group(v):
        return v.reshape(c.batch, c.length, groups, -1, c.state_dim).sum(3).reshape(o["B"].shape)

    read = gather(answer.out)
    total = read if D is None else read + D * x
    g = answer.grads
    grads = {
        "x": gather(g.x) + (0 if D is None else d_read * D),
        "dt": gather(g.dt),
        "A": g.A.reshape(o["A"].shape),
        "B": to_group(g.B),
        "C": to_group(g.C),
        "D": (d_read * x).sum((0, 1)),
        "z": d_out * total * d_gate,
        "dt_bias": None if g.dt_bias is None else g.dt_bias.reshape(c.channels, -1).sum(-1),
        "initial_state": None if g.initial_state is None else g.initial_state.reshape(c.batch, c.channels, -1),
    }
    final = answer.final_state.reshape(c.batch, c.channels, c.state_dim)
    return total * gate, final, {name: grads[name] for name in operands}


def _runner(case: Case, implementation: str):
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(operands, cotangents):
        def op(operands):
            return fast_layers.selective_scan(
                **operands,
                dt_softplus=case.softplus,
                segment_ids=_ids(case),
                chunk_size=case.chunk_size,
                return_final_state=True,
                implementation=implementation,
            )

        (out, final), pull = jax.vjp(op, operands)
        return out, final, pull(cotangents)[0]

    return run


def _check(case: Case, implementation: str, draws: int = 4):
    run = _runner(case, implementation)

    def make(draw):
        operands, cotangents = _build(case, draw), _cotangents(case, draw)
        plain = _oracle(case, operands, cotangents, np.float32)
        return run(operands, cotangents), _oracle(case, operands, cotangents), plain

    assert_close_over_draws(make, f"{implementation} on {case!r}: ", draws)


EVERYTHING = NAMES[5:]


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(length=1, given=EVERYTHING),
        Case(length=130, groups=3, given=EVERYTHING, softplus=True, segments=True),
        Case(length=119, given=("initial_state",), chunk_size=16, extreme=True, segments=True),
    ],
    ids=["plain", "one token", "everything", "extreme steps"],
)
def test_fixed_cases(implementation, case):
    _check(case, implementation)


@hypothesis.settings(max_examples=5)
@hypothesis.given(
    st.builds(
        Case,
        length=st.sampled_from([1, 63, 64, 65, 119]),
        channels=st.just(6),
        groups=st.sampled_from([None, 1, 2, 6]),
        state_dim=st.sampled_from([1, 16]),
        seed=st.integers(0, 1000),
        given=st.lists(st.sampled_from(EVERYTHING), unique=True).map(tuple),
        softplus=st.booleans(),
        segments=st.booleans(),
        chunk_size=st.sampled_from([None, 7]),
        extreme=st.booleans(),
    )
)
def test_any_arguments(case):
    _check(case, "xla")


def test_no_gradient_crosses_a_boundary():
    operands = _build(Case(length=100, given=EVERYTHING))
    ids = np.repeat([0, 1, 0], [37, 40, 23])

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    @jax.grad
    def of_second_document(operands):
        return fast_layers.selective_scan(**operands, segment_ids=ids, chunk_size=16)[:, 37:77].sum()

    grads = of_second_document(operands)
    for name in ("x", "dt", "B", "C", "z"):
        np.testing.assert_array_equal(np.delete(grads[name], np.s_[37:77], axis=1), 0, err_msg=name)
        assert np.abs(grads[name][:, 37:77]).max() > 0
    np.testing.assert_array_equal(grads["initial_state"], 0)


def test_steps_are_the_scan():
    case = Case(length=9, groups=2, given=EVERYTHING, softplus=True)
    operands = _build(case)
    out, final, _ = _oracle(case, operands, _cotangents(case, 0))
    plain = _oracle(case, operands, _cotangents(case, 0), np.float32)
    shared = {name: operands[name] for name in ("A", "D", "dt_bias")}
    state, outs = operands["initial_state"], []
    for t in range(case.length):
        token = {name: operands[name][:, t] for name in ("x", "dt", "B", "C", "z")}
        with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
            y, state = fast_layers.selective_scan_step(state, **token, **shared, dt_softplus=True)
        outs.append(y)
    assert_trees_close((jnp.stack(outs, 1), state), (out, final), plain[:2])


def test_memory_is_linear():
    def temp_bytes(length):
        case = Case(batch=1, length=length, channels=32, state_dim=16)
        run = _runner(case, "xla")
        shapes = jax.eval_shape(lambda: (_build(case), _cotangents(case, 0)))
        return run.lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    short, long = temp_bytes(2048), temp_bytes(4096)
    assert long < 2.2 * short
    states = 4096 * 32 * 16 * 4
    assert long < states  # not even one state for each token


GOOD = _build(Case())
BAD = {
    "axes": ({"x": np.zeros((2, 7), np.float32)}, ["x must be [batch, length, channels]", "(2, 7)"]),
    "A": ({"A": np.zeros((4, 6), np.float32)}, ["A must have shape (channels, state_dim)", "6 channels", "(4, 6)"]),
    "B": ({"B": np.zeros((2, 7, 5), np.float32)}, ["B must be", "[batch, length, groups, state_dim]", "(2, 7, 5)"]),
    "groups": (
        {k: np.zeros((2, 7, 4, 4), np.float32) for k in ("B", "C")},
        ["channels must be a multiple of groups", "6 and 4"],
    ),
    "groups differ": ({"B": np.zeros((2, 7, 2, 4), np.float32)}, ["same groups", "2 and 1"]),
    "dt": ({"dt": np.zeros((2, 7, 1), np.float32)}, ["dt must have shape", "(2, 7, 6)", "(2, 7, 1)"]),
    "state": ({"initial_state": np.zeros((2, 4, 6), np.float32)}, ["initial_state must have shape", "(2, 6, 4)"]),
    "dtypes": ({"B": np.zeros((2, 7, 4), np.float16)}, ["same dtype", "x float32 and B float16"]),
    "integers": ({"A": np.zeros((6, 4), np.int32)}, ["A has dtype int32", "floating point"]),
    "no tokens": ({k: GOOD[k][:, :0] for k in ("x", "dt", "B", "C")}, ["length is 0", "at least 1"]),
    "softplus": ({"dt_softplus": 1}, ["dt_softplus=1", "True or False"]),
    "chunk": ({"chunk_size": 0}, ["chunk_size=0", "int >= 1"]),
    "segments": ({"segment_ids": np.zeros((2, 6), int)}, ["segment_ids must have shape", "(2, 7)", "(2, 6)"]),
    "segments of 64 bits": (
        {"segment_ids": np.array([0, 0, 0, 0, 2**32, 2**32, 2**32], np.uint64)},
        ["segment_ids must fit in int32", "4294967296", "np.unique(ids, return_inverse=True)"],
    ),
    "backend": ({"implementation": "triton"}, ["'triton' is unknown", "xla, reference"]),
}


@pytest.mark.parametrize(("bad", "pieces"), BAD.values(), ids=BAD)
def test_mistake(bad, pieces):
    with pytest.raises(ValueError, match=r"\w") as caught:
        fast_layers.selective_scan(**{**GOOD, **bad})
    message = str(caught.value)
    assert all(piece in message for piece in pieces), message
    assert "\n" not in message


@pytest.mark.skipif(len(jax.devices("cpu")) < 2, reason="needs two CPU devices")
def test_sharded_operands_are_refused_by_name():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices("cpu")[:2])
    with jax.set_mesh(mesh):
        for name, spec in (("x", P("data")), ("A", P("data"))):
            placed = jax.device_put(GOOD[name], jax.NamedSharding(mesh, spec))
            with pytest.raises(ValueError, match=rf"^{name} is explicitly sharded over .*'data'.*shard_map"):
                fast_layers.selective_scan(**{**GOOD, name: placed})


def test_explain():
    (plan,) = fast_layers.explain(lambda given: fast_layers.selective_scan(**given), GOOD).plans
    assert plan.op == "selective_scan"
    assert [plan.sole_backend(pass_).name for pass_ in ("forward", "backward")] == ["xla", "xla"]


def test_vmap():
    many = {name: np.stack([x, 2 * x]) for name, x in GOOD.items()}
    got = jax.vmap(lambda given: fast_layers.selective_scan(**given))(many)
    for i in range(2):
        one = fast_layers.selective_scan(**{name: x[i] for name, x in many.items()})
        np.testing.assert_allclose(got[i], one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_no_examples(implementation):
    shared = ("A", "D", "dt_bias")
    none = {k: v if k in shared else v[:0] for k, v in _build(Case(given=EVERYTHING, segments=True)).items()}

    def loss(operands):
        y, state = fast_layers.selective_scan(
            **operands, segment_ids=np.zeros((0, 7), int), return_final_state=True, implementation=implementation
        )
        assert (y.shape, state.shape) == (none["x"].shape, none["initial_state"].shape)
        return y.sum() + state.sum()

    for name, gradient in jax.grad(loss)(none).items():
        np.testing.assert_array_equal(gradient, np.zeros_like(none[name]), err_msg=name)
    state = none.pop("initial_state")
    token = {k: v if k in shared else v[:, 0] for k, v in none.items()}
    y, after = fast_layers.selective_scan_step(state, **token)
    assert (y.shape, after.shape) == (token["x"].shape, state.shape)

"""The scan under jax's transformations, its step, its memory, and what `explain` says."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_bitwise_equal, assert_close, assert_trees_close
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fast_layers
from ops.ssd.cases import TESTED, Case, build

NAMES = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_state")


def _operands(case: Case) -> dict:
    return {name: v for name, v in zip(NAMES, build(case).operands, strict=True) if v is not None}


EVERYTHING = Case(batch=4, length=70, heads=4, groups=2, D="head", z=True, dt_bias=True, initial_state=True)


@pytest.mark.parametrize("implementation", TESTED)
def test_vmap_and_jit(implementation):
    """Over examples of a batch, with what examples share closed over; gradients too."""
    operands = _operands(EVERYTHING)
    batched = {name: v for name, v in operands.items() if name not in ("A", "D", "dt_bias")}
    shared = {name: operands[name] for name in ("A", "D", "dt_bias")}

    def loss(batched, shared):
        y, state = fast_layers.ssd(**batched, **shared, return_final_state=True, implementation=implementation)
        return (jnp.sin(y).sum((1, 2, 3)) + jnp.cos(state).sum((1, 2, 3))).sum()

    def mapped(batched, shared):
        pairs = {name: v.reshape(2, 2, *v.shape[1:]) for name, v in batched.items()}
        return jax.vmap(loss, in_axes=(0, None))(pairs, shared).sum()

    whole, each = (jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(batched, shared) for f in (loss, mapped))
    for (path, got), want in zip(jax.tree.leaves_with_path(each), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("implementation", TESTED)
def test_remat_and_scan_over_layers(implementation):
    operands = _operands(Case(length=70))

    def layers(x, remat):
        def layer(x, _):
            return x + fast_layers.ssd(**{**operands, "x": x}, implementation=implementation), None

        return jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, None, length=3)[0].sum()

    plain, again = (jax.jit(jax.grad(functools.partial(layers, remat=remat)))(operands["x"]) for remat in (False, True))
    assert_bitwise_equal(again, plain)


def test_the_reference_has_higher_derivatives():
    operands = _operands(Case(length=3, heads=1))

    def loss(dt):
        unlimited = (-float("inf"), float("inf"))
        return (fast_layers.ssd(**{**operands, "dt": dt}, dt_limit=unlimited, implementation="reference") ** 2).sum()

    dt = operands["dt"]
    direction = np.cos(np.arange(dt.size)).reshape(dt.shape).astype(np.float32)
    grad = jax.grad(loss)
    _, forward_over_reverse = jax.jvp(grad, (dt,), (direction,))
    step = 2e-3
    differences = (grad(dt + step * direction) - grad(dt - step * direction)) / (2 * step)
    np.testing.assert_allclose(forward_over_reverse, differences, rtol=1e-2, atol=1e-2 * np.abs(differences).max())


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("groups", [4, 1])
@pytest.mark.skipif(len(jax.devices("cpu")) < 8, reason="needs eight CPU devices")
def test_batch_and_heads_over_devices(groups, kind):
    case = Case(batch=4, length=70, heads=8, groups=groups, D="head", z=True, dt_bias=True, initial_state=True)
    operands = _operands(case)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind), devices=jax.devices("cpu")[:8])
    group_axis = "model" if groups > 1 else None
    specs = {
        "x": P("data", None, "model"),
        "dt": P("data", None, "model"),
        "A": P("model"),
        "B": P("data", None, group_axis),
        "C": P("data", None, group_axis),
        "D": P(None),  # need not be as the heads are
        "z": P("data", None, "model"),
        "dt_bias": P("model"),
        "initial_state": P("data", "model"),
    }
    ids = np.repeat([0, 1], [30, 40])

    def loss(operands):
        y, state = fast_layers.ssd(**operands, dt_softplus=True, segment_ids=ids, return_final_state=True)
        return jnp.sin(y).sum() + jnp.cos(state).sum()

    want = jax.jit(jax.value_and_grad(loss))(operands)
    with jax.set_mesh(mesh):
        placed = {name: jax.device_put(v, NamedSharding(mesh, specs[name])) for name, v in operands.items()}
        got = jax.jit(jax.value_and_grad(loss))(placed)
    for (path, x), y in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4, err_msg=jax.tree_util.keystr(path))
    if kind == AxisType.Explicit:
        assert jax.typeof(got[1]["x"]).sharding.spec[2] == "model"


@pytest.mark.skipif(len(jax.devices("cpu")) < 8, reason="needs eight CPU devices")
def test_what_cannot_be_sharded():
    operands = _operands(Case(batch=4, length=8, heads=4, groups=4, head_dim=4))
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices("cpu")[:8])

    def call(**specs):
        with jax.set_mesh(mesh):
            placed = {
                name: jax.device_put(v, NamedSharding(mesh, specs.get(name, P()))) for name, v in operands.items()
            }
            return fast_layers.ssd(**placed)

    with pytest.raises(ValueError, match=r"x is sharded along length over mesh axes \('data',\).*batch and heads"):
        call(x=P(None, "data"))
    with pytest.raises(ValueError, match=r"B is sharded along state_dim over mesh axes \('model',\)"):
        call(B=P(None, None, None, "model"))
    with pytest.raises(ValueError, match=r"B is sharded along batch over mesh axes \('data',\), x over \(\)"):
        call(B=P("data"))


@pytest.mark.skipif(len(jax.devices("cpu")) < 8, reason="needs eight CPU devices")
@pytest.mark.parametrize(
    "specs",
    [
        {"x": P("data", None, "model"), "dt": P("data"), "B": P("data"), "C": P("data")},
        {"dt": P("data", None, "model"), "A": P("model"), "D": P("model"), "initial_state": P("data")},
    ],
    ids=["x", "not x"],
)
def test_operands_follow_x_outside_a_mesh_context_too(specs):
    operands = _operands(Case(batch=4, length=8, heads=4, groups=2, D="head", initial_state=True))
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices("cpu")[:8])
    placed = {name: jax.device_put(v, NamedSharding(mesh, specs.get(name, P()))) for name, v in operands.items()}
    scan = jax.jit(lambda operands: fast_layers.ssd(**operands))
    want = scan(operands)
    # Outside jit, what is not sharded need not have been placed on the mesh.
    for got in (scan(placed), fast_layers.ssd(**operands | {name: placed[name] for name in specs})):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
        assert got.sharding.is_equivalent_to(NamedSharding(mesh, specs.get("x", P())), 4)


def test_steps_are_the_scan():
    case = Case(length=9, heads=6, groups=2, D="channel", z=True, dt_bias=True, softplus=True, initial_state=True)
    built = build(case)
    o = built.operands
    state, outs = o.initial_state, []
    for t in range(case.length):
        y, state = fast_layers.ssd_step(
            *(state, o.x[:, t], o.dt[:, t], o.A, o.B[:, t], o.C[:, t]),
            D=o.D,
            z=o.z[:, t],
            dt_bias=o.dt_bias,
            dt_softplus=True,
        )
        outs.append(y)
    want, plain = built.oracle(), built.oracle(np.float32)
    assert_trees_close((jnp.stack(outs, 1), state), (want.out, want.final_state), (plain.out, plain.final_state))


def test_a_step_keeps_the_state_in_its_own_dtype():
    o = build(Case(length=1, heads=4), jnp.bfloat16).operands
    args = (o.x[:, 0], o.dt[:, 0], o.A, o.B[:, 0], o.C[:, 0])
    options = {"dt_limit": (0.0, 0.05), "return_final_state": True}
    wide, wide_state = fast_layers.ssd(*(jnp.asarray(x, jnp.float32) for x in o[:5]), **options)
    want, final = fast_layers.ssd(*o[:5], **options)
    for dtype in (jnp.float32, jnp.bfloat16):
        y, state = fast_layers.ssd_step(jnp.zeros((2, 4, 5, 4), dtype), *args, dt_limit=(0.0, 0.05))
        assert (y.dtype, state.dtype) == (jnp.bfloat16, dtype)
        assert_close(y, wide[:, 0], want[:, 0])
        if dtype == jnp.float32:
            np.testing.assert_allclose(state, wide_state, rtol=1e-5, atol=1e-6)
        else:
            assert_close(state, wide_state, final.astype(dtype))


@functools.cache
def _temp_bytes(implementation, length):
    """Of forward and backward, gradients of all operands."""
    case = Case(batch=1, length=length, heads=8, head_dim=32, state_dim=32, z=True, D="head")
    shapes = jax.eval_shape(lambda: _operands(case))

    def loss(operands):
        return fast_layers.ssd(**operands, implementation=implementation).sum()

    return jax.jit(jax.grad(loss)).lower(shapes).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("implementation", TESTED)
def test_memory_is_linear_and_far_below_a_state_for_each_token(implementation):
    used = [_temp_bytes(implementation, length) for length in (2048, 4096, 8192)]
    for shorter, longer in itertools.pairwise(used):
        assert longer < 2.2 * shorter, used
    states = 8192 * 8 * 32 * 32 * 4
    assert used[-1] < states / 8
    # The measure sees them where they are.
    assert _temp_bytes("reference", 2048) > states / 4


def test_explain():
    o = build(Case(heads=6, groups=3, D="channel", z=True, segments="rows", initial_state=True)).operands
    shapes = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), o)
    ids = jax.ShapeDtypeStruct((2, 7), jnp.int32)
    text = str(
        fast_layers.explain(
            lambda x, dt, A, B, C, D, z, _, state, ids: fast_layers.ssd(
                x, dt, A, B, C, D=D, z=z, initial_state=state, segment_ids=ids, dt_softplus=True, dt_limit=(0.0, 1.0)
            ),
            *shapes,
            ids,
        )
    )
    for piece in (
        "ssd: x [2, 7, 6, 5], B and C [2, 7, 3, 4], float32, chunk 7, D per channel, z, dt_softplus, dt in [0, 1]",
        "initial state, segments",
        "forward  on cpu",
        ": xla",
        "not hopper: needs an NVIDIA GPU of compute capability 9.0",
        "not blackwell: taken only by name",
    ):
        assert piece in text, text


@pytest.mark.parametrize("implementation", ["reference", *TESTED])
def test_strict_promotion(implementation):
    case = Case(length=9, heads=4, groups=2, D="head", z=True, dt_bias=True, initial_state=True, softplus=True)
    operands = dict(zip(NAMES, build(case, jnp.bfloat16).operands, strict=True))
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        ids = np.repeat([0, 1], [4, 5])
        jax.grad(
            lambda o: fast_layers.ssd(**o, segment_ids=ids, implementation=implementation).sum().astype("float32")
        )(operands)


def test_strict_promotion_in_a_step():
    case = Case(length=1, heads=4, groups=2, D="head", z=True, dt_bias=True, initial_state=True, softplus=True)
    operands = dict(zip(NAMES, build(case, jnp.bfloat16).operands, strict=True))
    state = operands.pop("initial_state")
    token = {name: v[:, 0] if name in ("x", "dt", "B", "C", "z") else v for name, v in operands.items()}
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        fast_layers.ssd_step(state, **token, dt_softplus=True)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_no_examples(implementation):
    of_all = _operands(EVERYTHING)
    none = {name: v if name in ("A", "D", "dt_bias") else v[:0] for name, v in of_all.items()}
    ids = np.zeros((0, 70), int)

    def loss(operands):
        y, state = fast_layers.ssd(**operands, segment_ids=ids, return_final_state=True, implementation=implementation)
        assert (y.shape, state.shape) == (none["x"].shape, none["initial_state"].shape)
        return y.sum() + state.sum()

    assert_bitwise_equal(jax.grad(loss)(none), jax.tree.map(np.zeros_like, none))


def test_a_step_of_no_examples():
    none = {name: v if name in ("A", "D", "dt_bias") else v[:0] for name, v in _operands(EVERYTHING).items()}
    state = none.pop("initial_state")
    token = {name: v[:, 0] if name in ("x", "dt", "B", "C", "z") else v for name, v in none.items()}
    y, after = fast_layers.ssd_step(state, **token)
    assert (y.shape, after.shape) == (token["x"].shape, state.shape)

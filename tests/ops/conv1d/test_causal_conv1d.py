"""`causal_conv1d` and its step: values, gradients, documents, states, transforms, memory, errors."""

from __future__ import annotations

import functools
import itertools

import flax.nnx as nnx
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_bitwise_equal, assert_close_over_draws
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import fast_layers
from ops.conv1d.cases import TESTED, Case, build, cases, oracle, run

ALL = ["reference", *TESTED]


def _check(case, implementation, dtype=np.float32, wide=np.float64):
    plain = ["reference"] if implementation != "reference" else []

    def make(draw):
        built = build(case, dtype, draw)
        numpy = [oracle(built, dtype, backwards=backwards) for backwards in (False, True)]
        return run(implementation, built), oracle(built, wide), *(run(name, built) for name in plain), *numpy

    assert_close_over_draws(make, f"{implementation} on {case!r}: ")


@pytest.mark.parametrize("implementation", ALL)
@hypothesis.settings(max_examples=12)
@hypothesis.given(case=cases())
def test_any_arguments(implementation, case):
    _check(case, implementation)


@pytest.mark.parametrize("implementation", ALL)
def test_float64(implementation):
    with jax.enable_x64(True):
        case = Case(length=7, initial_state=True, segments="rows")
        _check(case, implementation, np.float64, np.longdouble)


@pytest.mark.parametrize("implementation", TESTED)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_low_precision_is_summed_in_float32(implementation, dtype):
    """As near to the truth as the rounding of the results: gradients of w sum 400 terms."""

    def make(draw):
        built = build(Case(length=200, initial_state=True, segments="rows"), dtype, draw)
        got, want = run(implementation, built), oracle(built)
        assert {x.dtype for x in jax.tree.leaves(got)} == {np.dtype(dtype)}
        return got, want, jax.tree.map(lambda x: x.astype(dtype), want)

    assert_close_over_draws(make, f"{implementation}: ", draws=1)


@pytest.mark.parametrize("implementation", ALL)
def test_it_is_flax_depthwise_convolution(implementation):
    conv = nnx.Conv(6, 6, 4, feature_group_count=6, padding="CAUSAL", rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 11, 6))
    got = fast_layers.causal_conv1d(x, conv.kernel[:, 0], conv.bias[...], implementation=implementation)
    np.testing.assert_allclose(got, conv(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize("lengths", [(3, 1, 6), (1, 1, 2), (10,), (2, 8)], ids=str)
def test_packed_documents_are_separate_documents(implementation, lengths):
    """Values, gradients and the last one's state; bit for bit whatever the others hold, NaN included."""
    built = build(Case(batch=1, length=sum(lengths)))
    x, w, b, _ = built.operands
    ids = np.repeat(np.arange(len(lengths)) % 2, lengths)  # ids come back, and are other documents then

    def call(x, d_y, ids=None):
        options = {"activation": "silu", "return_final_state": True, "implementation": implementation}
        f = functools.partial(fast_layers.causal_conv1d, segment_ids=ids, **options)
        (y, state), pull = jax.vjp(lambda x: f(x, w, b), x)
        return y, pull((d_y, jnp.ones_like(state)))[0], state

    packed = jax.jit(functools.partial(call, ids=ids))
    y, d_x, state = packed(x, built.d_y)
    for start, stop in itertools.pairwise(np.cumsum((0, *lengths))):
        here, last = np.s_[:, start:stop], stop == x.shape[1]
        others = np.full_like(x, np.nan)
        others[here] = x[here]
        alone_y, alone_d_x, alone_state = packed(others, built.d_y)
        assert_bitwise_equal((alone_y[here], alone_d_x[here]), (y[here], d_x[here]))
        # Another length is another program, whose rounding may differ.
        own_y, own_d_x, own_state = call(x[here], built.d_y[here])
        np.testing.assert_allclose(y[here], own_y, rtol=1e-5, atol=1e-6)
        if last:
            np.testing.assert_allclose(d_x[here], own_d_x, rtol=1e-5, atol=1e-6)
            assert_bitwise_equal(alone_state, state)
            assert_bitwise_equal(own_state, state)


@pytest.mark.parametrize("implementation", ALL)
def test_no_gradient_crosses_a_boundary(implementation):
    x = np.ones((1, 8, 2), np.float32)
    ids = np.array([0, 0, 0, 1, 1, 2, 2, 2])

    def of_second(x):
        y = fast_layers.causal_conv1d(x, x[0, :4], segment_ids=ids, implementation=implementation)
        return y[:, 3:5].sum()

    d_x = jax.jacobian(lambda x: fast_layers.causal_conv1d(x, np.ones((4, 2), np.float32), segment_ids=ids))(x)
    reached = np.asarray(d_x)[0, :, 0, 0, :, 0] != 0
    same_document = ids[:, None] == ids
    causal = np.tril(np.ones((8, 8), bool))
    np.testing.assert_array_equal(reached, same_document & causal)
    assert of_second(x) == 2 + 4


@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize("pieces", [(4, 5), (1, 2, 6), (1,) * 9], ids=str)
def test_a_row_in_pieces_is_the_whole_row(implementation, pieces):
    """Also across a document boundary that falls between two pieces, or in one; lengths below W - 1 included."""
    built = build(Case(batch=1, segments="rows", initial_state=True))
    x, w, b, state = built.operands
    convolve = functools.partial(
        fast_layers.causal_conv1d, w=w, b=b, return_final_state=True, implementation=implementation
    )
    ids = np.array([[0, 0, 0, 0, 0, 0, 0, 1, 1]])
    whole, final = convolve(x, initial_state=state, segment_ids=ids)
    start, outputs = 0, []
    for length in pieces:
        stop = start + length
        if start and ids[0, start] != ids[0, start - 1]:
            state = np.zeros_like(state)  # a new document begins with this piece
        y, state = convolve(x[:, start:stop], initial_state=state, segment_ids=ids[:, start:stop])
        outputs.append(y)
        start = stop
    np.testing.assert_allclose(np.concatenate(outputs, 1), whole, rtol=1e-5, atol=1e-6)
    assert_bitwise_equal(state, final)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_steps_are_the_whole_row(width):
    built = build(Case(width=width))
    x, w, b, _ = built.operands
    whole, final = fast_layers.causal_conv1d(x, w, b, activation="swish", return_final_state=True)
    step = jax.jit(functools.partial(fast_layers.causal_conv1d_step, activation="silu"))
    state = np.zeros((2, 3, width - 1), np.float32)
    for t in range(9):
        y, state = step(state, x[:, t], w, b)
        np.testing.assert_allclose(y, whole[:, t], rtol=1e-6, atol=1e-6)
    assert_bitwise_equal(state, final)


def test_the_state_keeps_its_dtype():
    x, w = jnp.ones((1, 3, 2), jnp.bfloat16), jnp.ones((4, 2))
    state = jnp.full((1, 2, 3), 1 + 2**-20, jnp.float32)
    y, after = fast_layers.causal_conv1d_step(state, x[:, 0], w)
    assert (y.dtype, after.dtype) == (jnp.bfloat16, jnp.float32)
    assert_bitwise_equal(after[..., :2], state[..., :2])  # no digit lost on the way through
    assert fast_layers.causal_conv1d(x, w, return_final_state=True)[1].dtype == jnp.bfloat16


@pytest.mark.parametrize("implementation", ALL)
def test_transforms(implementation):
    built = build(Case(length=5))
    x, w, b, _ = built.operands
    convolve = functools.partial(fast_layers.causal_conv1d, activation="silu", implementation=implementation)

    def loss(x, w):
        return (convolve(x, w, b) ** 2).sum()

    each = jax.vmap(lambda x: convolve(x[None], w, b)[0])(x)
    np.testing.assert_allclose(each, convolve(x, w, b), rtol=1e-6, atol=1e-6)
    want = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w)
    got = jax.grad(jax.checkpoint(loss), argnums=(0, 1))(x, w)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), got, want)
    if implementation == "reference":
        check_grads(jax.jit(loss), (x, w), order=2, modes=("fwd", "rev"), rtol=0.05, atol=0.05)


def test_the_backward_keeps_the_inputs_only():
    x = jax.ShapeDtypeStruct((2, 64, 8), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((4, 8), jnp.float32)

    def kept(implementation):
        call = functools.partial(fast_layers.causal_conv1d, activation="silu", implementation=implementation)
        _, pull = jax.eval_shape(lambda x, w: jax.vjp(call, x, w), x, w)
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(pull))

    assert kept("xla") == x.size * 2 + w.size * 4
    assert kept("reference") > 2 * kept("xla")  # the measure sees what is kept


@pytest.mark.skipif(len(jax.devices("cpu")) < 4, reason="needs four CPU devices")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["automatic", "explicit"])
@pytest.mark.parametrize("implementation", TESTED)
def test_sharded_batch_and_channels(implementation, kind):
    built = build(Case(batch=4, channels=6, initial_state=True, segments="rows"))
    want = run(implementation, built)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2, devices=jax.devices("cpu")[:4])
    specs = [P("data", None, "model"), P(None, "model"), P("model"), P("data", "model")]
    with jax.set_mesh(mesh):
        place = functools.partial(jax.tree.map, lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec)))
        sharded = built.__class__(
            built.case,
            built.operands.__class__(*place(list(built.operands), specs)),
            place(built.segment_ids, P("data")),
            place(built.d_y, specs[0]),
            place(built.d_state, specs[3]),
        )
        got = run(implementation, sharded)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), got, want)
    assert got.y.sharding.is_equivalent_to(jax.NamedSharding(mesh, specs[0]), 3)


@pytest.mark.skipif(len(jax.devices("cpu")) < 4, reason="needs four CPU devices")
def test_vmap_over_a_sharded_axis():
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(4, 2, 9, 6)).astype(np.float32), rng.normal(size=(4, 6)).astype(np.float32)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices("cpu")[:4])
    call = jax.vmap(fast_layers.causal_conv1d, in_axes=(0, None))
    with jax.set_mesh(mesh):
        placed = (
            jax.device_put(v, jax.NamedSharding(mesh, spec))
            for v, spec in ((x, P("data", None, None, "model")), (w, P(None, "model")))
        )
        got = jax.jit(call)(*placed)
    np.testing.assert_allclose(got, call(x, w), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(len(jax.devices("cpu")) < 4, reason="needs four CPU devices")
@pytest.mark.parametrize("culprit", ["x", "segment_ids"])
def test_a_length_that_is_sharded_is_refused(culprit):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices("cpu")[:4])
    arrays = {"x": jnp.zeros((2, 8, 6)), "segment_ids": jnp.zeros((2, 8), int)}
    arrays[culprit] = jax.device_put(arrays[culprit], jax.NamedSharding(mesh, P(None, "data")))
    with pytest.raises(ValueError, match=rf"{culprit} is sharded along length over mesh axes \('data',\)"):
        fast_layers.causal_conv1d(w=jnp.zeros((4, 6)), **arrays)


@pytest.mark.skipif(len(jax.devices("cpu")) < 4, reason="needs four CPU devices")
@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma):
    """Each shard its rows; the kernel that all share gets a summed gradient."""
    built = build(Case(batch=4, segments="shared"))
    x, w, b, _ = built.operands
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:4])

    def convolve(x, w, b):
        return fast_layers.causal_conv1d(x, w, b, activation="silu", segment_ids=built.segment_ids)

    split = jax.shard_map(convolve, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"), check_vma=check_vma)

    def grads(f):
        return jax.jit(jax.grad(lambda *operands: (f(*operands) * built.d_y).sum(), argnums=(0, 1, 2)))(x, w, b)

    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), grads(split), grads(convolve))


X, KERNEL = np.zeros((2, 5, 3), np.float32), np.zeros((4, 3), np.float32)
BAD = {
    "rank of x": ({"x": X[0]}, r"x must be \[batch, length, channels\], got \(5, 3\)"),
    "integers": ({"x": X.astype(int)}, "x has dtype int.*must be floating point"),
    "no positions": ({"x": X[:, :0]}, "length is 0"),
    "channels of w": ({"w": KERNEL.T}, r"w must have shape \(taps, channels\) = \(1 or more, 3\), got \(3, 4\)"),
    "shape of b": ({"b": np.zeros(4, np.float32)}, r"b must have shape \(channels,\) = \(3,\), got \(4,\)"),
    "activation": ({"activation": "gelu"}, "activation='gelu': must be None"),
    "activation in a list": ({"activation": ["silu"]}, r"activation=\['silu'\]: must be None, \"silu\" or \"swish\""),
    "activation of arrays": ({"activation": KERNEL[:, 0]}, "activation=array.*: must be None"),
    "flag": ({"return_final_state": "no"}, "return_final_state='no': must be True or False"),
    "state of mamba_ssm": ({"initial_state": np.zeros((2, 3, 4), np.float32)}, r"got .*cache\[..., 1:\]"),
    "shape of ids": ({"segment_ids": np.zeros((5, 2), int)}, r"segment_ids must have shape .*got \(5, 2\)"),
    "dtype of ids": (
        {"segment_ids": np.zeros((2, 5), np.float32)},
        "segment_ids must be integers, got dtype float32",
    ),
    "ids of 64 bits": (
        {"segment_ids": np.array([0, 0, 2**32, 2**32, 2**32])},
        r"segment_ids must fit in int32, got 4294967296; number them: np.unique\(ids, return_inverse=True\)",
    ),
    "unsigned ids of 64 bits": (
        {"segment_ids": np.full((2, 5), 2**63, np.uint64)},
        "segment_ids must fit in int32, got 9223372036854775808",
    ),
    "ids in a list": ({"segment_ids": [0, 0, 0, 0, -(2**40)]}, "segment_ids must fit in int32, got -1099511627776"),
    "backend": ({"implementation": "mosaic"}, "implementation 'mosaic' is unknown; .* xla, reference"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        fast_layers.causal_conv1d(**{"x": X, "w": KERNEL, **changes})


def test_errors_of_the_step():
    with pytest.raises(ValueError, match=r"x must be \[batch, channels\], got \(2, 5, 3\); .*use causal_conv1d"):
        fast_layers.causal_conv1d_step(np.zeros((2, 3, 3), np.float32), X, KERNEL)
    with pytest.raises(ValueError, match=r"state must have shape \(batch, channels, taps - 1\) = \(2, 3, 3\)"):
        fast_layers.causal_conv1d_step(np.zeros((2, 3), np.float32), X[:, 0], KERNEL)


def test_explain():
    explained = str(fast_layers.explain(fast_layers.causal_conv1d, X, KERNEL, activation="swish"))
    assert explained.startswith("causal_conv1d: x [2, 5, 3], 4 taps, float32, activation silu")
    assert "forward  on cpu: xla" in explained


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_no_examples(implementation):
    x, w = np.zeros((0, 5, 8), np.float32), np.ones((4, 8), np.float32)
    conv = functools.partial(
        fast_layers.causal_conv1d, activation="silu", return_final_state=True, implementation=implementation
    )
    assert [out.shape for out in conv(x, w)] == [(0, 5, 8), (0, 8, 3)]
    d_x, d_w = jax.grad(lambda x, w: conv(x, w)[0].sum(), argnums=(0, 1))(x, w)
    assert d_x.shape == x.shape
    np.testing.assert_array_equal(d_w, np.zeros_like(w))

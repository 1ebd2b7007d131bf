"""jit, grad, vmap over anything, jacobians, remat, scan, export: each against what it stands for."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_bitwise_equal

import fast_layers
from fast_layers import masks
from fast_layers.ops.attention.xla_config import XlaTiles
from ops.attention.cases import TESTED
from ops.attention.tracing import equations

B, T, S, N, K, H = 2, 9, 70, 4, 2, 8
ALL = ["reference", *TESTED]
FAST = {"compiler_options": {"xla_backend_optimization_level": 0}}


def _normal(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).normal(size=shape).astype(np.float32)


def _ints(low, high, shape, seed=0):
    return np.random.default_rng((seed, *shape)).integers(low, high, shape).astype(np.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Everything:
    """Every operand that may be an array, so that any of them may be mapped."""

    query: Any
    key: Any
    value: Any
    bias: Any
    sinks: Any
    query_lengths: Any
    key_lengths: Any
    query_ids: Any
    key_ids: Any
    q_offset: Any
    dense: Any
    prefix: Any
    rng: Any

    @classmethod
    def draw(cls, seed):
        return cls(
            query=_normal(B, T, N, H, seed=seed),
            key=_normal(B, S, K, H, seed=seed + 1),
            value=_normal(B, S, K, H, seed=seed + 2),
            bias=_normal(1, N, T, S, seed=seed),
            sinks=_normal(N, seed=seed),
            query_lengths=_ints(0, T + 1, (B,), seed),
            key_lengths=_ints(1, S + 1, (B,), seed),
            query_ids=_ints(-1, 2, (B, T), seed),
            key_ids=_ints(-1, 2, (B, S), seed),
            q_offset=_ints(0, S, (B,), seed),
            dense=_normal(B, 1, T, S, seed=seed) < 0.8,
            prefix=_ints(0, S, (B,), seed),
            rng=np.asarray(jax.random.key_data(jax.random.key(seed))),
        )


MAPPED = [field.name for field in dataclasses.fields(Everything)]


def _attend(x: Everything, implementation):
    return fast_layers.dot_product_attention(
        x.query,
        x.key,
        x.value,
        x.bias,
        masks.Dense(x.dense) & masks.Prefix(x.prefix),
        sinks=x.sinks,
        query_seq_lengths=x.query_lengths,
        key_value_seq_lengths=x.key_lengths,
        segment_ids=(x.query_ids, x.key_ids),
        q_offset=x.q_offset,
        local_window_size=(40, None),
        dropout_rate=0.2,
        dropout_rng=jax.random.wrap_key_data(x.rng),
        return_residual=True,
        implementation=implementation,
    )


def _value_and_gradients(implementation):
    def call(x: Everything, d_out, d_lse):
        floats = {name: getattr(x, name) for name in MAPPED[:5]}
        results, pull = jax.vjp(lambda f: _attend(dataclasses.replace(x, **f), implementation), floats)
        return results, pull((d_out, jnp.where(results[1] > -jnp.inf, d_lse, 0)))[0]

    return call


@pytest.fixture(scope="module")
def members():
    """Three draws, and what the reference says to any mixture of them; one compilation for all tests here."""
    draws = [Everything.draw(10 * i) for i in range(3)]
    reference = jax.jit(_value_and_gradients("reference"), **FAST)
    return draws, reference


D_OUT, D_LSE = _normal(B, T, N, H, seed=77), _normal(B, T, N, seed=78)


def _assert_near(got, want, name=""):
    """For two orders of float32 sums of numbers of about 1; `test_values_and_grads` has the sharp rule."""
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5, err_msg=f"{name}{jax.tree_util.keystr(path)}")


@pytest.mark.parametrize("implementation", TESTED)
@pytest.mark.parametrize(
    "mapped",
    [
        *(pytest.param((name,), marks=() if name in ("query", "bias") else pytest.mark.exhaustive) for name in MAPPED),
        tuple(MAPPED),
        ("query", "key_ids", "rng"),
    ],
    ids="-".join,
)
def test_vmap_is_a_loop(members, monkeypatch, implementation, mapped):
    """Over each operand alone and together, along an axis that differs between them; values and gradients.

    With small tiles, so that what one member may skip another may need.
    """
    monkeypatch.setattr(XlaTiles, "of", lambda *_: XlaTiles(q_tile=4, kv_tile=32))
    draws, reference = members
    axes = {name: (MAPPED.index(name) * 2 + 1) % (np.ndim(getattr(draws[0], name)) + 1) for name in mapped}
    stacked = dataclasses.replace(
        draws[0], **{name: np.stack([getattr(d, name) for d in draws], axis=axes[name]) for name in mapped}
    )
    in_axes = Everything(**{name: axes.get(name) for name in MAPPED})
    got = jax.jit(jax.vmap(_value_and_gradients(implementation), in_axes=(in_axes, None, None)), **FAST)(
        stacked, D_OUT, D_LSE
    )
    for i, draw in enumerate(draws):
        member = dataclasses.replace(draws[0], **{name: getattr(draw, name) for name in mapped})
        _assert_near(jax.tree.map(lambda x, i=i: x[i], got), reference(member, D_OUT, D_LSE), f"member {i} ")


@pytest.mark.parametrize("implementation", TESTED)
@pytest.mark.parametrize("axis", range(5))
def test_vmap_over_any_axis_in_and_out(implementation, axis):
    x = _normal(3, B, T, K, H)

    def attend(x):
        return fast_layers.dot_product_attention(x, x, x, is_causal=True, implementation=implementation)

    got = jax.jit(jax.vmap(attend, in_axes=axis, out_axes=-1 - axis), **FAST)(np.moveaxis(x, 0, axis))
    _assert_near(np.moveaxis(got, -1 - axis, 0), np.stack([jax.jit(attend)(member) for member in x]))


@pytest.mark.parametrize("implementation", TESTED)
def test_nested_vmap_and_batch_dims_agree(implementation):
    """Two vmaps over one example, one over a batch, and plain batch dims: one result, forward and gradient."""
    x, ids = _normal(2, 3, T, K, H), _ints(-1, 2, (2, 3, T))

    def loss(x, ids):
        out = fast_layers.dot_product_attention(
            x, x, x, segment_ids=ids, is_causal=True, local_window_size=(4, 0), implementation=implementation
        )
        return jnp.sin(out).sum(tuple(range(-3, 0)))

    def grad(f):
        return jax.jit(lambda x: jax.value_and_grad(lambda x: f(x, ids).sum())(x), **FAST)(x)

    plain = grad(loss)
    _assert_near(grad(jax.vmap(jax.vmap(loss))), plain)
    _assert_near(grad(jax.vmap(loss)), plain)


@pytest.mark.parametrize("implementation", TESTED)
def test_jacobian_is_the_references(implementation):
    """Reverse mode vmaps the gradient rule over cotangents; the reference's forward mode knows nothing of it."""
    x = _normal(4, 2, 3)

    def attend(x, implementation):
        return fast_layers.dot_product_attention(x, x, x, is_causal=True, implementation=implementation)

    got = jax.jit(jax.jacrev(functools.partial(attend, implementation=implementation)))(x)
    want = jax.jit(jax.jacfwd(functools.partial(attend, implementation="reference")))(x)
    assert got.shape == (4, 2, 3, 4, 2, 3)
    _assert_near(got, want)


def test_reference_has_hessians_and_jvps():
    x, direction = _normal(4, 1, 3), _normal(4, 1, 3, seed=1)
    options = {"is_causal": True, "softcap": 2.0, "implementation": "reference"}

    def loss(x):
        return jnp.sin(fast_layers.dot_product_attention(x, x, x, **options)).sum()

    with jax.enable_x64(True):
        x, direction = (jnp.asarray(a, jnp.float64) for a in (x, direction))
        hessian = jax.jit(jax.hessian(loss))(x)
        step = 1e-5 * direction
        grad = jax.jit(jax.grad(loss))
        want = (grad(x + step) - grad(x - step)) / 2e-5
        np.testing.assert_allclose(jnp.einsum("abcdef,def->abc", hessian, direction), want, rtol=1e-6, atol=1e-9)
        value, slope = jax.jvp(loss, (x,), (direction,))
        np.testing.assert_allclose(slope, (grad(x) * direction).sum(), rtol=1e-10)
        np.testing.assert_allclose(value, loss(x), rtol=1e-12)


def test_forward_mode_without_the_reference_says_so():
    x = _normal(4, 1, 3)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: fast_layers.dot_product_attention(x, x, x), (x,), (x,))


def _layer_loss(x, implementation=None, policy=None, layers=1):
    def layer(x):
        x = jnp.tanh(x)
        return x + fast_layers.dot_product_attention(x, x, x, is_causal=True, implementation=implementation)

    if policy is not None:
        layer = jax.checkpoint(layer, policy=policy)
    for _ in range(layers):
        x = layer(x)
    return (x**2).sum()


def _count_loops(jaxpr):
    return sum(eqn.primitive.name in ("while", "scan", "pallas_call") for eqn in equations(jaxpr))


@pytest.mark.parametrize("implementation", TESTED)
def test_named_residuals_spare_the_forward_in_the_backward(implementation):
    x = _normal(B, T, K, H)
    policies = jax.checkpoint_policies
    assert fast_layers.ATTENTION_RESIDUAL_NAMES == ("fast_layers_attention_out", "fast_layers_attention_lse")
    named = policies.save_only_these_names(*fast_layers.ATTENTION_RESIDUAL_NAMES)

    def work(policy):
        grad = jax.grad(functools.partial(_layer_loss, implementation=implementation, policy=policy))
        return _count_loops(jax.make_jaxpr(grad)(x)), jax.jit(grad)(x)

    (plain, plain_grad), (saved, saved_grad), (nothing, nothing_grad) = map(
        work, (None, named, policies.nothing_saveable)
    )
    assert saved == plain
    assert nothing > plain
    _assert_near(saved_grad, plain_grad)
    _assert_near(nothing_grad, plain_grad)
    # One name alone is not enough: the other comes from the same loop.
    one = policies.save_only_these_names(fast_layers.ATTENTION_RESIDUAL_NAMES[0])
    assert work(one)[0] == nothing


def test_named_residuals_are_all_that_is_saved():
    """Under the policy the residuals are out and lse, and the layer's own input."""
    x = _normal(B, T, K, H)
    named = jax.checkpoint_policies.save_only_these_names(*fast_layers.ATTENTION_RESIDUAL_NAMES)
    _, pull = jax.vjp(functools.partial(_layer_loss, policy=named, layers=3), x)
    saved = sum(leaf.size for leaf in jax.tree.leaves(pull))
    per_layer = x.size + x.size + B * T * K
    assert saved <= 3 * per_layer + 2 * x.size


@pytest.mark.parametrize("implementation", ALL)
def test_scan_over_layers(implementation):
    """Weights stacked along the layers, with remat inside, as large models do."""
    x, weights = _normal(B, T, K, H), 0.3 * _normal(3, H, H)

    def layer(x, weight):
        y = x @ weight
        return x + fast_layers.dot_product_attention(y, y, x, is_causal=True, implementation=implementation), None

    def scanned(weights):
        return (jax.lax.scan(jax.checkpoint(layer), x, weights)[0] ** 2).mean()

    def looped(weights):
        y = x
        for weight in weights:
            y, _ = layer(y, weight)
        return (y**2).mean()

    _assert_near(*(jax.jit(jax.value_and_grad(f), **FAST)(weights) for f in (scanned, looped)))


@pytest.mark.parametrize("implementation", TESTED)
def test_donated_arguments(implementation):
    """A donated query may become the output; nothing reads it afterwards."""
    attend = functools.partial(fast_layers.dot_product_attention, is_causal=True, implementation=implementation)
    x = _normal(B, T, K, H)
    want = jax.jit(attend)(x, x, x)
    query = jnp.array(x)
    got = jax.jit(attend, donate_argnums=0)(query, x, x)
    assert query.is_deleted()
    assert_bitwise_equal(got, want)


def test_masks_as_jit_arguments():
    """A structured mask is an argument like any other: its arrays do not retrace, its static parts do."""
    traces = []
    x = _normal(B, T, K, H)

    @jax.jit
    def attend(x, mask):
        traces.append(mask)
        return fast_layers.dot_product_attention(x, x, x, mask=mask)

    for lengths in ([9, 3], [1, 2]):
        mask = masks.Causal() & masks.KeyLengths(np.array(lengths))
        _assert_near(attend(x, mask), fast_layers.dot_product_attention(x, x, x, mask=mask))
    assert len(traces) == 1
    attend(x, masks.LocalWindow(3, 0) & masks.KeyLengths(np.array([9, 3])))
    assert len(traces) == 2


_BATCH, _QUERIES, _KEYS = jax.export.symbolic_shape("b, t, s")
SYMBOLIC = {
    "window and offset": ({}, {"local_window_size": 5, "q_offset": "bottom_right"}),
    "lengths": ({"query_seq_lengths": (_BATCH,), "key_value_seq_lengths": (_BATCH,)}, {}),
    "segments": ({"segment_ids": ((_BATCH, _QUERIES), (_BATCH, _KEYS))}, {}),
    "bias": ({"bias": (_BATCH, N, _QUERIES, _KEYS)}, {}),
    "bias of rows": ({"bias": (1, 1, _QUERIES, 1)}, {}),
    "mask": ({"mask": (_BATCH, 1, _QUERIES, _KEYS)}, {}),
    "sinks and softcap": ({"sinks": (N,)}, {"softcap": 2.0}),
    "dropout": ({}, {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}),
}


@pytest.mark.parametrize("implementation", TESTED)
@pytest.mark.parametrize(("arrays", "options"), SYMBOLIC.values(), ids=SYMBOLIC)
def test_every_argument_exports_with_symbolic_shapes(implementation, arrays, options):
    dtypes = {"bias": np.float32, "sinks": np.float32, "mask": bool}

    def struct(name, shape):
        if isinstance(shape[0], tuple):
            return tuple(struct(name, s) for s in shape)
        return jax.ShapeDtypeStruct(shape, dtypes.get(name, np.int32))

    query = jax.ShapeDtypeStruct((_BATCH, _QUERIES, N, H), np.float32)
    key = jax.ShapeDtypeStruct((_BATCH, _KEYS, K, H), np.float32)

    def loss(query, key, arrays):
        return fast_layers.dot_product_attention(
            query, key, key, implementation=implementation, **arrays, **options
        ).sum()

    given = {name: struct(name, shape) for name, shape in arrays.items()}
    jax.export.export(jax.jit(jax.grad(loss, argnums=(0, 1))))(query, key, given)


class TestExport:
    """Symbolic batch and lengths, serialised and read back, run at several sizes."""

    @staticmethod
    def _attend(query, key, lengths, ids=None, bias=None, offset=0):
        return fast_layers.dot_product_attention(
            query,
            key,
            key,
            bias,
            is_causal=True,
            local_window_size=(300, None),
            key_value_seq_lengths=lengths,
            segment_ids=ids,
            q_offset=offset,
            implementation="xla",
        )

    @pytest.mark.exhaustive
    def test_one_length(self):
        batch, length = jax.export.symbolic_shape("b, t")
        self._check(batch, length, length, [(1, 1), (2, 7), (3, 300)])

    def test_two_lengths_batch_fixed(self):
        q_len, kv_len = jax.export.symbolic_shape("t, s")
        self._check(2, q_len, kv_len, [(2, 5, 9), (2, 300, 33), (2, 1, 600)])

    def test_three_symbols_with_bias_segments_and_offset(self):
        batch, q_len, kv_len = jax.export.symbolic_shape("b, t, s")

        def attend(query, key, lengths, query_ids, key_ids, bias):
            return self._attend(query, key, lengths, (query_ids, key_ids), bias, "bottom_right")

        def arrays(b, t, s, make, make_ids, make_lengths):
            return (
                make(b, t, N, H),
                make(b, s, K, H),
                make_lengths(b),
                make_ids(b, t),
                make_ids(b, s),
                make(1, N, t, s),
            )

        def struct(dtype):
            return lambda *shape: jax.ShapeDtypeStruct(shape, dtype)

        symbolic = arrays(batch, q_len, kv_len, struct(np.float32), struct(np.int32), struct(np.int32))
        call = self._through_bytes(attend, symbolic)
        for b, t, s in ((1, 1, 1), (2, 9, 270)):
            concrete = arrays(
                b, t, s, _normal, lambda *shape: _ints(-1, 2, shape), lambda b, s=s: _ints(1, s + 1, (b,))
            )
            _assert_near(call.call(*concrete), jax.jit(attend)(*concrete))

    def _check(self, batch, q_len, kv_len, sizes):
        symbolic = (
            jax.ShapeDtypeStruct((batch, q_len, N, H), np.float32),
            jax.ShapeDtypeStruct((batch, kv_len, K, H), np.float32),
            jax.ShapeDtypeStruct((batch,), np.int32),
        )
        call = self._through_bytes(self._attend, symbolic)
        for b, t, *s in sizes:
            s = s[0] if s else t
            arrays = _normal(b, t, N, H), _normal(b, s, K, H), _ints(1, s + 1, (b,))
            want, pull = jax.vjp(lambda q, k, lengths=arrays[2]: self._attend(q, k, lengths), *arrays[:2])
            got, exported_pull = jax.vjp(lambda q, k, lengths=arrays[2]: call.call(q, k, lengths), *arrays[:2])
            d_out = _normal(*want.shape, seed=3)
            _assert_near((got, exported_pull(d_out)), (want, pull(d_out)), f"{b}, {t}, {s}: ")

    @staticmethod
    def _through_bytes(fn, symbolic):
        exported = jax.export.export(jax.jit(fn))(*symbolic)
        return jax.export.deserialize(exported.serialize(vjp_order=1))

"""Linen: FlashMHA has Flax's parameters, values, gradients, errors and warnings."""

from __future__ import annotations

import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_bitwise_equal

import fast_layers
from fast_layers import linen
from layers.cases import CASES, FEATURES, HEADS, Case, jit, names
from layers.test_nnx_parity import EXACT, outcome

FLAX = nn.MultiHeadDotProductAttention
LINEN_CASES = [case for case in CASES if not case.nnx_only]
RNGS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}


def make(layer, case: Case = Case("plain"), **more):
    return layer(HEADS, **{**case.constructor, **more})


def outputs_and_gradients(module: nn.Module, case: Case, dtype):
    inputs = case.inputs(dtype)
    variables = module.init(RNGS, *inputs)

    def loss(variables, inputs):
        out = module.apply(variables, *inputs, mask=case.mask_array())
        weights = 1.0 + jnp.arange(out.size).reshape(out.shape) % 7
        return jnp.sum(weights * out.astype(weights.dtype)), out

    gradients, out = jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(variables, inputs)
    return variables, out, *gradients


@pytest.mark.parametrize("case", LINEN_CASES, ids=names(LINEN_CASES))
def test_parameters_values_and_gradients(case):
    with jax.enable_x64(True):
        want, got = (
            outputs_and_gradients(make(layer, case, param_dtype=jnp.float64), case, jnp.float64)
            for layer in (FLAX, linen.FlashMHA)
        )
        assert_bitwise_equal(got[0], want[0])
        jax.tree.map(functools.partial(np.testing.assert_allclose, **EXACT), got[1:], want[1:])


def test_fields_are_those_of_flax_in_their_order():
    theirs, ours = (list(inspect.signature(layer).parameters.values()) for layer in (FLAX, linen.FlashMHA))
    positional = [p.name for p in theirs if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD] == positional
    ours = {p.name: p for p in ours}
    assert all(ours[p.name].default == p.default for p in theirs if p.name != "attention_fn")


@pytest.mark.parametrize("name", ["MultiHeadDotProductAttention", "MultiHeadAttention"])
def test_automatic_names_and_their_initial_values(name):
    def model(library):
        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                return getattr(library, name)(HEADS)(getattr(library, name)(HEADS)(x))

        return Model()

    x = Case("plain").inputs()[0]
    want, got = (model(library).init(RNGS, x) for library in (nn, linen))
    assert f"{name}_1" in want["params"]
    assert_bitwise_equal(got, want)
    assert_bitwise_equal(
        linen.FlashMHA(HEADS, name="attention").init(RNGS, x), FLAX(HEADS, name="attention").init(RNGS, x)
    )


def test_grouped_heads():
    x = Case("plain").inputs()[0]
    grouped = linen.FlashMHA(HEADS, num_kv_heads=2, normalize_qk=True)
    variables = grouped.init(RNGS, x)
    shapes = jax.tree.map(jnp.shape, variables["params"])
    assert shapes["key"] == shapes["value"] == {"kernel": (FEATURES, 2, 4), "bias": (2, 4)}
    assert shapes["query"]["kernel"] == (FEATURES, HEADS, 4)
    # The same as all heads with the key heads written out.
    repeated = {**variables["params"]}
    for name in ("key", "value"):
        repeated[name] = jax.tree.map(lambda p: jnp.repeat(p, 2, axis=-2), repeated[name])
    want = FLAX(HEADS, normalize_qk=True).apply({"params": repeated}, x)
    np.testing.assert_allclose(grouped.apply(variables, x), want, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="must be divisible by"):
        linen.FlashMHA(HEADS, num_kv_heads=3).init(RNGS, x)


X = jnp.ones((2, 5, FEATURES))


def decode_step(layer, x, **fields):
    module = layer(HEADS, decode=True, **fields)
    variables = module.init(RNGS, jnp.ones((2, 6, FEATURES)))
    return module.apply(variables, x, mutable=["cache"])


SQUARE = jnp.ones((2, 5, 5))
WRONG_CALLS = {
    "values without keys": lambda layer: layer(HEADS).init(RNGS, X, inputs_v=X),
    "keys twice": lambda layer: layer(HEADS).init(RNGS, X, X, inputs_kv=X),
    "values twice": lambda layer: layer(HEADS).init(RNGS, X, inputs_v=X, inputs_kv=X),
    "deprecated argument": lambda layer: layer(HEADS).init(RNGS, X, inputs_kv=X),
    "mask as values": lambda layer: layer(HEADS).init(RNGS, X, X, SQUARE),
    "heads do not divide": lambda layer: layer(3).init(RNGS, X),
    "cache of another batch": lambda layer: decode_step(layer, X[:1, :1]),
    "cache of more dims": lambda layer: decode_step(layer, X[None, :, :1]),
    "deterministic never said": lambda layer: layer(HEADS, dropout_rate=0.5).init(RNGS, X),
    "deterministic said twice": lambda layer: layer(HEADS, dropout_rate=0.5, deterministic=True).init(
        RNGS, X, deterministic=True
    ),
    "no rng for dropout": lambda layer: layer(HEADS, dropout_rate=0.5, deterministic=False).apply(
        layer(HEADS).init(RNGS, X), X
    ),
    "other parameters": lambda layer: layer(HEADS).apply(layer(HEADS).init(RNGS, X), X[..., :3]),
    "one custom einsum of two": lambda layer: layer(HEADS, qk_attn_weights_einsum_cls=lambda: jnp.einsum).init(RNGS, X),
    "custom einsum and precision": lambda layer: layer(
        HEADS,
        qk_attn_weights_einsum_cls=lambda: jnp.einsum,
        attn_weights_value_einsum_cls=lambda: jnp.einsum,
        precision="highest",
    ).init(RNGS, X),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_errors_and_warnings_are_those_of_flax(name):
    # Some texts hold the name of the class.
    layers = FLAX, linen.MultiHeadDotProductAttention
    theirs, ours = (outcome(lambda layer=layer: WRONG_CALLS[name](layer)) for layer in layers)
    assert theirs != (None, [])
    assert ours == theirs


def test_custom_einsums_are_called():
    calls = []

    def counting():
        def einsum(*args):
            calls.append(args[0])
            return jnp.einsum(*args)

        return einsum

    x = Case("plain").inputs()[0]
    fields = {"qk_attn_weights_einsum_cls": counting, "attn_weights_value_einsum_cls": counting}
    variables = FLAX(HEADS).init(RNGS, x)
    want = FLAX(HEADS).apply(variables, x, mask=jnp.tril(jnp.ones((9, 9))))
    got = linen.FlashMHA(HEADS, **fields).apply(variables, x, mask=fast_layers.masks.Causal())
    assert len(calls) == 2
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="softcap cannot be combined with custom einsums"):
        linen.FlashMHA(HEADS, softcap=3.0, **fields).apply(variables, x)


@pytest.mark.parametrize("force", [True, False])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16], ids=str)
def test_dtypes_of_outputs_and_weights(force, dtype):
    x = X.astype(jnp.bfloat16)
    fields = {"force_fp32_for_softmax": force, "dtype": dtype, "param_dtype": jnp.bfloat16}

    def shapes(layer):
        variables = layer(HEADS).init(RNGS, X)
        variables = jax.tree.map(lambda p: p.astype(jnp.bfloat16), variables)
        return jax.eval_shape(
            lambda: (
                layer(HEADS, **fields).apply(variables, x, sow_weights=True, mutable=["intermediates"]),
                layer(HEADS, **fields).apply(variables, x),
            )
        )

    assert shapes(linen.FlashMHA) == shapes(FLAX)


def test_one_call_is_one_call():
    """Sub-classing leaves no second entry in captured intermediates, nor for interceptors."""
    x = Case("plain").inputs()[0]

    def observe(layer):
        seen = []

        def interceptor(call, args, kwargs, context):
            seen.append((context.module.name, context.method_name))
            return call(*args, **kwargs)

        module = layer(HEADS, name="attention")
        variables = module.init(RNGS, x)
        with nn.intercept_methods(interceptor):
            _, captured = module.apply(variables, x, capture_intermediates=True)
        return seen, jax.tree.map(jnp.shape, captured)

    assert observe(linen.FlashMHA) == observe(FLAX)


def test_hook_without_the_class():
    case = Case("causal", mask="causal")
    x = case.inputs()[0]
    variables = FLAX(HEADS).init(RNGS, x)
    want = FLAX(HEADS).apply(variables, x, mask=case.mask_array())
    hooked = FLAX(HEADS, attention_fn=linen.attention_fn)
    for mask in (case.mask_array(), fast_layers.masks.Causal()):
        np.testing.assert_allclose(hooked.apply(variables, x, mask=mask), want, rtol=1e-5, atol=1e-6)
    assert len(fast_layers.explain(lambda x: hooked.apply(variables, x), x).plans) == 1


@pytest.mark.parametrize("lift", [nn.remat, nn.jit], ids=lambda lift: lift.__name__)
def test_lifted(lift):
    x = Case("plain").inputs()[0]
    modules = [lift(layer)(HEADS, name="attention") for layer in (FLAX, linen.FlashMHA)]
    variables = modules[0].init(RNGS, x)
    assert_bitwise_equal(modules[1].init(RNGS, x), variables)
    want, got = (module.apply(variables, x) for module in modules)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_scan_over_layers():
    def layers(layer):
        class Layers(nn.Module):
            @nn.compact
            def __call__(self, x):
                scan = nn.scan(
                    lambda module, x, _: (module(x), None),
                    variable_axes={"params": 0},
                    split_rngs={"params": True},
                    length=3,
                )
                return scan(layer(HEADS, name="attention"), x, None)[0]

        return Layers()

    x = Case("plain").inputs()[0]
    variables = layers(FLAX).init(RNGS, x)
    assert_bitwise_equal(layers(linen.FlashMHA).init(RNGS, x), variables)
    want, got = (layers(layer).apply(variables, x) for layer in (FLAX, linen.FlashMHA))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)

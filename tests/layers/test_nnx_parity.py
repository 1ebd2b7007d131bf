"""NNX: FlashMHA has Flax's parameters, values, gradients and errors."""

from __future__ import annotations

import functools
import inspect
import pickle
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_bitwise_equal, assert_trees_close
from flax import nnx

import fast_layers
from layers.cases import CASES, FEATURES, HEADS, Case, jit, names

FLAX = nnx.MultiHeadAttention
# float64 differs between two orders of summation by this much at most, and a wrong result by more.
EXACT = {"rtol": 1e-9, "atol": 1e-11}
# Flax calls jax.nn's attention where it can, which has float32 inside. It cannot where there might be dropout.
WRITTEN_OUT = {"dropout_rate": 0.5, "deterministic": True}


def make(layer, case: Case = Case("plain"), **more):
    arguments = {"decode": False, **case.constructor, **more}
    return layer(HEADS, FEATURES, rngs=nnx.Rngs(params=0, dropout=1), **arguments)


def outputs_and_gradients(model: nnx.Module, case: Case, dtype, inputs=None):
    """The output, and the gradients of a weighted sum of it for parameters and inputs."""
    inputs = case.inputs(dtype) if inputs is None else inputs
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, inputs):
        out = nnx.merge(graph, params, rest)(*inputs, mask=case.mask_array(), is_causal=case.is_causal)
        weights = 1.0 + jnp.arange(out.size).reshape(out.shape) % 7  # exact in every dtype
        return jnp.sum(weights * out.astype(weights.dtype)), out

    # Not all types' matmuls run on CPU without XLA's optimisations.
    compiled = jit if dtype == jnp.float64 else jax.jit
    gradients, out = compiled(jax.grad(loss, argnums=(0, 1), has_aux=True))(params, inputs)
    return out, nnx.to_pure_dict(gradients[0]), list(gradients[1])


@pytest.mark.parametrize("case", CASES, ids=names(CASES))
def test_values_and_gradients_float64(case):
    with jax.enable_x64(True):
        models = (
            make(FLAX, case, param_dtype=jnp.float64, **WRITTEN_OUT),
            make(fast_layers.FlashMHA, case, param_dtype=jnp.float64),
        )
        want, got = (outputs_and_gradients(model, case, jnp.float64) for model in models)
        jax.tree.map(functools.partial(np.testing.assert_allclose, **EXACT), got, want)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda dtype: dtype.__name__)
def test_values_and_gradients_as_good_as_flax(dtype):
    # Without biases: a key's bias has the gradient 0, of which rounding errors of both are all there is.
    case = Case("long", {"num_kv_heads": 2, "use_bias": False}, batch=(4,), queries=40, mask="causal")
    # jax.nn's attention, which Flax calls where it can, does not compile for float16 on CPU.
    written_out = {**WRITTEN_OUT, "keep_rngs": False} if dtype == jnp.float16 else {}
    models = [make(fast_layers.FlashMHA, case, dtype=dtype), make(FLAX, case, dtype=dtype, **written_out)]
    got, yardstick = (outputs_and_gradients(model, case, dtype) for model in models)
    with jax.enable_x64(True):
        exact = make(FLAX, case, param_dtype=jnp.float64, keep_rngs=False, **WRITTEN_OUT)
        nnx.update(exact, jax.tree.map(lambda x: x.astype(jnp.float64), nnx.state(models[1], nnx.Param)))
        inputs = [x.astype(jnp.float64) for x in case.inputs(dtype)]
        oracle = outputs_and_gradients(exact, case, jnp.float64, inputs)
    assert_trees_close(got, oracle, yardstick)


@pytest.mark.parametrize("case", CASES, ids=names(CASES))
def test_parameters_and_initial_values(case):
    theirs, ours = make(FLAX, case), make(fast_layers.FlashMHA, case)
    assert_bitwise_equal(nnx.to_pure_dict(params(ours)), nnx.to_pure_dict(params(theirs)))
    everything = [nnx.to_flat_state(nnx.state(model)) for model in (ours, theirs)]
    assert [path for path, _ in everything[0]] == [path for path, _ in everything[1]]
    assert [type(v) for _, v in everything[0]] == [type(v) for _, v in everything[1]]


def params(model):
    return nnx.state(model, nnx.Param)


def test_models_built_alike_have_equal_graph_definitions():
    def build():
        rope = fast_layers.Rope(scaling=fast_layers.Llama3Scaling())
        return make(fast_layers.FlashMHA, rope=rope, window=[4, None], softcap=30.0, implementation="xla")

    first, second = nnx.graphdef(build()), nnx.graphdef(build())
    assert first == second
    assert hash(first) == hash(second)
    assert pickle.loads(pickle.dumps(build().attention_fn)) == build().attention_fn


def test_signature_lists_every_argument_of_the_installed_flax():
    for method in ("__init__", "__call__"):
        ours, theirs = (inspect.signature(getattr(layer, method)).parameters for layer in (fast_layers.FlashMHA, FLAX))
        assert set(theirs) <= set(ours)
        positional = [name for name, p in theirs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert list(ours)[: len(positional)] == positional
    assert {"rope", "window", "softcap", "implementation"} <= set(
        inspect.signature(fast_layers.FlashMHA.__init__).parameters
    )


def outcome(call):
    """(exception type, message, warnings) of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
            error = None
        except Exception as e:
            error = type(e), str(e)
    return error, [(w.category, str(w.message)) for w in caught]


X = jnp.ones((2, 5, FEATURES))


def cached(layer, shape=(2, 6, FEATURES), **constructor):
    model = make(layer, decode=True, **constructor)
    model.init_cache(shape)
    return model


WRONG_CALLS = {
    "heads do not divide": lambda layer: layer(3, FEATURES, rngs=nnx.Rngs(0)),
    "key heads do not divide": lambda layer: layer(4, FEATURES, num_kv_heads=3, rngs=nnx.Rngs(0)),
    "no rngs": lambda layer: layer(4, FEATURES),
    "unknown argument": lambda layer: layer(4, FEATURES, rngs=nnx.Rngs(0), heads=3),
    "values without keys": lambda layer: make(layer)(X, inputs_v=X),
    "wrong feature count": lambda layer: make(layer)(X[..., :3]),
    "decode never said": lambda layer: make(layer, decode=None)(X),
    "no cache": lambda layer: make(layer, decode=True)(X[:, :1]),
    "cache of another batch": lambda layer: cached(layer)(X[:1, :1]),
    "cache of more dims": lambda layer: cached(layer, (1, 2, 6, FEATURES))(X[:, :1]),
    "deterministic never said": lambda layer: make(layer, dropout_rate=0.5)(X),
    "no rngs for dropout": lambda layer: make(layer, dropout_rate=0.5, keep_rngs=False)(X, deterministic=False),
    "unknown call argument": lambda layer: make(layer)(X, causal=True),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_errors_are_those_of_flax(name):
    theirs, ours = (outcome(lambda layer=layer: WRONG_CALLS[name](layer)) for layer in (FLAX, fast_layers.FlashMHA))
    assert theirs[0] is not None
    error, message = theirs[0]
    if error is TypeError:  # the interpreter's own text names the class
        assert ours[0] is not None
        assert ours[0][0] is TypeError
        assert ours[0][1].rsplit(" ")[-1] == message.rsplit(" ")[-1]
    else:
        assert ours == theirs


HOOK_ERRORS = {
    "same rank": ((2, 8, 4, 8), (8, 4, 8), (8, 4, 8)),
    "batch dims": ((2, 8, 4, 8), (3, 8, 4, 8), (3, 8, 4, 8)),
    "lengths must match": ((2, 8, 4, 8), (2, 8, 4, 8), (2, 7, 4, 8)),
    "depths must match": ((2, 8, 4, 8), (2, 8, 4, 7), (2, 8, 4, 8)),
    "must be a multiple": ((2, 8, 5, 8), (2, 8, 2, 8), (2, 8, 2, 8)),
}


@pytest.mark.parametrize("match", HOOK_ERRORS)
def test_hook_rejects_shapes_in_words_of_flax(match):
    operands = [jnp.ones(shape) for shape in HOOK_ERRORS[match]]
    with pytest.raises(ValueError, match=match):
        fast_layers.nnx_attention_fn(*operands)


@pytest.mark.parametrize(
    ("rate", "rng", "match"),
    [
        (-0.5, 1, re.escape("dropout_rate must be in the range [0, 1)")),
        (1.0, 1, re.escape("dropout_rate must be in the range [0, 1)")),
        (float("nan"), 1, re.escape("dropout_rate must be in the range [0, 1)")),
        (0.5, None, "dropout_rng is required"),
    ],
)
def test_hook_rejects_dropout_as_flax_does(rate, rng, match):
    q = jnp.ones((2, 4, 2, 8))
    with pytest.raises(ValueError, match=match):
        fast_layers.nnx_attention_fn(
            q, q, q, dropout_rate=rate, dropout_rng=None if rng is None else jax.random.key(rng)
        )


def test_hook_without_the_class():
    case = Case("causal", mask="causal")
    theirs, ours = make(FLAX, case), make(FLAX, case, attention_fn=fast_layers.nnx_attention_fn)
    x = case.inputs()[0]
    for arguments in ({"mask": case.mask_array()}, {"is_causal": True}, {"mask": fast_layers.masks.Causal()}):
        want = theirs(x, mask=case.mask_array())
        np.testing.assert_allclose(ours(x, **arguments), want, rtol=1e-5, atol=1e-6)
    assert len(fast_layers.explain(ours, x).plans) == 1


def test_hook_adds_a_bias_and_takes_its_gradient():
    q = jax.random.normal(jax.random.key(0), (2, 5, 4, 8))
    bias = jax.random.normal(jax.random.key(1), (4, 5, 5))
    results = [
        jit(jax.value_and_grad(lambda bias, attend=attend: (attend(q, q, q, bias) ** 2).sum()))(bias)
        for attend in (nnx.dot_product_attention, fast_layers.nnx_attention_fn)
    ]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), *results)


@pytest.mark.parametrize("arguments", [{}, {"is_causal": True}, {"mask": "array"}], ids=str)
def test_complex_numbers_take_flax_own_function(arguments):
    arguments = {k: jnp.tril(jnp.ones((2, 1, 5, 5))) if v == "array" else v for k, v in arguments.items()}
    x = jax.lax.complex(X, jnp.cos(jnp.arange(X.size)).reshape(X.shape))
    # jax.nn's function, which Flax calls where it can, does not take complex numbers: sowing keeps Flax off it.
    want, got = (
        nnx.capture(make(layer, dtype=jnp.complex64), nnx.Intermediate)(x, sow_weights=True, **arguments)[0]
        for layer in (FLAX, fast_layers.FlashMHA)
    )
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("param_dtype", [jnp.bfloat16, jnp.float32], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.float32], ids=str)
def test_dtype_of_the_output(dtype, param_dtype):
    x = jax.ShapeDtypeStruct(X.shape, jnp.bfloat16)
    want, got = (
        jax.eval_shape(make(layer, dtype=dtype, param_dtype=param_dtype), x) for layer in (FLAX, fast_layers.FlashMHA)
    )
    assert got == want


def test_precision_reaches_the_matmuls():
    jaxpr = str(jax.make_jaxpr(make(fast_layers.FlashMHA, precision="highest"))(X))
    assert "Precision.HIGHEST" in jaxpr
    assert "precision=None" not in jaxpr


def test_a_row_that_sees_no_key_gives_zero():
    q = jnp.ones((1, 3, 2, 4))
    mask = jnp.ones((3, 3)).at[1].set(0)
    out = fast_layers.nnx_attention_fn(q, q, q, mask=mask)
    np.testing.assert_array_equal(out[:, 1], 0)
    np.testing.assert_array_equal(out[:, 0], 1)


def test_rank_promotion_may_be_forbidden():
    with jax.numpy_rank_promotion("raise"):
        make(fast_layers.FlashMHA, rope=fast_layers.Rope())(X, is_causal=True, segment_ids=jnp.zeros((2, 5), int))

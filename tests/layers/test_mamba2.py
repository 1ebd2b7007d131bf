"""`Mamba2` for NNX and Linen: against numpy from the paper, decoding, documents, state, initial values, metadata.

F = d_model, T positions.
"""

from __future__ import annotations

import functools
import pathlib
import re

import flax.linen as nn
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_bitwise_equal
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fast_layers
from fast_layers import linen
from layers import mamba2_oracle
from layers.cases import jit

F, T = 16, 11
SMALL = {"d_state": 6, "headdim": 8}

OPTIONS = {
    "plain": {},
    "groups": {"ngroups": 2, "chunk_size": 4},
    "part of the channels": {"d_ssm": 24, "d_conv": 3},
    "no norm, biases": {"rmsnorm": False, "bias": True, "conv_bias": False},
    "norm before gate": {"norm_before_gate": True, "ngroups": 4, "D_has_hdim": True},
    "limited steps": {"dt_limit": (0.01, 0.05), "dt_min": 0.001, "dt_max": 0.5, "d_conv": 1},
}
text = functools.partial(jax.random.normal, jax.random.key(0))


def layer(seed=0, **options):
    """With parameters that are all different from each other, so that none can stand in for another."""
    made = fast_layers.Mamba2(F, **{**SMALL, **options}, rngs=nnx.Rngs(seed))
    params = nnx.state(made, nnx.Param)
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    leaves = [x + 0.1 * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys, strict=True)]
    nnx.update(made, jax.tree.unflatten(tree, leaves))
    return made


def torch_tensors(made):
    """The layer's parameters as mamba_ssm would hold them."""
    t = {
        "in_proj.weight": made.in_proj.kernel[...].T,
        "out_proj.weight": made.out_proj.kernel[...].T,
        "conv1d.weight": jnp.transpose(made.conv1d.kernel[...], (2, 1, 0)),
        "dt_bias": made.dt_bias[...],
        "A_log": made.A_log[...],
        "D": made.D[...],
    }
    for name in ("in_proj", "conv1d", "out_proj"):
        if getattr(made, name).bias is not None:
            t[f"{name}.bias"] = getattr(made, name).bias[...]
    if made.norm is not None:
        t["norm.weight"] = made.norm.scale[...]
    return t


def oracle(made, u, documents=None):
    o = made.options
    return mamba2_oracle.mixer(
        torch_tensors(made),
        u,
        headdim=o.headdim,
        d_state=o.d_state,
        ngroups=o.ngroups,
        d_ssm=o.d_ssm,
        norm_before_gate=o.norm_before_gate,
        dt_limit=o.dt_limit,
        documents=documents,
    )


def call(made, u, **options):
    graph, state = nnx.split(made)
    return jit(lambda state, u, options: nnx.merge(graph, state)(u, **options))(state, u, options)


close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_what_the_paper_says(name):
    made, u = layer(**OPTIONS[name]), text((2, T, F))
    close(call(made, u), oracle(made, u))


def test_documents_are_what_the_paper_says_for_each():
    made, u = layer(ngroups=2, chunk_size=4), text((2, T, F))
    documents = np.array([[3, 3, 1, 1, 1, 1, 1, 1, 3, 3, 3], [0] * 10 + [1]])
    close(call(made, u, segment_ids=documents), oracle(made, u, documents))
    close(call(made, u, segment_ids=documents[0])[1], oracle(made, u[1:], documents[:1])[0])


def test_a_document_knows_nothing_of_the_others():
    """Bit for bit, in value and gradient: also at the last position before a boundary, and the first after it."""
    made, u = layer(chunk_size=4), text((1, T, F))
    ids = np.array([0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2])
    graph, state = nnx.split(made)

    @jit
    def value_and_grad(u, weights):
        def loss(u):
            y = nnx.merge(graph, state)(u, segment_ids=ids)
            return (y * weights).sum(), y

        (_, y), d_u = jax.value_and_grad(loss, has_aux=True)(u)
        return y, d_u

    for document in range(3):
        here = ids == document
        weights = jnp.where(here[:, None], text((T, F)), 0)
        y, d_u = value_and_grad(u, weights)
        assert not np.asarray(d_u)[0, ~here].any()
        assert np.asarray(d_u)[0, here].any()
        changed_y, changed_d_u = value_and_grad(jnp.where(here[:, None], u, 7.0), weights)
        assert_bitwise_equal((changed_y[0, here], changed_d_u[0, here]), (y[0, here], d_u[0, here]))


# Decoding and state.


class NnxDecoder:
    """A jitted decode step and its cache."""

    def __init__(self, made, shape, dtype=jnp.float32):
        made.init_cache(shape, dtype)
        graph, self.params, self.cache = nnx.split(made, nnx.Param, nnx.Cache)

        def step(params, cache, u):
            merged = nnx.merge(graph, params, cache)
            y = merged(u, decode=True)
            return nnx.state(merged, nnx.Cache), y

        self.step = jit(step)

    def __call__(self, u):
        self.cache, y = self.step(self.params, self.cache, u)
        return y


class LinenDecoder:
    def __init__(self, made, shape):
        module, self.params = linen_twin(made, decode=True)
        self.cache = module.init(jax.random.key(0), jnp.zeros(shape))["cache"]

        def step(params, cache, u):
            y, updated = module.apply({"params": params, "cache": cache}, u, mutable=["cache"])
            return updated["cache"], y

        self.step = jit(step)

    def __call__(self, u):
        self.cache, y = self.step(self.params, self.cache, u)
        return y


def linen_twin(made, **fields):
    """(module, parameters) of the same layer in Linen."""
    o = made.options
    names = ("d_state", "d_conv", "expand", "headdim", "d_ssm", "ngroups", "D_has_hdim", "rmsnorm")
    same = {name: getattr(o, name) for name in (*names, "norm_before_gate", "dt_limit", "chunk_size")}
    biases = {"bias": made.in_proj.use_bias, "conv_bias": made.conv1d.use_bias}
    return linen.Mamba2(o.d_model, **same, **biases, **fields), nnx.to_pure_dict(nnx.state(made, nnx.Param))


@pytest.mark.parametrize(
    ("decoder", "name"),
    [
        (NnxDecoder, "groups"),
        (NnxDecoder, "no norm, biases"),
        (NnxDecoder, "limited steps"),
        (LinenDecoder, "part of the channels"),
    ],
)
def test_prefill_and_steps_are_the_whole_text(decoder, name):
    made, u = layer(**OPTIONS[name]), text((2, T, F))
    decode, pieces = decoder(made, u.shape), (4, 1, 1, 4, 1)
    starts = np.cumsum((0, *pieces))
    got = [decode(u[:, start : start + size]) for start, size in zip(starts, pieces, strict=False)]
    close(jnp.concatenate(got, 1), oracle(made, u), rtol=1e-4)


def test_linen_starts_a_cache_that_was_not_given():
    made, u = layer(), text((2, T, F))
    module, params = linen_twin(made, decode=True)
    first, cache = module.apply({"params": params}, u[:, :5], mutable=["cache"])
    second, _ = module.apply({"params": params, **cache}, u[:, 5:], mutable=["cache"])
    close(jnp.concatenate([first, second], axis=1), call(made, u), rtol=1e-3)
    assert not any(leaf.any() for leaf in jax.tree.leaves(module.init(jax.random.key(0), u)["cache"]))


def test_decoding_where_implicit_promotion_is_forbidden():
    """In bfloat16, with the cache's default of float32."""
    made = fast_layers.Mamba2(F, **SMALL, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    u = text((2, T, F), jnp.bfloat16)
    made.init_cache(u.shape)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        made(u[:, :-1], decode=True)
        assert made(u[:, -1:], decode=True).dtype == jnp.bfloat16


@pytest.mark.parametrize("batch", [(0,), (2, 0)], ids=str)
def test_no_examples(batch):
    made, u = layer(), np.zeros((*batch, T, F), np.float32)
    graph, state = nnx.split(made)

    def loss(state, u):
        y, after = nnx.merge(graph, state)(u, segment_ids=np.zeros((*batch, T), int), return_final_state=True)
        assert y.shape == u.shape
        assert after.ssm.shape == (*batch, 4, 8, 6)
        return y.sum()

    gradients = jit(jax.grad(loss, argnums=(0, 1)))(state, u)
    jax.tree.map(lambda gradient, x: np.testing.assert_array_equal(gradient, np.zeros_like(x)), gradients, (state, u))
    made.init_cache(u.shape)
    assert made(u[..., :1, :], decode=True).shape == (*batch, 1, F)


@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
def test_any_number_of_batch_dims(batch):
    made, u = layer(), text((*batch, T, F))
    want = call(made, u)
    close(want.reshape(-1, T, F), oracle(made, u.reshape(-1, T, F)))
    decode = NnxDecoder(made, u.shape)
    close(jnp.concatenate([decode(u[..., :7, :]), decode(u[..., 7:8, :])], -2), want[..., :8, :], rtol=1e-4)


def test_the_cache_is_float32_unless_said_otherwise():
    made = layer(dtype=jnp.bfloat16)
    for dtype, wanted in ((None, jnp.float32), (jnp.bfloat16, jnp.bfloat16)):
        decode = NnxDecoder(made, (2, 1, F), *([] if dtype is None else [dtype]))
        for size in (3, 1):  # by the chunked form and by the step
            assert decode(text((2, size, F))).dtype == jnp.bfloat16
            assert {x.dtype for x in jax.tree.leaves(decode.cache)} == {jnp.dtype(wanted)}
    assert decode.cache["conv_state"][...].shape == (2, 44, 3)
    assert decode.cache["ssm_state"][...].shape == (2, 4, 8, 6)


@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_state_goes_from_piece_to_piece_with_its_gradient(framework):
    """Two pieces with the state between them are the whole, in value and in every gradient."""
    made, u = layer(chunk_size=4), text((2, T, F))
    graph, state = nnx.split(made)
    module, params = linen_twin(made)

    def apply(params, u, **options):
        if framework == "linen":
            return module.apply({"params": params}, u, **options)
        return nnx.merge(graph, params)(u, **options)

    def whole(params, u):
        return (apply(params, u) ** 2).sum()

    def in_pieces(params, u):
        first, carried = apply(params, u[:, :2], return_final_state=True)
        second, carried = apply(params, u[:, 2:7], initial_state=carried, return_final_state=True)
        third = apply(params, u[:, 7:], initial_state=carried)
        return sum((y**2).sum() for y in (first, second, third))

    params = params if framework == "linen" else state
    want, got = (jit(jax.value_and_grad(f, argnums=(0, 1)))(params, u) for f in (whole, in_pieces))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), got, want)


# Parameters.


@pytest.mark.parametrize("name", ["plain", "part of the channels", "no norm, biases"])
def test_linen_is_nnx(name):
    made, u = layer(**OPTIONS[name]), text((2, T, F))
    module, params = linen_twin(made)
    assert_bitwise_equal(jit(module.apply)({"params": params}, u), call(made, u))
    fresh = module.init(jax.random.key(0), u)["params"]
    assert jax.tree.map(jnp.shape, fresh) == jax.tree.map(jnp.shape, params)
    assert jax.tree.map(jnp.result_type, fresh) == jax.tree.map(jnp.result_type, params)


def test_parameters_by_name_and_shape():
    made = fast_layers.Mamba2(32, rngs=nnx.Rngs(0))  # mamba_ssm's defaults: one head of 64 channels
    shapes = jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(made)))
    assert shapes == {
        "in_proj": {"kernel": (32, 2 * 64 + 2 * 128 + 1)},
        "conv1d": {"kernel": (4, 1, 64 + 2 * 128), "bias": (64 + 2 * 128,)},
        "dt_bias": (1,),
        "A_log": (1,),
        "D": (1,),
        "norm": {"scale": (64,)},
        "out_proj": {"kernel": (64, 32)},
    }


def params_of(framework, d_model=64, **options):
    if framework == "nnx":
        return nnx.to_pure_dict(nnx.state(fast_layers.Mamba2(d_model, **options, rngs=nnx.Rngs(0)), nnx.Param))
    return linen.Mamba2(d_model, **options).init(jax.random.key(0), jnp.zeros((1, 1, d_model)))["params"]


@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_initial_values(framework):
    """Distributions of mamba_ssm: bounds, and means and spreads of uniform and log-uniform draws."""
    options = {"headdim": 1, "expand": 8, "d_state": 64, "bias": True}  # 512 heads
    p = params_of(framework, **options)

    def is_uniform(x, low, high):
        x = np.asarray(x).ravel()
        error = 5 * (high - low) / np.sqrt(12 * x.size)  # five standard errors
        assert low <= x.min() < low + 20 * (high - low) / x.size
        assert high >= x.max() > high - 20 * (high - low) / x.size
        assert abs(x.mean() - (low + high) / 2) < error
        assert abs(x.std() - (high - low) / np.sqrt(12)) < error

    is_uniform(np.exp(p["A_log"]), 1, 16)
    dt = np.logaddexp(0, np.asarray(p["dt_bias"], np.float64))
    is_uniform(np.log(dt), np.log(0.001), np.log(0.1))
    is_uniform(p["in_proj"]["kernel"], -(64**-0.5), 64**-0.5)
    is_uniform(p["out_proj"]["kernel"], -(512**-0.5), 512**-0.5)
    is_uniform(p["conv1d"]["kernel"], -0.5, 0.5)
    is_uniform(p["conv1d"]["bias"], -0.5, 0.5)
    for ones in (p["D"], p["norm"]["scale"]):
        assert (np.asarray(ones) == 1).all()
    for zeros in (p["in_proj"]["bias"], p["out_proj"]["bias"]):
        assert not np.asarray(zeros).any()

    changes = {"n_layer": 4, "conv_init": 0.1, "A_init_range": (2, 3), "dt_min": 0.01, "dt_init_floor": 0.05}
    p = params_of(framework, **options, **changes)
    is_uniform(p["out_proj"]["kernel"], -(512**-0.5) / 2, 512**-0.5 / 2)
    is_uniform(p["in_proj"]["kernel"], -(64**-0.5), 64**-0.5)
    is_uniform(p["conv1d"]["kernel"], -0.1, 0.1)
    is_uniform(np.exp(p["A_log"]), 2, 3)
    dt = np.logaddexp(0, np.asarray(p["dt_bias"], np.float64))
    np.testing.assert_allclose(dt.min(), 0.05, rtol=1e-5)
    assert 0.5 < (dt < 0.0501).mean() < 0.9  # of log-uniform in [0.01, 0.1], 70 % lie below the floor


@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_dtypes(framework):
    """Computation in bfloat16; what is an exponent or a sum stays float32 whatever the parameters are."""
    p = params_of(framework, **SMALL, param_dtype=jnp.bfloat16)
    wide = {"A_log", "dt_bias", "D"}
    for path, leaf in jax.tree.leaves_with_path(p):
        assert leaf.dtype == (jnp.float32 if path[0].key in wide else jnp.bfloat16), path
    made, u = layer(dtype=jnp.bfloat16), text((2, T, F))
    low = call(made, u)
    assert low.dtype == jnp.bfloat16
    want = oracle(made, u)
    assert np.abs(np.asarray(low, np.float64) - want).max() < 0.03 * np.abs(want).max()


def test_nnx_metadata_reaches_the_parameters():
    names = {
        "kernel_metadata": ("in_proj", "kernel"),
        "bias_metadata": ("in_proj", "bias"),
        "conv_kernel_metadata": ("conv1d", "kernel"),
        "conv_bias_metadata": ("conv1d", "bias"),
        "head_metadata": ("A_log",),
        "norm_metadata": ("norm", "scale"),
        "out_kernel_metadata": ("out_proj", "kernel"),
        "out_bias_metadata": ("out_proj", "bias"),
    }
    made = fast_layers.Mamba2(F, **SMALL, bias=True, rngs=nnx.Rngs(0), **{name: {"tag": name} for name in names})
    for name, path in names.items():
        variable = functools.reduce(getattr, path, made)
        assert variable.tag == name
    assert made.D.tag == made.dt_bias.tag == "head_metadata"


def test_linen_partitioning_reaches_the_parameters():
    projection = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
    annotated = {
        "kernel_init": ("embed", "inner"),
        "conv_kernel_init": (None, None, "conv"),
        "out_kernel_init": ("inner", "embed"),
    }
    inits = {name: nn.with_partitioning(projection, axes) for name, axes in annotated.items()}
    module, plain = (linen.Mamba2(F, **SMALL, **fields) for fields in (inits, {}))
    variables = module.init(jax.random.key(0), text((1, 2, F)))
    specs = nn.get_partition_spec(variables)["params"]
    assert specs["in_proj"]["kernel"] == P("embed", "inner")
    assert specs["conv1d"]["kernel"] == P(None, None, "conv")
    assert specs["out_proj"]["kernel"] == P("inner", "embed")
    assert_bitwise_equal(nn.unbox(variables), plain.init(jax.random.key(0), text((1, 2, F))))


@pytest.mark.skipif(len(jax.devices("cpu")) < 4, reason="needs four CPU devices")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["automatic", "explicit"])
def test_sharded_batch(kind):
    made, u = layer(), text((4, T, F))
    ids = jnp.broadcast_to(jnp.arange(T) // 4, (4, T))

    def loss(state, u, ids):
        return (nnx.merge(graph, state)(u, segment_ids=ids) ** 2).sum()

    graph, state = nnx.split(made)
    gradients = jit(jax.value_and_grad(loss, argnums=(0, 1)))
    want = gradients(state, u, ids)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,), devices=jax.devices("cpu")[:4])
    with jax.set_mesh(mesh):
        rows = jax.NamedSharding(mesh, P("data"))
        state = jax.device_put(state, jax.NamedSharding(mesh, P()))
        got = gradients(state, *jax.device_put((u, ids), rows))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4), got, want)
    assert got[1][1].sharding.is_equivalent_to(rows, 3)


@pytest.mark.skipif(len(jax.devices("cpu")) < 4, reason="needs four CPU devices")
@pytest.mark.parametrize("decoder", [NnxDecoder, LinenDecoder])
def test_decoding_an_explicitly_sharded_batch(decoder):
    made, u = layer(), text((4, 6, F))
    want = call(made, u)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices("cpu")[:4])
    with jax.set_mesh(mesh):
        nnx.update(made, jax.device_put(nnx.state(made), jax.NamedSharding(mesh, P())))
        decode = decoder(made, u.shape)
        rows = jax.device_put(u, P("data"))
        got = jnp.concatenate([decode(rows[:, :5]), decode(rows[:, 5:])], axis=1)
        made.init_cache(u.shape)
        made(rows[:, :5], decode=True)  # outside jit
    close(got, want, rtol=1e-3)
    assert got.sharding.is_equivalent_to(jax.NamedSharding(mesh, P("data")), 3)


@pytest.mark.exhaustive
def test_scan_over_layers():
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return fast_layers.Mamba2(F, **SMALL, rngs=rngs)

    stacked, u = make(nnx.Rngs(0)), text((2, T, F))
    graph, state = nnx.split(stacked)
    want = u
    for i in range(3):
        want = want + nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], state))(want)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def forward(u, layer):
        return u + nnx.remat(lambda layer, u: layer(u))(layer, u)

    close(forward(u, stacked), want, rtol=1e-3)


# Mistakes.

BAD_OPTIONS = {
    "size": ({"d_state": 0}, "d_state=0: must be an int, at least 1"),
    "headdim": ({"headdim": 5}, "headdim=5 does not divide the 32 scanned channels"),
    "ngroups": ({"ngroups": 3}, "ngroups=3 does not divide the 4 heads"),
    "d_ssm": ({"d_ssm": 40}, r"d_ssm=40 exceeds expand \* d_model = 32"),
    "limits": ({"dt_limit": (1.0, 0.0)}, r"dt_limit=\(1.0, 0.0\): must be a pair"),
    "chunk": ({"chunk_size": 0}, "chunk_size=0: must be an int >= 1"),
    "backend": ({"implementation": "triton"}, "implementation 'triton' is unknown; .*hopper, .*xla, reference"),
    "dt": ({"dt_min": 0.2}, "dt_min=0.2, dt_max=0.1: step sizes need 0 < dt_min <= dt_max"),
    "floor": ({"dt_init_floor": 0}, "dt_init_floor=0: must be a number above 0"),
    "text for dt": ({"dt_max": "x"}, "dt_min=0.001, dt_max='x': step sizes need .* two numbers"),
    "endless dt": ({"dt_max": float("inf")}, "dt_max=inf: step sizes need"),
    "no floor": ({"dt_init_floor": None}, "dt_init_floor=None: must be a number above 0"),
    "rates": ({"A_init_range": (0, 1)}, r"A_init_range=\(0, 1\): rates need a pair of numbers .*0 < low <= high"),
    "one rate": ({"A_init_range": 3}, "A_init_range=3: rates need a pair"),
    "three rates": ({"A_init_range": (1, 2, 3)}, r"A_init_range=\(1, 2, 3\): rates need a pair"),
    "text for rates": ({"A_init_range": ("1", 2)}, r"A_init_range=\('1', 2\): rates need a pair"),
    "no layers": ({"n_layer": 0}, "n_layer=0: must be an int, at least 1"),
    "layers below none": ({"n_layer": -1}, "n_layer=-1: must be an int, at least 1"),
    "half a layer": ({"n_layer": 0.5}, "n_layer=0.5: must be an int, at least 1"),
    "bound below 0": ({"conv_init": -1}, "conv_init=-1: must be a number, 0 or more, or None"),
    "text for a bound": ({"conv_init": "x"}, "conv_init='x': must be a number, 0 or more, or None"),
    **{
        name: ({name: wrong}, f"{name}={wrong!r}: must be True or False")
        for name, wrong in {
            "bias": "no",
            "conv_bias": None,
            "rmsnorm": "no",
            "D_has_hdim": 2,
            "norm_before_gate": 0,
            "decode": "no",
        }.items()
    },
}


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_wrong_options(framework, options, message):
    with pytest.raises(ValueError, match=message):
        params_of(framework, F, **{**SMALL, **options})


ZEROS = np.zeros((2, T, F), np.float32)
STATE = fast_layers.Mamba2State(np.zeros((2, 44, 3), np.float32), np.zeros((2, 4, 8, 6), np.float32))
BAD_CALLS = {
    "features": ({"u": ZEROS[..., :5]}, r"u must be \[batch.., length, d_model\] with d_model=16, got \(2, 11, 5\)"),
    "text": ({"u": "text"}, "u is 'text': must be an array"),
    "nothing": ({"u": None}, "u is None: must be an array"),
    "complex": ({"u": ZEROS.astype(complex)}, "u has dtype complex64: must be real; pass u.real"),
    "flag": ({"return_final_state": 1}, "return_final_state=1: must be True or False"),
    "no flag to decode": ({"decode": "no"}, "decode='no': must be True or False"),
    "state of nothing": ({"initial_state": (None, None)}, "initial_state: conv is None: must be an array"),
    "half a state": ({"initial_state": (STATE.conv, "text")}, "initial_state: ssm is 'text': must be an array"),
    "segment ids": ({"segment_ids": np.zeros((2, 3), int)}, r"segment_ids must have shape \(2, 11\) or \(11,\), got"),
    "segment ids of 64 bits": (
        {"segment_ids": np.array([0] * 5 + [2**32] * 6)},
        r"segment_ids must fit in int32, got 4294967296; number them: np.unique",
    ),
    "segment ids of 64 bits for each row": (
        {"segment_ids": np.full((2, T), 2**40, np.uint64)},
        "segment_ids must fit in int32, got 1099511627776",
    ),
    "segment ids in a list": ({"segment_ids": [0] * 10 + [2**40]}, "segment_ids must fit in int32, got 1099511627776"),
    "text for segment ids": ({"segment_ids": "x"}, "segment_ids is 'x': must be integers"),
    "state": (
        {"initial_state": (STATE.conv[..., :2], STATE.ssm)},
        r"initial_state: .*\(2, 44, 3\) and \(2, 4, 8, 6\) .*got \(2, 44, 2\)",
    ),
    "length 0": ({"u": ZEROS[:, :0]}, r"u has length 0, shape \(2, 0, 16\): there is nothing to mix"),
    "documents in a cache": ({"decode": True, "segment_ids": np.zeros(T, int)}, "segment_ids with decode=True"),
    "state and cache": ({"decode": True, "initial_state": STATE}, "initial_state with decode=True"),
}


@pytest.mark.parametrize(("changes", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_wrong_calls(framework, changes, message):
    arguments = {"u": ZEROS, **changes}
    decode = arguments.pop("decode", False)
    if framework == "nnx":
        misused = functools.partial(layer(), **arguments, decode=decode)
    else:
        misused = functools.partial(linen.Mamba2(F, **SMALL, decode=decode).init, jax.random.key(0), **arguments)
    with pytest.raises(ValueError, match=message):
        misused()


def test_what_becomes_an_array_is_taken():
    """Lists, and integers, which the projection promotes; in NNX as in Linen."""
    made, u = layer(), np.arange(3 * F).reshape(3, F) % 5
    module, params = linen_twin(made)
    want = made(u.astype(np.float32))
    for given in (u, u.tolist(), u.astype(float).tolist()):
        assert_bitwise_equal(made(given), want)
        assert_bitwise_equal(module.apply({"params": params}, given), want)


def test_wrong_caches():
    made = layer()
    with pytest.raises(ValueError, match=r"no cache to decode with: call init_cache\(u.shape\) first"):
        made(ZEROS, decode=True)
    with pytest.raises(ValueError, match=r"input_shape must be \(\*batch, length, d_model\) with d_model=16"):
        made.init_cache((2, T, 5))
    for given in (jnp.ones((3, T, F)), F):
        with pytest.raises(ValueError, match=r"with d_model=16, such as u.shape, got (ArrayImpl|16)"):
            made.init_cache(given)
    for dtype in (jnp.int32, jnp.float8_e4m3fn):
        with pytest.raises(ValueError, match=f"dtype={jnp.dtype(dtype).name}: the cache must be float16"):
            made.init_cache((3, T, F), dtype)
    made.init_cache((3, T, F))
    with pytest.raises(ValueError, match=r"the cache: .* for a batch of \(2,\), got \(3, 44, 3\)"):
        made(ZEROS, decode=True)


def test_explain_names_all_three_ops():
    explained = str(fast_layers.explain(layer(), ZEROS))
    assert [line.split(":")[0] for line in explained.splitlines() if not line.startswith(" ")] == [
        "causal_conv1d",
        "ssd",
        "gated_rms_norm",
    ]


@pytest.mark.exhaustive
def test_the_page_runs():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "mamba2.md").read_text()
    names = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block, "mamba2.md", "exec"), names)
    whole = names["layer"](names["u"])
    close(jnp.concatenate([names["y1"], names["y2"]], 1), whole, rtol=1e-3, atol=1e-5)
    close(jnp.concatenate([names["prompt"], names["token"]], 1), whole[:, :61], rtol=1e-3, atol=1e-5)


def test_export_with_symbolic_batch_and_length():
    """The function that is exported knows neither."""
    graph, state = nnx.split(layer(ngroups=2))

    def apply(state, u, ids):
        return nnx.merge(graph, state)(u, segment_ids=ids)

    b, t = jax.export.symbolic_shape("b, t")
    shapes = jax.ShapeDtypeStruct((b, t, F), jnp.float32), jax.ShapeDtypeStruct((b, t), jnp.int32)
    exported = jax.export.export(jax.jit(apply))(state, *shapes)
    u, ids = text((2, T, F)), jnp.broadcast_to(jnp.arange(T) // 2, (2, T))
    close(exported.call(state, u, ids), jit(apply)(state, u, ids), rtol=1e-3, atol=1e-5)

"""FusedMLP, NNX and Linen: parameters, values, gradients and checkpoints of MLPs written out by hand."""

from __future__ import annotations

import functools
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from closeness import assert_bitwise_equal, assert_trees_close
from flax import nnx
from jax.sharding import PartitionSpec as P

import fast_layers
from fast_layers import linen

IN, HIDDEN, OUT = 16, 40, 12
X = jax.random.normal(jax.random.key(0), (2, 5, IN))
FUNCTIONS = {"gelu_tanh": nnx.gelu, "silu": nnx.silu, "relu": nnx.relu, "sigmoid": nnx.sigmoid}
KINDS = {
    "gelu": {"activation": "gelu_tanh"},
    "relu without bias": {"activation": "relu", "use_bias": False},
    "swiglu": {"activation": "silu", "gated": True, "use_bias": False},
    "glu with bias": {"activation": "sigmoid", "gated": True},
}


class HandWritten(nnx.Module):
    """The layers under names of the user's own."""

    def __init__(self, activation, gated=False, dropout_rate=0.0, *, rngs, **options):
        linear = functools.partial(nnx.Linear, rngs=rngs, **options)
        self.function = FUNCTIONS[activation]
        self.wg = linear(IN, HIDDEN) if gated else nnx.data(None)
        self.wi = linear(IN, HIDDEN)
        self.wo = linear(HIDDEN, OUT)
        self.dropout = nnx.Dropout(dropout_rate, rngs=rngs) if dropout_rate else nnx.data(None)

    def __call__(self, x):
        h = self.wi(x)
        h = self.function(h) if self.wg is None else self.function(self.wg(x)) * h
        out = self.wo(h)
        return out if self.dropout is None else self.dropout(out)


NAMES = {"wi": "up", "wg": "gate", "wo": "down"}


def _fused(rngs=None, **options):
    return fast_layers.FusedMLP(IN, HIDDEN, OUT, rngs=rngs or nnx.Rngs(0), **options)


def _params(model):
    """By our names."""
    pure = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return {NAMES.get(name, name): layer for name, layer in pure.items()}


def _outputs_and_gradients(model, x):
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, x):
        out = nnx.merge(graph, params, rest)(x)
        return jnp.sum(out * (1 + jnp.arange(out.size).reshape(out.shape) % 7).astype(out.dtype)), out

    (params, x), out = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(params, x)
    pure = nnx.to_pure_dict(params)
    return out, {NAMES.get(name, name): layer for name, layer in pure.items()}, x


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_and_initial_values_nnx(kind):
    ours, theirs = _fused(**KINDS[kind]), HandWritten(**KINDS[kind], rngs=nnx.Rngs(0))
    assert_bitwise_equal(_params(ours), _params(theirs))
    assert set(nnx.to_pure_dict(nnx.state(ours))) == set(_params(ours)), "without dropout there is no other state"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_values_and_gradients_nnx(kind, dtype):
    options = {**KINDS[kind], "dtype": dtype, "bias_init": nnx.initializers.normal(1.0)}
    ours, theirs = _fused(**options), HandWritten(**options, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (64, IN), dtype)
    got, yardstick = (_outputs_and_gradients(model, x) for model in (ours, theirs))
    with jax.enable_x64(True):
        exact = HandWritten(**{**options, "dtype": None, "param_dtype": jnp.float64}, rngs=nnx.Rngs(0))
        # As rounded for the computation: of that both are innocent.
        params = jax.tree.map(lambda a: a.astype(x.dtype).astype(jnp.float64), nnx.state(theirs, nnx.Param))
        nnx.update(exact, params)
        oracle = _outputs_and_gradients(exact, x.astype(jnp.float64))
    assert_trees_close(got, oracle, yardstick)


@pytest.mark.parametrize("kind", KINDS)
def test_linen_is_the_same(kind):
    options = KINDS[kind]

    class ByHand(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = functools.partial(nn.Dense, use_bias=options.get("use_bias", True))
            h = dense(HIDDEN, name="up")(x)
            function = FUNCTIONS[options["activation"]]
            h = function(dense(HIDDEN, name="gate")(x)) * h if options.get("gated") else function(h)
            return dense(OUT, name="down")(h)

    ours, theirs = linen.FusedMLP(HIDDEN, OUT, **options), ByHand()
    variables = ours.init(jax.random.key(0), X)
    assert_bitwise_equal(variables, theirs.init(jax.random.key(0), X))

    def run(module):
        return jax.value_and_grad(lambda v, x: (module.apply(v, x) ** 2).sum(), argnums=(0, 1))(variables, X)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), run(ours), run(theirs))
    assert linen.FusedMLP(HIDDEN).init_with_output(jax.random.key(0), X)[0].shape == X.shape


def test_linen_and_nnx_agree():
    options = KINDS["swiglu"]
    module = linen.FusedMLP(HIDDEN, OUT, **options)
    variables = module.init(jax.random.key(0), X)
    model = _fused(**options)
    state = nnx.state(model, nnx.Param)
    nnx.replace_by_pure_dict(state, variables["params"])
    nnx.update(model, state)
    assert_bitwise_equal(model(X), module.apply(variables, X))


def test_a_hand_written_checkpoint_loads_by_renaming(tmp_path):
    """As docs/mlp.md says."""
    theirs = HandWritten(**KINDS["glu with bias"], rngs=nnx.Rngs(3))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "mlp", nnx.to_pure_dict(nnx.state(theirs, nnx.Param)))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "mlp")
    ours = _fused(**KINDS["glu with bias"])
    state = nnx.state(ours, nnx.Param)
    nnx.replace_by_pure_dict(state, {NAMES[name]: layer for name, layer in restored.items()})
    nnx.update(ours, state)
    assert_bitwise_equal(_params(ours), _params(theirs))
    np.testing.assert_allclose(ours(X), theirs(X), rtol=1e-5, atol=1e-6)


def test_metadata_and_initialisers_reach_the_parameters():
    make = functools.partial(
        _fused,
        gated=True,
        kernel_init=nnx.initializers.constant(1.0),
        bias_init=nnx.initializers.constant(2.0),
        down_kernel_init=nnx.initializers.constant(3.0),
        down_bias_init=nnx.initializers.constant(4.0),
        kernel_metadata={"out_sharding": (None, "model")},
        bias_metadata={"out_sharding": ("model",)},
        down_kernel_metadata={"out_sharding": ("model", None)},
        down_bias_metadata={"note": "replicated"},
    )
    with jax.set_mesh(jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))):
        model = make()
    for layer in (model.up, model.gate):
        assert layer.kernel.get_metadata("out_sharding") == (None, "model")
        assert layer.bias.get_metadata("out_sharding") == ("model",)
        assert (layer.kernel[0, 0], layer.bias[0]) == (1, 2)
    assert model.down.kernel.get_metadata("out_sharding") == ("model", None)
    assert model.down.bias.get_metadata("note") == "replicated"
    assert (model.down.kernel[0, 0], model.down.bias[0]) == (3, 4)
    specs = nnx.get_partition_spec(nnx.state(model))
    assert specs["up"]["kernel"] == P(None, "model")
    assert specs["down"]["kernel"] == P("model", None)


def test_linen_partitioning_metadata():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
    down = nn.with_partitioning(nn.initializers.lecun_normal(), ("mlp", "embed"))
    variables = linen.FusedMLP(HIDDEN, kernel_init=init, down_kernel_init=down).init(jax.random.key(0), X)
    specs = nn.get_partition_spec(variables)["params"]
    assert (specs["up"]["kernel"], specs["down"]["kernel"]) == (P("embed", "mlp"), P("mlp", "embed"))


class TestDropout:
    def test_nnx_as_a_dropout_layer_behind(self):
        rate = {"dropout_rate": 0.5, **KINDS["gelu"]}
        ours, theirs = (make(rngs=nnx.Rngs(params=0, dropout=1), **rate) for make in (_fused, HandWritten))
        dropped = ours(X)
        np.testing.assert_allclose(dropped, theirs(X), rtol=1e-5, atol=1e-6)
        assert 0.3 < (dropped == 0).mean() < 0.7
        assert not np.array_equal(ours(X), dropped)
        whole = _fused(nnx.Rngs(0), **KINDS["gelu"])(X)
        assert_bitwise_equal(ours(X, deterministic=True), whole)
        ours.eval()
        assert_bitwise_equal(ours(X), whole)
        assert_bitwise_equal(*(ours(X, deterministic=False, rngs=nnx.Rngs(dropout=7)) for _ in range(2)))

    def test_linen(self):
        module = linen.FusedMLP(HIDDEN, OUT, dropout_rate=0.5)
        variables = module.init(jax.random.key(0), X, deterministic=True)
        whole = module.apply(variables, X, deterministic=True)
        dropped = module.apply(variables, X, deterministic=False, rngs={"dropout": jax.random.key(1)})
        kept = dropped != 0
        assert 0.3 < kept.mean() < 0.7
        np.testing.assert_allclose(dropped[kept], 2 * whole[kept], rtol=1e-6)


def test_nnx_remat_of_the_method():
    model = _fused(nnx.Rngs(params=0, dropout=1), **KINDS["swiglu"])

    def loss(call):
        return nnx.jit(nnx.grad(lambda model, x: (call(model, x) ** 2).sum()))(model, X)

    got, want = loss(nnx.remat(fast_layers.FusedMLP.__call__)), loss(fast_layers.FusedMLP.__call__)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


def test_dtypes():
    assert _fused(dtype=jnp.bfloat16)(X).dtype == jnp.bfloat16
    assert _fused(param_dtype=jnp.bfloat16)(X).dtype == jnp.float32
    assert _fused(param_dtype=jnp.bfloat16)(X.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    assert linen.FusedMLP(HIDDEN, dtype=jnp.float16).init_with_output(jax.random.key(0), X)[0].dtype == jnp.float16

    def in_half(arrays, dtype):
        return tuple(None if a is None else a.astype(jnp.float16) for a in arrays)

    assert _fused(promote_dtype=in_half)(X).dtype == jnp.float16


def test_options_reach_the_op():
    model = _fused(activation="swish", gated=True, save="inputs", precision="highest", implementation="xla")
    (plan,) = fast_layers.explain(model, X).plans
    assert (plan.problem.activation, plan.problem.gated, plan.problem.save) == ("silu", True, "inputs")
    assert plan.problem.precision == "highest"
    assert plan.forward[0].backend.name == "xla"
    module = linen.FusedMLP(HIDDEN, save="inputs", implementation="reference")
    (plan,) = fast_layers.explain(lambda x: module.init(jax.random.key(0), x), X).plans
    assert (plan.problem.save, plan.forward[0].backend.name) == ("inputs", "reference")


def test_models_built_alike_have_equal_graph_definitions():
    first, second = (nnx.graphdef(_fused(gated=True, dropout_rate=0.1)) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert_bitwise_equal(pickle.loads(pickle.dumps(_fused()))(X), _fused()(X))


def test_errors():
    with pytest.raises(ValueError, match="activation='tanh' is unknown; take a name out of identity, relu"):
        _fused(activation="tanh")
    with pytest.raises(ValueError, match="x has 3 features, w_up takes 16"):
        _fused()(X[..., :3])
    model = _fused()
    model.up = nnx.LoRALinear(IN, HIDDEN, lora_rank=2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="up is a LoRALinear: FusedMLP computes with the kernels"):
        model(X)


WRONG_SETTINGS = {
    "dropout_rate": (1.5, "dropout_rate=1.5: must be a number in \\[0, 1\\)"),
    "dropout_rate as text": ("x", "dropout_rate='x': must be a number in \\[0, 1\\)"),
    "dropout_rate of NaN": (float("nan"), "dropout_rate=nan: must be a number in \\[0, 1\\)"),
    "gated": ("yes", "gated='yes': must be True or False"),
    "use_bias": ("no", "use_bias='no': must be True or False"),
    "save": ("everything", "save='everything': must be 'pre_activation' or 'inputs'"),
    "implementation": ("cublas", "mlp: implementation 'cublas' is unknown; the backends of this op are hopper"),
    "hidden_features": (0, "hidden_features=0: must be an int, at least 1"),
    "out_features": (8.0, "out_features=8.0: must be an int, at least 1"),
}


@pytest.mark.parametrize("name", WRONG_SETTINGS)
def test_wrong_settings_of_either_kind(name):
    value, message = WRONG_SETTINGS[name]
    settings = {"hidden_features": HIDDEN, name.split()[0]: value}
    with pytest.raises(ValueError, match=message):
        fast_layers.FusedMLP(IN, **settings, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=message):
        linen.FusedMLP(**settings).init(jax.random.key(0), X)


def test_wrong_sizes_and_inputs():
    with pytest.raises(ValueError, match="in_features=-8: must be an int, at least 1"):
        fast_layers.FusedMLP(-8, HIDDEN, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"x must be \[leading dims.., in_features\], got shape \(\)"):
        linen.FusedMLP(HIDDEN).init(jax.random.key(0), jnp.float32(1))


@pytest.mark.parametrize("own", [{"dtype": jnp.bfloat16}, {"precision": "highest"}, {"dot_general": lambda *args: 0}])
def test_settings_of_a_linear_layer_put_in_are_not_dropped(own):
    model = _fused()
    model.up = nnx.Linear(IN, HIDDEN, rngs=nnx.Rngs(0), **own)
    with pytest.raises(ValueError, match=rf"up.{next(iter(own))} is .* FusedMLP computes with"):
        model(X)

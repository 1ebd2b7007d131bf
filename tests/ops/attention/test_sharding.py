"""Batch and heads over eight devices: the unsharded results, and no device fetches another's rows."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from selection import some_each_run

import fast_layers
from fast_layers import masks
from ops.attention.cases import TESTED

B, T, N, K, H = 8, 16, 8, 2, 4
GATHERING = re.compile(r"= .*\b(all-gather|all-to-all|collective-permute|ragged-all-to-all|reduce-scatter)[\w-]*\(.*")
REDUCING = re.compile(r"= .*\ball-reduce[\w-]*\(.*")
# The hull of the mask's intervals over the examples: two integers per tile, which cost a message but no bandwidth. On a
# CPU a single tile of queries adds the range of keys that all of them see.
HULL = re.compile(r"= \(?(s32\[\d{0,2}\]\S*(, )?)+\)? all-reduce")

pytestmark = [
    pytest.mark.skipif(len(jax.devices("cpu")) < 8, reason="needs eight CPU devices"),
    pytest.mark.parametrize("implementation", TESTED),
]


def _normal(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).normal(size=shape).astype(np.float32)


def _ints(low, high, shape):
    return np.random.default_rng(shape).integers(low, high, shape).astype(np.int32)


def _mesh(shape, kind):
    names = ("data", "model")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape), devices=jax.devices("cpu")[:8])


# name: (differentiable operands besides q, k, v; other arrays; static options), each array with its spec.
# "D" and "M" stand for the mesh axes of batch and heads.
CALLS = {
    "causal": ({}, {}, {"is_causal": True}),
    "full": ({}, {}, {}),
    "segments and window": (
        {},
        {"segment_ids": (_ints(-1, 2, (B, T)), P("D"))},
        {"is_causal": True, "local_window_size": (5, 0)},
    ),
    "shared segments": ({}, {"segment_ids": (_ints(-1, 2, (T,)), P())}, {}),
    "lengths and offset": (
        {},
        {
            "query_seq_lengths": (_ints(0, T + 1, (B,)), P("D")),
            "key_value_seq_lengths": (_ints(0, T + 1, (B,))[::-1], P("D")),
            "q_offset": (_ints(-2, 5, (B,)), P("D")),
        },
        {"is_causal": True},
    ),
    "mask of examples and heads": ({}, {"mask": (_normal(B, N, T, T) < 0.5, P("D", "M"))}, {}),
    "mask of rows": ({}, {"mask": (_normal(1, 1, T, T) < 0.5, P())}, {}),
    "bias of heads": ({"bias": (_normal(1, N, T, T), P(None, "M"))}, {}, {"is_causal": True}),
    "bias of examples": ({"bias": (_normal(B, 1, 1, T), P("D"))}, {}, {}),
    "sinks and softcap": ({"sinks": (_normal(N), P("M"))}, {}, {"softcap": 2.0}),
    "dropout": ({}, {}, {"dropout_rate": 0.4}),
    "dropout of all alike": ({}, {}, {"dropout_rate": 0.4, "broadcast_dropout": True}),
}
LEARNED = {"bias of heads", "bias of examples", "sinks and softcap"}
FAST = {"xla_backend_optimization_level": 0}
LAYOUTS = {"batch": (8,), "batch and heads": (4, 2)}


def _spec(spec, mesh):
    names = {"D": "data", "M": "model" if "model" in mesh.axis_names else None, None: None}
    return P(*(names[entry] for entry in spec))


def _call(implementation, options, operands, arrays, d_out, d_lse):
    """((out, lse), gradients)."""

    def op(operands):
        qkv = (operands[name] for name in ("query", "key", "value"))
        learned = {name: x for name, x in operands.items() if name not in ("query", "key", "value")}
        rng = {"dropout_rng": jax.random.key(3)} if "dropout_rate" in options else {}
        return fast_layers.dot_product_attention(
            *qkv, **learned, **arrays, **rng, return_residual=True, implementation=implementation, **options
        )

    results, pull = jax.vjp(op, operands)
    return results, pull((d_out, jnp.where(results[1] > -jnp.inf, d_lse, 0)))[0]


def _arguments(name, mesh=None, kv_spec=P("D", None, "M"), kv_heads=K):
    """(operands, arrays, d_out, d_lse), on the mesh if one is given."""
    learned, arrays, _ = CALLS[name]
    rows = P("D", None, "M")
    tree = (
        {
            "query": (_normal(B, T, N, H), rows),
            "key": (_normal(B, T, kv_heads, H, seed=1), kv_spec),
            "value": (_normal(B, T, kv_heads, 3, seed=2), kv_spec),
            **learned,
        },
        arrays,
        (_normal(B, T, N, 3, seed=3), rows),
        (_normal(B, T, N, seed=4), rows),
    )

    def place(pair):
        x, spec = pair
        return x if mesh is None else jax.device_put(x, NamedSharding(mesh, _spec(spec, mesh)))

    return jax.tree.map(place, tree, is_leaf=lambda x: isinstance(x, tuple) and isinstance(x[-1], P))


@functools.cache
def _unsharded(name, kv_heads=K):
    call = functools.partial(_call, "reference", CALLS[name][2])
    return jax.tree.map(np.asarray, jax.jit(call)(*_arguments(name, kv_heads=kv_heads)))


def _assert_near(got, want):
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5, err_msg=jax.tree_util.keystr(path))


def _assert_no_gathering(compiled, *, reductions: str = ""):
    """No rows travel; and no sums either, but of `reductions`: "hull" or "learned" (a gradient that shards share)."""
    text = compiled.as_text()
    found = [line.group(0)[:200] for line in GATHERING.finditer(text)]
    assert not found, found
    summed = [line.group(0)[:200] for line in REDUCING.finditer(text)]
    if reductions == "hull":
        summed = [line for line in summed if not HULL.match(line)]
    assert not summed or reductions == "learned", summed


def _assert_layout(array, mesh, spec):
    assert array.sharding.is_equivalent_to(NamedSharding(mesh, _spec(spec, mesh)), array.ndim), array.sharding


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["automatic", "explicit"])
@pytest.mark.parametrize("layout", some_each_run(LAYOUTS, {"batch and heads"}))
@pytest.mark.parametrize("name", CALLS)
def test_forward_and_backward(implementation, name, layout, kind):
    mesh = _mesh(LAYOUTS[layout], kind)
    with jax.set_mesh(mesh):
        arguments = _arguments(name, mesh)
        compiled = jax.jit(functools.partial(_call, implementation, CALLS[name][2])).lower(*arguments).compile(FAST)
        got = compiled(*arguments)
    _assert_near(got, _unsharded(name))
    intervals = "hull" if kind == AxisType.Auto and name in ("segments and window", "lengths and offset") else ""
    _assert_no_gathering(compiled, reductions="learned" if name in LEARNED else intervals)
    (out, lse), grads = got
    for x in (out, lse, grads["query"], grads["key"], grads["value"]):
        _assert_layout(x, mesh, P("D", None, "M"))


def test_the_checks_see_what_they_look_for(implementation):
    """Rows gathered, and rows summed, in the text that this version of XLA prints."""
    mesh = _mesh((8,), AxisType.Auto)
    x = jax.device_put(_normal(B, T, K, H), NamedSharding(mesh, P("data")))
    whole = NamedSharding(mesh, P())
    with pytest.raises(AssertionError, match="all-gather"):
        _assert_no_gathering(jax.jit(lambda x: x * 2, out_shardings=whole).lower(x).compile(), reductions="learned")
    summed = jax.jit(lambda x: x.sum(0), out_shardings=whole).lower(x).compile()
    _assert_no_gathering(summed, reductions="learned")
    for reductions in ("", "hull"):
        with pytest.raises(AssertionError, match="all-reduce"):
            _assert_no_gathering(summed, reductions=reductions)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", [name for name in CALLS if "dropout" not in name])
def test_inside_shard_map(implementation, name, check_vma):
    """By hand: forward inside, gradients through it; operands that all shards share get summed gradients."""
    mesh = _mesh((4, 2), AxisType.Auto)
    learned, arrays, options = CALLS[name]
    rows = _spec(P("D", None, "M"), mesh)
    in_specs = (
        {
            **dict.fromkeys(("query", "key", "value"), rows),
            **{n: _spec(s, mesh) for n, (_, s) in learned.items()},
        },
        {n: _spec(s, mesh) for n, (_, s) in arrays.items()},
    )

    def on_shard(operands, arrays):
        return fast_layers.dot_product_attention(
            **operands, **arrays, **options, return_residual=True, implementation=implementation
        )

    attend = jax.shard_map(on_shard, mesh=mesh, in_specs=in_specs, out_specs=(rows, rows), check_vma=check_vma)

    def call(operands, arrays, d_out, d_lse):
        results, pull = jax.vjp(lambda operands: attend(operands, arrays), operands)
        return results, pull((d_out, jnp.where(results[1] > -jnp.inf, d_lse, 0)))[0]

    compiled = jax.jit(call).lower(*_arguments(name, mesh)).compile(FAST)
    _assert_near(compiled(*_arguments(name, mesh)), _unsharded(name))
    _assert_no_gathering(compiled, reductions="learned" if name in LEARNED else "")


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradient_taken_inside_shard_map(implementation, check_vma):
    """A data-parallel step: each shard its own loss and gradient, and a weight that all share."""
    mesh = _mesh((8,), AxisType.Auto)
    x, weight = _normal(B, T, K, H), _normal(H, H, seed=1)

    def loss(weight, x):
        out = fast_layers.dot_product_attention(x @ weight, x, x, is_causal=True, implementation=implementation)
        return (out**2).sum()

    def step(weight, x):
        if check_vma:
            # The types know that all shards share the weight, and the gradient comes back summed.
            return jax.grad(loss)(weight, x)
        return jax.lax.psum(jax.grad(loss)(weight, x), "data")

    stepped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma)
    _assert_near(jax.jit(stepped)(weight, x), jax.grad(loss)(weight, x))


@pytest.mark.parametrize(
    "name", some_each_run(["causal", "lengths and offset", "bias of heads", "dropout"], {"dropout"})
)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_fewer_key_heads_than_head_shards(implementation, name, kv_heads):
    """Explicit mode: keys and values are replicated over the head axis, and each shard reads the head it needs."""
    mesh = _mesh((2, 4), AxisType.Explicit)
    with jax.set_mesh(mesh):
        arguments = _arguments(name, mesh, kv_spec=P("D"), kv_heads=kv_heads)
        compiled = jax.jit(functools.partial(_call, implementation, CALLS[name][2])).lower(*arguments).compile(FAST)
        got = compiled(*arguments)
    _assert_near(got, _unsharded(name, kv_heads))
    _assert_no_gathering(compiled, reductions="learned")
    _assert_layout(got[1]["key"], mesh, P("D"))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["automatic", "explicit"])
@pytest.mark.parametrize("broadcast", [False, True])
def test_dropout_bits_do_not_depend_on_the_layout(implementation, kind, broadcast):
    """With one-hot values the output is the row of kept weights: zeros stand at the same places, bit for bit."""
    query, key = _normal(B, T, N, H), _normal(B, T, K, H, seed=1)
    value = np.broadcast_to(np.eye(T, dtype=np.float32)[None, :, None], (B, T, K, T))

    def weights(*qkv):
        return fast_layers.dot_product_attention(
            *qkv,
            dropout_rate=0.5,
            dropout_rng=jax.random.key(1),
            broadcast_dropout=broadcast,
            implementation=implementation,
        )

    want = np.asarray(jax.jit(weights)(query, key, value))
    mesh = _mesh((4, 2), kind)
    with jax.set_mesh(mesh):
        placed = jax.device_put((query, key, value), NamedSharding(mesh, P("data", None, "model")))
        got = np.asarray(jax.jit(weights)(*placed))
    np.testing.assert_array_equal(got == 0, want == 0)
    assert 0.4 < (got == 0).mean() < 0.6


def test_explicit_without_batch_or_with_two_batch_dims(implementation):
    mesh = _mesh((4, 2), AxisType.Explicit)
    attend = jax.jit(
        functools.partial(fast_layers.dot_product_attention, is_causal=True, implementation=implementation)
    )
    heads_only, two_dims = _normal(T, N, H), _normal(4, 2, T, N, H)
    with jax.set_mesh(mesh):
        got = attend(*[jax.device_put(heads_only, NamedSharding(mesh, P(None, "model")))] * 3)
        _assert_near(got, attend(*[heads_only] * 3))
        got = attend(*[jax.device_put(two_dims, NamedSharding(mesh, P("data", None, None, "model")))] * 3)
        _assert_near(got, attend(*[two_dims] * 3))


def test_explicit_vmap(implementation):
    """A mapped axis that is sharded, and one that is not."""
    mesh = _mesh((4, 2), AxisType.Explicit)
    x = _normal(2, B, T, N, H)
    attend = functools.partial(fast_layers.dot_product_attention, is_causal=True, implementation=implementation)
    want = jax.jit(jax.vmap(attend))(x, x, x)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, P(None, "data", None, "model")))
        _assert_near(jax.jit(jax.vmap(attend))(placed, placed, placed), want)


def test_explicit_structured_mask_object(implementation):
    mesh = _mesh((4, 2), AxisType.Explicit)
    x, ids, lengths = _normal(B, T, N, H), _ints(-1, 2, (B, T)), _ints(1, T + 1, (B,))
    attend = jax.jit(
        lambda x, mask: fast_layers.dot_product_attention(x, x, x, mask=mask, implementation=implementation)
    )
    mask = masks.Causal() & masks.Segments(ids) & masks.Prefix(lengths) & masks.Segments(ids // 2)
    want = attend(x, mask)
    with jax.set_mesh(mesh):
        placed = jax.device_put(mask, NamedSharding(mesh, P("data")))
        got = attend(jax.device_put(x, NamedSharding(mesh, P("data", None, "model"))), placed)
    _assert_near(got, want)


REFUSED = {
    "length": (
        {"query": P("data", "model")},
        r"query is sharded along length over mesh axes \('model',\).*reshard",
    ),
    "depth": ({"key": P("data", None, None, "model")}, r"key is sharded along depth over mesh axes"),
    "batch of value": ({"value": P("model")}, r"value is sharded along batch over mesh axes .*query over"),
}


@pytest.mark.parametrize(("specs", "message"), REFUSED.values(), ids=REFUSED)
def test_layouts_that_need_other_rows_are_refused(implementation, specs, message):
    mesh = _mesh((4, 2), AxisType.Explicit)
    x = _normal(B, T, N, H)
    with jax.set_mesh(mesh):
        specs = {name: specs.get(name, P("data")) for name in ("query", "key", "value")}
        qkv = {name: jax.device_put(x, NamedSharding(mesh, spec)) for name, spec in specs.items()}
        with pytest.raises(ValueError, match=message):
            fast_layers.dot_product_attention(**qkv, implementation=implementation)


def test_outside_a_mesh_context(implementation):
    """The mesh is known from the arrays."""
    x, rows = _normal(B, T, N, H), NamedSharding(_mesh((4, 2), AxisType.Explicit), P("data"))
    attend = jax.jit(lambda x: fast_layers.dot_product_attention(x, x, x, implementation=implementation))
    got = attend(jax.device_put(x, rows))
    np.testing.assert_allclose(got, attend(x), rtol=1e-5, atol=1e-5)
    assert got.sharding.is_equivalent_to(rows, 4)


def test_key_heads_that_fit_no_shards_are_refused(implementation):
    mesh = _mesh((2, 4), AxisType.Explicit)
    with jax.set_mesh(mesh):
        query = jax.device_put(_normal(B, T, 12, H), NamedSharding(mesh, P("data", None, "model")))
        key = jax.device_put(_normal(B, T, 6, H), NamedSharding(mesh, P("data")))
        with pytest.raises(ValueError, match=r"6 key heads do not fit 4 shards of 12 query heads .*fewer devices"):
            fast_layers.dot_product_attention(query, key, key, implementation=implementation)

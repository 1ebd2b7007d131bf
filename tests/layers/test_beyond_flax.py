"""What the layers take beyond Flax: structured masks, segments, window, softcap; and what they refuse."""

from __future__ import annotations

import contextlib
import functools
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fast_layers
from fast_layers import linen, masks
from fast_layers.kernel_parts.manual_axes import explicit_axes

LENGTH, FEATURES, HEADS = 10, 16, 4
X = jax.random.normal(jax.random.key(0), (2, LENGTH, FEATURES))
SEGMENTS = jnp.array([[0, 0, 0, 0, 1, 1, 1, 2, 2, 2], [5, 5, 5, 5, 5, 5, 3, 3, -1, -1]])
close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-6)


def nnx_call(x, *more, fields=types.MappingProxyType({}), **arguments):
    return fast_layers.FlashMHA(HEADS, FEATURES, decode=False, rngs=nnx.Rngs(0), **fields)(x, *more, **arguments)


def linen_call(x, *more, fields=types.MappingProxyType({}), **arguments):
    layer = linen.FlashMHA(HEADS, **fields)
    return layer.apply(linen.FlashMHA(HEADS).init(jax.random.key(0), x), x, *more, **arguments)


def reference_call(call, dense, x=X, **options):
    """The same layer with the mask written out, by the reference backend."""
    return call(x, mask=dense, fields={"implementation": "reference", **options})


@pytest.fixture(params=[nnx_call, linen_call], ids=["nnx", "linen"])
def call(request):
    return request.param


def same_segment(q, k):
    return ((q[:, :, None] == k[:, None, :]) & (q >= 0)[:, :, None])[:, None]


def test_structured_mask(call):
    mask = masks.Causal() & masks.LocalWindow(3, None) & masks.KeyLengths(jnp.array([10, 7]))
    close(call(X, mask=mask), reference_call(call, mask.as_array(LENGTH, LENGTH, (2,))))


def test_segments(call):
    dense = same_segment(SEGMENTS, SEGMENTS)
    got = call(X, segment_ids=SEGMENTS)
    close(got, reference_call(call, dense))
    # A document is what it would be alone.
    close(got[0, 4:7], call(X[:1, 4:7])[0])
    # Together with masks of both kinds.
    causal = jnp.tri(LENGTH)
    for mask in (masks.Causal(), nnx.make_causal_mask(X[..., 0])):
        close(call(X, segment_ids=SEGMENTS, mask=mask), reference_call(call, dense * causal))


def test_segments_of_cross_attention(call):
    keys = jax.random.normal(jax.random.key(1), (2, 4, FEATURES))
    key_segments = jnp.array([[0, 1, 2, 2], [5, 3, 3, 5]])
    got = call(X, keys, segment_ids=(SEGMENTS, key_segments))
    want = call(X, keys, mask=same_segment(SEGMENTS, key_segments))
    close(got, want)
    with pytest.raises(ValueError, match="an array or a pair"):
        call(X, keys, segment_ids=(SEGMENTS, key_segments, SEGMENTS))


def test_window_and_softcap(call):
    i = jnp.arange(LENGTH)
    dense = (i[None] >= i[:, None] - 2) & (i[None] <= i[:, None] + 2)
    close(call(X, fields={"window": 2}), reference_call(call, dense))
    close(call(X, fields={"window": (2, None)}), reference_call(call, i[None] >= i[:, None] - 2))
    capped = call(X, fields={"softcap": 0.5})
    close(capped, reference_call(call, None, softcap=0.5))
    assert jnp.abs(capped - call(X)).max() > 1e-3


def test_implementation_and_explain():
    layer = fast_layers.FlashMHA(HEADS, FEATURES, implementation="reference", decode=False, rngs=nnx.Rngs(0))
    assert "forward  on cpu: reference" in str(fast_layers.explain(layer, X))
    text = str(fast_layers.explain(functools.partial(linen_call, segment_ids=SEGMENTS), X))
    assert "segments" in text
    assert "forward  on cpu: xla" in text


def test_sown_weights(call):
    mask = masks.Causal()
    if call is nnx_call:
        layer = fast_layers.FlashMHA(HEADS, FEATURES, decode=False, num_kv_heads=2, rngs=nnx.Rngs(0))
        flax = nnx.MultiHeadAttention(HEADS, FEATURES, decode=False, num_kv_heads=2, rngs=nnx.Rngs(0))
        out, sown = nnx.capture(layer, nnx.Intermediate)(X, mask=mask, sow_weights=True)
        _, theirs = nnx.capture(flax, nnx.Intermediate)(X, is_causal=True, sow_weights=True)
        close(out, layer(X, mask=mask))
    else:
        variables = linen.FlashMHA(HEADS).init(jax.random.key(0), X)
        run = functools.partial(linen.FlashMHA(HEADS).apply, variables, X, mask=mask)
        out, sown = run(sow_weights=True, mutable=["intermediates"])
        flax = nn.MultiHeadDotProductAttention(HEADS)
        _, theirs = flax.apply(variables, X, mask=jnp.tri(LENGTH), sow_weights=True, mutable=["intermediates"])
        close(out, run())
        sown, theirs = sown["intermediates"], theirs["intermediates"]
    (got,), (want,) = sown["attention_weights"], theirs["attention_weights"]
    assert got.shape == (2, HEADS, LENGTH, LENGTH)
    close(got, want)


def test_sown_weights_are_those_before_dropout():
    layer = fast_layers.FlashMHA(HEADS, FEATURES, decode=False, dropout_rate=0.5, rngs=nnx.Rngs(0))
    run = nnx.capture(layer, nnx.Intermediate)
    dropped, sown = run(X, sow_weights=True, deterministic=False)
    plain, sown_plain = run(X, sow_weights=True, deterministic=True)
    close(sown["attention_weights"][0], sown_plain["attention_weights"][0])
    assert (dropped != plain).any()


class TestDropout:
    def layer(self, rate=0.5, **fields):
        return fast_layers.FlashMHA(HEADS, FEATURES, decode=False, dropout_rate=rate, rngs=nnx.Rngs(0), **fields)

    def test_same_key_same_result(self):
        layer = self.layer(keep_rngs=False)
        first, again, other = (layer(X, deterministic=False, rngs=nnx.Rngs(dropout=seed)) for seed in (3, 3, 4))
        np.testing.assert_array_equal(first, again)
        assert (first != other).any()
        # The backend does not matter, nor whether weights are sown.
        reference = self.layer(keep_rngs=False, implementation="reference")
        close(reference(X, deterministic=False, rngs=nnx.Rngs(dropout=3)), first)

    def test_kept_rngs_advance(self):
        layer = self.layer()
        assert (layer(X, deterministic=False) != layer(X, deterministic=False)).any()

    def test_off_is_the_plain_fast_path(self):
        layer = self.layer(deterministic=True)
        close(layer(X), nnx_call(X))
        assert "dropout" not in str(fast_layers.explain(layer, X))
        assert "dropout 0.5" in str(fast_layers.explain(functools.partial(self.dropped, layer), X))

    @staticmethod
    def dropped(layer, x):
        return layer(x, deterministic=False, rngs=nnx.Rngs(dropout=0))

    @pytest.mark.parametrize("broadcast", [True, False])
    def test_statistics(self, broadcast):
        """With values of 1 and equal weights an output is the kept share of keys over 1 - rate."""
        length, rate = 256, 0.25
        q = jnp.zeros((4, length, HEADS, 8))
        out = fast_layers.nnx_attention_fn(
            q, q, jnp.ones_like(q), dropout_rate=rate, dropout_rng=jax.random.key(0), broadcast_dropout=broadcast
        )[..., 0]
        sigma = (rate / (1 - rate) / length) ** 0.5
        assert abs(out.mean() - 1) < 5 * sigma / (length if broadcast else 4 * HEADS * length) ** 0.5
        assert sigma * 0.9 < out.std() < sigma * 1.1
        assert (out == out[:1, :, :1]).all() == broadcast


FOREIGN = {nnx_call: nnx.dot_product_attention, linen_call: nn.dot_product_attention}


@pytest.mark.parametrize(
    ("fields", "arguments", "match"),
    [
        ({"rope": fast_layers.Rope()}, {}, "rope cannot reach attention_fn=dot_product_attention"),
        ({"window": 3, "softcap": 2.0}, {}, "window, softcap cannot reach"),
        ({"implementation": "xla"}, {}, "implementation cannot reach"),
        ({}, {"mask": masks.Causal()}, "a structured mask: attention_fn=dot_product_attention takes arrays only"),
        ({}, {"segment_ids": SEGMENTS}, "segment_ids: attention_fn="),
    ],
    ids=str,
)
def test_foreign_attention_fn_gets_nothing_of_ours(call, fields, arguments, match):
    with pytest.raises(ValueError, match=match):
        call(X, fields={"attention_fn": FOREIGN[call], **fields}, **arguments)


def test_foreign_attention_fn_is_called(call):
    def attend(query, key, value, mask=None, **rest):
        return value * 2

    doubled = call(X, fields={"attention_fn": attend})
    alone = call(X[:, :1])  # one key: the output is its value
    assert doubled.shape == X.shape
    assert (doubled[:, :1] != alone).any()


def test_our_hook_as_attention_fn_is_the_default():
    close(
        nnx_call(X, fields={"attention_fn": fast_layers.nnx_attention_fn, "window": 2}),
        nnx_call(X, fields={"window": 2}),
    )
    close(
        linen_call(X, fields={"attention_fn": linen.attention_fn, "window": 2}),
        linen_call(X, fields={"window": 2}),
    )


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"window": -1}, "window=-1: left=-1 must be an int >= 0"),
        ({"window": (2, -1)}, r"window=\(2, -1\): right=-1 must be an int >= 0, or None"),
        ({"window": (1, 2, 3)}, r"must be an int or a pair \(left, right\)"),
        ({"window": 2.5}, r"must be an int or a pair \(left, right\)"),
        ({"softcap": -3.0}, "softcap=-3.0: must be a finite number > 0"),
        ({"window": True}, r"window=True: must be an int or a pair"),
        ({"softcap": True}, "softcap=True: must be a finite number > 0"),
        ({"rope": "yes"}, "must be None or a fast_layers.Rope"),
        ({"implementation": "nope"}, "implementation 'nope' is unknown; the backends of this op are"),
        ({"num_kv_heads": 0}, "num_kv_heads=0: must be an int, at least 1"),
    ],
    ids=str,
)
def test_wrong_options(call, fields, match):
    with pytest.raises(ValueError, match=match):
        call(X, fields=fields)
    if call is nnx_call:
        with pytest.raises(ValueError, match=match):
            fast_layers.FlashMHA(HEADS, FEATURES, rngs=nnx.Rngs(0), **fields)


@pytest.mark.parametrize("heads", [0, -4, "4", 4.0])
def test_wrong_number_of_heads(heads):
    match = f"num_heads={heads!r}: must be an int, at least 1"
    with pytest.raises(ValueError, match=match):
        fast_layers.FlashMHA(heads, FEATURES, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=match):
        linen.FlashMHA(heads).init(jax.random.key(0), X)


def test_numpy_window(call):
    np.testing.assert_array_equal(call(X, fields={"window": np.int64(3)}), call(X, fields={"window": 3}))


HOOKS = [fast_layers.nnx_attention_fn, linen.attention_fn]


@pytest.mark.parametrize(
    ("mask", "match"),
    [
        ("causal", "mask is 'causal': must be a boolean array or a fast_layers.masks.Mask"),
        (masks.Causal, "mask=Causal is a class: must be one of its masks"),
        ([masks.Causal()], "mask is a list of masks: must be one mask; join them by &"),
        (masks.Mask(), "Mask does not say what a query may see: take one of"),
    ],
    ids=["text", "class", "list", "base"],
)
def test_wrong_masks(call, mask, match):
    for more in ({}, {"segment_ids": SEGMENTS}):
        with pytest.raises(ValueError, match=match):
            call(X, mask=mask, **more)
    for hook in HOOKS:
        with pytest.raises(ValueError, match=match):
            hook(X[:, :, None], X[:, :, None], X[:, :, None], mask=mask)


@pytest.mark.parametrize("is_causal", ["False", 1, None])
def test_causal_is_a_bool(is_causal):
    match = f"is_causal={is_causal!r}: must be True or False"
    with pytest.raises(ValueError, match=match):
        nnx_call(X, is_causal=is_causal)
    with pytest.raises(ValueError, match=match):
        fast_layers.nnx_attention_fn(X[:, :, None], X[:, :, None], X[:, :, None], is_causal=is_causal)
    np.testing.assert_array_equal(nnx_call(X, is_causal=np.True_), nnx_call(X, is_causal=True))


def test_listed_segments_are_one_array(call):
    np.testing.assert_array_equal(call(X, segment_ids=SEGMENTS.tolist()), call(X, segment_ids=SEGMENTS))


@pytest.mark.parametrize(
    ("positions", "match"),
    [
        ("x", "input_positions is 'x': must be integers"),
        (True, "input_positions must be integers, got dtype bool"),
        (np.ones(LENGTH, bool), "input_positions must be integers, got dtype bool"),
        (np.arange(float(LENGTH)), "input_positions must be integers, got dtype float"),
        ((1, 2, 3), r"input_positions must be an array or a pair \(queries, keys\), got 3 entries"),
        ((np.arange(5), None), "input_positions has None in its pair"),
    ],
    ids=str,
)
def test_wrong_positions(call, positions, match):
    with pytest.raises(ValueError, match=match):
        call(X, input_positions=positions, fields={"rope": fast_layers.Rope()})


def test_listed_positions_are_one_array(call):
    positions = jnp.stack([jnp.arange(LENGTH), jnp.arange(LENGTH)[::-1]])
    options = {"fields": {"rope": fast_layers.Rope()}}
    want = call(X, input_positions=positions, **options)
    for given in (positions.tolist(), [positions, positions]):
        np.testing.assert_array_equal(call(X, input_positions=given, **options), want)


# Transforms.


def test_structured_masks_pass_through_jit_and_grad():
    layer = fast_layers.FlashMHA(HEADS, FEATURES, decode=False, rngs=nnx.Rngs(0))
    mask = masks.Causal() & masks.Segments(SEGMENTS)
    want = layer(X, mask=mask)
    close(nnx.jit(lambda layer, x, mask: layer(x, mask=mask))(layer, X, mask), want)
    close(nnx.remat(lambda layer, x, mask: layer(x, mask=mask))(layer, X, mask), want)
    gradients = nnx.grad(lambda layer, x, mask: layer(x, mask=mask).sum())(layer, X, mask)
    assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(gradients))


def test_scan_over_layers_and_vmap_over_models():
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return fast_layers.FlashMHA(HEADS, FEATURES, decode=False, rope=fast_layers.Rope(), rngs=rngs)

    stacked = make(nnx.Rngs(0))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def forward(x, layer):
        return x + layer(x, is_causal=True)

    graph, state = nnx.split(stacked)
    layers = [nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], state)) for i in range(3)]
    want = X
    for layer in layers:
        want = want + layer(want, is_causal=True)
    close(forward(X, stacked), want, rtol=1e-4, atol=1e-5)
    each = nnx.vmap(lambda layer, x: layer(x, is_causal=True), in_axes=(0, None))(stacked, X)
    close(each, jnp.stack([layer(X, is_causal=True) for layer in layers]))


def test_shardings_reach_the_projections():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    layer = fast_layers.FlashMHA(HEADS, FEATURES, decode=False, rngs=nnx.Rngs(0))
    want = layer(X)
    with jax.set_mesh(mesh):
        x = jax.sharding.reshard(X, jax.P("data"))
        rows = jax.P("data", None, None, None)
        got = layer(x, qkv_sharding=rows, out_sharding=jax.P("data", None, None))
        assert jax.typeof(got).sharding.spec == jax.P("data", None, None)
    close(got, want)


@pytest.mark.parametrize("in_context", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_decoding_an_explicitly_sharded_batch(in_context):
    """Outside jit: the cache, made whole, takes the sharding of the tokens."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    layer = fast_layers.FlashMHA(HEADS, FEATURES, decode=False, rngs=nnx.Rngs(0))
    want = layer(X, is_causal=True)
    with jax.set_mesh(mesh) if in_context else contextlib.nullcontext():
        layer.init_cache(X.shape)
        x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("data")))
        got = jnp.concatenate([layer(x[:, :3], decode=True), layer(x[:, 3:], decode=True)], axis=1)
        assert explicit_axes(layer.cached_key[...]) == (("data",), (), (), ())
        assert jax.typeof(got).sharding.spec == jax.P("data", None, None)
        by_length = jax.device_put(X, jax.NamedSharding(mesh, jax.P(None, "data")))
        layer.init_cache(X.shape)
        with pytest.raises(ValueError, match=r"sharded over mesh axes \('data',\) along their length"):
            layer(by_length, decode=True)
    close(got, want)

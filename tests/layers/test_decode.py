"""Decoding from the cache: chunks of any length give what one call over the whole text gives."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fast_layers
from fast_layers import linen, masks
from layers.cases import jit

LENGTH, CAPACITY, FEATURES, HEADS = 12, 14, 16, 4

OPTIONS = {
    "plain": {},
    "rope, grouped heads": {"rope": fast_layers.Rope(), "num_kv_heads": 2},
    "window": {"window": 3},
    "one-sided window, softcap": {
        "window": (2, None),
        "softcap": 2.0,
        "rope": fast_layers.Rope(),
        "normalize_qk": True,
    },
}
CHUNKS = [1, 3, 7, LENGTH]
text = functools.partial(jax.random.normal, jax.random.key(0))


def nnx_layer(**options):
    return fast_layers.FlashMHA(HEADS, FEATURES, rngs=nnx.Rngs(0), **options)


class NnxDecoder:
    """A jitted decode step and its cache."""

    def __init__(self, layer, shape, dtype=jnp.float32):
        layer.init_cache(shape, dtype)
        graph, self.params, self.cache = nnx.split(layer, nnx.Not(nnx.Cache), nnx.Cache)

        def step(params, cache, x, options):
            layer = nnx.merge(graph, params, cache)
            out = layer(x, decode=True, **options)
            return nnx.state(layer, nnx.Cache), out

        self.step = jit(step)

    def __call__(self, x, **options):
        self.cache, out = self.step(self.params, self.cache, x, options)
        return out


class LinenDecoder:
    def __init__(self, module, variables, shape):
        self.params = variables["params"]
        self.cache = module.clone(decode=True).init(jax.random.key(0), jnp.zeros(shape))["cache"]

        def step(params, cache, x, options):
            variables = {"params": params, "cache": cache}
            out, updated = module.clone(decode=True).apply(variables, x, mutable=["cache"], **options)
            return updated["cache"], out

        self.step = jit(step)

    def __call__(self, x, **options):
        self.cache, out = self.step(self.params, self.cache, x, options)
        return out


def in_chunks(decoder, x, chunk):
    pieces = [x[..., start : start + chunk, :] for start in range(0, x.shape[-2], chunk)]
    return jnp.concatenate([decoder(piece) for piece in pieces], axis=-2)


@pytest.mark.parametrize("name", OPTIONS)
def test_nnx_chunks_equal_one_call(name):
    layer, x = nnx_layer(**OPTIONS[name]), text((2, LENGTH, FEATURES))
    want = layer(x, is_causal=True, decode=False)
    for chunk in CHUNKS:
        decoder = NnxDecoder(layer, (2, CAPACITY, FEATURES))
        np.testing.assert_allclose(in_chunks(decoder, x, chunk), want, rtol=1e-5, atol=2e-6)
        assert decoder.cache["cache_index"][...] == LENGTH


@pytest.mark.parametrize("name", OPTIONS)
def test_linen_chunks_equal_one_call(name):
    module, x = linen.FlashMHA(HEADS, **OPTIONS[name]), text((2, LENGTH, FEATURES))
    variables = module.init(jax.random.key(0), x)
    want = module.apply(variables, x, mask=masks.Causal())
    for chunk in CHUNKS:
        decoder = LinenDecoder(module, variables, (2, CAPACITY, FEATURES))
        np.testing.assert_allclose(in_chunks(decoder, x, chunk), want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
def test_any_number_of_batch_dims(batch):
    layer, x = nnx_layer(), text((*batch, LENGTH, FEATURES))
    want = layer(x, is_causal=True, decode=False)
    got = in_chunks(NnxDecoder(layer, x.shape), x, 5)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)


def test_caches_and_outputs_are_those_of_flax():
    """Token by token, with a mask over the cache, eagerly: the same outputs and the same cache contents."""
    x = text((2, 4, FEATURES))
    padding = jnp.ones((2, 1, 1, 6)).at[0, ..., 1].set(0)
    layers = [
        layer(HEADS, FEATURES, decode=True, rngs=nnx.Rngs(0))
        for layer in (nnx.MultiHeadAttention, fast_layers.FlashMHA)
    ]
    for layer in layers:
        layer.init_cache((2, 6, FEATURES))
    for token in range(4):
        # Ours is told is_causal, which decoding implies; Flax before 0.12.12 then sees the first key only.
        chunk = x[:, token : token + 1]
        want, got = layers[0](chunk, mask=padding), layers[1](chunk, mask=padding, is_causal=True)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)
    theirs, ours = (nnx.to_pure_dict(nnx.state(layer, nnx.Cache)) for layer in layers)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_linen_caches_are_those_of_flax():
    x = text((2, 6, FEATURES))
    want, got = (
        layer(HEADS, decode=True).init(jax.random.key(0), x)
        for layer in (nn.MultiHeadDotProductAttention, linen.FlashMHA)
    )
    jax.tree.map(np.testing.assert_array_equal, got, want)
    half = linen.FlashMHA(HEADS, decode=True, dtype=jnp.bfloat16).init(jax.random.key(0), x)["cache"]
    assert half["cached_key"].dtype == jnp.bfloat16


def test_structured_masks_count_from_the_start_of_the_cache():
    layer, x = nnx_layer(), text((2, LENGTH, FEATURES))
    mask = masks.LocalWindow(4, None) & masks.KeyLengths(jnp.array([9, 12]))
    want = layer(x, mask=mask, is_causal=True, decode=False)
    decoder = NnxDecoder(layer, x.shape)
    got = [decoder(x[:, :7], mask=mask), decoder(x[:, 7:], mask=mask)]
    np.testing.assert_allclose(jnp.concatenate(got, 1), want, rtol=1e-5, atol=2e-6)


def test_given_positions_replace_counted_ones():
    layer, x = nnx_layer(rope=fast_layers.Rope()), text((2, 6, FEATURES))
    # Left padding: the second example's text begins two tokens later.
    positions = jnp.array([[0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 2, 3]])
    visible = jnp.ones((2, 1, 1, 6), bool).at[1, ..., :2].set(False)
    decoder = NnxDecoder(layer, x.shape)
    got = jnp.concatenate(
        [decoder(x[:, i : i + 3], input_positions=positions[:, i : i + 3], mask=visible) for i in (0, 3)], 1
    )
    np.testing.assert_allclose(got[0], layer(x[0], is_causal=True, decode=False), rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(got[1, 2:], layer(x[1, 2:], is_causal=True, decode=False), rtol=1e-5, atol=2e-6)


def test_a_cache_in_another_dtype():
    layer, x = nnx_layer(rope=fast_layers.Rope()), text((2, LENGTH, FEATURES))
    decoder = NnxDecoder(layer, x.shape, jnp.bfloat16)
    got = in_chunks(decoder, x, 4)
    assert decoder.cache["cached_key"].dtype == jnp.bfloat16
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, layer(x, is_causal=True, decode=False), atol=0.02)


def test_x64():
    with jax.enable_x64(True):
        layer = nnx_layer(param_dtype=jnp.float64, rope=fast_layers.Rope())
        x = text((2, 6, FEATURES), jnp.float64)
        got = in_chunks(NnxDecoder(layer, x.shape, jnp.float64), x, 4)
        np.testing.assert_allclose(got, layer(x, is_causal=True, decode=False), rtol=1e-9, atol=1e-11)


def test_weights_over_the_cache_are_sown():
    layer, x = nnx_layer(num_kv_heads=2), text((2, 5, FEATURES))
    layer.init_cache((2, 8, FEATURES))
    layer(x[:, :2], decode=True)
    _, sown = nnx.capture(layer, nnx.Intermediate)(x[:, 2:], decode=True, sow_weights=True)
    (weights,) = sown["attention_weights"]
    assert weights.shape == (2, HEADS, 3, 8)
    np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-6)
    np.testing.assert_array_equal(weights > 0, jnp.broadcast_to(jnp.tri(3, 8, 2) > 0, weights.shape))


def test_dropout_while_decoding():
    layer, x = nnx_layer(dropout_rate=0.5, keep_rngs=False), text((2, 3, FEATURES))

    def step(seed, **options):
        layer.init_cache((2, 4, FEATURES))
        return layer(x, decode=True, rngs=nnx.Rngs(dropout=seed), **options)

    np.testing.assert_array_equal(step(0, deterministic=False), step(0, deterministic=False))
    assert (step(0, deterministic=False) != step(1, deterministic=False)).any()
    want = layer(x, decode=False, is_causal=True, deterministic=True)
    np.testing.assert_allclose(step(0, deterministic=True), want, rtol=1e-5, atol=2e-6)


def test_complex_numbers():
    layer, x = nnx_layer(dtype=jnp.complex64), text((2, 5, FEATURES), jnp.complex64)
    want, _ = nnx.capture(layer, nnx.Intermediate)(x, is_causal=True, decode=False, sow_weights=True)
    layer.init_cache((2, 8, FEATURES), jnp.complex64)
    # Without sowing Flax would call a function of jax.nn that does not take complex numbers.
    got = [
        nnx.capture(layer, nnx.Intermediate)(x[:, i], decode=True, sow_weights=True)[0]
        for i in (slice(0, 3), slice(3, 5))
    ]
    np.testing.assert_allclose(jnp.concatenate(got, 1), want, rtol=1e-5, atol=1e-5)


# Overflow. Flax writes over the last entries and answers with what is there then.


def test_a_chunk_that_does_not_fit_raises():
    layer, x = nnx_layer(), text((2, 5, FEATURES))
    layer.init_cache((2, 4, FEATURES))
    with pytest.raises(ValueError, match="a chunk of 5 tokens does not fit a cache of 4 that holds 0"):
        layer(x, decode=True)
    layer(x[:, :3], decode=True)
    before = jax.tree.map(jnp.copy, nnx.state(layer, nnx.Cache))
    with pytest.raises(ValueError, match="a chunk of 2 tokens does not fit a cache of 4 that holds 3"):
        layer(x[:, :2], decode=True)
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(layer, nnx.Cache))
    layer(x[:, :1], decode=True)


@pytest.mark.parametrize("library", ["nnx", "linen"])
def test_a_chunk_that_does_not_fit_is_nan_inside_jit(library):
    x = text((2, 5, FEATURES))
    if library == "nnx":
        decoder = NnxDecoder(nnx_layer(), (2, 4, FEATURES))
    else:
        module = linen.FlashMHA(HEADS)
        decoder = LinenDecoder(module, module.init(jax.random.key(0), x), (2, 4, FEATURES))
    with pytest.raises(ValueError, match="a chunk of 5 tokens does not fit a cache of 4"):
        decoder(x)
    assert jnp.isfinite(decoder(x[:, :3])).all()
    assert jnp.isnan(decoder(x[:, :3])).all()
    assert jnp.isnan(decoder(x[:, :1])).all()


@pytest.mark.parametrize("options", [{"window": 2}, {}])
def test_what_does_not_fit_is_nan_also_where_no_key_is_seen(options):
    """With a window far past the end of the cache, or where a mask hides all: softmax would give 0."""
    x = text((2, 3, FEATURES))
    decoder = NnxDecoder(nnx_layer(**options), (2, 4, FEATURES))
    hides_all = {} if options else {"mask": jnp.zeros((3, 4), bool)}
    assert jnp.isfinite(decoder(x, **hides_all)).all()
    for _ in range(4):
        assert jnp.isnan(decoder(x, **hides_all)).all()


def test_errors():
    layer, x = nnx_layer(), text((2, 3, FEATURES))
    layer.init_cache((2, 4, FEATURES))
    with pytest.raises(ValueError, match="segment_ids with decode=True"):
        layer(x, decode=True, segment_ids=jnp.zeros((2, 3), int))
    with pytest.raises(ValueError, match="got 1 queries and 3 keys"):
        layer(x[:, :1], x, decode=True)
    grouped = linen.FlashMHA(HEADS, num_kv_heads=2, decode=True, attention_fn=nn.dot_product_attention)
    with pytest.raises(ValueError, match="decode with 2 key heads for 4 query heads"):
        grouped.init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="segment_ids with decode=True"):
        linen.FlashMHA(HEADS, decode=True).init(jax.random.key(0), x, segment_ids=jnp.zeros((2, 3), int))


# Work.


def visible_key_tiles(filled, capacity, chunk):
    """How many key tiles the XLA backend's loop visits for a chunk after `filled` tokens."""
    from fast_layers.kernel_parts.kv_range import KvRange

    form = masks.Offset(masks.Causal(), jnp.int32(filled)).lower((), chunk, capacity)
    start, stop = form.intervals(chunk, capacity)
    start = jnp.zeros_like(stop) if start is None else start
    tiles = KvRange.of(start, stop, chunk).key_tiles(256)
    return int((tiles.last - tiles.first)[0, 0])


def test_work_is_proportional_to_the_filled_length():
    assert [visible_key_tiles(filled, 1 << 20, 8) for filled in (0, 248, 249, 10_000, 100_000)] == [1, 1, 2, 40, 391]


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def test_no_mask_as_long_as_the_cache():
    """Visibility is an interval of keys for each query: no array spans queries and the cache."""
    capacity, chunk = 4096, 24
    layer = nnx_layer(rope=fast_layers.Rope(), window=100)
    layer.init_cache((2, capacity, FEATURES))
    graph, state = nnx.split(layer)
    jaxpr = jax.make_jaxpr(lambda state, x: nnx.merge(graph, state)(x, decode=True))(
        state, jnp.zeros((2, chunk, FEATURES))
    )
    shapes = {tuple(v.aval.shape) for e in equations(jaxpr.jaxpr) for v in e.outvars}
    assert (2, capacity, HEADS, FEATURES // HEADS) in shapes
    assert not [shape for shape in shapes if capacity in shape and chunk in shape]

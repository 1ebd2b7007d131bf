"""Checkpoints written by one layer are read by the other, caches and all, by orbax."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from closeness import assert_bitwise_equal
from flax import nnx

import fast_layers
from fast_layers import linen

OURS_AND_THEIRS = [(fast_layers.FlashMHA, nnx.MultiHeadAttention), (nnx.MultiHeadAttention, fast_layers.FlashMHA)]
X = jax.random.normal(jax.random.key(0), (2, 5, 16))


@pytest.mark.parametrize(("writer", "reader"), OURS_AND_THEIRS, ids=["ours to flax", "flax to ours"])
def test_nnx(tmp_path, writer, reader):
    class Model(nnx.Module):
        def __init__(self, layer, seed):
            rngs = nnx.Rngs(seed)
            options = {"num_kv_heads": 2, "normalize_qk": True, "dropout_rate": 0.1, "decode": False}
            self.layers = nnx.List([layer(4, 16, **options, rngs=rngs) for _ in range(2)])

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x, deterministic=True)
            return x

    written, read = Model(writer, 0), Model(reader, 1)
    for model in (written, read):
        model.layers[0].init_cache((2, 6, 16))
    written.layers[0](X[:, :1], decode=True, deterministic=True)
    want = written(X)
    with ocp.StandardCheckpointer() as checkpointer:
        # Random keys are no plain arrays, and are not part of what is learnt.
        checkpointer.save(tmp_path / "model", nnx.state(written, (nnx.Param, nnx.Cache)))
        checkpointer.wait_until_finished()
        state = checkpointer.restore(tmp_path / "model", nnx.state(read, (nnx.Param, nnx.Cache)))
    nnx.update(read, state)
    assert_bitwise_equal(*(nnx.to_pure_dict(nnx.state(m, (nnx.Param, nnx.Cache))) for m in (read, written)))
    np.testing.assert_allclose(read(X), want, rtol=1e-5, atol=2e-6)
    next_token = [m.layers[0](X[:, 1:2], decode=True, deterministic=True) for m in (written, read)]
    np.testing.assert_allclose(*next_token, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("to_ours", [True, False], ids=["flax to ours", "ours to flax"])
def test_linen(tmp_path, to_ours):
    def model(library):
        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                for _ in range(2):
                    x = library.MultiHeadDotProductAttention(4, normalize_qk=True, decode=True)(x)
                return x

        return Model()

    writer, reader = (nn, linen) if to_ours else (linen, nn)
    capacity = jnp.zeros((2, 6, 16))
    written = model(writer).init(jax.random.key(0), capacity)
    want, updated = model(writer).apply(written, X[:, :1], mutable=["cache"])
    written = {**written, **updated}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", written)
        checkpointer.wait_until_finished()
        read = checkpointer.restore(tmp_path / "model", model(reader).init(jax.random.key(1), capacity))
    assert_bitwise_equal(read, written)
    want, got = (
        model(library).apply(variables, X[:, 1:2], mutable=["cache"])[0]
        for library, variables in ((writer, written), (reader, read))
    )
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)

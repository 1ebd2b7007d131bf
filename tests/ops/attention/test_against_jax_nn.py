"""Arguments that `jax.nn.dot_product_attention` also has mean the same here, values and gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close_over_draws

import fast_layers
from ops.attention import oracle
from ops.attention.cases import TESTED

B, T, S, N, H = 2, 13, 17, 4, 8


def _arrays(q_len=T, kv_len=S, kv_heads=N, batch=(B,), seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((*batch, q_len, N, H), (*batch, kv_len, kv_heads, H), (*batch, kv_len, kv_heads, H))
    return tuple(rng.normal(size=shape) for shape in shapes)


_rng = np.random.default_rng(1)
# Diagonals and first keys are kept visible: a row that sees nothing is where we differ from jax.nn on purpose.
MASK = (_rng.random((B, N, T, S)) < 0.6) | (np.arange(S) == 0)
BIAS = _rng.normal(size=(B, N, T, S))
Q_LENGTHS, KV_LENGTHS = np.array([5, 13], np.int32), np.array([17, 9], np.int32)
SQUARE = {"kv_len": T}

CALLS = {
    "plain": ({}, {}),
    "scale": ({}, {"scale": 0.3}),
    "mask": ({}, {"mask": MASK}),
    "mask over heads": ({}, {"mask": MASK[:, :1]}),
    "mask over examples": ({}, {"mask": MASK[:1]}),
    "mask of one row": ({}, {"mask": MASK[:, :, :1]}),
    "causal": (SQUARE, {"is_causal": True}),
    "causal, more keys than queries": ({}, {"is_causal": True}),
    "causal, fewer keys than queries": ({"kv_len": 9}, {"is_causal": True}),
    "key lengths": ({}, {"key_value_seq_lengths": KV_LENGTHS}),
    "both lengths, causal": (
        SQUARE,
        {
            "query_seq_lengths": Q_LENGTHS,
            "key_value_seq_lengths": np.array([13, 9], np.int32),
            "is_causal": True,
        },
    ),
    "window": (SQUARE, {"local_window_size": 3}),
    "window of a pair": (SQUARE, {"local_window_size": (4, 1)}),
    "window of one side, causal": (SQUARE, {"local_window_size": (4, 0), "is_causal": True}),
    "grouped heads": ({"kv_heads": 2}, {"is_causal": True}),
    "one key head": ({"kv_heads": 1}, {"mask": MASK}),
    "no batch": ({"batch": ()}, {"is_causal": True}),
}
BIASED = {
    "bias": ({}, {}, BIAS),
    "bias over heads": ({}, {}, BIAS[:, :1]),
    "bias over examples, causal": (SQUARE, {"is_causal": True}, BIAS[:1, :, :, :T]),
    "bias and mask, grouped heads": ({"kv_heads": 2}, {"mask": MASK}, BIAS),
}


def _rows_that_see(options, q_len):
    """[B, T, 1, 1]: False past the query lengths, where jax.nn's result means nothing."""
    if "query_seq_lengths" not in options:
        return np.ones((1, 1, 1, 1), bool)
    return (np.arange(q_len) < options["query_seq_lengths"][:, None])[..., None, None]


@pytest.mark.parametrize("implementation", [pytest.param("reference", marks=pytest.mark.exhaustive), *TESTED])
@pytest.mark.parametrize(
    ("shapes", "options", "bias"),
    [*((*c, None) for c in CALLS.values()), *BIASED.values()],
    ids=[*CALLS, *BIASED],
)
def test_same_values_and_gradients(implementation, shapes, options, bias):
    rank = len(_arrays(**shapes)[0].shape)
    rows = _rows_that_see(options, T) if rank == 4 else np.ones((1, 1, 1), bool)

    def results(attend, implementation):
        def call(operands):
            *qkv, bias = operands
            out = attend(*qkv, bias=bias, implementation=implementation, **options)
            return jnp.where(rows, out, 0)

        def call_and_gradients(operands, d_out):
            out, pull = jax.vjp(call, operands)
            return out, pull(d_out)

        return jax.jit(call_and_gradients)

    theirs, ours = (
        results(jax.nn.dot_product_attention, "xla"),
        results(fast_layers.dot_product_attention, implementation),
    )

    def make(draw):
        arrays = _arrays(**shapes, seed=draw)
        d_out = np.random.default_rng(draw + 1000).normal(size=arrays[0].shape)
        single = jax.tree.map(lambda x: x.astype(np.float32), ((*arrays, bias), d_out))
        with jax.enable_x64(True):
            # Of the same float32 numbers: the oracle must not see digits that the others do not.
            truth = jax.tree.map(np.asarray, theirs(*jax.tree.map(lambda x: x.astype(np.float64), single)))
        return ours(*single), truth, theirs(*single), *_from_residuals(single, options)

    assert_close_over_draws(make)


def _from_residuals(operands_and_d_out, options):
    """The same in plain float32 numpy, gradients taken from (out, lse) as ours are: lse's rounding is part of them."""
    (*qkv, bias), d_out = operands_and_d_out
    unbatched = d_out.ndim == 3
    if unbatched:
        *qkv, d_out = (x[None] for x in (*qkv, d_out))
    batch, q_len, _, depth = d_out.shape
    window = options.get("local_window_size", (None, None))
    visible = oracle.visible(
        batch,
        q_len,
        qkv[1].shape[1],
        causal=options.get("is_causal", False),
        window=(window, window) if isinstance(window, int) else window,
        q_lengths=options.get("query_seq_lengths"),
        kv_lengths=options.get("key_value_seq_lengths"),
        dense=options.get("mask"),
    )
    for sequential in (False, True):
        attended = oracle.attend(
            oracle.Operands(*qkv, bias),
            visible,
            d_out,
            np.zeros(d_out.shape[:3]),
            scale=options.get("scale", depth**-0.5),
            dtype=np.float32,
            from_residuals=True,
            sequential=sequential,
        )
        *gradients, d_bias = attended.grads[:4]
        out = attended.out
        if unbatched:
            out, *gradients = (x[0] for x in (out, *gradients))
        yield out, ((*gradients, d_bias),)


@pytest.mark.parametrize("implementation", ["reference", *TESTED])
def test_same_residual(implementation):
    arrays = tuple(jnp.asarray(x, jnp.float32) for x in _arrays(kv_len=T, kv_heads=2))
    options = {"is_causal": True, "return_residual": True}
    out, lse = fast_layers.dot_product_attention(*arrays, implementation=implementation, **options)
    jax_out, jax_lse = jax.nn.dot_product_attention(*arrays, implementation="xla", **options)
    assert lse.shape == jax_lse.shape == (B, T, N)
    np.testing.assert_allclose(lse, jax_lse, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out, jax_out, rtol=1e-5, atol=1e-6)


def test_every_argument_of_theirs_is_ours():
    import inspect

    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    ours = inspect.signature(fast_layers.dot_product_attention).parameters
    assert [name for name in theirs if name not in ours] == []
    positional = [name for name, p in theirs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert list(ours)[: len(positional)] == positional
    for name in set(theirs) - {"implementation"}:
        assert ours[name].default == theirs[name].default, name

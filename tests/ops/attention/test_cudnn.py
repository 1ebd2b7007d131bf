"""The cudnn backend without a GPU: its refusals, and what it adds around cuDNN's kernels.

The kernels themselves are replaced by ones that behave like them as badly as they may: a row without a key comes out
as garbage, 0 * NaN is NaN, and without a padding mask lengths that are no multiple of the tile are refused.
tests/gpu holds the real ones against the reference.
"""

from __future__ import annotations

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_bitwise_equal, assert_trees_close, stack
from selection import some_each_run

import fast_layers
from fast_layers.arch import Arch
from fast_layers.dispatch import Backend
from fast_layers.ops.attention import cudnn, masks
from fast_layers.testing import check_parity
from fast_layers.testing.parity import CASES

H200, A100, B200 = Arch("cuda", "H200", (9, 0)), Arch("cuda", "A100", (8, 0)), Arch("cuda", "B200", (10, 0))
_REAL = cudnn._primitives()
SHAPE = (2, 130, 4, 64)


@pytest.fixture
def installed(monkeypatch):
    """As on a machine with a GPU and a recent cuDNN."""
    monkeypatch.setattr(cudnn, "_installation_objection", lambda arch: None)
    monkeypatch.setattr(cudnn, "_cudnn_version", lambda: 92000)


def _problem(q=SHAPE, kv=None, v_dim=None, dtype=jnp.bfloat16, **options):
    query = jax.ShapeDtypeStruct(q, dtype)
    key = jax.ShapeDtypeStruct(kv or q, dtype)
    value = jax.ShapeDtypeStruct((*key.shape[:3], v_dim or key.shape[3]), dtype)
    explained = fast_layers.explain(
        lambda q, k, v: fast_layers.dot_product_attention(q, k, v, implementation="reference", **options),
        query,
        key,
        value,
    )
    return explained.plans[0].problem


LENGTHS = np.array([100, 3], np.int32)
EVEN = (2, 256, 4, 64)
TAKEN = {
    "full": {},
    "causal": {"is_causal": True},
    "left window": {"is_causal": True, "local_window_size": (9, 0)},
    "causal by a wider right window": {"is_causal": True, "local_window_size": (9, 5)},
    "lengths": {"key_value_seq_lengths": LENGTHS, "query_seq_lengths": LENGTHS},
    "mask objects": {"mask": masks.Causal() & masks.KeyLengths(LENGTHS)},
    "causal and lengths": {"is_causal": True, "key_value_seq_lengths": LENGTHS},
    "grouped": {"kv": (2, 70, 2, 64)},
    "bias": {"q": EVEN, "bias": np.zeros((4, 256, 256), jnp.bfloat16)},
    "float16": {"dtype": jnp.float16},
    "two depths": {"q": (2, 130, 4, 192), "v_dim": 128},
    "depth 256": {"q": (2, 130, 4, 256)},
}
REFUSED = {
    "float32": ({"dtype": jnp.float32}, "dtype float32"),
    "depth": ({"q": (2, 130, 4, 60)}, "head_dim=60"),
    "too deep": ({"q": (2, 130, 4, 264)}, "head_dim=264"),
    "value too deep": ({"v_dim": 256}, "depths (64, 256)"),
    "softcap": ({"softcap": 2.0}, "softcap=2"),
    "sinks": ({"sinks": np.zeros(4, np.float32)}, "sinks"),
    "dropout": ({"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}, "dropout_rate=0.1"),
    "segments": ({"segment_ids": np.zeros(130, int)}, "segment ids"),
    "segments and lengths": ({"segment_ids": np.zeros(130, int), "key_value_seq_lengths": LENGTHS}, "segment ids"),
    "dense": ({"mask": np.ones((130, 130), bool)}, "boolean mask"),
    "prefix": ({"mask": masks.Prefix(LENGTHS)}, "a prefix or an offset"),
    "prefix and lengths": ({"mask": masks.Prefix(LENGTHS) & masks.KeyLengths(LENGTHS)}, "a prefix or an offset"),
    "offsets": ({"is_causal": True, "q_offset": LENGTHS}, "a prefix or an offset"),
    "bottom right": ({"kv": (2, 200, 4, 64), "is_causal": True, "q_offset": "bottom_right"}, "mask band [.., +70]"),
    "right window": ({"local_window_size": (4, 3)}, "mask band [-4, +3]"),
    "left window alone": ({"local_window_size": (4, None)}, "mask band [-4, ..]"),
    "precision": ({"precision": "highest"}, "precision"),
    "scale": ({"scale": -1.0}, "scale=-1"),
    "float32 bias": ({"q": EVEN, "bias": np.zeros((4, 256, 256), np.float32)}, "bias of float32"),
    "bias per key": ({"q": EVEN, "bias": np.zeros(256, jnp.bfloat16)}, "broadcast along queries"),
    "odd bias": ({"q": (2, 129, 4, 64), "bias": np.zeros((129, 129), jnp.bfloat16)}, "even"),
    "bias and window": (
        {"q": EVEN, "bias": np.zeros((256, 256), jnp.bfloat16), "is_causal": True, "local_window_size": (9, 0)},
        "bias together",
    ),
}


@pytest.mark.usefixtures("installed")
class TestSupports:
    @pytest.mark.parametrize("options", TAKEN.values(), ids=TAKEN)
    def test_takes(self, options):
        problem = _problem(**options)
        assert [cudnn.supports(problem, H200, pass_) for pass_ in ("forward", "backward")] == [None, None]

    @pytest.mark.parametrize(("options", "words"), REFUSED.values(), ids=REFUSED)
    def test_refuses_with_the_reason(self, options, words):
        problem = _problem(**options)
        for pass_ in ("forward", "backward"):
            assert words in cudnn.supports(problem, H200, pass_)

    def test_lse_has_no_gradient(self):
        problem = _problem(return_residual=True)
        assert cudnn.supports(problem, H200, "forward") is None
        assert "return_residual=True" in cudnn.supports(problem, H200, "backward")

    def test_bias_gradient_only_for_whole_tiles(self):
        problem = _problem(q=(2, 192, 4, 64), bias=np.zeros((192, 192), jnp.bfloat16))
        assert cudnn.supports(problem, H200, "forward") is None
        assert "multiples of 128" in cudnn.supports(problem, H200, "backward")

    def test_devices(self):
        problem, deep = _problem(), _problem(q=(2, 130, 4, 256))
        assert cudnn.supports(problem, A100, "forward") is None
        assert cudnn.supports(problem, B200, "forward") is None
        assert "up to 128" in cudnn.supports(deep, A100, "forward")
        assert "up to 128" in cudnn.supports(deep, B200, "forward")
        assert "sm_90" in cudnn.supports(_problem(q=(2, 130, 4, 192), v_dim=128), A100, "forward")
        assert "sm_80" in cudnn.supports(problem, Arch("cuda", "T4", (7, 5)), "forward")
        assert "no known compute capability" in cudnn.supports(problem, Arch("cuda"), "forward")
        assert "not on cpu" in cudnn.supports(problem, Arch("cpu"), "forward")

    def test_symbolic_sizes(self):
        (batch,) = jax.export.symbolic_shape("b")
        problem = dataclasses.replace(_problem(), batch=batch)
        assert "symbolic batch" in cudnn.supports(problem, H200, "forward")


def test_explain_shows_the_refusal_here():
    if jax.default_backend() != "cpu":
        pytest.skip("the reason is that of a CPU")
    x = jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)
    text = str(fast_layers.explain(fast_layers.dot_product_attention, x, x, x))
    assert text.count("not cudnn: cuDNN runs on NVIDIA GPUs from sm_80 on, not on cpu") == 2


def test_the_installed_jax_has_what_is_bound():
    assert not isinstance(_REAL, str), _REAL


@pytest.mark.parametrize("pass_", ["forward", "backward"])
@pytest.mark.parametrize("name", ["full d64", "causal d64", "length 129", "window", "both lengths", "grouped heads"])
def test_jax_accepts_the_call_and_lowers_it_to_cudnn(name, pass_):
    """The real primitives, as far as one gets without a GPU."""
    case = CASES[name]
    q = jnp.zeros((2, case.q_len, case.heads, case.qk_dim), jnp.bfloat16)
    kv = jnp.zeros((2, case.kv_len, case.kv_heads, case.qk_dim), jnp.bfloat16)
    backend = Backend("bound", lambda *_: None, cudnn.forward, cudnn.backward)
    options = {"is_causal": case.is_causal, "local_window_size": case.window}
    options |= {"key_value_seq_lengths": np.array(case.key_lengths, np.int32)} if case.key_lengths else {}

    def call(q, k, v):
        return fast_layers.dot_product_attention(q, k, v, implementation="bound", **options).astype(jnp.float32).sum()

    fn = call if pass_ == "forward" else jax.grad(call, argnums=(0, 1, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fast_layers.ops.attention.api.BACKENDS", (backend,))
        for mapped in (fn, jax.vmap(fn)):
            args = [x if mapped is fn else jnp.stack([x] * 3) for x in (q, kv, kv)]
            shapes = jax.eval_shape(mapped, *args)
            if pass_ == "backward":
                assert [x.shape for x in shapes] == [x.shape for x in args]
            text = jax.jit(mapped).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
            assert text.count("@__cudnn$fmha") == (1 if pass_ == "forward" else 2)


def _visible(mask_type, q_len, kv_len, q_lengths, kv_lengths, window):
    rows, keys = jnp.arange(q_len)[:, None], jnp.arange(kv_len)[None]
    seen = jnp.ones((1, 1, q_len, kv_len), bool)
    if "CAUSAL" in mask_type.name:
        seen &= keys <= rows
    if window is not None:
        assert "CAUSAL" in mask_type.name
        seen &= keys > rows - window
    if "PADDING" in mask_type.name:
        seen &= (rows < q_lengths[:, None, None, None]) & (keys < kv_lengths[:, None, None, None])
    return seen


def _scores(query, key, scale, visible):
    key = jnp.repeat(key, query.shape[2] // key.shape[2], axis=2)
    scores = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=jnp.float32) * scale
    return jnp.where(visible, scores, -jnp.inf)


def _fake_forward(
    query, key, value, bias, q_lengths, kv_lengths, *_, scale, mask_type, sliding_window_length, variadic_args, **__
):
    visible = _visible(mask_type, query.shape[1], key.shape[1], q_lengths, kv_lengths, sliding_window_length)
    scores = _scores(query, key, scale, visible)
    if variadic_args[0]:
        scores += bias.astype(jnp.float32)
    lse = jax.nn.logsumexp(scores, -1)
    weights = jnp.exp(scores - lse[..., None]).astype(value.dtype)  # NaN for a row without a key
    value = jnp.repeat(value, query.shape[2] // value.shape[2], axis=2)
    return [jnp.einsum("bnts,bsnv->btnv", weights, value), lse]


def _fake_backward(
    query,
    key,
    value,
    bias,
    q_lengths,
    kv_lengths,
    _offsets_q,
    _offsets_kv,
    _pages_k,
    _pages_v,
    lse,
    out,
    d_out,
    *,
    scale,
    mask_type,
    sliding_window_length,
    variadic_args,
    **__,
):
    q_len, kv_len = query.shape[1], key.shape[1]
    assert (q_len % 128 == 0 and kv_len % 128 == 0) or "PADDING" in mask_type.name
    dtype, group = query.dtype, query.shape[2] // key.shape[2]
    visible = _visible(mask_type, q_len, kv_len, q_lengths, kv_lengths, sliding_window_length)
    scores = _scores(query, key, scale, visible)
    if variadic_args[0]:
        scores += bias.astype(jnp.float32)
    weights = jnp.exp(scores - lse[..., None])
    wide_key, wide_value = (jnp.repeat(x, group, axis=2) for x in (key, value))
    d_weights = jnp.einsum("btnv,bsnv->bnts", d_out, wide_value, preferred_element_type=jnp.float32)
    delta = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(-1).swapaxes(1, 2)
    d_scores = weights * (d_weights - delta[..., None])

    def grouped(x):
        return x.reshape(*x.shape[:2], -1, group, x.shape[-1]).sum(3).astype(dtype)

    shared = tuple(axis for axis in range(4) if bias.ndim == 4 and bias.shape[axis] == 1)
    d_bias = [d_scores.sum(shared, keepdims=True).astype(dtype)] if variadic_args[1] else []
    d_scores = (d_scores * scale).astype(dtype)
    product = jnp.einsum
    return [
        product("bnts,bsnh->btnh", d_scores, wide_key, preferred_element_type=jnp.float32).astype(dtype),
        grouped(product("bnts,btnh->bsnh", d_scores, query, preferred_element_type=jnp.float32)),
        grouped(product("bnts,btnv->bsnv", weights.astype(dtype), d_out, preferred_element_type=jnp.float32)),
        *d_bias,
    ]


@pytest.fixture
def pretended(installed, monkeypatch):
    """The cudnn backend on a pretended H200, its kernels replaced by the functions above."""
    fake = cudnn._Primitives(
        types.SimpleNamespace(bind=_fake_forward), types.SimpleNamespace(bind=_fake_backward), _REAL.mask_type, {}
    )
    monkeypatch.setattr(cudnn, "_primitives", lambda: fake)
    return Backend("cudnn", lambda p, arch, pass_: cudnn.supports(p, H200, pass_), cudnn.forward, cudnn.backward)


# What is passed on, padded, or kept from cuDNN in another way; the others differ in shapes, or are refused.
EACH_RUN = {
    "causal d64",
    "length 129",
    "one query",
    "window",
    "both lengths",
    "an empty example",
    "causal, poisoned padding",
    "causal, fewer keys",
    "grouped heads",
    "shared bias",
    "depths 192 and 128",
    "lse gradient",
}


@pytest.mark.parametrize("name", some_each_run(CASES, EACH_RUN))
def test_contract_around_the_kernels(pretended, name):
    case = dataclasses.replace(CASES[name], batch=1) if CASES[name].q_len == 1000 else CASES[name]
    table = check_parity(backends=[pretended], cases={name: case}, dtypes=["bfloat16"])
    assert table.ok, f"\n{table}"
    refused = {row.pass_ for row in table.refusals}
    if name in ("causal d64", "window", "both lengths", "an empty example", "poisoned padding", "length 129", "d80"):
        assert not refused, f"\n{table}"
    if refused == {"forward", "backward"}:
        pytest.skip(table.refusals[0].refusal)


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"is_causal": True, "local_window_size": (5, 0)},
        {"key_value_seq_lengths": np.array([30, 9], np.int32), "query_seq_lengths": np.array([40, 20], np.int32)},
        {"is_causal": True, "key_value_seq_lengths": np.array([30, 9], np.int32)},
    ],
    ids=["causal", "window", "lengths", "causal lengths"],
)
@pytest.mark.parametrize("where", [("query", 16), ("key", 7), ("value", 20), ("d_out", 12)], ids=lambda w: w[0])
def test_nan_reaches_those_who_see_it_and_nobody_else(pretended, monkeypatch, options, where):
    """In the same rows as in the reference, values and gradients."""
    monkeypatch.setattr("fast_layers.ops.attention.api.BACKENDS", (pretended, *fast_layers_backends()))
    rng = np.random.default_rng(0)
    operands = {name: rng.normal(size=(2, 40, 2, 16)).astype(jnp.bfloat16) for name in ("query", "d_out")}
    operands |= {name: rng.normal(size=(2, 40, 1, 16)).astype(jnp.bfloat16) for name in ("key", "value")}
    name, position = where
    operands[name][0, position, 0, 3] = np.nan

    def places(implementation):
        def op(query, key, value):
            return fast_layers.dot_product_attention(query, key, value, implementation=implementation, **options)

        out, pull = jax.vjp(op, *(operands[x] for x in ("query", "key", "value")))
        # By rows: the reference says nothing about the gradient of the broken number itself.
        return [np.isnan(np.asarray(x, np.float32)).any(-1) for x in (out, *pull(jnp.asarray(operands["d_out"])))]

    got, want = places("cudnn"), places("reference")
    if name == "d_out":
        # The reference multiplies a broken cotangent by the zero weights of keys that its row does not see.
        want = [np.logical_and(*pair) for pair in zip(want, got, strict=True)]
        assert got[1][0, position, 0]
    assert_bitwise_equal(got, want)


def fast_layers_backends():
    from fast_layers.ops.attention.backends import BACKENDS

    return tuple(backend for backend in BACKENDS if backend.name != "cudnn")


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_vmap_is_the_same_call_for_each(pretended, monkeypatch, bias):
    monkeypatch.setattr("fast_layers.ops.attention.api.BACKENDS", (pretended, *fast_layers_backends()))
    rng = np.random.default_rng(0)
    length = 128
    q, k = (jnp.asarray(rng.normal(size=(3, 2, length, 2, 16)), jnp.bfloat16) for _ in range(2))
    v = jnp.asarray(rng.normal(size=(2, length, 2, 16)), jnp.bfloat16)
    b = jnp.asarray(rng.normal(size=(1, 2, length, length)), jnp.bfloat16) if bias else None

    def grads(implementation, *operands):
        def loss(*operands):
            out = fast_layers.dot_product_attention(*operands, is_causal=True, implementation=implementation)
            return jnp.sin(out.astype(jnp.float32)).sum()

        return jax.grad(loss, argnums=tuple(range(len(operands))))(*operands)

    operands, axes = ((q, k, v, b), (0, 0, None, None)) if bias else ((q, k, v), (0, 0, None))
    mapped = jax.vmap(functools.partial(grads, "cudnn"), axes)(*operands)
    single = stack([grads("cudnn", q[i], k[i], *operands[2:]) for i in range(3)])
    wide = [x.astype(jnp.float32) for x in operands]
    assert_trees_close(mapped, jax.vmap(functools.partial(grads, "reference"), axes)(*wide), single)

"""The parity of `dot_product_attention`: a table of cases, the oracle and the yardsticks.

The oracle is the `reference` backend in float64 with every mask written out, the yardsticks plain `jnp` code in the
dtype under test.

Axis letters: B batch, T queries, S keys, N query heads, K key/value heads, H query/key depth, V value depth.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fast_layers import dispatch, masks
from fast_layers.kernel_parts.dropout import KEYS_PER_BLOCK, keep_tile
from fast_layers.ops.attention import api, reference, xla
from fast_layers.ops.attention.masks import MaskForm
from fast_layers.ops.attention.problem import Aux, Inputs, Problem, Residuals
from fast_layers.testing._parity_suite import Answer, Expected, Suite, compiled_soon, draws_for, on_device


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of `dot_product_attention`; the arrays follow from the shapes, the dtype and the draw."""

    batch: int = 2
    q_len: int = 256
    kv_len: int = 256
    heads: int = 4
    kv_heads: int = 4
    qk_dim: int = 64
    v_dim: int = 64
    is_causal: bool = False
    window: tuple[int | None, int | None] | None = None
    q_offset: int | str = 0
    query_lengths: tuple[int, ...] | None = None
    """One per example, as `key_lengths` and `prefix`."""
    key_lengths: tuple[int, ...] | None = None
    prefix: tuple[int, ...] | None = None
    documents: tuple[int, ...] | None = None
    """Lengths of packed documents, the same in all examples; what remains of a row is padding."""
    scattered: bool = False
    """Documents' positions drawn at random instead of one document after the other."""
    dense_mask: bool = False
    bias: tuple[int, int, int, int] | None = None
    softcap: float | None = None
    sinks: bool = False
    dropout_rate: float = 0.0
    lse_gradient: bool = False
    poisoned_padding: bool = False
    """Fill what lies past the lengths with NaN, in operands and in the output's cotangent."""

    @property
    def draws(self) -> int:
        numbers = self.batch * self.q_len * self.heads * self.v_dim
        return draws_for(numbers)


def _square(length: int, **options: Any) -> Case:
    return Case(q_len=length, kv_len=length, **options)


CASES: Mapping[str, Case] = {
    "full d64": Case(),
    "causal d64": Case(is_causal=True),
    "full d128": Case(qk_dim=128, v_dim=128),
    "causal d128": Case(qk_dim=128, v_dim=128, is_causal=True),
    "full d256": Case(qk_dim=256, v_dim=256),
    "causal d256": Case(qk_dim=256, v_dim=256, is_causal=True),
    "d80": Case(qk_dim=80, v_dim=80, is_causal=True),
    "d32": Case(qk_dim=32, v_dim=32, is_causal=True),
    "d40": Case(qk_dim=40, v_dim=40),
    "d144": Case(qk_dim=144, v_dim=144, is_causal=True),
    "depths 256 and 80": Case(qk_dim=256, v_dim=80),
    "depths 208 and 256": Case(qk_dim=208, v_dim=256, is_causal=True),
    "depths 192 and 128": Case(qk_dim=192, v_dim=128, is_causal=True),
    "depths 64 and 128": Case(v_dim=128),
    # Without lse's gradient those of query and key are exactly 0 here, and the rule has nothing to measure by.
    "length 1": _square(1, lse_gradient=True),
    "length 7": _square(7, is_causal=True),
    "length 64": _square(64, is_causal=True),
    "length 129": _square(129, is_causal=True),
    "length 129 full": _square(129),
    "length 1000": _square(1000, is_causal=True),
    "length 1000 full": _square(1000, batch=1),
    "one query": Case(q_len=1, kv_len=1000),
    "one query, grouped heads": Case(q_len=1, kv_len=1000, heads=8, kv_heads=2, qk_dim=80, v_dim=80),
    "one query, grouped heads d128": Case(
        q_len=1, kv_len=1000, heads=8, kv_heads=2, qk_dim=128, v_dim=128, key_lengths=(0, 900)
    ),
    "3 queries, 7 heads on one": Case(q_len=3, kv_len=300, heads=7, kv_heads=1, qk_dim=96, v_dim=96),
    "7 queries, 129 keys": Case(q_len=7, kv_len=129),
    "causal, more keys": Case(q_len=129, kv_len=300, is_causal=True),
    "causal, more keys, bottom right": Case(q_len=129, kv_len=300, is_causal=True, q_offset="bottom_right"),
    "causal, fewer keys": Case(q_len=300, kv_len=129, is_causal=True),
    "causal, fewer keys, bottom right": Case(q_len=300, kv_len=129, is_causal=True, q_offset="bottom_right"),
    "window": _square(500, is_causal=True, window=(100, 0)),
    "window on both sides": _square(500, window=(40, 60)),
    "window d128": _square(500, is_causal=True, window=(130, 0), qk_dim=128, v_dim=128),
    "documents": _square(500, is_causal=True, documents=(100, 37, 200, 163)),
    "documents, padding": _square(500, documents=(300, 3, 97)),
    "key lengths": _square(300, key_lengths=(300, 77)),
    "both lengths": _square(300, key_lengths=(300, 77), query_lengths=(211, 300)),
    "causal, key lengths": _square(300, is_causal=True, key_lengths=(300, 77)),
    "an empty example": _square(300, key_lengths=(0, 300)),
    "prefix": _square(300, prefix=(0, 150)),
    "softcap": Case(is_causal=True, softcap=5.0),
    "sinks": Case(is_causal=True, sinks=True),
    "sinks, window": _square(500, is_causal=True, window=(100, 0), sinks=True),
    "dropout": Case(is_causal=True, dropout_rate=0.2),
    "dense mask": Case(dense_mask=True),
    "dense bias": Case(bias=(2, 4, 256, 256)),
    "shared bias": Case(is_causal=True, bias=(1, 4, 256, 256)),
    "bias per key": Case(bias=(2, 1, 1, 256)),
    "grouped heads": Case(heads=8, kv_heads=2, is_causal=True),
    "one key head": Case(heads=8, kv_heads=1),
    "grouped heads d128": Case(heads=8, kv_heads=2, qk_dim=128, v_dim=128, is_causal=True),
    "queries without keys": Case(q_offset=-100, is_causal=True),
    "poisoned padding": _square(300, key_lengths=(200, 77), query_lengths=(211, 130), poisoned_padding=True),
    "causal, poisoned padding": _square(300, is_causal=True, key_lengths=(200, 77), poisoned_padding=True),
    "documents, poisoned padding": _square(500, documents=(300, 3, 97), poisoned_padding=True),
    "lse gradient": Case(is_causal=True, lse_gradient=True),
    "everything": _square(
        300,
        heads=8,
        kv_heads=2,
        is_causal=True,
        window=(120, None),
        documents=(100, 37, 150),
        key_lengths=(300, 200),
        bias=(1, 8, 300, 300),
        softcap=10.0,
        sinks=True,
        dropout_rate=0.1,
        lse_gradient=True,
    ),
}
"""The whole table, by name: what a backend must either compute within the limit or refuse with a reason."""

QUICK = ("length 129", "grouped heads d128", "documents", "causal d256", "full d128")
"""Each depth, ragged ends, heads in groups, rows with keys of their own, and no mask, where blocks of the Hopper kernel
work in pairs; for `python -m fast_layers doctor`."""

_ALSO_FLOAT16 = frozenset(
    {"causal d64", "full d128", "causal d256", "length 129", "window", "both lengths", "dense bias", "lse gradient"}
)

_MOST_SCORES = 1 << 26
"""Of all heads, that an oracle has in memory at a time, some ten times in float64; beyond, it goes head by head."""


@dataclasses.dataclass(frozen=True)
class _Draw:
    """A call as a backend gets it; and `clean`, the same without poison, for oracle and yardstick."""

    problem: Problem
    inputs: Inputs
    aux: Aux
    d_out: jax.Array
    d_lse: jax.Array
    clean: Inputs
    clean_d_out: jax.Array
    visible: jax.Array  # [B, N, T, S]

    @property
    def operands(self) -> tuple[Inputs, Aux]:
        return self.inputs, self.aux

    @property
    def cotangents(self) -> tuple[jax.Array, jax.Array]:
        return self.d_out, self.d_lse

    def residuals(self, returned: tuple[jax.Array, jax.Array]) -> Residuals:
        return Residuals(self.inputs, self.aux, *returned)

    def outputs(self, returned: tuple[jax.Array, jax.Array]) -> dict[str, Any]:
        return dict(zip(("out", "lse"), returned, strict=True))

    def gradients(self, returned: Inputs) -> dict[str, Any]:
        return _named(returned)

    @classmethod
    def of(cls, case: Case, dtype: Any, index: int) -> _Draw:
        c = case
        rng = np.random.default_rng(index)

        def normal(*shape: int):
            return on_device(rng.normal(size=shape), dtype)

        query = normal(c.batch, c.q_len, c.heads, c.qk_dim)
        key = normal(c.batch, c.kv_len, c.kv_heads, c.qk_dim)
        value = normal(c.batch, c.kv_len, c.kv_heads, c.v_dim)
        d_out = normal(c.batch, c.q_len, c.heads, c.v_dim)
        d_lse = (
            rng.normal(size=(c.batch, c.heads, c.q_len)) if c.lse_gradient else np.zeros((c.batch, c.heads, c.q_len))
        )
        bias = None if c.bias is None else normal(*c.bias)
        sinks = normal(c.heads) if c.sinks else None
        given: list[masks.Mask] = []
        if c.dense_mask:
            given.append(masks.Dense(rng.random((c.batch, c.heads, c.q_len, c.kv_len)) < 0.7))
        if c.prefix is not None:
            given.append(masks.Prefix(np.array(c.prefix, np.int32)))
        ids = None if c.documents is None else _document_ids(c.documents, c.q_len)
        if ids is not None and c.scattered:
            ids = rng.permuted(np.stack([ids] * c.batch), axis=1)
        inputs, aux, options, _ = api._prepare(
            query,
            key,
            value,
            bias,
            functools.reduce(lambda a, b: a & b, given) if given else None,
            is_causal=c.is_causal,
            local_window_size=c.window,
            q_offset=c.q_offset,
            query_seq_lengths=None if c.query_lengths is None else np.array(c.query_lengths, np.int32),
            key_value_seq_lengths=None if c.key_lengths is None else np.array(c.key_lengths, np.int32),
            segment_ids=ids,
            softcap=c.softcap,
            sinks=sinks,
            dropout_rate=c.dropout_rate,
            dropout_rng=jax.random.key(index) if c.dropout_rate else None,
        )
        options = dataclasses.replace(options, lse_returned=c.lse_gradient)
        visible = _visible(aux.mask, (c.batch, c.heads, c.q_len, c.kv_len))
        clean, clean_d_out = inputs, d_out
        if c.poisoned_padding:
            idle_rows, idle_keys = (~visible.any((1, axis))[..., None, None] for axis in (3, 2))
            clean = inputs._replace(
                **{n: jnp.where(idle_keys, 0, getattr(inputs, n)) for n in ("key", "value")},
                query=jnp.where(idle_rows, 0, inputs.query),
            )
            inputs = inputs._replace(
                **{n: jnp.where(idle_keys, jnp.nan, getattr(inputs, n)) for n in ("key", "value")},
                query=jnp.where(idle_rows, jnp.nan, inputs.query),
            )
            d_out, clean_d_out = (jnp.where(idle_rows, x, d_out) for x in (jnp.nan, 0))
        return cls(
            options.problem(inputs, aux),
            inputs,
            aux,
            d_out,
            jnp.asarray(d_lse, jnp.float32),
            clean,
            clean_d_out,
            visible,
        )


@functools.partial(jax.jit, static_argnums=1)
def _visible(mask: MaskForm, shape: tuple[int, int, int, int]) -> jax.Array:
    return jnp.broadcast_to(mask.as_array(*shape[2:]), shape)


def _document_ids(lengths: tuple[int, ...], total: int) -> np.ndarray:
    ids = np.repeat(np.arange(len(lengths)), lengths)
    return np.concatenate([ids, np.full(total - len(ids), -1)]).astype(np.int32)


def _answer(out, lse, grads: Inputs) -> Answer:
    return Answer({"out": out, "lse": lse}, _named(grads))


def _named(grads: Inputs) -> dict[str, Any]:
    named = zip(("dq", "dk", "dv", "dbias", "dsinks"), grads, strict=True)
    return {name: x for name, x in named if x is not None}


def _expected(draws: list[_Draw]) -> Expected:
    oracle_of, plain_of = _programs()
    oracle, by_autodiff, by_hand = [], [], []
    for draw in draws:
        p = draw.problem
        facts = (p.scale, p.softcap, p.dropout_rate)
        given, fixed = (draw.clean, draw.clean_d_out, draw.d_lse), (draw.visible, draw.aux.dropout)
        with jax.enable_x64(True):
            oracle.append(_answer(*jax.device_get(oracle_of(facts, *given, *fixed))))
        out, lse, *grads = jax.device_get(plain_of(facts, *given, *fixed))
        for answers, grad in zip((by_autodiff, by_hand), grads, strict=True):
            answers.append(_answer(out, lse, grad))
    return Expected(oracle, (by_autodiff, by_hand))


@functools.cache
def _programs():
    return tuple(compiled_soon(_head_by_head(fn), static_argnums=0) for fn in (_oracle, _plain))


def _head_by_head(fn: Callable[..., Any]) -> Callable[..., Any]:
    """An oracle or yardstick that has one key/value head of one example in memory at a time, where all are large."""

    @functools.wraps(fn)
    def by_head(facts, inputs: Inputs, d_out, d_lse, visible, dropout):
        between_heads = dropout is not None or inputs.bias is not None or inputs.sinks is not None
        if visible.size <= _MOST_SCORES or between_heads:
            return fn(facts, inputs, d_out, d_lse, visible, dropout)
        batch, kv_heads = inputs.key.shape[0], inputs.key.shape[2]

        def apart(x):
            axis = 2 if x.ndim == 4 else 1
            x = jnp.moveaxis(x, axis, 1)
            x = x.reshape(batch * kv_heads, 1, x.shape[1] // kv_heads, *x.shape[2:])
            return jnp.moveaxis(x, 2, axis + 1)

        def together(x):
            axis = 2 if x.ndim == 5 else 1
            x = jnp.moveaxis(x, axis + 1, 2)
            return jnp.moveaxis(x.reshape(batch, kv_heads * x.shape[2], *x.shape[3:]), 1, axis)

        # As [example, query, head, key] it has its heads where the operands have them.
        pieces = jax.tree.map(apart, (inputs, d_out, d_lse, visible.swapaxes(1, 2)))

        def one(piece):
            *given, visible = piece
            return fn(facts, *given, visible.swapaxes(1, 2), None)

        return jax.tree.map(together, lax.map(one, pieces))

    return by_head


def _oracle(facts, inputs: Inputs, d_out, d_lse, visible, dropout):
    """The reference backend, the mask as one array: so cases of one shape share one compiled function."""
    scale, softcap, rate = facts
    inputs, d_out, d_lse = jax.tree.map(lambda x: x.astype(jnp.float64), (inputs, d_out, d_lse))
    aux = Aux(MaskForm(dense=visible), dropout)
    problem = api._Options(scale, softcap, rate, None).problem(inputs, aux)
    (out, lse), pull = jax.vjp(lambda inputs: reference.forward(problem, inputs, aux), inputs)
    return out, lse, pull((d_out, d_lse))[0]


def _plain(facts, inputs: Inputs, d_out, d_lse, visible, dropout):
    """What one writes without thinking of memory: matmuls in the inputs' dtype, softmax in float32.

    (out, lse) and the gradients twice: by autodiff, and by hand from (out, lse) as every backend must. Each is lucky
    where the other is not: autodiff gives exactly 0 for a row with one key, where the other form subtracts.
    """
    rate = facts[2]
    q_len, kv_len = visible.shape[2:]
    keep = None
    if dropout is not None:
        padded = -(-kv_len // KEYS_PER_BLOCK) * KEYS_PER_BLOCK
        keep = keep_tile(dropout, 0, 0, q_len, padded, rate)[..., :kv_len]
    (out, lse), pull = jax.vjp(lambda inputs: _plain_forward(facts, inputs, visible, keep), inputs)
    by_hand = _plain_backward(facts, inputs, visible, keep, out, lse, d_out, d_lse)
    return out, lse, pull((d_out, d_lse))[0], by_hand


def _plain_scores(facts, inputs: Inputs, visible):
    """Scores [B, N, T, S] with -1e30 where masked, and the soft cap's derivative."""
    scale, softcap, _ = facts
    key = jnp.repeat(inputs.key, inputs.query.shape[2] // inputs.key.shape[2], axis=2)
    scores = jnp.einsum("btnh,bsnh->bnts", inputs.query, key, preferred_element_type=jnp.float32) * scale
    d_cap = 1.0
    if softcap is not None:
        squashed = jnp.tanh(scores / softcap)
        scores, d_cap = softcap * squashed, 1 - squashed**2
    if inputs.bias is not None:
        scores += inputs.bias.astype(jnp.float32)
    lowest = -1e30
    return jnp.where(visible, scores, lowest), d_cap


def _plain_forward(facts, inputs: Inputs, visible, keep):
    rate, kv_len = facts[2], visible.shape[3]
    scores, _ = _plain_scores(facts, inputs, visible)
    value = jnp.repeat(inputs.value, inputs.query.shape[2] // inputs.key.shape[2], axis=2)
    if inputs.sinks is not None:
        sink = jnp.broadcast_to(inputs.sinks.astype(jnp.float32)[:, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, sink], -1)
    lse = jnp.where(visible.any(-1), jax.nn.logsumexp(scores, -1), -jnp.inf)
    weights = jnp.where(visible, jax.nn.softmax(scores, -1)[..., :kv_len], 0)
    if keep is not None:
        weights = jnp.where(keep, weights / (1 - rate), 0)
    return jnp.einsum("bnts,bsnv->btnv", weights.astype(value.dtype), value), lse


def _plain_backward(facts, inputs: Inputs, visible, keep, out, lse, d_out, d_lse) -> Inputs:
    scale, _, rate = facts
    batch, kv_len, kv_heads = inputs.key.shape[:3]
    dtype, group = inputs.query.dtype, inputs.query.shape[2] // kv_heads
    some = visible.any(-1)
    finite_lse = jnp.where(some, lse, 0)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    key, value = (jnp.repeat(x, group, axis=2) for x in (inputs.key, inputs.value))

    def of_kv_heads(x):
        return x.reshape(batch, kv_len, kv_heads, group, -1).sum(3).astype(dtype)

    scores, d_cap = _plain_scores(facts, inputs, visible)
    weights = jnp.where(visible, jnp.exp(scores - finite_lse[..., None]), 0)
    survived = 1.0 if keep is None else jnp.where(keep, 1 / (1 - rate), 0)
    d_out = jnp.where(some.swapaxes(1, 2)[..., None], d_out, 0)
    d_weights = product("btnv,bsnv->bnts", d_out, value) * survived
    d_value = product("bnts,btnv->bsnv", (weights * survived).astype(dtype), d_out)
    # Summed in another order than the matmul sums d_weights, as in kernels: what cancels exactly here need not there.
    delta = jnp.cumsum(out.astype(jnp.float32) * d_out.astype(jnp.float32), -1)[..., -1].swapaxes(1, 2)
    delta -= jnp.where(some, d_lse, 0)
    d_scores = weights * (d_weights - delta[..., None])
    d_bias = d_sinks = None
    if inputs.bias is not None:
        shared = tuple(axis for axis in range(4) if inputs.bias.shape[axis] == 1)
        d_bias = d_scores.sum(shared, keepdims=True).astype(inputs.bias.dtype)
    if inputs.sinks is not None:
        weight = jnp.where(some, jnp.exp(inputs.sinks.astype(jnp.float32)[:, None] - finite_lse), 0)
        d_sinks = -(weight * delta).sum((0, 2)).astype(inputs.sinks.dtype)
    d_scores = (d_scores * d_cap * scale).astype(dtype)
    return Inputs(
        product("bnts,bsnh->btnh", d_scores, key).astype(dtype),
        of_kv_heads(product("bnts,btnh->bsnh", d_scores, inputs.query)),
        of_kv_heads(d_value),
        d_bias,
        d_sinks,
    )


def _typical_problem() -> Problem:
    x = jax.ShapeDtypeStruct((4, 2048, 16, 128), jnp.bfloat16)
    call = dispatch.explain(lambda x: api.dot_product_attention(x, x, x, is_causal=True, implementation="reference"), x)
    return call.plans[0].problem


SUITE = Suite(
    op=api.OP,
    backends=lambda: api.BACKENDS,
    typical=_typical_problem,
    cases=CASES,
    quick=QUICK,
    also_float16=_ALSO_FLOAT16,
    draw=_Draw.of,
    expect=_expected,
    plain_forward=xla.forward,
)

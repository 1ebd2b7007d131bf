"""`check_parity`: how far each backend of an op is from the reference, in values and in gradients.

    from fast_layers.testing import check_parity
    table = check_parity(backends=["xla"])
    print(table)                # one line for each case, pass and quantity, with error and limit
    assert table.ok

The oracle is the `reference` backend in float64 with every mask written out; the limit follows the one rule of
`fast_layers.testing.closeness`, with plain `jnp` code in the same dtype as the yardstick. The forward and
the backward of a backend are called by themselves, as `fast_layers.dispatch` does: the backward of one that refuses
the forward takes the residuals of the `xla` backend.

Axis letters: B batch, T queries, S keys, N query heads, K key/value heads, H query/key depth, V value depth.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fast_layers import masks
from fast_layers.arch import lowering_targets
from fast_layers.dispatch import PASSES, Backend, Pass
from fast_layers.kernel_parts.dropout import KEYS_PER_BLOCK, keep_tile
from fast_layers.ops.attention import api, reference, xla
from fast_layers.ops.attention.masks import MaskForm
from fast_layers.ops.attention.problem import Aux, Inputs, Problem, Residuals
from fast_layers.testing.closeness import Verdict, judge, stack

OP = "dot_product_attention"
# Below this many numbers in the output, one draw of the inputs is luck.
_ENOUGH_NUMBERS = 1 << 15
_MOST_DRAWS = 8


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
        return max(1, min(_MOST_DRAWS, math.ceil(_ENOUGH_NUMBERS / numbers)))


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

QUICK = ("causal d64", "causal d128", "length 129", "both lengths", "documents", "grouped heads")
"""A minute's worth of them at most, for `python -m fast_layers doctor`."""

_ALSO_FLOAT16 = frozenset(
    {"causal d64", "full d128", "causal d256", "length 129", "window", "both lengths", "dense bias", "lse gradient"}
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One quantity of one pass; or a refusal, or a breakdown, of the pass as a whole (`quantity` is None then)."""

    case: str
    dtype: str
    backend: str
    pass_: Pass
    quantity: str | None = None
    error: float | None = None
    limit: float | None = None
    failure: str | None = None
    refusal: str | None = None

    @property
    def ok(self) -> bool:
        """Not wrong: within the limit, or refused."""
        return self.failure is None


@dataclasses.dataclass(frozen=True)
class ParityTable:
    """What `check_parity` measured. `str()` gives the table to read, failures first."""

    rows: tuple[Row, ...]
    device: str

    @property
    def ok(self) -> bool:
        """No quantity beyond its limit and no pass that broke down. Refusals do not count."""
        return all(row.ok for row in self.rows)

    @property
    def failures(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.ok)

    @property
    def refusals(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.refusal is not None)

    def of_backend(self, name: str) -> ParityTable:
        return dataclasses.replace(self, rows=tuple(row for row in self.rows if row.backend == name))

    def to_json(self) -> str:
        """{"device", "ok", "rows": [{case, dtype, backend, pass, quantity, error, limit, ok, failure, refusal}]}."""
        rows = [
            {**{name.rstrip("_"): value for name, value in dataclasses.asdict(row).items()}, "ok": row.ok}
            for row in self.rows
        ]
        return json.dumps({"device": self.device, "ok": self.ok, "rows": rows}, indent=1)

    def __str__(self) -> str:
        measured = sum(row.quantity is not None for row in self.rows)
        lines = [
            f"{len(self.failures)} failed, {measured} quantities measured, {len(self.refusals)} passes refused; "
            f"on {self.device}",
            *(f"FAILED {_place(row)}: {row.failure}" for row in self.failures),
        ]
        cells = [("case", "dtype", "backend", "pass", "quantity", "error", "limit", "")]
        for row in self.rows:
            name = (row.case, row.dtype, row.backend, row.pass_)
            if row.refusal is not None:
                cells.append((*name, "refused", "", "", row.refusal))
            else:
                error, limit = ("" if x is None else f"{x:.2e}" for x in (row.error, row.limit))
                cells.append((*name, row.quantity or "", error, limit, "ok" if row.ok else "FAILED"))
        widths = [max(len(line[i]) for line in cells) for i in range(7)]
        lines += [
            "  ".join((*(text.ljust(w) for text, w in zip(line, widths, strict=False)), line[7])).rstrip()
            for line in cells
        ]
        return "\n".join(lines)


def _place(row: Row) -> str:
    return f"{row.backend}, {row.case}, {row.dtype}, {row.pass_}"


def check_parity(
    op: str = OP,
    backends: Sequence[str | Backend] | None = None,
    cases: Iterable[str] | Mapping[str, Case] | None = None,
    dtypes: Sequence[Any] | None = None,
    run: Callable[[Callable[..., Any]], Callable[..., Any]] = jax.jit,
) -> ParityTable:
    """Errors of values and gradients of each backend against the reference, on the device at hand.

    Args:
      op: only "dot_product_attention" so far.
      backends: names, or `fast_layers.dispatch.Backend`s that are not (yet) among the op's; None takes all of the op's
        but the reference.
      cases: names from `CASES`, or a mapping from names to `Case`s of your own; None takes all of `CASES`.
      dtypes: each case in each of them; None takes bfloat16, and for some cases float16 as well.
      run: makes a function that runs the pass it is given; `lambda fn: lambda *args: simulate(fn, *args).check()` runs
        it in the simulator.

    Returns:
      A `ParityTable`: for each backend, case and dtype the quantities out and lse of the forward, and the gradients
      dq, dk, dv, dbias and dsinks of the backward, each with its error and its limit; or the reason of a refusal.
      A backend that raises is reported like one that is wrong.

    Raises:
      ValueError: an op, backend or case of an unknown name.
    """
    if op != OP:
        raise ValueError(f"{op=}: parity is known for {OP!r} only")
    chosen = _backends(backends)
    rows = []
    for name, case in _cases(cases).items():
        for dtype in _dtypes(name, dtypes):
            draws = [_Draw.of(case, dtype, index) for index in range(case.draws)]
            expected = None
            for backend in chosen:
                refusals: dict[Pass, str | None] = {
                    pass_: backend.supports(draws[0].problem, _arch(), pass_) for pass_ in PASSES
                }
                if expected is None and None in refusals.values():
                    expected = _expected(draws)
                rows += _measure((name, dtype.name, backend.name), backend, refusals, draws, expected, run)
    return ParityTable(tuple(rows), str(_arch()))


def _arch():
    return lowering_targets()[0]


def _backends(given: Sequence[str | Backend] | None) -> list[Backend]:
    own = {backend.name: backend for backend in api.BACKENDS}
    if given is None:
        return [backend for name, backend in own.items() if name != "reference"]
    unknown = [b for b in given if isinstance(b, str) and b not in own]
    if unknown:
        raise ValueError(f"backends {unknown} are unknown; those of {OP} are {', '.join(own)}")
    return [own[b] if isinstance(b, str) else b for b in given]


def _cases(given: Iterable[str] | Mapping[str, Case] | None) -> Mapping[str, Case]:
    if given is None:
        return CASES
    if isinstance(given, Mapping):
        return given
    given = [given] if isinstance(given, str) else list(given)
    unknown = [name for name in given if name not in CASES]
    if unknown:
        raise ValueError(f"cases {unknown} are unknown; there are {', '.join(CASES)}")
    return {name: CASES[name] for name in given}


def _dtypes(case: str, given: Sequence[Any] | None) -> list[Any]:
    if given is None:
        given = (jnp.bfloat16, jnp.float16) if case in _ALSO_FLOAT16 else (jnp.bfloat16,)
    return [jnp.dtype(dtype) for dtype in given]


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

    @classmethod
    def of(cls, case: Case, dtype: Any, index: int) -> _Draw:
        c = case
        rng = np.random.default_rng(index)

        def normal(*shape: int):
            return jnp.asarray(rng.normal(size=shape), dtype)

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
        visible = jnp.broadcast_to(aux.mask.as_array(c.q_len, c.kv_len), (c.batch, c.heads, c.q_len, c.kv_len))
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


def _document_ids(lengths: tuple[int, ...], total: int) -> np.ndarray:
    ids = np.repeat(np.arange(len(lengths)), lengths)
    return np.concatenate([ids, np.full(total - len(ids), -1)]).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class _Answer:
    """Quantities by pass and name; one more leading axis, for the draws, once stacked."""

    forward: dict[str, Any]
    backward: dict[str, Any]

    @classmethod
    def of(cls, out, lse, grads: Inputs) -> _Answer:
        return cls({"out": out, "lse": lse}, _named(grads))


def _named(grads: Inputs) -> dict[str, Any]:
    named = zip(("dq", "dk", "dv", "dbias", "dsinks"), grads, strict=True)
    return {name: x for name, x in named if x is not None}


@dataclasses.dataclass(frozen=True)
class _Expected:
    """One answer for each draw."""

    oracle: list[_Answer]
    yardsticks: tuple[list[_Answer], ...]

    def of(self, pass_: Pass, name: str) -> list[Any]:
        return [
            stack([getattr(answer, pass_)[name] for answer in answers]) for answers in (self.oracle, *self.yardsticks)
        ]


def _expected(draws: list[_Draw]) -> _Expected:
    oracle, by_autodiff, by_hand = [], [], []
    for draw in draws:
        p = draw.problem
        facts = (p.scale, p.softcap, p.dropout_rate)
        given, fixed = (draw.clean, draw.clean_d_out, draw.d_lse), (draw.visible, draw.aux.dropout)
        with jax.enable_x64(True):
            wide = jax.tree.map(lambda x: x.astype(jnp.float64), given)
            oracle.append(_Answer.of(*jax.device_get(_oracle(facts, *wide, *fixed))))
        out, lse, *grads = jax.device_get(_plain(facts, *given, *fixed))
        for answers, grad in zip((by_autodiff, by_hand), grads, strict=True):
            answers.append(_Answer.of(out, lse, grad))
    return _Expected(oracle, (by_autodiff, by_hand))


@functools.partial(jax.jit, static_argnums=0)
def _oracle(facts, inputs: Inputs, d_out, d_lse, visible, dropout):
    """The reference backend, the mask as one array: so cases of one shape share one compiled function."""
    scale, softcap, rate = facts
    aux = Aux(MaskForm(dense=visible), dropout)
    problem = api._Options(scale, softcap, rate, None).problem(inputs, aux)
    (out, lse), pull = jax.vjp(lambda inputs: reference.forward(problem, inputs, aux), inputs)
    return out, lse, pull((d_out, d_lse))[0]


@functools.partial(jax.jit, static_argnums=0)
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


def _measure(
    place: tuple[str, str, str],
    backend: Backend,
    refusals: Mapping[Pass, str | None],
    draws: list[_Draw],
    expected: _Expected | None,
    run: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> list[Row]:
    case, dtype, name = place
    rows = [Row(case, dtype, name, pass_, refusal=reason) for pass_, reason in refusals.items() if reason is not None]
    residuals_of = backend if refusals["forward"] is None else None
    # Not jitted with `problem` as a static argument: a backend given twice, with other functions, is another one.
    forward = run(lambda draw: (residuals_of.fwd if residuals_of else xla.forward)(draws[0].problem, *draw))
    backward = run(lambda residuals, d_out, d_lse: backend.bwd(draws[0].problem, residuals, d_out, d_lse))
    forward_of = functools.cache(lambda index: forward((draws[index].inputs, draws[index].aux)))
    answers: dict[Pass, list[dict[str, Any]]] = {"forward": [], "backward": []}
    for pass_ in PASSES:
        if refusals[pass_] is not None:
            continue
        assert expected is not None
        try:
            for index, draw in enumerate(draws):
                out, lse = forward_of(index)
                if pass_ == "forward":
                    answers[pass_].append(jax.device_get({"out": out, "lse": lse}))
                else:
                    residuals = Residuals(draw.inputs, draw.aux, out, lse)
                    answers[pass_].append(jax.device_get(_named(backward(residuals, draw.d_out, draw.d_lse))))
        except Exception as error:
            # A kernel that does not compile or crashes is a finding, and the others still want to be measured.
            first_line = (str(error).splitlines() or [""])[0]
            rows.append(Row(case, dtype, name, pass_, failure=f"raised {type(error).__name__}: {first_line}"))
            continue
        for quantity in getattr(expected.oracle[0], pass_):
            verdict = _judge(answers[pass_], quantity, *expected.of(pass_, quantity))
            rows.append(Row(case, dtype, name, pass_, quantity, verdict.error, verdict.limit, verdict.failure))
    return rows


def _judge(answers: list[dict[str, Any]], quantity: str, oracle, *yardsticks):
    if any(quantity not in answer for answer in answers):
        return Verdict(None, None, f"{quantity}: not returned")
    return judge(stack([answer[quantity] for answer in answers]), oracle, *yardsticks, name=quantity)

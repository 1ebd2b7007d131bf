"""Calls of `dot_product_attention` as data: drawn by hypothesis, built into arrays, and judged by the numpy oracle."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import fast_layers
from fast_layers import masks
from fast_layers.arch import lowering_targets
from fast_layers.dispatch import PASSES
from fast_layers.ops.attention import api
from fast_layers.ops.attention.backends import BACKENDS
from ops.attention import oracle


def _takes_float32_here(backend) -> bool:
    """Most tests here are in float32; tests/gpu holds what takes only 16 bits against the reference."""
    x = jax.ShapeDtypeStruct((1, 128, 1, 64), np.float32)
    (plan,) = fast_layers.explain(
        lambda x: fast_layers.dot_product_attention(x, x, x, implementation="reference"), x
    ).plans
    return all(backend.supports(plan.problem, lowering_targets()[0], pass_) is None for pass_ in PASSES)


TESTED = [backend.name for backend in BACKENDS if backend.name != "reference" and _takes_float32_here(backend)]
"""The backends to hold against the reference; a new one is picked up from here."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One call; the arrays follow from `seed`. Its repr reproduces it."""

    batch: tuple[int, ...] = (2,)
    q_len: int = 7
    kv_len: int = 7
    heads: int = 2
    kv_heads: int = 2
    qk_dim: int = 8
    v_dim: int = 8
    seed: int = 0
    scale: float | None = None
    is_causal: bool = False
    window: int | tuple[int | None, int | None] | None = None
    lengths: tuple[bool, bool] = (False, False)  # of queries, of keys
    segments: str | None = None  # "self", "pair", "shared" (one row of ids for all examples)
    q_offset: int | str = 0  # an int, "array" or "bottom_right"
    mask: str | None = None  # "dense", "prefix", "structured"
    mask_broadcast: tuple[bool, ...] = (False, False, False, False)  # of batch, heads, queries, keys: size 1
    bias_broadcast: tuple[bool, ...] | None = None
    softcap: float | None = None
    sinks: bool = False
    dropout_rate: float = 0.0
    broadcast_dropout: bool = False
    precision: Any = None

    def __str__(self) -> str:
        """What differs from the defaults, for the names of tests."""
        fields = ((f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self))
        return ",".join(f"{name}={value}".replace(" ", "") for name, value, default in fields if value != default)


@dataclasses.dataclass(frozen=True)
class Built:
    """`operands` and cotangents have the call's own shapes; `visible` and `keep` are [B, N|1, T, S]."""

    case: Case
    operands: oracle.Operands
    options: dict[str, Any]
    visible: np.ndarray
    keep: np.ndarray | None
    d_out: np.ndarray
    d_lse: np.ndarray

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.case.qk_dim) if self.case.scale is None else self.case.scale

    def oracle(self, dtype=np.float64, *, reverse_keys=False, **how: Any) -> oracle.Attended:
        """The answer in `dtype`, in the call's own shapes; sums over keys optionally in the other order."""
        flip = slice(None, None, -1 if reverse_keys else 1)
        query, key, value, bias, sinks = self.operands
        rank = len(self.case.batch)
        bias_shape = None if bias is None else bias.shape

        def flat(x):
            return x.reshape(-1, *x.shape[rank:])

        answer = oracle.attend(
            oracle.Operands(
                flat(query),
                flat(key)[:, flip],
                flat(value)[:, flip],
                None if bias is None else bias.reshape(-1, *bias.shape[-3:])[..., flip],
                sinks,
            ),
            self.visible[..., flip],
            flat(self.d_out),
            flat(self.d_lse),
            scale=self.scale,
            softcap=self.case.softcap,
            keep=None if self.keep is None else self.keep[..., flip],
            rate=self.case.dropout_rate,
            dtype=dtype,
            functions=oracle.Functions(jnp.exp, jnp.log, jnp.tanh) if dtype == np.float32 else None,
            **how,
        )
        grads = answer.grads
        shaped = oracle.Operands(
            grads.query.reshape(query.shape),
            grads.key[:, flip].reshape(key.shape),
            grads.value[:, flip].reshape(value.shape),
            None if bias_shape is None else grads.bias[..., flip].reshape(bias_shape),
            grads.sinks,
        )
        return oracle.Attended(answer.out.reshape(self.d_out.shape), answer.lse.reshape(self.d_lse.shape), shaped)

    @property
    def static_options(self) -> dict[str, Any]:
        c = self.case
        return {
            "scale": c.scale,
            "is_causal": c.is_causal,
            "local_window_size": c.window,
            "softcap": c.softcap,
            "dropout_rate": c.dropout_rate,
            "broadcast_dropout": c.broadcast_dropout,
            "precision": c.precision,
            **({"q_offset": c.q_offset} if c.q_offset != "array" else {}),
        }

    def refusal(self, implementation: str) -> str | None:
        """Why the backend does not take this call, if so."""
        problems = []

        def prepare(operands, options):
            *qkv, bias, sinks = operands
            inputs, aux, given, _ = api._prepare(*qkv, bias, sinks=sinks, **self.static_options, **options)
            problems.append(given.problem(inputs, aux))

        # Not by `explain`, which would trace an implementation as well.
        jax.eval_shape(prepare, self.operands, self.options)
        (backend,) = (b for b in BACKENDS if b.name == implementation)
        (problem,), arch = problems, lowering_targets()[0]
        return next(filter(None, (backend.supports(problem, arch, pass_) for pass_ in PASSES)), None)


def yardsticks(built: Built, dtype=np.float32) -> list[oracle.Attended]:
    """Plain numpy in the type under test, four times: sums in two orders, gradients in the two usual forms."""
    return [
        built.oracle(dtype, reverse_keys=in_order, sequential=in_order, from_residuals=from_residuals)
        for in_order in (False, True)
        for from_residuals in (False, True)
    ]


def runner(implementation: str | None, *, optimise: bool = True) -> Callable[[Built], oracle.Attended]:
    """(out, lse, gradients) by the package's op; draws of one case share the compiled function.

    `optimise=False` halves the time of compiling, which is nearly all there is.
    """
    level = {} if optimise else {"compiler_options": {"xla_backend_optimization_level": 0}}

    @functools.partial(jax.jit, static_argnums=0, **level)
    def call(static, operands, options, d_out, d_lse):
        def op(operands):
            query, key, value, bias, sinks = operands
            return fast_layers.dot_product_attention(
                query,
                key,
                value,
                bias,
                sinks=sinks,
                return_residual=True,
                implementation=implementation,
                **dict(static),
                **options,
            )

        (out, lse), pull = jax.vjp(op, operands)
        return oracle.Attended(out, lse, *pull((d_out, d_lse)))

    def run(built: Built) -> oracle.Attended:
        static = tuple(built.static_options.items())
        return call(static, built.operands, built.options, built.d_out, built.d_lse)

    return run


def build(case: Case, dtype: Any = np.float32, draw: int = 0) -> Built:
    """Draws of one case differ in the arrays only, and so share a compiled function."""
    c = case
    rng = np.random.default_rng((c.seed, draw))
    flat_batch = math.prod(c.batch)

    def normal(*shape):
        return np.asarray(rng.normal(size=shape)).astype(dtype)

    def dims(broadcast):
        batch_one, *rest = broadcast
        sizes = (c.heads, c.q_len, c.kv_len)
        leading = tuple(1 for _ in c.batch) if batch_one else c.batch
        return (*leading, *(1 if one else size for one, size in zip(rest, sizes, strict=True)))

    query = normal(*c.batch, c.q_len, c.heads, c.qk_dim)
    key = normal(*c.batch, c.kv_len, c.kv_heads, c.qk_dim)
    value = normal(*c.batch, c.kv_len, c.kv_heads, c.v_dim)
    bias = None if c.bias_broadcast is None else normal(*dims(c.bias_broadcast))
    sinks = normal(c.heads) if c.sinks else None

    options: dict[str, Any] = {}
    facts: dict[str, Any] = {"causal": c.is_causal}
    if c.window is not None:
        facts["window"] = (c.window, c.window) if isinstance(c.window, int) else c.window
    q_lengths = rng.integers(0, c.q_len + 1, c.batch).astype(np.int32)
    kv_lengths = rng.integers(0, c.kv_len + 1, c.batch).astype(np.int32)
    if c.lengths[0]:
        options["query_seq_lengths"] = facts["q_lengths"] = q_lengths
    if c.lengths[1]:
        options["key_value_seq_lengths"] = facts["kv_lengths"] = kv_lengths
    if c.q_offset == "array":
        options["q_offset"] = facts["q_offset"] = rng.integers(-3, c.kv_len + 1, c.batch).astype(np.int32)
    elif c.q_offset == "bottom_right":
        facts["q_offset"] = (kv_lengths if c.lengths[1] else c.kv_len) - (q_lengths if c.lengths[0] else c.q_len)
    else:
        facts["q_offset"] = c.q_offset
    if c.segments is not None:
        leading = () if c.segments == "shared" else c.batch
        ids = rng.integers(-1, 3, (*leading, c.q_len)).astype(np.int32)
        key_ids = ids if c.segments == "self" else rng.integers(-1, 3, (*leading, c.kv_len)).astype(np.int32)
        options["segment_ids"] = ids if c.segments == "self" else (ids, key_ids)
        facts["q_ids"], facts["kv_ids"] = ids.reshape(-1, c.q_len), key_ids.reshape(-1, c.kv_len)
    if c.mask == "dense":
        mask = rng.random(dims(c.mask_broadcast)) < 0.7
        options["mask"] = mask
        facts["dense"] = np.broadcast_to(mask, (*c.batch, *mask.shape[-3:])).reshape(-1, *mask.shape[-3:])
    elif c.mask == "prefix":
        facts["prefix"] = rng.integers(0, c.kv_len + 1, c.batch).astype(np.int32)
        options["mask"] = masks.Prefix(facts["prefix"])
    elif c.mask == "structured":
        # What the arguments say once more, differently; and a window, which intersects with theirs.
        size = c.seed % (c.kv_len + 1)
        options["mask"] = masks.KeyLengths(size) & masks.LocalWindow(size, None)
        facts["dense"] = oracle.visible(
            flat_batch, c.q_len, c.kv_len, window=(size, None), kv_lengths=size, q_offset=facts["q_offset"]
        )
    keep = None
    if c.dropout_rate:
        options["dropout_rng"] = jax.random.key(c.seed + draw)
        words = np.asarray(jax.random.bits(options["dropout_rng"], (2,), jnp.uint32))
        keep = oracle.keep(words, flat_batch, c.heads, c.q_len, c.kv_len, c.dropout_rate, broadcast=c.broadcast_dropout)
    lse_dtype = np.float64 if np.dtype(dtype) == np.float64 else np.float32
    return Built(
        case,
        oracle.Operands(query, key, value, bias, sinks),
        options,
        oracle.visible(flat_batch, c.q_len, c.kv_len, **facts),
        keep,
        d_out=normal(*c.batch, c.q_len, c.heads, c.v_dim),
        d_lse=normal(*c.batch, c.q_len, c.heads).astype(lse_dtype),
    )


@st.composite
def cases(draw, lengths: tuple[int, ...] = (1, 7, 33, 64, 129), scores: int = 1 << 17) -> Case:
    """Every argument, in any combination; at most about `scores` entries in the score matrix."""
    batch = draw(st.sampled_from([(), (1,), (2,), (3,), (2, 1), (2, 2)]))
    heads, kv_heads = draw(st.sampled_from([(1, 1), (2, 2), (2, 1), (4, 2), (3, 1), (6, 3)]))
    cells = math.prod(batch) * heads
    q_len = draw(st.sampled_from(lengths))
    kv_len = draw(st.just(q_len) | st.sampled_from([n for n in lengths if n * q_len * cells <= scores] or [1]))
    qk_dim = draw(st.sampled_from([1, 4, 8, 24]))
    side = st.none() | st.integers(0, kv_len)
    broadcast = st.tuples(*[st.booleans()] * 4)
    segments = ["pair", "shared", *(["self"] if q_len == kv_len else [])]
    return Case(
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        heads=heads,
        kv_heads=kv_heads,
        qk_dim=qk_dim,
        v_dim=draw(st.sampled_from([qk_dim, 3, 16])),
        seed=draw(st.integers(0, 2**16)),
        scale=draw(st.sampled_from([None, None, 0.5, -1.0, 0.0])),
        is_causal=draw(st.booleans()),
        window=draw(st.none() | st.integers(0, kv_len) | st.tuples(side, side)),
        lengths=draw(st.tuples(st.booleans(), st.booleans())),
        segments=draw(st.none() | st.sampled_from(segments)),
        q_offset=draw(st.sampled_from([0, "array", "bottom_right"]) | st.integers(-3, kv_len)),
        mask=draw(st.sampled_from([None, "dense", "prefix", "structured"])),
        mask_broadcast=draw(broadcast),
        bias_broadcast=draw(st.none() | broadcast),
        softcap=draw(st.sampled_from([None, 2.0, 30.0])),
        sinks=draw(st.booleans()),
        dropout_rate=draw(st.sampled_from([0.0, 0.0, 0.1, 0.5, 0.9])),
        broadcast_dropout=draw(st.booleans()),
        precision=draw(st.sampled_from([None, "highest"])),
    )

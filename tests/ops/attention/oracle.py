"""Attention and its gradients in numpy, one example and one head at a time, in any floating type.

Written from the formulas in the public docstrings and independently of the package: masks are compared position by
position (no intervals), the gradients are derived by hand, Philox multiplies in 64 bits.

Axis letters: B examples, T queries, S keys, N query heads, K key/value heads, H query/key depth, V value depth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Operands(NamedTuple):
    """What gradients flow to; also the type of the gradients."""

    query: np.ndarray  # [B, T, N, H]
    key: np.ndarray  # [B, S, K, H]
    value: np.ndarray  # [B, S, K, V]
    bias: np.ndarray | None = None  # [B|1, N|1, T|1, S|1]
    sinks: np.ndarray | None = None  # [N]


class Attended(NamedTuple):
    out: np.ndarray  # [B, T, N, V]
    lse: np.ndarray  # [B, T, N]
    grads: Operands


class Functions(NamedTuple):
    """Elementary functions of arrays."""

    exp: Callable
    log: Callable
    tanh: Callable


def attend(
    operands: Operands,
    visible: np.ndarray,
    d_out: np.ndarray,
    d_lse: np.ndarray,
    *,
    scale: float,
    softcap: float | None = None,
    keep: np.ndarray | None = None,
    rate: float = 0.0,
    dtype=np.float64,
    functions: Functions | None = None,
    from_residuals: bool = False,
    sequential: bool = False,
) -> Attended:
    """`visible` and `keep` broadcast to [B, N, T, S]; `d_out` and `d_lse` are the cotangents of out and lse.

    For yardsticks: `functions` may be replaced, by a framework's own, which are off by more ulps than numpy's;
    `from_residuals` takes the gradients from (out, lse) alone, as every backend must, instead of from the weights
    themselves; `sequential` adds up one term after the other, where BLAS and numpy have many partial sums.
    """
    exp, log, tanh = functions or Functions(np.exp, np.log, np.tanh)
    matmul, total_of = (_matmul_in_order, _sum_in_order) if sequential else (np.matmul, lambda x: x.sum(1))
    query, key, value = (np.asarray(x).astype(dtype) for x in operands[:3])
    (batch, q_len, heads, _), kv_len = query.shape, key.shape[1]
    everything = (batch, heads, q_len, kv_len)
    visible = np.broadcast_to(visible, everything)
    survived = np.ones(everything, dtype)
    if keep is not None:
        survived = np.broadcast_to(keep, everything).astype(dtype) / dtype(1 - rate)
    bias = sinks = None
    d_bias = np.zeros(everything, dtype)
    d_sinks = np.zeros(heads, dtype)
    if operands.bias is not None:
        bias = np.broadcast_to(np.asarray(operands.bias).astype(dtype), everything)
    if operands.sinks is not None:
        sinks = np.asarray(operands.sinks).astype(dtype)
    d_out, d_lse = (np.asarray(x).astype(dtype) for x in (d_out, d_lse))

    out = np.zeros((batch, q_len, heads, value.shape[-1]), dtype)
    lse = np.full((batch, q_len, heads), -np.inf, dtype)
    d_query, d_key, d_value = (np.zeros(x.shape, dtype) for x in (query, key, value))
    for b, n in np.ndindex(batch, heads):
        k = n // (heads // key.shape[2])

        def scores_of(query, key, b=b, n=n):
            scores, d_cap = matmul(query, key.T) * dtype(scale), dtype(1)
            if softcap is not None:
                squashed = np.asarray(tanh(scores / dtype(softcap)))
                scores, d_cap = dtype(softcap) * squashed, (1 - squashed) * (1 + squashed)
            if bias is not None:
                scores = scores + bias[b, n]
            return np.where(visible[b, n], scores, -np.inf), d_cap

        scores, d_cap = scores_of(query[b, :, n], key[b, :, k])
        some = scores.max(1) > -np.inf
        sink = np.full(q_len, -np.inf if sinks is None else sinks[n], dtype)
        row_max = np.where(some, np.maximum(scores.max(1), sink), 0)
        exps, sink_exp = (
            np.asarray(exp(x)) for x in (scores - row_max[:, None], np.where(some, sink - row_max, -np.inf))
        )
        total = np.where(some, total_of(exps) + sink_exp, 1)
        weights, sink_weight = exps / total[:, None], sink_exp / total
        out[b, :, n] = matmul(weights * survived[b, n], value[b, :, k])
        finite_lse = row_max + np.asarray(log(total))
        lse[b, :, n] = np.where(some, finite_lse, -np.inf)

        d_out_rows, d_lse_rows = np.where(some[:, None], d_out[b, :, n], 0), np.where(some, d_lse[b, :, n], 0)
        d_weights = matmul(d_out_rows, value[b, :, k].T) * survived[b, n]
        mean = total_of(weights * d_weights)
        if from_residuals:
            # A kernel's backward has other tiles than its forward, and so rounds the scores anew.
            scores, d_cap = scores_of(query[b, :, n, ::-1], key[b, :, k, ::-1])
            weights = np.asarray(exp(scores - finite_lse[:, None]))
            sink_weight = np.asarray(exp(np.where(some, sink - finite_lse, -np.inf)))
            mean = total_of(out[b, :, n] * d_out_rows)
        d_value[b, :, k] += matmul((weights * survived[b, n]).T, d_out_rows)
        d_scores = weights * (d_weights - mean[:, None] + d_lse_rows[:, None])
        d_sinks[n] += (sink_weight * (d_lse_rows - mean)).sum()
        d_bias[b, n] = d_scores
        d_scores = d_scores * d_cap * dtype(scale)
        d_query[b, :, n] = matmul(d_scores, key[b, :, k])
        d_key[b, :, k] += matmul(d_scores.T, query[b, :, n])
    if operands.bias is not None:
        shape = operands.bias.shape
        d_bias = d_bias.sum(tuple(a for a in range(4) if shape[a] == 1), keepdims=True)
    grads = Operands(
        d_query, d_key, d_value, d_bias if bias is not None else None, d_sinks if sinks is not None else None
    )
    return Attended(out, lse, grads)


def _matmul_in_order(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    total = np.zeros((a.shape[0], b.shape[1]), a.dtype)
    for column, row in zip(a.T, b, strict=True):
        total += column[:, None] * row
    return total


def _sum_in_order(x: np.ndarray) -> np.ndarray:
    return x.cumsum(1)[:, -1]


def visible(
    batch: int,
    q_len: int,
    kv_len: int,
    *,
    q_offset=0,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    prefix=None,
    q_lengths=None,
    kv_lengths=None,
    q_ids=None,
    kv_ids=None,
    dense=None,
) -> np.ndarray:
    """[B, 1|N, T, S] from the definitions; per-example values are scalars or [B], ids [B, T] and [B, S] or one row."""

    def example(x):
        return np.asarray(x).reshape(-1, 1, 1, 1)

    query = np.arange(q_len)[None, None, :, None]
    key = np.arange(kv_len)[None, None, None, :]
    position = query + example(q_offset)
    seen = np.ones((batch, 1, q_len, kv_len), bool)
    left, right = window
    if causal:
        seen &= key <= position
    if left is not None:
        seen &= key >= position - left
    if right is not None:
        seen &= key <= position + right
    if prefix is not None:
        seen &= (key <= position) | (key < example(prefix))
    if q_lengths is not None:
        seen &= query < example(q_lengths)
    if kv_lengths is not None:
        seen &= key < example(kv_lengths)
    if q_ids is not None:
        q_ids, kv_ids = np.atleast_2d(q_ids)[:, None, :, None], np.atleast_2d(kv_ids)[:, None, None, :]
        seen &= (q_ids == kv_ids) & (q_ids >= 0)
    return seen if dense is None else seen & dense


def keep(words, batch: int, heads: int, q_len: int, kv_len: int, rate: float, *, broadcast: bool) -> np.ndarray:
    """[B, N, T, S]: which softmax weights survive, from the two words of the seed."""
    b, n, q, k = np.ogrid[: 1 if broadcast else batch, : 1 if broadcast else heads, :q_len, :kv_len]
    block, column = divmod(k, 32)
    word, column = divmod(column, 8)
    pair, upper = divmod(column, 2)
    counter = np.broadcast_arrays(q, 4 * block + pair, n, b)
    drawn = np.stack(philox4x32([c.astype(np.uint64) for c in counter], [int(w) for w in words]))
    chosen = np.take_along_axis(drawn, np.broadcast_to(word, counter[0].shape)[None], axis=0)[0]
    sixteen_bits = np.where(upper == 1, chosen >> np.uint64(16), chosen & np.uint64(0xFFFF))
    kept = sixteen_bits >= round(rate * 65536)
    return np.broadcast_to(kept, (batch, heads, q_len, kv_len))


def philox4x32(counter, key, rounds: int = 7):
    """Four uint64 arrays that hold 32 bits each; `counter` holds four arrays, `key` two ints."""
    low32 = np.uint64(0xFFFFFFFF)
    c = [np.asarray(x, np.uint64) for x in counter]
    key = list(key)
    for _ in range(rounds):
        first, second = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        k0, k1 = (np.uint64(k) for k in key)
        c = [
            (second >> np.uint64(32)) ^ c[1] ^ k0,
            second & low32,
            (first >> np.uint64(32)) ^ c[3] ^ k1,
            first & low32,
        ]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return c

"""`dot_product_attention`: validation, the static Problem, the choice of backend, and the gradient rule."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import operator
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, ArrayLike, Float

from fast_layers import dispatch
from fast_layers.kernel_parts.dropout import DropoutSeed, make_seed
from fast_layers.ops.attention import masks as M
from fast_layers.ops.attention import reference, sharding
from fast_layers.ops.attention.backends import BACKENDS
from fast_layers.ops.attention.problem import Aux, Inputs, MaskFacts, Problem, Residuals
from fast_layers.ops.operands import floating, is_integer, is_real
from fast_layers.ops.static_options import check_dropout_rate, flag, hashable_precision

OP = "dot_product_attention"
RESIDUAL_NAMES = ("fast_layers_attention_out", "fast_layers_attention_lse")
"""`checkpoint_name`s of what the forward saves, for `jax.checkpoint_policies.save_only_these_names`."""


def _own_rank_promotion(fn):
    """A user's ban on implicit rank promotion is about the user's own arrays."""

    @functools.wraps(fn)
    def call(*args, **kwargs):
        with jax.numpy_rank_promotion("allow"):
            return fn(*args, **kwargs)

    return call


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | M.Mask | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    segment_ids: ArrayLike | tuple[ArrayLike, ArrayLike] | None = None,
    q_offset: ArrayLike | Literal["bottom_right"] = 0,
    softcap: float | None = None,
    sinks: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    broadcast_dropout: bool = False,
    precision: Any = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    r"""softmax(scale * query key^T + bias) value, without the score matrix in memory.

    A superset of `jax.nn.dot_product_attention`: arguments of the same name have the same meaning. Axis letters:
    B any number of batch dims (also none), T queries, S keys, N query heads, K key/value heads (N a multiple of K),
    H query/key depth, V value depth.

    Args:
      query: [B.., T, N, H], floating point; key and value have the same dtype.
      key: [B.., S, K, H].
      value: [B.., S, K, V].
      bias: added to the scaled (and soft-capped) scores; broadcastable to [B.., N, T, S]. Differentiable.
      mask: a `fast_layers.masks.Mask`, or a boolean array broadcastable to [B.., N, T, S], True where a query may see
        a key. A structured mask is smaller and faster. All masks given in whatever form are combined by "and".
      scale: multiplies the scores, a number that float32 holds; 1 / sqrt(H) if None.
      is_causal: query i sees keys up to position i + q_offset.
      query_seq_lengths: int [B..]; later query rows see nothing.
      key_value_seq_lengths: int [B..]; later keys are never seen.
      local_window_size: (left, right), each an int or None (unbounded): query i sees keys from
        i + q_offset - left to i + q_offset + right. One int stands for both. A size beyond all keys is no bound.
      segment_ids: packed documents: int [B.., T], or a pair ([B.., T], [B.., S]). Equal ids see each other; a negative
        id is padding, which sees nothing and is seen by nothing. [T] serves all examples. A pair is a tuple, or a list
        of two arrays; a list of numbers, nested or not, is one array. Ids that int32 does not hold are refused (see
        `fast_layers.masks.Segments`).
      q_offset: key position at which query 0 stands, for causal, window and prefix masks: an int or an int array
        [B..], of any size. 0 is top-left alignment, as in jax.nn. "bottom_right" aligns the last query with the last
        key (of the given lengths, where there are any).
      softcap: c > 0 (that float32 holds) replaces scores s by c * tanh(s / c), before bias and masks.
      sinks: [N], one logit per head that joins the softmax's denominator with a value of 0. Differentiable.
      dropout_rate: in [0, 1); softmax weights are dropped, survivors divided by 1 - rate. The rate is applied in
        steps of 2^-16, by a pure function of (dropout_rng, example, head, query, key) that all backends share.
      dropout_rng: a jax PRNG key; required if dropout_rate > 0.
      broadcast_dropout: drop the same weights in all examples and heads.
      precision: of the matmuls, as in `jax.lax.dot_general`.
      implementation: a backend by name, which raises if it refuses; None takes the best (see `fast_layers.explain`).
      return_residual: also return lse [B.., T, N], the natural logarithm of the softmax's denominator, in float32
        (float64 for float64 inputs). Differentiable.

    Returns:
      [B.., T, N, V] in query's dtype; with `return_residual` a pair with lse.

    A query that sees no key has output 0, gradients 0 and lse -inf. NaN or inf in keys and values affect only the
    queries that see them. The default backends support reverse mode; `implementation="reference"` also supports
    forward mode and higher derivatives, with O(T S) memory.

    Raises:
      ValueError: shapes, dtypes or options that do not fit, or a backend asked for by name that refuses.

    Source: Dao et al., "FlashAttention" (2022) and "FlashAttention-2" (2023); Rabe and Staats (2021).
    """
    flag("return_residual", return_residual)
    inputs, aux, options, batch = _prepare(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        segment_ids=segment_ids,
        q_offset=q_offset,
        softcap=softcap,
        sinks=sinks,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        broadcast_dropout=broadcast_dropout,
        precision=precision,
    )
    options = dataclasses.replace(options, lse_returned=return_residual)
    out, lse = sharding.per_shard(functools.partial(_choose_and_run, options, implementation), inputs, aux)
    out = out.reshape(*batch, *out.shape[1:])
    if not return_residual:
        return out
    lse = lse.swapaxes(1, 2)
    return out, lse.reshape(*batch, *lse.shape[1:])


def attention_weights(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | M.Mask | None = None,
    **options: Any,
) -> tuple[Float[Array, "*B T N V"], Float[Array, "*B N T S"]]:
    """(output, softmax weights before dropout), written out in O(T S) memory by the reference backend.

    Takes what `dot_product_attention` takes, less `implementation` and `return_residual`. For looking at attention
    maps; Flax's `sow_weights` uses it.

    Returns:
      The output in query's dtype, as `dot_product_attention` has it, and the weights, in the same dtype: each row sums
      to 1, less what a sink takes; a query that sees no key has weights 0.

    Raises:
      ValueError: as `dot_product_attention`, and for the two arguments that it has and this has not.
      TypeError: an argument of another name.

    Source: Vaswani et al., "Attention Is All You Need" (2017).
    """
    for name in sorted(options.keys() - inspect.signature(_prepare).parameters.keys()):
        if name in ("implementation", "return_residual"):
            raise ValueError(
                f"{name}={options[name]!r}: attention_weights is always by the reference backend and returns "
                f"(output, weights); leave {name} out, or call dot_product_attention"
            )
        raise TypeError(f"attention_weights() got an unexpected keyword argument {name!r}")
    inputs, aux, given, batch = _prepare(query, key, value, bias, mask, **options)
    attended = _own_rank_promotion(reference.attend)(given.problem(inputs, aux), inputs, aux)
    return tuple(x.reshape(*batch, *x.shape[1:]) for x in (attended.out, attended.weights))  # pyright: ignore


@dataclasses.dataclass(frozen=True)
class _Options:
    """The options of a call that do not depend on shapes, so that a shard can make its own Problem."""

    scale: float
    softcap: float | None
    dropout_rate: float
    precision: Any
    reproducible: bool = True
    lse_returned: bool = False

    def problem(self, inputs: Inputs, aux: Aux) -> Problem:
        batch, q_len, heads, qk_dim = inputs.query.shape
        _, kv_len, kv_heads, v_dim = inputs.value.shape
        return Problem(
            batch=batch,
            q_len=q_len,
            kv_len=kv_len,
            heads=heads,
            kv_heads=kv_heads,
            qk_dim=qk_dim,
            v_dim=v_dim,
            dtype=inputs.query.dtype,
            mask=MaskFacts.of(aux.mask),
            bias=None if inputs.bias is None else inputs.bias.shape,
            bias_dtype=None if inputs.bias is None else inputs.bias.dtype,
            sinks=inputs.sinks is not None,
            **dataclasses.asdict(self),
        )


@_own_rank_promotion
def _choose_and_run(options: _Options, implementation: str | None, inputs: Inputs, aux: Aux):
    plan = dispatch.plan(OP, BACKENDS, options.problem(inputs, aux), implementation)
    both = [plan.sole_backend(pass_) for pass_ in dispatch.PASSES]
    if all(backend is not None and backend.fwd is reference.forward for backend in both):
        # Without a gradient rule of ours, JAX differentiates the formula itself, forward and reverse, to any order.
        return reference.forward(plan.problem, inputs, aux)
    return _attend(plan, inputs, aux)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: dispatch.Plan, inputs: Inputs, aux: Aux):
    return plan.run("forward", inputs, aux)


def _attend_fwd(plan: dispatch.Plan, inputs: Inputs, aux: Aux):
    (out, lse), sizes = plan.run_saving(inputs, aux)
    of_out, of_lse = RESIDUAL_NAMES
    out, lse = checkpoint_name(out, of_out), checkpoint_name(lse, of_lse)
    if sizes is not None:
        sizes = checkpoint_name(sizes, of_lse)  # small as lse is
    return (out, lse), Residuals(inputs, aux, out, lse, sizes)


@_own_rank_promotion
def _attend_bwd(plan: dispatch.Plan, residuals: Residuals, gradients):
    return plan.run("backward", residuals, *gradients), None


_attend.defvjp(_attend_fwd, _attend_bwd)


@_own_rank_promotion
def _prepare(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    scale=None,
    is_causal=False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    segment_ids=None,
    q_offset: Any = 0,
    softcap=None,
    sinks=None,
    dropout_rate=0.0,
    dropout_rng: Any = None,
    broadcast_dropout=False,
    precision=None,
) -> tuple[Inputs, Aux, _Options, tuple[int, ...]]:
    """Validate, flatten the batch dims and reduce all masks to one form."""
    named = (("query", query), ("key", key), ("value", value))
    query, key, value = (floating(name, x, narrow=True) for name, x in named)
    batch = _check_qkv(query, key, value)
    q_len, heads, qk_dim = query.shape[-3:]
    kv_len = key.shape[-3]
    if bias is not None:
        bias = M.logits_operand("bias", floating("bias", bias, narrow=True), batch, q_len, kv_len)
        _check_heads("bias", bias, heads)
    if sinks is not None:
        sinks = floating("sinks", sinks, narrow=True)
        if sinks.shape != (heads,):
            raise ValueError(f"sinks must have shape (num_heads,) = ({heads},), got {sinks.shape}")
    given = _collect_masks(
        mask,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        segment_ids=segment_ids,
    )
    if isinstance(q_offset, str):
        q_offset = _bottom_right(q_offset, batch, q_len, kv_len, query_seq_lengths, key_value_seq_lengths)
    q_offset = M.offset_of(q_offset, batch, q_len, kv_len)
    form = M.MaskForm() if given is None else given.lower(batch, q_len, kv_len, q_offset)
    if form.dense is not None:
        _check_heads("mask", form.dense, heads)
    rate = _check_dropout(dropout_rate, dropout_rng)
    flag("broadcast_dropout", broadcast_dropout)
    options = _Options(
        _check_scale(scale, qk_dim),
        check_softcap(softcap),
        rate,
        hashable_precision(precision),
        dispatch.reproducible(),
    )
    query, key, value = (x.reshape(-1 if batch else 1, *x.shape[-3:]) for x in (query, key, value))
    seed = _seed(dropout_rng, query.shape[0], heads, broadcast_dropout) if rate else None
    return Inputs(query, key, value, bias, sinks), Aux(form, seed), options, batch


def _collect_masks(
    mask,
    *,
    is_causal,
    query_seq_lengths,
    key_value_seq_lengths,
    local_window_size,
    segment_ids,
) -> M.Mask | None:
    given: list[M.Mask] = []
    if mask is not None:
        given.append(_check_mask(mask))
    flag("is_causal", is_causal)
    if is_causal:
        given.append(M.Causal())
    if local_window_size is not None:
        given.append(M.LocalWindow(*window_pair("local_window_size", local_window_size)))
    if segment_ids is not None:
        given.append(M.Segments(*M.queries_and_keys("segment_ids", segment_ids)))
    if query_seq_lengths is not None:
        given.append(M.QueryLengths(query_seq_lengths))
    if key_value_seq_lengths is not None:
        given.append(M.KeyLengths(key_value_seq_lengths))
    return functools.reduce(operator.and_, given) if given else None


def _check_mask(mask: Any) -> M.Mask:
    M.refuse_what_is_no_mask(mask)
    return mask if isinstance(mask, M.Mask) else M.Dense(mask)  # pyright: ignore[reportArgumentType]


def _bottom_right(q_offset: str, batch, q_len, kv_len, query_seq_lengths, key_value_seq_lengths):
    if q_offset != M.BOTTOM_RIGHT:
        raise ValueError(f"q_offset={q_offset!r}: must be an int, an int array [batch..], or {M.BOTTOM_RIGHT!r}")
    if query_seq_lengths is None and key_value_seq_lengths is None:
        return kv_len - q_len
    keys = kv_len if key_value_seq_lengths is None else M.positions("key lengths", key_value_seq_lengths)
    queries = q_len if query_seq_lengths is None else M.positions("query lengths", query_seq_lengths)
    # The negative of int32's least number is itself.
    minus_queries = -queries if isinstance(queries, int) else -jnp.maximum(queries, -M.INT_MAX)
    return jnp.broadcast_to(M.add_offsets(keys, minus_queries), batch)


def _check_qkv(query: Array, key: Array, value: Array) -> tuple[int, ...]:
    """The batch dims."""
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if not query.ndim == key.ndim == value.ndim:
        raise ValueError(f"query, key and value must have the same rank, got {shapes}")
    if query.ndim < 3:
        raise ValueError(f"query, key and value must be [batch.., length, heads, depth], got {shapes}")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            "query, key and value must have the same dtype, got "
            f"{query.dtype}, {key.dtype} and {value.dtype}; cast them to one"
        )
    *batch, q_len, heads, qk_dim = query.shape
    for name, x in (("key", key), ("value", value)):
        if x.shape[:-3] != tuple(batch):
            raise ValueError(f"batch dims must match: {name} has {x.shape[:-3]}, query {tuple(batch)} ({shapes})")
    if key.shape[-3] != value.shape[-3]:
        raise ValueError(f"key and value lengths must match, got {key.shape[-3]} and {value.shape[-3]} ({shapes})")
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"key and value heads must match, got {key.shape[-2]} and {value.shape[-2]} ({shapes})")
    if qk_dim != key.shape[-1]:
        raise ValueError(f"query and key depths must match, got {qk_dim} and {key.shape[-1]} ({shapes})")
    kv_heads = key.shape[-2]
    for name, size in (
        ("query length", q_len),
        ("key length", key.shape[-3]),
        ("query heads", heads),
        ("key heads", kv_heads),
        ("query and key depth", qk_dim),
        ("value depth", value.shape[-1]),
    ):
        if isinstance(size, int) and size == 0:
            raise ValueError(f"{name} is 0: must be at least 1; leave the call out for empty inputs ({shapes})")
    if heads % kv_heads:
        raise ValueError(f"query heads must be a multiple of key heads, got {heads} and {kv_heads} ({shapes})")
    return tuple(batch)


def _check_heads(name: str, operand: Array, heads: int) -> None:
    if operand.shape[1] not in (1, heads):
        raise ValueError(f"{name} must have 1 or num_heads = {heads} in its heads dimension, got {operand.shape[1]}")


_OF_FLOAT32 = "that float32 holds, from 2**-126 to 2**127"


def _check_scale(scale: Any, qk_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(qk_dim)
    number = _known_number(scale)
    if number is None:
        raise ValueError(
            f"scale must be a number known when tracing, got {scale!r}; pass a number, or scale query instead"
        )
    if number and not _is_float32(abs(number)):
        raise ValueError(f"scale={scale!r}: must be 0, or a finite number {_OF_FLOAT32}; scale query instead")
    return number


def check_softcap(softcap: Any) -> float | None:
    if softcap is None:
        return None
    if not is_real(softcap) or not _is_float32(softcap):
        raise ValueError(
            f"softcap={softcap!r}: must be a finite number > 0 of Python or NumPy {_OF_FLOAT32}, or None for no cap"
        )
    return float(softcap)


def check_implementation(implementation: Any) -> None:
    """Raise ValueError for a name that no backend has."""
    dispatch.check_name(OP, BACKENDS, implementation)


def _is_float32(number: Any) -> bool:
    """In float32, which the backends compute in, neither 0 nor, with a factor such as log2(e), infinite."""
    return 2.0**-126 <= number < 2.0**127


def _known_number(x: Any) -> float | None:
    """Of Python or numpy, or an array of no dims that is no tracer; None for all else."""
    try:
        if is_real(x):
            return float(x)
        real = jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)
        return float(x) if real and x.ndim == 0 else None
    except OverflowError:
        return math.inf
    except (AttributeError, TypeError, ValueError, jax.errors.ConcretizationTypeError):
        return None


def _check_dropout(rate: Any, rng: Array | None) -> float:
    check_dropout_rate(rate)
    if rate and rng is None:
        raise ValueError(f"dropout_rng is required with dropout_rate={rate}: pass a key such as jax.random.key(0)")
    return float(rate)


def _seed(rng: Any, batch: int, heads: int, broadcast: bool) -> DropoutSeed:
    try:
        return make_seed(rng, batch, heads, broadcast=broadcast)
    except (TypeError, ValueError) as error:
        if callable(rng):  # as are nnx.Rngs and their streams
            raise ValueError(
                f"dropout_rng is a {type(rng).__name__}: must be one PRNG key; call it for one, as in rngs.dropout()"
            ) from error
        given = f"{rng.dtype}{list(rng.shape)}" if hasattr(rng, "dtype") and hasattr(rng, "shape") else repr(rng)
        raise ValueError(
            f"dropout_rng={given}: must be one PRNG key, such as jax.random.key(0); of several give one, or jax.vmap"
        ) from error


def window_pair(name: str, window: Any) -> tuple[int | None, int | None]:
    pair = (window, window) if is_integer(window) else window
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ValueError(f"{name}={window!r}: must be an int or a pair (left, right), known when tracing")
    left, right = pair
    for side, size in (("left", left), ("right", right)):
        if size is not None and (not is_integer(size) or size < 0):
            raise ValueError(f"{name}={window!r}: {side}={size!r} must be an int >= 0, or None for unbounded")
    return left, right

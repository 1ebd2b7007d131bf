"""Attention by cuDNN's fused kernels, as JAX ships them: for NVIDIA GPUs from sm_80 on that no kernel of ours serves.

Axis letters: B batch, T queries, S keys, N query heads, K key/value heads, H query/key depth, V value depth.

`jax.nn.dot_product_attention(implementation="cudnn")` rounds lse to 16 bits and ties its backward to its own forward.
So this file binds the two primitives below it: they give lse in float32 and take any backend's (out, lse).

What the library does not promise is added here, around the kernels:
- a row that sees no key: output 0, lse -inf, gradients 0;
- NaN and inf reach those who see them and nobody else. A kernel multiplies by the zero weight of a masked key, and
  0 * NaN is NaN; so masked calls run on finite copies, and who must become NaN is found by counting along T and S;
- padding tiles in the backward: lengths that are no multiple of its tile go through a padding mask, because without
  one the out-of-range half of a tile can overflow where lse is very negative (cudnn-frontend issues 160 and 1072).

lse has no gradient here: the kernel computes sum(out * d_out) by itself, and leaves no place for another term.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Int

from fast_layers.arch import Arch
from fast_layers.ops.attention.masks import MaskForm
from fast_layers.ops.attention.problem import Aux, Inputs, MaskFacts, Problem, Residuals, finite_or_zero

_OLDEST = (8, 0)
_DEPTH_MULTIPLE = 8
_BACKWARD_TILE = 128
_LSE_OF_NO_WEIGHT = 1e30
"""As the lse of a row in the backward: exp(score - lse) is 0 for any score."""
_FIRST_WITH_TWO_DEPTHS = 91000
_FIRST_FOR_SM103 = 91100


def supports(problem: Problem, arch: Arch, pass_) -> str | None:
    p = problem
    return (
        _device_objection(arch)
        or _installation_objection(arch)
        or _shape_objection(p, arch)
        or _option_objection(p)
        or _mask_objection(p)
        or _bias_objection(p)
        or (_backward_objection(p) if pass_ == "backward" else None)
    )


def _device_objection(arch: Arch) -> str | None:
    if arch.platform != "cuda":
        return f"cuDNN runs on NVIDIA GPUs from sm_80 on, not on {arch}"
    if arch.capability is None:
        return f"cuDNN plans its kernels for a GPU that is present; {arch} has no known compute capability"
    if arch.capability < _OLDEST:
        return f"cuDNN's fused attention needs sm_80 or later, not {arch}"
    return None


def _installation_objection(arch: Arch) -> str | None:
    version = _cudnn_version()
    if isinstance(version, str):
        return version
    if arch.capability == (10, 3) and version < _FIRST_FOR_SM103:
        return f"cuDNN {version} is older than 9.11, the first for sm_103; update nvidia-cudnn"
    if not any(device.platform == "gpu" for device in jax.devices()):
        return "cuDNN plans its kernels on a GPU that is present, and there is none here"
    return None


@functools.cache
def _cudnn_version() -> int | str:
    """The version as one number, or why there is none."""
    if isinstance(found := _primitives(), str):
        return found
    from jax._src.lib import cuda_versions

    if cuda_versions is None:
        return "JAX has no CUDA plugin installed: pip install 'jax[cuda13]'"
    try:
        return cuda_versions.cudnn_get_version()
    except RuntimeError as error:
        return f"cuDNN does not load ({error}): install nvidia-cudnn-cu13 or nvidia-cudnn-cu12, as the plugin is"


def _shape_objection(p: Problem, arch: Arch) -> str | None:
    assert arch.capability is not None
    symbolic = [n for n in ("batch", "q_len", "kv_len", "heads", "kv_heads") if not isinstance(getattr(p, n), int)]
    if symbolic:
        return f"symbolic {', '.join(symbolic)}: cuDNN's kernels are planned for known sizes"
    if p.dtype not in (jnp.float16, jnp.bfloat16):
        return f"dtype {p.dtype}: cuDNN takes float16 and bfloat16; cast query, key and value"
    deepest = 256 if arch.capability[0] == 9 else 128
    if p.qk_dim == p.v_dim:
        if p.qk_dim % _DEPTH_MULTIPLE or p.qk_dim > deepest:
            return f"head_dim={p.qk_dim}: on {arch} cuDNN takes multiples of {_DEPTH_MULTIPLE} up to {deepest}; pad it"
        return None
    if arch.capability < (9, 0) or _older_than(_FIRST_WITH_TWO_DEPTHS):
        return f"value depth {p.v_dim} is not {p.qk_dim}, query's: cuDNN takes that from sm_90 and cuDNN 9.10 on"
    if p.qk_dim % _DEPTH_MULTIPLE or p.v_dim % _DEPTH_MULTIPLE or p.qk_dim > 192 or p.v_dim > 128:
        return (
            f"depths ({p.qk_dim}, {p.v_dim}) of query and value: where they differ, cuDNN takes multiples of "
            f"{_DEPTH_MULTIPLE} up to (192, 128)"
        )
    return None


def _older_than(version: int) -> bool:
    found = _cudnn_version()
    return isinstance(found, str) or found < version


def _option_objection(p: Problem) -> str | None:
    if p.softcap is not None:
        return f"softcap={p.softcap:g}: cuDNN has none"
    if p.sinks:
        return "sinks: cuDNN has none"
    if p.dropout_rate:
        return (
            f"dropout_rate={p.dropout_rate:g}: cuDNN draws its own random bits, not those that all backends here share"
        )
    if p.precision is not None:
        return f"precision={p.precision}: cuDNN multiplies 16-bit numbers and sums in float32, and has no other way"
    if p.scale <= 0:
        return f"scale={p.scale:g}: must be positive for cuDNN; negate or zero the query instead"
    return None


def _mask_objection(p: Problem) -> str | None:
    mask = p.mask
    if mask.segments:
        return "segment ids: cuDNN has no mask for them"
    if mask.dense is not None:
        return "a boolean mask array: cuDNN would take it as a bias, which leaves no row without a key"
    if mask.interval_arrays and not mask.lengths_only:
        return "a prefix or an offset per example: cuDNN's masks are causal, left window and lengths"
    if mask.band is not None:
        low, high = mask.band.low, mask.band.high
        if high != 0 or (low is not None and low > 0):
            return (
                f"mask {MaskFacts(mask.band).describe()}: cuDNN's band ends at the diagonal (causal, aligned top-left: "
                "q_offset=0, no right window)"
            )
    return None


def _bias_objection(p: Problem) -> str | None:
    if p.bias is None:
        return None
    if p.bias_dtype != p.dtype:
        return f"bias of {p.bias_dtype}: cuDNN takes it in query's {p.dtype}; cast it"
    if p.bias[2:] != (p.q_len, p.kv_len):
        return f"bias {list(p.bias)}: cuDNN takes no bias broadcast along queries or keys; broadcast it yourself"
    if p.q_len % 2 or p.kv_len % 2:
        return f"bias with lengths ({p.q_len}, {p.kv_len}): cuDNN takes even ones; pad them"
    if p.mask.lengths_only or (p.mask.band is not None and p.mask.band.low is not None):
        return "bias together with lengths or a window: not among the combinations that cuDNN is tested with in JAX"
    return None


def _backward_objection(p: Problem) -> str | None:
    if p.lse_returned:
        return "return_residual=True: cuDNN's backward has no place for the gradient of lse"
    if p.bias is not None and (p.q_len % _BACKWARD_TILE or p.kv_len % _BACKWARD_TILE):
        return (
            f"bias with lengths ({p.q_len}, {p.kv_len}): cuDNN's backward may give NaN where they are no multiples of "
            f"{_BACKWARD_TILE} (pytorch issue 196678); pad them"
        )
    return None


class _Primitives(NamedTuple):
    forward: Any
    backward: Any
    mask_type: Any
    constants: dict[str, Any]


@functools.cache
def _primitives() -> _Primitives | str:
    """What JAX binds for cuDNN, or why it was not found: JAX keeps it to itself, and may move it."""
    missing = f"JAX {jax.__version__} does not have cuDNN's attention where this version of fast_layers looks for it"
    try:
        from jax._src.cudnn import fused_attention_stablehlo as fused
    except ImportError:
        return missing
    names = ("_dot_product_attention_fwd_p_wrapper", "_dot_product_attention_bwd_p_wrapper", "MaskType")
    if not all(hasattr(fused, name) for name in names):
        return missing
    constants = {"seed": 0, "dropout_rate": 0.0, "layout": fused.AttentionLayout.BTNH.value}
    if "score_mod" in inspect.signature(fused.dot_product_attention).parameters:
        constants["score_mod"] = None
    forward, backward, mask_type = (getattr(fused, name) for name in names)
    return _Primitives(forward, backward, mask_type, constants)


def forward(problem: Problem, inputs: Inputs, aux: Aux):
    """(out [B, T, N, V], lse [B, N, T])."""
    p = problem
    query, key, value, bias, _ = inputs
    if p.mask == MaskFacts():
        return _bind_forward(p, query, key, value, bias, None)
    rows = _Rows.of(p, aux.mask)
    broken = ~(jnp.isfinite(key).all(-1) & jnp.isfinite(value).all(-1))
    out, lse = _bind_forward(p, query, finite_or_zero(key), finite_or_zero(value), bias, aux.mask)
    sees_broken = jnp.repeat(rows.see_any(broken), p.group, axis=2)
    out = jnp.where(sees_broken[..., None], jnp.nan, out)
    lse = jnp.where(sees_broken.swapaxes(1, 2), jnp.nan, lse)
    return jnp.where(rows.empty[:, :, None, None], 0, out), jnp.where(rows.empty[:, None], -jnp.inf, lse)


def backward(problem: Problem, residuals: Residuals, d_out: Array, d_lse: Array) -> Inputs:
    """Gradients of all inputs. `d_lse` is 0: the caller has no lse to differentiate (see `_backward_objection`)."""
    p = problem
    inputs, aux, out, lse, _ = residuals
    query, key, value, bias, _ = inputs
    if p.mask == MaskFacts():
        grads = _bind_backward(p, query, key, value, bias, None, lse, out, d_out)
        return Inputs(*grads[:3], bias=grads[3] if bias is not None else None)
    rows = _Rows.of(p, aux.mask)
    empty = rows.empty[:, :, None]
    broken = (~jnp.isfinite(lse).swapaxes(1, 2) | ~jnp.isfinite(d_out).all(-1)) & ~empty
    silent = empty | broken
    lse = jnp.where(silent.swapaxes(1, 2), _LSE_OF_NO_WEIGHT, lse)
    out, d_out = (jnp.where(silent[..., None], 0, x) for x in (out, d_out))
    query, key, value = map(finite_or_zero, (query, key, value))
    d_query, d_key, d_value, *d_bias = _bind_backward(p, query, key, value, bias, aux.mask, lse, out, d_out)
    seen_by_broken = rows.seen_by_any(broken.reshape(p.batch, p.q_len, p.kv_heads, p.group).any(-1))[..., None]
    d_query = jnp.where(empty[..., None], 0, jnp.where(broken[..., None], jnp.nan, d_query))
    d_key, d_value = (jnp.where(seen_by_broken, jnp.nan, x) for x in (d_key, d_value))
    if bias is None:
        return Inputs(d_query, d_key, d_value)
    return Inputs(d_query, d_key, d_value, bias=_broken_bias_gradient(p, rows, broken, d_bias[0]))


def _broken_bias_gradient(p: Problem, rows: _Rows, broken: Bool[Array, "B T N"], d_bias: Array) -> Array:
    keys = jnp.arange(p.kv_len, dtype=jnp.int32)
    sees = (keys >= rows.start[:, None, :, None]) & (keys < rows.stop[:, None, :, None])
    poisoned = sees & broken.swapaxes(1, 2)[..., None]
    shared = [axis for axis in (0, 1) if d_bias.shape[axis] == 1]
    return jnp.where(poisoned.any(shared, keepdims=True) if shared else poisoned, jnp.nan, d_bias)


class _Rows(NamedTuple):
    """Which keys each query sees, [start, stop), and which queries see a key, [first, last)."""

    start: Int[Array, "B|1 T"]
    stop: Int[Array, "B|1 T"]
    first: Int[Array, "B|1 S"]
    last: Int[Array, "B|1 S"]

    @classmethod
    def of(cls, p: Problem, mask: MaskForm) -> _Rows:
        start, stop = mask.intervals(p.q_len, p.kv_len)
        row = (1, p.q_len)
        start = jnp.zeros(row, jnp.int32) if start is None else start
        stop = jnp.full(row, p.kv_len, jnp.int32) if stop is None else stop
        keys = jnp.arange(p.kv_len, dtype=jnp.int32)[None]
        queries, seen = jnp.full((1, 1), p.q_len, jnp.int32), True
        if mask.stop is not None:
            q_lengths, kv_lengths = _lengths(mask.stop)
            queries, seen = q_lengths[:, None], keys < kv_lengths[:, None]
        first, last = jnp.zeros_like(keys), queries
        if mask.band is not None:
            # The band ends at the diagonal, so key j is seen by queries from j on.
            first = keys
            last = queries if mask.band.low is None else jnp.minimum(queries, keys - mask.band.low + 1)
        first, last = jnp.broadcast_arrays(first, last)
        first = jnp.clip(first, 0, p.q_len)
        last = jnp.where(seen, jnp.clip(last, 0, p.q_len), 0)
        return cls(start, stop, first, last)

    @property
    def empty(self) -> Bool[Array, "B|1 T"]:
        return self.stop <= self.start

    def see_any(self, keys: Bool[Array, "B S K"]) -> Bool[Array, "B T K"]:
        return _any_within(keys, self.start, self.stop)

    def seen_by_any(self, queries: Bool[Array, "B T K"]) -> Bool[Array, "B S K"]:
        return _any_within(queries, self.first, self.last)


def _any_within(marked: Bool[Array, "B X K"], start: Int[Array, "B|1 Y"], stop: Int[Array, "B|1 Y"]):
    """Whether any of `marked[start:stop]` is true: [B, Y, K]."""
    counts = jnp.pad(jnp.cumsum(marked, axis=1, dtype=jnp.int32), ((0, 0), (1, 0), (0, 0)))
    before, after = (jnp.take_along_axis(counts, x[:, :, None], axis=1, mode="clip") for x in (start, stop))
    return after > before


def _lengths(stop: Int[Array, "B|1 T"]) -> tuple[Array, Array]:
    """Numbers of queries and of keys, each [B|1], from what `MaskForm.lengths_only` promises."""
    return (stop > 0).sum(-1, dtype=jnp.int32), stop.max(-1)


def _bind_forward(p: Problem, query, key, value, bias, mask: MaskForm | None):
    padded = p.mask.lengths_only
    lengths = _length_operands(p, mask) if padded else ()

    def call(query, key, value, *others):
        bias, lengths = _split(p, others)
        found = _known_primitives()
        out, lse = found.forward.bind(
            query, key, value, *_operands(p, bias, lengths), is_training=True, **_options(p, found, padded)
        )
        return out, lse

    return _foldable(p, call)(query, key, value, *(() if bias is None else (bias,)), *lengths)


def _bind_backward(p: Problem, query, key, value, bias, mask: MaskForm | None, lse, out, d_out):
    ragged = p.q_len % _BACKWARD_TILE != 0 or p.kv_len % _BACKWARD_TILE != 0
    padded = p.mask.lengths_only or ragged
    lengths = _length_operands(p, mask) if padded else ()

    def call(query, key, value, lse, out, d_out, *others):
        bias, lengths = _split(p, others)
        found = _known_primitives()
        grads = found.backward.bind(
            query, key, value, *_operands(p, bias, lengths), lse, out, d_out, **_options(p, found, padded)
        )
        return tuple(grads)

    return _foldable(p, call)(query, key, value, lse, out, d_out, *(() if bias is None else (bias,)), *lengths)


def _known_primitives() -> _Primitives:
    found = _primitives()
    assert not isinstance(found, str), found
    return found


def _split(p: Problem, others: tuple[Array, ...]):
    return (None, others) if p.bias is None else (others[0], others[1:])


def _operands(p: Problem, bias, lengths) -> tuple[Array, ...]:
    """Bias, lengths of queries and keys, and what packed and paged layouts would need."""
    unused = jnp.zeros(0, p.dtype)
    return (unused if bias is None else bias, *(lengths or (unused, unused)), *(unused,) * 4)


def _options(p: Problem, found: _Primitives, padded: bool) -> dict[str, Any]:
    causal = p.mask.band is not None
    low = None if p.mask.band is None else p.mask.band.low
    mask_name = {
        (False, False): "NO_MASK",
        (True, False): "CAUSAL",
        (False, True): "PADDING",
        (True, True): "PADDING_CAUSAL",
    }
    return {
        "scale": p.scale,
        "variadic_args": (p.bias is not None, p.bias is not None),
        "mask_type": found.mask_type[mask_name[causal, padded]],
        "sliding_window_length": None if low is None else 1 - low,
        **found.constants,
    }


def _length_operands(p: Problem, mask: MaskForm | None) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """At least 1 each: what an empty example gives is replaced anyway."""
    if mask is None or mask.stop is None:
        return jnp.full(p.batch, p.q_len, jnp.int32), jnp.full(p.batch, p.kv_len, jnp.int32)
    queries, keys = (jnp.broadcast_to(jnp.maximum(x, 1), (p.batch,)) for x in _lengths(mask.stop))
    return queries, keys


def _foldable(p: Problem, call):
    """`call` with a `vmap` rule: the new axis joins the batch. With a bias, whose gradient is summed over the batch,
    one member after the other."""
    mappable = custom_vmap(call)

    @mappable.def_vmap
    def fold(axis_size, in_batched, *operands):
        operands = [
            x if batched else jnp.broadcast_to(x[None], (axis_size, *x.shape))
            for x, batched in zip(operands, in_batched, strict=True)
        ]
        if p.bias is not None:
            results = lax.map(lambda xs: mappable(*xs), tuple(operands))
        else:
            results = mappable(*(x.reshape(-1, *x.shape[2:]) for x in operands))
            results = tuple(x.reshape(axis_size, -1, *x.shape[1:]) for x in results)
        return results, tuple(True for _ in results)

    return mappable

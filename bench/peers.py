"""Who is measured: each peer's call for a case, or the reason why it cannot take it.

A peer's `attend(case, q, k, v, extras)` has [B, T, N, D] inputs of its own framework; `extras` are the arrays behind
the case's mask (see `extras_of`). A case that a peer's interface cannot express is refused here; what a peer refuses
itself, when traced or run, is recorded by the runner with the peer's own words.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import fast_layers
from bench.cases import Case, Pass
from fast_layers.ops.attention.backends import BACKENDS

XLA_SCORES = 2**30
"""Our tiled XLA backend is timed beside a kernel up to this many scores: more takes seconds per call on a GPU."""


def never(case: Case, pass_: Pass) -> str | None:
    return None


@dataclasses.dataclass(frozen=True)
class Peer:
    """`refuses(case, pass_)` is None or the reason.

    A peer without a scale gets queries that are scaled already; `dtype` replaces the case's where a peer takes only
    another of the same size. Both happen outside the measured call.
    """

    name: str
    attend: Callable[..., Any]
    refuses: Callable[[Case, Pass], str | None] = never
    framework: Literal["jax", "torch"] = "jax"
    ours: bool = False
    scaled_query: bool = False
    dtype: str | None = None
    twin_of: str | None = None
    compiler_options: tuple[tuple[str, bool], ...] = ()
    """XLA's, for this peer alone."""


SAME_BITS = (("xla_gpu_deterministic_ops", True),)
"""With this cuDNN's backward gives the same bits in every run. PyTorch takes no cuDNN where it must."""


def extras_of(case: Case) -> dict[str, np.ndarray]:
    """`lengths` [B], `document_ids` [T], and `mask` [1, 1, T, T] for peers that have no other form for documents."""
    extras = {}
    lengths, ids = case.lengths(), case.document_ids()
    if lengths is not None:
        extras["lengths"] = lengths
    if ids is not None:
        extras["document_ids"] = ids
        extras["mask"] = (ids[:, None] == ids)[None, None]
    return extras


def _window(case: Case) -> tuple[int, int] | None:
    return None if case.window is None else (case.window - 1, 0)


def _lengths(extras: dict[str, Any]) -> dict[str, Any]:
    lengths = extras.get("lengths")
    return {} if lengths is None else {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}


def _ours(implementation: str | None, case: Case, q, k, v, extras):
    return fast_layers.dot_product_attention(
        q,
        k,
        v,
        is_causal=case.causal,
        local_window_size=_window(case),
        segment_ids=extras.get("document_ids"),
        softcap=case.softcap,
        implementation=implementation,
        **_lengths(extras),
    )


def _ours_in_any_order(case: Case, q, k, v, extras):
    """The bits may change from run to run, as they do with cuDNN."""
    with fast_layers.use_backends(reproducible=False):
        return _ours(None, case, q, k, v, extras)


def _refuse_in_any_order(case: Case, pass_: Pass) -> str | None:
    backend = automatic_backend(case, pass_)
    if pass_ == "forward" or backend not in ("hopper", "blackwell"):
        return f"use_backends(reproducible=False) changes nothing in the {pass_} of {backend}"
    return None


@functools.cache
def automatic_backend(case: Case, pass_: Pass) -> str:
    """What fast_layers takes by itself for this pass (for "forward+backward": for the backward)."""
    q, k, v, _ = (jax.ShapeDtypeStruct(shape, case.dtype) for shape in shapes(case))
    extras = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in extras_of(case).items()}
    (plan,) = fast_layers.explain(functools.partial(_ours, None, case), q, k, v, extras).plans
    backend = plan.choices("forward" if pass_ == "forward" else "backward")[0].backend
    return "none" if backend is None else backend.name


def _refuse_named(backend: str, case: Case, pass_: Pass) -> str | None:
    if automatic_backend(case, pass_) == backend:
        return "is what fast_layers takes by itself here"
    scores = case.visible_pairs() * case.heads
    if backend == "xla" and scores > XLA_SCORES:
        return f"{scores:.1e} scores: left out beyond {XLA_SCORES:.1e}, where a call takes seconds"
    return None


def _jax_nn(implementation: Any, case: Case, q, k, v, extras):
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=extras.get("mask"),
        is_causal=case.causal,
        local_window_size=_window(case),
        implementation=implementation,
        **_lengths(extras),
    )


def _refuse_same_bits(case: Case, pass_: Pass) -> str | None:
    return "the forward gives the same bits anyway" if pass_ == "forward" else _refuse_jax_nn(case, pass_)


def _refuse_jax_nn(case: Case, pass_: Pass) -> str | None:
    if case.softcap:
        return "jax.nn.dot_product_attention has no softcap"
    if len(set(case.depths)) > 1:
        return "jax.nn.dot_product_attention takes values of the keys' depth only"
    return None


def _tokamax(implementation: Any, tune: bool, case: Case, q, k, v, extras):
    import tokamax  # pyright: ignore[reportMissingImports]

    with tokamax.config.autotuning_cache_miss_fallback("autotune" if tune else "heuristics"):
        return tokamax.dot_product_attention(
            q,
            k,
            v,
            mask=extras.get("mask"),
            is_causal=case.causal,
            local_window_size=_window(case),
            logits_soft_cap=case.softcap,
            implementation=implementation,
            **_lengths(extras),
        )


# It takes bfloat16 by its checks, and float16 alone by its buffers (jax 0.11.2 and 0.12.0).
# Blocks that fit the shared memory, per head dim; the smallest also runs the backward.
_MGPU_BLOCKS = {64: (128, 256), 128: (64, 128), 256: (64,)}


def _mgpu(block_kv: int, case: Case, q, k, v, extras):
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    blocks = dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), 64)
    config = attention_mgpu.TuningConfig(
        block_q=64, block_kv=block_kv, max_concurrent_steps=2, causal=case.causal, **blocks
    )
    return attention_mgpu.attention(q, k, v, config)


def _refuse_mgpu(block_kv: int, case: Case, pass_: Pass) -> str | None:
    if case.window or case.documents > 1 or case.padded or case.softcap:
        return "jax's attention_mgpu takes causal and full only"
    if case.causal and pass_ != "forward":
        return "jax's attention_mgpu has no causal backward"
    if len(set(case.depths)) > 1:
        return "jax's attention_mgpu takes values of the keys' depth only"
    blocks = _MGPU_BLOCKS.get(case.depth, ())
    if block_kv not in blocks:
        return f"block_kv={block_kv} is not for D={case.depth} (shared memory; {blocks or 'no blocks'} are)"
    if pass_ != "forward" and block_kv != blocks[0]:
        return f"block_kv={block_kv} concerns the forward only"
    return None


def _torch_sdpa(backend: str, case: Case, q, k, v, extras):
    import torch  # pyright: ignore[reportMissingImports]
    from torch.nn.attention import SDPBackend, sdpa_kernel  # pyright: ignore[reportMissingImports]

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel([getattr(SDPBackend, backend)]):
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=case.causal, enable_gqa=case.heads != case.kv_heads
        )
    return out.transpose(1, 2)


def _refuse_sdpa(case: Case, pass_: Pass) -> str | None:
    if case.window or case.documents > 1 or case.padded or case.softcap:
        return "torch's scaled_dot_product_attention takes causal and full only, or a dense mask"
    return None


def _flash4(same_bits: bool, case: Case, q, k, v, extras):
    from flash_attn.cute import flash_attn_func  # pyright: ignore[reportMissingImports]

    window = _window(case) or (None, None)
    options: dict[str, Any] = {"window_size": window, "softcap": case.softcap or 0.0}
    if same_bits:
        options["deterministic"] = True
    out = flash_attn_func(q, k, v, causal=case.causal, **options)
    return out[0] if isinstance(out, tuple) else out


def _refuse_flash4(case: Case, pass_: Pass) -> str | None:
    if case.documents > 1 or case.padded:
        return "flash_attn_func takes no documents or lengths (the varlen function's packed layout differs)"
    return None


def _refuse_flash4_same_bits(case: Case, pass_: Pass) -> str | None:
    return "the forward gives the same bits anyway" if pass_ == "forward" else _refuse_flash4(case, pass_)


def shapes(case: Case) -> tuple[tuple[int, ...], ...]:
    """Of query, key, value and the output's gradient."""
    query = (case.batch, case.q_len, case.heads, case.depth)
    key = (case.batch, case.kv_len, case.kv_heads, case.depth)
    v_depth = case.depths[1]
    return query, key, (*key[:3], v_depth), (*query[:3], v_depth)


def importable(name: str) -> bool:
    parent = name.partition(".")[0]
    return importlib.util.find_spec(parent) is not None and importlib.util.find_spec(name) is not None


def _torch_gpu() -> str | None:
    """None, or why PyTorch cannot run here."""
    if not importable("torch"):
        return "torch is not importable here"
    import torch  # pyright: ignore[reportMissingImports]

    return None if torch.cuda.is_available() else "torch sees no GPU here"


def find(*, gpu: bool, tune_tokamax: bool = False) -> tuple[list[Peer], dict[str, str]]:
    """(the peers present, {absent peer: reason}). The first that is not ours is the yardstick for the values."""
    peers: list[Peer] = []
    absent: dict[str, str] = {}
    for implementation in ("cudnn", "xla") if gpu else ("xla",):
        attend = functools.partial(_jax_nn, implementation)
        peers.append(Peer(f"jax.nn {implementation}", attend, _refuse_jax_nn))
    cudnn_same_bits = "jax.nn cudnn, same bits"
    if gpu:
        attend = functools.partial(_jax_nn, "cudnn")
        peers.append(Peer(cudnn_same_bits, attend, _refuse_same_bits, compiler_options=SAME_BITS))
    else:
        absent |= dict.fromkeys(("jax.nn cudnn", cudnn_same_bits), "no NVIDIA GPU here")
    peers.append(Peer("fast_layers", functools.partial(_ours, None), ours=True))
    peers.append(Peer("again", functools.partial(_ours, None), ours=True, twin_of="fast_layers"))
    peers.append(Peer("fast_layers any order", _ours_in_any_order, _refuse_in_any_order, ours=True))
    for backend in BACKENDS:
        if backend.automatic:
            refuses = functools.partial(_refuse_named, backend.name)
            attend = functools.partial(_ours, backend.name)
            peers.append(Peer(f"fast_layers {backend.name}", attend, refuses, ours=True))
    # tokamax warns of each shape that its tables lack, a page per shape; that is what `tune_tokamax` is for.
    logging.getLogger("absl").setLevel(logging.ERROR)
    # tokamax's "cudnn" and "xla" are jax.nn's.
    for implementation in ("mosaic", "triton", "xla_chunked"):
        name = f"tokamax {implementation}"
        if not importable("tokamax"):
            absent[name] = "tokamax is not importable here"
        elif not gpu and implementation != "xla_chunked":
            absent[name] = "no NVIDIA GPU here"
        else:
            peers.append(Peer(name, functools.partial(_tokamax, implementation, tune_tokamax)))
    for block_kv in sorted({block for blocks in _MGPU_BLOCKS.values() for block in blocks}):
        name = f"jax mgpu kv{block_kv}"
        if gpu:
            attend, refuses = functools.partial(_mgpu, block_kv), functools.partial(_refuse_mgpu, block_kv)
            peers.append(Peer(name, attend, refuses, scaled_query=True, dtype="float16"))
        else:
            absent[name] = "no NVIDIA GPU here"
    no_torch = _torch_gpu() if gpu else "no NVIDIA GPU here"
    for name, backend in (("torch cudnn", "CUDNN_ATTENTION"), ("torch flash", "FLASH_ATTENTION")):
        if no_torch:
            absent[name] = no_torch
        else:
            peers.append(Peer(name, functools.partial(_torch_sdpa, backend), _refuse_sdpa, framework="torch"))
    for same_bits, refuses in ((False, _refuse_flash4), (True, _refuse_flash4_same_bits)):
        name = "flash-attention 4, same bits" if same_bits else "flash-attention 4"
        if no_torch or not importable("flash_attn.cute"):
            absent[name] = no_torch or "flash_attn.cute is not importable here"
        else:
            peers.append(Peer(name, functools.partial(_flash4, same_bits), refuses, framework="torch"))
    return peers, absent


def make_inputs(case: Case, seed: int) -> list[jax.Array]:
    """Query, key, value and the output's gradient, random normal; large batches repeat examples at other addresses."""
    drawn = []
    for key, shape in zip(jax.random.split(jax.random.key(seed), 4), shapes(case), strict=True):
        examples = max(1, min(case.batch, 2**28 // int(np.prod(shape[1:]))))
        x = jax.random.normal(key, (examples, *shape[1:]), case.dtype)
        if examples < case.batch:
            x = jnp.tile(x, (-(-case.batch // examples), 1, 1, 1))[: case.batch]
        drawn.append(x)
    lengths = case.lengths()
    if lengths is not None:
        # Rows beyond the length have no meaning, so they get no gradient.
        drawn[3] = jnp.where((np.arange(case.q_len) < lengths[:, None])[..., None, None], drawn[3], 0).astype(
            case.dtype
        )
    return drawn

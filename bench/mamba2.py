"""Mamba-2 around its scan: the whole layer, its convolution and its gated norm, against their peers in one run.

    python -m bench mamba2 --quick --out bench/results/h200/mamba2.json
    python -m bench mamba2 --kinds conv norm --hlo /tmp/hlo

How programs are timed is said in `bench/turns.py`; the scan alone is `bench/ssd.py`. The first row runs twice (the
second as "again"): their distance is the noise of the run. "jax" is what a user of JAX writes down, with JAX's own
gradient. GB/s count what a pass must read and write once, and stand beside a copy of the same run: `fast_layers xla`
against `fast_layers hopper` is the measured choice between XLA's fusion and a kernel. The layer's rows have the last
word: x and z are columns of in_proj's result there, which a fusion reads where they are, and a kernel is given copied.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import fast_layers
from bench import ssd, timing, turns
from bench.attention import Clock
from bench.turns import Pass, Peer

EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class Layer:
    """Of u [batch, length, width]; twice the width scanned, in heads of 64 channels."""

    batch: int
    length: int
    width: int
    state_dim: int = 128
    groups: int = 1
    dtype: str = "bfloat16"
    head_dim: int = 64
    taps: int = 4

    passes = ("forward", "both")

    @property
    def scanned(self) -> int:
        return 2 * self.width

    @property
    def heads(self) -> int:
        return self.scanned // self.head_dim

    @property
    def name(self) -> str:
        sizes = f"B{self.batch} L{self.length} d{self.width} H{self.heads} P{self.head_dim} N{self.state_dim}"
        return f"layer {sizes} G{self.groups} {self.dtype}"

    def operands(self) -> turns.Operands:
        keys = iter(jax.random.split(jax.random.key(0), 9))
        channels = self.scanned + 2 * self.groups * self.state_dim
        u = (self.batch, self.length, self.width)
        steps = jnp.exp(jax.random.uniform(next(keys), (self.heads,), minval=math.log(1e-3), maxval=math.log(1e-1)))
        draw = functools.partial(turns.normal, dtype=self.dtype)
        return {
            "u": draw(next(keys), u),
            "in_proj": draw(next(keys), (self.width, self.scanned + channels + self.heads), scale=self.width**-0.5),
            "conv": draw(next(keys), (self.taps, channels), scale=0.5),
            "conv_bias": draw(next(keys), (channels,), scale=0.5),
            "dt_bias": steps + jnp.log(-jnp.expm1(-steps)),
            "A_log": jnp.log(jax.random.uniform(next(keys), (self.heads,), minval=1.0, maxval=16.0)),
            "D": jnp.ones(self.heads),
            "norm": 1 + draw(next(keys), (self.scanned,), scale=0.1),
            "out_proj": draw(next(keys), (self.scanned, self.width), scale=self.scanned**-0.5),
            "d_out": draw(next(keys), u),
        }

    def bytes(self, pass_: Pass) -> None:
        return None


@dataclasses.dataclass(frozen=True)
class Conv:
    """Of x [batch, length, channels], with a bias and silu."""

    batch: int
    length: int
    channels: int
    dtype: str = "bfloat16"
    taps: int = 4

    passes = turns.PASSES

    @property
    def name(self) -> str:
        return f"conv B{self.batch} L{self.length} C{self.channels} {self.dtype}"

    def operands(self) -> turns.Operands:
        keys = iter(jax.random.split(jax.random.key(0), 4))
        draw = functools.partial(turns.normal, dtype=self.dtype)
        x = (self.batch, self.length, self.channels)
        return {
            "x": draw(next(keys), x),
            "conv": draw(next(keys), (self.taps, self.channels), scale=0.5),
            "conv_bias": draw(next(keys), (self.channels,)),
            "d_out": draw(next(keys), x),
        }

    def bytes(self, pass_: Pass) -> int:
        """Forward x and y; backward x and both gradients."""
        array = self.batch * self.length * self.channels * jnp.dtype(self.dtype).itemsize
        return array * {"forward": 2, "backward": 3, "both": 5}[pass_]


@dataclasses.dataclass(frozen=True)
class Norm:
    """Of y and z [rows, features]."""

    rows: int
    features: int
    groups: int = 1
    dtype: str = "bfloat16"

    passes = turns.PASSES

    @property
    def name(self) -> str:
        return f"norm R{self.rows} F{self.features} G{self.groups} {self.dtype}"

    def operands(self) -> turns.Operands:
        keys = iter(jax.random.split(jax.random.key(0), 4))
        draw = functools.partial(turns.normal, dtype=self.dtype)
        rows = (self.rows, self.features)
        return {
            "y": draw(next(keys), rows),
            "z": draw(next(keys), rows),
            "norm": 1 + draw(next(keys), (self.features,), scale=0.1),
            "d_out": draw(next(keys), rows),
        }

    def bytes(self, pass_: Pass) -> int:
        """Forward y, z and out; backward y, z and three gradients."""
        array = self.rows * self.features * jnp.dtype(self.dtype).itemsize
        return array * {"forward": 3, "backward": 5, "both": 8}[pass_]


GPU: dict[str, tuple[Any, ...]] = {
    "layer": (Layer(8, 4096, 2560), Layer(8, 4096, 2560, groups=8), Layer(1, 32_768, 2560)),
    "conv": (Conv(8, 4096, 5376), Conv(8, 4096, 7168), Conv(1, 32_768, 5376)),
    "norm": (Norm(32_768, 5120), Norm(32_768, 5120, groups=8), Norm(32_768, 8192, groups=8)),
}
CPU: dict[str, tuple[Any, ...]] = {
    "layer": (Layer(1, 2048, 256, 64, dtype="float32"),),
    "conv": (Conv(1, 4096, 640, "float32"),),
    "norm": (Norm(4096, 512, dtype="float32"),),
}
TINY: dict[str, tuple[Any, ...]] = {
    "layer": (Layer(1, 48, 8, 4, dtype="float32", head_dim=4),),
    "conv": (Conv(1, 24, 8, "float32"),),
    "norm": (Norm(12, 16, 2, "float32"),),
}


def our_layer(case: Layer, backend: str | None = None, scan: str | None = None) -> Callable[..., Any]:
    """`backend` is that of every op of ours in the layer, `scan` of the scan alone."""

    def make():
        dims = {"d_state": case.state_dim, "headdim": case.head_dim, "ngroups": case.groups, "norm_eps": EPS}
        return fast_layers.Mamba2(case.width, **dims, dtype=case.dtype, implementation=scan, rngs=nnx.Rngs(0))

    def call(u, in_proj, conv, conv_bias, dt_bias, A_log, D, norm, out_proj):
        layer = nnx.eval_shape(make)
        weights = {
            "in_proj": {"kernel": in_proj},
            "conv1d": {"kernel": conv[:, None], "bias": conv_bias},
            "norm": {"scale": norm},
            "out_proj": {"kernel": out_proj},
            "dt_bias": dt_bias,
            "A_log": A_log,
            "D": D,
        }
        graph, state = nnx.split(layer)
        nnx.replace_by_pure_dict(state, weights)
        with fast_layers.use_backends(force=backend):
            return nnx.merge(graph, state)(u)

    return call


def jax_layer(case: Layer) -> Callable[..., Any]:
    def call(u, in_proj, conv, conv_bias, dt_bias, A_log, D, norm, out_proj):
        z, xbc, dt = jnp.split(u @ in_proj, [case.scanned, in_proj.shape[1] - case.heads], axis=-1)
        xbc = jax_conv(case)(xbc, conv, conv_bias)
        dt = jax.nn.softplus(dt.astype(jnp.float32) + dt_bias)
        x, B, C = jnp.split(xbc, [case.scanned, case.scanned + case.groups * case.state_dim], axis=-1)
        x = x.reshape(*x.shape[:2], case.heads, case.head_dim)
        B, C = (v.reshape(*v.shape[:2], case.groups, case.state_dim) for v in (B, C))
        y = ssd.jax_chunked(x, dt, -jnp.exp(A_log), B, C) + (D[:, None] * x).astype(x.dtype)
        return jax_norm(case)(y.reshape(z.shape), z, norm) @ out_proj

    return call


def torch_layer(make_conv: Callable[[Any], Callable[..., Any]], case: Layer) -> Callable[..., Any]:
    """mamba_ssm's kernels for scan and norm, put together as its layer does where its one function for all of it does
    not run."""
    torch = turns.source_module("torch")
    scan, norm_rows, convolve = ssd.mamba_ssm(), torch_norm(case), make_conv(case)

    def call(u, in_proj, conv, conv_bias, dt_bias, A_log, D, norm, out_proj):
        state = case.groups * case.state_dim
        z, xbc, dt = torch.split(u @ in_proj, [case.scanned, case.scanned + 2 * state, case.heads], dim=-1)
        x, B, C = torch.split(convolve(xbc, conv, conv_bias), [case.scanned, state, state], dim=-1)
        x = x.reshape(*x.shape[:2], case.heads, case.head_dim)
        B, C = (v.reshape(*v.shape[:2], case.groups, case.state_dim) for v in (B, C))
        y = scan(x, dt, -torch.exp(A_log), B, C, D=D, dt_bias=dt_bias, dt_softplus=True)
        return norm_rows(y.reshape(z.shape), z, norm) @ out_proj

    return call


def mamba_ssm_layer(case: Layer) -> Callable[..., Any]:
    """Its one function from in_proj's result to the layer's; wants the causal_conv1d package as well."""
    torch = turns.source_module("torch")
    turns.source_module("causal_conv1d")
    rest = turns.source_module("mamba_ssm.ops.triton.ssd_combined").mamba_split_conv1d_scan_combined

    def call(u, in_proj, conv, conv_bias, dt_bias, A_log, D, norm, out_proj):
        return rest(
            u @ in_proj,
            conv.T,
            conv_bias,
            dt_bias,
            -torch.exp(A_log),
            D=D,
            chunk_size=256,
            activation="silu",
            rmsnorm_weight=norm,
            rmsnorm_eps=EPS,
            outproj_weight=out_proj.T,
            headdim=case.head_dim,
            ngroups=case.groups,
            norm_before_gate=False,
        )

    return call


def our_conv(implementation: str, case: Any) -> Callable[..., Any]:
    def call(x, conv, conv_bias):
        return fast_layers.causal_conv1d(x, conv, conv_bias, activation="silu", implementation=implementation)

    return call


def jax_conv(case: Any) -> Callable[..., Any]:
    """A sum of shifted products; XLA's own grouped convolution is the row "jax grouped"."""

    def call(x, conv, conv_bias):
        taps, length = conv.shape[0], x.shape[1]
        row = jnp.pad(x, ((0, 0), (taps - 1, 0), (0, 0)))
        return jax.nn.silu(sum(row[:, i : i + length] * conv[i] for i in range(taps)) + conv_bias)

    return call


def jax_grouped_conv(case: Conv) -> Callable[..., Any]:
    def call(x, conv, conv_bias):
        taps, channels = conv.shape
        options = {"dimension_numbers": ("NWC", "WIO", "NWC"), "feature_group_count": channels}
        return jax.nn.silu(lax.conv_general_dilated(x, conv[:, None], (1,), [(taps - 1, 0)], **options) + conv_bias)

    return call


def causal_conv1d_package(case: Any) -> Callable[..., Any]:
    convolve = turns.source_module("causal_conv1d").causal_conv1d_fn

    def call(x, conv, conv_bias):
        return convolve(x.transpose(1, 2), conv.T.contiguous(), conv_bias, activation="silu").transpose(1, 2)

    return call


def fla_conv(case: Any) -> Callable[..., Any]:
    convolve = turns.source_module("fla.modules.convolution").causal_conv1d

    def call(x, conv, conv_bias):
        out = convolve(x, conv.T.contiguous(), conv_bias, activation="silu")
        return out[0] if isinstance(out, tuple) else out

    return call


def our_norm(implementation: str, case: Norm) -> Callable[..., Any]:
    def call(y, z, norm):
        size = case.features // case.groups
        return fast_layers.gated_rms_norm(y, z, norm, group_size=size, eps=EPS, implementation=implementation)

    return call


def jax_norm(case: Any) -> Callable[..., Any]:
    def call(y, z, norm):
        gated = y.astype(jnp.float32) * jax.nn.silu(z.astype(jnp.float32))
        groups = gated.reshape(*gated.shape[:-1], case.groups, -1)
        groups = groups * lax.rsqrt(jnp.square(groups).mean(-1, keepdims=True) + EPS)
        return (groups.reshape(gated.shape) * norm).astype(y.dtype)

    return call


def torch_norm(case: Any) -> Callable[..., Any]:
    norm_rows = turns.source_module("mamba_ssm.ops.triton.layernorm_gated").rmsnorm_fn

    def call(y, z, norm):
        size = norm.shape[0] // case.groups
        return norm_rows(y, norm, None, z=z, eps=EPS, group_size=size, norm_before_gate=False)

    return call


PEERS: dict[str, tuple[Peer, ...]] = {
    "layer": (
        Peer("fast_layers", our_layer),
        Peer("fast_layers xla", functools.partial(our_layer, backend="xla")),
        Peer("fast_layers hopper scan", functools.partial(our_layer, scan="hopper")),
        Peer("fast_layers blackwell scan", functools.partial(our_layer, scan="blackwell")),
        Peer("fast_layers hopper", functools.partial(our_layer, backend="hopper")),
        Peer("again", our_layer),
        Peer("jax", jax_layer),
        Peer("mamba_ssm", mamba_ssm_layer, "torch"),
        Peer("mamba_ssm, fla conv", functools.partial(torch_layer, fla_conv), "torch"),
    ),
    "conv": (
        Peer("fast_layers xla", functools.partial(our_conv, "xla")),
        Peer("fast_layers hopper", functools.partial(our_conv, "hopper")),
        Peer("again", functools.partial(our_conv, "xla")),
        Peer("jax", jax_conv),
        Peer("jax grouped", jax_grouped_conv),
        Peer("causal_conv1d", causal_conv1d_package, "torch"),
        Peer("fla", fla_conv, "torch"),
    ),
    "norm": (
        Peer("fast_layers xla", functools.partial(our_norm, "xla")),
        Peer("fast_layers hopper", functools.partial(our_norm, "hopper")),
        Peer("again", functools.partial(our_norm, "xla")),
        Peer("jax", jax_norm),
        Peer("mamba_ssm", torch_norm, "torch"),
    ),
}


def main() -> None:
    parser = turns.parser(__doc__)
    parser.add_argument("--kinds", nargs="+", choices=PEERS, default=list(PEERS))
    args = turns.parse(parser, lambda args: (peer.name for kind in args.kinds for peer in PEERS[kind]))
    turns.share_memory_with_torch()
    cases = TINY if args.tiny else GPU if timing.on_gpu() else CPU
    turns.run(
        (
            (case, pass_, turns.selected(PEERS[kind], args.peers))
            for kind in args.kinds
            for case in (cases[kind][:1] if args.quick else cases[kind])
            for pass_ in case.passes
        ),
        f"python -m bench mamba2 {' '.join(sys.argv[1:])}".strip(),
        repeats=turns.repeats_of(args),
        path=args.out,
        hlo=args.hlo,
        clock=Clock(args.time_limit),
    )


if __name__ == "__main__":
    main()

"""The state-space scan against its peers in one run: forward, backward, and both.

    python -m bench ssd --quick --out bench/results/cpu/ssd.json

How programs are timed is said in `bench/turns.py`. The first backend runs twice (the second as "again"): their
distance is the noise of the run. `recurrence` is the plain `lax.scan` over tokens, `jax chunked` the paper's matrix
form in plain jax.numpy, both with JAX's own gradient. `backward` is the gradients alone, from what the forward saved;
where that is nothing, it computes the states anew. All forwards come first, since the Triton peers take minutes to tune
their backwards. GB/s count what a pass must read and write once; as a share of what a copy reaches in the same run,
they say how near the pass is to the floor that memory sets.
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
import numpy as np
from jax import lax

import fast_layers
from bench import timing, turns
from bench.attention import Clock
from bench.turns import PASSES, Pass, Peer


@dataclasses.dataclass(frozen=True)
class Case:
    """Of x [batch, length, heads, head_dim] and B, C [batch, length, groups, state_dim]."""

    batch: int
    length: int
    heads: int
    head_dim: int
    state_dim: int
    groups: int = 1
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        sizes = f"B{self.batch} L{self.length} H{self.heads} P{self.head_dim} N{self.state_dim} G{self.groups}"
        return f"{sizes} {self.dtype}"

    def operands(self) -> turns.Operands:
        keys = jax.random.split(jax.random.key(0), 6)
        rows, by_group = (self.batch, self.length), (self.groups, self.state_dim)
        low, high = np.log(1e-3), np.log(1e-1)
        dt = jnp.exp(jax.random.uniform(keys[1], (*rows, self.heads), minval=low, maxval=high))
        return {
            "x": jax.random.normal(keys[0], (*rows, self.heads, self.head_dim), self.dtype),
            "dt": dt,
            "A": -jax.random.uniform(keys[2], (self.heads,), minval=1.0, maxval=16.0),
            "B": jax.random.normal(keys[3], (*rows, *by_group), self.dtype),
            "C": jax.random.normal(keys[4], (*rows, *by_group), self.dtype),
            "d_out": jax.random.normal(keys[5], (*rows, self.heads, self.head_dim), self.dtype),
        }

    def bytes(self, pass_: Pass) -> int:
        """Forward x, dt, B, C and y; backward those but y, their gradients, and y's."""
        tokens, size = self.batch * self.length, jnp.dtype(self.dtype).itemsize
        wide = tokens * self.heads * self.head_dim * size
        read = wide + 2 * tokens * self.groups * self.state_dim * size + 4 * tokens * self.heads
        forward, backward = read + wide, 2 * read + wide
        return {"forward": forward, "backward": backward, "both": forward + backward}[pass_]


GPU = (
    Case(8, 4096, 80, 64, 128),
    Case(8, 4096, 80, 64, 128, groups=8),
    Case(1, 32_768, 80, 64, 128),
    Case(8, 4096, 64, 64, 128),
)
CPU = (Case(1, 4096, 8, 64, 64, dtype="float32"), Case(1, 1024, 8, 64, 64, dtype="float32"))
TINY = (Case(1, 96, 2, 8, 4, dtype="float32"),)


def ours(implementation: str, case: Any = None) -> Callable[..., Any]:
    return functools.partial(fast_layers.ssd, implementation=implementation)


def jax_chunked(x, dt, A, B, C, most: int = 64):
    """The matrix form of the scan with nothing saved or masked by hand, as a user of JAX writes it down."""
    batch, length, heads, channels = x.shape
    groups, state = B.shape[2:]
    rows = math.gcd(length, most)
    chunks, by_head = (batch, length // rows, rows), (groups, heads // groups)
    x, dt = x.reshape(*chunks, *by_head, channels), dt.reshape(*chunks, *by_head)
    B, C = (v.reshape(*chunks, groups, state) for v in (B, C))
    sums = jnp.cumsum(dt * A.reshape(by_head), axis=2)
    reached = jnp.tril(jnp.ones((rows, rows), bool))[:, :, None, None]
    decays = jnp.exp(jnp.where(reached, sums[:, :, :, None] - sums[:, :, None], -jnp.inf))
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    weights = product("bcign,bcjgn->bcijg", C, B)[..., None] * decays * dt[:, :, None]
    within = product("bcijgr,bcjgrp->bcigrp", weights.astype(x.dtype), x)
    leaving = (jnp.exp(sums[:, :, -1:] - sums) * dt)[..., None] * x
    added = product("bcjgn,bcjgrp->cbgrpn", B, leaving.astype(x.dtype))
    kept = jnp.moveaxis(jnp.exp(sums[:, :, -1]), 1, 0)[..., None, None]
    _, entering = lax.scan(lambda h, step: (h * step[0] + step[1], h), jnp.zeros_like(added[0]), (kept, added))
    before = product("bcign,cbgrpn->bcigrp", C, entering.astype(x.dtype)) * jnp.exp(sums)[..., None]
    return (within + before).reshape(batch, length, heads, channels).astype(x.dtype)


def mamba_ssm(case: Any = None) -> Callable[..., Any]:
    scan = turns.source_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
    return functools.partial(scan, chunk_size=256)


def simple_gla(case: Any = None) -> Callable[..., Any]:
    """fla's linear attention with one decay a head: queries C, keys B, values dt x, log decays dt A."""
    scan = turns.source_module("fla.ops.simple_gla").chunk_simple_gla

    def call(x, dt, A, B, C):
        B, C = (v.repeat_interleave(x.shape[2] // v.shape[2], dim=2) for v in (B, C))
        out, _ = scan(q=C, k=B, v=(x * dt[..., None]).to(x.dtype), g=dt * A, scale=1.0)
        return out

    return call


def jax_linear_attention(case: Any = None) -> Callable[..., Any]:
    """Its Mamba-2 on its Hopper kernels; elsewhere what it takes by itself."""
    scan = turns.source_module("jla.layers.ssm").mamba2_ssd
    options = {"impl": "mosaic_gpu" if timing.on_gpu() else "auto", "grouped_key_grads": True}

    def call(x, dt, A, B, C):
        return scan(x, dt, A, B, C, **options)[0]

    return call


PEERS: tuple[Peer, ...] = (
    Peer("fast_layers xla", functools.partial(ours, "xla")),
    Peer("fast_layers hopper", functools.partial(ours, "hopper")),
    Peer("fast_layers blackwell", functools.partial(ours, "blackwell")),
    Peer("again", functools.partial(ours, "xla")),
    Peer("recurrence", functools.partial(ours, "reference")),
    Peer("jax chunked", lambda case: jax_chunked),
    Peer("jax-linear-attention", jax_linear_attention),
    Peer("mamba_ssm", mamba_ssm, "torch"),
    Peer("fla simple_gla", simple_gla, "torch"),
)


def main() -> None:
    args = turns.parse(turns.parser(__doc__), lambda args: (peer.name for peer in PEERS))
    turns.share_memory_with_torch()
    cases = TINY if args.tiny else GPU if timing.on_gpu() else CPU
    peers = turns.selected(PEERS, args.peers)
    turns.run(
        ((case, pass_, peers) for pass_ in PASSES for case in (cases[:1] if args.quick else cases)),
        f"python -m bench ssd {' '.join(sys.argv[1:])}".strip(),
        repeats=turns.repeats_of(args),
        path=args.out,
        hlo=args.hlo,
        clock=Clock(args.time_limit),
    )


if __name__ == "__main__":
    main()

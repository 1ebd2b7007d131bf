"""Calls of each op's kernels by name, which need no GPU to be traced; and what is chosen for a GPU that is not here."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import fast_layers
from fast_layers.arch import Arch
from fast_layers.dispatch import PASSES, choose

H200 = Arch("cuda", "NVIDIA H200", (9, 0))
B200 = Arch("cuda", "NVIDIA B200", (10, 0))


def objections(backends, problem, arch):
    """For the forward and the backward: why an unasked call takes another backend than the first, or None."""
    return [dict(choose(backends, problem, arch, pass_).refusals).get(backends[0].name) for pass_ in PASSES]


def attention(backend, heads=2):
    def call(x):
        query = jnp.tile(x[:, :, None], (1, 1, heads, 1))
        return fast_layers.dot_product_attention(query, query, query, is_causal=True, implementation=backend)

    return call


def mlp(backend):
    def call(x, w_up, w_down):
        return fast_layers.mlp(x, w_up, w_down, b_up=w_up[0], implementation=backend)

    return call


def ssd(backend):
    def call(x, a):
        dt = jnp.ones((*x.shape[:2], 2))
        heads = jnp.stack([x, x], 2)
        return fast_layers.ssd(heads, dt, a, x[:, :, None], x[:, :, None], implementation=backend)

    return call


def conv(x, w):
    return fast_layers.causal_conv1d(jnp.tile(x, 2), w, activation="silu", implementation="hopper")


def norm(x, w):
    return fast_layers.gated_rms_norm(x, x, w, implementation="hopper")


# The function, the GPU, and the weights.
KERNELS = {
    "attention on Hopper": (attention("hopper"), H200, ()),
    # Two examples of 68 heads on a device: more tiles of queries than blocks of a persistent grid.
    "attention on Hopper, persistent": (attention("hopper", 68), H200, ()),
    "attention on Blackwell": (attention("blackwell"), B200, ()),
    "mlp on Hopper": (mlp("hopper"), H200, ((64, 128), (128, 64))),
    "mlp on Blackwell": (mlp("blackwell"), B200, ((64, 128), (128, 64))),
    "ssd on Hopper": (ssd("hopper"), H200, ((2,),)),
    "ssd on Blackwell": (ssd("blackwell"), B200, ((2,),)),
    "conv on Hopper": (conv, H200, ((4, 128),)),
    "norm on Hopper": (norm, H200, ((64,),)),
}


def operands_of(shapes):
    x = jax.ShapeDtypeStruct((4, 128, 64), jnp.bfloat16)
    return x, *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)

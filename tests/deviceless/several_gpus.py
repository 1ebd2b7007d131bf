"""Compiles an op's pass for a mesh of GPUs that are not here, all automatic: `python several_gpus.py GPU OP`.

Prints as JSON the shapes of each kernel's results, and the lines of the program that gather.
"""

from __future__ import annotations

import json
import re
import sys

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fast_layers
from fast_layers.testing import _deviceless_child
from fast_layers.testing._deviceless_targets import TARGETS

BACKENDS = {"h200": "hopper", "b200": "blackwell"}
MESH = {"data": 2, "model": 4}
ROWS = P("data", None, "model")


def attention(backend, query, key, value):
    return fast_layers.dot_product_attention(query, key, value, is_causal=True, implementation=backend)


def scan(backend, x, dt, a, b, c):
    return fast_layers.ssd(x, dt, a, b, c, implementation=backend)


def convolve(backend, x, w):
    return fast_layers.causal_conv1d(x, w, activation="silu", implementation=backend)


def normalise(backend, y, z, weight):
    return fast_layers.gated_rms_norm(y, z, weight, group_size=256, implementation=backend)


# The function, and shape and layout of each operand.
OPS = {
    "attention": (attention, [((4, 512, 8, 128), ROWS), *[((4, 512, 4, 128), ROWS)] * 2]),
    "fewer_key_heads": (attention, [((4, 512, 8, 128), ROWS), *[((4, 512, 2, 128), P("data"))] * 2]),
    "depth_64": (attention, [((4, 4096, 16, 64), ROWS), *[((4, 4096, 4, 64), ROWS)] * 2]),
    "few_heads": (attention, [((4, 2048, 8, 64), ROWS)] * 3),
    "scan": (
        scan,
        [((4, 256, 8, 64), ROWS), ((4, 256, 8), ROWS), ((8,), P("model")), *[((4, 256, 1, 64), P("data"))] * 2],
    ),
    "conv1d": (convolve, [((4, 256, 1024), ROWS), ((4, 1024), P(None, "model"))]),
    "conv1d_of_2^31_numbers": (convolve, [((64, 4096, 8192), ROWS), ((4, 8192), P(None, "model"))]),
    "norm": (normalise, [*[((4, 256, 1024), ROWS)] * 2, ((1024,), P("model"))]),
}


def main(gpu: str, op: str) -> None:
    call, operands = OPS[op]

    def step(*operands):
        out, pull = jax.vjp(lambda *operands: call(BACKENDS[gpu], *operands), *operands)
        return out, pull(out)

    with _deviceless_child.described(TARGETS[gpu], MESH) as whole:
        shapes = [
            jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=NamedSharding(whole.mesh, spec)) for s, spec in operands
        ]
        compiled = jax.jit(step).lower(*shapes).compile()
    lines = compiled.as_text().splitlines()
    kernels = [line.split(" custom-call(")[0] for line in lines if 'custom_call_target="mosaic_gpu' in line]
    gathered = [line for line in lines if re.search(r" (all-gather|all-to-all|collective-permute)", line)]
    print(json.dumps({"kernels": [re.findall(r"\w+\[([\d,]+)\]", k) for k in kernels], "gathered": gathered}))


if __name__ == "__main__":
    main(*sys.argv[1:])

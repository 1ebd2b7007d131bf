"""Functions of the state-space scan that the process which compiles imports."""

from __future__ import annotations

import jax

import fast_layers


def scan(operands: dict[str, jax.Array], **options):
    return fast_layers.ssd(**operands, **options, return_final_state=True, implementation="hopper")

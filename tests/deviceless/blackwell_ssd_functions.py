"""The state-space scan on Blackwell, for the process which compiles to import."""

from __future__ import annotations

import jax

import fast_layers


def scan_and_gradients(operands: dict[str, jax.Array], cotangents):
    """The gradients are those of the arguments that have any."""
    whole = {name: x for name, x in operands.items() if x.dtype == "int32"}

    def scan(rest):
        return fast_layers.ssd(**rest, **whole, dt_softplus=True, return_final_state=True, implementation="blackwell")

    out, pull = jax.vjp(scan, {name: x for name, x in operands.items() if name not in whole})
    return out, pull(cotangents)


def scan(operands: dict[str, jax.Array]):
    return fast_layers.ssd(**operands, dt_softplus=True, return_final_state=True, implementation="blackwell")

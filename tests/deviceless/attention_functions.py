"""Functions that another process compiles: attention with something for each score."""

from __future__ import annotations

import jax

import fast_layers


def attention_per_score(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    d_out: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    **options,
):
    """The output and all gradients."""
    if options.get("dropout_rate"):
        options["dropout_rng"] = jax.random.key(0)

    def attend(query, key, value, bias):
        return fast_layers.dot_product_attention(query, key, value, bias, mask, **options)

    out, pull = jax.vjp(attend, query, key, value, bias)
    return out, pull(d_out)

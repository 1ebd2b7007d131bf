"""Functions that another process compiles: attention with something for each score, or with other tiles."""

from __future__ import annotations

import dataclasses

import jax

import fast_layers
from fast_layers.ops.attention import api, blackwell_fwd
from fast_layers.ops.attention.blackwell_config import BlackwellForwardTiles


def blackwell_forward(query: jax.Array, key: jax.Array, value: jax.Array, *, tiles: dict, **options):
    """With the tiles of its own choice, less what `tiles` says."""
    inputs, aux, given, _ = api._prepare(query, key, value, **options)
    problem = given.problem(inputs, aux)
    chosen = dataclasses.replace(BlackwellForwardTiles.of(problem), **tiles)
    return blackwell_fwd.attend(problem, inputs, aux, chosen)


def any_order(
    query: jax.Array, key: jax.Array, value: jax.Array, d_out: jax.Array, ids: jax.Array | None = None, **options
):
    """The output and all gradients, whose sums may come in any order."""

    def attend(*operands):
        return fast_layers.dot_product_attention(*operands, segment_ids=ids, **options)

    with fast_layers.use_backends(reproducible=False):
        out, pull = jax.vjp(attend, query, key, value)
        return out, pull(d_out)


def attention_per_score(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    d_out: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    reproducible: bool = True,
    **options,
):
    """The output and all gradients."""
    if options.get("dropout_rate"):
        options["dropout_rng"] = jax.random.key(0)

    def attend(query, key, value, bias):
        return fast_layers.dot_product_attention(query, key, value, bias, mask, **options)

    with fast_layers.use_backends(reproducible=reproducible):
        out, pull = jax.vjp(attend, query, key, value, bias)
        return out, pull(d_out)


def decode(query: jax.Array, key: jax.Array, value: jax.Array, filled: jax.Array, *, by: str, implementation: str):
    """Against a cache, of which it is known in the call alone how far it is filled."""
    told: dict = {"key_value_seq_lengths": filled}
    if by != "lengths":
        told = {"q_offset": filled, "is_causal": True}
    if by == "window":
        told["local_window_size"] = (1023, 0)
    return fast_layers.dot_product_attention(query, key, value, implementation=implementation, **told)

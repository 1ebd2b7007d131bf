"""A decode step reads the filled part of a cache, not its capacity, and computes no rows that nobody asked for."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest

import fast_layers
from fast_layers.arch import Arch
from fast_layers.ops.attention import xla

CAPACITY, HEADS, DEPTH = 4096, 4, 32


def decode(query, key, value, filled):
    return fast_layers.dot_product_attention(query, key, value, is_causal=True, q_offset=filled, implementation="xla")


def operands():
    query = jnp.ones((1, 1, HEADS, DEPTH))
    cache = jnp.ones((1, CAPACITY, HEADS, DEPTH))
    return query, cache, cache, jnp.int32(16)


def equations(jaxpr, *, inside_loops: bool):
    """All equations, those of called functions included; loop bodies on demand."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name == "while" and not inside_loops:
            continue
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner, inside_loops=inside_loops)


def cache_sized(jaxpr) -> list:
    calls = {"jit", "pjit", "custom_vjp_call", "custom_vjp_call_jaxpr", "reshape"}
    size = CAPACITY * HEADS * DEPTH
    return [
        equation
        for equation in equations(jaxpr, inside_loops=False)
        if equation.primitive.name not in calls
        and any(math.prod(getattr(out.aval, "shape", ())) >= size for out in equation.outvars)
    ]


@pytest.fixture
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(xla, "lowering_targets", lambda: (Arch("cpu"),))


def test_one_query_is_one_row(on_a_cpu):
    every = equations(jax.make_jaxpr(decode)(*operands()).jaxpr, inside_loops=True)
    products = [getattr(e.outvars[0].aval, "shape", ()) for e in every if e.primitive.name == "dot_general"]
    assert products
    assert all(shape[:4] == (1, HEADS, 1, 1) for shape in products)


def test_tiles_without_hidden_keys_are_not_made_safe(on_a_cpu):
    """By a branch, also where calls under `vmap` have offsets of their own."""
    query, key, value, filled = operands()
    each = jax.vmap(decode, in_axes=(0, 0, 0, 0))
    mapped = (*(jnp.stack([x, x]) for x in (query, key, value)), jnp.stack([filled, 2 * filled]))
    for call, arguments in ((decode, operands()), (each, mapped)):
        branches = [
            [e.primitive.name for e in equations(branch.jaxpr, inside_loops=True)]
            for equation in equations(jax.make_jaxpr(call)(*arguments).jaxpr, inside_loops=True)
            if equation.primitive.name == "cond"
            for branch in equation.params["branches"]
        ]
        assert [any("is_finite" in name for name in branch) for branch in branches] == [True, False]


def test_nothing_outside_the_loop_is_as_large_as_the_cache():
    assert cache_sized(jax.make_jaxpr(decode)(*operands()).jaxpr) == []


def test_the_check_sees_a_pass_over_the_cache():
    def with_a_pass(query, key, value, filled):
        return decode(query, key * 2.0, value, filled)

    assert [e.primitive.name for e in cache_sized(jax.make_jaxpr(with_a_pass)(*operands()).jaxpr)] == ["mul"]


def test_what_lies_past_the_filled_part_is_not_read():
    query, key, _, filled = operands()
    noise = jax.random.normal(jax.random.key(0), key.shape)
    unread = jnp.arange(CAPACITY)[None, :, None, None] > filled
    got = jax.jit(decode)(query, jnp.where(unread, jnp.nan, noise), jnp.where(unread, jnp.nan, noise), filled)
    seen = noise[:, : int(filled) + 1]
    want = fast_layers.dot_product_attention(query, seen, seen, implementation="reference")
    assert jnp.allclose(got, want, atol=1e-6)

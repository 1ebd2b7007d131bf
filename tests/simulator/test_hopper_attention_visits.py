"""dS of the tiles that documents, lengths and prefixes visit, and dQ of it, on Hopper in the simulator."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import some_each_run

from fast_layers.ops.attention import api, hopper_bwd_scores, hopper_bwd_visits, hopper_call, reference
from fast_layers.ops.attention.hopper_bwd_config import HopperBackwardTiles
from fast_layers.ops.attention.hopper_grad_parts import KeyRows
from fast_layers.ops.attention.problem import Residuals
from fast_layers.ops.attention.tile_mask import TileMask
from fast_layers.testing import simulate
from fast_layers.testing.parity import Case
from simulator.attention import backward_tiles, judge, only, patched
from simulator.rounded import assert_rounded

pytestmark = pytest.mark.simulator


def _square(length: int, **options: Any) -> Case:
    return dataclasses.replace(Case(q_len=length, kv_len=length, batch=1, heads=1, kv_heads=1), **options)


VISITED = {
    "causal documents, grouped heads": (
        _square(384, heads=2, is_causal=True, documents=(100, 37, 247)),
        HopperBackwardTiles(128),
    ),
    "causal documents, depth 128": (
        _square(384, qk_dim=128, v_dim=128, is_causal=True, documents=(190, 150), lse_gradient=True),
        HopperBackwardTiles(64),
    ),
    "documents": (
        _square(512, batch=2, heads=2, kv_heads=2, documents=(120, 150, 77)),
        HopperBackwardTiles(128),
    ),
    "documents, scattered": (
        _square(384, batch=2, qk_dim=128, v_dim=128, documents=(150, 3, 57), scattered=True),
        HopperBackwardTiles(64),
    ),
    "documents, window": (
        _square(512, documents=(250, 200), window=(130, 0)),
        HopperBackwardTiles(128),
    ),
    "documents, padding of NaN": (
        _square(512, batch=2, documents=(250, 3), poisoned_padding=True),
        HopperBackwardTiles(128),
    ),
    "documents, softcap": (
        _square(256, is_causal=True, softcap=5.0, documents=(150, 106)),
        HopperBackwardTiles(128),
    ),
    # A document is cut in the second example, where rows tell what is hidden.
    "causal documents, lengths": (
        _square(256, batch=2, is_causal=True, documents=(150, 106), key_lengths=(256, 200)),
        HopperBackwardTiles(64),
    ),
    # Tiles of keys that no query sees come between those of other examples.
    "lengths": (
        _square(384, batch=3, key_lengths=(300, 77, 0), query_lengths=(211, 384, 384)),
        HopperBackwardTiles(128),
    ),
    "prefix": (_square(384, batch=2, prefix=(150, 200)), HopperBackwardTiles(128)),
}
# Pairs of an example and a head in a group: the last has one that was done before, or each is alone.
PAIRS = {"documents": 3, "documents, scattered": 1, "lengths": 1}


def _visited(tiles: HopperBackwardTiles, pairs: int | None = None, apart: bool = True) -> list[tuple[Any, str, Any]]:
    # Two heads side by side at most.
    patches = [
        backward_tiles(dataclasses.replace(tiles, d_query_apart=apart)),
        (hopper_bwd_visits, "_KEYS_TOGETHER", 8),
        (hopper_bwd_visits, "_QUERIES_TOGETHER", 8),
    ]
    return patches if pairs is None else [*patches, (hopper_bwd_scores, "scores_group", lambda _: pairs)]


@pytest.mark.parametrize("name", some_each_run(VISITED, {"causal documents, depth 128"}))
def test_only_visited_tiles_are_left(name):
    case, tiles = VISITED[name]
    with patched(*_visited(tiles, PAIRS.get(name))):
        judged = judge(case, supports=only("backward"))
    assert not judged.faulty, judged.report()
    assert judged.table.ok, judged.report()


def _one_too_many(key_rows: KeyRows, *args: Any) -> Any:
    return visible(key_rows._replace(stop=key_rows.stop + 1), *args)


visible = KeyRows.visible
ORDERED = _square(256, documents=(150, 106))
SCATTERED = dataclasses.replace(ORDERED, scattered=True)
WRONG = {"keys": (KeyRows, "visible", _one_too_many), "rows": (TileMask, "hide", lambda _, scores, *rows, **at: scores)}
"""What tells which scores are hidden, made wrong."""


@pytest.mark.parametrize("apart", [True, pytest.param(False, marks=pytest.mark.exhaustive)], ids=["apart", "inside"])
@pytest.mark.parametrize(
    ("case", "wrong", "matters"),
    [
        pytest.param(ORDERED, "rows", False, id="keys tell of ordered documents"),
        pytest.param(ORDERED, "keys", True, id="and their last query is seen", marks=pytest.mark.exhaustive),
        pytest.param(SCATTERED, "keys", False, id="rows tell of scattered ones"),
        pytest.param(SCATTERED, "rows", True, id="and what they hide is seen", marks=pytest.mark.exhaustive),
    ],
)
def test_who_tells_what_is_hidden(case, wrong, matters, apart):
    with patched(*_visited(HopperBackwardTiles(128), apart=apart), WRONG[wrong]):
        judged = judge(case, supports=only("backward"))
    assert not judged.faulty, judged.report()
    assert judged.table.ok != matters, judged.report()


# dQ is summed in the kernel where a last tile is ragged.
RAGGED = {
    "causal": _square(250, batch=2, is_causal=True, documents=(150, 100), lse_gradient=True),
    "full, grouped heads": _square(330, heads=2, documents=(100, 37, 193)),
    "depth 128, window": _square(200, qk_dim=128, v_dim=128, documents=(110, 90), window=(70, 0)),
    "scattered": _square(250, batch=2, documents=(120, 100), scattered=True),
    "padding of NaN": _square(250, batch=2, documents=(130, 3), poisoned_padding=True),
}


@pytest.mark.parametrize("name", some_each_run(RAGGED, {"causal"}))
def test_documents_with_a_ragged_tile(name):
    with patched(*_visited(HopperBackwardTiles(128), apart=False)):
        judged = judge(RAGGED[name], supports=only("backward"))
    assert not judged.faulty, judged.report()
    assert judged.table.ok, judged.report()


@pytest.mark.exhaustive
def test_vmap_over_documents():
    """Keys tell of the first example's, rows of the second's."""
    rng = np.random.default_rng(0)
    given = [jnp.asarray(rng.normal(size=(2, 1, 256, 1, 64)), jnp.float16) for _ in range(4)]
    ids = np.stack([np.repeat([0, 1], (150, 106)), np.repeat([0, 1, 0], (100, 50, 106))])
    given.append(jnp.asarray(ids, jnp.int32))

    def gradients(backend, query, key, value, d_out, ids):
        inputs, aux, options, _ = api._prepare(query, key, value, segment_ids=ids, is_causal=True)
        problem = options.problem(inputs, aux)
        out, lse = reference.forward(problem, inputs, aux)
        return backend.backward(problem, Residuals(inputs, aux, out, lse), d_out, jnp.zeros_like(lse))[:3]

    def mapped(backend, *given):
        return jax.vmap(functools.partial(gradients, backend))(*given)

    with patched(*_visited(HopperBackwardTiles(128))):
        all_ours = simulate(functools.partial(mapped, hopper_call), *given).check()
    assert_rounded(all_ours, mapped, *given)


@pytest.mark.exhaustive
@pytest.mark.parametrize("broken", ["query", "key", "value", "d_out"])
def test_a_number_of_another_document_that_is_broken(broken):
    """Documents of 150 and 234 tokens; what is broken in the second changes nothing in the first."""
    rng = np.random.default_rng(0)
    arrays = {
        name: jnp.asarray(rng.normal(size=(1, 384, 1, 64)), jnp.float16) for name in ("query", "key", "value", "d_out")
    }
    whole, arrays[broken] = arrays[broken], arrays[broken].at[0, 200, 0, 3].set(jnp.nan).at[0, 220, 0, 3].set(jnp.inf)
    ids = np.repeat(np.arange(2), (150, 234)).astype(np.int32)

    def gradients(backend, query, key, value, d_out):
        inputs, aux, options, _ = api._prepare(query, key, value, segment_ids=ids, is_causal=True)
        problem = options.problem(inputs, aux)
        out, lse = reference.forward(problem, inputs, aux)
        return backend.backward(problem, Residuals(inputs, aux, out, lse), d_out, jnp.zeros_like(lse))[:3]

    with patched(*_visited(HopperBackwardTiles(128))):
        got = simulate(functools.partial(gradients, hopper_call), *arrays.values()).check()
    assert all(np.isnan(x[0, 150:]).any() for x in got)
    assert_rounded(got, gradients, *(arrays | {broken: whole}).values(), rows=np.s_[:, :150])

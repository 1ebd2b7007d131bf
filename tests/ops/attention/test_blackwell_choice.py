"""When the Blackwell backend is taken, and what it says where it is not."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import fast_layers
from fast_layers.arch import Arch
from fast_layers.dispatch import choose
from fast_layers.ops.attention import api, blackwell_bwd, blackwell_call
from fast_layers.ops.attention.backends import BACKENDS
from fast_layers.ops.attention.blackwell_config import (
    BLACKWELL_SMEM_BYTES,
    BLACKWELL_TMEM_COLUMNS,
    BlackwellBackwardTiles,
    BlackwellForwardTiles,
)

B200 = Arch("cuda", "NVIDIA B200", (10, 0))


def _problem(qk_dim=64, v_dim=None, length=512, dtype=jnp.bfloat16, **options):
    query = jnp.zeros((1, length, 2, qk_dim), dtype)
    value = jnp.zeros((1, length, 2, v_dim or qk_dim), dtype)
    inputs, aux, given, _ = api._prepare(query, query, value, **options)
    return given.problem(inputs, aux)


@pytest.mark.parametrize("pass_", ["forward", "backward"])
@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
def test_taken_by_name_only(pass_, capability):
    arch = dataclasses.replace(B200, capability=capability)
    by_itself = choose(BACKENDS, _problem(), arch, pass_)
    assert by_itself.backend is not None
    assert by_itself.backend.name != "blackwell"
    reason = dict(by_itself.refusals)["blackwell"]
    assert reason == 'simulated and compiled, never run on hardware; take it by name: implementation="blackwell"'
    by_name = choose(BACKENDS, _problem(), arch, pass_, "blackwell")
    assert by_name.backend is not None
    assert by_name.backend.name == "blackwell"


REFUSALS = {
    "float32": ({"dtype": jnp.float32}, "forward", "takes bfloat16 and float16, got float32"),
    "bias": ({"bias": jnp.zeros((1, 2, 512, 512), jnp.float8_e4m3fn)}, "backward", "takes a bias in bfloat16, float16"),
    "scale": ({"scale": 0.0}, "backward", "needs a scale > 0, got 0"),
    "too deep": ({"qk_dim": 264}, "forward", "the forward kernel takes depths up to 256, got 264 and 264"),
    "no room": ({"qk_dim": 240, "v_dim": 256}, "forward", "depths 240 and 256 do not fit in shared memory together"),
}


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_takes_what_each_score_may_have(pass_):
    query = jnp.zeros((1, 512, 2, 64), jnp.bfloat16)
    bias, mask = jnp.zeros((1, 2, 512, 512)), jnp.ones((512, 512), bool)
    rng = {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}
    inputs, aux, given, _ = api._prepare(query, query, query, bias, mask, **rng)
    assert blackwell_call.supports(given.problem(inputs, aux), B200, pass_) is None


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses_with_the_reason(name):
    options, pass_, text = REFUSALS[name]
    assert text in (blackwell_call.supports(_problem(**options), B200, pass_) or "taken")


@pytest.mark.parametrize("arch", [Arch("cpu", "cpu", None), Arch("cuda", "NVIDIA H200", (9, 0))], ids=str)
def test_refuses_other_devices(arch):
    reason = blackwell_call.supports(_problem(), arch, "forward")
    assert reason == f"needs an NVIDIA GPU of compute capability 10.0 (B200) or 10.3 (B300), got {arch}"


def test_raises_by_name_elsewhere():
    query = jnp.zeros((1, 128, 2, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="blackwell: needs an NVIDIA GPU of compute capability"):
        fast_layers.dot_product_attention(query, query, query, implementation="blackwell")


@pytest.mark.parametrize(
    "depths", [(16, 16), (64, 64), (80, 80), (128, 128), (192, 128), (64, 256), (256, 256)], ids=str
)
@pytest.mark.parametrize(("length", "keys"), [(1, 1), (129, 129), (4096, 4096), (1, 8192), (300, 8192)])
def test_tiles_fit(depths, length, keys):
    tiles = BlackwellForwardTiles.of(dataclasses.replace(_problem(*depths, length=length), kv_len=keys))
    assert (tiles.splits > 1) == (keys > 129)  # of two heads, which are few
    assert tiles.smem_bytes(*depths) <= BLACKWELL_SMEM_BYTES
    assert tiles.tmem_columns(depths[1]) <= BLACKWELL_TMEM_COLUMNS
    warpgroups = len(tiles.registers)
    assert warpgroups == tiles.q_tiles + 2
    launched_with = 65536 // (128 * warpgroups) // 8 * 8
    assert sum(tiles.registers) <= launched_with * warpgroups  # a block that asks for more waits for ever


@pytest.mark.parametrize(
    "depths", [(16, 16), (80, 80), (128, 128), (64, 256), (192, 128), (240, 256), (256, 256)], ids=str
)
def test_backward_tiles_fit(depths):
    tiles = BlackwellBackwardTiles.of(_problem(*depths))
    assert tiles.smem_bytes(*depths) <= BLACKWELL_SMEM_BYTES
    assert tiles.tmem_columns(*depths) <= BLACKWELL_TMEM_COLUMNS
    assert tiles.apart == (sum(depths) > 256)


@pytest.mark.parametrize(
    ("depths", "fits"),
    [
        ((64, 64), True),
        ((80, 40), True),
        ((128, 128), True),
        ((64, 192), True),
        ((160, 64), True),
        ((192, 64), False),  # dQ is wider than dP, where it stands, and takes as many columns again as dK
        ((80, 192), False),
        ((64, 256), False),
        ((192, 128), False),
        ((256, 256), False),
    ],
    ids=str,
)
def test_one_kernel_makes_all_gradients_where_it_fits(depths, fits):
    with fast_layers.use_backends(reproducible=False):
        problem = _problem(*depths)
    tiles = BlackwellBackwardTiles.of(problem)
    assert tiles.fused == fits
    assert tiles.misfit(problem) is None
    if not fits:
        asked = BlackwellBackwardTiles(2, 1, fused=True)
        nothing: Any = None
        with pytest.raises(ValueError, match="of tensor memory of 512; leave the choice"):
            blackwell_bwd.attend_grad(problem, nothing, nothing, nothing, asked)


@pytest.mark.parametrize("fused", [False, True])
def test_backward_registers(fused):
    tiles = BlackwellBackwardTiles(fused=fused)
    assert 2 * tiles.compute_registers + tiles.load_registers + tiles.multiply_registers == 4 * 128


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"q_tiles": 3}, "must be 1 or 2"),
        ({"kv_tile": 96}, "must be 64 or 128"),
        ({"stages": 1}, "must be at least 2"),
        ({"blocks": -1}, "must be at least 0"),
        ({"rescale_log2": 9.0}, "must be from 0 to 8"),
        ({"dynamic": True, "blocks": 148}, "takes a block for each tile of queries"),
        ({"polynomial_columns": 12}, "must be 0, 8, 16, 24 or 32"),
        ({"splits": 2, "blocks": 148}, "must be at least 1, and 1 in a persistent grid"),
    ],
    ids=str,
)
def test_tiles_reject_themselves(wrong, text):
    with pytest.raises(ValueError, match=text):
        BlackwellForwardTiles(**({"q_tiles": 2, "kv_tile": 128} | wrong))
    with pytest.raises(ValueError, match="must be 2 or 4"):
        BlackwellBackwardTiles(stages=3)
    with pytest.raises(ValueError, match="with dK and dV apart also 1"):
        BlackwellBackwardTiles(v_stages=1)
    with pytest.raises(ValueError, match="must be 2 to 4"):
        BlackwellBackwardTiles(stages=1, fused=True)
    with pytest.raises(ValueError, match="or several do"):
        BlackwellBackwardTiles(apart=True, fused=True)

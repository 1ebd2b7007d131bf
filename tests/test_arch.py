"""What a call is lowered for is asked of the mesh that it is traced in, and only without one of the default device."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

import fast_layers
from fast_layers.arch import Arch, lowering_targets

H200 = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")


def _mesh_of(kind):
    return AbstractMesh((1,), ("one",), axis_types=(AxisType.Auto,), abstract_device=AbstractDevice(kind, None, "gpu"))


@pytest.fixture(params=[False, True], ids=["on a CPU", "on an H200"])
def default_device(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(jax, "devices", lambda *_: [H200])


@pytest.mark.usefixtures("default_device")
def test_the_choice_for_blackwell_does_not_depend_on_the_default_device():
    q = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
    x, w = (jax.ShapeDtypeStruct((64, 64), jnp.bfloat16) for _ in range(2))
    scanned, b = (jax.ShapeDtypeStruct((1, 256, n, 64), jnp.bfloat16) for n in (2, 1))
    dt, a = jax.ShapeDtypeStruct((1, 256, 2), jnp.bfloat16), jax.ShapeDtypeStruct((2,), jnp.float32)

    def all_three(q, x, w, scanned, dt, a, b):
        fast_layers.dot_product_attention(q, q, q, is_causal=True, implementation="blackwell")
        fast_layers.mlp(x, w, w, implementation="blackwell")
        fast_layers.ssd(scanned, dt, a, b, b, implementation="blackwell")

    with jax.sharding.use_abstract_mesh(_mesh_of("NVIDIA B200")):
        assert lowering_targets() == (Arch("cuda", "NVIDIA B200", (10, 0)),)
        plans = fast_layers.explain(all_three, q, x, w, scanned, dt, a, b).plans
        assert len(plans) == 3
        for plan in plans:
            for choice in (*plan.forward, *plan.backward):
                assert (choice.backend.name, choice.arch.capability) == ("blackwell", (10, 0))


@pytest.mark.usefixtures("default_device")
def test_without_a_mesh_the_default_device_comes_first():
    here = Arch.of_device(jax.devices()[0])
    assert lowering_targets()[0] == here
    assert {arch.platform for arch in lowering_targets()} == {"cpu", "cuda"}

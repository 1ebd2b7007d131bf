"""The migration page: every model runs, and its one-line change changes no output, gradient or parameter."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_bitwise_equal
from flax import nnx

import fast_layers
from layers.cases import jit

PAGE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
MODELS = re.findall(r"^```python (\w+)$", PAGE, re.MULTILINE)


def block(kind, name):
    return re.search(rf"^```{kind} {name}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[1]


def swapped(source, diff):
    """`source` with the one line changed."""
    (old,) = re.findall(r"^-(.*)$", diff, re.MULTILINE)
    (new,) = re.findall(r"^\+(.*)$", diff, re.MULTILINE)
    assert source.count(old) == 1
    return source.replace(old, new)


def run(source):
    # Linen looks its fields' types up in the module that a class says it is from.
    page = sys.modules["page"] = types.ModuleType("page")
    page.fast_layers = fast_layers
    exec(compile(source, "docs/migrating.md", "exec"), page.__dict__)
    return page.__dict__


def parameters(names):
    model = names["model"]
    return nnx.to_pure_dict(nnx.state(model, nnx.Param)) if isinstance(model, nnx.Module) else names["parameters"]


def gradients(names):
    model = names["model"]
    if isinstance(model, nnx.Module):
        inputs = (names["source"], names["target"]) if "source" in names else (jnp.arange(24)[None],)
        graph, params = nnx.split(model)
        return nnx.to_pure_dict(jit(jax.grad(lambda p: (nnx.merge(graph, p)(*inputs) ** 2).mean()))(params))
    return jit(jax.grad(lambda p: (model.apply(p, names["images"]) ** 2).mean()))(names["parameters"])


@pytest.mark.parametrize("name", MODELS)
def test_one_line(name):
    source = block("python", name)
    before, after = run(source), run(swapped(source, block("diff", name)))
    assert_bitwise_equal(parameters(after), parameters(before))
    np.testing.assert_allclose(after["logits"], before["logits"], rtol=1e-4, atol=1e-5)
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5),
        gradients(after),
        gradients(before),
    )


def test_there_are_three():
    assert len(MODELS) == 3

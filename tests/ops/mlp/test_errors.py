"""Each mistake a caller can make: one readable error that says what came and what is wanted."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fast_layers
from fast_layers.ops.mlp.backends import BACKENDS

TOKENS, IN, HIDDEN, OUT = 5, 8, 24, 16


def _zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


GOOD = {"x": _zeros(TOKENS, IN), "w_up": _zeros(IN, HIDDEN), "w_down": _zeros(HIDDEN, OUT)}

# name: (arguments to replace or add, pieces of the message in order)
BAD = {
    "integer x": ({"x": _zeros(TOKENS, IN, dtype=np.int32)}, ["x has dtype int32", "floating point", "x.astype"]),
    "complex weight": (
        {"w_up": _zeros(IN, HIDDEN, dtype=np.complex64)},
        ["w_up has dtype complex64", "floating point"],
    ),
    "eight bits": (
        {"x": jnp.zeros((TOKENS, IN), jnp.float8_e4m3fn)},
        ["x has dtype float8_e4m3fn", "bfloat16, float16"],
    ),
    "mixed dtypes": (
        {"x": _zeros(TOKENS, IN, dtype=np.float16)},
        ["same dtype", "x float16, w_up float32, w_down float32", "cast them"],
    ),
    "mixed bias": ({"b_up": _zeros(HIDDEN, dtype=np.float16)}, ["same dtype", "b_up float16"]),
    "scalar x": ({"x": np.float32(1)}, ["x must be [leading dims.., in_features]", "()"]),
    "vector for a matrix": ({"w_up": _zeros(IN)}, ["w_up must be a matrix", "(8,)"]),
    "stacked down": ({"w_down": _zeros(2, HIDDEN, OUT)}, ["w_down must be a matrix", "(2, 24, 16)"]),
    "in_features": ({"x": _zeros(TOKENS, 9)}, ["x has 9 features, w_up takes 8", "w_down (24, 16)"]),
    "hidden_features": ({"w_down": _zeros(25, OUT)}, ["w_down must have shape (24, 16), got (25, 16)"]),
    "gate": ({"w_gate": _zeros(HIDDEN, IN)}, ["w_gate must have shape (8, 24), got (24, 8)"]),
    "bias up": ({"b_up": _zeros(1, HIDDEN)}, ["b_up must have shape (24,), got (1, 24)"]),
    "bias gate": ({"w_gate": _zeros(IN, HIDDEN), "b_gate": _zeros(IN)}, ["b_gate must have shape (24,), got (8,)"]),
    "bias down": ({"b_down": _zeros(HIDDEN)}, ["b_down must have shape (16,), got (24,)"]),
    "bias without gate": ({"b_gate": _zeros(HIDDEN)}, ["b_gate is given without w_gate", "give both"]),
    "no w_up": ({"w_up": None}, ["w_up is None: must be an array"]),
    "no w_down": ({"w_down": None}, ["w_down is None: must be an array"]),
    "no features": ({"x": _zeros(TOKENS, 0), "w_up": _zeros(0, HIDDEN)}, ["x has shape (5, 0)", "at least 1"]),
    "no outputs": ({"w_down": _zeros(HIDDEN, 0)}, ["w_down has shape (24, 0)", "at least 1"]),
    "activation": ({"activation": "softmax"}, ["activation='softmax' is unknown", "gelu_tanh", "swish"]),
    "activation as a function": ({"activation": jax.nn.relu}, ["activation=", "is unknown; take a name", "relu"]),
    "save": ({"save": "everything"}, ["save='everything'", "'pre_activation' or 'inputs'"]),
    "save in a list": ({"save": ["inputs"]}, ["save=['inputs']", "'pre_activation' or 'inputs'"]),
    "float8": ({"float8": "e3m4"}, ["float8='e3m4'", "'e4m3' or 'e5m2', or None"]),
    "float8 in a list": ({"float8": ["e4m3"]}, ["float8=['e4m3']", "'e4m3' or 'e5m2', or None"]),
    "precision": ({"precision": "foo"}, ["precision='foo'", "such as 'highest'"]),
    "implementation": ({"implementation": "cublas"}, ["mlp: implementation 'cublas' is unknown", "xla, reference"]),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "jit"])
def test_one_readable_error(name, traced):
    replaced, pieces = BAD[name]
    arguments = GOOD | replaced
    arrays = {key: value for key, value in arguments.items() if hasattr(value, "shape")}
    call = functools.partial(fast_layers.mlp, **{key: arguments[key] for key in arguments.keys() - arrays.keys()})
    with pytest.raises(ValueError, match=r"\w") as raised:
        (jax.jit(call) if traced else call)(**arrays)
    message, position = str(raised.value), 0
    for piece in pieces:
        position = message.find(piece, position)
        assert position >= 0, f"{piece!r} not, or not in this place, in: {message}"
    assert "\n" not in message


def test_linear_calls_its_operands_by_their_names():
    x, w = GOOD["x"], GOOD["w_up"]
    for replaced, message in (
        ({"w": _zeros(9, HIDDEN)}, "x has 8 features, w takes 9"),
        ({"b": _zeros(IN)}, r"b must have shape \(24,\), got \(8,\)"),
        ({"gate": _zeros(HIDDEN, IN)}, r"gate must have shape \(8, 24\), got \(24, 8\)"),
        ({"b_gate": _zeros(HIDDEN)}, "b_gate is given without gate"),
        ({"implementation": "cublas"}, "linear: implementation 'cublas' is unknown"),
        ({"w": None}, "w is None: must be an array"),
    ):
        with pytest.raises(ValueError, match=message):
            fast_layers.linear(**({"x": x, "w": w} | replaced))


@pytest.mark.parametrize("gated", [False, True])
def test_no_tokens_give_nothing_and_no_gradient(gated):
    """As a hand-written MLP has it, whose weights may stand in a batch with others."""
    weights = {"w_up": GOOD["w_up"], "w_gate": GOOD["w_up"] if gated else None, "w_down": GOOD["w_down"]}
    x = _zeros(2, 0, IN)

    def loss(x, weights):
        return fast_layers.mlp(x, **weights).sum()

    assert fast_layers.mlp(x, **weights).shape == (2, 0, OUT)
    assert fast_layers.linear(x, GOOD["w_up"]).shape == (2, 0, HIDDEN)
    d_x, d_weights = jax.jit(jax.grad(loss, (0, 1)))(x, weights)
    assert d_x.shape == x.shape
    assert all(not d.any() for d in jax.tree.leaves(d_weights))
    with pytest.raises(ValueError, match="x has 9 features, w_up takes 8"):
        fast_layers.mlp(_zeros(0, 9), **weights)


def test_a_refused_backend_says_so():
    """Whichever refuses here: all but xla and the reference need a device of their own."""
    for backend in BACKENDS:
        if backend.name not in ("xla", "reference"):
            with pytest.raises(ValueError, match=rf"mlp: no backend takes the forward pass.*{backend.name}: .*xla"):
                fast_layers.mlp(**GOOD, implementation=backend.name)


def test_explain_says_what_was_called_and_chosen():
    text = str(fast_layers.explain(fast_layers.mlp, **GOOD, w_gate=GOOD["w_up"], b_down=_zeros(OUT)))
    assert "mlp: x [5, 8], hidden 24, out 16, float32, gelu_tanh gate, bias down\n" in text
    assert "forward  on cpu: xla" in text
    assert "backward on cpu: xla" in text
    text = str(fast_layers.explain(lambda x, w: fast_layers.linear(x, w, save="inputs"), GOOD["x"], GOOD["w_up"]))
    assert text.startswith("linear: x [5, 8], hidden 24, float32, identity, saves inputs only\n")

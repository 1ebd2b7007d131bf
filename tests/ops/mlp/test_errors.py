"""Each mistake a caller can make: one readable error that says what came and what is wanted."""

from __future__ import annotations

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
    "no tokens": ({"x": _zeros(2, 0, IN)}, ["x has shape (2, 0, 8)", "at least 1", "leave the call out"]),
    "no features": ({"x": _zeros(TOKENS, 0), "w_up": _zeros(0, HIDDEN)}, ["x has shape (5, 0)", "at least 1"]),
    "no outputs": ({"w_down": _zeros(HIDDEN, 0)}, ["w_down has shape (24, 0)", "at least 1"]),
    "activation": ({"activation": "softmax"}, ["activation='softmax' is unknown", "gelu_tanh", "swish"]),
    "activation as a function": ({"activation": jax.nn.relu}, ["activation=", "is unknown; take a name", "relu"]),
    "save": ({"save": "everything"}, ["save='everything'", "'pre_activation' or 'inputs'"]),
    "implementation": ({"implementation": "cublas"}, ["mlp: implementation 'cublas' is unknown", "xla, reference"]),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "jit"])
def test_one_readable_error(name, traced):
    replaced, pieces = BAD[name]
    arguments = GOOD | replaced
    static = tuple(key for key, value in arguments.items() if not hasattr(value, "shape"))
    call = jax.jit(fast_layers.mlp, static_argnames=static) if traced else fast_layers.mlp
    with pytest.raises(ValueError, match=r"\w") as raised:
        call(**arguments)
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
    ):
        with pytest.raises(ValueError, match=message):
            fast_layers.linear(**({"x": x, "w": w} | replaced))


@pytest.mark.parametrize("backend", [None, *(backend.name for backend in BACKENDS)])
def test_no_tokens_are_refused_before_any_backend_is_asked(backend):
    x, w, w_down = _zeros(2, 0, IN), GOOD["w_up"], GOOD["w_down"]
    for call in (fast_layers.linear, lambda x, w, **options: fast_layers.mlp(x, w, w_down, **options)):
        with pytest.raises(ValueError, match=r"x has shape \(2, 0, 8\): .* leave the call out for empty inputs"):
            call(x, w, implementation=backend)


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

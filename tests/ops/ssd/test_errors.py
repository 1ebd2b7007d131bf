"""Each mistake a caller can make: one readable error that says what came and what is wanted."""

from __future__ import annotations

import numpy as np
import pytest

import fast_layers

L, H, G, N = 5, 4, 2, 6
NB, NP = 2, 3


def _zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


GOOD = {
    "x": _zeros(NB, L, H, NP),
    "dt": _zeros(NB, L, H),
    "A": _zeros(H),
    "B": _zeros(NB, L, G, N),
    "C": _zeros(NB, L, G, N),
}

# name: (arguments to replace or add, pieces of the message in order)
BAD = {
    "integer x": ({"x": _zeros(NB, L, H, NP, dtype=np.int32)}, ["x has dtype int32", "floating point", "astype"]),
    "complex A": ({"A": _zeros(H, dtype=np.complex64)}, ["A has dtype complex64", "floating point"]),
    "mixed dtypes": ({"B": _zeros(NB, L, G, N, dtype=np.float16)}, ["same dtype", "x float32 and B float16", "cast"]),
    "mixed gate": ({"z": _zeros(NB, L, H, NP, dtype=np.float16)}, ["same dtype", "z float16"]),
    "rank of x": ({"x": _zeros(L, H, NP)}, ["[batch, length, heads, head_dim]", "(5, 4, 3)", "vmap"]),
    "rank of B": ({"B": _zeros(NB, L, N)}, ["B must be [batch, length, groups, state_dim]", "(2, 5, 6)"]),
    "length of B": ({"B": _zeros(NB, 4, G, N)}, ["B must be", "x (2, 5, 4, 3)", "got (2, 4, 2, 6)"]),
    "C unlike B": ({"C": _zeros(NB, L, G, 7)}, ["C must have shape", "(2, 5, 2, 6)", "got (2, 5, 2, 7)"]),
    "groups": (
        {"B": _zeros(NB, L, 3, N), "C": _zeros(NB, L, 3, N)},
        ["heads must be a multiple of groups", "4 and 3"],
    ),
    "dt": ({"dt": _zeros(NB, L)}, ["dt must have shape (batch, length, heads) = (2, 5, 4)", "got (2, 5)"]),
    "A": ({"A": _zeros(H, N)}, ["A must have shape (heads) = (4,)", "got (4, 6)"]),
    "D": ({"D": _zeros(NP)}, ["D must have shape (heads,) = (4,) or (heads, head_dim) = (4, 3)", "got (3,)"]),
    "z": ({"z": _zeros(NB, L, H, 1)}, ["z must have shape", "(2, 5, 4, 3)", "got (2, 5, 4, 1)"]),
    "dt_bias": ({"dt_bias": _zeros(1)}, ["dt_bias must have shape (heads) = (4,)", "got (1,)"]),
    "initial state": (
        {"initial_state": _zeros(NB, H, N, NP)},
        ["initial_state must have shape (batch, heads, head_dim, state_dim) = (2, 4, 3, 6)", "got (2, 4, 6, 3)"],
    ),
    "no tokens": ({k: v[:, :0] if v.ndim > 1 else v for k, v in GOOD.items()}, ["length is 0", "at least 1"]),
    "no heads": ({"x": _zeros(NB, L, 0, NP)}, ["heads is 0", "at least 1"]),
    "no state": ({"B": _zeros(NB, L, G, 0)}, ["state_dim is 0", "at least 1"]),
    "segments shape": ({"segment_ids": _zeros(NB, 4, dtype=int)}, ["(2, 5) or (length,)", "got (2, 4)"]),
    "segments dtype": ({"segment_ids": _zeros(NB, L)}, ["segment_ids must be integers", "float32"]),
    "segments of 64 bits": (
        {"segment_ids": np.array([0, 0, 2**32, 2**32, 2**32])},
        ["segment_ids must fit in int32", "4294967296", "np.unique(ids, return_inverse=True)"],
    ),
    "segments in a list": ({"segment_ids": [0, 0, 0, 0, 2**40]}, ["segment_ids must fit in int32", "1099511627776"]),
    "chunk of 0": ({"chunk_size": 0}, ["chunk_size=0", "int >= 1", "None"]),
    "chunk of float": ({"chunk_size": 64.0}, ["chunk_size=64.0", "int >= 1"]),
    "softplus": ({"dt_softplus": "yes"}, ["dt_softplus='yes'", "True or False"]),
    "final state": ({"return_final_state": 1}, ["return_final_state=1", "True or False"]),
    "limit": ({"dt_limit": 0.1}, ["dt_limit=0.1", "pair of numbers (low, high)"]),
    "limit order": ({"dt_limit": (0.1, 0.01)}, ["dt_limit=(0.1, 0.01)", "low <= high"]),
    "limit of NaN": ({"dt_limit": (0.0, float("nan"))}, ["dt_limit=(0.0, nan)", "low <= high"]),
    "backend": (
        {"implementation": "triton"},
        ["implementation 'triton' is unknown", "hopper, blackwell, xla, reference"],
    ),
}


@pytest.mark.parametrize(("bad", "pieces"), BAD.values(), ids=BAD)
def test_mistake(bad, pieces):
    with pytest.raises(ValueError, match=r"\w") as caught:
        fast_layers.ssd(**{**GOOD, **bad})
    message = str(caught.value)
    position = 0
    for piece in pieces:
        assert piece in message[position:], f"{piece!r} missing, or out of order, in {message!r}"
        position = message.index(piece, position)
    assert "\n" not in message


TOKEN = {"state": _zeros(NB, H, NP, N), **{name: v[:, 0] if name != "A" else v for name, v in GOOD.items()}}
BAD_STEPS = {
    "a sequence": ({"x": GOOD["x"]}, "ssd_step takes one token"),
    "state": ({"state": _zeros(NB, H, N, NP)}, "state must have shape (batch, heads, head_dim, state_dim)"),
    "integer state": ({"state": _zeros(NB, H, NP, N, dtype=np.int8)}, "state has dtype int8"),
    "B": ({"B": _zeros(NB, N)}, "B must be [batch, groups, state_dim]"),
    "limit": ({"dt_limit": (1, 0)}, "dt_limit=(1, 0)"),
    "softplus": ({"dt_softplus": None}, "dt_softplus=None"),
}


@pytest.mark.parametrize(("bad", "piece"), BAD_STEPS.values(), ids=BAD_STEPS)
def test_mistake_in_a_step(bad, piece):
    with pytest.raises(ValueError, match=r"\w") as caught:
        fast_layers.ssd_step(**{**TOKEN, **bad})
    assert piece in str(caught.value)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_good_arguments_pass(dtype):
    """The tables start from calls that work."""
    out = fast_layers.ssd(**{name: v.astype(dtype) for name, v in GOOD.items()})
    assert (out.shape, out.dtype) == ((NB, L, H, NP), dtype)
    out, _ = fast_layers.ssd_step(**{name: v.astype(dtype) for name, v in TOKEN.items()})
    assert (out.shape, out.dtype) == ((NB, H, NP), dtype)

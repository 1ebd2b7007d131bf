"""Each mistake a caller can make: one readable error that says what came and what is wanted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fast_layers
from fast_layers import masks

B, T, S, N, K, H = 2, 5, 7, 4, 2, 8


def _zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


GOOD = {"query": _zeros(B, T, N, H), "key": _zeros(B, S, K, H), "value": _zeros(B, S, K, 3)}

# name: (arguments to replace or add, pieces of the message in order)
BAD = {
    "integer query": (
        {"query": _zeros(B, T, N, H, dtype=np.int32)},
        ["query has dtype int32", "floating", "astype"],
    ),
    "boolean value": ({"value": _zeros(B, S, K, 3, dtype=bool)}, ["value has dtype bool", "floating point"]),
    "complex key": (
        {"key": _zeros(B, S, K, H, dtype=np.complex64)},
        ["key has dtype complex64", "floating point"],
    ),
    "mixed dtypes": (
        {"key": _zeros(B, S, K, H, dtype=np.float16)},
        ["same dtype", "float32, float16 and float32"],
    ),
    "ranks": ({"query": _zeros(T, N, H)}, ["same rank", "query (5, 4, 8)", "key (2, 7, 2, 8)"]),
    "too few dims": (
        {"query": _zeros(T, H), "key": _zeros(S, H), "value": _zeros(S, H)},
        ["[batch.., length, heads, depth]", "query (5, 8)"],
    ),
    "batch of key": ({"key": _zeros(3, S, K, H)}, ["batch dims must match", "key has (3,)", "query (2,)"]),
    "batch of value": (
        {"value": _zeros(1, S, K, 3)},
        ["batch dims must match", "value has (1,)", "query (2,)"],
    ),
    "lengths of key and value": (
        {"value": _zeros(B, 6, K, 3)},
        ["key and value lengths must match", "7 and 6"],
    ),
    "heads of key and value": ({"value": _zeros(B, S, 4, 3)}, ["key and value heads must match", "2 and 4"]),
    "depths": ({"key": _zeros(B, S, K, 9)}, ["query and key depths must match", "8 and 9"]),
    "group": (
        {"key": _zeros(B, S, 3, H), "value": _zeros(B, S, 3, 3)},
        ["query heads must be a multiple of key heads", "4 and 3"],
    ),
    "more key heads": (
        {"key": _zeros(B, S, 8, H), "value": _zeros(B, S, 8, 3)},
        ["query heads must be a multiple of key heads", "4 and 8"],
    ),
    "no queries": ({"query": _zeros(B, 0, N, H)}, ["query length is 0", "at least 1"]),
    "no keys": ({"key": _zeros(B, 0, K, H), "value": _zeros(B, 0, K, 3)}, ["key length is 0", "at least 1"]),
    "no heads": ({"query": _zeros(B, T, 0, H)}, ["query heads is 0", "at least 1"]),
    "no key heads": (
        {"key": _zeros(B, S, 0, H), "value": _zeros(B, S, 0, 3)},
        ["key heads is 0", "at least 1"],
    ),
    "no depth": ({"query": _zeros(B, T, N, 0), "key": _zeros(B, S, K, 0)}, ["query and key depth is 0"]),
    "no value depth": ({"value": _zeros(B, S, K, 0)}, ["value depth is 0", "at least 1"]),
    "integer bias": (
        {"bias": _zeros(B, N, T, S, dtype=np.int32)},
        ["bias has dtype int32", "floating point"],
    ),
    "bias keys": ({"bias": _zeros(B, N, T, 6)}, ["bias has shape (2, 4, 5, 6)", "[2, num_heads, 5, 7]"]),
    "bias queries": ({"bias": _zeros(B, N, 4, S)}, ["bias has shape (2, 4, 4, 7)", "[2, num_heads, 5, 7]"]),
    "bias batch": ({"bias": _zeros(3, N, T, S)}, ["bias has shape (3, 4, 5, 7)", "[2, num_heads, 5, 7]"]),
    "bias heads": ({"bias": _zeros(B, 2, T, S)}, ["bias must have 1 or num_heads = 4", "got 2"]),
    "bias rank": (
        {"bias": _zeros(1, B, N, T, S)},
        ["bias has shape (1, 2, 4, 5, 7)", "[2, num_heads, 5, 7]"],
    ),
    "bias of low rank": ({"bias": _zeros(4, 7)}, ["bias has shape (4, 7)", "[2, num_heads, 5, 7]"]),
    "bias of one dim": ({"bias": _zeros(4)}, ["bias has shape (4,)", "[2, num_heads, 5, 7]"]),
    "integer mask": (
        {"mask": _zeros(B, N, T, S, dtype=np.int32)},
        ["mask has dtype int32", "bool", "astype(bool)"],
    ),
    "float mask": ({"mask": _zeros(B, N, T, S)}, ["mask has dtype float32", "bool", "bias="]),
    "mask shape": (
        {"mask": _zeros(B, N, S, T, dtype=bool)},
        ["mask has shape (2, 4, 7, 5)", "[2, num_heads, 5, 7]"],
    ),
    "mask heads": ({"mask": _zeros(B, 3, T, S, dtype=bool)}, ["mask must have 1 or num_heads = 4", "got 3"]),
    "mask of an example": (
        {"mask": masks.Segments(_zeros(B, 6, dtype=int))},
        ["of the queries", "(2, 5)", "(2, 6)"],
    ),
    "sinks shape": ({"sinks": _zeros(3)}, ["sinks must have shape (num_heads,) = (4,)", "got (3,)"]),
    "sinks of key heads": ({"sinks": _zeros(K)}, ["sinks must have shape (num_heads,) = (4,)", "got (2,)"]),
    "integer sinks": ({"sinks": _zeros(N, dtype=np.int32)}, ["sinks has dtype int32", "floating point"]),
    "query lengths shape": (
        {"query_seq_lengths": np.array([1])},
        ["query lengths must have shape (2,)", "got (1,)"],
    ),
    "key lengths shape": (
        {"key_value_seq_lengths": np.zeros((2, 1), int)},
        ["key lengths must have", "got (2, 1)"],
    ),
    "key lengths dtype": ({"key_value_seq_lengths": _zeros(B)}, ["key lengths must be integers", "float32"]),
    "window": ({"local_window_size": "3"}, ["local_window_size='3'", "an int or a pair"]),
    "window of three": (
        {"local_window_size": (1, 2, 3)},
        ["local_window_size=(1, 2, 3)", "an int or a pair"],
    ),
    "window of floats": ({"local_window_size": (1.0, 2)}, ["left=1.0", "must be an int >= 0"]),
    "negative window": ({"local_window_size": (0, -2)}, ["right=-2", "must be an int >= 0"]),
    "negative int window": ({"local_window_size": -1}, ["-1", "must be an int >= 0"]),
    "segments of queries for keys": (
        {"segment_ids": np.zeros((B, T), int)},
        ["of the keys", "(2, 7)", "got (2, 5)"],
    ),
    "segments of three": ({"segment_ids": (np.zeros(T, int),) * 3}, ["a pair (queries, keys)", "got 3"]),
    "segments of text": ({"segment_ids": "x"}, ["segment_ids of the queries is 'x'", "must be integers"]),
    "segments one by one": (
        {"segment_ids": (0,) * T},
        ["a pair (queries, keys)", "got 5 entries in a tuple", "one array"],
    ),
    "segments of unequal lists": (
        {"segment_ids": [[0] * T, [0]]},
        ["segment_ids of the queries is a list of unequal lists", "must be integers"],
    ),
    "segments of floats": ({"segment_ids": (_zeros(B, T), _zeros(B, S))}, ["must be integers", "float32"]),
    "offset": ({"q_offset": "bottom_left", "is_causal": True}, ["q_offset='bottom_left'", "'bottom_right'"]),
    "offset without a mask": ({"q_offset": "bottom_left"}, ["q_offset='bottom_left'", "'bottom_right'"]),
    "offset dtype": ({"q_offset": 0.5, "is_causal": True}, ["q_offset must be integers", "float"]),
    "offset dtype without a mask": ({"q_offset": 0.5}, ["q_offset must be integers", "float"]),
    "offset shape": (
        {"q_offset": np.zeros(3, int), "is_causal": True},
        ["q_offset must have shape (2,)", "(3,)"],
    ),
    "softcap zero": ({"softcap": 0.0}, ["softcap=0.0", "finite number > 0", "None for no cap"]),
    "softcap negative": ({"softcap": -1}, ["softcap=-1", "finite number > 0"]),
    "softcap infinite": ({"softcap": float("inf")}, ["softcap=inf", "finite number > 0"]),
    "softcap nan": ({"softcap": float("nan")}, ["softcap=nan", "finite number > 0"]),
    "scale": ({"scale": "big"}, ["scale", "'big'", "number"]),
    "scale of an array": ({"scale": np.ones(3)}, ["scale must be a number"]),
    "softcap beyond float32": ({"softcap": 1e300}, ["softcap=1e+300", "finite number > 0", "2**127"]),
    "softcap below float32": ({"softcap": 1e-300}, ["softcap=1e-300", "finite number > 0", "2**-126"]),
    "scale nan": ({"scale": float("nan")}, ["scale=nan", "finite number", "scale query instead"]),
    "scale infinite": ({"scale": float("-inf")}, ["scale=-inf", "finite number"]),
    "scale beyond any float": ({"scale": 10**400}, ["scale=1", "finite number"]),
    "scale below float32": ({"scale": 1e-300}, ["scale=1e-300", "2**-126"]),
    "scale of text": ({"scale": "0.5"}, ["scale must be a number", "'0.5'"]),
    "scale of a bool": ({"scale": True}, ["scale must be a number", "True"]),
    "scale of an array of bool": ({"scale": np.array(True)}, ["scale must be a number"]),
    "scale complex": ({"scale": np.complex64(1)}, ["scale must be a number"]),
    "precision": ({"precision": "foo"}, ["precision='foo'", "jax.lax.dot_general", "'highest'"]),
    "precision of a pair": ({"precision": ["high", "foo"]}, ["precision=('high', 'foo')", "a pair"]),
    "precision of a dict": ({"precision": {"a": 1}}, ["precision={'a': 1}", "jax.lax.dot_general"]),
    "no query": ({"query": None}, ["query is None", "must be an array"]),
    "base of masks": (
        {"mask": masks.Mask()},
        ["Mask does not say what a query may see", "take one of", "Causal", "Dense", "Segments"],
    ),
    "mask of text": ({"mask": "causal"}, ["mask is 'causal'", "boolean array", "masks.Mask"]),
    "class of a mask": ({"mask": masks.Causal}, ["mask=Causal is a class", "masks.Causal()"]),
    "list of masks": ({"mask": [masks.Causal(), masks.LocalWindow(1)]}, ["mask is a list of masks", "join them by &"]),
    "causal of text": ({"is_causal": "no"}, ["is_causal='no'", "True or False"]),
    "residual of text": ({"return_residual": "x"}, ["return_residual='x'", "True or False"]),
    "broadcast of text": ({"broadcast_dropout": "x"}, ["broadcast_dropout='x'", "True or False"]),
    "dropout by a number": (
        {"dropout_rate": 0.5, "dropout_rng": 3},
        ["dropout_rng=3", "one PRNG key", "random.key(0)"],
    ),
    "dropout by two keys": (
        {"dropout_rate": 0.5, "dropout_rng": jax.random.split(jax.random.key(0))},
        ["dropout_rng=key<", "[2]", "one PRNG key", "give one"],
    ),
    "dropout by Rngs": (
        {"dropout_rate": 0.5, "dropout_rng": nnx.Rngs(0)},
        ["dropout_rng is a Rngs", "one PRNG key", "rngs.dropout()"],
    ),
    "dropout by a stream": (
        {"dropout_rate": 0.5, "dropout_rng": nnx.Rngs(0).dropout},
        ["dropout_rng is a RngStream", "one PRNG key", "call it", "rngs.dropout()"],
    ),
    "dropout by floats": (
        {"dropout_rate": 0.5, "dropout_rng": _zeros(3)},
        ["dropout_rng=float32[3]", "one PRNG key"],
    ),
    "ids of 64 bits": (
        {"segment_ids": (np.zeros(T, int), np.array([0, 2**32, 0, 0, 0, 0, 0]))},
        ["segment_ids of the keys must fit in int32", "4294967296", "np.unique(ids, return_inverse=True)"],
    ),
    "listed ids of 70 bits": (
        {"segment_ids": ([-(2**70)] * T, [0] * S)},
        ["segment_ids of the queries must fit in int32", "got -1180591620717411303424", "np.unique"],
    ),
    "unsigned ids": (
        {"segment_ids": (jnp.zeros(T, jnp.uint32), np.zeros(S, int))},
        ["segment_ids of the queries have dtype uint32", "astype(jnp.int32)", "np.unique"],
    ),
    "key length of 64 bits": (
        {"key_value_seq_lengths": np.array([3, 2**32 + 2])},
        ["key lengths must fit in int32", "got 4294967298"],
    ),
    "offset of 64 bits": (
        {"q_offset": np.array([0, -(2**32)]), "is_causal": True},
        ["q_offset must fit in int32", "got -4294967296"],
    ),
    "no backend": ({"implementation": ""}, ["implementation '' is unknown", "xla, reference"]),
    "dropout rate of one": ({"dropout_rate": 1.0}, ["dropout_rate=1.0", "[0, 1)"]),
    "negative dropout rate": ({"dropout_rate": -0.1}, ["dropout_rate=-0.1", "[0, 1)"]),
    "dropout rate of NaN": ({"dropout_rate": float("nan")}, ["dropout_rate=nan", "[0, 1)"]),
    "dropout without a key": (
        {"dropout_rate": 0.5},
        ["dropout_rng is required", "dropout_rate=0.5", "jax.random.key(0)"],
    ),
    "backend": ({"implementation": "flash"}, ["implementation 'flash' is unknown", "xla, reference"]),
}


@pytest.mark.parametrize(("bad", "pieces"), BAD.values(), ids=BAD)
def test_mistake(bad, pieces):
    with pytest.raises(ValueError, match=r"\w") as caught:
        fast_layers.dot_product_attention(**{**GOOD, **bad})
    message = str(caught.value)
    position = 0
    for piece in pieces:
        assert piece in message[position:], f"{piece!r} missing, or out of order, in {message!r}"
        position = message.index(piece, position)
    assert "\n" not in message


def test_traced_numbers():
    with pytest.raises(ValueError, match=r"scale must be a number known when tracing, .* scale query instead"):
        jax.jit(lambda scale: fast_layers.dot_product_attention(**GOOD, scale=scale))(0.5)
    with pytest.raises(ValueError, match=r"dropout_rate=.*must be a number in \[0, 1\)"):
        jax.jit(
            lambda rate: fast_layers.dot_product_attention(**GOOD, dropout_rate=rate, dropout_rng=jax.random.key(0))
        )(0.5)
    with pytest.raises(ValueError, match=r"softcap=.*must be a finite number > 0"):
        jax.jit(lambda cap: fast_layers.dot_product_attention(**GOOD, softcap=cap))(0.5)
    with pytest.raises(ValueError, match=r"is_causal=.*must be True or False, known when tracing"):
        jax.jit(lambda causal: fast_layers.dot_product_attention(**GOOD, is_causal=causal))(True)


@pytest.mark.parametrize(
    "options",
    [
        {"scale": np.float32(0.5)},
        {"scale": jnp.float32(0.5)},
        {"is_causal": np.bool_(True)},
        {"precision": ["high", "highest"]},
        {"softcap": np.float32(2)},
        {"dropout_rate": np.float32(0.5), "dropout_rng": jax.random.key(0)},
        {"local_window_size": np.int64(3)},
        {"local_window_size": (np.int32(3), None)},
        {"is_causal": True, "q_offset": np.int64(3)},
    ],
    ids="-".join,
)
def test_numpy_numbers_are_numbers(options):
    """What configs hold: numpy scalars of any precision are as good as Python's."""
    fast_layers.dot_product_attention(**GOOD, **options)


IDS = np.array([[0, 0, 1, 1, 1], [0, 1, 1, 2, -1]])


@pytest.mark.parametrize(
    "given",
    [
        IDS.tolist(),
        [list(row) for row in IDS],
        [[jnp.int32(i) for i in row] for row in IDS],
        (IDS, IDS),
        [IDS, IDS],
        [IDS, jnp.asarray(IDS)],
        (IDS.tolist(), IDS.tolist()),
        [IDS],
    ],
    ids=["nested", "of numpy's", "of jax's", "tuple", "list of arrays", "list of both", "tuple of lists", "alone"],
)
def test_segment_ids_in_all_forms(given):
    """A nested list is one array, also of two rows; a pair is a tuple or a list of arrays."""
    q = np.random.default_rng(0).normal(size=(B, T, K, H)).astype(np.float32)
    want = fast_layers.dot_product_attention(q, q, q, segment_ids=IDS)
    np.testing.assert_array_equal(fast_layers.dot_product_attention(q, q, q, segment_ids=given), want)


def test_listed_segment_ids_for_all_examples():
    q = np.random.default_rng(0).normal(size=(B, T, K, H)).astype(np.float32)
    want = fast_layers.dot_product_attention(q, q, q, segment_ids=IDS[0])
    np.testing.assert_array_equal(fast_layers.dot_product_attention(q, q, q, segment_ids=IDS[0].tolist()), want)


@pytest.mark.parametrize("option", [{"implementation": "xla"}, {"return_residual": True}], ids="-".join)
def test_weights_are_by_the_reference_alone(option):
    (name,) = option
    with pytest.raises(ValueError, match=rf"^{name}=.*attention_weights is always .* leave {name} out"):
        fast_layers.attention_weights(**GOOD, **option)


@pytest.mark.parametrize("fn", [fast_layers.dot_product_attention, fast_layers.attention_weights])
def test_unknown_argument(fn):
    with pytest.raises(TypeError, match=rf"^{fn.__name__}\(\) got .* 'is_casual'"):
        fn(**GOOD, is_casual=True)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_good_arguments_pass(dtype):
    """The table starts from a call that works."""
    out = fast_layers.dot_product_attention(**{name: x.astype(dtype) for name, x in GOOD.items()})
    assert out.shape == (B, T, N, 3)
    assert out.dtype == dtype

"""What is no array at all is refused by every op with its name, as is what is not floating point."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import fast_layers

FIRST_TWO = {
    fast_layers.dot_product_attention: ("query", "key", 3),
    fast_layers.mlp: ("x", "w_up", 3),
    fast_layers.linear: ("x", "w", 2),
    fast_layers.ssd: ("x", "dt", 5),
    fast_layers.ssd_step: ("state", "x", 6),
    fast_layers.selective_scan: ("x", "dt", 5),
    fast_layers.selective_scan_step: ("state", "x", 6),
    fast_layers.causal_conv1d: ("x", "w", 2),
    fast_layers.causal_conv1d_step: ("state", "x", 3),
    fast_layers.gated_rms_norm: ("y", "z", 3),
}
ONES = np.ones((1, 4, 2, 8), np.float32)


@pytest.mark.parametrize("wrong", ["text", None, object(), ONES.astype(int)], ids=["str", "None", "object", "int"])
@pytest.mark.parametrize("op", FIRST_TWO, ids=lambda op: op.__name__)
def test_what_is_no_floating_array_is_named(op, wrong):
    first, second, count = FIRST_TWO[op]
    with pytest.raises(ValueError, match=rf"^({first}|{second}) (is|has dtype) .*: must be"):
        op(*[wrong] * count)


@pytest.mark.parametrize(
    "call",
    [
        lambda: fast_layers.ssd(ONES, ONES[..., 0], ONES[0, 0, :, 0], ONES, ONES, segment_ids="text"),
        lambda: fast_layers.causal_conv1d(ONES[0], np.ones((4, 8), np.float32), segment_ids="text"),
        lambda: fast_layers.dot_product_attention(ONES, ONES, ONES, segment_ids="text"),
    ],
    ids=["ssd", "causal_conv1d", "attention"],
)
def test_ids_that_are_no_array_are_named(call):
    with pytest.raises(ValueError, match=r"segment_ids.* is 'text': must be integers"):
        call()


SMALL_IDS = [7, 7, 3, 3]
KINDS_OF_IDS = {
    "list": SMALL_IDS,
    "int8": np.array(SMALL_IDS, np.int8),
    "uint64": np.array(SMALL_IDS, np.uint64),
    "int64's ends of int32": np.array([-(2**31)] * 2 + [2**31 - 1] * 2),
    "uint32 of jax, its larger half": jnp.array([2**32 - 1] * 2 + [2**31] * 2, jnp.uint32),
}


@pytest.mark.parametrize("ids", KINDS_OF_IDS.values(), ids=KINDS_OF_IDS)
def test_ids_that_fit_are_documents_whatever_their_kind(ids):
    w = np.ones((4, 8), np.float32)
    of_ones = fast_layers.causal_conv1d(ONES[:, :, 0], w, segment_ids=ids)
    np.testing.assert_array_equal(of_ones[0, :, 0], [1, 2, 1, 2])
    decays = np.zeros_like(ONES[0, 0, :, 0])
    summed = fast_layers.ssd(ONES, ONES[..., 0], decays, ONES, ONES, segment_ids=ids)
    np.testing.assert_array_equal(summed[0, :, 0, 0], [8, 16, 8, 16])

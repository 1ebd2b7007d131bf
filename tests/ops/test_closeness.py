"""The tolerance rule must be able to say no."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_bitwise_equal, assert_close, assert_close_over_draws, assert_trees_close, ulp

ORACLE = np.linspace(-1.0, 1.0, 33)
YARDSTICK_ERROR = 1e-4


def _off_by(error: float, dtype=np.float32):
    array = ORACLE.copy()
    array[5] += error
    return array.astype(dtype)


def test_takes_what_is_as_good_as_the_yardstick():
    assert_close(_off_by(1.9 * YARDSTICK_ERROR), ORACLE, _off_by(YARDSTICK_ERROR))


@pytest.mark.parametrize("error", [3 * YARDSTICK_ERROR, -3 * YARDSTICK_ERROR])
def test_rejects_three_times_the_yardsticks_error(error):
    with pytest.raises(AssertionError, match=r"grad of key: max error 0\.0003 exceeds 0\.0002.*worst at \(5,\)"):
        assert_close(_off_by(error), ORACLE, _off_by(YARDSTICK_ERROR), name="grad of key")


def test_the_worst_of_several_yardsticks_counts():
    good = ORACLE.astype(np.float32)
    assert_close(_off_by(1.9 * YARDSTICK_ERROR), ORACLE, good, _off_by(YARDSTICK_ERROR), good)
    with pytest.raises(AssertionError, match="max error"):
        assert_close(_off_by(3 * YARDSTICK_ERROR), ORACLE, good, _off_by(YARDSTICK_ERROR), good)


def test_one_ulp_is_free_and_two_are_not():
    oracle = np.full(4, 1.5)
    exact = oracle.astype(np.float32)
    assert_close(np.nextafter(exact, np.float32(2)), oracle, exact)
    with pytest.raises(AssertionError, match="1 ulp"):
        assert_close(exact + np.float32(2 * ulp(1.5, np.float32)), oracle, exact)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64])
@pytest.mark.parametrize("magnitude", [1.0, 1.99, 3.0, 1000.0, 1e-3])
def test_ulp_is_the_distance_to_the_next_number(dtype, magnitude):
    number = np.asarray(magnitude, dtype)
    bits = number.view(f"uint{8 * number.itemsize}")
    following = (bits + bits.dtype.type(1)).view(number.dtype)
    assert ulp(float(number), dtype) == float(following.astype(np.float64) - number.astype(np.float64))


@pytest.mark.parametrize("strange", [np.nan, np.inf, -np.inf])
def test_non_finite_places_must_match(strange):
    good = ORACLE.astype(np.float32)
    with pytest.raises(AssertionError, match="expected at 0"):
        assert_close(_off_by(strange), ORACLE, good)
    with pytest.raises(AssertionError, match="expected at 1"):
        assert_close(good, _off_by(strange, np.float64), _off_by(strange))
    assert_close(_off_by(strange), _off_by(strange, np.float64), _off_by(strange))


def test_infinities_of_the_wrong_sign_differ():
    with pytest.raises(AssertionError, match="inf"):
        assert_close(_off_by(np.inf), _off_by(-np.inf, np.float64), _off_by(-np.inf))


def test_a_wrong_yardstick_is_no_licence():
    with pytest.raises(AssertionError, match="it is wrong"):
        assert_close(_off_by(0.5), ORACLE, _off_by(0.5))


def test_shape_dtype_and_oracle_are_checked():
    good = ORACLE.astype(np.float32)
    with pytest.raises(AssertionError, match="shape"):
        assert_close(good[None], ORACLE, good)
    with pytest.raises(AssertionError, match="dtype"):
        assert_close(good.astype(np.float16), ORACLE, good)
    with pytest.raises(AssertionError, match="cannot judge"):
        assert_close(good, good, good)
    with pytest.raises(AssertionError, match="no yardstick"):
        assert_close(good, ORACLE)


def test_trees_name_the_leaf():
    oracle = {"a": ORACLE, "b": (ORACLE,)}
    good = {"a": ORACLE.astype(np.float32), "b": (ORACLE.astype(np.float32),)}
    assert_trees_close(good, oracle, good)
    with pytest.raises(AssertionError, match=r"case 3\['b'\]\[0\]: max error"):
        assert_trees_close({**good, "b": (_off_by(1.0),)}, oracle, good, name="case 3")
    with pytest.raises(AssertionError, match="structures"):
        assert_trees_close({"a": good["a"]}, oracle, good)


def test_bad_luck_goes_away_over_draws_and_a_systematic_error_stays():
    rng = np.random.default_rng(0)

    def make(factor):
        def draw(i):
            # The yardstick is lucky in the first draw.
            noise = rng.normal(size=(2, 8)) * 1e-4
            noise[1] *= 0.01 if i == 0 else 1
            good = np.ones(8, np.float64)
            return (good + factor * noise[0]).astype(np.float32), good, (good + noise[1]).astype(np.float32)

        return draw

    assert_close_over_draws(make(1), draws=1)
    with pytest.raises(AssertionError, match="max error"):
        assert_close_over_draws(make(4), draws=1)


def test_bitwise_equality_sees_one_bit_and_takes_nan():
    array = np.array([1.0, np.nan], np.float32)
    assert_bitwise_equal([array], [array.copy()])
    with pytest.raises(AssertionError):
        assert_bitwise_equal([np.nextafter(array, np.float32(2))], [array])

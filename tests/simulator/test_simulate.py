"""The simulator computes what numpy does, finds nothing wrong with healthy kernels, and every planted fault."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fast_layers.testing import Simulation, SimulationError, simulate
from fast_layers.testing.simulator import simulated
from simulator import kernels

pytestmark = pytest.mark.simulator

STEPS = 3 * kernels.SLOTS  # every ring goes round three times


def numbers(*shape: int, seed: int = 0, dtype=jnp.bfloat16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def as_float(*arrays) -> list[np.ndarray]:
    return [np.asarray(x, np.float32) for x in arrays]


def run_matmul(fault=None, **options) -> tuple[Simulation, np.ndarray]:
    a, b = numbers(128, STEPS * 64), numbers(STEPS * 64, 64, seed=1)
    wanted = np.matmul(*as_float(a, b))
    return simulate(lambda a, b: kernels.matmul(a, b, fault=fault), a, b, **options), wanted


def run_discounted_sum(fault=None, form="stored") -> tuple[Simulation, np.ndarray]:
    a, b = numbers(64, STEPS * 64), numbers(STEPS * 64, 64, seed=1)
    wanted = np.zeros((64, 64), np.float32)
    for step in range(STEPS):
        k = slice(step * 64, (step + 1) * 64)
        wanted = wanted / 2 + np.matmul(*as_float(a[:, k], b[k]))
    return simulate(lambda a, b: kernels.discounted_sum(a, b, form=form, fault=fault), a, b), wanted


def run_add_rows(fault=None) -> tuple[Simulation, np.ndarray]:
    x = numbers(4, 8, 128, dtype=jnp.float32)
    return simulate(lambda x: kernels.add_rows(x, fault=fault), x), np.asarray(x)[::2].sum(0)


def run_running_sum(fault=None, twice=False, **options) -> tuple[Simulation, np.ndarray]:
    x = numbers(4, 8, 128, dtype=jnp.float32)

    def call(x):
        sums = kernels.running_sum(x, fault=fault, **options)
        return kernels.running_sum(sums, fault=fault, **options) if twice else sums

    wanted = np.cumsum(np.asarray(x), 0)
    return simulate(call, x, timeout=5.0 if fault else 60.0), np.cumsum(wanted, 0) if twice else wanted


def run_multicast(fault=None) -> tuple[Simulation, np.ndarray]:
    x = numbers(STEPS * 16, 128, dtype=jnp.float32)
    return simulate(lambda x: kernels.multicast(x, fault=fault), x), np.stack([x, 2 * x])


def run_two_block_matmul(fault=None) -> tuple[Simulation, np.ndarray]:
    a, b = numbers(256, STEPS * 64), numbers(STEPS * 64, 128, seed=1)
    wanted = np.matmul(*as_float(a, b))
    return simulate(lambda a, b: kernels.two_block_matmul(a, b, fault=fault), a, b), wanted


HEALTHY = {
    "matmul": run_matmul,
    "accumulator stored": run_discounted_sum,
    "accumulator carried": lambda: run_discounted_sum(form="carried"),
    "reduction": run_add_rows,
    "semaphores": run_running_sum,
    "semaphores, used up": lambda: run_running_sum(decrement=True),
    "semaphores, zero in each kernel": lambda: run_running_sum(twice=True),
    "multicast": run_multicast,
    "two blocks": run_two_block_matmul,
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_kernel(name):
    sim, wanted = HEALTHY[name]()
    out = np.asarray(sim.check(), np.float32)
    np.testing.assert_allclose(out, wanted, rtol=1e-2, atol=1e-2)
    assert sim.report() == "No fault was found."


# A race is two accesses that nothing orders, whichever comes first in this run; the last column is in its text.
RACES = [
    (run_matmul, "slot not awaited", "write of SMEM"),
    (run_matmul, "load awaited late", "read of SMEM"),
    (run_matmul, "slot freed in flight", "read of SMEM"),
    (run_matmul, "accumulator read in flight", "accumulator read"),
    (run_matmul, "store not committed", "write of SMEM"),
    (run_matmul, "wrong slot", "read of SMEM"),
    (run_discounted_sum, "accumulator stored in flight", "accumulator written"),
    (run_discounted_sum, "slot refilled in flight", "read of SMEM"),
    (run_add_rows, "zeros not awaited", "write of GMEM"),
    (run_add_rows, "plain store", "write of GMEM"),
    (run_running_sum, "not awaited", "of GMEM"),
    (run_running_sum, "told of in flight", "of GMEM"),
    (run_multicast, "only own block awaited", "write of SMEM"),
    (run_two_block_matmul, "slot not awaited", "write of SMEM"),
    (run_two_block_matmul, "load awaited late", "read of SMEM"),
    (run_two_block_matmul, "matmul not awaited", "TMEM"),
]


@pytest.mark.parametrize(("run", "fault", "access"), RACES, ids=lambda x: getattr(x, "__name__", x))
def test_planted_race_is_found(run, fault, access):
    sim, _ = run(fault)
    assert sim.races_found
    assert sim.faulty
    assert any(access in race and "kernels.py" in race for race in sim.races), sim.races
    with pytest.raises(SimulationError, match="nothing orders"):
        sim.check()


def test_races_do_not_hide_the_result():
    sim, wanted = run_matmul("slot freed in flight")
    np.testing.assert_allclose(sim.outputs, wanted, rtol=1e-4, atol=1e-4)


def test_calls_that_share_a_program_have_findings_of_their_own():
    traced = []

    def matmul(a, b):
        traced.append(a)
        return kernels.matmul(a, b, fault="slot freed in flight")

    run = simulated(matmul)
    a, b = numbers(128, STEPS * 64), numbers(STEPS * 64, 64, seed=1)
    once, twice = run(a, b), run(2 * a, b)
    assert len(traced) == 1
    for sim, factor in ((once, 1), (twice, 2)):
        assert sim.races_found
        np.testing.assert_allclose(sim.outputs, factor * np.matmul(*as_float(a, b)), rtol=1e-4, atol=1e-4)


def test_store_in_flight_at_the_end():
    sim, _ = run_matmul("store not awaited")
    assert "Not all copy_smem_to_gmem" in (sim.failure or "")
    with pytest.raises(SimulationError, match="did not end"):
        _ = sim.outputs


def test_deadlock_ends_at_the_timeout_and_leaves_the_simulator_usable():
    sim, _ = run_matmul("slot never freed", timeout=2.0)
    assert "not done after 2 s" in (sim.failure or "")
    assert 2.0 <= sim.seconds < 30.0
    sim, wanted = run_matmul()
    np.testing.assert_allclose(sim.check(), wanted, rtol=1e-4, atol=1e-4)


def test_a_block_that_waits_for_a_later_one_does_not_end():
    sim, _ = run_running_sum("of a later block")
    assert "deadlock" in (sim.failure or "")


def test_without_race_detection():
    sim, wanted = run_matmul("slot freed in flight", detect_races=False)
    np.testing.assert_allclose(sim.check(), wanted, rtol=1e-4, atol=1e-4)


def test_errors_of_the_function_are_its_own():
    def refuses(x):
        raise ValueError(f"{x.shape=} is refused")

    with pytest.raises(ValueError, match="is refused"):
        simulate(refuses, numbers(8, 8))


def test_too_few_threads(monkeypatch):
    monkeypatch.setenv("NPROC", "2")
    with pytest.raises(ValueError, match="NPROC=32 in the environment before jax"):
        simulate(lambda x: x, numbers(8, 8))


def test_timeout_must_be_positive_and_a_time():
    for timeout in (0, "x", True, float("nan"), float("inf"), 1e12):
        with pytest.raises(ValueError, match=f"timeout={timeout!r}: must be a positive number"):
            simulate(lambda x: x, numbers(8, 8), timeout=timeout)


def test_numpys_numbers_are_timeouts():
    simulate(kernels.add_rows, numbers(4, 8, 128, dtype=jnp.float32), timeout=np.float32(60.0)).check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"detect_races": "no"}, "detect_races='no': must be True or False"),
        ({"sums_in_order": 1}, "sums_in_order=1: must be True or False"),
        ({"sums_in_order": True, "detect_races": False}, "such sums are found as races"),
    ],
    ids=str,
)
def test_options_that_would_not_be_honoured(options, message):
    with pytest.raises(ValueError, match=message):
        simulate(kernels.add_rows, numbers(4, 8, 128, dtype=jnp.float32), **options)


def test_a_result_in_place_of_the_function():
    with pytest.raises(ValueError, match=r"which cannot be called: .* not its result simulate\(f\(\*args\)\)"):
        simulate(numbers(8, 8))


def test_not_within_a_simulation_nor_a_trace():
    x = numbers(4, 8, 128, dtype=jnp.float32)

    def within(x):
        return simulate(kernels.add_rows, x).check()

    with pytest.raises(ValueError, match="simulated within a simulation: simulate one after the other"):
        simulate(within, x)
    with pytest.raises(ValueError, match="while JAX traces another function"):
        jax.jit(within)(x)
    within(x)


def test_an_error_while_a_function_runs_is_told():
    def fails(x):
        raise ZeroDivisionError("by nothing")

    def call(x):
        return jax.pure_callback(fails, jax.ShapeDtypeStruct((8, 128), jnp.float32), kernels.add_rows(x))

    sim = simulate(call, numbers(4, 8, 128, dtype=jnp.float32))
    assert "ZeroDivisionError: by nothing" in (sim.failure or "")


def test_where_no_kernel_ran_nothing_is_well():
    with pytest.raises(ValueError, match="ran no Mosaic-GPU kernel, so there was nothing to simulate"):
        simulate(lambda x: x + 1, numbers(8, 8))


@pytest.mark.parametrize(
    ("dtype", "sums_in_order", "told"),
    [(jnp.float32, True, True), (jnp.int32, True, False), (jnp.float32, False, False)],
    ids=["floats in order", "integers", "floats in any order"],
)
def test_sums_of_floats_in_no_fixed_order_are_told_if_asked_for(dtype, sums_in_order, told):
    x = jnp.arange(4 * 8 * 128).reshape(4, 8, 128).astype(dtype)
    sim = simulate(kernels.add_rows, x, sums_in_order=sums_in_order)
    assert any("write of GMEM" in race for race in sim.races) == told, sim.report()
    assert sim.failure is None
    np.testing.assert_array_equal(sim.outputs, x[0] + x[2])


@pytest.mark.parametrize(
    ("columns", "plain", "told"),
    [
        (64, False, None),
        (96, False, "starts 192 bytes into a buffer bfloat16[4, 96] in shared memory: the GPU wants a multiple of 128"),
        (96, True, None),
        (12, True, "a bulk copy of 24 bytes that starts 0 bytes into its array in the GPU's memory"),
    ],
)
def test_a_copy_to_where_the_gpu_takes_none_is_told(columns, plain, told):
    x = numbers(4, columns)
    sim = simulate(lambda x: kernels.copy_rows(x, plain=plain), x)
    if told is None:
        np.testing.assert_array_equal(*as_float(sim.check(), x))
    else:
        assert told in (sim.failure or ""), sim.report()


@pytest.mark.parametrize(
    ("rows", "columns", "told"), [(16, 128, False), (8, 64, False), (8, 128, False), (16, 64, True)]
)
def test_a_copy_of_what_does_not_lie_together_is_told(rows, columns, told):
    """JAX compiles none: the halves of 16 rows' first 64 columns have others of their rows between them."""
    x = numbers(16, 128)
    sim = simulate(lambda x: kernels.copy_part(x, rows=rows, columns=columns), x)
    if told:
        assert "its parts do not lie together there" in (sim.failure or ""), sim.report()
    else:
        np.testing.assert_array_equal(*as_float(sim.check(), x[:rows, :columns]))


@pytest.mark.parametrize(("rows", "columns", "told"), [(2, 96, False), (1, 128, False), (1, 96, True)])
def test_a_store_beyond_the_end_of_a_row_is_told(rows, columns, told):
    """Several rows are cut off by the tensor map. A row that is stored by itself has none."""
    x = numbers(4, 128)
    sim = simulate(lambda x: kernels.store_wide(x, columns, rows=rows), x)
    if told:
        assert "so that it goes on with what comes next" in (sim.failure or ""), sim.report()
    else:
        np.testing.assert_array_equal(*as_float(sim.check(), x[:, :columns]))

"""Settings of the whole test suite, made before anything imports jax."""

from __future__ import annotations

import gc
import itertools
import os
import pathlib

_DEVICES = "--xla_force_host_platform_device_count"

if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    # The sharding tests need several devices; the others see only the first one.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=8".strip()

# As many threads of XLA as `fast_layers.testing.simulate` needs; the other tests take as long as without.
os.environ.setdefault("NPROC", "32")

import hypothesis  # noqa: E402
import pytest  # noqa: E402
from selection import EXAMPLES_OF_CI  # noqa: E402

# Most objects are JAX's, and stay: to look through all of them again and again is 5 % of the time.
gc.set_threshold(50_000, 20, 50)

_COMMON = {
    "deadline": None,  # nearly all of an example's time is compilation
    "suppress_health_check": [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
    "database": None,
    "print_blob": True,
}
# "ci" draws the same examples in each run and reports the first that fails (to shrink it is minutes of compiling);
# "quick" is the same with fewer, "explore" draws others each time, more of them, and shrinks.
_AS_DRAWN = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
hypothesis.settings.register_profile("ci", derandomize=True, max_examples=EXAMPLES_OF_CI, phases=_AS_DRAWN, **_COMMON)
hypothesis.settings.register_profile("quick", derandomize=True, max_examples=3, phases=_AS_DRAWN, **_COMMON)
hypothesis.settings.register_profile("explore", max_examples=300, **_COMMON)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Each compiled XLA:CPU program holds some memory mappings, of which Linux grants a process 65,530.
_MOST_MAPPINGS = 30_000
_LOOK_EVERY = 20  # tests
_finished = itertools.count(1)


@pytest.fixture(autouse=True)
def _few_memory_mappings():
    yield
    maps = pathlib.Path("/proc/self/maps")
    if next(_finished) % _LOOK_EVERY or not maps.exists():
        return
    with maps.open("rb") as lines:
        mappings = sum(1 for _ in lines)
    if mappings > _MOST_MAPPINGS:
        import jax

        jax.clear_caches()

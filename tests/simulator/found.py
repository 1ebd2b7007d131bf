"""How a planted fault shows."""

from __future__ import annotations

from fast_layers.testing import Simulation


def tells(simulation: Simulation, text: str) -> bool:
    """Whether a planted fault was found, as `text` in a race or in what stopped the simulator.

    Or as a phase of a barrier that nobody waits for, or that has passed when the first wait comes, at which the
    simulator stops: by how its threads happen to run, that comes before the race which the missing wait leads to.
    """
    said = "\n".join([*simulation.races, simulation.failure or ""])
    return any(words in said for words in (text, "no threads observed phase", "but barrier is already at phase"))

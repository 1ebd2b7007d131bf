"""What functions have in common that a kernel has inline, in the compiler's own terms, for `plgpu.inline_mgpu`.

JAX's simulator of Mosaic GPU knows nothing of what they do, so each that gives or stores something has a stand-in for
it, `simulated`.
"""

from __future__ import annotations

from typing import Any

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

THREADS = 128
"""Of a warpgroup."""


def simulate_by(fn: Any, stand_in: Any) -> None:
    """What the simulator has `fn` do: of a reference's numbers, if it returns some, and of the arrays behind it."""
    fn.simulated = stand_in


def simulate_in_block(fn: Any, rank: int) -> None:
    """Has the simulator read the reference of another block of the cluster."""
    fn.simulated_block = rank


def thread() -> Any:
    """Of a warpgroup."""
    return arith.remui(utils.thread_idx(), utils.c(THREADS, ir.IntegerType.get_signless(32)))


def divided(x: Any, by: int) -> tuple[Any, Any]:
    factor = utils.c(by, x.type)
    return arith.divui(x, factor), arith.remui(x, factor)


def times(x: Any, factor: int) -> Any:
    return arith.muli(x, utils.c(factor, x.type))


def make_writes_seen() -> None:
    """Lets copies to shared memory that this warpgroup begins from now on see what semaphores have told it of.

    Copies are a proxy of memory of their own.
    """

    fence("fence.proxy.async.global;")


def fence(ptx: str) -> None:
    """In a kernel, of all threads. The simulator leaves it out."""

    def run(context):
        del context
        utils.inline_ptx(ptx, has_side_effects=True)

    call: Any = plgpu.inline_mgpu()(run)
    call()

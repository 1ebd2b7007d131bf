"""The Hopper matmul in the simulator: one launch against plain maths, as it is or with one thing changed."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from fast_layers.ops.mlp import hopper_matmul
from fast_layers.ops.mlp.config import HopperMatmulTiles
from fast_layers.ops.mlp.hopper_epilogue import Epilogue, Plain
from fast_layers.ops.mlp.hopper_matmul import Matmul, Operands, multiply
from fast_layers.testing import Simulation, simulate
from fast_layers.testing.closeness import assert_trees_close
from simulator.attention import StandIn

PLAIN = Plain()


@dataclasses.dataclass(frozen=True)
class Launch:
    """Sizes, epilogue and tiles of one launch; the arrays follow."""

    rows: int
    columns: int
    depth: int
    tiles: HopperMatmulTiles
    epilogue: Epilogue = PLAIN
    terms: int = 1
    a_turned: bool = False
    b_turned: bool = False
    dtype: Any = jnp.bfloat16

    @property
    def matmul(self) -> Matmul:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "tiles"}
        return Matmul(**{**fields, "dtype": jnp.dtype(self.dtype)})

    def operands(self) -> Operands:
        rng = np.random.default_rng(0)

        def normal(*shape, scale=1.0):
            return jnp.asarray(rng.normal(size=shape) * scale, self.dtype)

        def matrix(rows, columns, turned, scale=1.0):
            return normal(*((columns, rows) if turned else (rows, columns)), scale=scale)

        scale = self.depth**-0.5
        others = max(self.terms, self.epilogue.products)
        return Operands(
            tuple(matrix(self.rows, self.depth, self.a_turned) for _ in range(self.terms)),
            tuple(matrix(self.depth, self.columns, self.b_turned, scale) for _ in range(others)),
            tuple(normal(self.columns) if has else None for has in self.epilogue.biases),
            tuple(normal(self.rows, self.columns) for _ in range(self.epilogue.reads)),
        )

    def expected(self, operands: Operands, dtype: Any) -> tuple[list[jax.Array], list[jax.Array]]:
        """As `multiply`, with everything in `dtype` but what is summed up in float32 (or wider)."""
        wide = jnp.promote_types(dtype, jnp.float32)

        def product(a, b):
            a, b = a.T if self.a_turned else a, b.T if self.b_turned else b
            return jnp.matmul(a.astype(wide), b.astype(wide), precision="highest")

        if self.terms > 1:
            # A plain implementation rounds each term.
            terms = [product(*pair).astype(dtype) for pair in zip(operands.a, operands.b, strict=True)]
            products = [sum(terms[1:], terms[0])]
        else:
            products = [product(operands.a[0], b) for b in operands.b]
        biases = [None if b is None else b.astype(wide) for b in operands.biases]
        products = [x.astype(dtype).astype(wide) for x in products]
        written = list(self.epilogue(dtype, products, biases, [x.astype(dtype) for x in operands.read]))
        return written, [written[i].astype(wide).sum(0) for i in self.epilogue.sums]


def run(launch: Launch, timeout: float = 60.0) -> Simulation:
    return simulate(
        lambda operands: multiply(launch.matmul, operands, launch.tiles), launch.operands(), timeout=timeout
    )


def check(launch: Launch) -> None:
    """No race, and what comes out is right."""
    operands = launch.operands()

    def rounded(results):
        written, sums = results
        return written, [x.astype(launch.dtype) for x in sums]

    plain = rounded(launch.expected(operands, launch.dtype))
    assert_trees_close(rounded(run(launch).check()), launch.expected(operands, jnp.float32), plain)


@contextlib.contextmanager
def changed(stand_in: StandIn, *patches: tuple[str, Any]) -> Iterator[StandIn]:
    """The kernel traced anew, with a stand-in for `plgpu` and other things of its module replaced."""
    jitted: Any = hopper_matmul._launch
    with pytest.MonkeyPatch.context() as patch:
        # Without its jit, which would give back what was traced before.
        patch.setattr(hopper_matmul, "_launch", jitted.__wrapped__)
        patch.setattr(hopper_matmul, "_Scratch", stand_in.recording(hopper_matmul._Scratch))
        patch.setattr(hopper_matmul, "plgpu", stand_in)
        for name, value in patches:
            patch.setattr(hopper_matmul, name, value)
        yield stand_in


class Slip(StandIn):
    """Two mistakes that are no omission."""

    def __init__(self, *, one_slot: str | None = None, alone: bool = False):
        super().__init__()
        self.one_slot, self.alone = one_slot, alone

    def copy_gmem_to_smem(self, source: Any, to: Any, barrier: Any, **options: Any) -> None:
        """Fills always the same of the slots of that name."""
        if self.one_slot is not None and self._name(to) == self.one_slot:
            self.hits += 1
            to = self.scratch[self.one_slot].at[0]
        plgpu.copy_gmem_to_smem(source, to, barrier, **options)

    def __getattr__(self, name: str) -> Any:
        if name == "ClusterBarrier" and self.alone:
            self.hits += 1
            return lambda *, collective_axes, **options: plgpu.Barrier(**options)
        return super().__getattr__(name)

"""The matmul kernels in the simulator: one launch against plain maths, as it is or with one thing changed."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from ops.mlp import cases

from fast_layers.ops.mlp import blackwell_matmul, hopper_few_rows, hopper_matmul, reference, ring, xla
from fast_layers.ops.mlp.blackwell_config import BlackwellMatmulTiles
from fast_layers.ops.mlp.config import HopperFewRowsTiles, HopperMatmulTiles
from fast_layers.ops.mlp.epilogue import Epilogue, Plain
from fast_layers.ops.mlp.float8 import FORMATS, Float8
from fast_layers.ops.mlp.matmul import Matmul, Operands
from fast_layers.ops.mlp.problem import Inputs, Problem, Residuals
from fast_layers.testing import Simulation, simulate
from fast_layers.testing.closeness import assert_trees_close
from simulator.attention import StandIn

PLAIN = Plain()
KERNELS = {
    HopperMatmulTiles: hopper_matmul,
    HopperFewRowsTiles: hopper_few_rows,
    BlackwellMatmulTiles: blackwell_matmul,
}


@dataclasses.dataclass(frozen=True)
class Launch:
    """Sizes, epilogue and tiles of one launch; the arrays follow."""

    rows: int
    columns: int
    depth: int
    tiles: HopperMatmulTiles | HopperFewRowsTiles | BlackwellMatmulTiles
    epilogue: Epilogue = PLAIN
    terms: int = 1
    a_turned: bool = False
    b_turned: bool = False
    dtype: Any = jnp.bfloat16
    float8: str | None = None

    @property
    def matmul(self) -> Matmul:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "tiles"}
        return Matmul(**{**fields, "dtype": jnp.dtype(self.dtype), "float8": self._operand_dtype})

    @property
    def _operand_dtype(self) -> Any:
        return None if self.float8 is None else FORMATS[self.float8]

    @property
    def kernel(self) -> Any:
        """Its module."""
        return KERNELS[type(self.tiles)]

    def operands(self) -> Operands:
        rng = np.random.default_rng(0)

        def normal(*shape, scale=1.0):
            return jnp.asarray(rng.normal(size=shape) * scale, self.dtype)

        def matrix(rows, columns, turned, scale=1.0):
            made = normal(*((columns, rows) if turned else (rows, columns)), scale=scale)
            return made if self.float8 is None else made.astype(self._operand_dtype)

        scale = self.depth**-0.5
        others = max(self.terms, self.epilogue.products)
        return Operands(
            tuple(matrix(self.rows, self.depth, self.a_turned) for _ in range(self.terms)),
            tuple(matrix(self.depth, self.columns, self.b_turned, scale) for _ in range(others)),
            tuple(normal(self.columns) if has else None for has in self.epilogue.biases),
            tuple(normal(self.rows, self.columns) for _ in range(self.epilogue.reads)),
            None if self.float8 is None else jnp.asarray([2.0, 0.5][: self.epilogue.products], jnp.float32),
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
            if operands.scales is not None:
                products = [x * scale for x, scale in zip(products, operands.scales, strict=True)]
        biases = [None if b is None else b.astype(wide) for b in operands.biases]
        products = [x.astype(dtype).astype(wide) for x in products]
        written = list(self.epilogue(dtype, products, biases, [x.astype(dtype) for x in operands.read]))
        return written, [written[i].astype(wide).sum(0) for i in self.epilogue.sums]


def run(launch: Launch, timeout: float = 60.0) -> Simulation:
    return simulate(
        lambda operands: launch.kernel.multiply(launch.matmul, operands, launch.tiles),
        launch.operands(),
        timeout=timeout,
    )


def check(launch: Launch) -> None:
    """No race, and what comes out is right."""
    _assert_right(launch, run(launch).check())


def _assert_right(launch: Launch, got: Any) -> None:
    operands = launch.operands()

    def rounded(results):
        written, sums = results
        return written, [x.astype(launch.dtype) for x in sums]

    plain = rounded(launch.expected(operands, launch.dtype))
    assert_trees_close(rounded(got), launch.expected(operands, jnp.float32), plain)


def run_together(launches: Sequence[Launch], timeout: float = 60.0) -> Simulation:
    """Several products in one launch, by the tiles of the first."""
    kernel, tiles = launches[0].kernel, launches[0].tiles
    return simulate(
        lambda operands: kernel.multiply_together(
            [(x.matmul, o) for x, o in zip(launches, operands, strict=True)], tiles
        ),
        [x.operands() for x in launches],
        timeout=timeout,
    )


def check_together(launches: Sequence[Launch]) -> None:
    for launch, got in zip(launches, run_together(launches).check(), strict=True):
        _assert_right(launch, got)


def _both_passes(backend, problem: Problem, inputs: Inputs, d_out: jax.Array) -> Any:
    out, saved = backend.forward(problem, inputs)
    return out, saved, backend.backward(problem, Residuals(inputs, *saved), d_out)


def check_op(backend: Any, case: cases.Case, float8: Float8 | None = None) -> None:
    """Both passes of a backend against the reference, or with 8 bits against the xla backend in float32."""
    built = cases.build(case, jnp.bfloat16)
    inputs, d_out = Inputs(*map(_or_none, built.operands)), jnp.asarray(built.d_out)
    up, gate, down = case.biases
    problem = Problem(
        *(inputs.x.shape[0], case.in_features, case.hidden_features, case.out_features),
        *(jnp.dtype(jnp.bfloat16), case.activation, case.gated, up, gate, down),
        save="inputs" if case.save == "inputs" else "pre_activation",
        float8=float8,
    )
    got = simulate(lambda *args: _both_passes(backend, problem, *args), inputs, d_out).check()
    plain = _both_passes(xla, problem, inputs, d_out)
    wide = dataclasses.replace(problem, dtype=jnp.dtype(jnp.float32))
    wide_arrays = jax.tree.map(lambda x: x.astype(jnp.float32), (inputs, d_out))
    oracle = _both_passes(reference if float8 is None else xla, wide, *wide_arrays)
    assert_trees_close(got, oracle, plain)


def _or_none(x: Any) -> Any:
    return None if x is None else jnp.asarray(x)


@contextlib.contextmanager
def changed(kernel: Any, stand_in: StandIn, *patches: tuple[str, Any]) -> Iterator[StandIn]:
    """The kernel of this module traced anew, with a stand-in for `plgpu` and other things of the module replaced."""
    jitted: Any = kernel._launch
    with pytest.MonkeyPatch.context() as patch:
        # Without its jit, which would give back what was traced before.
        patch.setattr(kernel, "_launch", jitted.__wrapped__)
        patch.setattr(kernel, "_Scratch", stand_in.recording(kernel._Scratch))
        for module in (kernel, ring):
            patch.setattr(module, "plgpu", stand_in)
        for name, value in patches:
            patch.setattr(kernel, name, value)
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


class BlackwellSlip(Slip):
    """As a stand-in for what the Blackwell kernel does besides.

    `freed_early`: the matmul warp itself arrives at the barrier of that name, not the tensor core when it is done.
    """

    def __init__(self, *drop: str, freed_early: str | None = None, **mistakes: Any):
        super().__init__(**mistakes)
        self.drop, self.freed_early = drop, freed_early

    def tcgen05_commit_arrive(self, barrier: Any, **options: Any) -> None:
        if self.freed_early is not None and self._name(barrier) == self.freed_early:
            self.hits += 1
            plgpu.barrier_arrive(barrier)
        elif not self._drops("tcgen05_commit_arrive", barrier):
            plgpu.tcgen05_commit_arrive(barrier, **options)

    def wait_load_tmem(self) -> None:
        if not self._drops("wait_load_tmem"):
            plgpu.wait_load_tmem()

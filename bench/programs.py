"""One peer's call for one case and pass, ready to run: compiled for JAX, on a stream of its own for PyTorch.

The backward is timed alone: the forward leaves its residuals (`jax.vjp`'s pullback, PyTorch's graph) outside the
measured call.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import timing
from bench.cases import Case, Pass
from bench.peers import Peer, extras_of, shapes


@dataclasses.dataclass
class JaxProgram:
    """`first` is the forward that leaves residuals, for the backward alone."""

    peer: Peer
    case: Case
    pass_: Pass
    first: Any
    timed: Any
    residuals: Any = None

    @property
    def temp_bytes(self) -> int:
        both = [program.memory_analysis() for program in (self.first, self.timed) if program is not None]
        return max(analysis.temp_size_in_bytes + analysis.output_size_in_bytes for analysis in both)

    def arguments(self, q, k, v, g, extras) -> tuple:
        if self.peer.scaled_query:
            q = (q * (1 / math.sqrt(self.case.depth))).astype(q.dtype)
        if self.peer.dtype is not None:
            q, k, v, g = (x.astype(self.peer.dtype) for x in (q, k, v, g))
        if self.pass_ == "forward":
            return q, k, v, extras
        if self.pass_ == "forward+backward":
            return q, k, v, g, extras
        _, residuals = self.first(q, k, v, extras)
        return jax.block_until_ready(residuals), g

    def results(self, arguments: tuple) -> list[jax.Array]:
        """The output, or the gradients of q, k and v (and of the unscaled q, where that was scaled)."""
        found = jax.block_until_ready(self.timed(*arguments))
        found = [found] if self.pass_ == "forward" else list(found)
        if self.peer.scaled_query and self.pass_ != "forward":
            found[0] = found[0] * (1 / math.sqrt(self.case.depth))
        return found


def compile_jax(peer: Peer, case: Case, pass_: Pass) -> JaxProgram:
    q, k, v, g = (jax.ShapeDtypeStruct(shape, peer.dtype or case.dtype) for shape in shapes(case))
    extras = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in extras_of(case).items()}

    options = dict(peer.compiler_options) or None

    def forward(q, k, v, extras):
        return peer.attend(case, q, k, v, extras)

    def both(q, k, v, g, extras):
        return jax.vjp(lambda q, k, v: forward(q, k, v, extras), q, k, v)[1](g)

    if pass_ == "forward":
        return JaxProgram(peer, case, pass_, None, jax.jit(forward).lower(q, k, v, extras).compile(options))
    if pass_ == "forward+backward":
        return JaxProgram(peer, case, pass_, None, jax.jit(both).lower(q, k, v, g, extras).compile(options))
    structure = None

    def noting_structure(q, k, v, extras):
        nonlocal structure
        out, pull = jax.vjp(lambda q, k, v: forward(q, k, v, extras), q, k, v)
        leaves, structure = jax.tree.flatten(pull)
        return out, leaves

    traced = jax.jit(noting_structure).trace(q, k, v, extras)
    _, leaves = traced.out_info
    leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]

    def backward(leaves, g):
        return jax.tree.unflatten(structure, leaves)(g)

    first = traced.lower().compile(options)
    return JaxProgram(peer, case, pass_, first, jax.jit(backward).lower(leaves, g).compile(options))


class TorchProgram:
    temp_bytes = 0

    def __init__(self, peer: Peer, case: Case, pass_: Pass):
        import torch  # pyright: ignore[reportMissingImports]

        self.torch = torch
        self.peer, self.case, self.pass_ = peer, case, pass_
        self.stream = torch.cuda.Stream()

    def arguments(self, q, k, v, g, extras) -> tuple:
        """Shares the memory of JAX's arrays. For the backward, runs the forward."""
        torch = self.torch
        q, k, v, g = (torch.from_dlpack(x) for x in (q, k, v, g))
        if self.pass_ == "forward":
            return q, k, v
        with torch.cuda.stream(self.stream):
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            if self.pass_ == "forward+backward":
                return (*leaves, g)
            out = self.peer.attend(self.case, *leaves, {})
            self.stream.synchronize()
        return out, leaves, g

    def call(self, *arguments):
        if self.pass_ == "forward":
            with self.torch.no_grad():
                return [self.peer.attend(self.case, *arguments, {})]
        if self.pass_ == "forward+backward":
            *leaves, g = arguments
            out = self.peer.attend(self.case, *leaves, {})
        else:
            out, leaves, g = arguments
        return self.torch.autograd.grad(out, leaves, g, retain_graph=True)

    def results(self, arguments: tuple) -> list[jax.Array]:
        with self.torch.cuda.stream(self.stream):
            found = [x.contiguous() for x in self.call(*arguments)]
            self.stream.synchronize()
        return [jnp.from_dlpack(x) for x in found]


def build(peer: Peer, case: Case, pass_: Pass) -> JaxProgram | TorchProgram:
    return TorchProgram(peer, case, pass_) if peer.framework == "torch" else compile_jax(peer, case, pass_)


class Contender:
    """A program with its argument sets, and the times taken so far."""

    def __init__(self, program: JaxProgram | TorchProgram, argument_sets: list[tuple], watch: timing.Stopwatch):
        self.program, self.argument_sets, self.watch = program, argument_sets, watch
        self.taken: list[float] = []
        self.method = ""
        self.roughly = 0.0
        self.batch_seconds: float | None = None
        if isinstance(program, JaxProgram):
            self.roughly = watch.warm_up(program.timed, argument_sets)

    @property
    def slow(self) -> bool:
        return timing.on_gpu() and self.roughly > timing.SLOW_SECONDS

    def measure(self) -> None:
        program = self.program
        if isinstance(program, JaxProgram):
            timed = program.timed, self.argument_sets, self.roughly
            taken, self.method = self.watch.seconds(*timed)
            if self.batch_seconds is None and self.method == "cupti":
                self.batch_seconds = self.watch.batch(*timed)
        else:
            taken, self.method = timing.torch_seconds(program.torch, program.call, self.argument_sets, program.stream)
        self.taken += taken


def enter(
    program: JaxProgram | TorchProgram, input_sets: list[list[jax.Array]], extras: dict, watch: timing.Stopwatch
) -> tuple[Contender, list[jax.Array]]:
    """(the contender, its results on the first input set)."""
    argument_sets = [program.arguments(q, k, v, g, extras) for q, k, v, g in input_sets]
    results = program.results(argument_sets[0])
    return Contender(program, argument_sets, watch), results


@jax.jit
def _distance(a, b, valid):
    a, b = (jnp.where(valid, x.astype(jnp.float32), 0) for x in (a, b))
    return jnp.linalg.norm(a - b) / jnp.linalg.norm(b)


def distance(case: Case, results: list[jax.Array], yardstick: list[jax.Array]) -> float:
    """The largest ‖a - b‖ / ‖b‖ over the arrays, without rows beyond the lengths; NaN where one is NaN."""
    lengths = case.lengths()
    valid = np.True_ if lengths is None else (np.arange(case.q_len) < lengths[:, None])[..., None, None]
    return float(np.max([float(_distance(a, b, valid)) for a, b in zip(results, yardstick, strict=True)]))

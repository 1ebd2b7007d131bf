"""What `check_parity` has to know of an op: its cases, how a backend is called on one, and what the answer is."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from fast_layers.arch import lowering_targets
from fast_layers.dispatch import Backend, Pass
from fast_layers.testing.closeness import stack

# Below this many numbers in the output, one draw of the inputs is luck.
_ENOUGH_NUMBERS = 1 << 15
_MOST_DRAWS = 8


def draws_for(numbers: int) -> int:
    """How often to draw the inputs of a case with that many numbers in its output."""
    return max(1, min(_MOST_DRAWS, math.ceil(_ENOUGH_NUMBERS / numbers)))


def on_device(array: Any, dtype: Any) -> jax.Array:
    """Converted here: by `jnp.asarray` the device would do it, with a program for each shape."""
    return jax.device_put(np.asarray(array, np.float32).astype(dtype))


def compiled_soon(fn: Callable[..., Any], **options: Any) -> Any:
    """`jax.jit` for oracles and yardsticks: their speed does not matter, so XLA need not try out what is fastest."""
    on_gpu = lowering_targets()[0].platform == "cuda"
    untried = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False} if on_gpu else None
    return jax.jit(fn, compiler_options=untried, **options)


class Draw(Protocol):
    """One call as a backend gets it: `fwd(problem, *operands)`, `bwd(problem, residuals(returned), *cotangents)`."""

    @property
    def problem(self) -> Any: ...

    @property
    def operands(self) -> tuple[Any, ...]: ...

    @property
    def cotangents(self) -> tuple[Any, ...]: ...

    def residuals(self, returned: Any) -> Any:
        """From what the forward returned."""
        ...

    def outputs(self, returned: Any) -> dict[str, Any]:
        """What the forward returned, by the names of the quantities."""
        ...

    def gradients(self, returned: Any) -> dict[str, Any]:
        """What the backward returned, by the names of the quantities."""
        ...


@dataclasses.dataclass(frozen=True)
class Answer:
    """Quantities by pass and name; one more leading axis, for the draws, once stacked."""

    forward: dict[str, Any]
    backward: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Expected:
    """One answer for each draw."""

    oracle: list[Answer]
    yardsticks: tuple[list[Answer], ...]

    def of(self, pass_: Pass, name: str) -> list[Any]:
        return [
            stack([getattr(answer, pass_)[name] for answer in answers]) for answers in (self.oracle, *self.yardsticks)
        ]


class Case(Protocol):
    """One call of the op; the arrays follow from it, the dtype and the draw."""

    @property
    def draws(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class Suite:
    """The parity of one op."""

    op: str
    backends: Callable[[], Sequence[Backend]]
    typical: Callable[[], Any]
    """The Problem of a layer of a language model in training, for `python -m fast_layers doctor`."""
    cases: Mapping[str, Any]
    quick: tuple[str, ...]
    """Names of cases for `python -m fast_layers doctor`: few, as each is a program for each pass and backend."""
    also_float16: frozenset[str]
    draw: Callable[[Any, Any, int], Draw]
    """From a case, a dtype and a number."""
    expect: Callable[[list[Any]], Expected]
    plain_forward: Callable[..., Any]
    """Of a backend that takes everything: its residuals are for the backward of one that refuses the forward."""


def answers_by(
    forward: Callable[..., Any], draws: Sequence[Any], cotangents_of: Callable[[Any], Any], dtype: Any = None
) -> list[Answer]:
    """Of `forward(*draw.operands)`, differentiated by JAX in the first operand.

    That operand and the cotangents are taken in `dtype`, None for their own. `cotangents_of(draw)` has the arrays of
    what is returned, in its order.
    """

    @compiled_soon
    def call(operands, cotangents):
        inputs, *fixed = operands
        inputs, cotangents = jax.tree.map(lambda x: x.astype(dtype or x.dtype), (inputs, cotangents))
        returned, pull = jax.vjp(lambda inputs: forward(inputs, *fixed), inputs)
        return returned, pull(jax.tree.unflatten(jax.tree.structure(returned), jax.tree.leaves(cotangents)))[0]

    def answer(draw: Any) -> Answer:
        returned, grads = jax.device_get(call(draw.operands, cotangents_of(draw)))
        return Answer(draw.outputs(returned), draw.gradients(grads))

    return [answer(draw) for draw in draws]

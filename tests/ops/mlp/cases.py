"""Calls of `mlp` and `linear` as data: drawn by hypothesis, built into arrays, and judged by the numpy oracle."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import fast_layers
from fast_layers.arch import lowering_targets
from fast_layers.dispatch import PASSES
from fast_layers.ops.mlp.activations import ACTIVATIONS
from fast_layers.ops.mlp.backends import BACKENDS
from ops.mlp import oracle


@dataclasses.dataclass(frozen=True)
class Case:
    """One call; the arrays follow from `seed`. Its repr reproduces it."""

    leading: tuple[int, ...] = (7,)
    in_features: int = 8
    hidden_features: int = 24
    out_features: int | None = 16  # None: linear
    activation: str = "gelu_tanh"
    gated: bool = False
    biases: tuple[bool, bool, bool] = (False, False, False)  # up, gate, down
    save: str = "pre_activation"
    seed: int = 0

    def __str__(self) -> str:
        """What differs from the defaults, for the names of tests."""
        fields = ((f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self))
        return ",".join(f"{name}={value}".replace(" ", "") for name, value, default in fields if value != default)

    def call(self, operands: oracle.Operands, *, implementation: str | None = None, **more: Any) -> jax.Array:
        options = {"activation": self.activation, "save": self.save, "implementation": implementation, **more}
        x, w_up, w_gate, w_down, b_up, b_gate, b_down = operands
        if self.out_features is None:
            return fast_layers.linear(x, w_up, b_up, gate=w_gate, b_gate=b_gate, **options)
        return fast_layers.mlp(x, w_up, w_down, w_gate=w_gate, b_up=b_up, b_gate=b_gate, b_down=b_down, **options)


@dataclasses.dataclass(frozen=True)
class Built:
    case: Case
    operands: oracle.Operands
    d_out: np.ndarray

    def oracle(self, wide=np.float64) -> oracle.Answer:
        return oracle.apply(self.operands, self.d_out, self.case.activation, wide=wide, store=wide)

    def yardsticks(self) -> list[oracle.Answer]:
        """In the operands' own type, with sums in two orders; 16-bit ones are added up in float32."""
        store = self.operands.x.dtype
        wide = np.float64 if store == np.float64 else np.float32
        functions = oracle.Functions(jnp.exp, jnp.tanh, jax.lax.erf)
        how = {"wide": wide, "store": store, "functions": functions}
        return [
            oracle.apply(self.operands, self.d_out, self.case.activation, **how, sequential=sequential)
            for sequential in (False, True)
        ]

    def refusal(self, implementation: str) -> str | None:
        """Why the backend does not take this call, if so."""
        (plan,) = fast_layers.explain(self.case.call, self.operands, implementation="reference").plans
        (backend,) = (b for b in BACKENDS if b.name == implementation)
        arch = lowering_targets()[0]
        return next(filter(None, (backend.supports(plan.problem, arch, pass_) for pass_ in PASSES)), None)


def build(case: Case, dtype: Any = np.float32, draw: int = 0) -> Built:
    """Draws of one case differ in the arrays only, and so share a compiled function.

    Kernels are scaled as initialisers scale them, so that the activation sees numbers about 1.
    """
    c = case
    rng = np.random.default_rng((c.seed, draw))

    def normal(*shape, scale=1.0):
        return np.asarray(rng.normal(size=shape) * scale).astype(dtype)

    up_bias, gate_bias, down_bias = c.biases
    width = (c.in_features, c.hidden_features)
    fan_in = 1 / math.sqrt(c.in_features)
    has_down = c.out_features is not None
    operands = oracle.Operands(
        x=normal(*c.leading, c.in_features),
        w_up=normal(*width, scale=fan_in),
        w_gate=normal(*width, scale=fan_in) if c.gated else None,
        w_down=normal(c.hidden_features, c.out_features, scale=1 / math.sqrt(c.hidden_features)) if has_down else None,
        b_up=normal(c.hidden_features) if up_bias else None,
        b_gate=normal(c.hidden_features) if gate_bias and c.gated else None,
        b_down=normal(c.out_features) if down_bias and has_down else None,
    )
    return Built(case, operands, normal(*c.leading, c.out_features or c.hidden_features))


def runner(implementation: str | None, *, optimise: bool = False) -> Callable[[Built], oracle.Answer]:
    """Output and gradients by the package's op; draws of one case share the compiled function.

    Without optimisation compiling takes half as long, which is nearly all there is.
    """
    level = {} if optimise else {"compiler_options": {"xla_backend_optimization_level": 0}}

    @functools.partial(jax.jit, static_argnums=0, **level)
    def call(case, operands, d_out):
        out, pull = jax.vjp(lambda operands: case.call(operands, implementation=implementation), operands)
        return oracle.Answer(out, *pull(d_out))

    return lambda built: call(built.case, built.operands, built.d_out)


def _takes_float32_here(backend) -> bool:
    """What takes only 16 bits, and only on a GPU, is held against the reference in tests/gpu."""
    (plan,) = fast_layers.explain(Case().call, build(Case()).operands, implementation="reference").plans
    return all(backend.supports(plan.problem, lowering_targets()[0], pass_) is None for pass_ in PASSES)


TESTED = [backend.name for backend in BACKENDS if backend.name != "reference" and _takes_float32_here(backend)]
"""The backends to hold against the reference; a new one is picked up from here."""
ALL = ["reference", *TESTED]


@st.composite
def cases(draw, activations: tuple[str, ...] = tuple(ACTIVATIONS), kinked_bias: bool = True) -> Case:
    """Every argument, in any combination. Sizes: multiples of 8, of tiles, and neither.

    `kinked_bias=False`: no bias before "relu", where rounding the sum may change a sign, hence a whole gradient.
    """
    features = st.sampled_from([8, 24, 40, 1, 5, 33])
    case = Case(
        leading=draw(st.sampled_from([(), (1,), (7,), (130,), (2, 5), (1, 3, 2)])),
        in_features=draw(features),
        hidden_features=draw(features),
        out_features=draw(st.none() | features),
        activation=draw(st.sampled_from(activations)),
        gated=draw(st.booleans()),
        biases=draw(st.tuples(*[st.booleans()] * 3)),
        save=draw(st.sampled_from(["pre_activation", "inputs"])),
        seed=draw(st.integers(0, 2**16)),
    )
    if case.activation == "relu" and not kinked_bias:
        case = dataclasses.replace(case, biases=(case.biases[0] and case.gated, False, case.biases[2]))
    return case


def as_jax(operands: oracle.Operands) -> oracle.Operands:
    return jax.tree.map(jnp.asarray, operands)

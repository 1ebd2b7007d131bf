"""Launches of the MLP's matmuls, whichever kernel they are compiled for."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fast_layers.ops.mlp.epilogue import Activate, Differentiate, Epilogue, Plain
from fast_layers.ops.mlp.matmul import Matmul, Operands
from fast_layers.testing import Compilation

PLAIN = Plain()


@dataclasses.dataclass(frozen=True)
class Launch:
    rows: int
    columns: int
    depth: int
    epilogue: Epilogue = PLAIN
    terms: int = 1
    a_turned: bool = False
    b_turned: bool = False
    dtype: Any = jnp.bfloat16
    float8: Any = None

    @property
    def matmul(self) -> Matmul:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return Matmul(**{**fields, "dtype": jnp.dtype(self.dtype), "float8": self.float8 and jnp.dtype(self.float8)})

    def compilation(self, kernel: str, tiles: Any) -> Compilation:
        """By this module of the op."""

        def shape(rows, columns, turned=False) -> Any:
            return jax.ShapeDtypeStruct((columns, rows) if turned else (rows, columns), self.float8 or self.dtype)

        bias: Any = jax.ShapeDtypeStruct((self.columns,), self.dtype)

        scales: Any = self.float8 and jax.ShapeDtypeStruct((self.epilogue.products,), jnp.float32)
        operands = Operands(
            (shape(self.rows, self.depth, self.a_turned),) * self.terms,
            (shape(self.depth, self.columns, self.b_turned),) * max(self.terms, self.epilogue.products),
            tuple(bias if has else None for has in self.epilogue.biases),
            (shape(self.rows, self.columns),) * self.epilogue.reads,
            scales,
        )
        return Compilation(launch, (operands,), {"kernel": kernel, "m": self.matmul, "tiles": tiles})


def launch(operands: Operands, *, kernel: str, m: Matmul, tiles: Any):
    return importlib.import_module(f"fast_layers.ops.mlp.{kernel}").multiply(m, operands, tiles)


def together(launches: Sequence[Launch], tiles: Any) -> Compilation:
    """Several products in one launch of the Hopper kernel."""
    operands = [operands for (operands,) in (x.compilation("hopper_matmul", tiles).shapes for x in launches)]
    return Compilation(launch_together, (operands,), {"ms": tuple(x.matmul for x in launches), "tiles": tiles})


def launch_together(operands: list[Operands], *, ms: tuple[Matmul, ...], tiles: Any):
    hopper_matmul = importlib.import_module("fast_layers.ops.mlp.hopper_matmul")
    return hopper_matmul.multiply_together(list(zip(ms, operands, strict=True)), tiles)


TOKENS = 8192
WEIGHTS = {
    f"weights' gradients, {tokens} tokens": (
        *(Launch(2048, 5504, tokens, a_turned=True),) * 2,
        Launch(5504, 2048, tokens, a_turned=True),
    )
    for tokens in (TOKENS, 512)
}
LAUNCHES = {
    "up, gelu": Launch(TOKENS, 8192, 2048, Activate("gelu_tanh", (True,))),
    "up and gate": Launch(TOKENS, 5504, 2048, Activate("silu", (False, False))),
    "backward, gelu": Launch(TOKENS, 8192, 2048, Differentiate("gelu_tanh", (True,)), b_turned=True),
    "backward, gated": Launch(TOKENS, 5504, 2048, Differentiate("silu", (False, False)), b_turned=True),
    "x's gradient, gated": Launch(TOKENS, 2048, 5504, b_turned=True, terms=2),
}
MORE = {
    "a weight's gradient": Launch(2048, 8192, TOKENS, a_turned=True),
    "down": Launch(TOKENS, 2048, 8192, Plain((True,))),
    "up, gelu, nothing saved": Launch(TOKENS, 8192, 2048, Activate("gelu_tanh", (True,), saves=False)),
    "up, erf": Launch(TOKENS, 8192, 2048, Activate("gelu", (True,))),
    "up, identity": Launch(TOKENS, 8192, 2048, Activate("identity", (True,), saves=False)),
    "up and gate, biases": Launch(TOKENS, 5504, 2048, Activate("gelu", (True, True))),
    "up and gate anew": Launch(TOKENS, 5504, 2048, Plain((True, True))),
    "up, deep": Launch(TOKENS, 32768, 8192, Activate("gelu_tanh", (True,))),
    "up and gate, deep": Launch(TOKENS, 21888, 8192, Activate("silu", (False, False))),
    "backward, deep": Launch(TOKENS, 32768, 8192, Differentiate("gelu_tanh", (True,)), b_turned=True),
    "backward, gated, deep": Launch(TOKENS, 21888, 8192, Differentiate("silu", (True, True)), b_turned=True),
    "backward, gated, biases": Launch(TOKENS, 5504, 2048, Differentiate("gelu", (True, True)), b_turned=True),
    "backward, relu squared": Launch(TOKENS, 8192, 2048, Differentiate("relu_squared", (True,)), b_turned=True),
    "backward, relu": Launch(TOKENS, 8192, 2048, Differentiate("relu"), b_turned=True),
    "backward, sigmoid": Launch(TOKENS, 8192, 2048, Differentiate("sigmoid"), b_turned=True),
    "float16": Launch(TOKENS, 8192, 2048, Differentiate("gelu_tanh", (True,)), b_turned=True, dtype=jnp.float16),
    "few rows": Launch(8, 8192, 2048, Activate("gelu_tanh", (True,))),
    "few rows, gated": Launch(8, 21888, 8192, Activate("silu", (False, False))),
    "dozens of rows, gated": Launch(29, 5504, 2048, Activate("silu", (True, True)), dtype=jnp.float16),
    "few rows, backward": Launch(8, 8192, 2048, Differentiate("silu", (True, True)), b_turned=True),
    "a weight's gradient from few rows": Launch(2048, 8192, 8, a_turned=True),
    "few columns": Launch(TOKENS, 64, 2048, Activate("gelu_tanh", (True,))),
    "hundreds of rows, backward, gated": Launch(512, 5504, 2048, Differentiate("silu", (False, False)), b_turned=True),
    "hundreds of rows, split depth": Launch(512, 2048, 5504),
    "odd sizes": Launch(2047, 5464, 2056, Activate("silu", (True, True))),
}

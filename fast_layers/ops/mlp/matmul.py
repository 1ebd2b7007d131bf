"""One launch of a matmul kernel: its static facts, its operands as TMA wants them, and the order of its tiles.

Axis letters: R rows, C columns, K what is contracted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from fast_layers.ops.mlp.config import DEPTH_TILE, EpilogueNeeds
from fast_layers.ops.mlp.epilogue import Activate, Epilogue, Plain

TMA_ROWS = 8
"""TMA sees a matrix in tiles of 8 rows and up to 128 bytes of columns, of which it must have whole ones."""
TMA_BYTES = 128
TMA_COLUMNS = TMA_BYTES // 2
"""Of 16 bits."""


@dataclasses.dataclass(frozen=True)
class Matmul:
    """The static facts of one launch. A is [R, K], or [K, R] if `a_turned`; B is [K, C], or [C, K] if `b_turned`."""

    rows: int
    columns: int
    depth: int
    dtype: jnp.dtype
    epilogue: Epilogue
    terms: int = 1
    """How many pairs of A and B one product is the sum of. Their A and B are the launch's first operands."""
    a_turned: bool = False
    b_turned: bool = False
    float8: jnp.dtype | None = None
    """Of A and B, if they have 8 bits and scales; else theirs is `dtype`."""

    def __post_init__(self):
        assert self.terms == 1 or self.epilogue.products == 1

    @property
    def operand_bytes(self) -> int:
        return (self.dtype if self.float8 is None else self.float8).itemsize

    @property
    def needs(self) -> EpilogueNeeds:
        e = self.epilogue
        return EpilogueNeeds(e.products, e.reads, e.writes, len(e.sums), not isinstance(e, Plain))


class Operands(NamedTuple):
    """As many A as terms, as many B as terms or products; `read` are [R, C]; a bias is None or float32 [C].

    `scales` is for 8 bits: by what each product is multiplied.
    """

    a: tuple[Array, ...]
    b: tuple[Array, ...]
    biases: tuple[Float[Array, " C"] | None, ...]
    read: tuple[Array, ...] = ()
    scales: Float[Array, " P"] | None = None


Results = tuple[list[Array], list[Array]]
"""(what the epilogue writes, each [R, C] of `Matmul.dtype`; what it sums over rows, each float32 [C])."""
Multiply = Callable[[Matmul, Operands], Results]
Products = Sequence[tuple[Matmul, Operands]]
"""Of one depth, dtype and orientation, without an epilogue."""
MultiplyTogether = Callable[[Products], list[Results]]


def fit_operands(
    m: Matmul,
    operands: Operands,
    *,
    rows: int,
    columns: int,
    b_window: int,
    piece: tuple[int, int],
    depth: int = DEPTH_TILE,
) -> Operands:
    """Each at least one window of TMA's: `rows` of A, `b_window` of B's columns, `depth` of both, a `piece` of what is
    read; biases for whole tiles of `columns`."""
    a_least, b_least = (rows, depth), (depth, b_window)
    return Operands(
        tuple(fit(x, *(a_least[::-1] if m.a_turned else a_least)) for x in operands.a),
        tuple(fit(x, *(b_least[::-1] if m.b_turned else b_least)) for x in operands.b),
        tuple(None if x is None else _whole_tiles(x, columns) for x in operands.biases),
        tuple(fit(x, *piece) for x in operands.read),
        operands.scales,
    )


def fit(x: Array, least_rows: int, least_columns: int) -> Array:
    """`x` with zeros below and beside it, if TMA needs them: in whole tiles, and at least one window."""
    rows = max(round_up(x.shape[0], TMA_ROWS), least_rows)
    columns = max(round_up(x.shape[1], TMA_BYTES // x.dtype.itemsize), least_columns)
    if (rows, columns) == x.shape:
        return x
    return jnp.pad(x, [(0, rows - x.shape[0]), (0, columns - x.shape[1])])


def finish(m: Matmul, operands: Operands, products: list[Array], *, turned: bool = False) -> Results:
    """What the epilogue would have made of these, left to XLA; with `turned` they are [C, R], and nothing is summed."""
    over = (slice(None), None) if turned else (None, slice(None))
    biases = [None if b is None else b.astype(jnp.float32)[over] for b in operands.biases]
    if isinstance(m.epilogue, Activate):
        sums = [x if b is None else x + b for x, b in zip(products, biases, strict=True)]
        products, biases = [_rounded(x, m.dtype) for x in sums], [None] * len(sums)
    written = list(m.epilogue(m.dtype, products, biases, operands.read))
    if turned:
        return [x.T for x in written], []
    # Without the barrier XLA would hand the next product float32.
    written = lax.optimization_barrier(written)
    return written, [written[i].astype(jnp.float32).sum(0) for i in m.epilogue.sums]


def _rounded(x: Array, dtype: Any) -> Array:
    """To `dtype`'s numbers, in float32: a mere conversion XLA would drop, since it is undone at once."""
    to = jnp.finfo(dtype)
    if to.nexp < jnp.finfo(x.dtype).nexp:
        return lax.optimization_barrier(x.astype(dtype)).astype(x.dtype)  # reduce_precision has no subnormal numbers
    return lax.reduce_precision(x, to.nexp, to.nmant)


def trim(m: Matmul, written: list[Array], sums: list[Array]) -> Results:
    """What a launch on whole tiles gives, cut to size; parts of a sum are added up, always in the same order."""
    return [x[: m.rows, : m.columns] for x in written], [x.sum(0)[: m.columns] for x in sums]


def tile_at(index: Any, row_tiles: Any, column_tiles: Any, row_group: int) -> tuple[Any, Any]:
    """(row, column) of the `index`-th tile. Tiles at work together form a rectangle, whose operands L2 holds."""
    group, within = lax.div(index, row_group * column_tiles), lax.rem(index, row_group * column_tiles)
    height = jnp.minimum(row_tiles - group * row_group, row_group)
    return group * row_group + lax.rem(within, height), lax.div(within, height)


def oriented(first: Any, second: Any, turned: bool) -> tuple[Any, Any]:
    return (second, first) if turned else (first, second)


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def split(x: Any, at: int) -> tuple[list[Any], list[Any]]:
    return list(x[:at]), list(x[at:])


def _whole_tiles(bias: Float[Array, " C"], tile: int) -> Float[Array, " C"]:
    return jnp.pad(bias.astype(jnp.float32), (0, -bias.shape[0] % tile))

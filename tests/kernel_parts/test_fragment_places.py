"""Where `ldmatrix` reads, which the simulator's stand-ins leave out: by the same functions, of plain numbers."""

from __future__ import annotations

import operator
import types

import numpy as np
import pytest

from fast_layers.kernel_parts import fragments

TILE_ROWS = 8
LOADS = {"plain": (None, None), **{f"turned, by {by}, from {at}": (at, by) for by in (None, 32, 64) for at in (0, 64)}}
"""From which column on they are turned, and by how many they are swizzled."""


class _Number(int):
    """With the attribute of a compiler's number."""

    type = None


def _of_numbers(fn):
    return lambda *given: _Number(fn(*given))


def _swizzled(x: np.ndarray, by: int) -> np.ndarray:
    """As TMA leaves it in tiles of 128 or 64 bytes a row: its 16 bytes in an order that every row changes, or every two
    (PTX ISA, "Swizzling Modes")."""
    rows, columns = x.shape
    tiles = x.reshape(rows // TILE_ROWS, TILE_ROWS, columns // by, by // 8, 8).swapaxes(1, 2)
    place = np.arange(by // 8) ^ (np.arange(TILE_ROWS)[:, None] // (64 // by))
    found = np.empty_like(tiles)
    for row in range(TILE_ROWS):
        found[:, :, row, place[row]] = tiles[:, :, row]
    return found.reshape(-1)


def _read(memory: np.ndarray, shape: tuple[int, int], matrices, turned: str) -> np.ndarray:
    """What a warpgroup's `ldmatrix.x4` give (PTX ISA, "ldmatrix"), put together as wgmma's first factor."""
    found = np.empty(shape, memory.dtype)
    for warp in range(4):
        for chunk in range(2):
            for half in range(2):
                for row in range(8):
                    places = matrices(*(_Number(i) for i in (warp, row, chunk, half)))
                    blocks = np.ndindex(shape[0] // fragments.ROWS, shape[1] // 16)
                    for place, (tile, sixteen) in zip(places, blocks, strict=True):
                        assert place % 16 == 0
                        eight = memory[place // 2 : place // 2 + 8]
                        first = tile * fragments.ROWS + warp * 16 + half * 8
                        column = sixteen * 16 + chunk * 8
                        if turned:
                            found[first : first + 8, column + row] = eight
                        else:
                            found[first + row, column : column + 8] = eight
    return found


@pytest.mark.parametrize(
    ("rows", "columns", "beside"), [(64, 80, 0), (64, 80, 8), (128, 96, 0), (128, 96, 8), (64, 208, 0)]
)
@pytest.mark.parametrize("name", LOADS)
def test_factors_are_read_where_they_lie(monkeypatch, name, rows, columns, beside):
    start, by = LOADS[name]
    columns, beside = (columns, beside) if by is None else (-(-columns // by) * by, 0)
    x = np.arange(rows * (columns + beside), dtype=np.uint16).reshape(rows, -1)
    arith = {"addi": operator.add, "minui": min, "xori": operator.xor}
    arith = types.SimpleNamespace(**{name: _of_numbers(fn) for name, fn in arith.items()})
    monkeypatch.setattr(fragments, "arith", arith)
    monkeypatch.setattr(fragments, "utils", types.SimpleNamespace(c=lambda number, _: _Number(number)))
    monkeypatch.setattr(fragments, "times", _of_numbers(operator.mul))
    monkeypatch.setattr(fragments, "divided", lambda x, by: tuple(map(_Number, divmod(x, by))))
    monkeypatch.setattr(fragments, "_load_factor", lambda *given: given)
    tile = types.SimpleNamespace(shape=x.shape, dtype="bfloat16")
    whole = x[:, :columns]
    if start is None:
        found, wanted = fragments.load_factor(tile, columns), whole
    else:
        found, wanted = fragments.load_turned_factor(tile, start, columns, by), whole[:, start : start + 64].T
    _, transforms, shape, matrices, turned, stand_in = found
    assert bool(transforms) == (by is not None)
    got = _read(x.reshape(-1) if by is None else _swizzled(x, by), shape, matrices, turned)
    np.testing.assert_array_equal(got, stand_in(x))
    np.testing.assert_array_equal(got[: len(wanted)], wanted)

"""Where `ldmatrix` reads, which the simulator's stand-ins leave out: by the same functions, of plain numbers."""

from __future__ import annotations

import operator
import types

import numpy as np
import pytest

from fast_layers.kernel_parts import fragments

TILE_ROWS, TILE_COLUMNS = 8, 32
LOADS = {
    "plain": (fragments.load_factor, lambda x: x),
    "turned": (lambda tile: fragments.load_turned_factor(tile, 0, False), lambda x: x[:, :64].T),
    "turned, from 64 on": (lambda tile: fragments.load_turned_factor(tile, 64, False), lambda x: x[:, 64:].T),
    "turned, swizzled": (lambda tile: fragments.load_turned_factor(tile, 0, True), lambda x: x[:, :64].T),
    "turned, swizzled, from 64 on": (lambda tile: fragments.load_turned_factor(tile, 64, True), lambda x: x[:, 64:].T),
}


class _Number(int):
    """With the attribute of a compiler's number."""

    type = None


def _of_numbers(fn):
    return lambda *given: _Number(fn(*given))


def _swizzled(x: np.ndarray) -> np.ndarray:
    """As TMA leaves it in tiles of 64 bytes a row: its 16 bytes in an order that every two rows change (PTX ISA,
    "Swizzling Modes")."""
    rows, columns = x.shape
    tiles = x.reshape(rows // TILE_ROWS, TILE_ROWS, columns // TILE_COLUMNS, 4, 8).swapaxes(1, 2)
    place = np.arange(4) ^ (np.arange(TILE_ROWS)[:, None] // 2)
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


@pytest.mark.parametrize(("rows", "columns"), [(64, 80), (128, 96), (64, 208)])
@pytest.mark.parametrize("name", LOADS)
def test_factors_are_read_where_they_lie(monkeypatch, name, rows, columns):
    if "swizzled" in name and columns % TILE_COLUMNS:
        columns += 16
    x = np.arange(rows * columns, dtype=np.uint16).reshape(rows, columns)
    arith = {"addi": operator.add, "minui": min, "xori": operator.xor}
    arith = types.SimpleNamespace(**{name: _of_numbers(fn) for name, fn in arith.items()})
    monkeypatch.setattr(fragments, "arith", arith)
    monkeypatch.setattr(fragments, "utils", types.SimpleNamespace(c=lambda number, _: _Number(number)))
    monkeypatch.setattr(fragments, "times", _of_numbers(operator.mul))
    monkeypatch.setattr(fragments, "divided", lambda x, by: tuple(map(_Number, divmod(x, by))))
    monkeypatch.setattr(fragments, "_load_factor", lambda *given: given)
    load, wanted = LOADS[name]
    _, transforms, shape, matrices, turned, stand_in = load(types.SimpleNamespace(shape=x.shape, dtype="bfloat16"))
    got = _read(_swizzled(x) if transforms else x.reshape(-1), shape, matrices, turned)
    np.testing.assert_array_equal(got, stand_in(x))
    real = wanted(x)[: fragments.ROWS if turned else None]
    np.testing.assert_array_equal(got[: len(real)], real)

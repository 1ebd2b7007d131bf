"""The cases of the attention benchmark, and what each costs at the least: FLOPs and bytes.

B examples, T queries, S keys, N query heads, K key/value heads, D depth, and D/H where values have H. FLOPs count the
two matmuls of the forward over the pairs (query, key) that see each other, and the five of the backward. A causal mask
alone counts as half of the square, as publications do; every other mask counts its pairs exactly. Bytes count each
input read once and each output written once.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

import numpy as np

Pass = Literal["forward", "backward", "forward+backward"]

TOKENS = 16_384
HIDDEN = 2_048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384)
TILE = 128
MOST_LENGTH = 2**24
"""For which a mask's keys of each query are counted on the host."""
PRODUCTS = {"forward": (1, 1), "backward": (3, 2), "forward+backward": (4, 3)}
"""Of a pass, over the depth of queries and keys, and over that of values."""


def depths_name(depth: int, v_depth: int) -> str:
    return f"D{depth}" if depth == v_depth else f"D{depth}/{v_depth}"


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape and mask. `window` counts the keys that a query sees, its own position included."""

    group: str
    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    depth: int
    causal: bool = False
    window: int | None = None
    documents: int = 1
    padded: bool = False
    softcap: float | None = None
    dtype: str = "bfloat16"
    v_depth: int | None = None
    """Of values and out; None is `depth`."""
    passes: tuple[Pass, ...] = ("forward", "backward")

    def __post_init__(self):
        if (self.window or self.documents > 1 or self.padded) and self.q_len != self.kv_len:
            raise ValueError(f"{self.q_len=} must equal {self.kv_len=} with a window, documents or padding")

    @property
    def mask(self) -> str:
        words = ["causal" if self.causal else "full"]
        if self.window:
            words.append(f"window {self.window}")
        if self.documents > 1:
            words.append(f"{self.documents} documents")
        if self.padded:
            words.append("lengths")
        if self.softcap:
            words.append(f"softcap {self.softcap:g}")
        return ", ".join(words)

    @property
    def depths(self) -> tuple[int, int]:
        """Of queries and keys, and of values and out."""
        return self.depth, self.v_depth or self.depth

    @property
    def name(self) -> str:
        length = f"T{self.q_len}" if self.q_len == self.kv_len else f"T{self.q_len} S{self.kv_len}"
        heads = f"N{self.heads}" if self.heads == self.kv_heads else f"N{self.heads}/{self.kv_heads}"
        return f"B{self.batch} {length} {heads} {depths_name(*self.depths)} {self.mask}"

    def lengths(self) -> np.ndarray | None:
        """Tokens of each example [B], from half of T up to all of it."""
        if not self.padded:
            return None
        return np.linspace(self.q_len // 2, self.q_len, self.batch).astype(np.int32)

    def document_ids(self) -> np.ndarray | None:
        """[T]; the documents' lengths grow as 1, 2, 3, .., so that no two are alike."""
        if self.documents == 1:
            return None
        ends = np.cumsum(np.arange(1, self.documents + 1))
        ends = ends * self.q_len // ends[-1]
        return np.searchsorted(ends, np.arange(self.q_len), side="right").astype(np.int32)

    def visible_keys(self) -> tuple[np.ndarray, np.ndarray]:
        """First and one behind the last key of each query, [B, T] each; the same where a query sees none."""
        rows = np.arange(self.q_len)
        start = np.zeros(self.q_len, np.int64)
        stop = np.full(self.q_len, self.kv_len, np.int64)
        if self.causal:
            stop = np.minimum(stop, rows + 1)
        if self.window:
            start = np.maximum(start, rows - self.window + 1)
        ids = self.document_ids()
        if ids is not None:
            start = np.maximum(start, np.searchsorted(ids, ids, side="left"))
            stop = np.minimum(stop, np.searchsorted(ids, ids, side="right"))
        lengths = self.lengths()
        start, stop = (np.broadcast_to(bound, (self.batch, self.q_len)) for bound in (start, stop))
        if lengths is not None:
            each = lengths[:, None]
            stop = np.where(rows < each, np.minimum(stop, each), start)
        return start, np.maximum(start, stop)

    def visible_pairs(self) -> float:
        """Pairs (query, key) per head, over all examples."""
        start, stop = self.visible_keys()
        pairs = float((stop - start).sum())
        if self.causal_alone:
            pairs -= self.batch * self.q_len / 2
        return pairs

    def visible_tiles(self) -> int:
        """Squares of `TILE` queries and keys in which any pair sees each other, per head, over all examples."""
        total = 0
        for start, stop in zip(*self.visible_keys(), strict=True):
            for first in range(0, self.q_len, TILE):
                # Each query sees one piece: +1 where it begins, -1 behind its end.
                edges = np.zeros(-(-self.kv_len // TILE) + 1, np.int64)
                rows = slice(first, first + TILE)
                seen = stop[rows] > start[rows]
                np.add.at(edges, start[rows][seen] // TILE, 1)
                np.add.at(edges, -(-stop[rows][seen] // TILE), -1)
                total += int((np.cumsum(edges)[:-1] > 0).sum())
        return total

    @property
    def causal_alone(self) -> bool:
        square = self.q_len == self.kv_len
        return self.causal and square and not (self.window or self.documents > 1 or self.padded)

    def flops(self, pass_: Pass) -> float:
        each_pair = sum(2 * count * depth for count, depth in zip(PRODUCTS[pass_], self.depths, strict=True))
        return each_pair * self.visible_pairs() * self.heads

    def bytes(self, pass_: Pass) -> int:
        # Of either pair, as many bytes: Q and out, whose gradients are dQ and dO, and K and V.
        of_queries, of_keys = (
            self.batch * rows * sum(self.depths) for rows in (self.q_len * self.heads, self.kv_len * self.kv_heads)
        )
        of_out = self.batch * self.q_len * self.heads * self.depths[1]
        elements = {
            "forward": of_queries + of_keys,
            "backward": 2 * of_queries + 2 * of_keys,
            "forward+backward": 2 * of_queries + of_out + 3 * of_keys,
        }[pass_]
        return elements * np.dtype(np.float32 if self.dtype == "float32" else np.float16).itemsize


def square(
    group: str, depth: int, length: int, *, heads: int | None = None, kv_heads: int | None = None, **mask
) -> Case:
    """Self-attention over `TOKENS` tokens."""
    heads = heads or HIDDEN // depth
    return Case(group, TOKENS // length, length, length, heads, kv_heads or heads, depth, **mask)


def decode(batch: int, q_len: int, kv_len: int) -> Case:
    """A few new tokens against a cache. They see all of it: causal among themselves is what not every peer offers."""
    return Case("decode", batch, q_len, kv_len, 32, 8, 128, passes=("forward",))


def _main(depth: int) -> list[Case]:
    # Longest first: where time runs out, the cells that say most are there.
    return [square(f"d{depth}", depth, t, causal=causal) for t in reversed(LENGTHS) for causal in (True, False)]


def _gqa() -> list[Case]:
    return [square("gqa", 128, t, heads=n, kv_heads=8, causal=True) for n in (32, 64) for t in (16_384, 8192, 2048)]


def _other_depths() -> list[Case]:
    """Multiples of 16 that the main grid leaves out."""
    masks = [(16_384, True), (4096, True), (4096, False)]
    return [square("depths", depth, t, causal=causal) for depth in (80, 96, 112, 32, 48) for t, causal in masks]


GROUPS: dict[str, list[Case]] = {
    "d128": _main(128),
    "d64": _main(64),
    "d256": _main(256),
    "gqa": _gqa(),
    "mla": [
        square("mla", 192, t, heads=16, v_depth=128, causal=causal)
        for t in (16_384, 4096, 1024)
        for causal in (True, False)
    ],
    "depths": _other_depths(),
    "window": [square("window", 128, t, causal=True, window=1024) for t in (16_384, 4096)],
    "packed": [square("packed", 128, TOKENS, causal=causal, documents=8) for causal in (True, False)],
    "lengths": [square("lengths", 128, 2048, causal=causal, padded=True) for causal in (True, False)],
    "softcap": [square("softcap", 128, 4096, causal=causal, softcap=50.0) for causal in (True, False)],
    "decode": [
        decode(batch, q_len, kv_len)
        for kv_len in (16_384, 131_072, 32_768, 8192, 2048)
        for batch in (16, 1, 128)
        for q_len in (1, 4, 16)
    ],
}

QUICK: list[Case] = [
    square("d128", 128, 8192, causal=True),
    square("d128", 128, 2048, causal=True),
    square("d128", 128, 8192),
    square("d64", 64, 4096, causal=True),
    square("d256", 256, 4096, causal=True),
    square("gqa", 128, 8192, heads=32, kv_heads=8, causal=True),
    square("window", 128, 16_384, causal=True, window=1024),
    decode(16, 1, 32_768),
]


def _tiny(**mask) -> Case:
    return Case("tiny", 2, 64, 64, 4, 2, 16, **mask)


TINY: list[Case] = [
    _tiny(causal=True),
    _tiny(),
    _tiny(causal=True, window=16),
    _tiny(causal=True, documents=4),
    _tiny(padded=True),
    _tiny(causal=True, softcap=5.0),
    _tiny(causal=True, v_depth=8),
    dataclasses.replace(decode(2, 4, 256), group="tiny", heads=4, kv_heads=2, depth=16),
]
"""For a CPU: every kind of case, none of them worth timing."""


def select(names: list[str], *, depth: int, dtype: str) -> list[Case]:
    """Cases by group name, or `TxN`: one example of T tokens and N heads, causal and full."""
    cases: list[Case] = []
    for name in names:
        shape = re.fullmatch(r"(\d+)x(\d+)", name)
        if shape:
            length, heads = (int(part) for part in shape.groups())
            if not (1 <= length <= MOST_LENGTH and heads >= 1):
                raise ValueError(f"--cases {name}: take lengths from 1 to {MOST_LENGTH}, and at least 1 head")
            passes: tuple[Pass, ...] = ("forward", "forward+backward")
            cases += [
                Case(name, 1, length, length, heads, heads, depth, causal=causal, dtype=dtype, passes=passes)
                for causal in (False, True)
            ]
        elif name == "main":
            cases += GROUPS["d128"] + GROUPS["d64"] + GROUPS["d256"]
        elif name == "all":
            cases += [case for group in GROUPS.values() for case in group]
        elif name in GROUPS or name in ("quick", "tiny"):
            cases += {**GROUPS, "quick": QUICK, "tiny": TINY}[name]
        else:
            known = ", ".join([*GROUPS, "main", "all", "quick", "tiny"])
            raise ValueError(f"--cases {name}: unknown; take {known}, or a shape such as 4096x8 (length x heads)")
    return cases

"""Calls of attention drawn at random, by a number: combinations that nobody thought of."""

from __future__ import annotations

from typing import Any

import numpy as np

from fast_layers.testing.parity import Case

_DEPTHS = (
    *[(64, 64), (128, 128)] * 4,
    *[(256, 256), (192, 128)] * 2,
    *[(16, 16), (40, 40), (80, 80), (96, 96), (144, 144), (64, 128), (128, 64), (208, 256), (256, 80)],
)
_MOST_SCORES = 1 << 25
"""Of all heads: an oracle in float64 has them in memory ten times."""


def draw(number: int) -> Case:
    rng = np.random.default_rng(number)

    def one_of(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    def happens(probability: float) -> bool:
        return bool(rng.random() < probability)

    def length() -> int:
        if happens(0.4):
            return int(128 * rng.integers(1, 9))
        return int(rng.integers(2, one_of(17, 65, 400, 1400)))

    options: dict[str, Any] = {}
    q_len = length()
    kv_len = q_len if happens(0.6) else length()
    kv_heads, group = one_of(1, 2, 3, 4, 8, 16, 48), one_of(1, 1, 1, 2, 4, 7, 8)
    batch = one_of(1, 2, 3, 8)
    while batch * kv_heads * group * q_len * kv_len > _MOST_SCORES:
        batch, kv_heads, group = (max(x // 2, 1) for x in (batch, kv_heads, group))

    def lengths(total: int) -> tuple[int, ...]:
        return tuple(int(x) for x in rng.integers(0, total + 1, batch))

    kinds = ["none", "none", "causal", "causal", "window", "offset", "lengths", "dense"]
    kind = one_of(*kinds, *(["documents", "documents", "prefix"] if q_len == kv_len else ["bottom right"]))
    if kind in ("causal", "bottom right", "offset") or (kind in ("documents", "lengths") and happens(0.5)):
        options["is_causal"] = True
    if kind == "bottom right":
        options["q_offset"] = "bottom_right"
    if kind == "offset":
        options["q_offset"] = int(rng.integers(-q_len // 2, kv_len))
    if kind == "window" or happens(0.1):
        widest = max(q_len, kv_len)
        options["window"] = tuple(None if happens(0.2) else int(rng.integers(0, widest)) for _ in range(2))
    if kind == "lengths":
        options["key_lengths"] = lengths(kv_len)
        if happens(0.5):
            options["query_lengths"] = lengths(q_len)
        options["poisoned_padding"] = happens(0.5)
    if kind == "prefix":
        options["prefix"] = lengths(kv_len)
    if kind == "documents":
        ends = np.unique(rng.integers(2, q_len + 1, rng.integers(1, 8)))
        options |= {"documents": tuple(int(x) for x in np.diff(ends, prepend=0)), "scattered": happens(0.3)}
        options["poisoned_padding"] = happens(0.3)
    if kind == "dense":
        options["dense_mask"] = True
    if happens(0.12):
        rows = 1 if happens(0.2) else q_len
        options["bias"] = (one_of(1, batch), one_of(1, kv_heads * group), rows, kv_len)
    if happens(0.1):
        options["softcap"] = one_of(1.0, 2.0)  # wider ones have a test of their own
    if happens(0.1):
        options["dropout_rate"] = one_of(0.1, 0.5)
    if kv_heads * group >= 8:  # the gradient's yardstick is the worst of so many
        options["sinks"] = happens(0.2)
    # Else gradients may be exactly 0, which are no measure of anything.
    tiny = min(q_len, kv_len) < 4 or options.get("window") == (0, 0)
    qk_dim, v_dim = one_of(*_DEPTHS)
    heads = {"heads": kv_heads * group, "kv_heads": kv_heads}
    return Case(batch, q_len, kv_len, **heads, qk_dim=qk_dim, v_dim=v_dim, lse_gradient=tiny or happens(0.3), **options)

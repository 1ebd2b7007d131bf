"""Calls drawn at random, each by a number: combinations that nobody thought of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fast_layers.testing import _parity_conv1d as conv1d
from fast_layers.testing import _parity_gated_norm as gated_norm
from fast_layers.testing import _parity_mlp as mlp
from fast_layers.testing.parity import Case

_DEPTHS = (
    *[(64, 64), (128, 128)] * 4,
    *[(256, 256), (192, 128)] * 2,
    *[(d, d) for d in (16, 32, 40, 48, 80, 96, 112, 144)],
    *[(64, 128), (128, 64), (208, 256), (256, 80)],
)
_MOST_SCORES = 1 << 25
"""Of all heads: an oracle in float64 has them in memory ten times."""
_MOST_LONG_SCORES, _MOST_LONG_SCORES_OF_A_HEAD = 1 << 30, 1 << 25
"""Of all heads, and of those that share a key/value head of an example: these at a time."""


class Dice:
    def __init__(self, number: int):
        self.rng = np.random.default_rng(number)

    def one_of(self, *choices: Any) -> Any:
        return choices[self.rng.integers(len(choices))]

    def happens(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def between(self, least: int, most: int) -> int:
        return int(self.rng.integers(least, most + 1))

    def length(self, least: int = 1) -> int:
        if self.happens(0.4):
            return 128 * self.between(1, 8)
        return self.between(least, self.one_of(16, 64, 400, 1400))

    def documents(self, length: int, least: int = 1) -> tuple[int, ...]:
        """Lengths that add up to so much at most."""
        ends = np.unique(self.rng.integers(least, length + 1, self.between(1, 7)))
        return tuple(int(x) for x in np.diff(ends, prepend=0))


def draw_attention(dice: Dice) -> Case:
    rng, one_of, happens = dice.rng, dice.one_of, dice.happens
    options: dict[str, Any] = {}
    q_len = dice.length(2)
    kv_len = q_len if happens(0.6) else dice.length(2)
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
        options |= {"documents": dice.documents(q_len, 2), "scattered": happens(0.3)}
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
    # Of one key alone the gradient is exactly 0, but for that of lse, and no measure of anything.
    q_offset = options.get("q_offset", 0)
    few = min(q_len, kv_len, *options.get("key_lengths", ())) < 4 or options.get("window") == (0, 0)
    few = few or (q_offset != "bottom_right" and q_len + q_offset < 4)
    qk_dim, v_dim = one_of(*_DEPTHS)
    heads = {"heads": kv_heads * group, "kv_heads": kv_heads}
    return Case(batch, q_len, kv_len, **heads, qk_dim=qk_dim, v_dim=v_dim, lse_gradient=few or happens(0.3), **options)


def draw_long_attention(dice: Dice) -> Case:
    """Of as many keys and heads as give a GPU enough to do: for launches that short calls never get."""
    rng, one_of, happens = dice.rng, dice.one_of, dice.happens
    options: dict[str, Any] = {}
    many = happens(0.5)
    if many:  # whole heads, and dQ beside dS
        qk_dim = v_dim = one_of(64, 128)
        q_len = kv_len = 256 * (dice.between(1, 4) if qk_dim == 64 else dice.between(7, 20))
        batch, kv_heads, group = one_of(8, 16, 32), one_of(8, 16, 24), one_of(1, 1, 1, 1, 2)
        kind = one_of("none", "causal")
    else:
        qk_dim, v_dim = one_of(*[(64, 64), (128, 128)] * 4, (256, 256), (192, 128), (96, 96), (64, 128))
        q_len = kv_len = 128 * dice.between(2, one_of(8, 16, 32)) if happens(0.85) else dice.between(500, 3000)
        if happens(0.1):
            kv_len = 128 * dice.between(2, 32)
        batch, kv_heads, group = one_of(1, 2, 3, 4, 8), one_of(1, 2, 4, 8, 16, 32), one_of(1, 1, 1, 1, 2, 4, 8)
        kinds = ["none", "none", "causal", "causal", "causal", "window", "lengths"]
        kind = one_of(*kinds, *(["documents", "documents"] if q_len == kv_len else ["bottom right"]))
    while group * q_len * kv_len > _MOST_LONG_SCORES_OF_A_HEAD:
        group //= 2
    while batch * kv_heads * group * q_len * kv_len > _MOST_LONG_SCORES:
        batch, kv_heads = (batch, kv_heads // 2) if kv_heads > batch else (batch // 2, kv_heads)
    if kind in ("causal", "bottom right", "window") or (kind in ("documents", "lengths") and happens(0.6)):
        options["is_causal"] = True
    if kind == "bottom right":
        options["q_offset"] = "bottom_right"
    if kind == "window":
        options["window"] = (128 * dice.between(1, 12) - one_of(0, 1, 64), 0)
    if kind == "lengths":
        options["key_lengths"] = tuple(int(x) for x in rng.integers(4, kv_len + 1, batch))
        options["poisoned_padding"] = happens(0.5)
    if kind == "documents":
        options |= {"documents": dice.documents(q_len, 2), "poisoned_padding": happens(0.3)}
    if happens(0.08):
        options["softcap"] = 1.0
    heads = {"heads": kv_heads * group, "kv_heads": kv_heads}
    return Case(batch, q_len, kv_len, **heads, qk_dim=qk_dim, v_dim=v_dim, lse_gradient=happens(0.2), **options)


def draw_decoding(dice: Dice) -> Case:
    """A few queries against many keys."""
    one_of, happens = dice.one_of, dice.happens
    options: dict[str, Any] = {}
    q_len, kv_len = one_of(1, 1, 1, 2, 3, 4, 5, 8, 16, 24), 64 * dice.between(1, one_of(8, 64))
    if happens(0.4):
        kv_len -= dice.between(1, 40)
    batch, kv_heads = one_of(1, 1, 2, 3, 4, 8, 16, 32), one_of(1, 2, 3, 4, 8, 16)
    group = one_of(1, 1, 2, 4, 4, 5, 7, 8, 12)
    while batch * kv_heads * group * q_len * kv_len > _MOST_SCORES:
        batch, kv_heads = (max(x // 2, 1) for x in (batch, kv_heads))
    kind = one_of("none", "bottom right", "bottom right", "offset", "lengths", "lengths", "window", "dense")
    if kind in ("bottom right", "offset", "window"):
        options["is_causal"] = True
        options["q_offset"] = dice.between(3, kv_len) if kind == "offset" else "bottom_right"
    if kind == "window":
        options["window"] = (dice.between(3, kv_len), 0)
    if kind == "lengths":
        options["key_lengths"] = tuple(dice.between(0 if happens(0.2) else 4, kv_len) for _ in range(batch))
        options["poisoned_padding"] = happens(0.5)
    if kind == "dense":
        options["dense_mask"] = True
    if happens(0.1):
        options["softcap"] = one_of(1.0, 2.0)
    if kv_heads * group >= 8:
        options["sinks"] = happens(0.2)
    few = min(options.get("key_lengths", (kv_len,))) < 4
    qk_dim, v_dim = one_of(*_DEPTHS)
    heads = {"heads": kv_heads * group, "kv_heads": kv_heads}
    return Case(batch, q_len, kv_len, **heads, qk_dim=qk_dim, v_dim=v_dim, lse_gradient=few or happens(0.3), **options)


def draw_mlp(dice: Dice) -> mlp.Case:
    activation = dice.one_of("gelu_tanh", "gelu", "relu", "relu_squared", "silu", "sigmoid", "identity")
    features, hidden, out = (8 * dice.between(1, dice.one_of(8, 80)) for _ in range(3))
    return mlp.Case(
        tokens=dice.length(),
        in_features=features,
        hidden_features=hidden,
        out_features=None if dice.happens(0.25) else out,
        activation=activation,
        gated=dice.happens(0.5),
        bias=activation != "relu" and dice.happens(0.5),  # see the table of cases
        save=dice.one_of("pre_activation", "inputs"),
    )


def draw_conv1d(dice: Dice) -> conv1d.Case:
    length = dice.length()
    return conv1d.Case(
        batch=dice.between(1, 3),
        length=length,
        channels=128 * dice.between(1, 8),
        width=dice.between(2, 4),
        activation=dice.one_of(None, "silu"),
        bias=dice.happens(0.5),
        initial_state=dice.happens(0.5),
        final_state=dice.happens(0.5),
        documents=_all_of(dice.documents(length), length) if dice.happens(0.4) else None,
    )


def draw_gated_norm(dice: Dice) -> gated_norm.Case:
    size = 64 * dice.between(1, 16)
    groups = dice.between(1, 6)
    return gated_norm.Case(
        rows=(dice.length(),),
        features=size * groups,
        group_size=size if groups > 1 or dice.happens(0.5) else None,
        eps=dice.one_of(1e-5, 0.1),
        norm_before_gate=dice.happens(0.5),
    )


def _all_of(documents: tuple[int, ...], length: int) -> tuple[int, ...]:
    rest = length - sum(documents)
    return (*documents, rest) if rest else documents


# Not the scan: of states in 16 bits, A's gradient is beyond the rule in one call of five (bench/NOTES.md).
DRAWN: Mapping[str, tuple[str, Callable[[Dice], Any]]] = {
    "attention": ("dot_product_attention", draw_attention),
    "long_attention": ("dot_product_attention", draw_long_attention),
    "decoding": ("dot_product_attention", draw_decoding),
    "mlp": ("mlp", draw_mlp),
    "conv1d": ("causal_conv1d", draw_conv1d),
    "gated_norm": ("gated_rms_norm", draw_gated_norm),
}
"""By kind, the op and how a case of its parity is drawn."""


def draw(kind: str, number: int) -> Any:
    return DRAWN[kind][1](Dice(number))

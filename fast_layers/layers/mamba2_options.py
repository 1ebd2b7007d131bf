"""What a Mamba-2 mixer is made of: its sizes, in one frozen object that rejects itself."""

from __future__ import annotations

import dataclasses
import math

from fast_layers import dispatch
from fast_layers.ops.operands import is_real
from fast_layers.ops.ssd import check
from fast_layers.ops.ssd.backends import BACKENDS
from fast_layers.ops.static_options import check_size, flag


@dataclasses.dataclass(frozen=True)
class Mamba2Options:
    """The arguments of `Mamba2` that decide shapes and computation; see there."""

    d_model: int
    d_state: int = 128
    d_conv: int = 4
    expand: int = 2
    headdim: int = 64
    d_ssm: int | None = None
    ngroups: int = 1
    D_has_hdim: bool = False
    rmsnorm: bool = True
    norm_before_gate: bool = False
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    chunk_size: int | None = None
    norm_eps: float = 1e-5
    implementation: str | None = None

    def __post_init__(self):
        for name in ("d_model", "d_state", "d_conv", "expand", "headdim", "ngroups"):
            check_size(name, getattr(self, name))
        if self.d_ssm is not None:
            check_size("d_ssm", self.d_ssm)
        for name in ("D_has_hdim", "rmsnorm", "norm_before_gate"):
            flag(name, getattr(self, name))
        if self.scanned > self.d_inner:
            raise ValueError(
                f"d_ssm={self.scanned} exceeds expand * d_model = {self.d_inner}: the channels that are scanned are "
                "part of those; lower d_ssm or raise expand"
            )
        if self.scanned % self.headdim:
            raise ValueError(
                f"headdim={self.headdim} does not divide the {self.scanned} scanned channels (d_ssm, or else "
                "expand * d_model); change either"
            )
        if self.heads % self.ngroups:
            raise ValueError(
                f"ngroups={self.ngroups} does not divide the {self.heads} heads (d_ssm / headdim), which share B and C "
                "group by group; change either"
            )
        if not is_real(self.norm_eps) or not 0 <= self.norm_eps < math.inf:
            raise ValueError(f"norm_eps={self.norm_eps!r}: must be a number, 0 or more")
        object.__setattr__(self, "dt_limit", check.dt_limit(self.dt_limit))
        if self.chunk_size is not None:
            check.chunk_size(self.chunk_size, default=1, length=1)
        dispatch.check_name("ssd", BACKENDS, self.implementation)

    @property
    def d_inner(self) -> int:
        """Channels between the projections."""
        return self.expand * self.d_model

    @property
    def scanned(self) -> int:
        """Channels that go through the scan; the others are a gated MLP."""
        return self.d_inner if self.d_ssm is None else self.d_ssm

    @property
    def d_mlp(self) -> int:
        return self.d_inner - self.scanned

    @property
    def heads(self) -> int:
        return self.scanned // self.headdim

    @property
    def conv_channels(self) -> int:
        """x, B and C."""
        return self.scanned + 2 * self.ngroups * self.d_state

    @property
    def projections(self) -> tuple[int, ...]:
        """Sizes of what `in_proj` computes: the MLP's gate and value, the scan's gate z, x with B and C, dt."""
        return (self.d_mlp, self.d_mlp, self.scanned, self.conv_channels, self.heads)

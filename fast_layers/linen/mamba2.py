"""`Mamba2` for Flax Linen: the mixer of Mamba-2 with packed documents, state in and out, and decoding in chunks.

Axis letters: B any number of batch dims, T positions, F = d_model, H heads, P channels of a head, N state size, W taps
of the convolution, C its channels.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from fast_layers.layers import mamba2_init as init
from fast_layers.layers.mamba2_mixer import Mamba2State, MixerWeights, check_input, check_state, mix, refuse_in_decode
from fast_layers.layers.mamba2_options import Mamba2Options
from fast_layers.ops.static_options import flag


class Mamba2(nn.Module):
    """The Mamba-2 mixer; attributes, mathematics and names of parameters are those of `fast_layers.Mamba2`.

    `kernel_init`, `conv_kernel_init` and `out_kernel_init` wrap or replace initial values; for partitioning
    metadata, e.g. `kernel_init=nn.with_partitioning(nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform"),
    ("embed", "inner"))`, which leaves them as they are.

    With `decode=True`, `init` makes an empty cache in the collection "cache": `conv_state` [*B, C, W-1] and `ssm_state`
    [*B, H, P, N], of dtype `cache_dtype`. A call takes a chunk of any length and updates it (`mutable=["cache"]`);
    without a cache it starts an empty one.
    """

    d_model: int
    d_state: int = 128
    d_conv: int = 4
    conv_init: float | None = None
    expand: int = 2
    headdim: int = 64
    d_ssm: int | None = None
    ngroups: int = 1
    A_init_range: tuple[float, float] = (1, 16)
    D_has_hdim: bool = False
    rmsnorm: bool = True
    norm_before_gate: bool = False
    dt_min: float = 0.001
    dt_max: float = 0.1
    dt_init_floor: float = 1e-4
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    bias: bool = False
    conv_bias: bool = True
    chunk_size: int | None = None
    n_layer: int = 1
    decode: bool = False
    cache_dtype: Any = jnp.float32
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: init.Initializer | None = None
    conv_kernel_init: init.Initializer | None = None
    out_kernel_init: init.Initializer | None = None
    implementation: str | None = None
    norm_eps: float = 1e-5

    @nn.compact
    def __call__(
        self,
        u: Float[Array, "*B T F"],
        *,
        segment_ids: ArrayLike | None = None,
        initial_state: Mamba2State | None = None,
        return_final_state: bool = False,
    ) -> Any:
        """As `fast_layers.Mamba2`'s call, with `decode` an attribute."""
        o = self._options()
        u = check_input(o, u)
        flag("return_final_state", return_final_state)
        batch = u.shape[:-2]
        cache = None
        if self.decode:
            refuse_in_decode(segment_ids=segment_ids, initial_state=initial_state)
            shapes = Mamba2State.shapes(o, batch)
            cache = [
                self.variable("cache", name, jnp.zeros, shape, self.cache_dtype)
                for name, shape in zip(("conv_state", "ssm_state"), shapes, strict=True)
            ]
            initial_state = check_state(o, Mamba2State(*(variable.value for variable in cache)), batch, "the cache")
        elif initial_state is not None:
            initial_state = check_state(o, initial_state, batch, "initial_state")

        def dense(features: int, kernel_init: init.Initializer, name: str) -> nn.Dense:
            return nn.Dense(
                features,
                use_bias=self.bias,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                precision=self.precision,
                kernel_init=kernel_init,
                name=name,
            )

        projected = dense(sum(o.projections), self.kernel_init or init.projection(), "in_proj")(u)
        mixed, state = mix(
            o, self._weights(o), projected, segment_ids, initial_state, return_state=return_final_state or self.decode
        )
        # A cache that was not given starts empty, so it is as good as `init`'s; only `init` leaves it empty.
        if cache is not None and not self.is_initializing():
            assert state is not None
            for variable, array in zip(cache, state, strict=True):
                variable.value = array
        y = dense(o.d_model, self.out_kernel_init or init.projection(self.n_layer), "out_proj")(mixed)
        return (y, state) if return_final_state else y

    @nn.nowrap
    def _options(self) -> Mamba2Options:
        for name in ("bias", "conv_bias", "decode"):
            flag(name, getattr(self, name))
        return Mamba2Options(
            d_model=self.d_model,
            d_state=self.d_state,
            d_conv=self.d_conv,
            expand=self.expand,
            headdim=self.headdim,
            d_ssm=self.d_ssm,
            ngroups=self.ngroups,
            D_has_hdim=self.D_has_hdim,
            rmsnorm=self.rmsnorm,
            norm_before_gate=self.norm_before_gate,
            dt_limit=self.dt_limit,
            chunk_size=self.chunk_size,
            norm_eps=self.norm_eps,
            implementation=self.implementation,
        )

    @nn.nowrap
    def _weights(self, o: Mamba2Options) -> MixerWeights:
        taps: dict[str, Any] = {
            "kernel": (self.conv_kernel_init or init.convolution(self.conv_init), (o.d_conv, 1, o.conv_channels))
        }
        if self.conv_bias:
            taps["bias"] = (init.convolution_bias(o.d_conv), (o.conv_channels,))
        conv = _Parameters(taps, self.param_dtype, name="conv1d")()
        ones = nn.initializers.ones_init()
        norm = _Parameters({"scale": (ones, (o.scanned,))}, self.param_dtype, name="norm")() if self.rmsnorm else {}
        per_head = jnp.promote_types(self.param_dtype, jnp.float32)
        draw_dt_bias = init.dt_bias(self.dt_min, self.dt_max, self.dt_init_floor)
        return MixerWeights(
            conv_kernel=conv["kernel"],
            conv_bias=conv.get("bias"),
            dt_bias=self.param("dt_bias", draw_dt_bias, (o.heads,), per_head),
            A_log=self.param("A_log", init.a_log(self.A_init_range), (o.heads,), per_head),
            D=self.param("D", ones, (o.scanned if self.D_has_hdim else o.heads,), per_head),
            norm_scale=norm.get("scale"),
        )


class _Parameters(nn.Module):
    """A module that only holds parameters: {name: (initial values, shape)}."""

    content: Any
    param_dtype: Any

    @nn.compact
    def __call__(self) -> dict[str, Array]:
        return {
            name: self.param(name, initialise, shape, self.param_dtype)
            for name, (initialise, shape) in self.content.items()
        }

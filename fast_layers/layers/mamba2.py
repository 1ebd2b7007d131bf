"""`Mamba2` for Flax NNX: the mixer of Mamba-2 with packed documents, state in and out, and decoding in chunks.

Axis letters: B any number of batch dims, T positions, F = d_model, H heads, P channels of a head, N state size, W taps
of the convolution, C its channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, ArrayLike, Float

from fast_layers.layers import mamba2_init as init
from fast_layers.layers.mamba2_mixer import (
    Mamba2State,
    MixerWeights,
    check_input,
    check_state,
    mix,
    refuse_in_decode,
)
from fast_layers.layers.mamba2_options import Mamba2Options
from fast_layers.ops.operands import is_integer, is_wide_float
from fast_layers.ops.static_options import flag

_NO_METADATA: Mapping[str, Any] = MappingProxyType({})


class Mamba2(nnx.Module):
    """The Mamba-2 mixer: in_proj, causal convolution, selective state-space scan, gated norm, out_proj.

    Arguments, defaults, initial values and mathematics are those of mamba_ssm's `Mamba2`; `fast_layers.checkpoints`
    reads and writes its weights.

        layer = fast_layers.Mamba2(768, rngs=nnx.Rngs(0))
        y = layer(u, segment_ids=documents)

    Parameters: in_proj.kernel [F, 2 expand F + 2 G N + H] with columns [z, x, B, C, dt], conv1d.kernel [W, 1, C] and
    .bias [C], dt_bias [H], A_log [H], D [H], norm.scale [d_ssm], out_proj.kernel [expand F, F].

    Args:
      d_model: F, features of input and output.
      d_state: N, numbers that a channel of a head remembers.
      d_conv: W, taps of the convolution: any number from 1, where mamba_ssm takes 2 to 4.
      conv_init: the convolution's kernel starts uniform up to this; None: up to 1 / sqrt(W).
      expand: channels between the projections, in multiples of d_model.
      headdim: P, channels that share a decay.
      d_ssm: channels that are scanned, a multiple of headdim; the rest of expand * d_model is a gated MLP. None: all.
      ngroups: groups of heads; those of one group share B and C, and are normalised together.
      A_init_range: decay rates start uniform in it.
      D_has_hdim: a skip weight for each channel, not for each head.
      rmsnorm: normalise after the scan; if False, the output is only gated.
      norm_before_gate: normalise before gating, not after.
      dt_min, dt_max, dt_init_floor: step sizes start log-uniform in [dt_min, dt_max], and at least the floor.
      dt_limit: (low, high), what step sizes are clipped to.
      bias: of in_proj and out_proj; starts at 0.
      conv_bias: of the convolution; starts uniform up to 1 / sqrt(W).
      chunk_size: positions of a chunk of the scan; only speed depends on it, so the default is what suits `ssd` here,
        not the 256 that suits mamba_ssm's kernels.
      n_layer: layers of the model: out_proj starts smaller by sqrt(n_layer), as in mamba_ssm's language model.
      norm_eps: added to the mean square that the norm divides by; mamba_ssm has 1e-5 only.
      decode: what calls do that do not say `decode=`.
      dtype: of the computation; None: what inputs and parameters promote to. Sums and the scan's state are float32.
      param_dtype: of the parameters; dt_bias, A_log and D are float32 at least, since they are exponents or sums.
      precision: of the two projections.
      kernel_init, conv_kernel_init, out_kernel_init: replace the initial values described above.
      kernel_metadata, bias_metadata: of in_proj's parameters, as `nnx.Linear` takes them.
      conv_kernel_metadata, conv_bias_metadata, out_kernel_metadata, out_bias_metadata, norm_metadata: likewise.
      head_metadata: of dt_bias, A_log and D.
      implementation: a backend of `ssd` by name; None takes the best. `fast_layers.explain` tells which. For forward
        mode and second derivatives the convolution and the norm must be "reference", too:
        `fast_layers.use_backends(force="reference")`.
      rngs: stream `params`.

    Decoding. `init_cache((*B, T, F), dtype)` makes an empty cache: `conv_state` [*B, C, W-1] and `ssm_state`
    [*B, H, P, N], whose size does not depend on T. A call with `decode=True` takes a chunk of any length, so a prompt
    can be fed at once and then one token after the other.

    Raises:
      ValueError: arguments that do not fit; it says the way out.

    Source: Dao and Gu, "Transformers are SSMs" (2024); github.com/state-spaces/mamba.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        d_conv: int = 4,
        conv_init: float | None = None,
        expand: int = 2,
        headdim: int = 64,
        d_ssm: int | None = None,
        ngroups: int = 1,
        A_init_range: tuple[float, float] = (1, 16),
        D_has_hdim: bool = False,
        rmsnorm: bool = True,
        norm_before_gate: bool = False,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        bias: bool = False,
        conv_bias: bool = True,
        chunk_size: int | None = None,
        *,
        n_layer: int = 1,
        norm_eps: float = 1e-5,
        decode: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: init.Initializer | None = None,
        conv_kernel_init: init.Initializer | None = None,
        out_kernel_init: init.Initializer | None = None,
        kernel_metadata: Mapping[str, Any] = _NO_METADATA,
        bias_metadata: Mapping[str, Any] = _NO_METADATA,
        conv_kernel_metadata: Mapping[str, Any] = _NO_METADATA,
        conv_bias_metadata: Mapping[str, Any] = _NO_METADATA,
        head_metadata: Mapping[str, Any] = _NO_METADATA,
        norm_metadata: Mapping[str, Any] = _NO_METADATA,
        out_kernel_metadata: Mapping[str, Any] = _NO_METADATA,
        out_bias_metadata: Mapping[str, Any] = _NO_METADATA,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        for name, given in (("bias", bias), ("conv_bias", conv_bias), ("decode", decode)):
            flag(name, given)
        self.options = o = Mamba2Options(
            d_model=d_model,
            d_state=d_state,
            d_conv=d_conv,
            expand=expand,
            headdim=headdim,
            d_ssm=d_ssm,
            ngroups=ngroups,
            D_has_hdim=D_has_hdim,
            rmsnorm=rmsnorm,
            norm_before_gate=norm_before_gate,
            dt_limit=dt_limit,
            chunk_size=chunk_size,
            norm_eps=norm_eps,
            implementation=implementation,
        )
        self.decode = decode
        self.dtype = dtype
        self.in_proj = nnx.Linear(
            o.d_model,
            sum(o.projections),
            use_bias=bias,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=kernel_init or init.projection(),
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
            rngs=rngs,
        )
        # These two hold parameters; what they would compute is part of fused operations.
        self.conv1d = nnx.Conv(
            o.conv_channels,
            o.conv_channels,
            d_conv,
            feature_group_count=o.conv_channels,
            padding="CAUSAL",
            use_bias=conv_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=conv_kernel_init or init.convolution(conv_init),
            bias_init=init.convolution_bias(d_conv),
            kernel_metadata=conv_kernel_metadata,
            bias_metadata=conv_bias_metadata,
            rngs=rngs,
        )
        self.norm: Any = nnx.data(None)
        if rmsnorm:
            self.norm = nnx.RMSNorm(
                o.scanned,
                epsilon=norm_eps,
                dtype=dtype,
                param_dtype=param_dtype,
                scale_metadata=norm_metadata,
                rngs=rngs,
            )
        per_head = jnp.promote_types(param_dtype, jnp.float32)
        draw_dt_bias, draw_a_log = init.dt_bias(dt_min, dt_max, dt_init_floor), init.a_log(A_init_range)
        self.dt_bias = nnx.Param(draw_dt_bias(rngs.params(), (o.heads,), per_head), **head_metadata)
        self.A_log = nnx.Param(draw_a_log(rngs.params(), (o.heads,), per_head), **head_metadata)
        skips = o.scanned if D_has_hdim else o.heads
        self.D = nnx.Param(jnp.ones(skips, per_head), **head_metadata)
        self.out_proj = nnx.Linear(
            o.d_inner,
            o.d_model,
            use_bias=bias,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=out_kernel_init or init.projection(n_layer),
            kernel_metadata=out_kernel_metadata,
            bias_metadata=out_bias_metadata,
            rngs=rngs,
        )
        self.conv_state: nnx.Cache | None = nnx.data(None)
        self.ssm_state: nnx.Cache | None = nnx.data(None)

    def __call__(
        self,
        u: Float[Array, "*B T F"],
        *,
        segment_ids: ArrayLike | None = None,
        initial_state: Mamba2State | None = None,
        return_final_state: bool = False,
        decode: bool | None = None,
    ) -> Any:
        """Mix.

        Args:
          u: [*B, T, F].
          segment_ids: packed documents: int [*B, T] or [T]. A document begins wherever the id changes; neither values
            nor gradients pass from one to another, through the convolution nor through the scan.
          initial_state: what came before u, for its first document: a pair (conv [*B, C, W-1], ssm [*B, H, P, N]),
            such as an earlier call returned. None: nothing.
          return_final_state: also return the state after u, of its last document: a `Mamba2State`. Differentiable.
          decode: continue the cache, and update it.

        Returns:
          y [*B, T, F]; with `return_final_state` a pair (y, state).
        """
        u = check_input(self.options, u)
        decoding = self.decode if decode is None else decode
        flag("decode", decoding)
        flag("return_final_state", return_final_state)
        if decoding:
            initial_state = self._cached_state(u, segment_ids, initial_state)
        elif initial_state is not None:
            initial_state = check_state(self.options, initial_state, u.shape[:-2], "initial_state")
        mixed, state = mix(
            self.options,
            self._weights(),
            self.in_proj(u),
            segment_ids,
            initial_state,
            return_state=return_final_state or decoding,
        )
        if decoding:
            assert self.conv_state is not None
            assert self.ssm_state is not None
            assert state is not None
            # Not [...]: the new state may be sharded as u is, the old one, from init_cache, is not.
            for variable, array in zip((self.conv_state, self.ssm_state), state, strict=True):
                variable.set_value(array)
        y = self.out_proj(mixed)
        return (y, state) if return_final_state else y

    def init_cache(self, input_shape: tuple[int, ...], dtype: Any = jnp.float32) -> None:
        """An empty cache for decoding inputs of [*B, T, F]; T is there as for attention and does not matter."""
        is_shape = isinstance(input_shape, tuple | list) and all(map(is_integer, input_shape))
        if not is_shape or len(input_shape) < 2 or input_shape[-1] != self.options.d_model:
            got = input_shape if isinstance(input_shape, int | tuple | list) else type(input_shape).__name__
            raise ValueError(
                f"input_shape must be (*batch, length, d_model) with d_model={self.options.d_model}, such as u.shape, "
                f"got {got}"
            )
        if not is_wide_float(dtype):
            raise ValueError(
                f"dtype={jnp.dtype(dtype).name}: the cache must be float16, bfloat16, float32 or float64; float32 "
                "loses nothing"
            )
        shapes = Mamba2State.shapes(self.options, tuple(input_shape[:-2]))
        self.conv_state, self.ssm_state = (nnx.Cache(jnp.zeros(shape, dtype)) for shape in shapes)

    def _cached_state(self, u: Array, segment_ids: Any, initial_state: Any) -> Mamba2State:
        refuse_in_decode(segment_ids=segment_ids, initial_state=initial_state)
        if self.conv_state is None or self.ssm_state is None:
            raise ValueError("no cache to decode with: call init_cache(u.shape) first")
        return check_state(
            self.options, Mamba2State(self.conv_state[...], self.ssm_state[...]), u.shape[:-2], "the cache"
        )

    def _weights(self) -> MixerWeights:
        return MixerWeights(
            conv_kernel=self.conv1d.kernel[...],
            conv_bias=None if self.conv1d.bias is None else self.conv1d.bias[...],
            dt_bias=self.dt_bias[...],
            A_log=self.A_log[...],
            D=self.D[...],
            norm_scale=None if self.norm is None else self.norm.scale[...],
        )

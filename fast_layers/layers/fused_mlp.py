"""`FusedMLP` for Flax NNX: the linear layers of a hand-written MLP, computed by `fast_layers.mlp`.

Axis letters: B any number of leading dims, I input features, F hidden features, O output features.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from jax import lax
from jaxtyping import Array, Float

from fast_layers.layers.fused_mlp_options import check_settings
from fast_layers.ops.mlp import mlp
from fast_layers.ops.mlp.activations import canonical_name
from fast_layers.ops.mlp.problem import Save

_NO_METADATA: Mapping[str, Any] = MappingProxyType({})


class FusedMLP(nnx.Module):
    """down(activation(up(x))), or gated down(activation(gate(x)) * up(x)), by `fast_layers.mlp`.

    `gate` (gated only), `up` and `down` are `nnx.Linear`s, made in this order from `rngs`: parameters, initial values
    and metadata are those of a hand-written MLP, and its checkpoint loads by renaming its layers to these.

        layer = fast_layers.FusedMLP(512, 1408, activation="silu", gated=True, use_bias=False, rngs=nnx.Rngs(0))
        y = layer(x)

    Args:
      in_features: I.
      hidden_features: F.
      out_features: O; None: I.
      activation: a name that `fast_layers.mlp` knows.
      gated: multiply by the activation of a second projection, as SwiGLU and GEGLU do.
      use_bias: of all of the linear layers.
      dropout_rate: of an `nnx.Dropout` on the output. Inside, between activation and down-projection, there is none:
        the hidden activations are not kept.
      deterministic: as `nnx.Dropout` takes it.
      dtype: of the computation; None: what inputs and parameters promote to.
      param_dtype: of the parameters.
      precision: of the matmuls.
      kernel_init, bias_init: for `up` and `gate`, and for `down` unless it has its own.
      down_kernel_init, down_bias_init: for `down`; None: kernel_init and bias_init.
      promote_dtype: as `nnx.Linear` takes it; called once, with a tuple of the input and all parameters.
      kernel_metadata, bias_metadata: for the parameters of `up` and `gate`, as `nnx.Linear` takes them.
      down_kernel_metadata, down_bias_metadata: for those of `down`, whose dimensions mean something else.
      save: what is kept for the backward: "pre_activation" or "inputs"; see `fast_layers.mlp`.
      implementation: a backend by name; None takes the best. `fast_layers.explain` tells which.
      rngs: streams `params` and, for dropout, `dropout`.

    Raises:
      ValueError: sizes below 1, a dropout_rate outside [0, 1), an unknown activation, save or implementation, a flag
        that is no bool; in a call, what `fast_layers.mlp` raises.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        activation: str | None = "gelu_tanh",
        gated: bool = False,
        use_bias: bool = True,
        dropout_rate: float = 0.0,
        deterministic: bool | None = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: Any = default_kernel_init,
        bias_init: Any = default_bias_init,
        down_kernel_init: Any = None,
        down_bias_init: Any = None,
        promote_dtype: Any = dtypes.promote_dtype,
        kernel_metadata: Mapping[str, Any] = _NO_METADATA,
        bias_metadata: Mapping[str, Any] = _NO_METADATA,
        down_kernel_metadata: Mapping[str, Any] = _NO_METADATA,
        down_bias_metadata: Mapping[str, Any] = _NO_METADATA,
        save: Save = "pre_activation",
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        self.in_features = in_features
        self.hidden_features = hidden_features
        self.out_features = in_features if out_features is None else out_features
        check_settings(
            in_features=in_features,
            hidden_features=hidden_features,
            out_features=self.out_features,
            gated=gated,
            use_bias=use_bias,
            dropout_rate=dropout_rate,
            save=save,
            implementation=implementation,
        )
        self.activation = canonical_name(activation)
        self.gated = gated
        self.dtype = dtype
        self.precision = precision
        self.promote_dtype = promote_dtype
        self.save: Save = save
        self.implementation = implementation

        def linear(features_in: int, features_out: int, **own: Any) -> nnx.Linear:
            return nnx.Linear(
                features_in,
                features_out,
                use_bias=use_bias,
                dtype=dtype,
                param_dtype=param_dtype,
                precision=precision,
                promote_dtype=promote_dtype,
                rngs=rngs,
                **own,
            )

        widening = {
            "kernel_init": kernel_init,
            "bias_init": bias_init,
            "kernel_metadata": kernel_metadata,
            "bias_metadata": bias_metadata,
        }
        self.gate = linear(in_features, hidden_features, **widening) if gated else nnx.data(None)
        self.up = linear(in_features, hidden_features, **widening)
        self.down = linear(
            hidden_features,
            self.out_features,
            kernel_init=kernel_init if down_kernel_init is None else down_kernel_init,
            bias_init=bias_init if down_bias_init is None else down_bias_init,
            kernel_metadata=down_kernel_metadata,
            bias_metadata=down_bias_metadata,
        )
        # Without dropout the state is that of the linear layers alone.
        self.dropout = (
            nnx.Dropout(dropout_rate, deterministic=deterministic, rngs=rngs) if dropout_rate else nnx.data(None)
        )

    def __call__(
        self,
        x: Float[Array, "*B I"],
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> Float[Array, "*B O"]:
        """Apply the MLP.

        Args:
          x: [B.., I].
          deterministic: if True, no dropout; None: as constructed.
          rngs: for dropout; None: those of the constructor.

        Returns:
          [B.., O].
        """
        up, gate, down = (self._weights(name) for name in ("up", "gate", "down"))
        x, *weights = self.promote_dtype((x, *up, *gate, *down), dtype=self.dtype)
        w_up, b_up, w_gate, b_gate, w_down, b_down = weights
        out = mlp(
            x,
            w_up,
            w_down,
            w_gate=w_gate,
            b_up=b_up,
            b_gate=b_gate,
            b_down=b_down,
            activation=self.activation,
            save=self.save,
            precision=self.precision,
            implementation=self.implementation,
        )
        if self.dropout is None:
            return out
        return self.dropout(out, deterministic=deterministic, rngs=rngs)

    def _weights(self, name: str) -> tuple[Array | None, Array | None]:
        """(kernel, bias) of a linear layer; None for what there is not."""
        layer = getattr(self, name)
        if layer is None:
            return None, None
        if type(layer) is not nnx.Linear:
            raise ValueError(
                f"{name} is a {type(layer).__name__}: FusedMLP computes with the kernels of nnx.Linear layers and "
                "would not call it; write the MLP out with layers of your own, or put an nnx.Linear back"
            )
        as_here = {
            "dtype": self.dtype,
            "precision": self.precision,
            "promote_dtype": self.promote_dtype,
            "dot_general": lax.dot_general,
            "preferred_element_type": None,
        }
        for setting, wanted in as_here.items():
            if (given := getattr(layer, setting, wanted)) is not wanted and given != wanted:
                raise ValueError(
                    f"{name}.{setting} is {given!r}, and {wanted!r} is what FusedMLP computes with: it does not call "
                    "its linear layers; give it to FusedMLP where that takes it, or write the MLP out"
                )
        return layer.kernel[...], None if layer.bias is None else layer.bias[...]

"""`FusedMLP` for Flax Linen: the parameters of a hand-written MLP, computed by `fast_layers.mlp`.

Axis letters: B any number of leading dims, I input features, F hidden features, O output features.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax.linen import dtypes
from flax.linen.linear import default_kernel_init
from jaxtyping import Array, Float

from fast_layers.layers.fused_mlp_options import check_settings
from fast_layers.ops.mlp import mlp
from fast_layers.ops.mlp.problem import Save


class FusedMLP(nn.Module):
    """down(activation(up(x))), or gated down(activation(gate(x)) * up(x)), by `fast_layers.mlp`.

    The parameters are those of `nn.Dense` layers named "up", "gate" (gated only) and "down", with the same initial
    values; a hand-written MLP's checkpoint loads by renaming its layers to these.

    Attributes:
      hidden_features: F.
      out_features: O; None: the input's features.
      dropout_rate: of an `nn.Dropout` on the output. Inside, between activation and down-projection, there is none:
        the hidden activations are not kept.
      deterministic: as `nn.Dropout` takes it; must be given here or in the call if dropout_rate > 0.
      promote_dtype: as `nn.Dense` takes it; called once, with the input and all parameters.
      activation, gated, use_bias, dtype, param_dtype, precision, kernel_init, bias_init, down_kernel_init,
        down_bias_init, save, implementation: as in `fast_layers.FusedMLP`.

    Raises:
      ValueError: in a call, settings as `fast_layers.FusedMLP` refuses them, and what `fast_layers.mlp` raises.
    """

    hidden_features: int
    out_features: int | None = None
    activation: str | None = "gelu_tanh"
    gated: bool = False
    use_bias: bool = True
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Any = default_kernel_init
    bias_init: Any = nn.initializers.zeros_init()
    down_kernel_init: Any = None
    down_bias_init: Any = None
    promote_dtype: Any = dtypes.promote_dtype
    save: Save = "pre_activation"
    implementation: str | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "*B I"], deterministic: bool | None = None) -> Float[Array, "*B O"]:
        """Apply the MLP.

        Args:
          x: [B.., I].
          deterministic: if True, no dropout; None: the attribute.

        Returns:
          [B.., O].
        """
        if jnp.ndim(x) < 1:
            raise ValueError(f"x must be [leading dims.., in_features], got shape {jnp.shape(x)}")
        in_features = jnp.shape(x)[-1]
        out_features = in_features if self.out_features is None else self.out_features
        check_settings(
            in_features=in_features,
            hidden_features=self.hidden_features,
            out_features=out_features,
            gated=self.gated,
            use_bias=self.use_bias,
            dropout_rate=self.dropout_rate,
            save=self.save,
            implementation=self.implementation,
        )
        bias_init = self.bias_init if self.use_bias else None
        down_bias_init = (self.down_bias_init or self.bias_init) if self.use_bias else None
        widening = (in_features, self.hidden_features, self.kernel_init, bias_init, self.param_dtype)
        up = _Weights(*widening, name="up")()
        gate = _Weights(*widening, name="gate")() if self.gated else (None, None)
        down = _Weights(
            self.hidden_features,
            out_features,
            self.down_kernel_init or self.kernel_init,
            down_bias_init,
            self.param_dtype,
            name="down",
        )()
        x, *weights = self.promote_dtype(x, *up, *gate, *down, dtype=self.dtype)
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
        if not self.dropout_rate:
            return out
        return nn.Dropout(self.dropout_rate, deterministic=self.deterministic, name="dropout")(out, deterministic)


class _Weights(nn.Module):
    """The parameters of an `nn.Dense`, without its product: Linen derives initial values from the module's path."""

    in_features: int
    features: int
    kernel_init: Any
    bias_init: Any
    param_dtype: Any

    @nn.compact
    def __call__(self) -> tuple[Array, Array | None]:
        kernel = self.param("kernel", self.kernel_init, (self.in_features, self.features), self.param_dtype)
        if self.bias_init is None:
            return kernel, None
        return kernel, self.param("bias", self.bias_init, (self.features,), self.param_dtype)

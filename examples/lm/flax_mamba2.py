"""Mamba-2's mixer written out in plain jax.numpy, one position after another.

B: rows. T: bytes per row. H: heads. P: channels of a head. N: state size.
"""

import jax
import jax.numpy as jnp
from jax import lax

import fast_layers


class FlaxMamba2(fast_layers.Mamba2):
    """The parameters of fast_layers.Mamba2 with none of its operations: JAX differentiates what stands here.

    For one group of heads and the defaults of the options, as the model below has them. Its memory holds the state
    [B, H, P, N] of every position.
    """

    def __call__(self, u: jax.Array, *, segment_ids: jax.Array, decode: bool = False) -> jax.Array:
        o = self.options
        assert not decode, "sampling takes fast_layers.Mamba2"
        assert o.ngroups == 1
        assert self.conv1d.bias is not None
        batch, length, _ = u.shape
        inner, state = o.d_inner, o.d_state
        z, xbc, dt = jnp.split(self.in_proj(u), [inner, 2 * inner + 2 * state], axis=-1)

        begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        taps = self.conv1d.kernel[...][:, 0].astype(xbc.dtype)
        total = self.conv1d.bias[...].astype(xbc.dtype) + taps[-1] * xbc
        hidden = jnp.zeros_like(begins)  # whether a document begins between a position and what is back of it
        for back in range(1, o.d_conv):
            hidden |= jnp.pad(begins, ((0, 0), (back - 1, 0)), constant_values=True)[:, :length]
            earlier = jnp.pad(xbc, ((0, 0), (back, 0), (0, 0)))[:, :length]
            total += taps[-1 - back] * jnp.where(hidden[..., None], 0, earlier)
        x, b, c = jnp.split(jax.nn.silu(total).astype(jnp.float32), [inner, inner + state], axis=-1)
        x = x.reshape(batch, length, o.heads, o.headdim)
        dt = jax.nn.softplus(dt.astype(jnp.float32) + self.dt_bias[...])
        decay = jnp.exp(-dt * jnp.exp(self.A_log[...]))

        def step(h, at):
            x, b, c, dt, decay, begins = at
            h = jnp.where(begins[:, None, None, None], 0, h * decay[..., None, None])
            h += (dt[..., None] * x)[..., None] * b[:, None, None, :]
            return h, jnp.einsum("bhpn,bn->bhp", h, c)

        start = jnp.zeros((batch, o.heads, o.headdim, state))
        by_position = jax.tree.map(lambda a: a.swapaxes(0, 1), (x, b, c, dt, decay, begins))
        _, y = lax.scan(step, start, by_position)
        y = y.swapaxes(0, 1) + self.D[...][:, None] * x
        gated = y.reshape(batch, length, inner) * jax.nn.silu(z.astype(jnp.float32))
        return self.out_proj(self.norm(gated).astype(u.dtype))

"""Mamba-2 in float64 numpy, one position at a time, on tensors of mamba_ssm's names and shapes.

Written from the paper and the published parameter list, not from this package. B examples, L positions, H heads, P
channels of a head, G groups, N state size.
"""

from __future__ import annotations

import numpy as np


def silu(x):
    return x / (1 + np.exp(-x))


def softplus(x):
    return np.logaddexp(0, x)


def rms_norm(x, weight, groups=1, eps=1e-5):
    parts = x.reshape(*x.shape[:-1], groups, -1)
    parts = parts / np.sqrt((parts**2).mean(-1, keepdims=True) + eps)
    return parts.reshape(x.shape) * weight


def linear(tensors, name, x):
    y = x @ tensors[f"{name}.weight"].T
    return y + tensors[f"{name}.bias"] if f"{name}.bias" in tensors else y


def mixer(
    tensors,
    u,
    *,
    headdim,
    d_state,
    ngroups=1,
    d_ssm=None,
    norm_before_gate=False,
    dt_limit=(0.0, float("inf")),
    documents=None,
):
    """[B, L, d_model] to the same. `documents` [B, L]: whatever crosses a change of number starts anew."""
    t = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
    u = np.asarray(u, np.float64)
    batch, length, _ = u.shape
    documents = np.zeros((batch, length)) if documents is None else np.asarray(documents)
    d_inner = t["out_proj.weight"].shape[1]
    d_ssm = d_inner if d_ssm is None else d_ssm
    heads, d_mlp = d_ssm // headdim, d_inner - d_ssm
    state_width = ngroups * d_state

    sizes = (d_mlp, d_mlp, d_ssm, d_ssm + 2 * state_width, heads)
    z0, x0, z, xbc, dt = np.split(linear(t, "in_proj", u), np.cumsum(sizes)[:-1], axis=-1)
    weight, bias = t["conv1d.weight"][:, 0], t.get("conv1d.bias", 0.0)
    width = weight.shape[1]
    dt = np.clip(softplus(dt + t["dt_bias"]), *dt_limit)
    A = -np.exp(t["A_log"])

    y = np.zeros((batch, length, heads, headdim))
    for b in range(batch):
        state = np.zeros((heads, headdim, d_state))
        for i in range(length):
            total = np.zeros(xbc.shape[-1])
            for back in range(width):
                j = i - back
                if j < 0 or len(set(documents[b, j : i + 1])) > 1:
                    break
                total += weight[:, width - 1 - back] * xbc[b, j]
            x, B, C = np.split(silu(total + bias), [d_ssm, d_ssm + state_width])
            x = x.reshape(heads, headdim)
            B, C = (np.repeat(v.reshape(ngroups, d_state), heads // ngroups, axis=0) for v in (B, C))
            if i and documents[b, i] != documents[b, i - 1]:
                state = np.zeros_like(state)
            decay = np.exp(dt[b, i] * A)
            state = decay[:, None, None] * state + (dt[b, i][:, None] * x)[:, :, None] * B[:, None, :]
            D = t["D"].reshape(heads, -1)
            y[b, i] = (state * C[:, None, :]).sum(-1) + D * x
    y = y.reshape(batch, length, d_ssm)
    if "norm.weight" in t:
        if norm_before_gate:
            y = rms_norm(y, t["norm.weight"], ngroups) * silu(z)
        else:
            y = rms_norm(y * silu(z), t["norm.weight"], ngroups)
    else:
        y = y * silu(z)
    if d_mlp:
        y = np.concatenate([silu(z0) * x0, y], -1)
    return linear(t, "out_proj", y)


def language_model(tensors, tokens, *, n_layer, **mixer_options):
    """Logits [B, L, rows of the embedding], the head tied unless there is one."""
    t = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
    embedding = next(t[name] for name in ("backbone.embedding.weight", "backbone.embeddings.weight") if name in t)
    x = embedding[tokens]
    for i in range(n_layer):
        prefix = f"backbone.layers.{i}."
        own = {name.removeprefix(prefix + "mixer."): v for name, v in t.items() if name.startswith(prefix + "mixer.")}
        x = x + mixer(own, rms_norm(x, t[prefix + "norm.weight"]), **mixer_options)
    head = t.get("lm_head.weight", embedding)
    return rms_norm(x, t["backbone.norm_f.weight"]) @ head.T

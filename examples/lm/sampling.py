"""Continues a prompt byte by byte, with the caches of attention and the states of Mamba-2."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from . import model
from .config import Config


def sample(config: Config, params: nnx.State, prompt: bytes, length: int, temperature: float) -> bytes:
    """Draws length bytes after a prompt. A temperature of 0 takes the likeliest byte each time."""
    # Flax's layer rotates cached keys anew with positions of the query, so only FlashMHA decodes with rotary
    # embedding, and the written-out Mamba-2 keeps no state. Ours hold the same parameter tree, whichever trained it.
    config = dataclasses.replace(config, attention="flash", mamba="fused")
    graphdef = nnx.split(nnx.eval_shape(lambda: model.create(config)), nnx.Param)[0]
    decoder = nnx.merge(graphdef, jax.device_put(params, jax.devices()[0]))
    decoder.init_cache(1, len(prompt) + length)
    graphdef, params, cache = nnx.split(decoder, nnx.Param, nnx.Cache)

    @functools.partial(jax.jit, donate_argnums=1)
    def next_byte(params, cache, tokens, key):
        decoder = nnx.merge(graphdef, params, cache)
        logits = decoder(tokens, decode=True)[0, -1]
        greedy = temperature == 0
        token = jnp.argmax(logits) if greedy else jax.random.categorical(key, logits / temperature)
        return nnx.state(decoder, nnx.Cache), token[None, None]

    tokens = jnp.asarray(np.frombuffer(prompt, np.uint8), jnp.int32)[None]  # the whole prompt at once, then one by one
    text = []
    for key in jax.random.split(jax.random.key(config.seed), length):
        cache, tokens = next_byte(params, cache, tokens, key)
        text.append(tokens)
    return bytes(int(token[0, 0]) for token in text)


def printable(text: bytes) -> str:
    """Text that is safe on a terminal: a replacement character for what is not UTF-8 or not printable."""
    decoded = text.decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in decoded)

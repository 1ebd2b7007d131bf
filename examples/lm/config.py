"""What a run is made of: model, optimisation and data, in one frozen object that rejects itself."""

import dataclasses
import math
from typing import Any

import jax

VOCAB = 256  # a token is a byte


class UserError(ValueError):
    """A mistake in the command line, the data or the output directory: shown as one line."""


def _option(default: Any, help: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help})


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that decides a run's losses. The defaults are the preset cpu-small."""

    preset: str = _option("cpu-small", "sizes to start from; any other flag overrides its entry")
    arch: str = _option("transformer", "attention in all blocks, Mamba-2 in all, or mostly Mamba-2 (hybrid)")
    layers: int = _option(4, "blocks")
    width: int = _option(128, "features of the residual stream")
    heads: int = _option(4, "query heads")
    kv_heads: int = _option(2, "key and value heads, shared by heads / kv-heads query heads each")
    mlp_width: int = _option(384, "hidden features of the gated MLP")
    ssm_state: int = _option(64, "numbers that each channel of a Mamba-2 head remembers")
    ssm_head_dim: int = _option(64, "channels of a Mamba-2 head; there are twice the width in all")
    seq_len: int = _option(256, "bytes per row")
    batch_size: int = _option(16, "rows per step, over all devices and micro-batches")
    accumulate: int = _option(1, "micro-batches per step, whose gradients are summed")
    steps: int = _option(160, "optimiser steps; the learning-rate schedule ends here")
    learning_rate: float = _option(4e-3, "peak learning rate")
    warmup: float = _option(0.1, "fraction of the steps with rising learning rate")
    weight_decay: float = _option(0.1, "AdamW's decay, of matrices only")
    clip_norm: float = _option(1.0, "global gradient norm above which gradients are scaled down")
    dtype: str = _option("float32", "dtype of the computation, bfloat16 on a GPU if not given; parameters in float32")
    remat: bool = _option(False, "recompute each block in the backward pass instead of storing it")
    attention: str = _option("flash", "fast_layers.FlashMHA, or Flax's own layer with a dense mask")
    mamba: str = _option("fused", "fast_layers.Mamba2, or the same layer written out in Flax")
    mlp: str = _option("fused", "fast_layers.FusedMLP, or the same MLP of Flax's linear layers")
    seed: int = _option(0, "seed of the initial parameters and of the order of the data")
    data: str | None = _option(None, "a file or folder of text (default: Python's standard library)")
    max_bytes: int = _option(2**24, "read no more text than this; 0 reads everything")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    def __post_init__(self):
        for name in [
            "layers",
            "width",
            "heads",
            "kv_heads",
            "mlp_width",
            "ssm_state",
            "ssm_head_dim",
            "batch_size",
            "accumulate",
            "steps",
        ]:
            if getattr(self, name) < 1:
                raise UserError(f"{_shown(self, name)}: must be at least 1")
        if self.seq_len < 2:
            raise UserError(f"{_shown(self, 'seq_len')}: a row needs at least 2 bytes to predict one from another")
        for whole, parts in (("width", "heads"), ("heads", "kv_heads"), ("batch_size", "accumulate")):
            if getattr(self, whole) % getattr(self, parts):
                raise UserError(f"{_shown(self, whole)} is not divisible by {_shown(self, parts)}; change either")
        if self.head_dim % 2:
            raise UserError(
                f"{_shown(self, 'width')} / {_shown(self, 'heads')} gives heads of {self.head_dim} features, "
                "but rotary embedding turns pairs; change either so that it is even"
            )
        if self.arch != "transformer" and 2 * self.width % self.ssm_head_dim:
            raise UserError(
                f"twice {_shown(self, 'width')} is not divisible by {_shown(self, 'ssm_head_dim')}; change either"
            )
        for name in ("learning_rate", "clip_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{_shown(self, name)}: must be a positive number")
        if not 0 <= self.weight_decay < math.inf:
            raise UserError(f"{_shown(self, 'weight_decay')}: must be a number, 0 or more")
        if not 0 <= self.warmup < 1:
            raise UserError(f"{_shown(self, 'warmup')}: must be a fraction, at least 0 and below 1")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"{_shown(self, 'seed')}: must be at least 0 and below 2**32")
        if self.max_bytes < 0:
            raise UserError(f"{_shown(self, 'max_bytes')}: must be 0 (no limit) or more")


def _shown(config: Config, name: str) -> str:
    return f"{flag(name)} {getattr(config, name)}"


def flag(name: str) -> str:
    """The command-line flag of a Config field."""
    return "--" + name.replace("_", "-")


# Named by their parameter count. All GPU presets compute in bfloat16 and keep parameters in float32.
_GPU = {"seq_len": 2048, "dtype": "bfloat16", "remat": True, "max_bytes": 0}
PRESETS: dict[str, dict[str, Any]] = {
    "cpu-small": {},
    "125M": _GPU
    | {"layers": 14, "width": 768, "heads": 12, "kv_heads": 4, "mlp_width": 3072}
    | {"batch_size": 64, "accumulate": 2, "steps": 4000, "learning_rate": 6e-4},
    "350M": _GPU
    | {"layers": 24, "width": 1024, "heads": 16, "kv_heads": 4, "mlp_width": 4096}
    | {"batch_size": 128, "accumulate": 8, "steps": 6000, "learning_rate": 4e-4},
    "1B": _GPU
    | {"layers": 16, "width": 2048, "heads": 16, "kv_heads": 4, "mlp_width": 8192}
    | {"batch_size": 256, "accumulate": 16, "steps": 10_000, "learning_rate": 2.5e-4},
}
# Blocks of other architectures are of another size, so that it takes more of them for as many parameters.
_LAYERS: dict[str, dict[str, int]] = {
    "transformer": {},
    "mamba2": {"cpu-small": 4, "125M": 34, "350M": 54, "1B": 39},
    "hybrid": {"cpu-small": 4, "125M": 24, "350M": 40, "1B": 28},
}
CHOICES = {
    "preset": tuple(PRESETS),
    "arch": tuple(_LAYERS),
    "dtype": ("float32", "bfloat16"),
    "attention": ("flash", "flax"),
    "mamba": ("fused", "flax"),
    "mlp": ("fused", "flax"),
}


def from_flags(given: dict[str, Any]) -> Config:
    """The preset, overridden by the flags that were given. On a GPU the default is what its kernels take."""
    preset = given.get("preset", "cpu-small")
    layers = _LAYERS[given.get("arch", "transformer")].get(preset)
    dtype = {"dtype": "bfloat16"} if jax.default_backend() == "gpu" else {}
    sizes: dict[str, Any] = dtype | PRESETS[preset] | ({} if layers is None else {"layers": layers})
    return Config(**(sizes | given))

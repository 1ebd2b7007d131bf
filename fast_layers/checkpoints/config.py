"""What a Mamba-2 language model is made of, from and to the two kinds of config.json in use."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from fast_layers.layers.mamba2_options import Mamba2Options
from fast_layers.ops.operands import is_integer
from fast_layers.ops.static_options import check_size, flag

Layout = Literal["state-spaces", "huggingface"]
LAYOUTS: tuple[Layout, Layout] = ("state-spaces", "huggingface")

# Field: its name in Hugging Face's config.json. Their `num_heads` and `intermediate_size` follow from others.
_HUGGINGFACE = {
    "d_model": "hidden_size",
    "n_layer": "num_hidden_layers",
    "vocab_size": "vocab_size",
    "tie_embeddings": "tie_word_embeddings",
    "residual_in_fp32": "residual_in_fp32",
    "d_state": "state_size",
    "d_conv": "conv_kernel",
    "expand": "expand",
    "headdim": "head_dim",
    "ngroups": "n_groups",
    "dt_limit": "time_step_limit",
    "bias": "use_bias",
    "conv_bias": "use_conv_bias",
    "norm_eps": "layer_norm_epsilon",
}
# Fields that state-spaces keeps beside each other; the mixer's own lie in "ssm_cfg".
_STATE_SPACES = (
    "d_model",
    "n_layer",
    "vocab_size",
    "tie_embeddings",
    "residual_in_fp32",
    "pad_vocab_size_multiple",
)
_MIXER = (
    "d_state",
    "d_conv",
    "expand",
    "headdim",
    "d_ssm",
    "ngroups",
    "D_has_hdim",
    "rmsnorm",
    "norm_before_gate",
    "dt_limit",
    "bias",
    "conv_bias",
)
# Of ssm_cfg, what changes nothing of the function that is computed.
_IGNORED_MIXER = {
    "layer",
    "chunk_size",
    "use_mem_eff_path",
    "conv_init",
    "A_init_range",
    "dt_min",
    "dt_max",
    "dt_init_floor",
}
# JSON has no infinity; transformers writes {"__float__": "Infinity"}, and Python's own writer Infinity.
_TAG = "__float__"
_TAGGED = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


@dataclasses.dataclass(frozen=True)
class Mamba2LMConfig:
    """A model of `n_layer` blocks x + mixer(norm(x)) between an embedding and a head.

    Defaults are mamba_ssm's, but for the embedding's rows, which come in multiples of 16 here and of 8 there.

    `vocab_size` counts tokens in use; the embedding has rows up to the next multiple of `pad_vocab_size_multiple`.
    The mixer's fields are arguments of `fast_layers.Mamba2`; `norm_eps` is that of all norms, its own included.
    `residual_in_fp32`: the sum over blocks is float32 even where they compute in 16 bits.
    """

    d_model: int
    n_layer: int
    vocab_size: int
    pad_vocab_size_multiple: int = 16
    tie_embeddings: bool = True
    residual_in_fp32: bool = True
    norm_eps: float = 1e-5
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
    bias: bool = False
    conv_bias: bool = True

    def __post_init__(self):
        for name in ("n_layer", "vocab_size", "pad_vocab_size_multiple"):
            check_size(name, getattr(self, name))
        for field in dataclasses.fields(self):
            # Numpy's are not written to JSON.
            if is_integer(value := getattr(self, field.name)):
                object.__setattr__(self, field.name, int(value))
            elif isinstance(value, np.bool_):
                object.__setattr__(self, field.name, bool(value))
        for name in ("tie_embeddings", "residual_in_fp32", "bias", "conv_bias"):
            flag(name, getattr(self, name))
        # The options reject what no mixer has.
        object.__setattr__(self, "dt_limit", self.mixer_options.dt_limit)
        object.__setattr__(self, "norm_eps", float(self.norm_eps))

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and the head, padding included."""
        return -(-self.vocab_size // self.pad_vocab_size_multiple) * self.pad_vocab_size_multiple

    @property
    def mixer_arguments(self) -> dict[str, Any]:
        """Arguments of `fast_layers.Mamba2`."""
        return {name: getattr(self, name) for name in ("d_model", *_MIXER, "norm_eps")}

    @property
    def mixer_options(self) -> Mamba2Options:
        arguments = self.mixer_arguments
        return Mamba2Options(**{name: x for name, x in arguments.items() if name not in ("bias", "conv_bias")})

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Mamba2LMConfig:
        """From the content of a config.json of state-spaces or of Hugging Face.

        Raises ValueError for a model of another kind, and for settings that Mamba-2 here does not have.
        """
        if not isinstance(content, Mapping):
            raise ValueError(f"config.json holds a {type(content).__name__}: must be an object, of settings by name")
        content = _untagged(content)
        return _from_huggingface(content) if "model_type" in content else _from_state_spaces(content)

    def to_json(self, layout: Layout = "state-spaces") -> dict[str, Any]:
        """The content of a config.json: `from_json` gives this object back.

        Hugging Face counts all rows of the embedding as its vocabulary. Raises ValueError for what a layout does not
        have.
        """
        check_layout(layout)
        if layout == "state-spaces":
            defaults = {field.name: field.default for field in dataclasses.fields(self)}
            if self.norm_eps != defaults["norm_eps"]:
                raise ValueError(
                    f"norm_eps={self.norm_eps!r}: state-spaces' config.json does not say it, and its models have "
                    f'{defaults["norm_eps"]!r} only; take layout="huggingface"'
                )
            mixer = {name: getattr(self, name) for name in _MIXER if getattr(self, name) != defaults[name]}
            own = {name: getattr(self, name) for name in _STATE_SPACES}
            return {
                **own,
                "d_intermediate": 0,
                "ssm_cfg": {"layer": "Mamba2", **mixer},
                "attn_layer_idx": [],
                "attn_cfg": {},
                "rms_norm": True,
                "fused_add_norm": True,
            }
        fixed = {"d_ssm": None, "D_has_hdim": False, "norm_before_gate": False, "rmsnorm": True}
        for name, only in fixed.items():
            if getattr(self, name) != only:
                raise ValueError(f"{name}={getattr(self, name)!r}: Hugging Face's Mamba2 has {only!r} only")
        content = {theirs: getattr(self, ours) for ours, theirs in _HUGGINGFACE.items()}
        return {
            "model_type": "mamba2",
            "architectures": ["Mamba2ForCausalLM"],
            **content,
            "vocab_size": self.vocab_rows,
            "num_heads": self.mixer_options.heads,
            "rms_norm": True,
            "hidden_act": "silu",
        }


def _from_state_spaces(content: Mapping[str, Any]) -> Mamba2LMConfig:
    mixer = content.get("ssm_cfg", {})
    if not isinstance(mixer, Mapping):
        raise ValueError(f'config.json: ssm_cfg={mixer!r}: must be an object, with layer "Mamba2"')
    mixer = dict(mixer)
    if mixer.get("layer", "Mamba1") != "Mamba2":
        raise ValueError(f'config.json: ssm_cfg.layer is {mixer.get("layer")!r}: must be "Mamba2"')
    for name in ("d_intermediate", "attn_layer_idx"):
        if content.get(name):
            raise ValueError(f"config.json: {name}={content[name]!r}: only models of Mamba-2 blocks alone are read")
    if not content.get("rms_norm", True):
        raise ValueError("config.json: rms_norm is false: blocks with LayerNorm are not read")
    unknown = sorted(set(mixer) - set(_MIXER) - _IGNORED_MIXER)
    if unknown:
        raise ValueError(f"config.json: ssm_cfg has {', '.join(unknown)}: fast_layers.Mamba2 does not know that")
    if "dt_limit" in mixer:
        mixer["dt_limit"] = _limits("ssm_cfg.dt_limit", mixer["dt_limit"])
    own = {name: content[name] for name in _STATE_SPACES if name in content}
    # mamba_ssm's own default, where files do not say.
    own.setdefault("pad_vocab_size_multiple", 8)
    return Mamba2LMConfig(**_complete(own), **{name: mixer[name] for name in _MIXER if name in mixer})


def _from_huggingface(content: Mapping[str, Any]) -> Mamba2LMConfig:
    if content["model_type"] != "mamba2":
        raise ValueError(f'config.json: model_type is {content["model_type"]!r}: must be "mamba2"')
    if content.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"config.json: hidden_act={content['hidden_act']!r}: Mamba-2 here has silu")
    own = {ours: content[theirs] for ours, theirs in _HUGGINGFACE.items() if theirs in content}
    if "dt_limit" in own:
        own["dt_limit"] = _limits("time_step_limit", own["dt_limit"])
    # Their defaults, where those differ from mamba_ssm's; their embedding has the rows that it says.
    defaults = {"ngroups": 8, "tie_embeddings": False, "pad_vocab_size_multiple": 1}
    config = Mamba2LMConfig(**_complete({**defaults, **own}))
    heads = content.get("num_heads", config.mixer_options.heads)
    if heads != config.mixer_options.heads:
        raise ValueError(
            f"config.json: num_heads={heads!r}, but expand * hidden_size / head_dim is {config.mixer_options.heads}"
        )
    return config


def _limits(name: str, value: Any) -> tuple[float, float]:
    """(low, high) of the step sizes; null, as some writers put infinity, is no limit."""
    if value is None:
        return 0.0, math.inf
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(_is_number(limit) for limit in value):
        raise ValueError(f"config.json: {name}={value!r}: must be null or a list of two numbers, low and high")
    low, high = value
    return float(low), float(high)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _untagged(value: Any) -> Any:
    """The same with transformers' tagged floats as floats, at any depth."""
    if isinstance(value, Mapping):
        if set(value) == {_TAG} and isinstance(value[_TAG], str):
            return _TAGGED.get(value[_TAG], value)
        return {key: _untagged(x) for key, x in value.items()}
    return [_untagged(x) for x in value] if isinstance(value, list) else value


def _complete(fields: dict[str, Any]) -> dict[str, Any]:
    missing = [name for name in ("d_model", "n_layer", "vocab_size") if name not in fields]
    if missing:
        raise ValueError(f"config.json: no {', '.join(missing)}; is it the config of a Mamba-2 model?")
    return fields


def check_config(config: Mamba2LMConfig) -> None:
    if not isinstance(config, Mamba2LMConfig):
        raise ValueError(
            f"config is a {type(config).__name__}: must be a Mamba2LMConfig; Mamba2LMConfig.from_json makes one of "
            "what a config.json holds"
        )


def check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"{layout=}: must be one of {', '.join(LAYOUTS)}")

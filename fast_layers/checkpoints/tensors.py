"""Published names and shapes of a Mamba-2 language model's tensors, and their way to and from parameters of ours.

PyTorch keeps a linear layer's weight as [out, in] where Flax has [in, out], and a depthwise convolution's as
[channels, 1, taps] where Flax has [taps, 1, channels]. Nothing else changes: values go through bit by bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from fast_layers.checkpoints.config import Layout, Mamba2LMConfig, check_config, check_layout
from fast_layers.ops.operands import is_wide_float

EMBEDDING_NAMES = {"state-spaces": "backbone.embedding.weight", "huggingface": "backbone.embeddings.weight"}
HEAD_NAME = "lm_head.weight"


def _same(x: np.ndarray) -> np.ndarray:
    return x


def _reversed(x: np.ndarray) -> np.ndarray:
    """All axes in the other order: its own inverse."""
    return x.transpose()


@dataclasses.dataclass(frozen=True)
class _Entry:
    """One tensor: its published name and shape, where its values stand with us, and the way there and back."""

    name: str
    shape: tuple[int, ...]
    path: tuple[str | int, ...]
    turn: Callable[[np.ndarray], np.ndarray] = _same


def _entries(config: Mamba2LMConfig, layout: Layout) -> Iterator[_Entry]:
    """All tensors but a tied head."""
    c, o = config, config.mixer_options
    yield _Entry(EMBEDDING_NAMES[layout], (c.vocab_rows, c.d_model), ("embed", "embedding"))
    for i in range(c.n_layer):
        block, layer = f"backbone.layers.{i}", ("layers", i)
        mixer, ours = f"{block}.mixer", (*layer, "mixer")
        yield _Entry(f"{block}.norm.weight", (c.d_model,), (*layer, "norm", "scale"))
        for name, features_in, features_out in (
            ("in_proj", c.d_model, sum(o.projections)),
            ("out_proj", o.d_inner, c.d_model),
        ):
            shape = (features_out, features_in)
            yield _Entry(f"{mixer}.{name}.weight", shape, (*ours, name, "kernel"), _reversed)
            if c.bias:
                yield _Entry(f"{mixer}.{name}.bias", (features_out,), (*ours, name, "bias"))
        taps = (o.conv_channels, 1, o.d_conv)
        yield _Entry(f"{mixer}.conv1d.weight", taps, (*ours, "conv1d", "kernel"), _reversed)
        if c.conv_bias:
            yield _Entry(f"{mixer}.conv1d.bias", (o.conv_channels,), (*ours, "conv1d", "bias"))
        for name, size in (("dt_bias", o.heads), ("A_log", o.heads), ("D", o.scanned if o.D_has_hdim else o.heads)):
            yield _Entry(f"{mixer}.{name}", (size,), (*ours, name))
        if c.rmsnorm:
            yield _Entry(f"{mixer}.norm.weight", (o.scanned,), (*ours, "norm", "scale"))
    yield _Entry("backbone.norm_f.weight", (c.d_model,), ("final_norm", "scale"))
    if not c.tie_embeddings:
        yield _Entry(HEAD_NAME, (c.vocab_rows, c.d_model), ("head", "kernel"), _reversed)


def tensor_shapes(config: Mamba2LMConfig, layout: Layout = "state-spaces") -> dict[str, tuple[int, ...]]:
    """The published names and shapes; a tied head, which files may leave out, is left out."""
    check_config(config)
    check_layout(layout)
    return {entry.name: entry.shape for entry in _entries(config, layout)}


def params_of(tensors: Mapping[str, np.ndarray], config: Mamba2LMConfig) -> dict[Any, Any]:
    """Parameters of `Mamba2LM` as nested dicts, in the tensors' dtypes.

    Args:
      tensors: {name: array}, with either spelling of the embedding. A tied head may be there if it equals the
        embedding, and the embedding may lack its padding rows, which are zeros then.

    Raises:
      ValueError: missing, unknown or wrongly shaped tensors, or such as are no floats of 16 bits at least, all of them
        named.
    """
    check_config(config)
    layout = layout_of(tensors)
    tensors = dict(tensors)
    if config.tie_embeddings and HEAD_NAME in tensors:
        head, embedding = tensors.pop(HEAD_NAME), tensors.get(EMBEDDING_NAMES[layout])
        if embedding is not None and not _same_bits(head, embedding):
            dtypes = "" if head.dtype == embedding.dtype else f" (their dtypes are {head.dtype} and {embedding.dtype})"
            raise ValueError(
                f"{HEAD_NAME} is not {EMBEDDING_NAMES[layout]}{dtypes}, though the config says that they are tied: "
                "leave it out if it is, or set tie_embeddings to false (tie_word_embeddings in Hugging Face's "
                "config.json)"
            )
    entries = list(_entries(config, layout))
    tied_names = {EMBEDDING_NAMES[layout], HEAD_NAME}
    for name in tied_names & set(tensors):
        tensors[name] = _padded(tensors[name], config)
    _check(tensors, {entry.name: entry.shape for entry in entries})
    params: dict[str | int, Any] = {}
    for entry in entries:
        *parents, last = entry.path
        place = params
        for key in parents:
            place = place.setdefault(key, {})
        place[last] = entry.turn(tensors[entry.name])
    return params


def tensors_of(
    params: Mapping[str, Any], config: Mamba2LMConfig, layout: Layout = "state-spaces"
) -> dict[str, np.ndarray]:
    """Tensors by published name from parameters as nested dicts: the inverse of `params_of`.

    A tied head is left out, as safetensors files do: two names for one tensor.

    Args:
      params: the layers' keys are ints, or strings of them, as orbax restores them.

    Raises:
      ValueError: missing or wrongly shaped parameters, or some that the layout has no place for, all of them named.
    """
    check_config(config)
    check_layout(layout)
    if not isinstance(params, Mapping):
        raise ValueError(
            f"params is a {type(params).__name__}: must be nested dicts, as nnx.to_pure_dict(nnx.state(model, "
            "nnx.Param)) gives"
        )
    given, entries = dict(_leaves(params)), list(_entries(config, layout))
    paths = [".".join(map(str, entry.path)) for entry in entries]
    if missing := [path for path in paths if path not in given]:
        raise ValueError(f"parameters are missing: {', '.join(missing)}")
    if unknown := sorted(given.keys() - set(paths)):
        tied = config.tie_embeddings and any(path.startswith("head.") for path in unknown)
        hint = "; the config says that the head is the embedding: set tie_embeddings to false" if tied else ""
        raise ValueError(
            f"there is no place for {', '.join(unknown)} in a Mamba2LM of this config: what is written would be "
            f"another model{hint}"
        )
    tensors = {
        entry.name: np.ascontiguousarray(entry.turn(np.asarray(given[path])))
        for entry, path in zip(entries, paths, strict=True)
    }
    _check(tensors, tensor_shapes(config, layout))
    return tensors


def _leaves(params: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, array) of nested dicts, but for those that are None."""
    for key, value in params.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value


def layout_of(tensors: Mapping[str, Any]) -> Layout:
    """Whose spelling the names have."""
    found: list[Layout] = [layout for layout, name in EMBEDDING_NAMES.items() if name in tensors]  # pyright: ignore
    if len(found) != 1:
        raise ValueError(
            f"there must be one of {' and '.join(EMBEDDING_NAMES.values())}, got {'both' if found else 'neither'}; "
            f"the names begin with {', '.join(sorted(tensors)[:3])}"
        )
    return found[0]


def _padded(rows: np.ndarray, config: Mamba2LMConfig) -> np.ndarray:
    if rows.ndim != 2 or rows.shape[0] != config.vocab_size:
        return rows
    return np.pad(rows, ((0, config.vocab_rows - config.vocab_size), (0, 0)))


def _check(tensors: Mapping[str, np.ndarray], wanted: Mapping[str, tuple[int, ...]]) -> None:
    problems = []
    if missing := [name for name in wanted if name not in tensors]:
        problems.append(f"missing: {', '.join(missing)}")
    if unknown := [name for name in tensors if name not in wanted]:
        problems.append(f"not part of such a model: {', '.join(unknown)}")
    for name, shape in wanted.items():
        if name in tensors and tensors[name].shape != shape:
            problems.append(f"{name} must have shape {shape}, got {tensors[name].shape}")
        if name in tensors and not is_wide_float(tensors[name].dtype):
            problems.append(f"{name} must be float16, bfloat16, float32 or float64, got {tensors[name].dtype}")
    if problems:
        raise ValueError("; ".join(problems) + ". Do the tensors and the config belong together?")


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()

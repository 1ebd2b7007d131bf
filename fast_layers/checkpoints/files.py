"""Models from and to folders with config.json and safetensors files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fast_layers.checkpoints.config import Layout, Mamba2LMConfig, check_config, check_layout
from fast_layers.checkpoints.mamba2_lm import Mamba2LM
from fast_layers.checkpoints.tensors import params_of, tensors_of

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"  # of weights in several files

_AGAIN = "download or copy it again"
_WEIGHTS = ("F64", "F32", "F16", "BF16")
"""Safetensors' names of the dtypes that weights may have: smaller ones and integers are quantised, and its NumPy reader
does not know all of them."""


def load_mamba2(
    path: str | os.PathLike[str], config: Mamba2LMConfig | None = None, *, dtype: Any = None, param_dtype: Any = None
) -> Mamba2LM:
    """A published Mamba-2 language model, of state-spaces or Hugging Face, from this machine's disk.

    Args:
      path: a folder with config.json and model.safetensors (or else model.safetensors.index.json and its parts), or
        one safetensors file.
      config: replaces config.json; needed if there is none beside the weights.
      dtype: of the computation; None: param_dtype.
      param_dtype: of the parameters, dt_bias, A_log and D excepted, which are float32 at least; None: each as in the
        file, bit for bit.

    Raises:
      FileNotFoundError: no such folder or file; nothing is downloaded.
      ImportError: the package safetensors is not installed.
      ValueError: tensors or settings that are not those of such a model, or damaged files.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: there is no such folder or file on this machine, and nothing is downloaded; do that first, e.g. "
            "with huggingface_hub.snapshot_download(name), which returns the folder"
        )
    if config is None:
        folder = path if path.is_dir() else path.parent
        if not (folder / CONFIG).is_file():
            raise FileNotFoundError(f"{folder / CONFIG} is not there: pass config=Mamba2LMConfig(...)")
        config = Mamba2LMConfig.from_json(_json(folder / CONFIG))
    check_config(config)
    tensors = _read(path)
    doubles = [name for name, x in tensors.items() if x.dtype == np.float64]
    if doubles and param_dtype is None and not jax.config.read("jax_enable_x64"):
        raise ValueError(
            f"{path}: {doubles[0]} is float64, which JAX has with jax_enable_x64 alone: set that, or pass "
            "param_dtype=jnp.float32"
        )
    params = params_of(tensors, config)
    own_dtype = params["embed"]["embedding"].dtype if param_dtype is None else param_dtype
    model = nnx.eval_shape(lambda: Mamba2LM(config, dtype=dtype, param_dtype=own_dtype, rngs=nnx.Rngs(0)))
    state = nnx.state(model, nnx.Param)

    def place(like: jax.ShapeDtypeStruct, array: np.ndarray) -> jax.Array:
        return jnp.asarray(array, None if param_dtype is None else like.dtype)

    nnx.replace_by_pure_dict(state, jax.tree.map(place, nnx.to_pure_dict(state), params))
    nnx.update(model, state)
    return model


def save_mamba2(model: Mamba2LM, folder: str | os.PathLike[str], layout: Layout = "state-spaces") -> None:
    """Writes config.json and model.safetensors, with names of "state-spaces" or "huggingface".

    The parameters are written in their own dtypes. A tied head is written once, as the embedding. A model that the
    folder holds already is replaced: each file at once, when both are written in full, and an index of weights in
    several files is deleted with the parts that it names.

    Raises:
      ImportError: the package safetensors is not installed.
      ValueError: what is no Mamba2LM, or has parameters that its config does not (adapters, biases, another head);
        settings that the layout does not have; or an index that is none. Nothing is written then.
    """
    if not isinstance(model, Mamba2LM):
        raise ValueError(
            f"model is a {type(model).__name__}: must be a Mamba2LM, as load_mamba2 returns; tensors_of gives the "
            "tensors of parameters in nested dicts"
        )
    check_layout(layout)
    content = model.config.to_json(layout)
    tensors = tensors_of(nnx.to_pure_dict(nnx.state(model, nnx.Param)), model.config, layout)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    stale = _parts(folder, way_out="delete it, or save into another folder")
    partial = {name: folder / f"{name}.partial" for name in (WEIGHTS, CONFIG)}
    try:
        _safetensors().numpy.save_file(tensors, partial[WEIGHTS], metadata={"format": "pt"})
        partial[CONFIG].write_text(json.dumps(content, indent=2) + "\n")
        for name, file in partial.items():
            file.replace(folder / name)
    finally:
        for file in partial.values():
            file.unlink(missing_ok=True)
    (folder / INDEX).unlink(missing_ok=True)
    for name in stale:
        # The index is a file that anyone may have written: nothing outside the folder, and nothing but weights.
        if Path(name).name == name and name.endswith(".safetensors") and name != WEIGHTS:
            (folder / name).unlink(missing_ok=True)


def _read(path: Path) -> dict[str, np.ndarray]:
    if path.is_file():
        files = [path]
    else:
        # The whole before the parts, as others read: an index beside it may be of an older model.
        parts = [] if (path / WEIGHTS).is_file() else _parts(path)
        if missing := [name for name in parts if not (path / name).is_file()]:
            raise FileNotFoundError(
                f"{path / missing[0]} is not there, which {INDEX} lists ({len(missing)} of {len(parts)} parts are "
                "missing): download it"
            )
        files = [path / name for name in parts or [WEIGHTS]]
    tensors: dict[str, np.ndarray] = {}
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(
                f"{file} is not there; a pytorch_model.bin becomes one with torch.load and safetensors.torch.save_file"
            )
        safetensors = _safetensors()
        try:
            with safetensors.safe_open(file, "numpy") as content:
                names = content.keys()
                _check_dtypes(file, {name: content.get_slice(name).get_dtype() for name in names})
            found = safetensors.numpy.load_file(file)
        except safetensors.SafetensorError as error:
            raise ValueError(
                f"{file} is damaged or no safetensors file ({error}): {_AGAIN}; of a "
                "pytorch_model.bin torch.load and safetensors.torch.save_file make one"
            ) from error
        if twice := sorted(tensors.keys() & found.keys()):
            raise ValueError(f"{file}: {twice[0]} is in a part before it, too: the parts are not of one model")
        tensors |= found
    return tensors


def _check_dtypes(file: Path, dtypes: dict[str, str]) -> None:
    for name, dtype in dtypes.items():
        if dtype not in _WEIGHTS:
            raise ValueError(
                f"{file}: {name} is of dtype {dtype}: must be float32, float16, bfloat16 or float64; write the "
                "checkpoint anew with tensor.to(torch.bfloat16), times the scale that stands beside it if there is one"
            )


def _parts(folder: Path, *, way_out: str = _AGAIN) -> list[str]:
    """Names of the files that the index lists; none without an index."""
    if not (folder / INDEX).is_file():
        return []
    content = _json(folder / INDEX, way_out=way_out)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{folder / INDEX}: must be an object with weight_map, the file of each tensor: {way_out}")
    if not weight_map and not (folder / WEIGHTS).is_file():
        raise ValueError(f"{folder / INDEX}: its weight_map names no tensors: {way_out}")
    return sorted(set(weight_map.values()))


def _json(file: Path, *, way_out: str = _AGAIN) -> Any:
    try:
        return json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is damaged or no JSON ({error}): {way_out}") from error


def _safetensors() -> ModuleType:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            "reading and writing checkpoints needs the package safetensors: pip install fast-layers[checkpoints]"
        ) from error
    return safetensors

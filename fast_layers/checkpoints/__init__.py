"""Published checkpoints, to and from safetensors files; not imported by `import fast_layers`.

    from fast_layers import checkpoints
    model = checkpoints.load_mamba2("mamba2-130m")     # a folder with config.json and model.safetensors
    logits = model(tokens)

Needs the package safetensors, 0.8 or newer (`pip install fast-layers[checkpoints]`).
"""

from fast_layers.checkpoints.config import Mamba2LMConfig as Mamba2LMConfig
from fast_layers.checkpoints.files import load_mamba2 as load_mamba2
from fast_layers.checkpoints.files import save_mamba2 as save_mamba2
from fast_layers.checkpoints.mamba2_lm import Mamba2LM as Mamba2LM
from fast_layers.checkpoints.tensors import params_of as params_of
from fast_layers.checkpoints.tensors import tensor_shapes as tensor_shapes
from fast_layers.checkpoints.tensors import tensors_of as tensors_of

__all__ = [
    "Mamba2LM",
    "Mamba2LMConfig",
    "load_mamba2",
    "params_of",
    "save_mamba2",
    "tensor_shapes",
    "tensors_of",
]

"""Compares the whole model's gradient through the layers of fast_layers with that through Flax's own."""

import dataclasses

import jax
import numpy as np
from flax import nnx
from rich.table import Table

from .config import Config
from .data import Corpus, batches
from .training import Trainer

# Norm of the difference over the norm of the reference, per group. Both sides add the same float32 products
# in different orders. The rounding of a sum of n terms grows as sqrt(n) * 2**-24, which is 6e-6 for the 10**4
# terms that meet in an entry. Mistakes are far above: a dropped term or a wrong mask shows in the first
# digits, a bfloat16 in the third.
LIMIT = 1e-5
_LAYERS = {
    "ours": {"attention": "flash", "mamba": "fused", "mlp": "fused"},
    "flax": {"attention": "flax", "mamba": "flax", "mlp": "flax"},
}


@dataclasses.dataclass(frozen=True)
class GroupError:
    group: str
    max_abs: float
    relative: float

    @property
    def ok(self) -> bool:
        return self.relative <= LIMIT  # nan is not


def packed_batch(config: Config, corpus: Corpus) -> dict[str, np.ndarray]:
    """A batch of the ends of documents, cut so that three share a row and leave padding: wrong masks show."""
    length = max(2, 2 * config.seq_len // 7)
    ends = [document[-length:] for document in corpus.documents]
    return next(batches(Corpus(ends, corpus.source), config))


def gradient_errors(config: Config, batch: dict[str, np.ndarray]) -> list[GroupError]:
    """The error of each parameter group on one batch, in float32 at full precision.

    Raises AssertionError if the two models do not start from the same parameters.
    """
    params: dict[str, dict[str, np.ndarray]] = {}
    grads: dict[str, dict[str, np.ndarray]] = {}
    with jax.default_matmul_precision("highest"):
        for whose, layers in _LAYERS.items():
            trainer = Trainer(dataclasses.replace(config, **layers, dtype="float32"))
            state = trainer.initial_state()
            _, gradient = jax.jit(trainer.loss_and_grads)(state.params, trainer.put(batch))
            params[whose], grads[whose] = _by_path(state.params), _by_path(gradient)
    assert params["ours"].keys() == params["flax"].keys(), "the parameter trees differ"
    for path, value in params["flax"].items():
        assert np.array_equal(params["ours"][path], value), f"initial values of {path} differ"

    groups: dict[str, list[str]] = {}
    for path in grads["flax"]:
        groups.setdefault(_group(path), []).append(path)
    return [_error(group, grads["ours"], grads["flax"], paths) for group, paths in groups.items()]


def _by_path(state: nnx.State) -> dict[str, np.ndarray]:
    return {"/".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(state)}


def _group(path: str) -> str:
    """The parameter group of a path such as blocks/0/attention/query/kernel."""
    names = path.split("/")
    for layer in ("attention", "mamba"):
        if layer in names:
            return f"{layer} {names[names.index(layer) + 1]}"
    if any(name.endswith("norm") for name in names):
        return "norms"
    return "mlp" if "mlp" in names else names[0]


def _error(group: str, got: dict[str, np.ndarray], want: dict[str, np.ndarray], paths: list[str]) -> GroupError:
    differences = np.concatenate([np.ravel(got[path] - want[path]) for path in paths]).astype(np.float64)
    reference = np.concatenate([np.ravel(want[path]) for path in paths]).astype(np.float64)
    relative = np.linalg.norm(differences) / np.linalg.norm(reference)
    return GroupError(group, float(np.abs(differences).max()), float(relative))


def table(errors: list[GroupError], batch: dict[str, np.ndarray]) -> Table:
    rows, length = batch["tokens"].shape
    segments = int(sum(len(set(row[row >= 0])) for row in batch["segment_ids"]))
    title = f"Gradient of fast_layers against Flax\n{rows} rows of {length} bytes, {segments} segments, float32"
    out = Table(title=title)
    for heading in ("parameters", "max abs error", "relative error", "limit", "ok"):
        out.add_column(heading, justify="left" if heading == "parameters" else "right")
    for e in errors:
        out.add_row(e.group, f"{e.max_abs:.1e}", f"{e.relative:.1e}", f"{LIMIT:.0e}", "yes" if e.ok else "NO")
    return out

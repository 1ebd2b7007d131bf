"""Compares the whole model's gradient through the layers of fast_layers with that through Flax's own."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.table import Table

import fast_layers
from fast_layers.testing import closeness

from .config import Config
from .data import Corpus, batches
from .training import Trainer

# Norm of the difference over the norm of the reference, per group. Both sides add the same float32 products
# in different orders. The rounding of a sum of n terms grows as sqrt(n) * 2**-24, which is 6e-6 for the 10**4
# terms that meet in an entry. Mistakes are far above: a dropped term or a wrong mask shows in the first
# digits, a bfloat16 in the third.
LIMIT = 1e-5
# Rounding in a narrower dtype is luck, of which groups of few numbers have most: a failure is judged again over
# this many batches together.
_BATCHES_AGAIN = 4
Gradient = dict[str, np.ndarray]
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


@dataclasses.dataclass(frozen=True)
class RoundingError:
    """Of our gradient in the dtype of the run, beside Flax's own in that dtype; both against Flax's in float32."""

    group: str
    flax: float  # greatest error of an entry
    verdict: closeness.Verdict


def packed_batches(config: Config, corpus: Corpus) -> Iterator[dict[str, np.ndarray]]:
    """Batches of the ends of documents, cut so that three share a row and leave padding: wrong masks show."""
    length = max(2, 2 * config.seq_len // 7)
    ends = [document[-length:] for document in corpus.documents]
    return batches(Corpus(ends, corpus.source), config)


def gradient_errors(config: Config, batch: dict[str, np.ndarray]) -> list[GroupError]:
    """The error of each parameter group on one batch, in float32 at full precision.

    Raises AssertionError if the two models do not start from the same parameters.
    """
    params: dict[str, dict[str, np.ndarray]] = {}
    grads: dict[str, Gradient] = {}
    for whose in _LAYERS:
        initial, gradient_of = _differentiated(config, whose, "float32")
        params[whose], grads[whose] = _by_path(initial), gradient_of(batch)
    assert params["ours"].keys() == params["flax"].keys(), "the parameter trees differ"
    for path, value in params["flax"].items():
        assert np.array_equal(params["ours"][path], value), f"initial values of {path} differ"

    return [_error(group, grads["ours"], grads["flax"], paths) for group, paths in _groups(grads["flax"]).items()]


def rounding_errors(config: Config, batches: Iterator[dict[str, np.ndarray]]) -> list[RoundingError]:
    """The error of each parameter group in the run's own dtype, by the rule of fast_layers.testing.closeness:
    Flax's gradient in float32 is the oracle, Flax's in that dtype the yardstick."""
    _, ours = _differentiated(config, "ours", config.dtype)
    _, oracle = _differentiated(config, "flax", "float32")
    _, yardstick = _differentiated(config, "flax", config.dtype)

    made: list[tuple[Gradient, Gradient, Gradient]] = []

    def judged(draws: int) -> list[RoundingError]:
        made.extend((ours(batch), oracle(batch), yardstick(batch)) for batch in itertools.islice(batches, draws))
        return [_rounding_error(group, made, paths, config.dtype) for group, paths in _groups(made[0][1]).items()]

    errors = judged(1)
    return errors if all(error.verdict.ok for error in errors) else judged(_BATCHES_AGAIN - 1)


def _differentiated(
    config: Config, whose: str, dtype: str
) -> tuple[nnx.State, Callable[[dict[str, np.ndarray]], Gradient]]:
    """The initial parameters, and their gradient as a function of a batch; float32 is at full precision."""
    trainer = Trainer(dataclasses.replace(config, **_LAYERS[whose], dtype=dtype))
    params = trainer.initial_state().params
    compute = jax.jit(trainer.loss_and_grads)

    def gradient_of(batch: dict[str, np.ndarray]) -> Gradient:
        with jax.default_matmul_precision("highest" if dtype == "float32" else None):
            return _by_path(compute(params, trainer.put(batch))[1])

    return params, gradient_of


def backends(config: Config, batch: dict[str, np.ndarray]) -> fast_layers.Explanation:
    """Which backends our gradient in the run's own dtype takes, and why not others."""
    trainer = Trainer(dataclasses.replace(config, **_LAYERS["ours"]))
    return fast_layers.explain(trainer.loss_and_grads, trainer.abstract_state().params, trainer.put(batch))


def _groups(gradient: Gradient) -> dict[str, list[str]]:
    """The paths of each parameter group."""
    groups: dict[str, list[str]] = {}
    for path in gradient:
        groups.setdefault(_group(path), []).append(path)
    return groups


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


def _rounding_error(
    group: str, made: list[tuple[Gradient, Gradient, Gradient]], paths: list[str], dtype: str
) -> RoundingError:
    ours, oracle, yardstick = (
        np.concatenate([np.ravel(gradient[path]) for gradient in gradients for path in paths])
        for gradients in zip(*made, strict=True)
    )
    narrow = jnp.dtype(dtype)  # the gradient of float32 parameters is kept in float32, but no better than this
    verdict = closeness.judge(ours.astype(narrow), oracle, yardstick.astype(narrow), name=group)
    return RoundingError(group, float(np.abs(yardstick - oracle).max()), verdict)


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


def rounding_table(errors: list[RoundingError], dtype: str) -> Table:
    out = Table(title=f"Both in {dtype} against Flax in float32\nlimit: {closeness.FACTOR} x Flax's error + 1 ulp")
    for heading in ("parameters", "max abs error", "Flax's", "limit", "ok"):
        out.add_column(heading, justify="left" if heading == "parameters" else "right")
    for e in errors:
        error, limit = (f"{x:.1e}" if x is not None else "-" for x in (e.verdict.error, e.verdict.limit))
        out.add_row(e.group, error, f"{e.flax:.1e}", limit, "yes" if e.verdict.ok else "NO")
    return out

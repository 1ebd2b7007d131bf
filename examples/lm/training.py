"""Loss, gradients, optimiser, and the jitted training step.

A: micro-batches per step. B: rows per micro-batch, over all devices. T: bytes per row.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from . import model
from .config import Config, UserError

Batch = dict[str, Any]


class TrainState(NamedTuple):
    params: nnx.State
    opt_state: optax.OptState
    step: jax.Array  # int32: steps done


def summed_loss(graphdef: nnx.GraphDef, params: nnx.State, batch: Batch) -> jax.Array:
    """Cross-entropy in nats, summed over the predicted bytes of a micro-batch [B, T]."""
    logits = nnx.merge(graphdef, params)(batch["tokens"], batch["segment_ids"])
    targets = jnp.maximum(batch["targets"], 0)  # a missing target has weight 0; any class will do
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.sum(losses * batch["weights"])


class Trainer:
    """The training step of a Config on all devices: rows are split, parameters are replicated.

    A `mesh` of one axis, of devices or abstract, stands for other devices than those that are here.
    """

    def __init__(self, config: Config, mesh: Mesh | AbstractMesh | None = None):
        self._mesh = mesh or jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
        (self._axis,) = self._mesh.axis_names
        if config.batch_size // config.accumulate % self._mesh.size:
            raise UserError(
                f"--batch-size {config.batch_size} / --accumulate {config.accumulate} gives "
                f"{config.batch_size // config.accumulate} rows per micro-batch, not divisible by the "
                f"{self._mesh.size} devices; change either"
            )
        self.config = config
        self._replicated = NamedSharding(self._mesh, P())
        self._rows_split = NamedSharding(self._mesh, P(None, self._axis))
        self._graphdef = nnx.split(nnx.eval_shape(lambda: model.create(config)))[0]
        self._schedule = optax.warmup_cosine_decay_schedule(
            init_value=config.learning_rate / 10,
            peak_value=config.learning_rate,
            warmup_steps=int(config.warmup * config.steps),
            decay_steps=config.steps,
            end_value=config.learning_rate / 10,
        )
        self._optimizer = optax.chain(
            optax.clip_by_global_norm(config.clip_norm),
            optax.adamw(
                self._schedule,
                b2=0.95,
                weight_decay=config.weight_decay,
                mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
            ),
        )
        self._compiled: Callable[..., Any] | None = None

    def initial_state(self) -> TrainState:
        return jax.jit(self._create_state, out_shardings=self._replicated)()

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state, without computing it."""
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._replicated),
            jax.eval_shape(self._create_state),
        )

    def _create_state(self) -> TrainState:
        params = nnx.state(model.create(self.config), nnx.Param)
        return TrainState(params, self._optimizer.init(params), jnp.zeros((), jnp.int32))

    def put(self, batch: dict[str, np.ndarray]) -> Batch:
        """A host batch [A * B, T] as device arrays [A, B, T]."""
        split = {k: v.reshape(self.config.accumulate, -1, v.shape[-1]) for k, v in batch.items()}
        return jax.device_put(split, self._rows_split)

    def loss_and_grads(self, params: nnx.State, batch: Batch) -> tuple[jax.Array, nnx.State]:
        """Loss in nats per predicted byte, and its gradient, for a batch [A, B, T] whose B is spread over the
        devices.

        Sums are accumulated and divided once, so every predicted byte weighs the same, in whichever
        micro-batch and on whichever device it lies.
        """

        # Each device runs its own rows as a plain single-device program, so the kernels need no partitioning
        # rules. The check is off because it would make jax.grad sum over devices by itself, once per
        # micro-batch; once is enough.
        @functools.partial(
            jax.shard_map, mesh=self._mesh, in_specs=(P(), P(None, self._axis)), out_specs=P(), check_vma=False
        )
        def sums(params, batch):
            def add(total, micro_batch):
                one = jax.value_and_grad(functools.partial(summed_loss, self._graphdef))(params, micro_batch)
                return jax.tree.map(jnp.add, total, one), None

            zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
            return jax.lax.psum(jax.lax.scan(add, zeros, batch)[0], self._axis)

        # A batch of one-byte documents predicts nothing; its loss and gradient are 0.
        predicted = jnp.maximum(jnp.sum(batch["weights"]), 1)
        return jax.tree.map(lambda total: total / predicted, sums(params, batch))

    def compile(self, state: TrainState, batch: Batch) -> None:
        """Compiles ahead of the first step, so that no step's speed includes it."""
        step = jax.jit(self.update, donate_argnums=0, out_shardings=self._replicated)
        self._compiled = step.lower(state, batch).compile()

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """One optimiser step: the next state (the old one's memory is reused), and loss, grad_norm and lr."""
        if self._compiled is None:
            self.compile(state, batch)
        assert self._compiled is not None
        return self._compiled(state, batch)

    def update(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """What `step` compiles."""
        loss, grads = self.loss_and_grads(state.params, batch)
        updates, opt_state = self._optimizer.update(grads, state.opt_state, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        scalars = {"loss": loss, "grad_norm": optax.tree.norm(grads), "lr": self._schedule(state.step)}
        return TrainState(params, opt_state, state.step + 1), scalars

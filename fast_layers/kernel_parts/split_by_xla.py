"""Kernels under automatic sharding: XLA splits a call along those dimensions whose parts are independent.

XLA knows nothing of a kernel, and would run all of it on each device. So a call says what its dimensions are, by name:
XLA spreads its operands as those around it are spread, and each device computes its shard. What else is split comes
together before.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fast_layers._version import __version__
from fast_layers.arch import Arch, lowering_targets

Dims = tuple[str | None, ...]
"""What the dimensions of an array are; None is never split."""

_BATCH = "batch"
_CUSTOM_CALLS = "mosaic_gpu_v2", "AllocateBuffer"
"""In kernels' programs, whose versions JAX does not vouch for; here they are for this process alone."""


@dataclasses.dataclass(frozen=True)
class OfShards:
    """A kernel's pass, `kernel(problem, *operands)`.

    Or what `choose(problem, is_shard)` gives, as not all shards are for the kernel. The whole is asked for, too: JAX
    traces it, and runs it where after all nothing is split.
    """

    kernel: Callable[..., Any]
    choose: Callable[[Any, bool], Callable[..., Any]] | None = None

    def method(self, problem: Any, *, is_shard: bool) -> Callable[..., Any]:
        return self.kernel if self.choose is None else self.choose(problem, is_shard)


@dataclasses.dataclass(frozen=True)
class Split:
    """A call `method(problem, *operands)`, of whole arrays or of shards alike; equal calls are traced once.

    `of_shard(problem, *operands)` is the problem of a shard. The first operand tells over which mesh axes batch and
    heads are split. Several of its heads share one of `shared`, as query heads a key/value head: of those a device may
    have all, or the one that its heads share. A dimension of 1 stands for all, and is not split. A result without a
    dimension that is split is the sum over all shards.

    Heads are split by whole `unit`s, or not at all. But where all are one unit, and parts of it can be joined, each
    device computes `joined(problem, axes, *operands)` of its part, with the mesh axes over which the others are.
    """

    method: OfShards
    problem: Any
    of_shard: Callable[..., Any]
    operands: tuple[Dims, ...]
    """Of their leaves, in order; and of the results'."""
    results: tuple[Dims, ...]
    heads: str
    shared: str
    largest: tuple[int, ...] = ()
    """Results that are no sums: where several devices have one of `shared`, each finds the same, or no less than 0."""
    unit: int = 1
    joined: Callable[..., Any] | None = None

    @classmethod
    def of_pass(
        cls,
        dimensions: Mapping[str, Dims],
        results: Sequence[str],
        heads: str,
        shared: str,
        of_shard: Callable[..., Any],
        method: OfShards,
        problem: Any,
        *operands: Any,
        backward: bool,
    ) -> Split:
        """Of an op's forward, `method(problem, inputs, ..)`, or of its backward, whose operands begin with the inputs,
        alone or in its residuals, and end with the gradients of the `results`.

        `dimensions` of the arrays by the names of their fields; gradients without one are in the order of `results`.
        """
        leaves = jax.tree_util.tree_leaves_with_path(operands)
        of_results = [dimensions[name] for name in results]
        unnamed = iter(of_results)
        dims = []
        for path, x in leaves:
            name = getattr(path[-1], "name", None)
            dims.append((next(unnamed) if name is None else dimensions[name])[: x.ndim])
        if not backward:
            return cls(method, problem, of_shard, tuple(dims), tuple(of_results), heads, shared)
        inputs = getattr(operands[0], "inputs", operands[0])
        of_gradients = tuple(dims[: len(jax.tree.leaves(inputs))])
        return cls(method, problem, of_shard, tuple(dims), of_gradients, heads, shared)

    def run(self, *operands: Any, is_shard: bool) -> Any:
        problem = self.of_shard(self.problem, *operands)
        return self.method.method(problem, is_shard=is_shard)(problem, *operands)

    def __call__(self, *operands: Any) -> Any:
        """What `run` gives. Under `jax.vmap` it is one call on a larger batch, if nothing is shared by all of it."""
        arrays, tree = jax.tree.flatten(operands)
        shapes, out_tree = _results(self, tree, _kinds(arrays))
        whole = tuple(x.shape[0] for x, dims in zip(arrays, self.operands, strict=True) if dims[:1] == (_BATCH,))
        batch = max(whole, default=1)

        def call(*arrays: Any) -> list[Any]:
            return _split(self, tree)(*arrays)

        mapped = custom_vmap(call)

        @mapped.def_vmap
        def _vmap(axis_size, in_batched, *arrays):
            def has_batch(x, dims):
                return dims[:1] == (_BATCH,) and x.shape[0] == batch

            own_batch = [
                has_batch(x[0] if batched else x, dims)
                for x, dims, batched in zip(arrays, self.operands, in_batched, strict=True)
            ]
            sums = not all(has_batch(x, dims) for x, dims in zip(shapes, self.results, strict=True))
            if sums or any(batched and not own for batched, own in zip(in_batched, own_batch, strict=True)):
                given = [x for x, batched in zip(arrays, in_batched, strict=True) if batched]

                def one(some):
                    some = iter(some)
                    return call(*(next(some) if batched else x for x, batched in zip(arrays, in_batched, strict=True)))

                return lax.map(one, given), [True] * len(shapes)

            def fold(x, batched, own):
                if not own:
                    return x
                x = x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))
                return x.reshape(axis_size * batch, *x.shape[2:])

            folded = self(*jax.tree.unflatten(tree, map(fold, arrays, in_batched, own_batch)))
            unfolded = [x.reshape(axis_size, batch, *x.shape[1:]) for x in jax.tree.leaves(folded)]
            return unfolded, [True] * len(unfolded)

        return jax.tree.unflatten(out_tree, mapped(*arrays))


@functools.lru_cache(maxsize=4096)
def _split(call: Split, tree: Any) -> Callable[..., list[jax.Array]]:
    """Jitted, so that XLA splits it also outside of any `jax.jit`, and a model of many equal layers traces it once.

    Its name stands for all that the call is: where JAX leaves the address of `partition` out of what it knows programs
    by in its cache (`jax_remove_custom_partitioning_ptr_from_cache_key`), they would else be taken for one another.
    """
    run = _flat(call, tree, is_shard=False)

    def partition(mesh: Any, operands: Sequence[Any], results: Sequence[Any]):
        shards = _Shards.of(call, mesh, operands)

        def on_shard(*arrays: jax.Array) -> list[jax.Array]:
            arrays = tuple(map(shards.own, arrays, call.operands))
            if shards.joined is not None:
                made = jax.tree.leaves(shards.joined(*jax.tree.unflatten(tree, arrays)))
            else:
                platform = Arch.of_device(shards.mesh.devices.flat[0]).platform
                around = lowering_targets(), *_settings()
                made = _lowered(call, tree, _kinds(arrays), platform, around).call(*arrays)
            parts = enumerate(zip(made, call.results, results, strict=True))
            return [shards.together(*part, lax.pmax if i in call.largest else lax.psum) for i, part in parts]

        of_operands = tuple(shards.sharding(x.shape, dims) for x, dims in zip(operands, call.operands, strict=True))
        of_results = [shards.sharding(x.shape, dims) for x, dims in zip(results, call.results, strict=True)]
        return shards.mesh, on_shard, of_results, of_operands

    def split(*arrays: jax.Array) -> list[jax.Array]:
        parted = custom_partitioning(run)
        shapes = [x.shape for x in (*arrays, *_results(call, tree, _kinds(arrays))[0])]
        rule, whole = _rule(call, len(arrays), shapes)
        # Layouts that no mesh axes have names for come, too: half an axis over key/value heads, half over their depth.
        parted.def_partition(partition, decode_shardings=False, sharding_rule=rule, need_replication_factors=whole)
        return parted(*arrays)

    does = call.method.kernel
    dims = call.operands, call.results, call.largest, call.unit
    facts = __version__, does.__module__, does.__qualname__, call.problem, dims, tree
    split.__name__ = f"{does.__name__}_{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"
    return jax.jit(split)


def _flat(call: Split, tree: Any, *, is_shard: bool) -> Callable[..., list[jax.Array]]:
    """The call on the operands' leaves."""
    return lambda *arrays: jax.tree.leaves(call.run(*jax.tree.unflatten(tree, arrays), is_shard=is_shard))


_Kinds = tuple[tuple[tuple[int, ...], Any], ...]
"""Shape and dtype of each array."""


def _kinds(arrays: Sequence[Any]) -> _Kinds:
    return tuple((x.shape, x.dtype) for x in arrays)


@functools.lru_cache(maxsize=4096)
def _results(call: Split, tree: Any, kinds: _Kinds) -> tuple[list[jax.ShapeDtypeStruct], Any]:
    """What the call gives, as leaves, and their tree; traced once for all layers."""
    operands = jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(*kind) for kind in kinds])
    return jax.tree.flatten(jax.eval_shape(functools.partial(call.run, is_shard=False), *operands))


def _settings() -> tuple[Any, ...]:
    """Of JAX, on which depends what a program is."""
    config = jax.config
    return config.jax_enable_x64, config.jax_default_matmul_precision, config.jax_numpy_dtype_promotion


@functools.lru_cache(maxsize=4096)
def _lowered(call: Split, tree: Any, kinds: _Kinds, platform: str, around: Any) -> export.Exported:
    """A shard's program, lowered once for all layers of a model, as XLA asks for each of them.

    `around`: what else it depends on.
    """
    del around
    checks = [export.DisabledSafetyCheck.custom_call(target) for target in _CUSTOM_CALLS]
    lower = export.export(jax.jit(_flat(call, tree, is_shard=True)), platforms=[platform], disabled_checks=checks)
    return lower(*(jax.ShapeDtypeStruct(*kind) for kind in kinds))


@dataclasses.dataclass(frozen=True)
class _Shards:
    """Over which axes of a mesh the batch and the heads of a call are split."""

    mesh: Mesh
    axes: dict[str, tuple[str, ...]]
    """By dimension, the first for the largest steps."""
    call: Split
    sizes: dict[str, int]
    """Of the dimensions of all devices."""
    joins: bool
    """Whether devices have parts of one unit."""

    @classmethod
    def of(cls, call: Split, mesh: Mesh, operands: Sequence[Any]) -> _Shards:
        first, sizes = operands[0], _sizes(call, [x.shape for x in operands])
        layout = first.sharding.devices_indices_map(first.shape)
        fine = _fine_mesh(list(layout), mesh)
        axes: dict[str, tuple[str, ...]] = {}
        for dim, name in enumerate(call.operands[0]):
            if name is not None:
                starts = [index[dim].start or 0 for index in layout.values()]
                found = _axes_of(fine, np.reshape(starts, fine.devices.shape))
                axes[name] = found if sizes[name] % _product(fine, found) == 0 else ()
        shards, shared = _product(fine, axes.get(call.heads, ())), sizes.get(call.shared, 1)
        if shared % shards and shards % shared:
            axes[call.heads] = ()
        heads, joins = sizes.get(call.heads, 1), False
        if heads // shards % call.unit:
            joins = heads == call.unit and call.joined is not None
            axes[call.heads] = axes[call.heads] if joins else ()
        axes[call.shared] = axes.get(call.heads, ()) if shared % shards == 0 else ()
        return cls(fine, axes, call, sizes, joins)

    @property
    def joined(self) -> Callable[..., Any] | None:
        """Of the operands of a device that has a part of a unit."""
        if not self.joins or self.call.joined is None:
            return None
        of_part, axes = self.call.joined, self.axes[self.call.heads]
        return lambda *operands: of_part(self.call.of_shard(self.call.problem, *operands), axes, *operands)

    def sharding(self, shape: tuple[int, ...], dims: Dims) -> NamedSharding:
        return NamedSharding(self.mesh, P(*(self._of(name, n) or None for name, n in zip(dims, shape, strict=True))))

    def own(self, x: jax.Array, dims: Dims) -> jax.Array:
        """What this device takes of its operand."""
        at = self._whole_shared(dims)
        return x if at is None else lax.dynamic_slice_in_dim(x, self._own_shared, 1, at)

    def together(self, x: jax.Array, dims: Dims, whole: Any, join: Callable[..., jax.Array]) -> jax.Array:
        """A result of this device, of which each may have a part, as XLA wants it; `join` is psum or pmax."""
        split = {axis for name, n in zip(dims, whole.shape, strict=True) for axis in self._of(name, n)}
        over = tuple({axis: None for axes in self.axes.values() for axis in axes if axis not in split})
        if not over:
            return x
        exact, at = x.astype(jnp.promote_types(x.dtype, jnp.float32)), self._whole_shared(dims)
        if at is not None:
            zeros = jnp.zeros((*x.shape[:at], self.sizes[self.call.shared], *x.shape[at + 1 :]), exact.dtype)
            exact = lax.dynamic_update_slice_in_dim(zeros, exact, self._own_shared, at)
        return join(exact, over).astype(x.dtype)

    def _of(self, name: str | None, size: int) -> tuple[str, ...]:
        return () if name is None or size == 1 else self.axes.get(name, ())

    def _whole_shared(self, dims: Dims) -> int | None:
        """Which dimension has several that heads share, of which a device needs one."""
        several = self.sizes.get(self.call.shared, 1) > 1
        if several and self.axes.get(self.call.heads) and not self.axes[self.call.shared] and self.call.shared in dims:
            return dims.index(self.call.shared)
        return None

    @property
    def _own_shared(self) -> Any:
        heads, shared, axes = self.sizes[self.call.heads], self.sizes[self.call.shared], self.axes[self.call.heads]
        return lax.axis_index(axes) * (heads // _product(self.mesh, axes)) // (heads // shared)


def _product(mesh: Mesh, axes: Sequence[str]) -> int:
    return math.prod(mesh.shape[name] for name in axes)


def _fine_mesh(devices: list[Any], mesh: Mesh) -> Mesh:
    """The devices in their order, with an axis for each prime factor of the mesh's axes, or of their number.

    Its axes have names of their own, as a kernel's may be the mesh's.
    """
    primes = []
    for size in (len(devices),) if mesh.empty else mesh.devices.shape:
        rest, factor = size, 2
        while rest > 1:
            if rest % factor:
                factor += 1
            else:
                primes.append(factor)
                rest //= factor
    return Mesh(np.array(devices).reshape(primes), tuple(f"fast_layers_{i}" for i in range(len(primes))))


def _axes_of(mesh: Mesh, starts: np.ndarray) -> tuple[str, ...]:
    """Over which a dimension is split whose shards start there; none if it is not split along axes."""
    coordinates = np.indices(starts.shape)
    steps = [int(starts[tuple(unit)] - starts.flat[0]) for unit in np.eye(starts.ndim, dtype=int)]
    if not np.array_equal(np.tensordot(steps, coordinates, 1), starts):
        return ()
    split = sorted((step, name) for step, name in zip(steps, mesh.axis_names, strict=True) if step)
    return tuple(name for _, name in reversed(split))


def _sizes(call: Split, shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
    """Of the dimensions by name, as the operands have them: the largest, as 1 stands for all."""
    sizes: dict[str, int] = {}
    for dims, shape in zip(call.operands, shapes, strict=False):
        for name, size in zip(dims, shape, strict=True):
            if name is not None:
                sizes[name] = max(size, sizes.get(name, 1))
    return sizes


def _rule(call: Split, operands: int, shapes: Sequence[tuple[int, ...]]) -> tuple[str, tuple[str, ...]]:
    """Shardy's rule, and those of its factors that are whole on each device, in the order in which they come."""
    sizes, whole, parts = _sizes(call, shapes), [], []
    alike = {call.shared: call.heads} if sizes.get(call.shared) == sizes.get(call.heads) else {}
    for dims, shape in zip((*call.operands, *call.results), shapes, strict=True):
        factors = []
        for name, size in zip(dims, shape, strict=True):
            if name is None or size == 1 != sizes[name]:
                whole.append(f"whole{len(whole)}")
                factors.append(whole[-1])
            else:
                factors.append(alike.get(name, name))
        parts.append(" ".join(factors))
    return f"{', '.join(parts[:operands])} -> {', '.join(parts[operands:])}", tuple(whole)

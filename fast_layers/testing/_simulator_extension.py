"""Mosaic-GPU interpret mode, extended by what kernels of this package use and JAX does not simulate.

That is: `run_state` over an accumulator, storing to an accumulator, warpgroup matmuls with an operand in registers
and their asynchrony, TMA predicates and reductions, copies made by a cluster, matmuls of two blocks, and semaphores of
all blocks. Anything else is JAX's own. Parts of JAX that are not public are named in this package's `_simulator_*`
files only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import callback
from jax._src import core as jax_core
from jax._src.pallas import primitives
from jax._src.pallas.mosaic_gpu import primitives as mosaic
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, shared_memory
from jax._src.state import discharge
from jax._src.state import types as state_types
from jax.experimental.pallas import mosaic_gpu as plgpu

from fast_layers.testing import _simulator_machine as machine
from fast_layers.testing import _simulator_semaphores as semaphores
from fast_layers.testing import _simulator_tcgen05 as tcgen05
from fast_layers.testing import _simulator_tma as tma
from fast_layers.testing import _simulator_wgmma as wgmma


@dataclasses.dataclass(frozen=True)
class _OneEquation:
    """As much of a jaxpr as JAX's interpreter looks at."""

    eqns: list[Any]
    invars: list[Any]
    outvars: list[Any]
    constvars: list[Any] = dataclasses.field(default_factory=list)


class Interpreter(jaxpr_interpret.JaxprInterpreter):
    """One simulated thread. Handlers take (equation, token, inputs) and return the new token and a list of outputs."""

    def interpret(self, jaxpr, token, *args):
        if not any(eqn.primitive in _HANDLERS for eqn in jaxpr.eqns):
            return super().interpret(jaxpr, token, *args)
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))

        def read(var):
            return var.val if isinstance(var, jax_core.Literal) else env[var]

        for eqn in jaxpr.eqns:
            if handler := _HANDLERS.get(eqn.primitive):
                token, outputs = handler(self, eqn, token, [read(v) for v in eqn.invars])
                env.update(zip(eqn.outvars, outputs, strict=True))
                continue
            used = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, jax_core.Literal)))
            made = [v for v in eqn.outvars if not isinstance(v, jax_core.DropVar)]
            token, outputs = super().interpret(_OneEquation([eqn], used, made), token, *map(read, used))
            env.update(zip(made, outputs, strict=True))
        return token, [read(v) for v in jaxpr.outvars]

    def _interpret_tcgen05_mma_p(self, eqn, token, invals):
        return super()._interpret_tcgen05_mma_p(self._with_group(eqn), token, invals)

    def _interpret_tcgen05_commit_arrive_p(self, eqn, token, *invals, **params):
        params["collective_axis"] = self._group(params["collective_axis"])
        return super()._interpret_tcgen05_commit_arrive_p(eqn, token, *invals, **params)

    def _with_group(self, eqn):
        group = self._group(eqn.params["collective_axis"])
        return eqn.replace(params={**eqn.params, "collective_axis": group})

    def _group(self, axes) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Cluster dimensions and indices of the collective axes."""
        if not axes:
            return None
        names = (axes,) if isinstance(axes, str) else axes
        assert self.mesh is not None
        return tuple(self.cluster_dims), tuple(self.mesh.cluster_names.index(name) for name in names)


def _wgmma(interpreter, eqn, token, invals):
    acc, a, b, *flat = invals
    a_in_smem = isinstance(eqn.invars[1].aval, state_types.AbstractRef)
    trees = (eqn.params[f"{name}_transforms_tree"] for name in ("acc", "a", "b"))
    acc_transforms, a_transforms, b_transforms = _unflatten(trees, flat)
    acc, acc_transforms = jaxpr_interpret.resolve_ref(eqn.invars[0].aval, acc, acc_transforms)
    b, b_transforms = jaxpr_interpret.resolve_ref(eqn.invars[2].aval, b, b_transforms)
    if a_in_smem:
        a, a_transforms = jaxpr_interpret.resolve_ref(eqn.invars[1].aval, a, a_transforms)
    operands = {"acc": acc, "a": a, "b": b}
    transforms = {"acc_transforms": acc_transforms, "a_transforms": a_transforms, "b_transforms": b_transforms}
    multiply = functools.partial(wgmma.multiply, a_in_smem=a_in_smem)
    return machine.call_host(interpreter, eqn, multiply, token, **operands, **transforms), []


def _wgmma_wait(interpreter, eqn, token, invals):
    del invals
    wait = functools.partial(wgmma.wait, at_most=eqn.params["n"])
    return machine.call_host(interpreter, eqn, wait, token), []


def _accumulator_load(interpreter, eqn, token, invals):
    load = functools.partial(wgmma.load_accumulator, wait_n=eqn.params["wait_n"])
    token, value = machine.call_host(interpreter, eqn, load, token, eqn.outvars[0].aval, acc=invals[0])
    return token, [value]


def _accumulator_store(interpreter, eqn, token, invals):
    acc, value = invals
    return machine.call_host(interpreter, eqn, wgmma.store_accumulator, token, acc=acc, value=value), [value]


def _run_state(interpreter, eqn, token, invals):
    """Accumulators live for the body; references of the kernel that the body closes over pass through."""
    is_reference = [isinstance(v.aval, state_types.AbstractRef) for v in eqn.invars]
    keys = []
    for value, passes in zip(invals, is_reference, strict=True):
        if passes:
            keys.append(value)
            continue
        token, request = gpu_callbacks.call_make_allocation_request_array(
            token=token,
            compute_unit=interpreter.thread,
            memory_space_id=machine.REGISTERS,
            initial_ref_count=1,
        )
        token, key = gpu_callbacks.call_allocate_buffer(
            token=token,
            mesh_location=interpreter.mesh_location,
            thread=interpreter.thread,
            allocation_request_as_array=request,
            value=value,
            source_info=eqn.source_info,
        )
        keys.append(key)
    token, _ = interpreter.interpret(eqn.params["jaxpr"], token, *keys)
    outputs = []
    load = functools.partial(wgmma.load_accumulator, wait_n=0)
    for key, value, passes in zip(keys, invals, is_reference, strict=True):
        if passes:
            outputs.append(key)
            continue
        token, output = machine.call_host(interpreter, eqn, load, token, jax.typeof(value), acc=key)
        token = gpu_callbacks.call_deallocate_buffer(
            token, interpreter.mesh_location, interpreter.thread, key, eqn.source_info
        )
        outputs.append(output)
    return token, outputs


def _tma_store(interpreter, eqn, token, invals):
    src, dst, *flat = invals
    params = eqn.params
    predicate = flat.pop() if params["has_user_predicate"] else None
    reduction = params["reduction_op"]
    if reduction is not None and reduction not in tma.REDUCTIONS:
        raise NotImplementedError(
            f"reduction_op={reduction!r}: the simulator has {', '.join(tma.REDUCTIONS)}; test this kernel on a GPU"
        )
    src_transforms, dst_transforms = _unflatten(
        (params["src_transforms_treedef"], params["dst_transforms_treedef"]), flat
    )
    src, src_transforms = jaxpr_interpret.resolve_ref(eqn.invars[0].aval, src, src_transforms)
    dst, dst_transforms = jaxpr_interpret.resolve_ref(eqn.invars[1].aval, dst, dst_transforms)
    token = machine.call_host(
        interpreter,
        eqn,
        functools.partial(tma.store, reduction=reduction),
        token,
        src=src,
        src_transforms=src_transforms,
        dst=dst,
        dst_transforms=dst_transforms,
        predicate=predicate,
    )
    return token, []


def _tma_load(interpreter, eqn, token, invals):
    params = eqn.params
    if not params["has_barrier"]:
        raise NotImplementedError(
            "copy_gmem_to_smem without a barrier is for GPUs before Hopper: the simulator has none; pass a barrier"
        )
    src, dst, barrier, *flat = invals
    predicate = flat.pop() if params["has_user_predicate"] else None
    trees = [params[f"{name}_transforms_treedef"] for name in ("src", "dst", "barrier")]
    barrier_leaves = flat[trees[0].num_leaves + trees[1].num_leaves :]
    src_transforms, dst_transforms, _ = _unflatten(trees, flat)
    src, src_transforms = jaxpr_interpret.resolve_ref(eqn.invars[0].aval, src, src_transforms)
    dst, dst_transforms = jaxpr_interpret.resolve_ref(eqn.invars[1].aval, dst, dst_transforms)
    load = functools.partial(
        tma.load,
        group=interpreter._group(params["collective_axes"]),
        partition=params["leader_tracked"],
        fills=params["oob_mode"] in (None, plgpu.OOBFillMode.ZEROS),
    )
    token = machine.call_host(
        interpreter,
        eqn,
        load,
        token,
        src=src,
        src_transforms=src_transforms,
        dst=dst,
        dst_transforms=dst_transforms,
        barrier=jaxpr_interpret._get_barrier_allocation_key_from_inval(barrier, trees[2], barrier_leaves),
        predicate=predicate,
    )
    return token, []


def _inline_mgpu(interpreter, eqn, token, invals):
    """By the function's `simulated`, if it has one: of the numbers in the reference that comes first, or in another
    block's, and of the arrays behind it it makes what is returned, or of the arrays alone what is stored there."""
    fn = eqn.params["mgpu_fn"]
    simulated, block = getattr(fn, "simulated", None), getattr(fn, "simulated_block", None)
    if simulated is None:
        return interpreter._interpret_inline_mgpu_p(eqn, token, lambda: invals)
    count = eqn.params["pytree_args"].num_leaves
    ref, *arrays = invals[:count]
    transforms, *_ = jax.tree.unflatten(eqn.params["pytree_ref_transforms"], invals[count:])
    aval = eqn.invars[0].aval
    stored = [] if eqn.outvars else [simulated(*arrays)]
    numbers: Any = stored[0].aval if stored else state_types.transform_type(transforms, aval)
    ref, transforms = jaxpr_interpret.resolve_ref(aval, ref, transforms)
    if block is not None:
        ref = machine.array_in_block(ref, block)
    call = functools.partial(
        gpu_callbacks.call_swap if stored else gpu_callbacks.call_get,
        token=token,
        result_shape_and_dtype=jax.ShapeDtypeStruct(numbers.shape, numbers.dtype),
        mesh_location=interpreter.mesh_location,
        thread=interpreter.thread,
        allocation_key_as_array=ref,
        transforms=transforms,
        source_info=eqn.source_info,
    )
    if stored:
        token, _ = call(val=stored[0], mask=None)
        return token, []
    token, found = call()
    return token, [simulated(found, *arrays)]


def _get_global(interpreter, eqn, token, invals):
    """Semaphores of all blocks. What stands for them is a number, the same for all threads."""
    del interpreter, invals
    return token, [jnp.int32(id(eqn) % (1 << 31))]


def _semaphore_signal(interpreter, eqn, token, invals):
    of, transforms, value, device, core = jax.tree.unflatten(eqn.params["args_tree"], invals)
    if device is not None or core is not None:
        raise NotImplementedError("semaphore_signal to another device: the simulator has one GPU")
    return machine.call_host(interpreter, eqn, semaphores.signal, token, of=of, at=transforms, value=value), []


def _semaphore_wait(interpreter, eqn, token, invals):
    of, transforms, value, decrement = jax.tree.unflatten(eqn.params["args_tree"], invals)
    operands = {"of": of, "at": transforms, "value": value, "decrement": decrement}
    return machine.call_host(interpreter, eqn, semaphores.wait, token, **operands), []


def _unflatten(trees, leaves):
    empty = jax.tree.structure([])
    return jax.tree.unflatten(jax.tree_util.treedef_tuple([tree or empty for tree in trees]), leaves)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    discharge.run_state_p: _run_state,
    mosaic.copy_gmem_to_smem_p: _tma_load,
    mosaic.inline_mgpu_p: _inline_mgpu,
    mosaic.copy_smem_to_gmem_p: _tma_store,
    mosaic.semaphore_signal_p: _semaphore_signal,
    mosaic.semaphore_wait_p: _semaphore_wait,
    primitives.get_global_p: _get_global,
    primitives.semaphore_signal_p: _semaphore_signal,
    primitives.semaphore_wait_p: _semaphore_wait,
    mosaic.wgmma_accumulator_deref_p: _accumulator_load,
    mosaic.wgmma_accumulator_store_p: _accumulator_store,
    mosaic.wgmma_ref_p: _wgmma,
    mosaic.wgmma_wait_p: _wgmma_wait,
}


_SIMULATORS = ("jax._src.pallas.", "fast_layers.testing.")
_any_callback = callback.io_callback_impl
_any_to_int = shared_memory._to_int


def _callback(*args: Any, callback: Any, **params: Any) -> Any:
    """The simulator's own callbacks take numpy arrays; JAX gives arrays on a device, which takes most of the time."""
    fn = callback.callback_func
    while isinstance(fn, functools.partial):
        fn = fn.func
    if not fn.__module__.startswith(_SIMULATORS):
        return _any_callback(*args, callback=callback, **params)
    # Copies, as some are kept, and XLA lends its memory for the call only.
    return jax.tree.map(np.asarray, callback(*map(np.array, args)))


def _to_int(x: Any) -> Any:
    return x.item() if isinstance(x, np.ndarray | np.generic) else _any_to_int(x)


@contextlib.contextmanager
def extended_interpret_mode(findings: machine.Findings, sums_in_order: bool) -> Iterator[None]:
    """While inside, JAX's interpret mode is the extended one, and races and errors go to `findings`."""
    replacements: list[tuple[Any, str, Any]] = [
        (jaxpr_interpret, "JaxprInterpreter", Interpreter),
        (shared_memory, "GPUSharedMemory", machine.machine_reporting_to(findings, sums_in_order)),
        (gpu_callbacks, "GPURaceDetectionState", machine.races_reporting_to(findings)),
        (gpu_callbacks, "TcGen05Mma", tcgen05.TwoBlockMma),
        (gpu_callbacks, "tcgen05_mma", tcgen05.multiply),
        (gpu_callbacks, "tcgen05_commit_arrive", tcgen05.commit_arrive),
        (callback, "io_callback_impl", _callback),
        (shared_memory, "_to_int", _to_int),
        *((module, "print", findings.add_race) for module in machine.printing_modules()),
    ]
    if machine.BARRIERS_MUST_BE_DRAINED:
        replacements.append((shared_memory, "Barrier", machine.ForgivingBarrier))
    with contextlib.ExitStack() as undo:
        for module, name, replacement in replacements:
            if hasattr(module, name):
                undo.callback(setattr, module, name, getattr(module, name))
            else:
                undo.callback(delattr, module, name)
            setattr(module, name, replacement)
        yield

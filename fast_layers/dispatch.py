"""Which backend computes a call: chosen per pass, with reasons that can be read.

Every op has a tuple of `Backend`s, best first. `choose` takes the first that does not object, separately for the
forward and the backward pass; this works because the backends of an op share one residual contract. `explain`
shows the outcome for any function, `use_backends` (or the environment) steers it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from fast_layers.arch import Arch, lowering_targets
from fast_layers.kernel_parts import automatic_axes
from fast_layers.kernel_parts.manual_axes import vary_over, varying_axes
from fast_layers.kernel_parts.split_by_xla import OfShards
from fast_layers.ops.static_options import flag

Pass = Literal["forward", "backward"]
PASSES: tuple[Pass, Pass] = ("forward", "backward")


@dataclasses.dataclass(frozen=True)
class Backend:
    """One way to compute an op.

    `supports(problem, arch, pass_)` returns None, or the reason why not. `fwd` and `bwd` have the op's own
    signatures. `automatic=False` is taken only by name; so is what `by_name_only(problem, arch, pass_)` gives a reason
    for. Where it `saves(problem)`, `fwd_saving` gives (what `fwd` does, what more this backend's `bwd` has a use for).
    On the platforms in `fallback_on` a kernel is what users expect, and strict mode makes taking this backend an error.
    JAX cannot differentiate the passes of what `is_kernel`; who asks for that is told so. A kernel's
    `split(OfShards(fwd, fwd_saving or bwd), problem, *args)` lets XLA spread a pass over several devices.
    """

    name: str
    supports: Callable[[Any, Arch, Pass], str | None]
    fwd: Callable[..., Any]
    bwd: Callable[..., Any]
    saves: Callable[[Any], bool] = lambda problem: False
    fwd_saving: Callable[..., Any] | None = None
    automatic: bool = True
    by_name_only: Callable[[Any, Arch, Pass], str | None] = lambda problem, arch, pass_: None
    fallback_on: frozenset[str] = frozenset()
    is_kernel: bool = False
    split: Callable[..., Any] | None = None

    def __post_init__(self):
        _names_of_all_ops.add(self.name)

    @property
    def split_here(self) -> Callable[..., Any] | None:
        """`split`, where XLA spreads what is traced over several devices."""
        return self.split if automatic_axes.xla_splits() else None

    def refuses(self, problem: Any, arch: Arch, pass_: Pass, *, by_name: bool = False) -> str | None:
        """Why it does not take a call that asks for it by name, or (the default) that names none; None if it does."""
        if not by_name and not self.automatic:
            return f'taken only by name: implementation="{self.name}"'
        reason = self.supports(problem, arch, pass_)
        if reason is None and not by_name and (why := self.by_name_only(problem, arch, pass_)) is not None:
            return f'{why}; take it by name: implementation="{self.name}"'
        return reason


_names_of_all_ops: set[str] = set()


@dataclasses.dataclass(frozen=True)
class Choice:
    """The backend for one pass on one kind of device, or None if all refused; every refusal, and then what to do."""

    pass_: Pass
    arch: Arch
    backend: Backend | None
    refusals: tuple[tuple[str, str], ...]
    way_out: str = ""
    named: bool = False
    """Whether the backend was asked for."""
    behind: tuple[Backend, ...] = ()
    """For devices' parts of the call that it, a kernel, does not take."""

    def require(self, op: str) -> Backend:
        if self.backend is None:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.refusals)
            raise ValueError(f"{op}: no backend takes the {self.pass_} pass on {self.arch}. {reasons}. {self.way_out}")
        return self.backend


@dataclasses.dataclass(frozen=True)
class _OfAShard:
    """What computes a pass of a device's part of a call that XLA splits, or of the whole, by the problem of either."""

    op: str
    choice: Choice

    def __call__(self, problem: Any, is_shard: bool) -> Callable[..., Any]:
        arch, pass_, named, behind = self.choice.arch, self.choice.pass_, self.choice.named, self.choice.behind
        kernel = self.choice.require(self.op)
        with automatic_axes.on_a_shard():
            reason = kernel.refuses(problem, arch, pass_, by_name=named or not behind)
            others = () if named and is_shard else behind
            willing = (backend for backend in others if backend.refuses(problem, arch, pass_) is None)
            backend = kernel if reason is None else next(willing, None)
        if backend is None:
            raise ValueError(
                f"{self.op}: of the {pass_} pass XLA gives each device {problem.describe()}. {kernel.name}: {reason}. "
                "Shard it otherwise, or leave implementation=None to let fast_layers choose among all backends"
            )
        return backend.fwd if pass_ == "forward" else backend.bwd


@dataclasses.dataclass(frozen=True)
class Plan:
    """All choices for one call: per pass, one for each kind of device it may be lowered for, likeliest first."""

    op: str
    problem: Any
    forward: tuple[Choice, ...]
    backward: tuple[Choice, ...]

    def choices(self, pass_: Pass) -> tuple[Choice, ...]:
        return self.forward if pass_ == "forward" else self.backward

    def sole_backend(self, pass_: Pass) -> Backend | None:
        """The backend, if it is the same wherever the call is lowered."""
        first, *others = self.choices(pass_)
        return first.backend if all(c.backend is first.backend for c in others) else None

    @property
    def _saves(self) -> bool:
        """Whether the likeliest forward may save more, since no other backward than its own would get it."""
        backend = self.forward[0].backend
        both = zip(self.forward, self.backward, strict=True)
        own = all((forward.backend is backend) == (backward.backend is backend) for forward, backward in both)
        return own and backend is not None and backend.saves(self.problem)

    def run(self, pass_: Pass, *args: Any) -> Any:
        """Call the chosen backend's `fwd` or `bwd` as `f(problem, *args)`."""
        return self._run(pass_, lambda backend: backend.fwd if pass_ == "forward" else backend.bwd, args)

    def run_saving(self, *args: Any) -> tuple[Any, Any]:
        """(`run("forward", *args)`, what more the backward gets, or None), by `fwd_saving` where there is one.

        Where the call may be lowered for a device with another backend, that gives zeros for what more is saved.
        """
        if not self._saves:
            return self.run("forward", *args), None
        saving: Any = self.forward[0].require(self.op)
        saved: Any = None
        if self.sole_backend("forward") is None:
            of_saving = self._bound(self.forward[0], saving.fwd_saving, args)
            _, saved = jax.eval_shape(of_saving, *args)

        def method(backend: Backend):
            if backend is saving:
                return saving.fwd_saving
            zeros = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype), saved)
            return lambda *args: (backend.fwd(*args), zeros())

        return self._run("forward", method, args)

    def _run(self, pass_: Pass, method: Callable[[Backend], Callable[..., Any]], args: tuple[Any, ...]) -> Any:
        def bind(choice: Choice):
            return self._bound(choice, method(choice.require(self.op)), args)

        likeliest, *others = self.choices(pass_)
        # A device that may never be lowered for does not get to raise, nor to add a branch.
        others = [c for c in others if c.backend is not None and c.backend is not likeliest.backend]
        if not others:
            return bind(likeliest)(*args)
        branches = {c.arch.platform: bind(c) for c in others}
        return lax.platform_dependent(*args, default=bind(likeliest), **branches)

    def _bound(self, choice: Choice, method: Callable[..., Any], operands: tuple[Any, ...]) -> Callable[..., Any]:
        backend = choice.require(self.op)
        # A kernel's results have types that vary over no mesh axis, whatever its operands vary over.
        axes = frozenset().union(*map(varying_axes, jax.tree.leaves(operands)))
        # What a kernel saves for its own backward no other backend's forward gives.
        choose = None if method is backend.fwd_saving else _OfAShard(self.op, choice)

        def call(*args: Any) -> Any:
            run = method
            if backend.is_kernel:
                args = _differentiated_once(self.op, backend.name, args)
            if backend.split_here is not None:
                run = functools.partial(backend.split_here, OfShards(method, choose))
            return jax.tree.map(lambda x: vary_over(x, axes), run(self.problem, *args))

        return call


def _differentiated_once(op: str, name: str, operands: Any) -> Any:
    """The operands of a kernel's pass. The op has the rule for its first derivatives; JAX comes here for others.

    Not around the pass itself: JAX discharges no refs that stand in a function with a rule.
    """

    @jax.custom_jvp
    def guarded(operands):
        return operands

    @guarded.defjvp
    def _refuse(primals, tangents):
        raise ValueError(
            f"{op}: {name} is differentiated once, in reverse mode; a derivative of its gradient was asked for. Take "
            f'implementation="reference" for any order, in a whole model use_backends(force="reference")'
        )

    return guarded(operands)


@dataclasses.dataclass(frozen=True)
class Policy:
    """What a user asked of the choice. Part of jit's cache key, so a change retraces."""

    force: str | None = None
    forced_by: str = ""
    forbid: frozenset[str] = frozenset()
    strict: bool = False
    reproducible: bool = True
    recorder: _Recorder | None = None

    @classmethod
    def from_environment(cls) -> Policy:
        names = (name.strip() for name in os.environ.get("FAST_LAYERS_FORBID", "").split(","))

        def flag(name: str, default: str) -> bool:
            given = os.environ.get(name) or default
            if given not in ("0", "1"):
                raise ValueError(f"{name}={given!r}: must be 0 or 1")
            return given == "1"

        force = os.environ.get("FAST_LAYERS_BACKEND") or None
        return cls(
            force=force,
            forced_by=f"FAST_LAYERS_BACKEND={force}" if force else "",
            forbid=frozenset(name for name in names if name),
            strict=flag("FAST_LAYERS_STRICT", "0"),
            reproducible=flag("FAST_LAYERS_REPRODUCIBLE", "1"),
        )


class _Recorder:
    def __init__(self):
        self.plans: list[Plan] = []


_policy = jax.make_user_context(Policy.from_environment())


def use_backends(
    force: str | None = None,
    *,
    forbid: Sequence[str] | str = (),
    strict: bool | None = None,
    reproducible: bool | None = None,
) -> Any:
    """Context manager that steers the choice of backends for every op traced inside it.

    Args:
      force: take this backend wherever a call names none (as `implementation=` would), in all ops that have it.
      forbid: never take these.
      strict: if True, a fallback of attention raises ValueError: that is, taking XLA on a GPU. The other ops have sizes
        for which XLA is the better choice.
      reproducible: if False, a kernel of ours may add up floats in whatever order its blocks finish, where that is
        faster; then gradients differ in their last bits from run to run. Only attention's backward on Hopper and
        Blackwell has such a form. If True, as it is by default, our kernels give the same bits in every run of one
        compiled program.

    Raises:
      ValueError: `strict` or `reproducible` that is no bool, `force` or `forbid` that is no name. A name that no op has
        is refused by the first call of an op.

    What is not given stays as it was where the context is entered: contexts nest, and one may be entered again and
    again. It holds in the thread that entered it. The environment sets the outermost values, read once at import:
    FAST_LAYERS_BACKEND=name, FAST_LAYERS_FORBID=name,name, FAST_LAYERS_STRICT=1 and FAST_LAYERS_REPRODUCIBLE=0.
    """
    for name, given in (("strict", strict), ("reproducible", reproducible)):
        if given is not None:
            flag(name, given)
    if force is not None and not isinstance(force, str):
        raise ValueError(f"force={force!r}: must be the name of one backend, or None")
    names = [forbid] if isinstance(forbid, str) or not isinstance(forbid, Iterable) else list(forbid)
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"forbid={forbid!r}: must be the name of a backend or a sequence of names; () forbids none")

    def within(outer: Policy) -> Policy:
        return dataclasses.replace(
            outer,
            force=outer.force if force is None else force,
            forced_by=outer.forced_by if force is None else f"use_backends(force={force!r})",
            forbid=outer.forbid.union(names),
            strict=outer.strict if strict is None else strict,
            reproducible=outer.reproducible if reproducible is None else reproducible,
        )

    return _Steering(within)


class _Steering:
    """What changes the policy that holds where it is entered, in whichever thread and however often that is."""

    def __init__(self, within: Callable[[Policy], Policy]):
        self._within = within
        self._in_thread = threading.local()

    def __enter__(self) -> None:
        context = _policy(self._within(_policy.value))
        context.__enter__()
        self._in_thread.entered = [*getattr(self._in_thread, "entered", ()), context]

    def __exit__(self, *raised: Any) -> None:
        self._in_thread.entered.pop().__exit__(*raised)


def reproducible() -> bool:
    """Whether kernels must give the same bits in every run, as `use_backends` has it."""
    return _policy.value.reproducible


def carried() -> Callable[[], Any]:
    """Makes contexts in which another thread, or process, finds what `use_backends` says here."""
    return functools.partial(_under, dataclasses.replace(_policy.value, recorder=None))


def _under(policy: Policy) -> Any:
    return _policy(policy)


def check_name(op: str, backends: Sequence[Backend], implementation: Any) -> None:
    """Raise ValueError for a name that no backend has; None is no name."""
    if implementation is not None and all(implementation != backend.name for backend in backends):
        raise ValueError(f"{op}: implementation {implementation!r} is unknown; {_known(backends)}")


def _known(backends: Sequence[Backend]) -> str:
    return f"the backends of this op are {', '.join(backend.name for backend in backends)}"


def plan(op: str, backends: Sequence[Backend], problem: Any, implementation: str | None) -> Plan:
    """Choose for both passes. Raises ValueError for an unknown name, and in strict mode for a fallback."""
    policy = _policy.value
    if unknown := policy.forbid - _names_of_all_ops:
        raise ValueError(
            f"{', '.join(sorted(map(repr, unknown)))} is forbidden by use_backends or FAST_LAYERS_FORBID, and unknown; "
            f"there are {', '.join(sorted(_names_of_all_ops))}"
        )
    check_name(op, backends, implementation)
    wanted, instead = implementation, "leave implementation=None"
    if wanted is None and policy.force is not None:
        if policy.force not in _names_of_all_ops:
            raise ValueError(
                f"{op}: the forced backend {policy.force!r} is unknown, for which {policy.forced_by} asks; "
                f"{_known(backends)}"
            )
        if any(policy.force == backend.name for backend in backends):  # else a model's other ops may have it
            wanted, instead = policy.force, f"leave out {policy.forced_by}"
    targets = lowering_targets()
    made = Plan(
        op,
        problem,
        *(
            tuple(choose(backends, problem, arch, pass_, wanted, policy, instead) for arch in targets)
            for pass_ in PASSES
        ),
    )
    if policy.recorder is not None:
        policy.recorder.plans.append(made)
        return _traceable(made, backends)
    if policy.strict and wanted is None:
        _refuse_fallback(made)
    made.forward[0].require(op)
    return made


def _traceable(made: Plan, backends: Sequence[Backend]) -> Plan:
    """For `explain`, which only traces: where all refused, whatever backend takes the call gives the shapes."""

    def fill(choice: Choice) -> Choice:
        if choice.backend is not None:
            return choice
        willing = (b for b in reversed(backends) if b.supports(made.problem, choice.arch, choice.pass_) is None)
        return dataclasses.replace(choice, backend=next(willing, None))

    return dataclasses.replace(made, forward=tuple(map(fill, made.forward)), backward=tuple(map(fill, made.backward)))


def choose(
    backends: Sequence[Backend],
    problem: Any,
    arch: Arch,
    pass_: Pass,
    wanted: str | None = None,
    policy: Policy = Policy(),
    instead: str = "leave implementation=None",
) -> Choice:
    """The first backend without an objection; `wanted` leaves only the one of that name.

    `instead` tells who wants it how not to.
    """
    refusals = []
    for i, backend in enumerate(backends):
        if wanted is not None and backend.name != wanted:
            continue
        if backend.name in policy.forbid:
            reason = "forbidden by use_backends or FAST_LAYERS_FORBID"
        else:
            reason = backend.refuses(problem, arch, pass_, by_name=wanted is not None)
        if reason is None:
            behind = _for_shards(backends[i + 1 :] if backend.is_kernel else (), arch, policy)
            return Choice(pass_, arch, backend, tuple(refusals), named=wanted is not None, behind=behind)
        refusals.append((backend.name, reason))

    def takes(backend: Backend, by_name: bool) -> bool:
        return backend.refuses(problem, arch, pass_, by_name=by_name) is None

    return Choice(pass_, arch, None, tuple(refusals), _way_out(backends, takes, wanted, policy, instead))


def _for_shards(backends: Sequence[Backend], arch: Arch, policy: Policy) -> tuple[Backend, ...]:
    """Those of them that compute a shard as they would the whole, and may."""
    may = [b for b in backends if b.automatic and not b.is_kernel and b.name not in policy.forbid]
    return tuple(b for b in may if not (policy.strict and arch.platform in b.fallback_on))


def _way_out(
    backends: Sequence[Backend],
    takes: Callable[[Backend, bool], bool],
    wanted: str | None,
    policy: Policy,
    instead: str,
) -> str:
    """What to ask for where all refused, of what is allowed and takes the call."""
    allowed = [backend for backend in backends if backend.name not in policy.forbid]
    ways = []
    if wanted is not None and any(takes(backend, False) for backend in allowed):
        ways.append(f"{instead} to let fast_layers choose")
    if named := [backend.name for backend in allowed if takes(backend, True)]:
        ways.append(f'take implementation="{"xla" if "xla" in named else named[0]}"')
    if banned := [
        backend.name
        for backend in backends
        if backend.name in policy.forbid and wanted in (None, backend.name) and takes(backend, wanted is not None)
    ]:
        ways.append(f"allow {' and '.join(banned)} again")
    way_out = ", or ".join(ways) or "change the call as the reasons say"
    return f"{way_out[0].upper()}{way_out[1:]}."


def _refuse_fallback(made: Plan) -> None:
    for choice in (made.forward[0], made.backward[0]):
        if choice.backend is not None and choice.arch.platform in choice.backend.fallback_on:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in choice.refusals)
            raise ValueError(
                f"{made.op}: strict mode, and the {choice.pass_} pass on {choice.arch} would fall back to "
                f"{choice.backend.name}. {reasons or 'This version has no kernel for this device'}. Change the call "
                f'as the reasons say, name implementation="{choice.backend.name}", or leave strict mode.'
            )


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `explain` found; `str()` of it is the text to read, `plans` the same as data."""

    plans: tuple[Plan, ...]

    def __str__(self) -> str:
        if not self.plans:
            return "No fast_layers op was called."
        lines = []
        for made, group in itertools.groupby(self.plans):
            times = len(list(group))
            lines.append(f"{made.op}: {made.problem.describe()}{f'  ({times} calls)' if times > 1 else ''}")
            for pass_ in PASSES:
                choice, *elsewhere = made.choices(pass_)
                lines.append(f"  {pass_:<8} on {choice.arch}: {_name(choice)}")
                lines += [f"           not {name}: {reason}" for name, reason in choice.refusals]
                lines += [
                    f"           lowered for {c.arch} instead: {_name(c)}"
                    for c in elsewhere
                    if c.backend is not choice.backend
                ]
        return "\n".join(lines)

    __repr__ = __str__


def _name(choice: Choice) -> str:
    return "no backend" if choice.backend is None else choice.backend.name


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Which backend each fast_layers op in `fn(*args, **kwargs)` takes, forward and backward, and why not others.

    `fn` is traced, not run: arrays may be given as `jax.ShapeDtypeStruct`s. `fn` may be a function, jitted or not,
    or an NNX module. A module that changes its own state, as dropout and caches do, is to be `fn` itself or an
    argument, not something that a function closes over.

        print(fast_layers.explain(fast_layers.dot_product_attention, q, k, v, is_causal=True))

    Returns:
      An `Explanation`, of which `str()` is to be read: for each op in the order of tracing and each pass the backend
      taken, and every better one with its reason.

    Raises:
      ValueError: `fn` that cannot be called, and what an op refuses, as when `fn` is called with such arguments; what
        else `fn` raises comes through.
    """
    if not callable(fn):
        raise ValueError(
            f"explain was given an object of type {type(fn).__name__}, which cannot be called: give the function and "
            "its arguments, explain(f, *args), not its result explain(f(*args))"
        )
    leaves, tree = jax.tree.flatten((args, kwargs))
    is_array = [hasattr(leaf, "dtype") and not _is_scalar(leaf) for leaf in leaves]
    arrays = [leaf for leaf, array in zip(leaves, is_array, strict=True) if array]

    def call(fn, arrays):
        remaining = iter(arrays)
        filled = [next(remaining) if array else leaf for leaf, array in zip(leaves, is_array, strict=True)]
        args, kwargs = jax.tree.unflatten(tree, filled)
        return fn(*args, **kwargs)

    recorder = _Recorder()
    with _policy(dataclasses.replace(_policy.value, recorder=recorder)):
        _abstract_call(call, fn, arrays)
    return Explanation(tuple(recorder.plans))


def _is_scalar(leaf: Any) -> bool:
    """Of numpy or jax, and known: it may be an option, as Python's numbers are."""
    known = isinstance(leaf, (np.ndarray, np.generic, jax.Array)) and not isinstance(leaf, Tracer)
    return known and leaf.ndim == 0


def _abstract_call(call, fn, arrays):
    from flax import nnx

    owner = getattr(fn, "__self__", fn)
    if isinstance(owner, nnx.Module):
        # nnx.eval_shape keeps the module's own state (caches, rng counts) as it was.
        name = "__call__" if owner is fn else fn.__name__
        graph, state = nnx.split(owner)

        def fresh(state, arrays):
            call(getattr(nnx.merge(graph, state), name), arrays)

        jax.eval_shape(fresh, state, arrays)
    else:
        jax.eval_shape(lambda arrays: (call(fn, arrays), None)[1], arrays)

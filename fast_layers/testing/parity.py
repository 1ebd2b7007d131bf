"""`check_parity`: how far each backend of an op is from the reference, in values and in gradients.

    from fast_layers.testing import check_parity
    table = check_parity(backends=["xla"])          # of attention; check_parity("mlp") for another op
    print(table)                # one line for each case, pass and quantity, with error and limit
    assert table.ok and not table.refusals

The oracle is the `reference` backend in float64; the limit follows the one rule of `fast_layers.testing.closeness`,
with plain `jnp` code in the same dtype as the yardstick. The forward and the backward of a backend are called by
themselves, as `fast_layers.dispatch` does: the backward of one that refuses the forward takes the residuals of the
`xla` backend.

Compiling is what takes the time, above all for a GPU, so it is done in threads: `Check` has an op's programs compiled
while those of the next are lowered.

An op joins by its `Suite` in `SUITES`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fast_layers import dispatch
from fast_layers.arch import lowering_targets
from fast_layers.dispatch import PASSES, Backend, Pass
from fast_layers.kernel_parts import automatic_axes
from fast_layers.testing import (
    _parity_attention,
    _parity_conv1d,
    _parity_gated_norm,
    _parity_mlp,
    _parity_selective_scan,
    _parity_ssd,
)
from fast_layers.testing._parity_attention import CASES as CASES
from fast_layers.testing._parity_attention import QUICK as QUICK
from fast_layers.testing._parity_attention import Case as Case
from fast_layers.testing._parity_suite import Draw, Expected
from fast_layers.testing._parity_suite import Suite as Suite
from fast_layers.testing.closeness import Verdict, judge, stack

SUITES: Mapping[str, Suite] = {
    module.SUITE.op: module.SUITE
    for module in (
        _parity_attention,
        _parity_mlp,
        _parity_ssd,
        _parity_selective_scan,
        _parity_conv1d,
        _parity_gated_norm,
    )
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One quantity of one pass; or a refusal, or a breakdown, of the pass as a whole (`quantity` is None then)."""

    case: str
    dtype: str
    backend: str
    pass_: Pass
    quantity: str | None = None
    error: float | None = None
    limit: float | None = None
    failure: str | None = None
    refusal: str | None = None

    @property
    def ok(self) -> bool:
        """Not wrong: within the limit, or refused."""
        return self.failure is None


@dataclasses.dataclass(frozen=True)
class ParityTable:
    """What `check_parity` measured. `str()` gives the table to read, failures first."""

    rows: tuple[Row, ...]
    device: str

    @property
    def ok(self) -> bool:
        """No quantity beyond its limit and no pass that broke down. Refusals do not count: see `refusals`."""
        return all(row.ok for row in self.rows)

    @property
    def failures(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.ok)

    @property
    def refusals(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.refusal is not None)

    def of_backend(self, name: str) -> ParityTable:
        return dataclasses.replace(self, rows=tuple(row for row in self.rows if row.backend == name))

    def to_json(self) -> str:
        """{"device", "ok", "rows": [{case, dtype, backend, pass, quantity, error, limit, ok, failure, refusal}]}."""
        rows = [
            {**{name.rstrip("_"): value for name, value in dataclasses.asdict(row).items()}, "ok": row.ok}
            for row in self.rows
        ]
        return json.dumps({"device": self.device, "ok": self.ok, "rows": rows}, indent=1)

    def __str__(self) -> str:
        measured = sum(row.quantity is not None for row in self.rows)
        lines = [
            f"{len(self.failures)} failed, {measured} quantities measured, {len(self.refusals)} passes refused; "
            f"on {self.device}",
            *(f"FAILED {_place(row)}: {row.failure}" for row in self.failures),
        ]
        cells = [("case", "dtype", "backend", "pass", "quantity", "error", "limit", "")]
        for row in self.rows:
            name = (row.case, row.dtype, row.backend, row.pass_)
            if row.refusal is not None:
                cells.append((*name, "refused", "", "", row.refusal))
            else:
                error, limit = ("" if x is None else f"{x:.2e}" for x in (row.error, row.limit))
                cells.append((*name, row.quantity or "", error, limit, "ok" if row.ok else "FAILED"))
        widths = [max(len(line[i]) for line in cells) for i in range(7)]
        lines += [
            "  ".join((*(text.ljust(w) for text, w in zip(line, widths, strict=False)), line[7])).rstrip()
            for line in cells
        ]
        return "\n".join(lines)


def _place(row: Row) -> str:
    return f"{row.backend}, {row.case}, {row.dtype}, {row.pass_}"


def check_parity(
    op: str = _parity_attention.SUITE.op,
    backends: str | Sequence[str | Backend] | None = None,
    cases: str | Iterable[str] | Mapping[str, Any] | None = None,
    dtypes: Sequence[Any] | None = None,
    run: Callable[[Callable[..., Any]], Callable[..., Any]] = jax.jit,
) -> ParityTable:
    """Errors of values and gradients of each backend against the reference, on the device at hand.

    Args:
      op: a name from `SUITES`: "dot_product_attention", "mlp" (which covers `linear`), "ssd", "selective_scan",
        "causal_conv1d" or "gated_rms_norm".
      backends: names, or `fast_layers.dispatch.Backend`s that are not (yet) among the op's; None takes all of the op's
        but the reference.
      cases: names of the op's cases (`SUITES[op].cases`), or a mapping from names to cases of your own; None takes all.
      dtypes: floating ones under 64 bits, each case in each of them; None takes bfloat16, and for some cases float16 as
        well.
      run: makes a function that runs the pass it is given; `lambda fn: lambda *args: simulate(fn, *args).check()` runs
        it in the simulator.

    Returns:
      A `ParityTable`: for each backend, case and dtype the quantities that the forward returns (of attention out and
      lse, of the MLP out and what it saves), and the gradients that the backward returns (dq, dk, ..; dx, dw_up, ..),
      each with its error and its limit; or the reason of a refusal. A backend that raises is reported like one that is
      wrong.

    Raises:
      ValueError: an op, backend or case of an unknown name, a dtype that is not floating or too wide, nothing to
        compare, a `run` that cannot be called, and a backend whose `supports` returns neither None nor words.
    """
    with compilers() as pool, automatic_axes.on_one_device():
        return Check(op, pool, backends, cases, dtypes, run).lower().table()


@dataclasses.dataclass(frozen=True)
class Begun:
    """What a thread does. `result` is for the thread that owns the pool; it returns, or raises, the same each time."""

    future: Future[Any]
    result: Callable[[], Any]


class Compilers(ThreadPoolExecutor):
    """Threads that do once more, alone, what fails: beside many others a compiler may not be started, for one."""

    def __init__(self, threads: int):
        super().__init__(threads)
        self._begun: list[Future[Any]] = []

    def begin(self, what: str, fn: Callable[[], Any]) -> Begun:
        """`what` is the name that stderr gives it, should it fail."""
        future = self.submit(fn)
        self._begun.append(future)

        def result() -> Any:
            try:
                return future.result()
            except Exception as error:
                print(f"{what}: done once more, alone, after {_told(error)}", file=sys.stderr, flush=True)
            wait(self._begun)
            return fn()

        return Begun(future, _once(result))


@contextlib.contextmanager
def compilers() -> Iterator[Compilers]:
    """Threads for `Check`; more than these would wait for programs to be traced."""
    pool = Compilers(min(os.cpu_count() or 1, _MOST_THREADS))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


@dataclasses.dataclass
class _CaseUnderWay:
    """One case in one dtype: its inputs, the answer, and each backend's programs, as far as they are there."""

    name: str
    case: Any
    dtype: Any
    draws: Begun
    expected: Begun | None = None
    calls: list[_Calls] = dataclasses.field(default_factory=list)

    @property
    def under_way(self) -> list[Future[Any]]:
        expected = [] if self.expected is None else [self.expected]
        begun = [self.draws, *expected, *(each for calls in self.calls for each in calls.compiling)]
        return [each.future for each in begun]


_MOST_THREADS = 12
_COMPILED_ALONE = ("cudnn",)
"""cuDNN captures a CUDA graph to get ready, which whatever another thread does on the GPU meanwhile breaks."""


class Check:
    """`check_parity` in steps, so that several ops can be under way; each step inside `on_one_device`.

    Made, it has the inputs drawn; `lower` traces the backends' programs, and leaves compiling them, the oracle and the
    yardsticks to `pool`; `wait` is for these; `table` runs the programs, when `pool` has nothing left to do.

    The backends are traced in the caller's thread, so that the caller's contexts hold for them. Inputs, oracle and
    yardsticks are made in threads, which take over the default device and `use_backends`, nothing else: neither
    `jax.default_matmul_precision` nor an abstract mesh.
    """

    def __init__(
        self,
        op: str,
        pool: Compilers,
        backends: str | Sequence[str | Backend] | None = None,
        cases: str | Iterable[str] | Mapping[str, Any] | None = None,
        dtypes: Sequence[Any] | None = None,
        run: Callable[[Callable[..., Any]], Callable[..., Any]] = jax.jit,
    ):
        if not isinstance(op, str) or op not in SUITES:
            raise ValueError(f"{op=}: parity is known for {', '.join(map(repr, SUITES))}")
        if not callable(run):
            raise ValueError(f"{run=}: must make a function that runs the pass it is given, as jax.jit does")
        self._suite, self._pool, self._run = SUITES[op], pool, run
        self._backends = _backends(self._suite, backends)
        self._cases = [
            _CaseUnderWay(name, case, dtype, self._in_thread(f"{op}, {name}: inputs", self._draw, case, dtype))
            for name, case in _cases(self._suite, cases).items()
            for dtype in _dtypes(self._suite, name, dtypes)
        ]

    @property
    def programs(self) -> int:
        """That are compiled for the backends, once they are lowered."""
        return sum(calls.programs for case in self._cases for calls in case.calls)

    @property
    def left_for_later(self) -> int:
        """Those of `programs` that `table` compiles, each before it runs."""
        return sum(calls.left_for_later for case in self._cases for calls in case.calls)

    def lower(self) -> Check:
        for case in self._cases:
            try:
                draws = case.draws.result()
            except Exception:
                continue  # `table` tells of it
            where = f"{self._suite.op}, {case.name}"
            refusals: list[dict[Pass, str | None]] = [
                {pass_: _refusal(backend, draws[0].problem, pass_) for pass_ in PASSES} for backend in self._backends
            ]
            if any(None in each.values() for each in refusals):
                case.expected = self._in_thread(f"{where}: oracle", self._suite.expect, draws)
            case.calls = [
                _Calls(self._suite, backend, reasons, draws[0], self._run, self._pool, where)
                for backend, reasons in zip(self._backends, refusals, strict=True)
            ]
        return self

    def wait(self) -> None:
        wait([future for case in self._cases for future in case.under_way])

    def table(self) -> ParityTable:
        self.wait()
        rows = []
        for case in self._cases:
            try:
                draws = case.draws.result()
            except Exception as error:
                failure = f"no inputs: {_told(error)}"
                rows += [
                    Row(case.name, case.dtype.name, backend.name, pass_, failure=failure)
                    for backend in self._backends
                    for pass_ in PASSES
                ]
                continue
            for calls in case.calls:
                rows += _measure(calls, case.name, case.dtype.name, draws, case.expected)
        return ParityTable(tuple(rows), str(_arch()))

    def _draw(self, case: Any, dtype: Any) -> list[Draw]:
        return [self._suite.draw(case, dtype, index) for index in range(case.draws)]

    def _in_thread(self, what: str, fn: Callable[..., Any], *args: Any) -> Begun:
        device, backends = jax.config.jax_default_device, dispatch.carried()

        def call():
            with jax.default_device(device), automatic_axes.on_one_device(), backends():
                return fn(*args)

        return self._pool.begin(what, call)


class _Calls:
    """A backend's passes on one case, compiled or on the way to it."""

    def __init__(
        self,
        suite: Suite,
        backend: Backend,
        refusals: Mapping[Pass, str | None],
        draw: Draw,
        run: Callable[[Callable[..., Any]], Callable[..., Any]],
        pool: Compilers,
        where: str,
    ):
        self.backend, self.refusals = backend, refusals
        self.programs = self.left_for_later = 0
        self.compiling: list[Begun] = []
        self._run, self._pool, self._where = run, pool, f"{where}, {backend.name}"
        self.forward = self.backward = _never
        if None not in refusals.values():
            return
        problem = draw.problem
        fwd = backend.fwd if refusals["forward"] is None else suite.plain_forward
        # Not jitted with `problem` as a static argument: a backend given twice, with other functions, is another one.
        self.forward, returned = self._prepare(lambda *operands: fwd(problem, *operands), lambda: draw.operands)
        if refusals["backward"] is None:
            self.backward, _ = self._prepare(
                lambda residuals, *cotangents: backend.bwd(problem, residuals, *cotangents),
                lambda: (draw.residuals(returned), *draw.cotangents),
            )

    def _prepare(self, fn: Callable[..., Any], example: Callable[[], tuple[Any, ...]]) -> tuple[Callable, Any]:
        """(what runs it, and the shapes that it returns where they are known yet)."""
        made = self._run(fn)
        if self._run is not jax.jit:
            return made, None
        self.programs += 1
        try:
            lowered = made.lower(*example())
        except Exception as error:
            return functools.partial(_raise, error), None
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), lowered.out_info)
        if self.backend.name in _COMPILED_ALONE:
            self.left_for_later += 1
            compiled = _once(lowered.compile)
        else:
            compiling = self._pool.begin(f"{self._where}: compiling", lowered.compile)
            self.compiling.append(compiling)
            compiled = compiling.result
        return lambda *args: compiled()(*args), shapes


def _once(fn: Callable[[], Any]) -> Callable[[], Any]:
    """`functools.cache` that keeps an exception as well."""

    @functools.cache
    def ended() -> tuple[Any, Exception | None]:
        try:
            return fn(), None
        except Exception as error:
            return None, error

    def result() -> Any:
        value, error = ended()
        if error is not None:
            raise error
        return value

    return result


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _raise(error: Exception, *args: Any) -> Any:
    raise error


def _never(*args: Any) -> Any:
    raise AssertionError("called after a refusal")


def _arch():
    return lowering_targets()[0]


def _refusal(backend: Backend, problem: Any, pass_: Pass) -> str | None:
    reason = backend.supports(problem, _arch(), pass_)
    if reason is not None and not isinstance(reason, str):
        raise ValueError(f"supports of {backend.name} returned {reason!r}: must be None, or the reason in words")
    return reason


def _backends(suite: Suite, given: str | Sequence[str | Backend] | None) -> list[Backend]:
    own = {backend.name: backend for backend in suite.backends()}
    if given is None:
        return [backend for name, backend in own.items() if name != "reference"]
    some = _some("backends", [given] if isinstance(given, str) else given)
    unknown = [b for b in some if not isinstance(b, Backend) and (not isinstance(b, str) or b not in own)]
    if unknown:
        raise ValueError(f"backends {unknown} are unknown; those of {suite.op} are {', '.join(own)}")
    return [own[b] if isinstance(b, str) else b for b in some]


def _cases(suite: Suite, given: str | Iterable[str] | Mapping[str, Any] | None) -> Mapping[str, Any]:
    if given is None:
        return suite.cases
    if isinstance(given, Mapping):
        if wrong := [name for name in given if not isinstance(name, str)]:
            raise ValueError(f"cases has the name {wrong[0]!r}: names must be strings")
        return _some("cases", given)
    some = _some("cases", [given] if isinstance(given, str) else given)
    unknown = [name for name in some if not isinstance(name, str) or name not in suite.cases]
    if unknown:
        raise ValueError(f"cases {unknown} are unknown; there are {', '.join(suite.cases)}")
    return {name: suite.cases[name] for name in some}


def _dtypes(suite: Suite, case: str, given: Sequence[Any] | None) -> list[Any]:
    if given is None:
        given = (jnp.bfloat16, jnp.float16) if case in suite.also_float16 else (jnp.bfloat16,)
    some = _some("dtypes", [given] if isinstance(given, (str, type, np.dtype)) else given)
    return [_floating(dtype) for dtype in some]


def _floating(given: Any) -> Any:
    try:
        dtype = jnp.dtype(given)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtypes has {given!r}: must be floating point dtypes, such as jnp.bfloat16")
    if not jnp.finfo(dtype).eps > jnp.finfo(np.float64).eps:
        raise ValueError(f"dtypes has {given!r}: the oracle is in float64, and judges what is narrower")
    return dtype


def _some(name: str, given: Any) -> Any:
    """Not nothing, of which all is well."""
    if not isinstance(given, Iterable):
        raise ValueError(f"{name}={given!r}: must be one of them, or several in a list")
    given = given if isinstance(given, Mapping) else list(given)
    if not given:
        raise ValueError(f"{name} is empty, so nothing would be compared; leave it out to take all")
    return given


def _measure(calls: _Calls, case: str, dtype: str, draws: list[Draw], expected: Begun | None) -> list[Row]:
    name, refusals = calls.backend.name, calls.refusals
    rows = [Row(case, dtype, name, pass_, refusal=reason) for pass_, reason in refusals.items() if reason is not None]
    forward_of = functools.cache(lambda index: calls.forward(*draws[index].operands))
    answers: dict[Pass, list[dict[str, Any]]] = {"forward": [], "backward": []}
    for pass_ in PASSES:
        if refusals[pass_] is not None:
            continue
        assert expected is not None
        try:
            right: Expected = expected.result()
        except Exception as error:
            rows.append(Row(case, dtype, name, pass_, failure=f"no oracle: {_told(error)}"))
            continue
        try:
            for index, draw in enumerate(draws):
                returned = forward_of(index)
                if pass_ == "forward":
                    answers[pass_].append(jax.device_get(draw.outputs(returned)))
                else:
                    gradients = calls.backward(draw.residuals(returned), *draw.cotangents)
                    answers[pass_].append(jax.device_get(draw.gradients(gradients)))
        except Exception as error:
            # A kernel that does not compile or crashes is a finding, and the others still want to be measured.
            rows.append(Row(case, dtype, name, pass_, failure=f"raised {_told(error)}"))
            continue
        for quantity in getattr(right.oracle[0], pass_):
            verdict = _judge(answers[pass_], quantity, *right.of(pass_, quantity))
            rows.append(Row(case, dtype, name, pass_, quantity, verdict.error, verdict.limit, verdict.failure))
    return rows


def _judge(answers: list[dict[str, Any]], quantity: str, oracle, *yardsticks):
    if any(quantity not in answer for answer in answers):
        return Verdict(None, None, f"{quantity}: not returned")
    return judge(stack([answer[quantity] for answer in answers]), oracle, *yardsticks, name=quantity)

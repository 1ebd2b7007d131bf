"""Structured attention masks: which keys each query may see.

Axis letters: B flattened batch, N query heads, T queries, S keys.

Every structured mask says, for each query row, which *interval* of keys the row may see, and intervals
intersect to intervals. So all of them reduce to one small form (`MaskForm`) that costs O(T + S) memory, from
which kernels read the tiles to skip. Only `Dense` (an arbitrary boolean array) needs a [T, S] operand.

    from fast_layers import masks
    mask = masks.Causal() & masks.LocalWindow(left=1023) & masks.Segments(document_ids)
    print(masks.Causal().as_array(4, 4))

Masks are pytrees: they pass through `jax.jit`, `jax.vmap` and `jax.grad` like arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
import operator
import typing
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Int

from fast_layers.kernel_parts.kv_range import INT_MAX
from fast_layers.ops.operands import INT_MIN, integers, is_integer, to_array

BOTTOM_RIGHT = "bottom_right"
FAR = (1 << 30) - 1
"""A distance beyond all keys: no length comes near it, and a row's index can be added to it in int32."""


@dataclasses.dataclass(frozen=True)
class Band:
    """Static diagonal band: row i sees keys in [i + low, i + high]; None is unbounded on that side."""

    low: int | None
    high: int | None

    def __and__(self, other: Band) -> Band:
        return Band(_tightest(max, self.low, other.low), _tightest(min, self.high, other.high))


def _tightest(pick, a, b):
    return a if b is None else b if a is None else pick(a, b)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["offset", "lengths"], meta_fields=["band", "rows_per_query"]
)
@dataclasses.dataclass(frozen=True)
class ExampleBand:
    """Intervals that follow from a number or two of each example, as while decoding.

    Query i sees the keys of `band` from position i + `offset` on (0 where that is None) that come before `lengths`.
    """

    band: Band | None = None
    offset: Int[Array, "B|1 1"] | None = None
    lengths: Int[Array, "B|1 1"] | None = None
    rows_per_query: int = 1
    """Of an array whose rows are several heads of each query."""

    def __and__(self, other: ExampleBand) -> ExampleBand | None:
        """None where two bands begin at different numbers."""
        offset = _first(self.offset, other.offset)
        if any(each.band is not None and each.offset is not offset for each in (self, other)):
            return None
        band = _both(operator.and_, self.band, other.band)
        return ExampleBand(band, offset, _both(jnp.minimum, self.lengths, other.lengths))

    def interval(self, offset: Any, length: Any, row: Any, kv_len: int) -> tuple[Any, Any]:
        """First and one past the last key that `row` sees, from 0 to `kv_len`. Of an array of rows, arrays where they
        depend on the row, else numbers."""
        query = row if self.rows_per_query == 1 else lax.div(row, jnp.int32(self.rows_per_query))
        start, stop = jnp.int32(0), jnp.int32(kv_len)
        if self.band is not None:
            low, high, offset = self.band.low, self.band.high, 0 if offset is None else offset
            if low is not None:
                start = jnp.clip(query + add_offsets(offset, low, FAR), 0, kv_len)
            if high is not None:
                stop = jnp.clip(query + add_offsets(offset, high + 1, FAR), 0, kv_len)
        if length is not None:
            stop = jnp.minimum(stop, jnp.clip(length, 0, kv_len))
        return start, stop


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["start", "stop", "query_segments", "key_segments", "scattered", "dense", "by_example"],
    meta_fields=["band", "lengths_only"],
)
@dataclasses.dataclass(frozen=True)
class MaskForm:
    """What a conjunction of masks reduces to. A part that is None allows everything.

    A key is visible if it lies in the static band, in [start, stop), in the row's segment, and where dense is True.
    `scattered`, which comes with segments, says that [start, stop) may hold keys of others than the row's.
    `lengths_only` says what `stop` cannot show statically: that it holds nothing but one number of keys per example,
    and 0 past a number of queries (there is no `start` then).
    `by_example`, where it is there, says all that `start` and `stop` do.
    """

    band: Band | None = None
    start: Int[Array, "B|1 T"] | None = None
    stop: Int[Array, "B|1 T"] | None = None
    query_segments: Int[Array, "B|1 T"] | None = None
    key_segments: Int[Array, "B|1 S"] | None = None
    scattered: Bool[Array, "B|1 T"] | None = None
    dense: Bool[Array, "B|1 N|1 T|1 S|1"] | None = None
    lengths_only: bool = False
    by_example: ExampleBand | None = None

    @property
    def is_empty(self) -> bool:
        return not jax.tree.leaves(self) and self.band is None

    @property
    def has_interval_arrays(self) -> bool:
        return self.start is not None or self.stop is not None

    @property
    def has_intervals(self) -> bool:
        return self.band is not None or self.has_interval_arrays

    @property
    def intervals_by_example(self) -> ExampleBand | None:
        """All intervals, the static band's too; None where it takes arrays of all rows."""
        of_band = None if self.band is None else ExampleBand(self.band)
        if of_band is None or not self.has_interval_arrays:
            return of_band or self.by_example
        return None if self.by_example is None else self.by_example & of_band

    def __and__(self, other: MaskForm) -> MaskForm:
        if self.query_segments is not None and other.query_segments is not None:
            # Two sets of ids are one: rows agree on both or they do not meet.
            same_query, same_key = _merge_segments(self, other)
        else:
            same_query = _first(self.query_segments, other.query_segments)
            same_key = _first(self.key_segments, other.key_segments)
        return MaskForm(
            band=_both(operator.and_, self.band, other.band),
            start=_both(jnp.maximum, self.start, other.start),
            stop=_both(jnp.minimum, self.stop, other.stop),
            query_segments=same_query,
            key_segments=same_key,
            scattered=_both(operator.or_, self.scattered, other.scattered),
            dense=_both(operator.and_, self.dense, other.dense),
            lengths_only=all(form.lengths_only for form in (self, other) if form.has_interval_arrays)
            and not (self.stop is None and other.stop is None),
            by_example=self._by_example_and(other),
        )

    def _by_example_and(self, other: MaskForm) -> ExampleBand | None:
        if not (self.has_interval_arrays and other.has_interval_arrays):
            return self.by_example or other.by_example
        if self.by_example is None or other.by_example is None:
            return None
        return self.by_example & other.by_example

    def intervals(self, q_len: int, kv_len: int):
        """(start, stop), each [B|1, T] int32 or None, with the static band folded in."""
        start, stop = self.start, self.stop
        rows = jnp.arange(q_len, dtype=jnp.int32)[None]
        if self.band is not None and self.band.low is not None:
            start = _both(jnp.maximum, start, rows + self.band.low)
        if self.band is not None and self.band.high is not None:
            stop = _both(jnp.minimum, stop, rows + (self.band.high + 1))
        if start is not None:
            start = jnp.clip(start, 0, kv_len).astype(jnp.int32)
        if stop is not None:
            stop = jnp.clip(stop, 0, kv_len).astype(jnp.int32)
        return start, stop

    def as_array(self, q_len: int, kv_len: int) -> Bool[Array, "B|1 N|1 T S"]:
        """The mask written out, O(T S) memory: for the reference, for tests and for printing."""
        visible = jnp.ones((1, 1, q_len, kv_len), bool)
        start, stop = self.intervals(q_len, kv_len)
        keys = jnp.arange(kv_len, dtype=jnp.int32)
        if start is not None:
            visible &= keys >= start[:, None, :, None]
        if stop is not None:
            visible &= keys < stop[:, None, :, None]
        if self.query_segments is not None and self.key_segments is not None:
            visible &= same_segment(self.query_segments[:, None, :, None], self.key_segments[:, None, None, :])
        if self.dense is not None:
            visible &= self.dense
        return visible


def _both(combine, a, b):
    return a if b is None else b if a is None else combine(a, b)


def _first(a, b):
    return b if a is None else a


def same_segment(query_ids: Int[Array, ...], key_ids: Int[Array, ...]) -> Bool[Array, ...]:
    """Equal ids meet; a negative id is padding, which sees nothing and is seen by nothing."""
    return (query_ids == key_ids) & (query_ids >= 0)


def _merge_segments(a: MaskForm, b: MaskForm):
    """One pair of id arrays that agree exactly where both given pairs agree."""
    a_query, a_key, b_query, b_key = (
        x for x in (a.query_segments, a.key_segments, b.query_segments, b.key_segments) if x is not None
    )
    (batch,) = jnp.broadcast_shapes(*(x.shape[:1] for x in (a_query, a_key, b_query, b_key)))
    q_len = a_query.shape[1]

    def renumber(a_ids, b_ids):
        # Sort the pairs and number the runs; any pair with a padding member is padding.
        order = jnp.lexsort((b_ids, a_ids))
        new_run = (a_ids[order] != jnp.roll(a_ids[order], 1)) | (b_ids[order] != jnp.roll(b_ids[order], 1))
        number = jnp.cumsum(new_run.at[0].set(False)).astype(jnp.int32)
        numbered = jnp.zeros_like(number).at[order].set(number)
        return jnp.where((a_ids < 0) | (b_ids < 0), -1, numbered)

    a_all = jnp.concatenate([jnp.broadcast_to(x, (batch, x.shape[1])) for x in (a_query, a_key)], axis=1)
    b_all = jnp.concatenate([jnp.broadcast_to(x, (batch, x.shape[1])) for x in (b_query, b_key)], axis=1)
    merged = jax.vmap(renumber)(a_all, b_all)
    return merged[:, :q_len], merged[:, q_len:]


class Mask:
    """Base of the structured masks; combine with `&`.

    Masks are equal that are built alike: numbers count by value, arrays by identity.
    """

    # Of two operands numpy's array would come first, and take a mask for an object to be paired with each entry.
    __array_ufunc__ = None

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            raise TypeError(
                f"cannot combine a mask with {type(other).__name__}; wrap a boolean array: mask & masks.Dense(array)"
            )
        return And((*_parts(self), *_parts(other)))

    __rand__ = __and__

    def _only_and(self, *_: Any) -> NoReturn:
        raise TypeError(
            "masks are joined by & alone; write out what else is wanted, with True where a query may see a key: "
            "masks.Dense(array), of mask.as_array(T, S, batch_dims)"
        )

    __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = _only_and

    def __bool__(self) -> NoReturn:
        raise ValueError("a mask is neither true nor false: join masks by &, not by 'and' or 'or'")

    def __eq__(self, other: object) -> bool:
        return self._built_of() == other._built_of() if isinstance(other, Mask) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._built_of())

    def _built_of(self) -> tuple[Any, ...]:
        leaves, tree = jax.tree.flatten(self)
        return tree, *(("array", id(x)) if isinstance(x, (np.ndarray, jax.Array)) else x for x in leaves)

    def lower(self, batch: Sequence[int], q_len: int, kv_len: int, q_offset: Any = 0) -> MaskForm:
        """Reduce to a `MaskForm` for a call with these batch dims and lengths.

        `q_offset` is the key position at which query row 0 stands: an int, or an int32 array [B|1, 1].
        """
        kinds = sorted(kind.__name__ for kind in Mask.__subclasses__() if kind.__module__ == __name__)
        raise ValueError(f"{type(self).__name__} does not say what a query may see: take one of {', '.join(kinds)}")

    def as_array(self, q_len: int, kv_len: int, batch: Sequence[int] = ()) -> Bool[Array, "B|1 N|1 T S"]:
        """The mask as a boolean array, True where a query may see a key."""
        for name, length in (("q_len", q_len), ("kv_len", kv_len)):
            if not jax.export.is_symbolic_dim(length) and (not is_integer(length) or length < 0):
                raise ValueError(f"as_array {name}={length!r}: must be an int >= 0, the number of rows or columns")
        return self.lower(batch, q_len, kv_len).as_array(q_len, kv_len)


def _parts(mask: Mask) -> tuple[Mask, ...]:
    return mask.parts if isinstance(mask, And) else (mask,)


def refuse_what_is_no_mask(given: Any) -> None:
    """Raise ValueError for what looks like a mask and is none. An array is for the caller to read."""
    if isinstance(given, type) and issubclass(given, Mask):
        raise ValueError(f"mask={given.__name__} is a class: must be one of its masks, such as masks.Causal()")
    if isinstance(given, (tuple, list)) and any(isinstance(part, Mask) for part in given):
        raise ValueError(f"mask is a {type(given).__name__} of masks: must be one mask; join them by &")


@typing.dataclass_transform(frozen_default=True, eq_default=False)
def _mask(data: Sequence[str] = (), meta: Sequence[str] = ()):
    def register(cls):
        cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
        return jax.tree_util.register_dataclass(cls, data_fields=list(data), meta_fields=list(meta))

    return register


@_mask(data=["parts"])
class And(Mask):
    """All of `parts`; what `&` builds."""

    parts: tuple[Mask, ...]

    def lower(self, batch, q_len, kv_len, q_offset=0):
        return functools.reduce(operator.and_, (m.lower(batch, q_len, kv_len, q_offset) for m in self.parts))


@_mask()
class Causal(Mask):
    """Row i sees keys up to and including its own position, i + q_offset (top-left aligned by default)."""

    def lower(self, batch, q_len, kv_len, q_offset=0):
        return LocalWindow(None, 0).lower(batch, q_len, kv_len, q_offset)


@_mask(meta=["left", "right"])
class LocalWindow(Mask):
    """Row i sees keys in [p - left, p + right] with p = i + q_offset; None is unbounded on that side."""

    left: int | None = None
    right: int | None = None

    def __post_init__(self):
        for name in ("left", "right"):
            size = getattr(self, name)
            if size is not None and (not is_integer(size) or size < 0):
                raise ValueError(f"LocalWindow {name}={size!r}: must be an int >= 0, or None for unbounded")
            object.__setattr__(self, name, None if size is None else int(size))

    def lower(self, batch, q_len, kv_len, q_offset=0):
        if isinstance(q_offset, int):
            low = None if self.left is None or q_offset - self.left <= -FAR else min(q_offset - self.left, FAR)
            high = None if self.right is None or q_offset + self.right >= FAR else max(q_offset + self.right, -FAR)
            return MaskForm(band=None if low is None and high is None else Band(low, high))
        rows, q_offset = jnp.arange(q_len, dtype=jnp.int32)[None], jnp.asarray(q_offset, jnp.int32)
        low, high = (None if self.left is None else -self.left), self.right
        if low is None and high is None:
            return MaskForm()
        return MaskForm(
            start=None if low is None else rows + add_offsets(q_offset, low, FAR),
            stop=None if high is None else rows + add_offsets(q_offset, high + 1, FAR),
            by_example=ExampleBand(Band(low, high), q_offset),
        )


@_mask(data=["query_ids", "key_ids"])
class Segments(Mask):
    """Packed documents: a query sees the keys that carry its id.

    Ids are integers of shape [batch.., T] (and [batch.., S] for keys; None means self-attention's own). They need
    not be sorted or contiguous. A negative id marks padding: it sees nothing and is seen by nothing.

    Lowered, ids raise ValueError that would not fit in int32: of numpy or Python by value, of a jax array by its dtype,
    uint32 or uint64. (int64, which JAX has with `jax_enable_x64`, is numbered anew. Without it JAX itself cuts what is
    given to a jitted function to 32 bits, which nothing here can see.)
    """

    query_ids: ArrayLike
    key_ids: ArrayLike | None = None

    def lower(self, batch, q_len, kv_len, q_offset=0):
        key_ids = self.query_ids if self.key_ids is None else self.key_ids
        query = _ids("segment_ids of the queries", self.query_ids, batch, q_len)
        key = _ids("segment_ids of the keys", key_ids, batch, kv_len)
        if query.dtype != jnp.int32 or key.dtype != jnp.int32:
            # Cut to 32 bits, documents could become one; numbered, they stay what they are.
            wide = MaskForm(query_segments=query.astype(jnp.int64), key_segments=key.astype(jnp.int64))
            query, key = _merge_segments(wide, wide)
        start, stop, scattered = _segment_hull(query, key)
        return MaskForm(start=start, stop=stop, query_segments=query, key_segments=key, scattered=scattered)


_BUCKETS = 1 << 16


def _segment_hull(query_ids, key_ids):
    """First and one past the last key of each query's segment, both 0 where there is none, and whether it is in pieces.

    [B|1, T] each. Ids that are equal modulo `_BUCKETS` share what lies between the first and last key of them all.
    Nothing is sorted, which on a GPU would take as long as the attention of a short call.
    """
    (batch,) = jnp.broadcast_shapes(query_ids.shape[:1], key_ids.shape[:1])
    query_ids, key_ids = (jnp.broadcast_to(x, (batch, x.shape[1])) for x in (query_ids, key_ids))

    def hull(query, key):
        index = jnp.arange(key.shape[0], dtype=jnp.int32)
        differs, end = key[1:] != key[:-1], jnp.ones((1,), bool)
        # Where a run of equal ids begins or ends; the other keys need not be looked at.
        begins, ends = (jnp.concatenate(parts) for parts in ((end, differs), (differs, end)))
        # Where the first run of a bucket begins, as a maximum, and where the last one begins and ends; 0 is none.
        columns = (begins, INT_MAX - index), (begins, index + 1), (ends, index + 1)
        slots, values = (jnp.stack(x) for x in zip(*columns, strict=True))
        first_slots = _BUCKETS * jnp.arange(3, dtype=jnp.int32)[:, None]
        slots = jnp.where(slots & (key >= 0), first_slots + key % _BUCKETS, 3 * _BUCKETS)
        table = jnp.zeros((3 * _BUCKETS,), jnp.int32).at[slots].max(values, mode="drop")
        first, last_begin, stop = table[first_slots + query % _BUCKETS]
        first = INT_MAX - first
        some = (stop > 0) & (query >= 0)
        other = key.at[jnp.where(some, first, 0)].get(mode="clip") != query
        scattered = some & ((last_begin - 1 != first) | other)
        return jnp.where(some, first, 0), jnp.where(some, stop, 0), scattered

    return jax.vmap(hull)(query_ids, key_ids)


@_mask(data=["lengths"])
class KeyLengths(Mask):
    """Keys at and past `lengths` (int, shape [batch..] or scalar) are padding and never seen."""

    lengths: ArrayLike

    def lower(self, batch, q_len, kv_len, q_offset=0):
        lengths = _per_example("key lengths", self.lengths, batch)
        return MaskForm(
            stop=jnp.broadcast_to(lengths, (lengths.shape[0], q_len)),
            lengths_only=True,
            by_example=ExampleBand(lengths=lengths),
        )


@_mask(data=["lengths"])
class QueryLengths(Mask):
    """Query rows at and past `lengths` (int, shape [batch..] or scalar) are padding and see nothing."""

    lengths: ArrayLike

    def lower(self, batch, q_len, kv_len, q_offset=0):
        lengths = _per_example("query lengths", self.lengths, batch)
        real = jnp.arange(q_len, dtype=jnp.int32)[None] < lengths
        return MaskForm(stop=jnp.where(real, kv_len, 0).astype(jnp.int32), lengths_only=True)


@_mask(data=["lengths"])
class Prefix(Mask):
    """Prefix language model: causal, but the first `lengths` keys (shape [batch..] or scalar) are seen by all."""

    lengths: ArrayLike

    def lower(self, batch, q_len, kv_len, q_offset=0):
        lengths = _per_example("prefix lengths", self.lengths, batch)
        offset = min(max(q_offset, -FAR), FAR) if isinstance(q_offset, int) else add_offsets(q_offset, 0, FAR)
        causal_stop = jnp.arange(1, q_len + 1, dtype=jnp.int32)[None] + offset
        return MaskForm(stop=jnp.maximum(causal_stop, lengths))


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class Offset(Mask):
    """`mask` as seen by queries that start at key position `q_offset` instead of 0.

    `q_offset`: int, an int array of shape [batch..] or scalar, or "bottom_right" (S - T: the last query is aligned
    with the last key). It moves the masks that speak of positions (Causal, LocalWindow, Prefix); it adds to an
    outer offset.
    """

    mask: Mask
    q_offset: ArrayLike | str

    def lower(self, batch, q_len, kv_len, q_offset=0):
        own = offset_of(self.q_offset, batch, q_len, kv_len)
        return self.mask.lower(batch, q_len, kv_len, add_offsets(q_offset, own))

    def tree_flatten(self):
        # A string is no leaf, and a static int stays static: its band costs no per-row arrays.
        static = self.q_offset if isinstance(self.q_offset, (numbers.Integral, str)) else None
        return (self.mask, self.q_offset if static is None else None), static

    @classmethod
    def tree_unflatten(cls, static, children):
        mask, q_offset = children
        return cls(mask, q_offset if static is None else static)


def offset_of(q_offset, batch, q_len, kv_len):
    """A valid `q_offset` as an int (or symbolic dimension), or as an int32 array [B|1, 1]."""
    if isinstance(q_offset, str):
        if q_offset != BOTTOM_RIGHT:
            raise ValueError(f"q_offset={q_offset!r}: must be an int, an int array [batch..] or {BOTTOM_RIGHT!r}")
        return kv_len - q_len
    if is_integer(q_offset):
        return int(q_offset)
    return _per_example("q_offset", q_offset, batch)


def add_offsets(a, b, most: int = INT_MAX):
    """The sum of two offsets, each an int (or symbolic dimension) or an int32 array.

    An array stops at `most` in both directions, and does not wrap: what is far ahead would come to lie behind.
    """
    if not isinstance(a, jax.Array) and not isinstance(b, jax.Array):
        return a + b
    if isinstance(a, int):
        a, b = b, a
    if not isinstance(b, int):
        return jnp.clip(a, -INT_MAX - jnp.minimum(b, 0), INT_MAX - jnp.maximum(b, 0)) + b
    if b == 0 and most == INT_MAX:
        return a  # itself: kernels take it as it is, without one of XLA's
    b = min(max(b, -most - INT_MAX), most - INT_MIN)
    within = jnp.clip(a, max(-most - b, INT_MIN), min(most - b, INT_MAX))
    return within + jnp.int32((b - INT_MIN) % (1 << 32) + INT_MIN)  # `b` modulo 2^32: the sum fits


@_mask(data=["array"])
class Dense(Mask):
    """An arbitrary boolean array, True where a query may see a key; broadcastable to [batch.., N, T, S].

    Costs O(T S) memory traffic and skips no tiles: prefer a structured mask where there is one.
    """

    array: ArrayLike

    def lower(self, batch, q_len, kv_len, q_offset=0):
        array = mask_array(self.array)
        if array.dtype != bool:
            raise ValueError(
                f"mask has dtype {array.dtype}: must be bool with True where a query may see a key; "
                "use mask.astype(bool), or pass additive values as bias="
            )
        return MaskForm(dense=logits_operand("mask", array, batch, q_len, kv_len))


def mask_array(given: Any) -> Array:
    return to_array("mask", given, "a boolean array or a fast_layers.masks.Mask")


def logits_operand(name: str, array: Array, batch: Sequence[int], q_len, kv_len) -> Array:
    """Bring what broadcasts to [batch.., N, T, S] to [B|1, N|1, T|1, S|1] without writing broadcasts out."""
    rank = len(batch) + 3
    shape = (1,) * (rank - array.ndim) + array.shape
    leading, (tq, tk) = shape[: len(batch)], shape[-2:]
    pairs = (*zip(leading, batch, strict=False), (tq, q_len), (tk, kv_len))
    if array.ndim > rank or any(got != 1 and got != want for got, want in pairs):
        wanted = ", ".join(map(str, (*batch, "num_heads", q_len, kv_len)))
        raise ValueError(f"{name} has shape {array.shape}: must be broadcastable to [{wanted}]")
    if all(dim == 1 for dim in leading):
        return array.reshape((1, *shape[-3:]))
    return jnp.broadcast_to(array.reshape(shape), (*batch, *shape[-3:])).reshape((-1, *shape[-3:]))


def queries_and_keys(name: str, given: Any) -> tuple[Any, ...]:
    """What is given for both, alone, or as a pair: a tuple, or a list of arrays. Any other list is one array."""
    is_pair = isinstance(given, tuple) or (isinstance(given, list) and any(getattr(x, "ndim", 0) for x in given))
    if is_pair and len(given) not in (1, 2):
        raise ValueError(
            f"{name} must be an array or a pair (queries, keys), got {len(given)} entries in a {type(given).__name__}; "
            "make them one array, such as by np.array"
        )
    return tuple(given) if is_pair else (given,)


def positions(name: str, values) -> Int[Array, "..."]:
    """Lengths or offsets in int32; those beyond it, which only a jax array can hold, become its ends."""
    array = integers(name, values, "give a length that there can be")
    info = jnp.iinfo(array.dtype)
    if info.max > INT_MAX:
        array = jnp.clip(array, max(info.min, INT_MIN), INT_MAX)
    return array.astype(jnp.int32)


def _per_example(name: str, values, batch: Sequence[int]) -> Int[Array, "B|1 1"]:
    array = positions(name, values)
    if array.ndim == 0:
        return array[None, None]
    if array.shape != tuple(batch):
        raise ValueError(f"{name} must have shape {tuple(batch)} (one per example) or be a scalar, got {array.shape}")
    return array.reshape(-1, 1)


_NUMBER_IDS = "number them: np.unique(ids, return_inverse=True)[1].reshape(ids.shape), and -1 for padding"


def _ids(name: str, values, batch: Sequence[int], length: int) -> Int[Array, "B|1 T"]:
    """In int32, but for 64-bit ids of a jax array, which stay int64."""
    array = integers(name, values, _NUMBER_IDS)
    if array.dtype in (jnp.uint32, jnp.uint64):
        raise ValueError(
            f"{name} have dtype {array.dtype}, whose larger half is no int32: cast them, .astype(jnp.int32), where all "
            f"are below 2**31, or {_NUMBER_IDS}"
        )
    if array.dtype != jnp.int64:
        array = array.astype(jnp.int32)
    if array.shape == (length,):
        return array[None]
    if array.shape != (*batch, length):
        shapes = f"{(*batch, length)} or ({length},)" if batch else f"({length},)"
        raise ValueError(f"{name} must have shape {shapes}, got {array.shape}")
    return array.reshape(-1, length)

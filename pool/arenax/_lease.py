"""A lease: one explicit checkout of one slot, written in place and returned once."""

import operator
import sys
import warnings
from _thread import RLock  # What threading.RLock, a function, makes at several times the cost.
from collections.abc import Callable
from time import monotonic
from typing import Any, Self, TypeVar

import jax
import numpy as np
from jax.core import Tracer

from . import _trace_leases as trace  # pyright: ignore[reportPrivateUsage]
from ._arena import Arena
from ._call_site import call_site
from ._errors import LeaseReleased, NotSteady, OutOfBounds
from ._landing import Landing
from ._request import SizeClass, as_array, canonical_dtype, is_castable, scalar_of
from ._slot import Holder, Shelf, Slot

T = TypeVar("T")


class LeaseHolder(Holder):
    """Holds a lease's slot."""

    __slots__ = ()

    kind = "Lease"


class Lease:
    """One checkout of one slot, made by `BufferPool.lease`; a context manager that returns it.

    Operations on one lease are serialised, and `release` waits for them. Each write donates the slot's array, so read
    `array` again after it.

    A lease is in one of four states. Each call either does what the table says or raises and changes nothing::

        state     array          write, append, fill, update  release        detach
        open      read           busy, then open              released       busy, then detached
        busy      read           RuntimeError                 RuntimeError   RuntimeError
        released  LeaseReleased  LeaseReleased                LeaseReleased  LeaseReleased
        detached  LeaseReleased  LeaseReleased                LeaseReleased  LeaseReleased

    It is busy while an operation runs: to that operation itself, such as a function that `update` is tracing. Another
    thread waits, and finds it open. An operation that raises leaves it open.

    An open lease that is dropped comes back by itself, late, with a `ResourceWarning`, which names the line that made
    the lease where that is known: see `trace_leases`. There is no warning once the pool is closed, as nobody waits for
    the slot any more, nor at the exit of the interpreter.

    Example:
        >>> import arenax, numpy as np
        >>> with arenax.BufferPool() as pool, pool.lease((4, 2), "float32") as lease:
        ...     lease.append(np.ones((1, 2), np.float32))
        ...     lease.append(np.full((1, 2), 2, np.float32))
        ...     print(lease.array)
        [[1. 1.]
         [2. 2.]
         [0. 0.]
         [0. 0.]]
    """

    __slots__ = (
        "__weakref__",
        "_arena",
        "_busy",
        "_cursor",
        "_ended",
        "_holder",
        "_how",
        "_landing",
        "_lock",
        "_site",
        "_slot",
    )

    def __init__(self, arena: Arena, landing: Landing, shelf: Shelf, fill: Any) -> None:
        """Checks a slot out and fills it, unless `fill` is None."""
        self._arena = arena
        self._landing = landing
        self._lock = RLock()
        self._busy = False
        self._cursor = 0
        # The line that made it, and after its end the one that ended it; None where it is not traced.
        self._site = call_site() if next(trace.turns) else None
        holder = LeaseHolder()
        holder.lock = self._lock
        loan = arena.loan(holder)
        if self._site is not None:
            loan.site = self._site  # Also where it is one of the sample.
        try:
            (slot,) = arena.checkout((shelf,), (shelf.nbytes,), loan)
            self._slot: Slot = slot
            if slot.spilled and not arena.recorders:  # Which want to see its end.
                loan.slots = []  # The lease alone keeps the slot, and with it the buffer.
            array = slot.array
            # Its last borrower donated it away, or failed to compute it. The first line alone is cheaper than the call.
            if (array is None or array.is_deleted() or slot.unproven or slot.writers) and not landing.is_whole(slot):
                arena.revive(slot)
            if fill is not None:
                landing.fill(slot, fill)
        except BaseException:
            arena.give_back(loan)
            raise
        # The lease has its slot as long as it has its holder: giving that up ends both, in one store, so that whatever
        # strikes finds it on loan or returned, and one that is returned can touch no later tenant.
        self._holder: Holder | None = holder

    @property
    def size_class(self) -> SizeClass:
        """Shape and dtype of the slot."""
        return self._slot.size_class

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the slot."""
        return self._slot.size_class.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the slot."""
        return self._slot.size_class.dtype

    @property
    def device(self) -> Any:
        """The device that the slot lies on."""
        return self._landing.device

    @property
    def cursor(self) -> int:
        """Where the next `append` goes on axis 0."""
        return self._cursor

    @property
    def released(self) -> bool:
        """Whether the slot was returned or detached."""
        return self._holder is None

    @property
    def array(self) -> jax.Array:
        """The slot's array as it is now. The next write or update deletes it: read it again then.

        Raises:
            LeaseReleased: After `release` or `detach`.
        """
        with self._lock:
            self._alive("array")
            return self._slot.array

    def write(self, value: Any, at: tuple[int, ...] | None = None) -> None:
        """Writes `value` into a part of the slot, in place.

        A new shape of `value` compiles a program; the cost of the write itself does not depend on the slot's size.

        Args:
            value: An array of the slot's rank, or anything `numpy.asarray` takes; of a kind that the slot's dtype
                holds.
            at: Start on each axis; None is the origin.

        Raises:
            OutOfBounds: Where the value would leave the slot; also a `ValueError`.
            TypeError: Where the dtype does not fit.
            LeaseReleased: After the return.
        """
        self._operate("write", self._write_checked, value, at)

    def append(self, rows: Any) -> None:
        """Writes `rows` along axis 0 at the lease's cursor, and moves the cursor past them.

        Args:
            rows: An array of the slot's rank.

        Raises:
            OutOfBounds: Where the rows do not fit behind the cursor; also a `ValueError`.
            TypeError: Where the dtype does not fit.
            LeaseReleased: After the return.
        """
        self._operate("append", self._append, rows)

    def fill(self, value: Any) -> None:
        """Sets every element to the scalar `value`, and the cursor to 0."""
        scalar_of(value, self.dtype)
        self._operate("fill", self._fill, value)

    def update(self, fn: Callable[..., jax.Array], *args: Any) -> None:
        """Replaces the slot's contents by ``fn(contents, *args)``, compiled with the slot donated.

        Define `fn` once, outside the loop: each new function, and each new shape of `args`, compiles a program.

        Args:
            fn: A function that JAX can trace; it returns an array of the slot's shape and dtype.
            *args: Pytrees of arrays and scalars.

        Raises:
            TypeError: Where the result would not fit the slot; the slot is left as it was.
            LeaseReleased: After the return.

        Example:
            >>> import arenax
            >>> def add(total, x):
            ...     return total + x
            >>> with arenax.BufferPool() as pool, pool.lease((3,), "float32") as total:
            ...     total.update(add, 2.0)
            ...     print(total.array)
            [2. 2. 2.]
        """
        self._operate("update", self._run, lambda: self._landing.update(self._slot, fn, args))

    def release(self) -> None:
        """Returns the slot.

        Raises:
            LeaseReleased: Where it was returned before; nothing changes then.
        """
        with self._lock:
            if self._busy or self._holder is None:
                self._may("release")
            if self._site is not None:
                self._site = call_site()
            self._how, self._ended = "released", monotonic()
            self._holder = None
            if self._slot.spilled:
                self._slot.drop_buffer()

    def detach(self) -> jax.Array:
        """Takes the array out of the pool for good and returns it; a new buffer takes its slot's place.

        Raises:
            LeaseReleased: After the return.
        """
        return self._operate("detach", self._detach)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._holder is not None:
                self.release()

    def __del__(
        self, is_exit: Callable[[], bool] = sys.is_finalizing, warn: Callable[..., None] = warnings.warn
    ) -> None:
        # Runs anywhere, also in a garbage collection while this very thread has the arena's lock: it takes none. The
        # holder, dropped after this, returns the slot. What it calls is bound, as globals may be gone at the exit.
        try:
            if self._holder is None:
                return
        except AttributeError:  # It was never made in full.
            return
        if not self._arena.closed and not is_exit():
            made = "to see where it was made, make it in `with arenax.trace_leases()`"
            if self._site is not None:
                made = f"it was made at {self._site}"
            warn(
                f"a lease of {self._slot.size_class} was dropped and not released, so that its slot comes back only "
                f"now: use it in a `with`, or call release(); {made}",
                ResourceWarning,
                stacklevel=2,
            )

    def __repr__(self) -> str:
        return f"<Lease of {self.size_class} on {self._landing.name}: {self._end or 'leased'}>"

    @property
    def _end(self) -> str:
        """How it ended, ``"released"`` or ``"detached"``; empty before."""
        if self._holder is not None:
            return ""
        return self._how

    def _operate(self, name: str, operation: Callable[..., T], *args: Any) -> T:
        with self._lock:
            self._may(name)
            # No context manager of Python's, inside which an interrupt could leave the lease busy for ever.
            self._busy = True
            try:
                return operation(*args)
            finally:
                self._busy = False

    def _detach(self) -> jax.Array:
        array = self._arena.detach(self._slot)
        if self._site is not None:
            self._site = call_site()
        self._ended = monotonic()
        self._how = "detached"
        self._holder = None
        return array

    def _fill(self, value: Any) -> None:
        self._run(lambda: self._landing.fill(self._slot, value))
        self._cursor = 0

    def _append(self, rows: Any) -> None:
        value = self._checked(rows)
        self._write(value, (self._cursor, *(0,) * (len(self.shape) - 1)))
        self._cursor += value.shape[0]

    def _write_checked(self, value: Any, at: Any) -> None:
        self._write(self._checked(value), (0,) * len(self.shape) if at is None else _start(at))

    def _may(self, name: str) -> None:
        self._alive(name)
        if self._busy:
            raise RuntimeError(f"{name} was called inside another operation on the same lease of {self.size_class}")

    def _alive(self, name: str) -> None:
        if self._holder is not None:
            return
        seconds = monotonic() - self._ended
        where = "" if self._site is None else f" at {self._site}"
        raise LeaseReleased(
            f"{name} on a lease of {self.size_class} that was {self._end} {seconds:.3g} s ago{where}: "
            "check out a new one",
            size_class=str(self.size_class),
            released_seconds=seconds,
            call_site=self._site,
        )

    def _checked(self, value: Any) -> Any:
        if isinstance(value, Tracer):
            raise TypeError("a lease cannot take a tracer: call it outside of jit, or use lease.update")
        value = as_array(value, "the value")
        if value.dtype != self.dtype and not is_castable(canonical_dtype(value.dtype), self.dtype):
            raise TypeError(f"a value of dtype {value.dtype} does not fit a slot of {self.size_class}: cast it first")
        if len(value.shape) != len(self.shape):
            raise ValueError(f"a value must have the slot's rank, {len(self.shape)}, got shape {tuple(value.shape)}")
        return value

    def _write(self, value: Any, at: tuple[int, ...]) -> None:
        shape = tuple(value.shape)
        if len(at) != len(shape):
            raise ValueError(f"at must have one start for each of {len(shape)} axes, got {at}")
        if any(i < 0 or i + n > m for i, n, m in zip(at, shape, self.shape, strict=True)):
            raise OutOfBounds(
                f"a value of shape {shape} at {at} would leave the slot of {self.size_class}",
                at=at,
                shape=shape,
                slot_shape=self.shape,
            )
        if not isinstance(value, jax.Array):
            value = np.asarray(value).astype(self.dtype, copy=False)
        self._run(lambda: self._landing.write(self._slot, value, at))
        self._arena.wrote((self._slot,), (value.size * self.dtype.itemsize,))

    def _run(self, operation: Callable[[], None]) -> None:
        """Runs one operation; a slot that lost its buffer to it gets one of zeros before the error goes on."""
        try:
            operation()
        except NotSteady:
            raise
        except BaseException:
            if not self._landing.is_whole(self._slot):
                self._arena.replace(self._slot)
            raise


def _start(at: Any) -> tuple[int, ...]:
    try:
        return tuple(operator.index(i) for i in at)
    except TypeError:
        raise TypeError(f"at must be a tuple of integers, the start on each axis, got {at!r}") from None

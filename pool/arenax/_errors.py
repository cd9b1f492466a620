"""The pool's errors: each carries its figures as fields, pickles, and derives from the fitting built-in too."""

from typing import Any


class ArenaxError(Exception):
    """Base of all errors that arenax raises on purpose.

    The figures in the message are also attributes of the error, named in each subclass.
    """

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.__dict__.update(fields)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args[0], dict(self.__dict__))


def _rebuild(kind: type[ArenaxError], message: str, fields: dict[str, Any]) -> ArenaxError:
    return kind(message, **fields)


class PoolExhausted(ArenaxError, RuntimeError):
    """No slot can serve the request now. Also a `TimeoutError` after a wait and a `MemoryError` for a budget.

    Attributes:
        pool: Name of the pool.
        asked: What was asked for: a text that names size classes, or bytes for a budget.
        leased_count: Slots of the classes asked for that are out on loan.
        slot_count: Slots of the classes asked for.
        idle_bytes: Bytes of idle slots of all classes.
        budget_bytes: The budget, or None.
        holders: Who has the slots of the classes asked for: ``{"Lease": 2}``, by the kind of holder.
        oldest: The three oldest of these loans: ``"Lease of float32[4] for 1.5 s from train.py:7"``; the line is known
            where `trace_leases` is on.
        oldest_seconds: Age of the very oldest, 0 where there is none.
    """

    pool: str
    holders: dict[str, int]
    oldest: tuple[str, ...]
    oldest_seconds: float
    asked: str
    leased_count: int
    slot_count: int
    idle_bytes: int
    budget_bytes: int | None


class WaitTimeout(PoolExhausted, TimeoutError):
    """A `PoolExhausted` that comes after a wait; `timeout_seconds` is the caller's own figure.

    Attributes:
        timeout_seconds: The timeout that the pool was given.
    """

    timeout_seconds: float


class BudgetExceeded(PoolExhausted, MemoryError):
    """A `PoolExhausted` for want of budget.

    Attributes:
        asked_bytes: Bytes that the request needs.
        reserved_bytes: Bytes that the pool holds already.
    """

    asked_bytes: int
    reserved_bytes: int


class LeaseReleased(ArenaxError, RuntimeError):
    """A lease was used, or returned, after its return.

    Attributes:
        size_class: Text of the size class, such as ``float32[64,32]``.
        released_seconds: How long ago it was returned.
        call_site: ``file:line`` of the return, or None where the lease was not traced.
    """

    size_class: str
    released_seconds: float
    call_site: str | None


class NoSizeClass(ArenaxError, ValueError):
    """A size lies above the largest size class.

    Attributes:
        size: The size that was asked for.
        maximum: The largest size class.
        axis: The ragged axis, or None where no array is at hand.
        leaf: The leaf, such as ``leaf ['x']``, or an empty text.
    """

    size: int
    maximum: int
    axis: int | None
    leaf: str


class OutOfBounds(ArenaxError, ValueError):
    """A write would leave its slot. XLA would clamp or drop it in silence.

    Attributes:
        at: Start of the write on each axis.
        shape: Shape of the value.
        slot_shape: Shape of the slot.
    """

    at: tuple[int, ...]
    shape: tuple[int, ...]
    slot_shape: tuple[int, ...]


class NotSteady(ArenaxError, RuntimeError):
    """Something was allocated, copied or compiled inside `BufferPool.steady`.

    Attributes:
        cause: One of ``"creation"``, ``"spill"``, ``"conversion"``, ``"copy"``, ``"compile"``.
        call_site: ``file:line`` of the caller.
    """

    cause: str
    call_site: str


class PoolClosed(ArenaxError, RuntimeError):
    """The pool is closed.

    Attributes:
        pool: Name of the pool.
    """

    pool: str


class BadTrace(ArenaxError, ValueError):
    """A trace, or a file that should hold one, says what cannot be.

    Attributes:
        path: The file, or None where the trace comes from none.
        where: The line or the event, such as ``"line 7"``, or None where it is the whole.
        fault: What is wrong.
    """

    path: str | None
    where: str | None
    fault: str

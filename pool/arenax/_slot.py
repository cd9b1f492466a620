"""Slots, the shelves that hold those of one size class, and loans: who has a slot now."""

import weakref
from collections import deque
from concurrent.futures import Future
from typing import Any

import attrs

from ._request import SizeClass, bits_of
from ._stats import Tally


class Loan(weakref.ref[Any]):
    """One checkout, by identity: a weak reference to whoever holds the slots.

    When the holder dies, or the last reference to a `Holder` is given up, the loan puts itself into the arena's queue
    of returns. Its callback is that queue's own `put`, in C, so that no signal handler can run inside it and no lock is
    taken. A slot goes back only while ``slot.loan is loan``: a double or stale return finds another loan.

    Attributes:
        slots: The slots lent; some may be on another loan by now.
        token: The borrower's `CancelToken`, or None.
        since: When it began, by `time.monotonic`.
        site: ``file:line`` of the code that drew it, where it is traced, else None.
        lands: Whether a value lands in each slot at once, which counts as a write.

    Weak references to a `jax.Array` cannot be hashed, and ``==`` compares elements: compare loans by ``is``.
    """

    # Filled by the arena that begins it: a Python `__init__` would double the cost of a loan.
    __slots__ = ("lands", "since", "site", "slots", "token")

    slots: list["Slot"]
    token: object
    since: float
    site: str | None
    lands: bool


class Holder:
    """Holds a loan for whoever has a reference to this object: to drop the last one is to return the slots.

    Attributes:
        kind: What messages call it.
        lock: That of the lease or the step which has it, for a forked child to let go of; not set by others.
    """

    __slots__ = ("__weakref__", "lock")

    kind = "a call"
    lock: Any


@attrs.define(eq=False)
class Slot:
    """One preallocated device buffer of a size class.

    Invariants: a slot is in its shelf's `free` list, or has a loan, or is out of the pool. `array` is None before it is
    made and after it is given up. `leased` says that the tallies count it as leased.

    Attributes:
        shelf: The shelf it belongs to.
        array: The pool's own handle on the buffer.
        address: Where the buffer lies, recorded after every landing.
        handle: Makes of ``[array]`` another array object on the buffer.
        view: The landing's private view of the memory, or None.
        loan: Who has it, or None.
        leased: Whether it counts as leased (a slot that is being reserved has a loan and does not).
        spilled: Whether it is outside the pool and its budget, and goes when it is returned.
        requested: Bytes that the borrower asked for.
        unproven: Whether the array is the result of a program that has not been awaited, and so may have failed.
        writers: Helpers that an interrupted landing may have left writing; empty but for that.
        parts: Of a sharded slot, one slot for each of this process's devices; None for any other.
        donor: The slot, given up for this one, whose buffer it is to take over; None once it has, or without one.
        contents: ``(axis, extent, pad)`` where everything from `extent` on holds the pad's bytes; None where unknown.
        priority: GreedyDual-Size priority while idle.
        turn: The number of its last return, which decides between equal priorities.
    """

    shelf: "Shelf"
    array: Any = None
    address: int = 0
    handle: Any = None
    view: Any = None
    loan: Loan | None = None
    leased: bool = False
    spilled: bool = False
    requested: int = 0
    unproven: bool = False
    parts: "tuple[Slot, ...] | None" = None
    donor: "Slot | None" = None
    writers: "list[Future[None]]" = attrs.field(factory=list)
    contents: tuple[int, int, bytes] | None = None
    priority: float = 0.0
    turn: int = 0

    @property
    def size_class(self) -> SizeClass:
        """The slot's shape and dtype."""
        return self.shelf.size_class

    def take_buffer(self, other: "Slot") -> None:
        """Takes over the buffer of a slot that is not used any further, all at once: no call, and so no interrupt."""
        self.array, self.address, self.handle, self.view = other.array, other.address, other.handle, other.view
        self.contents, self.unproven, self.parts = other.contents, other.unproven, other.parts

    def drop_buffer(self) -> None:
        """Frees the buffer of a slot that is out of the pool; an old lease or step may still refer to the slot."""
        self.array = self.view = self.handle = self.parts = None


@attrs.define(eq=False)
class Shelf:
    """The slots of one size class in one arena, and their figures.

    Attributes:
        size_class: Shape and dtype.
        nbytes: Bytes of one slot.
        form: What the buffers of two classes must have in common for one to become the other: bytes, element size, and
            where they lie.
        worth: What an idle slot adds to the clock of GreedyDual-Size: the cost of making it, 1, over its size.
        free: Idle slots; the most recently returned is on the right and serves next.
        slots: All slots of the class, spilled ones left out.
        tally: The class's figures.
        reserved_count: Slots that were reserved, and not made for want of one.
        ragged_axis: The axis along which batches vary that land here; None where none does. Recordings tell of it.
        misses: Checkouts that found no free slot since the last sweep.
        sweep_after: Misses until the next sweep: as many as there were slots at the last one.
    """

    size_class: SizeClass
    nbytes: int = attrs.field(init=False)
    form: tuple[Any, ...] = attrs.field(init=False)
    worth: float = attrs.field(init=False)
    free: deque[Slot] = attrs.field(factory=deque)
    slots: set[Slot] = attrs.field(factory=set)
    tally: Tally = attrs.field(factory=Tally)
    reserved_count: int = 0
    ragged_axis: int | None = None
    misses: int = 0
    sweep_after: int = 0

    def __attrs_post_init__(self) -> None:
        self.nbytes = self.size_class.nbytes
        bits, sharding = bits_of(self.size_class.dtype).name, self.size_class.sharding
        where = None if sharding is None else (sharding.device_set, sharding.memory_kind)
        self.form = (self.nbytes, bits, where)
        self.worth = 1 / max(self.nbytes, 1)

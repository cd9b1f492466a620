"""Waiters: checkouts that wait for a slot, and the token by which another thread ends such a wait."""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import attrs

from ._errors import ArenaxError
from ._slot import Loan, Shelf, Slot


class CancelToken:
    """Marks the batches of one consumer, and lets another thread end a wait for the next one.

    A loader that lands ahead passes one token to each `BufferPool.put`. Where its consumer is blocked on the next batch
    (`starve`) and itself holds every slot that the waiting `put` needs, nobody could ever return one: the wait ends
    with `PoolExhausted` rather than never.

    Example:
        >>> import arenax, numpy as np
        >>> token = arenax.CancelToken()
        >>> token.cancel()
        >>> batch = np.arange(4, dtype=np.int32)
        >>> with arenax.BufferPool(on_exhausted="wait") as pool:
        ...     pool.reserve(batch, slots=1)
        ...     held = pool.put(batch)
        ...     try:
        ...         pool.put(batch, cancel=token)
        ...     except arenax.PoolExhausted:
        ...         print("ended")
        ended
    """

    def __init__(self) -> None:
        self._cancelled = False
        self._owner: weakref.ref[Any] | None = None
        self.starving = False
        self._changed: Callable[[], None] | None = None

    def cancel(self) -> None:
        """Ends the wait that uses this token, now or as soon as one begins. Takes no lock: a finalizer may call it."""
        self._cancelled = True
        self._tell()

    def follow(self, owner: object) -> None:
        """Is cancelled when `owner` dies as well, be it that its finalizer was interrupted: noticed within a second."""
        self._owner = weakref.ref(owner)

    @property
    def cancelled(self) -> bool:
        """Whether it was cancelled, or its owner is dead."""
        return self._cancelled or (self._owner is not None and self._owner() is None)

    def starve(self, starving: bool) -> None:
        """Says whether the consumer of this token's batches is blocked until the next one comes."""
        self.starving = starving
        if starving:
            self._tell()

    def _tell(self) -> None:
        changed = self._changed
        if changed is not None:
            changed()

    def bind(self, changed: Callable[[], None]) -> None:
        """Names the arena's function to call on a change; the arena calls this before a wait."""
        self._changed = changed


@attrs.define(eq=False)
class Waiter:
    """One checkout in the line. It is settled, under the arena's lock, by slots or by an error, and only once.

    Attributes:
        shelves: The shelf of each leaf.
        requested: Bytes asked for, a leaf.
        loan: The loan that the slots will go to; dead where the waiter was abandoned.
        token: The caller's token, or None.
        need: Slots needed of each shelf.
        signal: Wakes the waiter; whatever comes through it carries no meaning.
        settled: Whether slots or an error are there.
        slots: What it was given.
        error: What it is refused with.
    """

    shelves: Sequence[Shelf]
    requested: Sequence[int]
    loan: Loan
    token: CancelToken | None
    need: Counter[Shelf] = attrs.field(init=False)
    signal: "SimpleQueue[None]" = attrs.field(factory=SimpleQueue)
    settled: bool = False
    slots: list[Slot] | None = None
    error: ArenaxError | None = None

    def __attrs_post_init__(self) -> None:
        self.need = Counter(self.shelves)

    def grant(self, slots: list[Slot]) -> None:
        """Settles the waiter with slots that already carry its loan."""
        self.slots, self.settled = slots, True
        self.signal.put(None)

    def refuse(self, error: ArenaxError) -> None:
        """Settles the waiter with an error."""
        self.error, self.settled = error, True
        self.signal.put(None)

    def is_hopeless(self) -> bool:
        """Whether no return by anybody else could ever serve it."""
        for shelf, count in self.need.items():
            mine = 0
            if self.token is not None and self.token.starving:
                # A loan whose holder is dead is on its way back.
                loans = [s.loan for s in shelf.slots if s.loan is not None]
                mine = sum(loan.token is self.token and loan() is not None for loan in loans)
            if count > len(shelf.slots) - mine:
                return True
        return False

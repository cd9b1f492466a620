"""The arena: the slots of one device, lent by its policy under one lock."""

import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from . import _refusals as refusals
from ._call_site import caller
from ._policy import Policy
from ._request import SizeClass
from ._slot import Holder, Loan, Shelf, Slot
from ._verify import verify
from ._waiters import CancelToken, Waiter

# A wait is ended by a message, and this often looks whether an interrupt in another thread has swallowed it.
LOOK_AGAIN_SECONDS = 1.0
MODES = ("grow", "spill", "wait", "raise")


class Maker(Protocol):
    """What the arena needs of a landing: a new buffer for an empty slot."""

    def create(self, slot: Slot) -> None:
        """Gives an empty slot its buffer."""
        ...


class Arena(Policy):
    """A policy that any thread may use: one lock around each decision, and outside it what takes time.

    Returns never take the lock: whoever ends a loan, a finalizer too, puts it into the queue of returns, and the next
    one who holds the lock drains it.
    """

    def __init__(self, maker: Maker, *, name: str, mode: str, budget: int | None, timeout: float | None) -> None:
        super().__init__(name, mode, budget, timeout)
        self._maker = maker
        self._lock = threading.Lock()
        # Ends a loan: takes no lock, and may be called twice, late, and in a finalizer.
        self.give_back: Callable[[Loan], None] = self._returned.put
        self._warned_of_spill = False

    def shelf(self, size_class: SizeClass) -> Shelf:
        """Returns the shelf of a class, a new one where there is none."""
        # Critical section.
        with self._lock:
            return self._shelf(size_class)

    def loan(self, holder: object, token: object = None, lands: bool = False) -> Loan:
        """Begins a loan to `holder`; its slots come back when it dies or by `give_back`."""
        loan = Loan(holder, self.give_back)
        loan.slots, loan.token, loan.since, loan.lands = [], token, time.monotonic(), lands
        return loan

    def abandon(self, loan: Loan, requested: Sequence[int]) -> None:
        """Ends the loan of a checkout or landing that failed: nothing was written after all."""
        # Critical section.
        with self._lock:
            self._count_writes(loan.slots, requested, -1)
        self.give_back(loan)

    def _wake(self) -> None:
        """Has the waiter on duty look at the line again; takes no lock, as a finalizer may call it."""
        self._returned.put(None)

    def checkout(
        self, shelves: Sequence[Shelf], requested: Sequence[int], loan: Loan, cancel: CancelToken | None = None
    ) -> list[Slot]:
        """Lends a slot of each shelf to `loan`, all or none.

        The slots have a buffer when this returns. On any exception the caller gives the loan back, and with it whatever
        it was lent.

        Raises:
            PoolExhausted: Where the mode says so.
            NotSteady: Where a slot would have to be made, converted or spilled inside `steady`.
            PoolClosed: After `close`.
        """
        if cancel is not None:
            cancel.bind(self._wake)
        if self._lock.locked():
            self._stand_back()
        # Critical section.
        with self._lock:
            if self.closed:
                raise refusals.closed(self)
            back_count = self._returned.qsize()
            if back_count == 1 and not self._line:
                slots = self._pass_on(shelves, requested, loan)
                if slots is not None:
                    return slots
            elif back_count or self._line:
                self._settle()
            if not self._line:
                slots = self._take(shelves, requested, loan)
                if slots is not None:
                    return slots
            outcome = self._decide(shelves, requested, loan, cancel)
        if isinstance(outcome, Waiter):
            return self._wait(outcome)
        slots, doomed = outcome
        for slot in doomed:  # Before new buffers are made.
            slot.drop_buffer()
        self._make([s for s in slots if s.array is None])
        if not self._warned_of_spill and any(s.spilled for s in slots):
            self._warned_of_spill = True
            warnings.warn_explicit(refusals.spill(self, shelves), RuntimeWarning, *caller())
        return slots

    def _stand_back(self) -> None:
        """Lets whoever has the lock go on, rather than block on it at once.

        A thread that blocks is given the lock before it has the GIL; whoever runs meanwhile blocks in turn, and from
        then on each checkout costs two switches of threads (a lock convoy): four times as much with two threads.
        """
        for _ in range(100):
            time.sleep(0)
            if not self._lock.locked():
                return

    def reserve(self, wanted: Counter[SizeClass]) -> None:
        """Makes that many more slots of each class, idle; all or none.

        Raises:
            BudgetExceeded: Naming the bytes asked for, reserved and allowed; also a `MemoryError`.
        """
        holder = Holder()
        loan = self.loan(holder)
        # Critical section.
        with self._lock:
            if self.closed:
                raise refusals.closed(self)
            asked = sum(c.nbytes * n for c, n in wanted.items())
            if self.budget is not None and self.tally.reserved_bytes + asked > self.budget:
                raise refusals.over_budget(self, wanted, asked)
            if self.steady_depth and asked:
                raise refusals.unsteady(self, "creation", "reserve")
            for size_class, count in wanted.items():
                shelf = self._shelf(size_class)
                loan.slots.extend(self._new_slot(shelf, loan) for _ in range(count))
        try:
            self._make(loan.slots)
        except BaseException:
            for slot in loan.slots:
                slot.array = None  # An empty slot leaves the pool when it is returned: nothing stays half done.
            raise
        finally:
            self.settle([loan])

    def hand_over(self, slots: Sequence[Slot], token: object) -> list[Any]:
        """Hands slots from the loan of a call over to the arrays that its caller gets, each a loan of its own.

        The slots keep a second handle on each buffer: a weak reference to the first tells when the caller dropped it.
        """
        give_back, now = self.give_back, time.monotonic()
        arrays: list[Any] = []
        for slot in slots:
            array = slot.array
            arrays.append(array)
            if slot.spilled:  # Its buffer is the borrower's alone, and is freed when he drops it.
                slot.loan = None
                slot.drop_buffer()
                continue
            slot.array = slot.handle([array])
            loan = slot.loan = Loan(array, give_back)
            loan.slots, loan.token, loan.since, loan.lands = [slot], token, now, False
        if self.closed:  # Nobody drains the returns any more: let go of the buffers with the arrays.
            for slot in slots:
                loan, slot.loan = slot.loan, None
                if loan is not None:
                    loan.slots = []
        return arrays

    def detach(self, slot: Slot) -> Any:
        """Takes the array out of a slot on loan, for good, and gives the slot a new one; returns the array."""
        array = slot.array
        if slot.spilled or slot.loan is None:
            slot.loan, slot.array = None, None
            return array
        try:
            self.replace(slot)
        except BaseException:
            slot.array = array
            raise
        return array

    def replace(self, slot: Slot) -> None:
        """Gives a slot whose buffer left the pool, or was lost, a new one."""
        # Critical section.
        with self._lock:
            if self.steady_depth:
                raise refusals.unsteady(
                    self, "creation", f"a {slot.size_class} array was kept, detached or donated away"
                )
        self._make([slot])

    def moved(self, slot: Slot, cause: str) -> None:
        """Counts a landing whose slot had moved; raises `NotSteady` where that is not allowed."""
        # Critical section.
        with self._lock:
            self._count(slot.shelf, "copy_count")
            if self.steady_depth:
                raise refusals.unsteady(self, "copy", f"the slot of {slot.size_class} moved: {cause}")

    def wrote(self, slots: Sequence[Slot], requested: Sequence[int]) -> None:
        """Counts writes of that many bytes into the slots."""
        # Critical section.
        with self._lock:
            self._count_writes(slots, requested)

    def settle(self, returns: Sequence[Loan] = ()) -> None:
        """Processes the given and all queued returns, and serves or refuses waiters."""
        # Critical section.
        with self._lock:
            for loan in returns:
                self._end(loan)
            self._settle()

    def snapshot(self, read: Callable[[], Any]) -> Any:
        """Calls `read` under the lock with all returns processed."""
        # Critical section.
        with self._lock:
            self._settle()
            return read()

    def steady(self, change: int) -> None:
        """Enters (1) or leaves (-1) a steady scope."""
        with self._lock:
            self.steady_depth += change

    def close(self) -> None:
        """Drops every slot and refuses every waiter. What is on loan stays valid, on its holder's account."""
        # Critical section.
        with self._lock:
            self._settle()
            self.closed = True
            for waiter in self._line:
                if not waiter.settled:
                    waiter.refuse(refusals.closed(self))
            if self._line:
                self._returned.put(None)
            idle: list[Slot] = []
            for shelf in self.shelves.values():
                idle.extend(shelf.free)
                for slot in shelf.slots:
                    loan, slot.loan = slot.loan, None
                    if loan is not None:
                        loan.slots = []
                shelf.slots, shelf.free = set(), deque()
                self._forget(shelf.tally)
            self._forget(self.tally)
        for slot in idle:
            slot.drop_buffer()

    def check(self) -> None:
        """Verifies the invariants that `Policy` states; sweeps lost loans first.

        Raises:
            AssertionError: Naming the invariant that is broken.
        """
        # Critical section.
        with self._lock:
            self._sweep(self.shelves.values())
            self._settle()
            verify(self)

    def _make(self, slots: Sequence[Slot]) -> None:
        """Gives empty slots, on loan to the caller, their buffers."""
        for slot in slots:
            self._maker.create(slot)
            if not slot.spilled:
                with self._lock:
                    self._count(slot.shelf, "creation_count")

    def _wait(self, waiter: Waiter) -> list[Slot]:
        """Blocks, without the lock, until the waiter is settled or its one deadline has passed.

        The first in the line is on duty: it listens to the queue of returns, since a finalizer can do no more than put
        something there. The others listen to their own signal, which also tells them when the duty is theirs.
        """
        deadline = None if self.timeout is None else time.monotonic() + self.timeout
        try:
            while not waiter.settled:
                inbox: SimpleQueue[Any] = self._returned if self._line[0] is waiter else waiter.signal
                left = LOOK_AGAIN_SECONDS if deadline is None else max(deadline - time.monotonic(), 0)
                try:
                    loan = inbox.get(timeout=min(left, LOOK_AGAIN_SECONDS))
                except Empty:
                    with self._lock:
                        self._sweep(waiter.need)
                        self._settle()
                        if not waiter.settled and left <= LOOK_AGAIN_SECONDS and deadline is not None:
                            waiter.refuse(refusals.timed_out(self, waiter.shelves))
                else:
                    self.settle([] if loan is None else [loan])
        finally:
            with self._lock:
                self._line.remove(waiter)
                self._settle()
                self._hand_over_duty()
        if waiter.error is not None:
            error, waiter.error = waiter.error, None
            try:
                raise error
            finally:
                del error  # Or the error, its traceback and this frame would be a cycle, and keep the caller's leases.
        assert waiter.slots is not None
        return waiter.slots

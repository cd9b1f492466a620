"""The arena: the slots of one device, and the policy that lends, makes, converts, spills and waits, under one lock."""

import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from . import _refusals as refusals
from ._request import SizeClass
from ._slot import Loan, Shelf, Slot
from ._stats import Tally
from ._verify import verify
from ._waiters import CancelToken, Waiter

MODES = ("grow", "spill", "wait", "raise")


class Maker(Protocol):
    """What the arena needs of a landing: a new buffer for an empty slot."""

    def create(self, slot: Slot) -> None:
        """Gives an empty slot its buffer."""
        ...


class Arena:
    """Slots of one device, their free lists, budget and waiters.

    `checkout` is the policy: one decision for a whole batch, under the lock, that leaves to the caller what is to be done
    outside it (making buffers, dropping others, waiting). Returns never take the lock: whoever ends a loan, a finalizer
    too, puts it into the queue of returns, and the next one who holds the lock drains it.

    Invariants, verified by `check`: every slot of a shelf is free or has a loan; the tallies are the sums over the slots;
    reserved bytes never pass the budget; nobody waits for what is free.
    """

    def __init__(self, maker: Maker, *, name: str, mode: str, budget: int | None, timeout: float | None) -> None:
        self.name = name
        self.mode = mode
        self.budget = budget
        self.timeout = timeout
        self.tally = Tally()
        self.shelves: dict[SizeClass, Shelf] = {}
        self.steady_depth = 0
        self.closed = False
        self._maker = maker
        self._lock = threading.Lock()
        self._returned: SimpleQueue[Loan | None] = SimpleQueue()
        self._line: deque[Waiter] = deque()
        self._clock = 0.0
        self._warned_of_spill = False

    # Entry points. ----------------------------------------------------------------------------------------------------

    def shelf(self, size_class: SizeClass) -> Shelf:
        """Returns the shelf of a class, a new one where there is none."""
        with self._lock:
            return self._shelf(size_class)

    def loan(self, holder: object, token: object = None) -> Loan:
        """Begins a loan to `holder`; its slots come back when it dies or by `give_back`."""
        return Loan(holder, self._returned.put, token)

    def give_back(self, loan: Loan) -> None:
        """Ends a loan. Takes no lock and may be called twice, late, and in a finalizer."""
        self._returned.put(loan)

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
        if not shelves:
            return []
        # Critical section.
        with self._lock:
            if self.closed:
                raise refusals.closed(self)
            if self._line or not self._returned.empty():
                self._settle()
            slots = [] if self._line else self._pick(shelves)
            if slots:
                self._lend(slots, requested, loan)
                for shelf in shelves:
                    shelf.tally.hit_count += 1
                self.tally.hit_count += len(slots)
                return slots
            outcome = self._decide(shelves, requested, loan, cancel)
        if isinstance(outcome, Waiter):
            return self._wait(outcome)
        slots, doomed = outcome
        doomed.clear()  # Drops the buffers that were given up, before new ones are made.
        self._make([s for s in slots if s.array is None])
        if not self._warned_of_spill and any(s.spilled for s in slots):
            self._warned_of_spill = True
            warnings.warn(refusals.spill(self, shelves), RuntimeWarning, stacklevel=2)
        return slots

    def reserve(self, wanted: Counter[SizeClass]) -> None:
        """Makes that many more slots of each class, idle; all or none.

        Raises:
            BudgetExceeded: Naming the bytes asked for, reserved and allowed; also a `MemoryError`.
        """
        holder = _Holder()
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

    def lend_array(self, slot: Slot, array: Any, token: object) -> Any:
        """Hands a slot from the loan of a call over to the array that its borrower gets; returns the array."""
        loan = self.loan(array, token)
        loan.slots.append(slot)
        slot.loan = loan
        if self.closed:  # Nobody drains the returns any more: let go of the buffer with the array.
            loan.slots, slot.loan = [], None
        return array

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
                raise refusals.unsteady(self, "creation", f"a {slot.size_class} array was kept, detached or donated away")
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
            for slot, nbytes in zip(slots, requested, strict=True):
                slot.shelf.tally.write_count += 1
                slot.shelf.tally.written_bytes += nbytes
            self.tally.write_count += len(slots)
            self.tally.written_bytes += sum(requested)

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
            doomed: list[Slot] = []
            for shelf in self.shelves.values():
                doomed.extend(shelf.slots)
                for slot in shelf.slots:
                    if slot.loan is not None:
                        slot.loan.slots = []
                        slot.loan = None
                shelf.slots, shelf.free = set(), deque()
                self._forget(shelf.tally)
            self._forget(self.tally)

    def check(self) -> None:
        """Verifies the invariants of the class's docstring; sweeps lost loans first.

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

    # Policy: every function below runs under the lock. ----------------------------------------------------------------

    def _shelf(self, size_class: SizeClass) -> Shelf:
        shelf = self.shelves.get(size_class)
        if shelf is None:
            shelf = self.shelves[size_class] = Shelf(size_class)
        return shelf

    def _pick(self, shelves: Sequence[Shelf]) -> list[Slot]:
        """Takes a free slot of each shelf, or none at all."""
        picked: list[Slot] = []
        for shelf in shelves:
            if not shelf.free:
                for slot in reversed(picked):
                    slot.shelf.free.append(slot)
                return []
            picked.append(shelf.free.pop())
        return picked

    def _lend(self, slots: list[Slot], requested: Sequence[int], loan: Loan) -> None:
        loan.slots.extend(slots)
        for slot, nbytes in zip(slots, requested, strict=True):
            slot.loan, slot.leased, slot.requested = loan, True, nbytes
            slot.shelf.tally.lend(slot.shelf.nbytes, nbytes)
            self.tally.lend(slot.shelf.nbytes, nbytes)

    def _end(self, loan: Loan) -> None:
        """Frees what is still on this very loan; any other tenant's slot is left alone."""
        for slot in loan.slots:
            if slot.loan is not loan:
                continue
            shelf, slot.loan = slot.shelf, None
            if slot.spilled:
                continue
            if slot.leased:
                slot.leased = False
                shelf.tally.give_back(shelf.nbytes, slot.requested)
                self.tally.give_back(shelf.nbytes, slot.requested)
            if slot.array is None:
                self._remove(slot)
                continue
            slot.priority = self._clock + 1 / max(shelf.nbytes, 1)
            shelf.free.append(slot)
            shelf.tally.note_idle()
        self.tally.note_idle()

    def _remove(self, slot: Slot) -> None:
        slot.shelf.slots.discard(slot)
        slot.shelf.tally.remove_slot(slot.shelf.nbytes)
        self.tally.remove_slot(slot.shelf.nbytes)

    def _new_slot(self, shelf: Shelf, loan: Loan) -> Slot:
        """An empty slot, on loan from the start, its bytes taken from the budget."""
        slot = Slot(shelf, loan=loan)
        shelf.slots.add(slot)
        for tally in (shelf.tally, self.tally):
            tally.add_slot(shelf.nbytes)
        return slot

    def _settle(self) -> None:
        """Drains the returns, then serves in order each waiter for whose classes nobody waits before it."""
        returned = self._returned
        while not returned.empty():
            try:
                loan = returned.get_nowait()
            except Empty:  # The waiter on duty took it.
                break
            if loan is not None:
                self._end(loan)
        blocked: set[Shelf] = set()
        for waiter in self._line:
            if waiter.settled or waiter.loan() is None:
                continue
            slots = [] if blocked & waiter.need.keys() else self._pick(waiter.shelves)
            if waiter.token is not None and waiter.token.cancelled and not slots:
                waiter.refuse(refusals.exhausted(self, waiter.shelves, "the wait was cancelled"))
            elif slots:
                self._lend(slots, waiter.requested, waiter.loan)
                waiter.grant(slots)
            elif waiter.is_hopeless():
                waiter.refuse(refusals.exhausted(self, waiter.shelves, "whoever waits for them holds them all"))
            else:
                blocked |= waiter.need.keys()
        if self._line and self._line[0].settled:
            returned.put(None)  # The waiter on duty listens here, not to its own signal.

    def _sweep(self, shelves: Any) -> None:
        """Ends the loans whose holders died without a word: an interrupt can swallow an item of the queue."""
        for shelf in shelves:
            shelf.misses, shelf.sweep_after = 0, len(shelf.slots)
            for loan in {id(s.loan): s.loan for s in shelf.slots if s.loan is not None and s.loan() is None}.values():
                self._end(loan)

    def _decide(
        self, shelves: Sequence[Shelf], requested: Sequence[int], loan: Loan, cancel: CancelToken | None
    ) -> Waiter | tuple[list[Slot], list[Slot]]:
        """Some slot is not free: returns slots (some still empty) and slots to drop, or a waiter, or raises."""
        need = Counter(shelves)
        for shelf in need:
            shelf.misses += 1
        # A sweep costs as much as there are slots, so it comes once in as many misses, or before giving up.
        self._sweep(s for s in need if s.misses > s.sweep_after or self.mode in ("wait", "raise"))
        if self.mode in ("wait", "raise"):
            return self._wait_or_raise(shelves, requested, loan, cancel, need)
        short = any(count > len(shelf.free) for shelf, count in need.items())
        if self.steady_depth and short:
            raise refusals.unsteady(self, *self._cause(need))
        slots: list[Slot] = []
        doomed: list[Slot] = []
        hits: list[Shelf] = []
        # Hits first: what this very batch needs must not be given up for its own next leaf.
        found = [self._take_free(shelf) for shelf in shelves]
        for shelf, slot in zip(shelves, found, strict=True):
            if slot is not None:
                hits.append(shelf)
            else:
                slot = self._grow(shelf, loan, doomed)
            slots.append(slot)
        for shelf in hits:
            self._count(shelf, "hit_count")
        pooled = [(s, r) for s, r in zip(slots, requested, strict=True) if not s.spilled]
        self._lend([s for s, _ in pooled], [r for _, r in pooled], loan)
        loan.slots.extend(s for s in slots if s.spilled)
        return slots, doomed

    def _take_free(self, shelf: Shelf) -> Slot | None:
        return shelf.free.pop() if shelf.free else None

    def _grow(self, shelf: Shelf, loan: Loan, doomed: list[Slot]) -> Slot:
        """A new slot within the budget, by conversion where need be, or else a spilled one."""
        if self.mode == "grow" and self._give_up(shelf.nbytes, doomed, shelf):
            return self._new_slot(shelf, loan)
        self._count(shelf, "spill_count")
        return Slot(shelf, loan=loan, spilled=True)

    def _give_up(self, nbytes: int, doomed: list[Slot], wanted_by: Shelf) -> bool:
        """Brings `nbytes` under the budget, giving up idle slots if they suffice; GreedyDual-Size chooses which.

        The least priority goes first and raises the clock (Cao and Irani, "Cost-Aware WWW Proxy Caching Algorithms",
        1997, with cost 1). A shelf's oldest return, on its left, has the least priority of the shelf.
        """
        if self.budget is None:
            return True
        excess = self.tally.reserved_bytes + nbytes - self.budget
        if excess > sum(len(s.free) * s.nbytes for s in self.shelves.values()):
            return False
        if excess > 0:
            self._count(wanted_by, "conversion_count")
        while excess > 0:
            shelf = min((s for s in self.shelves.values() if s.free and s.nbytes), key=lambda s: s.free[0].priority)
            slot = shelf.free.popleft()
            self._clock = slot.priority
            self._remove(slot)
            doomed.append(slot)
            excess -= shelf.nbytes
        return True

    def _wait_or_raise(
        self,
        shelves: Sequence[Shelf],
        requested: Sequence[int],
        loan: Loan,
        cancel: CancelToken | None,
        need: Counter[Shelf],
    ) -> Waiter | tuple[list[Slot], list[Slot]]:
        barred = any(not w.settled and w.need.keys() & need.keys() for w in self._line)
        slots = [] if barred else self._pick(shelves)
        if slots:
            self._lend(slots, requested, loan)
            for shelf in shelves:
                self._count(shelf, "hit_count")
            return slots, []
        if self.mode == "raise":
            raise refusals.exhausted(self, shelves, "")
        if any(count > len(shelf.slots) for shelf, count in need.items()):
            raise refusals.exhausted(self, shelves, "no wait could end, since the pool has too few slots of that class in all")
        waiter = Waiter(shelves, requested, loan, cancel)
        if cancel is not None:
            cancel.bind(self.settle)
        for shelf in need:
            shelf.tally.wait_count += 1
        self.tally.wait_count += 1
        self._line.append(waiter)
        self._settle()
        return waiter

    def _cause(self, need: Counter[Shelf]) -> tuple[str, str]:
        """What a shortage would lead to, for `NotSteady`."""
        short = {shelf: count - len(shelf.free) for shelf, count in need.items() if count > len(shelf.free)}
        what = ", ".join(f"{count} more {shelf.size_class}" for shelf, count in short.items())
        if self.mode == "spill":
            return "spill", what
        asked = sum(shelf.nbytes * count for shelf, count in short.items())
        if self.budget is None or self.tally.reserved_bytes + asked <= self.budget:
            return "creation", what
        idle = sum(max(len(s.free) - need[s], 0) * s.nbytes for s in self.shelves.values())
        fits = self.tally.reserved_bytes + asked - idle <= self.budget
        return ("conversion" if fits else "spill"), what

    def _count(self, shelf: Shelf, counter: str) -> None:
        for tally in (shelf.tally, self.tally):
            setattr(tally, counter, getattr(tally, counter) + 1)

    def _forget(self, tally: Tally) -> None:
        for gauge in ("slot_count", "leased_count", "reserved_bytes", "leased_bytes", "requested_bytes"):
            setattr(tally, gauge, 0)

    # Waiting and errors. ----------------------------------------------------------------------------------------------

    def _wait(self, waiter: Waiter) -> list[Slot]:
        """Blocks, without the lock, until the waiter is settled or its one deadline has passed.

        The first in the line is on duty: it listens to the queue of returns, since a finalizer can do no more than put
        something there. The others listen to their own signal, which also tells them when the duty is theirs.
        """
        deadline = None if self.timeout is None else time.monotonic() + self.timeout
        try:
            while not waiter.settled:
                inbox: SimpleQueue[Any] = self._returned if self._line[0] is waiter else waiter.signal
                try:
                    loan = inbox.get(timeout=None if deadline is None else max(deadline - time.monotonic(), 0))
                except Empty:
                    with self._lock:
                        self._sweep(waiter.need)
                        self._settle()
                        if not waiter.settled:
                            waiter.refuse(refusals.timed_out(self, waiter.shelves))
                    break
                self.settle([] if loan is None else [loan])
        finally:
            with self._lock:
                self._line.remove(waiter)
                while self._line and self._line[0].loan() is None:  # Abandoned by an interrupt in its own clean-up.
                    self._line.popleft()
                self._settle()
                if self._line:
                    self._line[0].signal.put(None)
        if waiter.error is not None:
            raise waiter.error
        assert waiter.slots is not None
        return waiter.slots


class _Holder:
    """Holds a loan for the time of one call."""

    __slots__ = ("__weakref__",)

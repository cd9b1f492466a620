"""The policy of an arena: who gets which slot, and what a return does. No lock and no device.

Every method runs under the arena's lock, is short, calls no user code, and leaves what takes time to its caller. An
exception may strike in any of them (a signal handler that raises): `_mend.mend` then rebuilds all that is derived.
"""

import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from queue import Empty, SimpleQueue

from . import _refusals as refusals
from ._record import Recorder, Recorders
from ._request import SizeClass
from ._slot import Loan, Shelf, Slot
from ._stats import Tally
from ._waiters import Waiter


class SteadyScope:
    """One scope of `steady`; over when its end says so, or nobody has it any more.

    Attributes:
        over: Whether it has ended.
    """

    __slots__ = ("__weakref__", "over")

    def __init__(self) -> None:
        self.over = False


class Policy:
    """Slots of one device, their free lists, budget and waiters, as plain data with the rules that change it.

    Invariants, verified by `_verify.verify`: every slot of a shelf is free or has a loan; the tallies are the sums over
    the slots; reserved bytes never pass the budget.
    """

    def __init__(self, name: str, mode: str, budget: int | None, timeout: float | None) -> None:
        self.name = name
        self.mode = mode
        self.budget = budget
        self.timeout = timeout
        self.tally = Tally()
        self.shelves: dict[SizeClass, Shelf] = {}
        self._steady_scopes: list[weakref.ref[SteadyScope]] = []
        self.closed = False
        self.recorders: tuple[Recorder, ...] = ()
        self._recorder: Recorder | Recorders | None = None  # The one, or all of them as one.
        self._returned: SimpleQueue[Loan | None] = SimpleQueue()
        self._line: deque[Waiter] = deque()
        self._clock = 0.0
        self._turns = 0

    @property
    def is_steady(self) -> bool:
        """Whether some scope of `steady` is open."""
        return any(scope is not None and not scope.over for scope in (ref() for ref in self._steady_scopes))

    def _shelf(self, size_class: SizeClass) -> Shelf:
        shelf = self.shelves.get(size_class)
        if shelf is None:
            shelf = self.shelves[size_class] = Shelf(size_class)
        return shelf

    def _take(self, shelves: Sequence[Shelf], requested: Sequence[int], loan: Loan) -> list[Slot] | None:
        """Lends a free slot of each shelf, or none at all."""
        if len(shelves) == 1:  # By itself: the loops below would take a third of the time of a checkout.
            shelf = shelves[0]
            if not shelf.free:
                return None
            slot = shelf.free.pop()
            loan.slots = slots = [slot]
            self._lend(slot, requested[0], loan, 1)
            return slots
        slots = []
        for shelf in shelves:
            if not shelf.free:
                for slot in reversed(slots):
                    slot.shelf.free.append(slot)
                return None
            slots.append(shelf.free.pop())
        loan.slots = slots
        for slot, nbytes in zip(slots, requested, strict=True):
            self._lend(slot, nbytes, loan, 1)
        return slots

    def _pass_on(
        self, shelves: Sequence[Shelf], requested: Sequence[int], loan: Loan, thread: int
    ) -> list[Slot] | None:
        """Ends the one loan that is in the queue; lends its slots again at once where they are just those asked for.

        It is so in every loop that lands a batch, drops it and lands the next, and takes half the time of a return and
        a checkout: no gauge changes but what was requested, and what lay idle in between.
        """
        try:
            back = self._returned.get_nowait()
            if back is None:
                return None
            slots = back.slots
        except (Empty, AttributeError):  # The waiter on duty took it, or an interrupt struck inside `Arena.loan`.
            return None
        if len(shelves) == 1 and len(slots) == 1:
            slot, shelf = slots[0], shelves[0]
            if (
                slot.loan is back
                and slot.shelf is shelf
                and slot.leased
                and slot.requested == requested[0]
                and slot.array is not None
            ):
                slot.loan, loan.slots = loan, slots
                mine, whole = shelf.tally, self.tally
                mine.hit_count += 1
                if loan.lands:
                    mine.write_count += 1
                    mine.written_bytes += slot.requested
                nbytes = shelf.nbytes
                idle = mine.reserved_bytes - mine.leased_bytes + nbytes
                if idle > mine.peak_idle_bytes:
                    mine.peak_idle_bytes = idle
                idle = whole.reserved_bytes - whole.leased_bytes + nbytes
                if idle > whole.peak_idle_bytes:
                    whole.peak_idle_bytes = idle
                recorder = self._recorder
                if recorder is not None:
                    # As `note` does it, without a call in a loop's every turn.
                    if thread == recorder.thread and loan.since < recorder.until:
                        recorder.add(slot)
                    else:
                        recorder.note(slot, loan.since)
                return slots
        if len(slots) != len(shelves) or not slots:
            self._end(back)
            return None
        for i, slot in enumerate(slots):
            if slot.loan is not back or slot.shelf is not shelves[i] or not slot.leased or slot.array is None:
                self._end(back)
                return None
        # As if they had come back first, so that no peak is noted that never was.
        for slot in slots:
            for tally in (slot.shelf.tally, self.tally):
                tally.leased_count -= 1
                tally.leased_bytes -= slot.shelf.nbytes
                tally.requested_bytes -= slot.requested
                idle = tally.reserved_bytes - tally.leased_bytes
                if idle > tally.peak_idle_bytes:
                    tally.peak_idle_bytes = idle
        loan.slots = slots
        for i, slot in enumerate(slots):
            self._lend(slot, requested[i], loan, 1)
        return slots

    def _lend(self, slot: Slot, requested: int, loan: Loan, hits: int) -> None:
        slot.loan, slot.leased, slot.requested = loan, True, requested
        nbytes, class_tally = slot.shelf.nbytes, slot.shelf.tally
        class_tally.hit_count += hits
        if loan.lands:
            class_tally.write_count += 1
            class_tally.written_bytes += requested
        # Comparisons in place of max(), and no method of Tally: this runs for every leaf of every batch.
        for tally in (class_tally, self.tally):
            now = tally.leased_count = tally.leased_count + 1
            if now > tally.peak_leased_count:
                tally.peak_leased_count = now
            now = tally.leased_bytes = tally.leased_bytes + nbytes
            if now > tally.peak_leased_bytes:
                tally.peak_leased_bytes = now
            now = tally.requested_bytes = tally.requested_bytes + requested
            if now > tally.peak_requested_bytes:
                tally.peak_requested_bytes = now
        if self._recorder is not None:
            self._recorder.note((slot, requested), loan.since)

    def _count_writes(self, slots: Sequence[Slot], requested: Sequence[int]) -> None:
        for slot, nbytes in zip(slots, requested, strict=False):
            slot.shelf.tally.write_count += 1
            slot.shelf.tally.written_bytes += nbytes

    def _end(self, loan: Loan) -> None:
        """Frees what is still on this very loan; any other tenant's slot is left alone."""
        for slot in getattr(loan, "slots", ()):  # None yet where an interrupt struck inside `Arena.loan`.
            if slot.loan is not loan:
                continue
            shelf, slot.loan = slot.shelf, None
            if self._recorder is not None and (slot.leased or slot.spilled):
                self._recorder.note((slot, None), time.monotonic())
            if slot.spilled:
                for recorder in self.recorders:
                    recorder.spilled.discard(slot)
                slot.drop_buffer()
                continue
            if slot.array is None:
                self._remove(slot)
            else:
                slot.priority = self._clock + shelf.worth
                slot.turn = self._turns = self._turns + 1
                shelf.free.append(slot)
            leased, slot.leased = slot.leased, False
            for tally in (shelf.tally, self.tally):
                if leased:  # Not so where it was made by `reserve` just now.
                    tally.leased_count -= 1
                    tally.leased_bytes -= shelf.nbytes
                    tally.requested_bytes -= slot.requested
                idle = tally.reserved_bytes - tally.leased_bytes
                if idle > tally.peak_idle_bytes:
                    tally.peak_idle_bytes = idle

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

    def _settle(self, returns: Sequence[Loan] = ()) -> None:
        """Ends the given and all queued loans; serves in order each waiter for whose classes nobody waits before it."""
        for loan in returns:
            self._end(loan)
        returned = self._returned
        try:
            for _ in range(returned.qsize()):
                loan = returned.get_nowait()
                if loan is not None:
                    self._end(loan)
        except Empty:  # The waiter on duty took it.
            pass
        if not self._line:
            return
        if any(w.loan() is None for w in self._line):  # Abandoned, by an interrupt in a waiter's own clean-up.
            self._line = deque(w for w in self._line if w.loan() is not None)
            self._hand_over_duty()
        blocked: set[Shelf] = set()
        for waiter in self._line:
            if waiter.settled:
                continue
            free = not blocked & waiter.need.keys()
            slots = self._take(waiter.shelves, waiter.requested, waiter.loan) if free else None
            if slots is not None:
                waiter.grant(slots)
            elif waiter.token is not None and waiter.token.cancelled:
                waiter.refuse(refusals.exhausted(self, waiter.shelves, "the wait was cancelled"))
            elif waiter.is_hopeless():
                waiter.refuse(refusals.exhausted(self, waiter.shelves, "whoever waits for them holds them all"))
            else:
                blocked |= waiter.need.keys()
        if self._line and self._line[0].settled:
            returned.put(None)  # The waiter on duty listens here, not to its own signal.

    def _hand_over_duty(self) -> None:
        if self._line:
            self._line[0].signal.put(None)

    def _sweep(self, shelves: Iterable[Shelf]) -> None:
        """Ends the loans whose holders died without a word: an interrupt can swallow an item of the queue."""
        for shelf in shelves:
            shelf.misses, shelf.sweep_after = 0, len(shelf.slots)
            loans = {id(loan): loan for loan in (slot.loan for slot in shelf.slots) if loan is not None}
            for loan in loans.values():
                if loan() is None:
                    self._end(loan)

    def _count(self, shelf: Shelf, counter: str, by: int = 1) -> None:
        setattr(shelf.tally, counter, getattr(shelf.tally, counter) + by)

    def _forget(self, tally: Tally) -> None:
        for gauge in ("slot_count", "leased_count", "reserved_bytes", "leased_bytes", "requested_bytes"):
            setattr(tally, gauge, 0)

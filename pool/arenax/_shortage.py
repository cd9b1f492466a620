"""What an arena does where some slot is not free: make one, convert idle ones, spill, wait or refuse.

As everything of the policy, it runs under the arena's lock.
"""

from collections import Counter
from collections.abc import Sequence

from . import _refusals as refusals
from ._policy import Policy
from ._request import SizeClass
from ._slot import Loan, Shelf, Slot
from ._waiters import CancelToken, Waiter


class Shortage(Policy):
    """The rules for a checkout that no free slot can serve, and for slots made in advance."""

    def _decide(
        self, shelves: Sequence[Shelf], requested: Sequence[int], loan: Loan, cancel: CancelToken | None
    ) -> Waiter | tuple[list[Slot], list[Slot]]:
        """Some slot is not free: returns slots (some still empty) and slots to drop, or a waiter, or raises."""
        need = Counter(shelves)
        if self.mode in ("wait", "raise"):
            return self._wait_or_raise(shelves, requested, loan, cancel, need)
        # A sweep costs as much as there are slots, so it comes once in as many misses.
        for shelf in need:
            shelf.misses += 1
        self._sweep(shelf for shelf in need if shelf.misses > shelf.sweep_after)
        short = any(count > len(shelf.free) for shelf, count in need.items())
        if short and self.is_steady:
            raise refusals.unsteady(self, *self._cause(need))
        slots: list[Slot] = []
        doomed: list[Slot] = []
        hits: list[Shelf] = []
        # Hits first: what this very batch needs must not be given up for its own next leaf.
        found = [shelf.free.pop() if shelf.free else None for shelf in shelves]
        for shelf, slot in zip(shelves, found, strict=True):
            if slot is not None:
                hits.append(shelf)
            else:
                slot = self._grow(shelf, loan, doomed)
            slots.append(slot)
        for shelf in hits:
            self._count(shelf, "hit_count")
        loan.slots = slots
        for slot, nbytes in zip(slots, requested, strict=True):
            if not slot.spilled:
                self._lend(slot, nbytes, loan, 0)
                continue
            if loan.lands:
                self._count_writes((slot,), (nbytes,))
            if self._recorder is not None:
                self._recorder.note((slot, nbytes), loan.since)
        return slots, doomed

    def _grow(self, shelf: Shelf, loan: Loan, doomed: list[Slot]) -> Slot:
        """A new slot within the budget, by conversion where need be, or else a spilled one."""
        if self.mode == "grow":
            excess = self._excess(shelf.nbytes)
            donor = self._donor(shelf) if excess > 0 else None
            if donor is not None or excess <= 0 or self._give_up(excess, doomed):
                if excess > 0:
                    self._count_conversion(shelf)
                slot = self._new_slot(shelf, loan)
                slot.donor = donor
                return slot
        self._count(shelf, "spill_count")
        return Slot(shelf, loan=loan, spilled=True)

    def _excess(self, nbytes: int) -> int:
        """By how many bytes a new slot would pass the budget."""
        return 0 if self.budget is None else self.tally.reserved_bytes + nbytes - self.budget

    def _count_conversion(self, shelf: Shelf) -> None:
        self._count(shelf, "conversion_count")
        self._count(shelf, "converted_bytes", shelf.nbytes)

    def _donor(self, wanted_by: Shelf) -> Slot | None:
        """Gives up the idle slot of least priority whose buffer can become one of another shelf where it lies."""
        kin = [s for s in self.shelves.values() if s.free and s.form == wanted_by.form and s is not wanted_by]
        return self._evict(min(kin, key=_priority)) if kin and wanted_by.nbytes else None

    def _give_up(self, nbytes: int, doomed: list[Slot]) -> bool:
        """Gives up idle slots of at least so many bytes, or none if all of them do not suffice.

        By GreedyDual-Size: the least priority goes first and raises the clock (Cao and Irani, "Cost-Aware WWW Proxy
        Caching Algorithms", 1997, with cost 1). A shelf's oldest return, on its left, has the least priority of it.
        """
        if nbytes > sum(len(s.free) * s.nbytes for s in self.shelves.values()):
            return False
        while nbytes > 0:
            shelf = min((s for s in self.shelves.values() if s.free and s.nbytes), key=_priority)
            self._clock = shelf.free[0].priority
            doomed.append(self._evict(shelf))
            nbytes -= shelf.nbytes
        return True

    def _evict(self, shelf: Shelf) -> Slot:
        slot = shelf.free.popleft()
        self._remove(slot)
        return slot

    def _give_up_more(self, shelf: Shelf) -> list[Slot]:
        """Gives up idle slots for one that the device has no memory for: of as many bytes, or all that there are."""
        doomed: list[Slot] = []
        if self.mode == "grow":
            idle = sum(len(s.free) * s.nbytes for s in self.shelves.values())
            self._give_up(min(shelf.nbytes, idle), doomed)
        if doomed:
            self._count_conversion(shelf)
        return doomed

    def _trim(self, to_bytes: int) -> list[Slot]:
        """Gives up idle slots until no more bytes are reserved, or none is idle."""
        self._settle()
        doomed: list[Slot] = []
        excess = self.tally.reserved_bytes - to_bytes
        idle = sum(len(s.free) * s.nbytes for s in self.shelves.values())
        self._give_up(min(excess, idle), doomed)
        return doomed

    def _wait_or_raise(
        self,
        shelves: Sequence[Shelf],
        requested: Sequence[int],
        loan: Loan,
        cancel: CancelToken | None,
        need: Counter[Shelf],
    ) -> Waiter | tuple[list[Slot], list[Slot]]:
        barred = any(not w.settled and w.need.keys() & need.keys() for w in self._line)
        slots = None if barred else self._take(shelves, requested, loan)
        if slots is None and not barred:
            self._sweep(need)
            slots = self._take(shelves, requested, loan)
        if slots is not None:
            return slots, []
        if self.mode == "raise":
            raise refusals.exhausted(self, shelves, "")
        if any(count > len(shelf.slots) for shelf, count in need.items()):
            raise refusals.exhausted(
                self, shelves, "no wait could end, since the pool has too few slots of that class in all"
            )
        waiter = Waiter(shelves, requested, loan, cancel)
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

    def _reserve(self, wanted: Counter[SizeClass], loan: Loan) -> None:
        if self.closed:
            raise refusals.closed(self)
        asked = sum(c.nbytes * n for c, n in wanted.items())
        if self.budget is not None and self.tally.reserved_bytes + asked > self.budget:
            raise refusals.over_budget(self, wanted, asked)
        if asked and self.is_steady:
            raise refusals.unsteady(self, "creation", "reserve")
        for size_class, count in wanted.items():
            shelf = self._shelf(size_class)
            shelf.reserved_count += count
            loan.slots.extend(self._new_slot(shelf, loan) for _ in range(count))

    def _time_out(self, waiter: Waiter) -> None:
        if not waiter.settled:
            waiter.refuse(refusals.timed_out(self, waiter.shelves))

    def _leave_line(self, waiter: Waiter) -> None:
        self._line.remove(waiter)
        self._settle()
        self._hand_over_duty()


def _priority(shelf: Shelf) -> tuple[float, int]:
    """That of the slot which a shelf would give up first."""
    slot = shelf.free[0]
    return slot.priority, slot.turn

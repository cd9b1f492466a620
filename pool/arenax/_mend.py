"""Makes an arena whole after an exception inside its critical section: the other half of `_verify`.

Of a slot only three things are told once: that its shelf has it, on which loan it is, and that it counts as leased. The
free lists and the gauges follow from them, and are rebuilt here; counters are not, and may miss the event that was
struck.
"""

from collections import deque
from typing import TYPE_CHECKING

from ._slot import Shelf, Slot

if TYPE_CHECKING:
    from ._policy import Policy
    from ._stats import Tally


def mend(policy: "Policy", clock: float) -> None:
    """Rebuilds free lists and gauges from the slots; may itself be struck, and called again. The caller has the lock.

    Args:
        policy: The arena.
        clock: The GreedyDual-Size clock, the start of the priority of a slot that was on its way into a free list.
    """
    for shelf in policy.shelves.values():
        shelf.free = _free_slots(shelf, clock)
        leased = [slot for slot in shelf.slots if slot.leased]
        _set_gauges(shelf.tally, len(shelf.slots), len(leased), sum(slot.requested for slot in leased), shelf.nbytes)
    tallies = [shelf.tally for shelf in policy.shelves.values()]
    for gauge in ("slot_count", "leased_count", "reserved_bytes", "leased_bytes", "requested_bytes"):
        _set(policy.tally, gauge, sum(getattr(tally, gauge) for tally in tallies))


def _free_slots(shelf: Shelf, clock: float) -> deque[Slot]:
    loans = {id(slot.loan): slot.loan for slot in shelf.slots if slot.loan is not None}
    # On loan is what somebody will give back: its loan has a holder, and lists it.
    lent = {
        slot
        for loan in loans.values()
        if loan() is not None
        for slot in getattr(loan, "slots", ())
        if slot.loan is loan
    }
    for slot in shelf.slots - lent:
        slot.loan, slot.leased = None, False
        if slot.array is None:
            shelf.slots.discard(slot)
    free = dict.fromkeys(slot for slot in shelf.free if slot.loan is None and slot in shelf.slots)
    for slot in shelf.slots - lent - free.keys():
        slot.priority = clock + shelf.worth
        free[slot] = None
    return deque(free)


def _set_gauges(tally: "Tally", slots: int, leased: int, requested: int, nbytes: int) -> None:
    _set(tally, "slot_count", slots)
    _set(tally, "reserved_bytes", slots * nbytes)
    _set(tally, "leased_count", leased)
    _set(tally, "leased_bytes", leased * nbytes)
    _set(tally, "requested_bytes", requested)


def _set(tally: "Tally", gauge: str, value: int) -> None:
    setattr(tally, gauge, value)
    peak = f"peak_{gauge}"
    setattr(tally, peak, max(getattr(tally, peak), value))

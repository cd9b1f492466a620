"""The invariants of an arena, each asserted: the body of `BufferPool.check`."""

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._arena import Arena


def verify(arena: "Arena") -> None:
    """Asserts every invariant of an arena; the caller has the lock."""
    totals = Counter[str]()
    for shelf in arena.shelves.values():
        tally, where = shelf.tally, f"{shelf.size_class} of pool {arena.name!r}"
        free = set(shelf.free)
        loaned = {s for s in shelf.slots if s.loan is not None}
        leased = [s for s in loaned if s.leased]
        assert len(free) == len(shelf.free), f"{where}: a slot is in the free list twice"
        assert free | loaned == shelf.slots, f"{where}: a slot is neither free nor on loan"
        assert not free & loaned, f"{where}: a slot is free and on loan"
        assert all(s.array is not None for s in free), f"{where}: a free slot has no buffer"
        assert all(s.loan is not None and s in s.loan.slots for s in loaned), f"{where}: a loan does not list its slot"
        expected = {
            "slot_count": len(shelf.slots),
            "leased_count": len(leased),
            "reserved_bytes": len(shelf.slots) * shelf.nbytes,
            "leased_bytes": len(leased) * shelf.nbytes,
            "requested_bytes": sum(s.requested for s in leased),
        }
        for name, value in expected.items():
            assert getattr(tally, name) == value, f"{where}: {name} says {getattr(tally, name)}, the slots say {value}"
            assert getattr(tally, f"peak_{name}") >= value, f"{where}: {name} is above its peak"
        totals.update(expected)
    for name, value in totals.items():
        assert getattr(arena.tally, name) == value, f"pool {arena.name!r}: {name} is not the sum over its classes"
    if arena.budget is not None:
        assert arena.tally.peak_reserved_bytes <= arena.budget, f"pool {arena.name!r}: the budget was passed"

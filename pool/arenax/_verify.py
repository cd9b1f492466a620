"""The invariants of an arena, each asserted: the body of `BufferPool.check`."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._policy import Policy


def verify(policy: "Policy") -> str | None:
    """Says which invariant of an arena is broken, the first one found, or None; the caller has the lock."""
    return next((what for holds, what in _invariants(policy) if not holds), None)


def _invariants(policy: "Policy") -> Iterator[tuple[bool, str]]:
    totals = Counter[str]()
    for shelf in policy.shelves.values():
        tally, where = shelf.tally, f"{shelf.size_class} of pool {policy.name!r}"
        free = set(shelf.free)
        loaned = {s for s in shelf.slots if s.loan is not None}
        leased = [s for s in loaned if s.leased]
        yield (len(free) == len(shelf.free), f"{where}: a slot is in the free list twice")
        yield (free | loaned == shelf.slots, f"{where}: a slot is neither free nor on loan")
        yield (not free & loaned, f"{where}: a slot is free and on loan")
        yield (all(s.array is not None for s in free), f"{where}: a free slot has no buffer")
        loans = {id(s.loan): s.loan for s in loaned if s.loan is not None}.values()
        listed = {s for loan in loans for s in loan.slots if s.loan is loan}
        yield (loaned <= listed, f"{where}: a loan does not list its slot")
        expected = {
            "slot_count": len(shelf.slots),
            "leased_count": len(leased),
            "reserved_bytes": len(shelf.slots) * shelf.nbytes,
            "leased_bytes": len(leased) * shelf.nbytes,
            "requested_bytes": sum(s.requested for s in leased),
        }
        for name, value in expected.items():
            said = getattr(tally, name)
            yield (said == value, f"{where}: {name} says {said}, the slots say {value}")
            yield (getattr(tally, f"peak_{name}") >= value, f"{where}: {name} is above its peak")
        totals.update(expected)
    for name, value in totals.items():
        said = getattr(policy.tally, name)
        yield (said == value, f"pool {policy.name!r}: {name} says {said}, the sum over its classes is {value}")
    if policy.budget is not None:
        passed = policy.tally.peak_reserved_bytes > policy.budget
        yield (not passed, f"pool {policy.name!r}: the budget of {policy.budget} bytes was passed")

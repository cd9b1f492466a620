"""The invariants of an arena, each asserted: the body of `BufferPool.check`."""

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._policy import Policy


def verify(policy: "Policy") -> None:
    """Raises `AssertionError` for the first invariant of an arena that is broken; the caller has the lock."""
    totals = Counter[str]()
    for shelf in policy.shelves.values():
        tally, where = shelf.tally, f"{shelf.size_class} of pool {policy.name!r}"
        free = set(shelf.free)
        loaned = {s for s in shelf.slots if s.loan is not None}
        leased = [s for s in loaned if s.leased]
        _require(len(free) == len(shelf.free), f"{where}: a slot is in the free list twice")
        _require(free | loaned == shelf.slots, f"{where}: a slot is neither free nor on loan")
        _require(not free & loaned, f"{where}: a slot is free and on loan")
        _require(all(s.array is not None for s in free), f"{where}: a free slot has no buffer")
        listed = all(s.loan is not None and s in s.loan.slots for s in loaned)
        _require(listed, f"{where}: a loan does not list its slot")
        expected = {
            "slot_count": len(shelf.slots),
            "leased_count": len(leased),
            "reserved_bytes": len(shelf.slots) * shelf.nbytes,
            "leased_bytes": len(leased) * shelf.nbytes,
            "requested_bytes": sum(s.requested for s in leased),
        }
        for name, value in expected.items():
            said = getattr(tally, name)
            _require(said == value, f"{where}: {name} says {said}, the slots say {value}")
            _require(getattr(tally, f"peak_{name}") >= value, f"{where}: {name} is above its peak")
        totals.update(expected)
    for name, value in totals.items():
        said = getattr(policy.tally, name)
        _require(said == value, f"pool {policy.name!r}: {name} says {said}, the sum over its classes is {value}")
    if policy.budget is not None:
        passed = policy.tally.peak_reserved_bytes > policy.budget
        _require(not passed, f"pool {policy.name!r}: the budget of {policy.budget} bytes was passed")


def _require(holds: bool, what: str) -> None:
    # No assert statement, which `python -O` would drop.
    if not holds:
        raise AssertionError(what)

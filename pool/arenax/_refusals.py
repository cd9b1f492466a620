"""What the arena says when it refuses: each message names what was asked, what there is, and what to do."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ._call_site import call_site
from ._errors import BudgetExceeded, NotSteady, PoolClosed, PoolExhausted, WaitTimeout
from ._request import SizeClass
from ._slot import Shelf
from ._stats import human_bytes

if TYPE_CHECKING:
    from ._arena import Arena


def closed(arena: "Arena") -> PoolClosed:
    """The pool was closed."""
    return PoolClosed(f"pool {arena.name!r} is closed", pool=arena.name)


def unsteady(arena: "Arena", cause: str, what: str) -> NotSteady:
    """Something happened that `steady` forbids."""
    site = call_site()
    message = f"pool {arena.name!r} is not steady: {cause} at {site}: {what}"
    return NotSteady(message, cause=cause, call_site=site)


def exhausted(arena: "Arena", shelves: Sequence[Shelf], why: str) -> PoolExhausted:
    """No slot is free and none may be made."""
    return PoolExhausted(_shortage(arena, shelves, f": {why}" if why else ""), **_figures(arena, shelves))


def timed_out(arena: "Arena", shelves: Sequence[Shelf]) -> WaitTimeout:
    """No slot became free in time."""
    message = _shortage(arena, shelves, f" after a wait of {arena.timeout} s")
    return WaitTimeout(message, timeout_seconds=arena.timeout, **_figures(arena, shelves))


def over_budget(arena: "Arena", classes: Iterable[SizeClass], asked: int) -> BudgetExceeded:
    """A reserve does not fit the budget."""
    reserved, budget = arena.tally.reserved_bytes, arena.budget or 0
    return BudgetExceeded(
        f"pool {arena.name!r} cannot reserve {asked:,} bytes: {reserved:,} of its budget of {budget:,} bytes are "
        f"reserved, {budget - reserved:,} are left. Reserve fewer slots, use fewer or smaller size classes, or raise the "
        "budget",
        asked_bytes=asked,
        reserved_bytes=reserved,
        **_figures(arena, [arena.shelves[c] for c in classes if c in arena.shelves]),
    )


def spill(arena: "Arena", shelves: Sequence[Shelf]) -> str:
    """The one warning about arrays outside the pool."""
    remedy = "raise the budget" if arena.mode == "grow" else "reserve more slots"
    return _shortage(arena, shelves, "; a fresh array outside the pool serves it") + (
        f". It is counted as a spill and freed when dropped; to avoid it, hold fewer batches or {remedy}. This warning comes once"
    )


def _shortage(arena: "Arena", shelves: Sequence[Shelf], why: str) -> str:
    lines = ", ".join(
        f"{count} x {shelf.size_class} ({shelf.tally.leased_count} of {len(shelf.slots)} slots leased)"
        for shelf, count in Counter(shelves).items()
    )
    idle = human_bytes(arena.tally.idle_bytes)
    remedy = "" if arena.mode in ("grow", "spill") else (
        '. Drop arrays or release leases sooner, reserve more slots, or let the pool grow (on_exhausted="grow")'
    )
    return f"pool {arena.name!r} has no free slot for {lines}{why}; {idle} lie idle in all classes{remedy}"


def _figures(arena: "Arena", shelves: Sequence[Shelf]) -> dict[str, Any]:
    kinds = dict.fromkeys(shelves)
    return {
        "pool": arena.name,
        "asked": ", ".join(str(s.size_class) for s in shelves),
        "leased_count": sum(s.tally.leased_count for s in kinds),
        "slot_count": sum(len(s.slots) for s in kinds),
        "idle_bytes": arena.tally.idle_bytes,
        "budget_bytes": arena.budget,
    }

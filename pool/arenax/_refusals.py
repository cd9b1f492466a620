"""What an arena says when it refuses: each message names what was asked, what there is, and what to do."""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ._call_site import call_site
from ._errors import BudgetExceeded, NotSteady, PoolClosed, PoolExhausted, WaitTimeout
from ._request import SizeClass
from ._slot import Holder, Shelf, Slot
from ._stats import human_bytes

if TYPE_CHECKING:
    from ._policy import Policy


def closed(policy: "Policy") -> PoolClosed:
    """The pool was closed."""
    return PoolClosed(f"pool {policy.name!r} is closed", pool=policy.name)


def reentered(policy: "Policy") -> RuntimeError:
    """The pool was called in the middle of its own bookkeeping."""
    return RuntimeError(
        f"pool {policy.name!r} was called in the middle of its own bookkeeping, by a signal handler or a finalizer "
        "(__del__, a weak reference's callback) that Python ran just there: let that set a flag or fill a queue, and "
        "call the pool from the code that reads it"
    )


def donated(policy: "Policy", slot: Slot) -> str:
    """The one hint about arrays that their borrower donated away."""
    return (
        f"an array of {slot.size_class} that pool {policy.name!r} had lent was donated away, by a jitted function "
        "with donate_argnums or the like (or its landing was interrupted), so its slot gets a new buffer. In a loop "
        "that costs one each time, as without a pool. To write it in place and keep its slot: lease.update; to own it: "
        "step.keep or lease.detach; else do not donate it. This hint comes once"
    )


def crowded(policy: "Policy", shelf: Shelf) -> str:
    """The one warning about a class that grows far past what one draw needs."""
    return (
        f"pool {policy.name!r} grows to {len(shelf.slots)} slots of {shelf.size_class}, all of them on loan. If you do "
        "not hold so many, they are caught in reference cycles, and come back only when the garbage collector runs: "
        "break the cycles, or hold the batches in a step. arenax.trace_leases() names the lines that drew them. This "
        "warning comes once a class"
    )


def unrecorded(policy: "Policy", error: OSError | None) -> str:
    """The one warning about a recording that could not be written."""
    return f"the recording of pool {policy.name!r} ends before its time, since it could not be written: {error}"


def unsteady(policy: "Policy", cause: str, what: str) -> NotSteady:
    """Something happened that `steady` forbids."""
    site = call_site()
    message = f"pool {policy.name!r} is not steady: {cause} at {site}: {what}"
    return NotSteady(message, cause=cause, call_site=site)


def exhausted(policy: "Policy", shelves: Sequence[Shelf], why: str) -> PoolExhausted:
    """No slot is free and none may be made."""
    return PoolExhausted(_shortage(policy, shelves, f": {why}" if why else ""), **_figures(policy, shelves))


def timed_out(policy: "Policy", shelves: Sequence[Shelf]) -> WaitTimeout:
    """No slot became free in time."""
    message = _shortage(policy, shelves, f" after a wait of {policy.timeout} s")
    return WaitTimeout(message, timeout_seconds=policy.timeout, **_figures(policy, shelves))


def over_budget(policy: "Policy", classes: Iterable[SizeClass], asked: int) -> BudgetExceeded:
    """A reserve does not fit the budget."""
    reserved, budget = policy.tally.reserved_bytes, policy.budget or 0
    return BudgetExceeded(
        f"pool {policy.name!r} cannot reserve {asked:,} bytes: {reserved:,} of its budget of {budget:,} bytes are "
        f"reserved, {budget - reserved:,} are left. Reserve fewer slots, use fewer or smaller size classes, or raise "
        "the budget",
        asked_bytes=asked,
        reserved_bytes=reserved,
        **_figures(policy, [policy.shelves[c] for c in classes if c in policy.shelves]),
    )


def spill(policy: "Policy", shelves: Sequence[Shelf]) -> str:
    """The one warning about arrays outside the pool."""
    remedy = "raise the budget" if policy.mode == "grow" else "reserve more slots"
    return _shortage(policy, shelves, "; a fresh array outside the pool serves it") + (
        f". It is counted as a spill and freed when dropped; to avoid it, hold fewer batches or {remedy}. "
        "This warning comes once"
    )


def _shortage(policy: "Policy", shelves: Sequence[Shelf], why: str) -> str:
    lines = ", ".join(
        f"{count} x {shelf.size_class} ({shelf.tally.leased_count} of {len(shelf.slots)} slots leased)"
        for shelf, count in Counter(shelves).items()
    )
    idle = human_bytes(policy.tally.idle_bytes)
    kinds, oldest, _ = _holders(shelves)
    held = ", ".join(f"{count} by {kind}" for kind, count in kinds.items())
    held = f" (held: {held}; the oldest: {', '.join(oldest)})" if kinds else ""
    return (
        f"pool {policy.name!r} has no free slot for {lines}{held}{why}; {idle} lie idle in all classes"
        f"{_remedy(policy, Counter(shelves))}"
    )


def _remedy(policy: "Policy", need: Counter[Shelf]) -> str:
    """What the caller can do about a shortage of these shelves."""
    asked = sum(shelf.nbytes * count for shelf, count in need.items())
    if policy.budget is not None and asked > policy.budget:
        return (
            f". This needs {asked:,} bytes at once and the budget is {policy.budget:,}: raise it, or draw less at once"
        )
    if policy.mode in ("grow", "spill"):
        return ""
    if any(count > len(shelf.slots) for shelf, count in need.items()):
        return (
            f'. on_exhausted="{policy.mode}" uses reserved slots only: call pool.reserve(example, slots=...) first, or '
            'let the pool grow (on_exhausted="grow")'
        )
    return ". Drop arrays or release leases sooner, or reserve more slots"


def _holders(shelves: Sequence[Shelf]) -> tuple[dict[str, int], list[str], float]:
    """Counts the loans by the kind of their holder, and describes the three oldest; also the age of the very oldest."""
    slots = [slot for shelf in dict.fromkeys(shelves) for slot in list(shelf.slots)]
    loans = {id(slot.loan): (slot.loan, slot.size_class) for slot in slots if slot.loan is not None}.values()
    # A holder that is dead has nothing to answer for: its slots are on their way back.
    alive = [(loan, size_class, _kind_of(holder)) for loan, size_class in loans if (holder := loan()) is not None]
    now = time.monotonic()
    alive.sort(key=lambda held: held[0].since)
    oldest = [
        f"{kind} of {size_class} for {now - loan.since:.1f} s" + (f" from {loan.site}" if loan.site else "")
        for loan, size_class, kind in alive[:3]
    ]
    return dict(Counter(kind for *_, kind in alive)), oldest, now - alive[0][0].since if alive else 0.0


def _kind_of(holder: object) -> str:
    return holder.kind if isinstance(holder, Holder) else type(holder).__name__


def _figures(policy: "Policy", shelves: Sequence[Shelf]) -> dict[str, Any]:
    kinds = dict.fromkeys(shelves)
    holders, oldest, seconds = _holders(shelves)
    return {
        "holders": holders,
        "oldest": tuple(oldest),
        "oldest_seconds": seconds,
        "pool": policy.name,
        "asked": ", ".join(str(s.size_class) for s in shelves),
        "leased_count": sum(s.tally.leased_count for s in kinds),
        "slot_count": sum(len(s.slots) for s in kinds),
        "idle_bytes": policy.tally.idle_bytes,
        "budget_bytes": policy.budget,
    }

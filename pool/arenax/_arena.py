"""The arena: the slots of one device, lent by its policy under one lock."""

import warnings
import weakref
from _thread import get_ident
from collections import Counter, deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Protocol

from . import _refusals as refusals
from . import _trace_leases as trace  # pyright: ignore[reportPrivateUsage]
from ._call_site import call_site, caller
from ._landing import is_out_of_memory
from ._mend import mend
from ._policy import SteadyScope
from ._record import Recorder, Recorders
from ._request import SizeClass
from ._section import Section
from ._shortage import Shortage
from ._slot import Holder, Loan, Shelf, Slot
from ._verify import verify
from ._waiters import CancelToken, Waiter

# A wait is ended by a message, and this often looks whether an interrupt in another thread has swallowed it.
LOOK_AGAIN_SECONDS = 1.0
# A class that grows by so many times the slots of one draw, none of them free, gets a warning.
CROWD = 64
MODES = ("grow", "spill", "wait", "raise")


class Maker(Protocol):
    """What the arena needs of a landing: a buffer for an empty slot."""

    def create(self, slot: Slot) -> None:
        """Gives an empty slot its buffer."""
        ...

    def retype(self, slot: Slot, donor: Slot) -> None:
        """Gives an empty slot the buffer of another."""
        ...


class Arena(Shortage):
    """A policy that any thread may use: one lock around each decision, and outside it what takes time.

    Returns never take the lock: whoever ends a loan, a finalizer too, puts it into the queue of returns, and the next
    one who holds the lock drains it.
    """

    def __init__(self, maker: Maker, *, name: str, mode: str, budget: int | None, timeout: float | None) -> None:
        super().__init__(name, mode, budget, timeout)
        self._maker = maker
        self._section = Section(lambda: mend(self, self._clock), lambda: refusals.reentered(self))
        # Ends a loan: takes no lock, and may be called twice, late, and in a finalizer.
        self.give_back: Callable[[Loan], None] = self._returned.put
        self._warned: set[object] = set()

    def shelf(self, size_class: SizeClass) -> Shelf:
        """Returns the shelf of a class, a new one where there is none."""
        return self._section.run(self._shelf, size_class)

    def loan(self, holder: object, token: object = None, lands: bool = False) -> Loan:
        """Begins a loan to `holder`; its slots come back when it dies or by `give_back`."""
        loan = Loan(holder, self.give_back)
        loan.slots, loan.token, loan.since, loan.lands = [], token, monotonic(), lands
        loan.site = call_site() if trace.enabled else None
        return loan

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
        # `Section.run` in longhand: two calls more would cost a fifth of a checkout.
        section, me, slots, outcome = self._section, get_ident(), None, None
        if section.lock.locked():
            section.stand_back(me)
        with section.lock:
            was, section.inside = section.inside, me
            try:
                if was:
                    section.mend()
                if self.closed:
                    raise refusals.closed(self)
                back_count = self._returned.qsize()
                if back_count == 1 and not self._line:
                    slots = self._pass_on(shelves, requested, loan, me)
                elif back_count or self._line:
                    self._settle()
                if slots is None and not self._line:
                    slots = self._take(shelves, requested, loan)
                if slots is None:
                    outcome = self._decide(shelves, requested, loan, cancel)
            except BaseException as e:
                section.throw_out(e)
                raise
            section.inside = 0
        recorder = self._recorder
        if recorder is not None and recorder.due:
            self._write_recordings()
        if slots is not None:
            return slots
        assert outcome is not None
        return self._wait(outcome) if isinstance(outcome, Waiter) else self._furnish(shelves, *outcome)

    def _furnish(self, shelves: Sequence[Shelf], slots: list[Slot], doomed: Sequence[Slot]) -> list[Slot]:
        """Gives new slots their buffers, where those of others are given up; warns of what is not as it should be."""
        for slot in doomed:  # Before new buffers are made.
            slot.drop_buffer()
        self._make([s for s in slots if s.array is None])
        if any(s.spilled for s in slots):
            self._warn_once("spill", lambda: refusals.spill(self, shelves))
        for shelf in {s.shelf for s in slots if not s.spilled}:
            if len(shelf.slots) - shelf.reserved_count >= CROWD * len(slots) and not shelf.free:
                self._warn_once(shelf, lambda shelf=shelf: refusals.crowded(self, shelf))
        return slots

    def _warn_once(self, about: object, message: Callable[[], str]) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn_explicit(message(), RuntimeWarning, *caller())

    def reserve(self, wanted: Counter[SizeClass], others: "Sequence[tuple[Arena, Counter[SizeClass]]]" = ()) -> None:
        """Makes that many more slots of each class, idle, in this arena and in others; all or none.

        Raises:
            BudgetExceeded: Naming the bytes asked for, reserved and allowed; also a `MemoryError`.
        """
        holder = Holder()
        loans: list[tuple[Arena, Loan]] = []
        try:
            for arena, classes in ((self, wanted), *others):
                loans.append((arena, arena.loan(holder)))
                arena._section.run(arena._reserve, classes, loans[-1][1])
            for arena, loan in loans:
                arena._make(loan.slots, at_any_price=False)
        except BaseException:
            for _, loan in loans:
                for slot in loan.slots:
                    slot.array = None  # An empty slot leaves the pool when it is returned: nothing stays half done.
            raise
        finally:
            for arena, loan in loans:
                arena.settle([loan])

    def hand_over(self, slots: Sequence[Slot], token: object) -> list[Any]:
        """Hands slots from the loan of a call over to the arrays that its caller gets, each a loan of its own.

        The slots keep a second handle on each buffer: a weak reference to the first tells when the caller dropped it.
        """
        give_back, now = self.give_back, monotonic()
        site = call_site() if trace.enabled else None
        arrays: list[Any] = []
        for slot in slots:
            array = slot.array
            arrays.append(array)
            if slot.spilled:  # Its buffer is the borrower's alone, and is freed when he drops it.
                slot.loan = self._watch(slot, array) if self.recorders else None
                slot.drop_buffer()
                continue
            slot.array = slot.handle([array])
            loan = Loan(array, give_back)
            loan.slots, loan.token, loan.since, loan.site, loan.lands = [slot], token, now, site, False
            slot.loan = loan  # Only now that it lists the slot: `mend` would take one that does not for a torn one.
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
        self.replace(slot)
        return array

    def replace(self, slot: Slot) -> None:
        """Gives a slot whose buffer left the pool, or was lost, a new one."""
        self._section.run(self._refuse_where_steady, slot)
        fresh = Slot(slot.shelf, spilled=slot.spilled)
        self._make([fresh])
        slot.take_buffer(fresh)

    def revive(self, slot: Slot) -> None:
        """As `replace`, for a slot that its last borrower donated away or failed to compute."""
        donated = slot.array is not None and slot.array.is_deleted()
        self.replace(slot)
        if donated:
            self._warn_once("donated", lambda: refusals.donated(self, slot))

    def moved(self, slot: Slot, cause: str) -> None:
        """Counts a landing whose slot had moved; raises `NotSteady` where that is not allowed."""
        self._section.run(self._count_copy, slot, cause)

    def wrote(self, slots: Sequence[Slot], requested: Sequence[int]) -> None:
        """Counts writes of that many bytes into the slots."""
        self._section.run(self._count_writes, slots, requested)

    def settle(self, returns: Sequence[Loan] = ()) -> None:
        """Processes the given and all queued returns, and serves or refuses waiters."""
        self._section.run(self._settle, returns)

    def snapshot(self, read: Callable[[], Any]) -> Any:
        """Calls `read` under the lock with all returns processed."""
        return self._section.run(self._read, read)

    def trim(self, to_bytes: int) -> int:
        """Gives idle slots up until no more bytes are reserved, or none is idle; returns the bytes given back."""
        self.settle()
        doomed = self._section.run(self._trim, to_bytes)
        for slot in doomed:
            slot.drop_buffer()
        return sum(slot.shelf.nbytes for slot in doomed)

    def begin_steady(self) -> SteadyScope:
        """Begins a steady scope, which lasts until it is `over` or dropped."""
        scope = SteadyScope()
        self._section.run(self._add_steady, scope)
        return scope

    def begin_recording(self, recorder: Recorder) -> None:
        """Has every loan and return noted from now on; what is on loan already comes first."""
        self._section.run(self._begin_recording, recorder)

    def end_recording(self, recorder: Recorder) -> None:
        """Takes part in a recording no more, and writes the rest of what came; harmless where it has ended."""
        self._section.run(self._end_recording, recorder)
        recorder.flush(self._section.run)
        if recorder.error is not None:
            self._warn_once(recorder, lambda: refusals.unrecorded(self, recorder.error))

    def write_recording(self, recorder: Recorder) -> None:
        """Writes what a recording that goes on has noted so far, with the returns that nobody has taken in yet."""
        self._section.run(self._settle)
        recorder.flush(self._section.run)

    def _write_recordings(self) -> None:
        for recorder in self.recorders:
            if recorder.over:  # An interrupt has struck its end.
                self.end_recording(recorder)
            else:
                recorder.flush(self._section.run)

    def _watch(self, slot: Slot, array: Any) -> Loan:
        """A loan of a spilled slot to its array, so that recordings see it end."""
        loan = Loan(array, self.give_back)
        loan.slots, loan.token, loan.since, loan.site, loan.lands = [slot], None, monotonic(), None, False
        for recorder in self.recorders:
            recorder.spilled.add(slot)
        return loan

    def close(self) -> None:
        """Drops every slot and refuses every waiter. What is on loan stays valid, on its holder's account."""
        for slot in self._section.run(self._close):
            slot.drop_buffer()

    def check(self) -> None:
        """Verifies the invariants that `Policy` states; sweeps lost loans first.

        Raises:
            AssertionError: Naming the invariant that is broken.
        """
        broken = self._section.run(self._verify)
        if broken is not None:
            raise AssertionError(broken)

    def _make(self, slots: Sequence[Slot], at_any_price: bool = True) -> None:
        """Gives empty slots, on loan to the caller, their buffers; if need be at the price of idle ones."""
        for slot in slots:
            if slot.donor is not None:
                donor, slot.donor = slot.donor, None
                try:
                    self._maker.retype(slot, donor)
                    continue
                except Exception:  # It was donated away by its last borrower, or failed to be computed.
                    donor.drop_buffer()
            self._create(slot, at_any_price)
            if not slot.spilled:
                self._section.run(self._count, slot.shelf, "creation_count")

    def _create(self, slot: Slot, at_any_price: bool) -> None:
        """Has the device make a buffer; where it has no memory for it, idle slots are given up, and it tries again."""
        while True:
            try:
                return self._maker.create(slot)
            except Exception as e:
                doomed = (
                    self._section.run(self._give_up_more, slot.shelf) if at_any_price and is_out_of_memory(e) else []
                )
                if not doomed:
                    raise
            for other in doomed:
                other.drop_buffer()

    def _wait(self, waiter: Waiter) -> list[Slot]:
        """Blocks, without the lock, until the waiter is settled or its one deadline has passed.

        The first in the line is on duty: it listens to the queue of returns, since a finalizer can do no more than put
        something there. The others listen to their own signal, which also tells them when the duty is theirs.
        """
        deadline = None if self.timeout is None else monotonic() + self.timeout
        try:
            while not waiter.settled:
                inbox: SimpleQueue[Any] = self._returned if self._line[0] is waiter else waiter.signal
                left = LOOK_AGAIN_SECONDS if deadline is None else max(deadline - monotonic(), 0)
                try:
                    loan = inbox.get(timeout=min(left, LOOK_AGAIN_SECONDS))
                except Empty:
                    self._section.run(self._sweep, waiter.need)
                    self.settle()
                    if left <= LOOK_AGAIN_SECONDS and deadline is not None:
                        self._section.run(self._time_out, waiter)
                else:
                    self.settle([] if loan is None else [loan])
        finally:
            self._section.run(self._leave_line, waiter)
        if waiter.error is not None:
            error, waiter.error = waiter.error, None
            try:
                raise error
            finally:
                del error  # Or the error, its traceback and this frame would be a cycle, and keep the caller's leases.
        assert waiter.slots is not None
        return waiter.slots

    # What follows runs in the critical section.

    def _refuse_where_steady(self, slot: Slot) -> None:
        if self.is_steady:
            what = f"a {slot.size_class} array was kept, detached or donated away"
            raise refusals.unsteady(self, "creation", what)

    def _count_copy(self, slot: Slot, cause: str) -> None:
        self._count(slot.shelf, "copy_count")
        if self.is_steady:
            raise refusals.unsteady(self, "copy", f"the slot of {slot.size_class} moved: {cause}")

    def _add_steady(self, scope: SteadyScope) -> None:
        self._steady_scopes[:] = [ref for ref in self._steady_scopes if ref() is not None]
        self._steady_scopes.append(weakref.ref(scope))

    def _begin_recording(self, recorder: Recorder) -> None:
        self._settle()
        leased = [slot for shelf in self.shelves.values() for slot in shelf.slots if slot.leased]
        for slot in leased:
            recorder.note((slot, slot.requested), monotonic())
        self._record_with((*self.recorders, recorder))

    def _end_recording(self, recorder: Recorder) -> None:
        self._settle()
        self._record_with(tuple(r for r in self.recorders if r is not recorder))
        recorder.spilled = set()

    def _record_with(self, recorders: tuple[Recorder, ...]) -> None:
        one = None if not recorders else recorders[0] if len(recorders) == 1 else Recorders(recorders)
        self.recorders, self._recorder = recorders, one  # Without a call, so that no interrupt comes between these two.

    def _read(self, read: Callable[[], Any]) -> Any:
        if self._line:  # The waiter on duty may have a return in its hand.
            self._sweep(self.shelves.values())
        self._settle()
        return read()

    def _verify(self) -> str | None:
        self._sweep(self.shelves.values())
        self._settle()
        return verify(self)

    def _close(self) -> list[Slot]:
        """Returns the idle slots, whose buffers are to be freed."""
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
        return idle

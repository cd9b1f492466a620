"""This pool: the very arena and policy that lend slots of a device, with a device that has addresses but no bytes.

The slots are placed by XLA's allocator, as a device would place them. So there are two figures: what the pool holds,
and what its slots need of the device.
"""

import weakref
from collections import Counter

import attrs
import numpy as np

from arenax import Plan, SizeClass, SizeClasses, Trace
from arenax._arena import Arena
from arenax._plan import BYTES, PlannedClass
from arenax._slot import Holder, Loan, Slot

from ._allocator import Allocator
from ._replay import Observer, replay
from ._result import Result
from ._sim_bfc import Bfc

MAX_CLASSES = 16
MULTIPLE_OF = 256


def simulate_pool(
    trace: Trace,
    limit_bytes: int | None,
    plan: Plan | None,
    max_classes: int | None,
    observe: Observer | None = None,
) -> Result:
    """Runs a trace through a pool.

    Args:
        trace: The trace.
        limit_bytes: The pool's budget; None is what the plan requires, or without a plan no limit.
        plan: Its slots are reserved ahead, and its classes are those that serve. Without one nothing is reserved, and
            the classes are those of the recording, or where it has none, or `max_classes` is given, those fitted to
            the bytes of its requests.
        max_classes: The most classes without a plan; None is 16.
        observe: As for `replay`.

    Raises:
        ValueError: Where both `plan` and `max_classes` are given, or the plan needs more than the limit.
        TypeError: Where `plan` is none.
    """
    if plan is not None:
        if not isinstance(plan, Plan):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"plan must be an arenax.Plan, got {type(plan).__name__}")
        if max_classes is not None:
            raise ValueError(f"max_classes is for a pool without a plan, got {max_classes} and a plan")
        limit_bytes = plan.required_bytes if limit_bytes is None else limit_bytes
        if plan.required_bytes > limit_bytes:
            raise ValueError(
                f"limit_bytes must be at least the {plan.required_bytes:,} that the plan requires, got {limit_bytes:,}"
            )
    if max_classes is not None and (isinstance(max_classes, bool) or not isinstance(max_classes, int)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"max_classes must be an integer, got {max_classes!r}")
    if max_classes is not None and max_classes < 1:
        raise ValueError(f"max_classes must be at least 1, got {max_classes}")
    pool = Pool(trace, plan, max_classes, limit_bytes)
    result = replay(trace, pool, "pool", observe)
    needed = pool.device.highest / trace.peak_bytes if trace.peak_bytes else float("nan")
    return attrs.evolve(result, conversions=pool.conversion_count, device_ratio=needed)


class Pool(Allocator):
    """An arena that lends a slot for each buffer of one trace.

    Args:
        trace: The trace, whose buffers it is asked for by their numbers.
        plan: Slots to reserve and classes to serve with, or None.
        max_classes: The most classes without a plan, or None.
        limit_bytes: The budget, or None.

    Attributes:
        device: Places the slots.
    """

    def __init__(
        self, trace: Trace, plan: Plan | None = None, max_classes: int | None = None, limit_bytes: int | None = None
    ) -> None:
        super().__init__(limit_bytes)
        self.device = Bfc()
        self._arena = _Arena(self, name="pool", mode="grow", budget=limit_bytes, timeout=None)
        classes, self._class_of = _classes(trace, plan, max_classes)
        self._shelves = [self._arena.shelf(c.size_class) for c in classes]
        self._holder = Holder()
        self._loans: dict[int, Loan] = {}
        self._slots = 0
        if plan is not None:
            self._arena.reserve(Counter({c.size_class: c.slots for c in plan.classes}))

    @property
    def reserved_bytes(self) -> int:
        """See `Allocator`."""
        return self._arena.tally.reserved_bytes

    @property
    def largest_free_bytes(self) -> int:
        """See `Allocator`."""
        return max((shelf.nbytes for shelf in self._shelves if shelf.free), default=0)

    @property
    def room_bytes(self) -> int:
        """See `Allocator`."""
        return 0 if self.limit_bytes is None else self.limit_bytes - self.reserved_bytes

    @property
    def conversion_count(self) -> int:
        """How often idle slots were given up for one of another class."""
        return sum(shelf.tally.conversion_count for shelf in self._shelves)

    def allocate(self, buffer: int, size: int) -> int | None:
        """See `Allocator`; None is a spill, or a request that no class serves."""
        number = self._class_of[buffer]
        if number < 0:
            return None
        shelf, arena = self._shelves[number], self._arena
        loan = arena.loan(self._holder)
        (slot,) = arena.checkout((shelf,), (size,), loan)
        if slot.spilled:
            arena.settle([loan])
            return None
        self._loans[buffer] = loan
        return self._note(buffer, (slot.address, shelf.nbytes))

    def free(self, buffer: int) -> None:
        """See `Allocator`."""
        self._forget(buffer)
        self._arena.settle([self._loans.pop(buffer)])

    def create(self, slot: Slot) -> None:
        """Has the device place a slot."""
        nbytes, number = slot.shelf.nbytes, self._slots
        self._slots += 1
        slot.array = _Buffer()
        if slot.spilled:
            return
        slot.address = self.device.allocate(number, nbytes) or 0
        weakref.finalize(slot.array, self.device.free, number)
        self.creations += 1
        self.created_bytes += nbytes

    def retype(self, slot: Slot, donor: Slot) -> None:
        """Hands the memory of one slot over to another."""
        slot.array, slot.address, donor.array = donor.array, donor.address, None


class _Buffer:
    """What a slot has for an array: when it dies, its memory is free."""


class _Arena(Arena):
    """An arena whose warnings are in the result."""

    def _warn_once(self, about: object, message: object) -> None:
        pass


def _classes(trace: Trace, plan: Plan | None, max_classes: int | None) -> tuple[tuple[PlannedClass, ...], list[int]]:
    """The classes, and for each buffer the number of its own, -1 where none serves it."""
    if plan is not None:
        return plan.classes, plan.assign(trace).tolist()
    if trace.requests is not None and max_classes is None:
        numbers: dict[SizeClass, int] = {}
        found = [numbers.setdefault(request.size_class, len(numbers)) for request in trace.requests]
        return tuple(PlannedClass(c, None, 1) for c in numbers), found
    if not len(trace):
        return (), []
    boundaries = SizeClasses.fit(trace.sizes, k=max_classes or MAX_CLASSES, multiple_of=MULTIPLE_OF).boundaries
    classes = tuple(PlannedClass(SizeClass((b,), BYTES), 0, 1) for b in boundaries)
    return classes, np.searchsorted(boundaries, trace.sizes).tolist()

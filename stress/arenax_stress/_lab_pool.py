"""The pool on a device that has an end: where a new slot finds no place between the others, idle ones are given up.

`simulate` gives a pool a device without bounds, and says how much its slots need of it. The laboratory asks the other
question, how small a device would do; there a conversion can fail for want of one piece, as it can on a real device.
"""

from arenax import Trace
from arenax._slot import Loan, Slot

from ._sim_bfc import Bfc
from ._sim_pool import Pool


class DevicePool(Pool):
    """A pool without a plan whose budget is a whole device, in which XLA's allocator places its slots.

    Args:
        trace: The trace, whose buffers it is asked for by their numbers.
        max_classes: The most classes, or None.
        limit_bytes: The device's bytes, and the budget.

    Example:
        >>> from arenax_stress import Trace
        >>> from arenax_stress._lab_pool import DevicePool
        >>> pool = DevicePool(Trace.from_events([("allocate", i, 512) for i in range(3)]), None, 1024)
        >>> [pool.allocate(buffer, 512) for buffer in range(3)]
        [0, 512, None]
    """

    def __init__(self, trace: Trace, max_classes: int | None, limit_bytes: int) -> None:
        super().__init__(trace, None, max_classes, limit_bytes)
        self.device = Bfc(limit_bytes)
        self._unserved: Loan | None = None

    def allocate(self, buffer: int, size: int) -> int | None:
        """See `Allocator`; None also where giving up all idle slots leaves no piece that is long enough."""
        try:
            return super().allocate(buffer, size)
        except MemoryError:
            if self._unserved is not None:
                self._arena.settle([self._unserved])
            return None

    def create(self, slot: Slot) -> None:
        """Has the device place a slot.

        Raises:
            MemoryError: Where it finds no place. The arena then gives up idle slots and tries again.
        """
        if not slot.spilled:
            # The base class takes whatever the device answers; what is free once is free again, in the same place.
            if self.device.allocate(-1, slot.shelf.nbytes) is None:
                self._unserved = slot.loan
                raise MemoryError(f"no place for {slot.shelf.nbytes:,} bytes")
            self.device.free(-1)
        super().create(slot)

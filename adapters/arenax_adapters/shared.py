"""Slots for worker processes: batches cross from a worker to its parent in place, in memory that both have mapped.

A `Segment` belongs to one iterator of the parent, and each worker has slots of its own in it. A worker takes a free
slot with `Writer.take`, makes the arrays of a batch in it and sends what `Writer.pack` returns through whatever queue
there is: a few hundred bytes. Received, that is a `Packed` again, whose ``tree`` has the arrays, in the same memory.
The slot is free when the parent has called `Packed.release`, or dropped the `Packed` and every array of it.

Each slot has one writer, its worker, and one releaser, the parent, so there is no lock and nothing to wait for. Where
no slot is free the batch is sent as ordinary arrays.

NumPy and the standard library only: a worker that imports this does not import jax. Where the system has no memfd (it
is Linux's) every batch is sent as ordinary arrays.
"""

import itertools
import os
import warnings

from ._mapping import AVAILABLE, Mapping, SharedFile
from ._packed import Claim, Extent, segments
from ._packed import Packed as Packed
from ._packed import Padded as Padded
from ._writer import STATES, header_bytes
from ._writer import Slot as Slot
from ._writer import Writer as Writer
from ._writer import filling as filling

_numbers = itertools.count(1)


class Segment:
    """The parent's end: one nameless file for one iterator's workers.

    Args:
        workers: How many there are, at least 1.
        slots: Slots of each worker: batches that it may have filled or be filling while none has been released.

    Attributes:
        overflow_count: Batches that `overflowed` was told of.
        token: Names it in this process.

    Raises:
        ValueError: For a number below 1, or more than 64 slots.

    Example:
        >>> import numpy as np
        >>> from arenax_adapters.shared import Segment
        >>> segment = Segment(workers=1, slots=2)
        >>> import pickle
        >>> writer = pickle.loads(pickle.dumps(segment.writer()))  # As if it were sent to a worker.
        >>> slot = writer.take()
        >>> x = slot.empty((2, 3), np.float32)
        >>> x[:] = 7
        >>> packed = pickle.loads(pickle.dumps(writer.pack({"x": x})))  # As if it came from one.
        >>> print(packed.tree["x"].sum())
        42.0
        >>> packed.release()
        >>> segment.close()
    """

    def __init__(self, workers: int, slots: int) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        if not 1 <= slots <= 64:
            raise ValueError(f"slots must be between 1 and 64, got {slots}")
        self.token = (os.getpid(), next(_numbers))
        self._slots = slots
        # To spare: a loader may start a worker again, and what the first one sent may still be in use.
        self._regions = 4 * workers
        self._extents: dict[int, tuple[Extent, Mapping]] = {}
        self.overflow_count = 0
        self._file: SharedFile | None = None
        self._header: Mapping | None = None
        if AVAILABLE:
            self._file = SharedFile()
            self._file.reserve(0, header_bytes(self._regions), "the states of a loader's slots")
            self._header = Mapping(self._file.fd(), 0, header_bytes(self._regions))
        segments[self.token] = self

    def writer(self) -> Writer:
        """The workers' end, to be sent to each of them."""
        return Writer(self.token, self._file, self._regions, self._slots)

    def close(self) -> None:
        """Forgets the file: its memory goes with the last worker and the last array. Idempotent."""
        segments.pop(self.token, None)
        self._extents.clear()
        if self._file is not None:
            self._file.close()

    def claim(self, region: int, extent: Extent, number: int) -> Claim:
        """Maps the extent, where that is not done yet, and takes a sent slot of it in charge."""
        known = self._extents.get(region)
        if known is None or known[0] != extent:
            assert self._file is not None
            known = self._extents[region] = (extent, Mapping(self._file.fd(), extent.offset, extent.nbytes))
        assert self._header is not None
        state = region * STATES + extent.first_state + number
        return Claim(self._header, state, known[1], number * extent.slot_bytes)

    def overflowed(self) -> None:
        """Counts a batch that came as ordinary arrays; the first one warns."""
        self.overflow_count += 1
        if self.overflow_count == 1 and AVAILABLE:
            warnings.warn(
                f"a batch found none of its worker's {self._slots} shared slots free and was sent the slow way, as a "
                "copy through a pipe: adopted batches, or views of them, are held, or the other workers have ended and "
                "left this one more than its share. Drop batches sooner, or do not adopt them. Later ones are only "
                "counted",
                RuntimeWarning,
                stacklevel=2,
            )

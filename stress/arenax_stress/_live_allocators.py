"""What serves a trace with real arrays: a fresh array for each buffer, or a lease of a pool.

Both get the same work. Each buffer is brought from one host array of ones, which lies 16 bytes past a multiple of 64,
as NumPy's own large arrays do: JAX on CPU would take one at such a multiple for its own, and allocate nothing. Without
the pool that is `jax.device_put` of a uint8 array of the buffer's bytes, which is how a program brings a batch. It
compiles nothing, whatever the size, and copies, so that every byte asked for is resident. With the pool it is a lease
with undefined contents, written from end to end, as `BufferPool.put` does with its padding: one program a size class is
enough, and every byte of the slot is resident. Each allocation is awaited, and each free is a drop or a release.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np

import arenax
from arenax import Plan, SizeClass, Trace

from ._sim_pool import _classes  # pyright: ignore[reportPrivateUsage]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Unserved(Exception):
    """No size class serves a buffer."""


class Serves(Protocol):
    """What serves the trace."""

    def warm_up(self) -> None:
        """Compiles what will be needed, and leaves nothing allocated."""
        ...

    def begin(self) -> None:
        """Makes what is to be there before the first event."""
        ...

    def allocate(self, buffer: int) -> None:
        """Allocates and fills a buffer.

        Raises:
            Unserved: Where no size class serves it.
        """
        ...

    def free(self, buffer: int) -> None:
        """Frees one that was allocated."""
        ...

    def end(self) -> dict[str, int]:
        """Frees all, and returns figures of its own: fields of `Replayed`."""
        ...


class Fresh:
    """A fresh array for each buffer.

    Args:
        sizes: Bytes of each buffer.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._source = ones(max(sizes, default=0))
        self._live: dict[int, jax.Array] = {}

    def warm_up(self) -> None:
        """See `Serves`."""
        jax.device_put(self._source[:1]).block_until_ready()

    def begin(self) -> None:
        """See `Serves`."""

    def allocate(self, buffer: int) -> None:
        """See `Serves`."""
        self._live[buffer] = jax.device_put(self._source[: self._sizes[buffer]]).block_until_ready()

    def free(self, buffer: int) -> None:
        """See `Serves`."""
        del self._live[buffer]

    def end(self) -> dict[str, int]:
        """See `Serves`."""
        self._live.clear()
        return {}


class Pooled:
    """A lease for each buffer, from a pool that has the slots of a plan, or grows.

    Args:
        trace: The trace.
        plan: The plan, or None for classes as the simulated pool takes them: those of the recording, or fitted.
        budget: The pool's; None is what the plan requires, or without a plan no limit.
    """

    def __init__(self, trace: Trace, plan: Plan | None, budget: int | None) -> None:
        self._plan = plan
        # The simulator's own choice, so that the two can be compared.
        classes, self._class_of = _classes(trace, plan, None)
        self._classes: list[SizeClass] = [c.size_class for c in classes]
        source = ones(max((c.nbytes for c in self._classes), default=0))
        self._values = [source[: c.nbytes].view(c.dtype).reshape(c.shape) for c in self._classes]
        if budget is None and plan is not None:
            budget = plan.required_bytes
        self.pool = arenax.BufferPool(budget=budget, name="replay")
        self._measure = self.pool.measure()
        self._live: dict[int, arenax.Lease] = {}

    def warm_up(self) -> None:
        """See `Serves`."""
        planned = self._classes if self._plan is not None else []
        for number in sorted({*self._class_of, *range(len(planned))} - {-1}):
            self._lease(number).release()
            self.pool.trim()

    def begin(self) -> None:
        """See `Serves`; these are the slots that `BufferPool.from_plan` reserves."""
        self._measure.__enter__()
        for c in () if self._plan is None else self._plan.classes:
            self.pool.reserve(arenax.ArraySpec(c.size_class.shape, c.size_class.dtype), slots=c.slots)

    def allocate(self, buffer: int) -> None:
        """See `Serves`."""
        number = self._class_of[buffer]
        if number < 0:
            raise Unserved("no size class serves it")
        self._live[buffer] = self._lease(number)

    def free(self, buffer: int) -> None:
        """See `Serves`."""
        self._live.pop(buffer).release()

    def end(self) -> dict[str, int]:
        """See `Serves`."""
        for lease in self._live.values():
            lease.release()
        self._live.clear()
        self._measure.__exit__(None, None, None)
        stats = self._measure.stats
        self.pool.close()
        return {
            "reserved_bytes": stats.peak_reserved_bytes,
            "creations": stats.creation_count,
            "conversions": stats.conversion_count,
            "spills": stats.spill_count,
        }

    def _lease(self, number: int) -> arenax.Lease:
        size_class = self._classes[number]
        lease = self.pool.lease(size_class.shape, size_class.dtype, fill=None)
        try:
            lease.write(self._values[number])
            lease.array.block_until_ready()
        except BaseException:
            lease.release()
            raise
        return lease


def ones(nbytes: int) -> Bytes:
    """Returns bytes of 1, which begin at 16 past a multiple of 64."""
    raw = np.ones(nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 64 + 16
    return raw[start : start + nbytes]

"""What a simulation found: how much memory the allocator needed, how broken up it was, and what it could not serve."""

from typing import Any

import attrs
import numpy as np

Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]


@attrs.frozen
class Failure:
    """An allocation that could not be served; the simulation goes on without it.

    Attributes:
        event: The number of its event.
        buffer: The number of its buffer.
        size: The bytes that were asked for.
        free_bytes: What was free within the limit, when the allocator gave up.
        largest_free_bytes: The largest part of it in one piece.
    """

    event: int
    buffer: int
    size: int
    free_bytes: int
    largest_free_bytes: int


@attrs.frozen(eq=False)
class Curve:
    """The bytes after each event, or after each of an even sample of the events that ends with the last.

    Attributes:
        events: The numbers of the events, an int64 for each.
        requested_bytes: What the live buffers asked for, failures left out; an int64 for each, as all that follow.
        allocated_bytes: What their chunks take.
        reserved_bytes: What the allocator holds.
        largest_free_bytes: The largest free chunk of what it holds.
    """

    events: Ints
    requested_bytes: Ints
    allocated_bytes: Ints
    reserved_bytes: Ints
    largest_free_bytes: Ints

    @property
    def free_bytes(self) -> Ints:
        """What the allocator holds and has not allocated."""
        return self.reserved_bytes - self.allocated_bytes

    @property
    def fragmentation(self) -> Floats:
        """The share of what is free that is not in the largest chunk, a float64 for each; 0 where nothing is free."""
        free = self.free_bytes
        return (free - self.largest_free_bytes) / np.maximum(free, 1)


@attrs.frozen(eq=False)
class Result:
    """What an allocator did with a trace.

    Attributes:
        allocator: Its name.
        trace: The name of the trace.
        peak_requested_bytes: The most bytes that the trace has alive at once, as they were asked for.
        peak_allocated_bytes: The most bytes in allocated chunks at once.
        peak_reserved_bytes: The most bytes that the allocator held at once; in an unbounded region the highest address.
        allocated_bytes: Bytes in allocated chunks at the end.
        curve: The same over time.
        failures: What it could not serve, in order.
        creations: How often it asked the device for memory, a segment, block or slot; 0 where it has one region.
        conversions: How often it gave a slot of one class up for one of another; 0 but for the pool.
        created_bytes: The bytes of all creations.
        device_ratio: What the device's own allocator needs to hold the pool's slots, as a multiple of the peak of
            requested bytes; None but for the pool.

    Example:
        >>> from arenax import Trace
        >>> from arenax_stress import simulate
        >>> trace = Trace.from_events([("allocate", "a", 700), ("allocate", "b", 300), ("free", "a", 0)])
        >>> result = simulate(trace, "bfc")
        >>> result.peak_requested_bytes, result.peak_reserved_bytes, result.allocated_bytes, result.ratio
        (1000, 1280, 512, 1.28)
        >>> result.curve.largest_free_bytes
        array([  0,   0, 768])
    """

    allocator: str
    trace: str
    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    allocated_bytes: int
    curve: Curve = attrs.field(repr=False)
    failures: tuple[Failure, ...] = ()
    creations: int = 0
    conversions: int = 0
    created_bytes: int = 0
    device_ratio: float | None = None

    @property
    def ratio(self) -> float:
        """The memory that was needed: peak of reserved / peak of requested bytes; nan where nothing was asked for."""
        return self.peak_reserved_bytes / self.peak_requested_bytes if self.peak_requested_bytes else float("nan")

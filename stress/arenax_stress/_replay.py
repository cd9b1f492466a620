"""Drives an allocator through a trace, event by event, and measures it."""

from collections.abc import Callable

import numpy as np

from arenax import Trace

from ._allocator import Allocator
from ._result import Curve, Failure, Result

SAMPLES = 4096

# The number of the event, the buffer, the bytes of its chunk, and the chunk's address; None where it was just freed.
Observer = Callable[[int, int, int, int | None], None]


def replay(trace: Trace, allocator: Allocator, name: str, observe: Observer | None = None) -> Result:
    """Returns what the allocator does with the trace.

    What fails is left out, and its free ignored; a buffer of no bytes takes no memory.

    Args:
        trace: The trace.
        allocator: A fresh one.
        name: What the result calls it.
        observe: Called after each event that changed the memory, as for a map of it.

    Example:
        >>> from arenax_stress._sim_cupy import CuPy
        >>> trace = Trace.from_events([("allocate", "a", 700), ("allocate", "b", 300), ("free", "a", 0)])
        >>> result = replay(trace, CuPy(), "cupy", lambda *placed: print(placed))
        (0, 0, 1024, 0)
        (1, 1, 512, 1024)
        (2, 0, 1024, None)
    """
    sizes = trace.sizes.tolist()
    events = sample(len(trace.steps))
    wanted = iter([*events.tolist(), -1])
    next_sample = next(wanted)
    samples: list[tuple[int, int, int, int]] = []
    failures: list[Failure] = []
    chunks = allocator.chunks
    requested = peak_allocated = 0
    peak_reserved = allocator.reserved_bytes
    for event, step in enumerate(trace.steps.tolist()):
        buffer = step if step >= 0 else ~step
        size = sizes[buffer]
        if step < 0:
            if buffer in chunks:
                taken = chunks[buffer][1]
                allocator.free(buffer)
                requested -= size
                if observe:
                    observe(event, buffer, taken, None)
        elif size:
            address = allocator.allocate(buffer, size)
            if address is None:
                failures.append(_failure(allocator, event, buffer, size))
            else:
                requested += size
                peak_allocated = max(peak_allocated, allocator.allocated_bytes)
                peak_reserved = max(peak_reserved, allocator.reserved_bytes)
                if observe:
                    observe(event, buffer, chunks[buffer][1], address)
        if event == next_sample:
            now = allocator.allocated_bytes, allocator.reserved_bytes, allocator.largest_free_bytes
            samples.append((requested, *now))
            next_sample = next(wanted)
    return Result(
        allocator=name,
        trace=trace.name,
        peak_requested_bytes=trace.peak_bytes,
        peak_allocated_bytes=peak_allocated,
        peak_reserved_bytes=peak_reserved,
        allocated_bytes=allocator.allocated_bytes,
        curve=Curve(events, *np.array(samples, np.int64).reshape(-1, 4).T),
        failures=tuple(failures),
        creations=allocator.creations,
        conversions=allocator.conversions,
        created_bytes=allocator.created_bytes,
    )


def sample(count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Returns the numbers of all of `count` events, or of `SAMPLES` of them, evenly spaced up to the last."""
    taken = min(count, SAMPLES)
    return np.arange(1, taken + 1) * count // max(taken, 1) - 1


def _failure(allocator: Allocator, event: int, buffer: int, size: int) -> Failure:
    room = allocator.room_bytes
    largest = max(allocator.largest_free_bytes, room)
    return Failure(event, buffer, size, allocator.free_bytes + room, largest)

"""Traces for the tests of the simulated allocators, and what these must agree with: sums of bytes, a linear search."""

import csv
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from arenax import Trace
from arenax_stress._allocator import Allocator
from arenax_stress._chunks import Chunk

KIB = 1 << 10
MIB = 1 << 20
SHARED = Path(__file__).parents[3] / "shared" / "traces"


def made(*steps: tuple[Any, ...]) -> Trace:
    """("a", id, size) allocates, ("f", id) frees."""
    return Trace.from_events([("allocate", *s[1:]) if s[0] == "a" else ("free", s[1], 0) for s in steps])


@functools.cache
def public(name: str) -> Trace:
    """A public trace; at equal times frees come before allocations."""
    if not SHARED.is_dir():
        pytest.skip(f"no public traces at {SHARED}")
    events: list[tuple[int, bool, int, int]] = []
    with (SHARED / f"{name}.csv").open(newline="") as file:
        for number, row in enumerate(csv.DictReader(file)):
            events += [(int(row[key]), key == "lower", number, int(row["size"])) for key in ("lower", "upper")]
    return Trace.from_events([("allocate" if a else "free", n, size) for _, a, n, size in sorted(events)], name)


def traces(sizes: st.SearchStrategy[int], max_events: int = 60) -> st.SearchStrategy[Trace]:
    """Each step allocates a size, or frees one of those alive."""
    steps = st.lists(st.one_of(sizes, st.integers(0, 30).map(lambda n: ~n)), max_size=max_events)
    return steps.map(_trace)


def _trace(steps: list[int]) -> Trace:
    alive: list[int] = []
    events: list[tuple[Any, ...]] = []
    for number, step in enumerate(steps):
        if step >= 0:
            events.append(("a", number, step))
            alive.append(number)
        elif alive:
            events.append(("f", alive.pop(~step % len(alive))))
    return made(*events)


def free_chunks(allocator: Any) -> list[Chunk]:
    """All that is free of what it holds, by address."""
    spaces = [allocator._region] if hasattr(allocator, "_region") else allocator._pools
    return sorted(itertools.chain.from_iterable(space._size_at.items() for space in spaces))


def check(allocator: Allocator) -> None:
    """Live and free chunks overlap nowhere, and add up to what it holds."""
    free = free_chunks(allocator)
    chunks = sorted([*allocator.chunks.values(), *free])
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(chunks))
    assert sum(size for _, size in allocator.chunks.values()) == allocator.allocated_bytes
    assert sum(size for _, size in free) == allocator.free_bytes
    assert sum(size for _, size in chunks) == allocator.reserved_bytes
    assert max([size for _, size in free], default=0) == allocator.largest_free_bytes
    assert allocator.limit_bytes is None or allocator.reserved_bytes + allocator.room_bytes <= allocator.limit_bytes
    assert allocator.highest >= max([sum(chunk) for chunk in allocator.chunks.values()], default=0)


class Naive:
    """The textbook by linear search: chunks in the order of their addresses, the last of an unbounded one is its tail.

    Args:
        fit: The key that the chosen one of the sufficient chunks is the least of, from size and address.
        is_split: Whether a chunk of so many bytes is split for so many.
        limit: The region's bytes; None for no bounds.
    """

    def __init__(
        self, fit: Callable[[float, int], Any], is_split: Callable[[float, int], bool], limit: int | None
    ) -> None:
        self.fit, self.is_split = fit, is_split
        self.chunks: list[tuple[int, float, int | None]] = [(0, float("inf") if limit is None else limit, None)]

    def allocate(self, buffer: int, size: int) -> int | None:
        size = -(-size // 256) * 256
        fitting = [c for c in self.chunks if c[2] is None and c[1] >= size]
        if not fitting:
            return None
        chosen = min(fitting, key=lambda c: self.fit(c[1], c[0]))
        at = self.chunks.index(chosen)
        address, available, _ = chosen
        self.chunks[at] = (address, available, buffer)
        if self.is_split(available, size) and available > size:
            self.chunks[at : at + 1] = [(address, size, buffer), (address + size, available - size, None)]
        return address

    def free(self, buffer: int) -> None:
        at = next(i for i, c in enumerate(self.chunks) if c[2] == buffer)
        first, last = at, at + 1
        if at and self.chunks[at - 1][2] is None:
            first -= 1
        if last < len(self.chunks) and self.chunks[last][2] is None:
            last += 1
        self.chunks[first:last] = [(self.chunks[first][0], sum(c[1] for c in self.chunks[first:last]), None)]


def agree(allocator: Allocator, naive: Naive, trace: Trace) -> None:
    """Both give every buffer the same address."""
    for step in trace.steps.tolist():
        if step >= 0:
            size = int(trace.sizes[step])
            assert allocator.allocate(step, size) == naive.allocate(step, size)
        elif ~step in allocator.chunks:
            allocator.free(~step)
            naive.free(~step)
        hypothesis.note(repr(naive.chunks))

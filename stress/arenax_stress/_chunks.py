"""The free chunks of an address space: found by size, joined with their free neighbours; no search is linear."""

from typing import Protocol

import attrs

try:
    from sortedcontainers import SortedDict, SortedList
except ImportError as e:
    raise ImportError('arenax_stress.simulate needs sortedcontainers: pip install "arenax[tools]"') from e

Chunk = tuple[int, int]
"""An address and a size, both in bytes."""


class Index(Protocol):
    """The order in which free chunks are looked through: the fit of an allocator."""

    @property
    def largest(self) -> int:
        """The bytes of the largest chunk, 0 where there is none."""
        ...

    def add(self, address: int, size: int) -> None:
        """Takes a chunk in."""
        ...

    def remove(self, address: int, size: int) -> None:
        """Takes a chunk out."""
        ...

    def find(self, size: int) -> Chunk | None:
        """Returns the chunk that is to serve `size` bytes, None where none suffices."""
        ...


class BySize:
    """Best fit: the smallest chunk that suffices, and of equal ones that of the lowest address."""

    def __init__(self) -> None:
        self._sorted: SortedList[Chunk] = SortedList()  # (size, address)

    @property
    def largest(self) -> int:
        """See `Index`."""
        return self._sorted[-1][0] if self._sorted else 0

    def add(self, address: int, size: int) -> None:
        """See `Index`."""
        self._sorted.add((size, address))

    def remove(self, address: int, size: int) -> None:
        """See `Index`."""
        self._sorted.remove((size, address))

    def find(self, size: int) -> Chunk | None:
        """See `Index`."""
        at = self._sorted.bisect_left((size, 0))
        if at == len(self._sorted):
            return None
        found, address = self._sorted[at]
        return address, found


@attrs.define(eq=False)
class Chunks:
    """Free chunks, joined where they touch.

    Attributes:
        index: How they are found.

    Example:
        >>> chunks = Chunks()
        >>> chunks.give(0, 1024)
        (0, 1024)
        >>> chunks.carve(256), chunks.carve(256), chunks.index.largest
        (0, 256, 512)
        >>> chunks.give(0, 256), chunks.give(256, 256)
        ((0, 256), (0, 1024))
    """

    # Invariant: no two chunks touch, but where the later begins at one of `_fences`. `_size_at` and `_start_at_end`
    # hold the same chunks as `index`.
    index: Index = attrs.field(factory=BySize)
    _size_at: dict[int, int] = attrs.field(factory=dict[int, int], init=False)
    _start_at_end: dict[int, int] = attrs.field(factory=dict[int, int], init=False)
    _fences: set[int] = attrs.field(factory=set[int], init=False)

    def give(self, address: int, size: int) -> Chunk:
        """Makes a chunk free, and returns what it has become with the free ones before and after it."""
        start, end = address, address + size
        if end not in self._fences and end in self._size_at:
            end += self.remove(end)
        if start not in self._fences and start in self._start_at_end:
            start = self._start_at_end[start]
            self.remove(start)
        self._size_at[start] = end - start
        self._start_at_end[end] = start
        self.index.add(start, end - start)
        return start, end - start

    def take(self, size: int) -> Chunk | None:
        """Returns the chunk that serves `size` bytes, whole and no longer free; None where none suffices."""
        found = self.index.find(size)
        if found:
            self.remove(found[0])
        return found

    def carve(self, size: int) -> int | None:
        """Returns the address of exactly `size` bytes, no longer free; the rest of their chunk stays so."""
        found = self.take(size)
        if found is None:
            return None
        address, available = found
        if available > size:
            self.give(address + size, available - size)
        return address

    def remove(self, address: int) -> int:
        """Returns the bytes of the free chunk at this address, which is no longer free."""
        size = self._size_at.pop(address)
        del self._start_at_end[address + size]
        self.index.remove(address, size)
        return size


@attrs.define(eq=False)
class Region(Chunks):
    """One region that begins at address 0: of so many bytes, or without bounds.

    What is free at the end of an unbounded one is its tail, which grows on demand; it is no chunk.

    Attributes:
        limit_bytes: Its bytes; None for no bounds.
        top: Where its tail begins, or its end.

    Example:
        >>> region = Region()
        >>> region.carve(512), region.carve(256), region.top
        (0, 512, 768)
        >>> region.give(512, 256), region.top
        ((512, 256), 512)
    """

    limit_bytes: int | None = None
    top: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        if self.limit_bytes:
            self.give(0, self.limit_bytes)
            self.top = self.limit_bytes

    def give(self, address: int, size: int) -> Chunk:
        """See `Chunks.give`; what touches the tail becomes part of it."""
        start, size = super().give(address, size)
        if self.limit_bytes is None and start + size == self.top:
            self.remove(start)
            self.top = start
        return start, size

    def take(self, size: int) -> Chunk | None:
        """See `Chunks.take`; where no chunk of an unbounded region suffices, its tail does."""
        found = super().take(size)
        if found is None and self.limit_bytes is None:
            found = self.top, size
            self.top += size
        return found


@attrs.define(eq=False)
class Segments(Chunks):
    """The free chunks of segments, which a device allocated one by one: nothing joins across two of them.

    Attributes:
        idle: The bytes of the segments that are wholly free, by address.
    """

    idle: SortedDict[int, int] = attrs.field(factory=SortedDict[int, int], init=False)
    _segments: dict[int, int] = attrs.field(factory=dict[int, int], init=False)

    def open(self, address: int, size: int) -> None:
        """Takes a segment in, none of it free."""
        self._segments[address] = size
        self._fences.add(address)

    def close(self, address: int) -> int:
        """Lets an idle segment go, and returns its bytes."""
        self._fences.remove(address)
        del self._segments[address]
        return self.remove(address)

    def give(self, address: int, size: int) -> Chunk:
        """See `Chunks.give`."""
        start, size = super().give(address, size)
        if self._segments.get(start) == size:
            self.idle[start] = size
        return start, size

    def remove(self, address: int) -> int:
        """See `Chunks.remove`."""
        self.idle.pop(address, None)
        return super().remove(address)

"""What all simulated allocators have in common: an address for each live buffer, and the bytes behind it."""

import abc

import attrs

from ._chunks import BySize, Chunk, Index, Region


def round_up(size: int, multiple_of: int) -> int:
    """Returns the least multiple that is not below `size`."""
    return -(-size // multiple_of) * multiple_of


@attrs.define(eq=False)
class Allocator(abc.ABC):
    """Gives buffers addresses.

    Attributes:
        limit_bytes: What it may hold of the device; None for no limit.
        chunks: Address and bytes of the chunk of each live buffer.
        allocated_bytes: Bytes of all those chunks.
        highest: The highest address that was ever part of one.
        creations: How often it asked the device for memory; 0 where it has one region.
        created_bytes: What it got in all of them.
        conversions: How often it gave memory of one kind up for another; 0 where it has no kinds.
    """

    limit_bytes: int | None = None
    chunks: dict[int, Chunk] = attrs.field(factory=dict[int, Chunk], init=False)
    allocated_bytes: int = attrs.field(default=0, init=False)
    highest: int = attrs.field(default=0, init=False)
    creations: int = attrs.field(default=0, init=False)
    created_bytes: int = attrs.field(default=0, init=False)
    conversions: int = attrs.field(default=0, init=False)

    @property
    @abc.abstractmethod
    def reserved_bytes(self) -> int:
        """What it holds of the device; of an unbounded region all below the free tail."""

    @property
    @abc.abstractmethod
    def largest_free_bytes(self) -> int:
        """The largest free chunk of what it holds."""

    @property
    def free_bytes(self) -> int:
        """What is free of all that it holds."""
        return self.reserved_bytes - self.allocated_bytes

    @property
    def room_bytes(self) -> int:
        """What it may still ask of the device; 0 where there is no limit to count from."""
        return 0

    @abc.abstractmethod
    def allocate(self, buffer: int, size: int) -> int | None:
        """Returns the address of a chunk for the buffer, None where there is none.

        Args:
            buffer: Its number; it is not alive.
            size: Its bytes, at least 1.
        """

    @abc.abstractmethod
    def free(self, buffer: int) -> None:
        """Takes the chunk of a live buffer back."""

    def _note(self, buffer: int, chunk: Chunk) -> int:
        """Counts the chunk that a buffer gets, and returns its address."""
        self.chunks[buffer] = chunk
        address, size = chunk
        self.allocated_bytes += size
        self.highest = max(self.highest, address + size)
        return address

    def _forget(self, buffer: int) -> Chunk:
        """Takes it out of the count, and returns it."""
        chunk = self.chunks.pop(buffer)
        self.allocated_bytes -= chunk[1]
        return chunk


class Placing(Allocator):
    """Serves a request by its size alone; a subclass says how in `_take` and `_give`."""

    def allocate(self, buffer: int, size: int) -> int | None:
        """See `Allocator`."""
        chunk = self._take(size)
        return None if chunk is None else self._note(buffer, chunk)

    def free(self, buffer: int) -> None:
        """See `Allocator`."""
        self._give(*self._forget(buffer))

    @abc.abstractmethod
    def _take(self, size: int) -> Chunk | None:
        """Returns a chunk for `size` bytes that is no longer free."""

    @abc.abstractmethod
    def _give(self, address: int, size: int) -> None:
        """Makes a chunk free."""


class InRegion(Placing):
    """Places chunks in one region; a subclass says which free chunk serves a request, and how much of it."""

    MULTIPLE_OF = 256

    def __init__(self, limit_bytes: int | None = None) -> None:
        super().__init__(limit_bytes)
        whole = None if limit_bytes is None else limit_bytes // self.MULTIPLE_OF * self.MULTIPLE_OF
        self._region = Region(self._index(), whole)

    @property
    def reserved_bytes(self) -> int:
        """See `Allocator`."""
        return self._region.top

    @property
    def largest_free_bytes(self) -> int:
        """See `Allocator`."""
        return self._region.index.largest

    def _index(self) -> Index:
        return BySize()

    def _take(self, size: int) -> Chunk | None:
        size = round_up(size, self.MULTIPLE_OF)
        address = self._region.carve(size)
        return None if address is None else (address, size)

    def _give(self, address: int, size: int) -> None:
        self._region.give(address, size)

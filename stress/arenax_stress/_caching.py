"""Allocators that ask a device for segments, serve requests from them, and may give idle ones back."""

from ._allocator import Placing
from ._chunks import Chunk, Region, Segments


class Caching(Placing):
    """Holds segments of a device in one or more pools; a subclass says how large they are and when they are split.

    The device counts bytes only: as on a GPU, whose addresses are virtual, it is never fragmented itself. The addresses
    of a segment are those of the best fit.

    Args:
        limit_bytes: What the device has; None for no limit.
        pool_count: How many pools there are; chunks stay in the pool of their segment.
    """

    def __init__(self, limit_bytes: int | None = None, pool_count: int = 1) -> None:
        super().__init__(limit_bytes)
        self._pools = tuple(Segments() for _ in range(pool_count))
        self._addresses = Region()
        self._reserved_bytes = 0

    @property
    def reserved_bytes(self) -> int:
        """See `Allocator`."""
        return self._reserved_bytes

    @property
    def largest_free_bytes(self) -> int:
        """See `Allocator`."""
        return max(pool.index.largest for pool in self._pools)

    @property
    def room_bytes(self) -> int:
        """See `Allocator`."""
        return 0 if self.limit_bytes is None else self.limit_bytes - self._reserved_bytes

    def _open(self, pool: Segments, size: int) -> Chunk | None:
        """Returns a new segment, none of it free; None where the device has too little left."""
        if self.limit_bytes is not None and size > self.room_bytes:
            return None
        address = self._addresses.carve(size)
        assert address is not None  # the addresses have no bounds
        pool.open(address, size)
        self._reserved_bytes += size
        self.creations += 1
        self.created_bytes += size
        return address, size

    def _close(self, pool: Segments, address: int) -> None:
        """Gives an idle segment back to the device."""
        size = pool.close(address)
        self._addresses.give(address, size)
        self._reserved_bytes -= size

    def _close_idle(self) -> None:
        """Gives all idle segments back to the device."""
        for pool in self._pools:
            for address in list(pool.idle):
                self._close(pool, address)

    def _give(self, address: int, size: int) -> None:
        self._pools[0].give(address, size)


def split(pool: Segments, chunk: Chunk, size: int) -> Chunk:
    """Returns the first `size` bytes of a chunk, whose rest becomes free."""
    address, available = chunk
    if available > size:
        pool.give(address + size, available - size)
    return address, size

"""XLA's allocator, "best fit with coalescing": what a JAX program uses on a GPU.

Source: openxla/xla, ``xla/tsl/framework/bfc_allocator.cc``, with the defaults of its `Options`: no region is given
back, and a chunk is always split that exceeds the request by 128 MiB. JAX preallocates one region, whose size is the
limit; with ``XLA_PYTHON_CLIENT_PREALLOCATE=false`` the allocator grows.
"""

from ._allocator import InRegion, round_up
from ._caching import Caching, split
from ._chunks import Chunk

MULTIPLE_OF = 256
MOST_EXCESS = 128 << 20
FIRST_REGION = 2 << 20


def is_split(available: int, size: int) -> bool:
    """Whether a chunk of `available` bytes is split to serve `size` of them, rather than given whole."""
    return available >= 2 * size or available - size >= MOST_EXCESS


class Bfc(InRegion):
    """One region, preallocated: of the limit's size, or without bounds, to see how much it would need.

    Example:
        >>> allocator = Bfc()
        >>> allocator.allocate(0, 1000), allocator.allocate(1, 100)
        (0, 1024)
        >>> allocator.free(0)
        >>> allocator.allocate(2, 600), allocator.allocated_bytes  # 1024 is less than twice 768: the chunk goes whole
        (0, 1280)
    """

    MULTIPLE_OF = MULTIPLE_OF

    def _take(self, size: int) -> Chunk | None:
        size = round_up(size, MULTIPLE_OF)
        found = self._region.take(size)
        if found and is_split(found[1], size):
            address, available = found
            self._region.give(address + size, available - size)
            return address, size
        return found


class BfcGrowing(Caching):
    """Regions on demand, each twice the last: the first has 2 MiB, or the limit where that is less.

    They do not join, for XLA's device allocator does not support it, and none is given back.

    Example:
        >>> allocator = BfcGrowing()
        >>> allocator.allocate(0, 1 << 20), allocator.allocate(1, 5 << 20), allocator.reserved_bytes >> 20
        (0, 2097152, 10)
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        super().__init__(limit_bytes)
        first = FIRST_REGION if limit_bytes is None else min(limit_bytes, FIRST_REGION)
        self._next_region = round_up(first, MULTIPLE_OF)

    def _take(self, size: int) -> Chunk | None:
        size = round_up(size, MULTIPLE_OF)
        found = self._pools[0].take(size) or self._extend(size)
        if found and is_split(found[1], size):
            return split(self._pools[0], found, size)
        return found

    def _extend(self, size: int) -> Chunk | None:
        """Returns a new region of at least `size` bytes, None where the limit leaves too little."""
        available = None if self.limit_bytes is None else self.room_bytes // MULTIPLE_OF * MULTIPLE_OF
        if available is not None and size > available:
            return None
        enough = size <= self._next_region
        while size > self._next_region:
            self._next_region *= 2
        region = self._open(
            self._pools[0], self._next_region if available is None else min(self._next_region, available)
        )
        if enough:
            self._next_region *= 2
        return region

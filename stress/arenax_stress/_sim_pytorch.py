"""PyTorch's caching allocator: a pool of small and one of large chunks, in segments that never join.

Source: pytorch/pytorch, ``c10/cuda/CUDACachingAllocator.cpp``, with its default settings: no ``max_split_size``, no
rounding to powers of two, no expandable segments, no garbage collection.
"""

from ._allocator import round_up
from ._caching import Caching, split
from ._chunks import Chunk

MULTIPLE_OF = 512
SMALL = 1 << 20  # the largest request of the small pool
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
LEAST_OWN_SEGMENT = 10 << 20  # the least request that gets a segment of its own size
SEGMENT_MULTIPLE_OF = 2 << 20
LEAST_SMALL_REST = MULTIPLE_OF
MOST_LARGE_EXCESS = SMALL


def segment_size(size: int) -> int:
    """Returns the bytes of the segment that is made for a request."""
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < LEAST_OWN_SEGMENT:
        return LARGE_SEGMENT
    return round_up(size, SEGMENT_MULTIPLE_OF)


class PyTorch(Caching):
    """Best fit in the pool of a request's size; before it gives up it gives the device back all that is idle.

    Example:
        >>> allocator = PyTorch()
        >>> allocator.allocate(0, 1200), allocator.allocate(1, 3 << 20), allocator.reserved_bytes >> 20
        (0, 2097152, 22)
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        super().__init__(limit_bytes, pool_count=2)
        self._small, self._large = self._pools
        self._is_small: dict[int, bool] = {}  # of each live chunk, by address

    def _take(self, size: int) -> Chunk | None:
        size = round_up(size, MULTIPLE_OF)
        small = size <= SMALL
        pool = self._small if small else self._large
        chunk = pool.take(size) or self._open(pool, segment_size(size))
        if chunk is None:
            self._close_idle()
            chunk = self._open(pool, segment_size(size))
        if chunk is None:
            return None
        rest = chunk[1] - size
        if rest >= LEAST_SMALL_REST if small else rest > MOST_LARGE_EXCESS:
            chunk = split(pool, chunk, size)
        self._is_small[chunk[0]] = small
        return chunk

    def _give(self, address: int, size: int) -> None:
        pool = self._small if self._is_small.pop(address) else self._large
        pool.give(address, size)

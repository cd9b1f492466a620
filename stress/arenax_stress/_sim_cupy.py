"""CuPy's memory pool: chunks of exactly the size asked for, split and joined again.

Source: cupy/cupy, ``cupy/cuda/memory.pyx``, `SingleDeviceMemoryPool`, and "Memory Management" of its user guide. Among
chunks of one size CuPy takes any; here it is that of the lowest address.
"""

from ._allocator import round_up
from ._caching import Caching, split
from ._chunks import Chunk

MULTIPLE_OF = 512


class CuPy(Caching):
    """Best fit, always split; before it gives up it gives the device back all that is idle.

    Example:
        >>> allocator = CuPy()
        >>> allocator.allocate(0, 1000), allocator.allocate(1, 1000), allocator.reserved_bytes
        (0, 1024, 2048)
        >>> allocator.free(0), allocator.allocate(2, 100), allocator.reserved_bytes
        (None, 0, 2048)
    """

    def _take(self, size: int) -> Chunk | None:
        size = round_up(size, MULTIPLE_OF)
        pool = self._pools[0]
        chunk = pool.take(size) or self._open(pool, size)
        # What can never fit is refused at once: nothing is given back for it.
        if chunk is None and self.limit_bytes is not None and size <= self.limit_bytes:
            self._close_idle()
            chunk = self._open(pool, size)
        return chunk and split(pool, chunk, size)

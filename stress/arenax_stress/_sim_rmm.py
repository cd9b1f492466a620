"""RMM's pool: best fit in blocks of an upstream resource, each as large as all before it together.

Source: rapidsai/rmm, ``cpp/src/mr/detail/pool_memory_resource_impl.cpp`` and ``coalescing_free_list.hpp``. Since 2026 a
pool at its maximum gives idle blocks back to make room for a larger one.
"""

from ._allocator import round_up
from ._caching import Caching, split
from ._chunks import Chunk

MULTIPLE_OF = 256


class Rmm(Caching):
    """Best fit, always split; the limit is the pool's maximum size.

    It grows by its own size, or by what was asked for where that is more; under a limit by half of what is left of it.

    Args:
        limit_bytes: The pool's maximum size, rounded down to 256 bytes; None for none.
        initial_bytes: What it allocates to begin with, rounded down to 256 bytes.

    Example:
        >>> allocator = Rmm()
        >>> [allocator.allocate(buffer, 1024) and allocator.reserved_bytes for buffer in range(4)]
        [0, 2048, 4096, 4096]
    """

    def __init__(self, limit_bytes: int | None = None, initial_bytes: int = 0) -> None:
        super().__init__(None if limit_bytes is None else limit_bytes // MULTIPLE_OF * MULTIPLE_OF)
        if initial_bytes:
            block = self._open(self._pools[0], initial_bytes // MULTIPLE_OF * MULTIPLE_OF)
            if block is None:
                raise ValueError(f"initial_bytes must be at most limit_bytes, {limit_bytes}, got {initial_bytes}")
            self._pools[0].give(*block)

    def _take(self, size: int) -> Chunk | None:
        size = round_up(size, MULTIPLE_OF)
        pool = self._pools[0]
        chunk = pool.take(size) or self._grow(size)
        return chunk and split(pool, chunk, size)

    def _grow(self, size: int) -> Chunk | None:
        if self.limit_bytes is None:
            return self._open(self._pools[0], max(size, self.reserved_bytes))
        if self.room_bytes < size <= self.limit_bytes:
            self._reclaim(size)
        if self.room_bytes < size:
            return None
        return self._open(self._pools[0], max(size, round_up(self.room_bytes // 2, MULTIPLE_OF)))

    def _reclaim(self, size: int) -> None:
        """Gives idle blocks back, the lowest first, until there is room for `size` bytes."""
        pool = self._pools[0]
        while pool.idle and self.room_bytes < size:
            self._close(pool, pool.idle.peekitem(0)[0])

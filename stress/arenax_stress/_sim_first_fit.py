"""The textbook's first fit: the lowest free chunk that suffices, always split, always coalesced.

Source: D. E. Knuth, *The Art of Computer Programming*, volume 1, section 2.5; P. R. Wilson et al., "Dynamic Storage
Allocation: A Survey and Critical Review" (1995), as "address-ordered first fit". Sizes are rounded up to 256 bytes.
"""

from ._allocator import InRegion
from ._chunks import Chunk, Index

FAN_OUT_BITS = 5
FAN_OUT = 1 << FAN_OUT_BITS


class ByAddress:
    """First fit: a tree over the addresses, each node of which knows the largest chunk below each of its children.

    No sorted container answers "the first that is at least so large" without looking at all before it. The tree does so
    in one step a level, of which there is one for each five bits of the highest address.

    Args:
        unit: What all addresses are multiples of.
    """

    def __init__(self, unit: int) -> None:
        self._unit = unit
        # A level's nodes by their number; the last level is the root's. A node holds the largest size below each child.
        self._levels: list[dict[int, list[int]]] = [{0: [0] * FAN_OUT}]

    @property
    def largest(self) -> int:
        """See `Index`."""
        return max(self._levels[-1][0])

    def add(self, address: int, size: int) -> None:
        """See `Index`."""
        at = address // self._unit
        while at >> FAN_OUT_BITS * len(self._levels):
            self._levels.append({0: [self.largest, *[0] * (FAN_OUT - 1)]})
        self._set(at, size)

    def remove(self, address: int, size: int) -> None:  # noqa: ARG002
        """See `Index`."""
        self._set(address // self._unit, 0)

    def find(self, size: int) -> Chunk | None:
        """See `Index`."""
        at, found = 0, 0
        for level in reversed(self._levels):
            for child, found in enumerate(level[at]):
                if found >= size:
                    at = at * FAN_OUT + child
                    break
            else:
                return None
        return at * self._unit, found

    def _set(self, at: int, size: int) -> None:
        for level in self._levels:
            at, child = divmod(at, FAN_OUT)
            node = level.get(at)
            if node is None:
                node = level[at] = [0] * FAN_OUT
            if node[child] == size:
                return  # the levels above know of this one's largest only
            node[child] = size
            size = max(node)


class FirstFit(InRegion):
    """Takes the chunk of the lowest address that suffices.

    Example:
        >>> allocator = FirstFit()
        >>> [allocator.allocate(buffer, size) for buffer, size in enumerate((1024, 256, 512, 256))]
        [0, 1024, 1280, 1792]
        >>> allocator.free(0), allocator.free(2)
        (None, None)
        >>> allocator.allocate(4, 300), allocator.largest_free_bytes
        (0, 512)
    """

    def _index(self) -> Index:
        return ByAddress(self.MULTIPLE_OF)

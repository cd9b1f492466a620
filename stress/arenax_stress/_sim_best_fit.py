"""The textbook's best fit: the smallest free chunk that suffices, always split, always coalesced.

Source: D. E. Knuth, *The Art of Computer Programming*, volume 1, section 2.5; P. R. Wilson et al., "Dynamic Storage
Allocation: A Survey and Critical Review" (1995). Sizes are rounded up to 256 bytes, as those of BFC are, so that what
tells the two apart is when a chunk is split.
"""

from ._allocator import InRegion


class BestFit(InRegion):
    """Takes the smallest chunk that suffices, of equal ones that of the lowest address.

    Example:
        >>> allocator = BestFit()
        >>> [allocator.allocate(buffer, size) for buffer, size in enumerate((1024, 256, 512, 256))]
        [0, 1024, 1280, 1792]
        >>> allocator.free(0), allocator.free(2)
        (None, None)
        >>> allocator.allocate(4, 300), allocator.largest_free_bytes
        (1280, 1024)
    """

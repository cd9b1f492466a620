"""How small a device would do: sizes scanned downwards from one that serves.

To survive is not monotone: an allocator that places otherwise in a smaller region can be lucky there. So nothing is
bisected; the answer is the least size at which it and every larger one that was tried serves.
"""

from collections.abc import Callable, Mapping

import attrs

from ._allocator import round_up

MULTIPLE_OF = 256
COARSE = 12
FINE = 6
# Sizes closer than this are not told apart.
CLOSE = 1.005
# The first size may fail, since a bounded allocator can need more than the highest address without bounds.
_RAISES = 8


@attrs.frozen
class Least:
    """The answer of a scan.

    Attributes:
        bytes: The least size that serves, as every larger one that was tried; None where none was found.
        fails_bytes: The largest size tried that fails; None where even the floor serves.
        islands: Sizes below that one which serve nevertheless, from the largest down.
        tried: How many sizes were tried.
    """

    bytes: int | None
    fails_bytes: int | None
    islands: tuple[int, ...] = ()
    tried: int = 0

    @property
    def resolution_bytes(self) -> int:
        """How much less might do: the distance to the next size that fails."""
        return 0 if self.bytes is None or self.fails_bytes is None else self.bytes - self.fails_bytes


def least(
    serves: Callable[[int], bool], floor: int, start: int, tries: int = 40, seen: Mapping[int, bool] | None = None
) -> Least:
    """Scans sizes down from `start` to `floor`, first in coarse steps, then in finer ones above the first that fails.

    Args:
        serves: Whether a device of so many bytes serves.
        floor: The least size that could.
        start: A size that most likely does; where it does not, larger ones are tried.
        tries: The most sizes to try, at least 4.
        seen: Sizes of which it is known already whether they serve.

    Example:
        >>> from arenax_stress._lab_least import least
        >>> found = least(lambda size: size >= 131_072 or size == 102_400, floor=102_400, start=204_800)
        >>> found.bytes, found.fails_bytes, found.islands
        (131072, 130816, (102400,))
    """
    known = dict(seen or {})
    before = len(known)

    def try_size(size: int) -> bool:
        if size not in known:
            known[size] = serves(size)
        return known[size]

    floor = round_up(max(floor, 1), MULTIPLE_OF)
    start = max(round_up(start, MULTIPLE_OF), floor)
    for _ in range(_RAISES):
        if try_size(start):
            break
        start = round_up(start * 5 // 4, MULTIPLE_OF)
    else:
        return Least(None, start, (), len(known) - before)
    # Below the first that fails as well, to see whether it is monotone: those fail early and cost little.
    for size in between(floor, start, max(1, min(COARSE, tries // 2)) - 1):
        try_size(size)
    if floor < start:
        try_size(floor)
    good, bad = _edge(known)
    while bad is not None and good > CLOSE * bad and len(known) - before < tries:
        sizes = between(bad, good, min(FINE, tries - len(known) + before))
        if not sizes:
            break
        for size in sizes:
            if not try_size(size):
                break
        good, bad = _edge(known)
    islands = () if bad is None else sorted((size for size, fine in known.items() if fine and size < bad), reverse=True)
    return Least(good, bad, tuple(islands), len(known) - before)


def between(low: int, high: int, count: int) -> list[int]:
    """At most `count` sizes strictly between two others, from the largest down, each by the same factor smaller.

    Example:
        >>> from arenax_stress._lab_least import between
        >>> between(1024, 4096, 1), between(1024, 1280, 5)
        ([2048], [])
    """
    factor = (low / high) ** (1 / (count + 1))
    sizes = {round_up(int(high * factor**i), MULTIPLE_OF) for i in range(1, count + 1)}
    return sorted((size for size in sizes if low < size < high), reverse=True)


def _edge(known: dict[int, bool]) -> tuple[int, int | None]:
    """The last of those that serve, from the largest down, and the first that fails; the start is known to serve."""
    start = max(size for size, fine in known.items() if fine)
    good = start
    for size in sorted((size for size in known if size < start), reverse=True):
        if not known[size]:
            return good, size
        good = size
    return good, None

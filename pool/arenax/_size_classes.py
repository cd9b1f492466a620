"""Size classes of a ragged axis: pure functions on integers, no arrays."""

import bisect
import operator
from collections.abc import Iterable
from typing import Any

import attrs

from ._errors import NoSizeClass


def _positive(name: str, value: Any) -> int:
    """Returns `value` as an int of at least 1."""
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}")
    return number


def _sorted_boundaries(values: Iterable[Any]) -> tuple[int, ...]:
    boundaries = tuple(sorted({_positive("a class boundary", v) for v in values}))
    if not boundaries:
        raise ValueError("size classes must hold at least one boundary, got none")
    return boundaries


@attrs.frozen
class SizeClasses:
    """Capacities that a ragged axis is rounded up to.

    Build one by `explicit`, `pow2`, `geometric` or `multiples`. The top class is exactly the declared maximum.

    Attributes:
        boundaries: The capacities, ascending, each at least 1.

    Example:
        >>> import arenax
        >>> classes = arenax.SizeClasses.pow2(64, 317)
        >>> classes.boundaries
        (64, 128, 256, 317)
        >>> classes.class_of(65)
        128
    """

    boundaries: tuple[int, ...] = attrs.field(converter=_sorted_boundaries)

    @classmethod
    def explicit(cls, boundaries: Iterable[int]) -> "SizeClasses":
        """Classes exactly as listed, in any order.

        Args:
            boundaries: Capacities, each at least 1; duplicates count once.

        Raises:
            TypeError: Where one is no integer.
            ValueError: Where one is below 1, or there is none.

        Example:
            >>> import arenax
            >>> arenax.SizeClasses.explicit([512, 64]).boundaries
            (64, 512)
        """
        return cls(boundaries)

    @classmethod
    def pow2(cls, lo: int, hi: int) -> "SizeClasses":
        """Powers of two from the first that holds `lo`, ended by exactly `hi`.

        Args:
            lo: The smallest capacity wanted, at least 1.
            hi: The largest size that will ever come, at least `lo`.

        Example:
            >>> import arenax
            >>> arenax.SizeClasses.pow2(16, 100).boundaries
            (16, 32, 64, 100)
        """
        lo, hi = _range(lo, hi)
        exponents = range((lo - 1).bit_length(), hi.bit_length())
        return cls([*(1 << e for e in exponents if 1 << e < hi), hi])

    @classmethod
    def geometric(cls, lo: int, hi: int, per_doubling: int = 4) -> "SizeClasses":
        """Classes that grow by a constant count per doubling, linear within a doubling, ended by exactly `hi`.

        Padding never exceeds about 1 ÷ `per_doubling` of a request above `lo`: the spacing that jemalloc uses.

        Args:
            lo: The smallest capacity, at least 1.
            hi: The largest size that will ever come, at least `lo`.
            per_doubling: Classes for each doubling of the size, at least 1.

        Example:
            >>> import arenax
            >>> arenax.SizeClasses.geometric(64, 300).boundaries
            (64, 80, 96, 112, 128, 160, 192, 224, 256, 300)
        """
        lo, hi = _range(lo, hi)
        per_doubling = _positive("per_doubling", per_doubling)
        boundaries = {hi}
        base = lo
        while base < hi:
            steps = (base + -(-base * i // per_doubling) for i in range(per_doubling))
            boundaries.update(s for s in steps if s < hi)
            base *= 2
        return cls(boundaries)

    @classmethod
    def multiples(cls, of: int, hi: int) -> "SizeClasses":
        """All multiples of `of` below `hi`, then exactly `hi`.

        Args:
            of: The spacing, at least 1.
            hi: The largest size that will ever come, at least 1.

        Example:
            >>> import arenax
            >>> arenax.SizeClasses.multiples(128, 300).boundaries
            (128, 256, 300)
        """
        of, hi = _positive("of", of), _positive("hi", hi)
        return cls([*range(of, hi, of), hi])

    @property
    def maximum(self) -> int:
        """The largest size that a class holds."""
        return self.boundaries[-1]

    def class_of(self, n: int) -> int:
        """Returns the smallest capacity that holds `n` (0 is held by the smallest).

        Raises:
            NoSizeClass: Where `n` is above the largest; also a `ValueError`.
            ValueError: Where `n` is negative.

        Example:
            >>> import arenax
            >>> arenax.SizeClasses.explicit([8, 16]).class_of(9)
            16
        """
        i = bisect.bisect_left(self.boundaries, n)
        if i == len(self.boundaries):
            raise NoSizeClass(
                f"size {n} is above the largest size class, {self.maximum}: declare a larger maximum or cut the data",
                size=int(n),
                maximum=self.maximum,
                axis=None,
                leaf="",
            )
        if n < 0:
            raise ValueError(f"a size must be at least 0, got {n}")
        return self.boundaries[i]


def _range(lo: int, hi: int) -> tuple[int, int]:
    lo, hi = _positive("lo", lo), _positive("hi", hi)
    if lo > hi:
        raise ValueError(f"lo must be at most hi, got lo={lo} and hi={hi}")
    return lo, hi

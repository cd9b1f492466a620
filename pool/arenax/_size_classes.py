"""Size classes of a ragged axis: pure functions on integers, no arrays."""

import bisect
import operator
from collections.abc import Iterable
from typing import Any

import attrs

from ._errors import NoSizeClass
from ._fit import COSTS, fit_curve, padding_of


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

    Build one by `explicit`, `pow2`, `geometric`, `multiples` or, from the lengths that come, `fit`. The top class is
    exactly the declared maximum.

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

    @classmethod
    def fit(
        cls,
        lengths: Any,
        k: int = 8,
        multiple_of: int = 1,
        cost: str = "linear",
        slots: int | None = None,
        memory_weight: float = 0,
        min_gain: float = 0,
    ) -> "SizeClasses":
        """The classes that pad a list of lengths least: the exact optimum, found in n log n.

        The last one is the longest length, rounded up to the multiple: a length that is longer than all of these finds
        no class, so fit to all that will ever come, or add a boundary.

        Args:
            lengths: The lengths: integers in an iterable or array, a mapping of lengths to counts, or the path of a
                file of numbers between spaces, commas or lines.
            k: The most classes, at least 1.
            multiple_of: What every boundary is a multiple of, such as 8 or 128 where the hardware likes it.
            cost: What is least: ``"linear"``, the sum of the padding, or ``"quadratic"``, that of the padded lengths
                squared, for attention.
            slots: Slots that each class will have, for `memory_weight`.
            memory_weight: What one unit of capacity of one slot costs, in units of the cost, over all of `lengths`: it
                weighs the memory that is reserved against the padding.
            min_gain: The least that one more class must save, as a share of what all lengths ask for; fewer classes are
                returned where it does not.

        Raises:
            TypeError: For a length that is no integer.
            ValueError: For an argument out of range, or no lengths.
            OverflowError: Where a cost would not fit 64 bits.

        Example:
            >>> import arenax
            >>> arenax.SizeClasses.fit([3, 3, 3, 4, 90, 95, 100], k=2).boundaries
            (4, 100)
            >>> arenax.SizeClasses.fit({10: 50, 70: 3, 317: 1}, k=8, multiple_of=8).boundaries
            (16, 72, 320)
        """
        curve, costs, asked = _curve(lengths, k, multiple_of, cost, slots, memory_weight)
        if not 0 <= min_gain < 1:
            raise ValueError(f"min_gain must be a share, at least 0 and below 1, got {min_gain!r}")
        count = next((n for n in range(1, len(costs)) if costs[n - 1] - costs[n] < min_gain * asked), len(costs))
        return cls(curve[count - 1])

    @classmethod
    def fit_curve(
        cls,
        lengths: Any,
        k: int = 16,
        multiple_of: int = 1,
        cost: str = "linear",
        slots: int | None = None,
        memory_weight: float = 0,
    ) -> "tuple[SizeClasses, ...]":
        """The best of at most 1, 2, ..., k classes, in one run: for a look at what one more would gain.

        Args:
            lengths: As `fit`'s, and so are the others.
            k: The most classes, at least 1.
            multiple_of: What every boundary is a multiple of.
            cost: ``"linear"`` or ``"quadratic"``.
            slots: Slots that each class will have.
            memory_weight: What one unit of capacity of one slot costs.

        Returns:
            As many as k, or fewer where more would gain nothing.

        Example:
            >>> import arenax
            >>> for classes in arenax.SizeClasses.fit_curve([3, 3, 4, 90, 95, 100], k=3):
            ...     print(classes.boundaries)
            (100,)
            (4, 100)
            (4, 90, 100)
        """
        curve, _, _ = _curve(lengths, k, multiple_of, cost, slots, memory_weight)
        return tuple(cls(boundaries) for boundaries in curve)

    def padding_overhead(self, lengths: Any) -> float:
        """The share of what these classes give that is padding: 1 − requested ÷ given, as `Stats.internal_waste`.

        Args:
            lengths: As `fit`'s.

        Raises:
            ValueError: Where a length is above the largest class.

        Example:
            >>> import arenax
            >>> arenax.SizeClasses.explicit([8, 16]).padding_overhead([4, 8, 12])
            0.25
        """
        _, asked, given = padding_of(self.boundaries, lengths)
        return 1 - int(asked.sum()) / int(given.sum())

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


def _curve(
    lengths: Any, k: Any, multiple_of: Any, cost: str, slots: Any, memory_weight: float
) -> tuple[list[tuple[int, ...]], list[float], float]:
    k, multiple_of = _positive("k", k), _positive("multiple_of", multiple_of)
    if cost not in COSTS:
        raise ValueError(f"cost must be one of {', '.join(COSTS)}, got {cost!r}")
    if not 0 <= memory_weight < float("inf"):
        raise ValueError(f"memory_weight must be at least 0 and finite, got {memory_weight!r}")
    if memory_weight and slots is None:
        raise ValueError("memory_weight needs slots, the number that each class will have")
    memory = memory_weight * (1 if slots is None else _positive("slots", slots))
    return fit_curve(lengths, k, multiple_of, cost, memory)


def _range(lo: int, hi: int) -> tuple[int, int]:
    lo, hi = _positive("lo", lo), _positive("hi", hi)
    if lo > hi:
        raise ValueError(f"lo must be at most hi, got lo={lo} and hi={hi}")
    return lo, hi

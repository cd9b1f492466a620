"""Size classes fitted to a list of lengths: the exact optimum, by dynamic programming over the distinct lengths.

A class with boundary b that serves c requests, of lengths that sum to s, pads ``c * b - s``. With the lengths sorted,
the cost of serving those from i to j by one class obeys the quadrangle inequality, so that the best split moves to the
right with j, and one level of the program (one class more) takes n log n by divide and conquer (F. F. Yao, "Efficient
dynamic programming using quadrangle inequalities", 1980). All nodes of one depth are done at once, by NumPy.
"""

import operator
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

COSTS = ("linear", "quadratic")
_LIMIT = 1 << 62
Ints = np.ndarray[Any, np.dtype[np.int64]]


def histogram(lengths: Any) -> tuple[Ints, Ints]:
    """Returns the distinct lengths, ascending, and how often each comes.

    Args:
        lengths: Integers in an iterable or array, a mapping of lengths to counts, or the path of a file of numbers.

    Raises:
        TypeError: Where one is no integer.
        ValueError: Where one is negative, or there is none.
    """
    if isinstance(lengths, str | os.PathLike):
        lengths = _read(Path(cast(Any, lengths)))
    if isinstance(lengths, Mapping):
        pairs = sorted((operator.index(n), operator.index(c)) for n, c in cast(Any, lengths).items() if c)
        values = np.array([n for n, _ in pairs], np.int64)
        counts = np.array([c for _, c in pairs], np.int64)
        if (counts < 0).any():
            raise ValueError("a count of lengths must be at least 0")
    else:
        found = lengths if isinstance(lengths, np.ndarray) else [operator.index(n) for n in lengths]
        array = np.asarray(found).reshape(-1)
        if array.size and array.dtype.kind not in "iu":
            raise TypeError(f"lengths must be integers, got an array of {array.dtype}")
        values, counts = _unique(array.astype(np.int64))
    if not values.size:
        raise ValueError("there are no lengths to fit size classes to")
    if values[0] < 0:
        raise ValueError(f"a length must be at least 0, got {values[0]}")
    return values, counts


def _unique(array: Ints) -> tuple[Ints, Ints]:
    if array.size and array.min() >= 0 and array.max() <= 4 * array.size + (1 << 16):  # Counting beats sorting.
        counts = np.bincount(array)
        values = np.flatnonzero(counts)
        return values, counts[values]
    return np.unique(array, return_counts=True)


def _read(path: Path) -> Ints:
    try:
        return np.array([int(word) for word in path.read_text().replace(",", " ").split()], np.int64)
    except ValueError as e:
        raise ValueError(f"{path} must hold integers, between spaces, commas or lines: {e}") from None


def fit_curve(
    lengths: Any, k: int, multiple_of: int, cost: str, memory: float
) -> tuple[list[tuple[int, ...]], list[float], float]:
    """Finds the best boundaries of at most 1, 2, ..., k classes.

    Args:
        lengths: As `histogram` takes them.
        k: The most classes, at least 1.
        multiple_of: What every boundary is a multiple of.
        cost: ``"linear"`` counts padding, ``"quadratic"`` the padding of squares.
        memory: What each unit of a boundary costs besides.

    Returns:
        For each number of classes up to k, or up to that beyond which there is nothing to gain, the boundaries and
        their cost; and the sum of the lengths, or of their squares, which the costs compare with.

    Raises:
        OverflowError: Where a cost would not fit 64 bits.
    """
    values, counts = histogram(lengths)
    rounded = np.maximum(-(-values // multiple_of), 1) * multiple_of
    boundaries, starts = np.unique(rounded, return_index=True)
    served = np.concatenate(([0], np.cumsum(np.add.reduceat(counts, starts))))
    power = 1 if cost == "linear" else 2
    if int(boundaries[-1]) ** power * int(served[-1]) + memory * float(boundaries.sum()) >= _LIMIT:
        raise OverflowError(
            f"the {cost} cost of {served[-1]} lengths up to {boundaries[-1]} does not fit 64 bits: give the lengths in "
            "larger units, or a sample of them"
        )
    asked = int((counts * values**power).sum())
    # In integers where it can be, so that the optimum is one to the last unit.
    unit: Any = int(memory) if memory == int(memory) else memory
    heights = np.concatenate(([0], boundaries**power))
    upkeep = np.concatenate(([0], boundaries)) * unit
    best = heights * served + upkeep
    best[0] = 0
    splits: list[Ints] = [np.zeros(len(heights), np.int64)]
    costs = [best[-1] - asked]
    for _ in range(1, min(k, len(boundaries))):
        best, split = _one_more(best, heights, served, upkeep)
        if best[-1] - asked >= costs[-1]:  # The cost is convex in the number of classes: no further one gains.
            break
        splits.append(split)
        costs.append(best[-1] - asked)
    found = [_walk(splits[: n + 1], boundaries) for n in range(len(splits))]
    return found, [float(c) for c in costs], float(asked)


def _one_more(best: Any, heights: Ints, served: Ints, upkeep: Any) -> tuple[Any, Ints]:
    """The least costs of the first j lengths with one class more than in `best`, and where the last class begins.

    It serves those after the i-th, for ``best[i] + heights[j] * (served[j] - served[i]) + upkeep[j]``.
    """
    n = len(heights)
    least, split = best.copy(), np.zeros(n, np.int64)
    first, last = np.array([1]), np.array([n - 1])
    low, high = np.array([0]), np.array([n - 2])
    while first.size:
        middle = (first + last) // 2
        at = np.empty_like(middle)
        ends = np.minimum(high, middle - 1)
        sizes = ends - low + 1
        starts = np.cumsum(sizes) - sizes
        node = np.repeat(np.arange(len(middle)), sizes)
        i = np.arange(len(node)) + (low - starts)[node]
        costs = best[i] - heights[middle][node] * served[i]
        lowest = np.minimum.reduceat(costs, starts)
        found = np.flatnonzero(costs == lowest[node])[::-1]
        at[node[found]] = i[found]  # The first of equals, which is written last.
        least[middle] = lowest + heights[middle] * served[middle] + upkeep[middle]
        split[middle] = at
        first, last = np.concatenate((first, middle + 1)), np.concatenate((middle - 1, last))
        low, high = np.concatenate((low, at)), np.concatenate((at, high))
        kept = first <= last
        first, last, low, high = first[kept], last[kept], low[kept], high[kept]
    return least, split


def _walk(splits: list[Ints], boundaries: Ints) -> tuple[int, ...]:
    """The boundaries of the classes, from the last one back."""
    found: list[int] = []
    j = len(boundaries)
    for split in reversed(splits):
        if not j:
            break
        found.append(int(boundaries[j - 1]))
        j = int(split[j])
    return tuple(reversed(found))


def padding_of(boundaries: Iterable[int], lengths: Any) -> tuple[Ints, Ints, Ints]:
    """For each class, how many of the lengths it serves, what they ask for in sum, and what it gives them.

    Raises:
        ValueError: Where a length is above the last boundary.
    """
    values, counts = histogram(lengths)
    capacities = np.array([*boundaries], np.int64)
    if values[-1] > capacities[-1]:
        raise ValueError(f"a length of {values[-1]} is above the largest size class, {capacities[-1]}")
    at = np.searchsorted(capacities, values)
    served, asked = np.zeros_like(capacities), np.zeros_like(capacities)
    np.add.at(served, at, counts)
    np.add.at(asked, at, counts * values)
    return served, asked, served * capacities

"""Boundaries and slots chosen together, by dynamic programming over what is alive at once between any two boundaries.

A class with boundary b that serves all requests above the last boundary a pads them, and needs as many slots as were
ever alive at once of that range: ``peak(a, b)``. Its cost is the padding plus a weight times ``b * peak(a, b)``. That
is not Monge (the peak of a union may be anything from the larger peak to their sum), so that the divide and conquer of
`_fit` does not apply; the candidates are few, and all pairs of them are tried.
"""

import math
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from ._fit import fit_curve
from ._trace import Ints

MAX_CANDIDATES = 160
# Moments that are looked at together: so many columns of a matrix with a row for each candidate.
_BLOCK = 1 << 15
Floats = np.ndarray[Any, np.dtype[np.float64]]


@attrs.frozen(eq=False)
class Demand:
    """What is asked for by requests that can share classes.

    Attributes:
        row_bytes: Bytes of one step along the axis that varies; of the whole where none does.
        extents: An int64 for each request, its extent along that axis; 0 where none varies.
        changes: +1 or -1 for each loan and return, in their order.
        at: The extent that each of these is about.
    """

    row_bytes: int
    extents: Ints
    changes: Ints
    at: Ints


def fit_demands(demands: Sequence[Demand], max_classes: int, budget: int | None) -> list[list[tuple[int, int]]]:
    """Returns for each demand its boundaries and their slots, each slot list enough for all that was alive at once.

    Args:
        demands: What is asked for.
        max_classes: The most classes for each.
        budget: Bytes for all together, or None for as few as possible.

    Raises:
        ValueError: Where no choice is within the budget.
    """
    tables = [_Table(demand) for demand in demands]
    found = [t.best(max_classes, math.inf) for t in tables]
    least = _bytes(demands, found)
    if budget is None or least == budget:
        return found
    if least > budget:
        raise ValueError(
            f"no plan of at most {max_classes} classes fits {budget:,} bytes, the least needs {least:,}: raise the "
            "budget, or allow more classes"
        )
    # What a reserved byte costs in bytes of padding: the less, the less is padded and the more reserved.
    low, high = 0.0, 1.0
    if _bytes(demands, choice := [t.best(max_classes, low) for t in tables]) <= budget:
        return choice
    while _bytes(demands, choice := [t.best(max_classes, high) for t in tables]) > budget:
        low, high = high, high * 16
        if high > 1e12:
            return found
    found = choice
    for _ in range(40):
        middle = (low + high) / 2
        choice = [t.best(max_classes, middle) for t in tables]
        if _bytes(demands, choice) <= budget:
            high, found = middle, choice
        else:
            low = middle
    return found


def _bytes(demands: Sequence[Demand], found: Sequence[Sequence[tuple[int, int]]]) -> int:
    return sum(d.row_bytes * max(b, 1) * n for d, classes in zip(demands, found, strict=True) for b, n in classes)


class _Table:
    """For each pair of candidates: the slots, and the padding, of one class from above the one up to the other."""

    def __init__(self, demand: Demand) -> None:
        candidates = np.unique(demand.extents)
        if len(candidates) > MAX_CANDIDATES:
            boundaries, _, _ = fit_curve(demand.extents, MAX_CANDIDATES, 1, "linear", 0)
            candidates = np.array(boundaries[-1])
        self.row_bytes = demand.row_bytes
        self.candidates = candidates
        self.peaks = _peaks(np.searchsorted(candidates, demand.at), demand.changes, len(candidates))
        at = np.searchsorted(candidates, demand.extents)
        counts = np.concatenate(([0], np.cumsum(np.bincount(at, minlength=len(candidates)))))
        sums = np.concatenate(([0], np.cumsum(np.bincount(at, demand.extents, len(candidates)))))
        padding = candidates * (counts[1:] - counts[:-1, None]) - (sums[1:] - sums[:-1, None])
        self._padding = padding * float(demand.row_bytes)
        self._reserved = candidates * self.peaks * float(demand.row_bytes)

    def best(self, max_classes: int, weight: float) -> list[tuple[int, int]]:
        """The best classes, of at most so many; `weight` is what a reserved byte costs in bytes of padding."""
        if weight == math.inf:  # Padding decides between equals only: all of it weighs less than one byte.
            costs = self._reserved + self._padding / (2 * self._padding[0, -1] + 1)
        else:
            costs = self._padding + weight * self._reserved
        count = len(self.candidates)
        # best[j]: the least cost of all up to the j-th candidate; split: the candidate before its last class.
        best, splits = costs[0], [np.full(count, -1)]
        allowed = np.arange(1, count)[:, None] <= np.arange(count)
        for _ in range(1, min(max_classes, count)):
            longer = np.where(allowed, best[:-1, None] + costs[1:], np.inf)
            split = longer.argmin(axis=0)
            cost = longer[split, np.arange(count)]
            splits.append(np.where(cost < best, split, -2))
            best = np.minimum(cost, best)
        return self._walk(splits)

    def _walk(self, splits: list[Ints]) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        j = len(self.candidates) - 1
        for split in reversed(splits):
            before = int(split[j])
            if before == -2:  # One class fewer is as good.
                continue
            found.append((int(self.candidates[j]), int(self.peaks[before + 1, j])))
            j = before
            if j < 0:
                break
        return found[::-1]


def _peaks(at: Ints, changes: Ints, count: int) -> Ints:
    """``peaks[i, j]``: the most that was alive at once of the i-th candidate up to the j-th."""
    peaks = np.zeros((count, count), np.int64)
    alive = np.zeros((count, 1), np.int32)
    for start in range(0, len(at), _BLOCK):
        stop = min(start + _BLOCK, len(at))
        events = np.zeros((count, stop - start), np.int32)
        events[at[start:stop], np.arange(stop - start)] = changes[start:stop]
        np.cumsum(events, axis=1, out=events)
        events += alive
        alive = events[:, -1:].copy()
        # The most of anything is alive where a loan is followed by a return.
        tops = changes[start:stop] > 0
        tops[:-1] &= changes[start + 1 : stop] < 0
        curves = np.ascontiguousarray(events[:, tops])
        if not curves.shape[1]:
            continue
        for i in range(count):
            total = np.zeros(curves.shape[1], np.int32)
            for j in range(i, count):
                total += curves[j]
                peaks[i, j] = max(peaks[i, j], total.max())
    return peaks

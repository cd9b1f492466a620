"""Plans: size classes and slots fitted to a trace, and the bytes that they need, known before the first step."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, cast

import attrs
import numpy as np

from ._fit_plan import Demand, fit_demands
from ._request import SizeClass, canonical_dtype, exact_shape
from ._size_classes import SizeClasses
from ._stats import human_bytes
from ._trace import Ints, Trace

FORMAT = 1
BYTES = np.dtype(np.uint8)


@attrs.frozen
class PlannedClass:
    """One size class of a plan.

    Attributes:
        size_class: Its shape and dtype.
        axis: The axis that it pads, None where it serves just its own shape.
        slots: How many slots there are of it.
    """

    size_class: SizeClass
    axis: int | None
    slots: int

    @property
    def family(self) -> "Family":
        """What it serves, but for the extent of its axis."""
        return Family.of(self.size_class.shape, self.size_class.dtype, self.axis)

    @property
    def capacity(self) -> int:
        """The most that it serves along its axis; 0 without one."""
        return 0 if self.axis is None else self.size_class.shape[self.axis]


@attrs.frozen
class Family:
    """Requests that differ only in the extent of one axis, and so can share size classes.

    Attributes:
        dtype: Name of the dtype.
        shape: The shape, with None at the axis that varies.
    """

    dtype: str
    shape: tuple[int | None, ...]

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: np.dtype[Any], axis: int | None) -> Self:
        """Returns the family of a shape that varies along `axis`."""
        return cls(dtype.name, tuple([None if i == axis else n for i, n in enumerate(shape)]))

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join('*' if n is None else str(n) for n in self.shape)}]"


@attrs.frozen
class Plan:
    """The size classes and slots that serve a trace without a conversion or a spill.

    Attributes:
        classes: The classes, each with its slots.
        trace: Name of the trace.
        peak_bytes: The most bytes that were asked for at once in it.

    Example:
        >>> import arenax
        >>> ask = [("allocate", i, size) for i, size in enumerate([100, 900, 1000])]
        >>> plan = arenax.Plan.fit(arenax.Trace.from_events(ask), max_classes=2)
        >>> print(plan)
        class        slots  reserved
        uint8[100]       1     100 B
        uint8[1000]      2   2.0 KiB
        2,100 bytes in 3 slots, 1.050 times the peak of 2,000 bytes of 'trace'
        >>> with arenax.BufferPool.from_plan(plan) as pool:
        ...     pool.stats().reserved_bytes
        2100
    """

    classes: tuple[PlannedClass, ...]
    trace: str = "trace"
    peak_bytes: int = 0

    @classmethod
    def fit(cls, trace: Trace, max_classes: int = 16, budget: int | None = None) -> Self:
        """Chooses classes and slots together, so that the trace runs without a conversion or a spill.

        Requests of a recording that differ in more than a padded axis cannot share a class; those that share one get
        classes of their own, as many as `max_classes`. Buffers of which no more is known than their bytes are arrays of
        uint8. Within the at most 160 boundaries that it considers the choice is the best there is.

        Args:
            trace: What was asked for.
            max_classes: The most classes for requests that can share them.
            budget: Bytes that all slots together may take: of the plans within it, the one that pads least. None asks
                for the least memory.

        Raises:
            TypeError: For an argument of the wrong kind.
            ValueError: For an empty trace, or where no plan is within the budget.
        """
        for name, value in (("max_classes", max_classes), ("budget", budget)):
            if isinstance(value, bool) or not (isinstance(value, int) or (value is None and name == "budget")):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"{name} must be an integer, got {value!r}")
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not len(trace):
            raise ValueError(f"trace {trace.name!r} has no buffers to plan for")
        families = _families(trace)
        found = fit_demands(
            [_demand(trace, family, members) for family, members in families.items()], max_classes, budget
        )
        classes: list[PlannedClass] = []
        for (family, _), boundaries in zip(families.items(), found, strict=True):
            axis = family.shape.index(None) if None in family.shape else None
            for capacity, slots in boundaries:
                shape = tuple([capacity if n is None else n for n in family.shape])
                classes.append(PlannedClass(SizeClass(shape, np.dtype(family.dtype)), axis, slots))
        # Smallest first: so reserved, no large slot lies where it leaves a hole for the small ones to come.
        classes.sort(key=lambda c: c.size_class.nbytes)
        return cls(tuple(classes), trace.name, trace.peak_bytes)

    @property
    def required_bytes(self) -> int:
        """Bytes of all its slots: the budget that it needs, and with which it needs no more."""
        return sum(c.size_class.nbytes * c.slots for c in self.classes)

    @property
    def ragged(self) -> Mapping[str, SizeClasses]:
        """The boundaries for each family that varies, such as ``{"int32[8,*]": SizeClasses...}``."""
        found: dict[str, list[int]] = {}
        for c in self.classes:
            if c.axis is not None:
                found.setdefault(str(c.family), []).append(c.capacity)
        return {family: SizeClasses.explicit(capacities) for family, capacities in found.items()}

    @property
    def size_classes(self) -> SizeClasses:
        """The boundaries for `Ragged`, where all that varies has the same.

        Raises:
            ValueError: Where nothing varies, or boundaries differ: `ragged` then has those of each family.
        """
        kinds = {c.boundaries: c for c in self.ragged.values()}
        if len(kinds) != 1:
            differ = f"those of {', '.join(self.ragged)} differ: take each from plan.ragged" if kinds else "none varies"
            raise ValueError(f"the plan has no one set of size classes: {differ}")
        return next(iter(kinds.values()))

    @property
    def is_of_bytes(self) -> bool:
        """Whether it knows no more than bytes."""
        return all(c.axis == 0 and c.size_class.dtype == BYTES and len(c.size_class.shape) == 1 for c in self.classes)

    def assign(self, trace: Trace) -> Ints:
        """Returns for each buffer of a trace the number of the class that serves it, -1 where none does."""
        found = np.full(len(trace), -1, np.int64)
        by_family: dict[Family, list[int]] = {}
        for number, c in enumerate(self.classes):
            by_family.setdefault(c.family, []).append(number)
        anonymous = self.is_of_bytes
        for family, members in (_families(trace, anonymous)).items():
            numbers = sorted(by_family.get(family, []), key=lambda n: self.classes[n].capacity)
            if numbers:
                capacities = np.array([self.classes[n].capacity for n in numbers])
                at = np.searchsorted(capacities, _extents(trace, family, members))
                found[members] = np.where(at < len(numbers), np.array([*numbers, -1])[at], -1)
        return found

    def misfits(self, trace: Trace) -> tuple[str, ...]:
        """Says where a trace needs more than there is; empty where the plan serves it.

        Example:
            >>> import arenax
            >>> plan = arenax.Plan.fit(arenax.Trace.from_events([("allocate", 0, 100)]))
            >>> for fault in plan.misfits(arenax.Trace.from_events([("allocate", i, 90 + 20 * i) for i in range(2)])):
            ...     print(fault)
            1 requests fit no class, the largest of them 110 bytes
        """
        assigned = self.assign(trace)
        faults: list[str] = []
        homeless = np.flatnonzero(assigned < 0)
        if homeless.size:
            largest = homeless[np.argmax(trace.sizes[homeless])]
            what = f"{trace.sizes[largest]:,} bytes"
            if trace.requests is not None and not self.is_of_bytes:
                request = trace.requests[largest]
                what = f"{SizeClass(request.shape, request.dtype)}, {what}"
            faults.append(f"{homeless.size:,} requests fit no class, the largest of them {what}")
        for number, c in enumerate(self.classes):
            peak = peak_alive(trace, assigned == number)
            if peak > c.slots:
                faults.append(f"{c.size_class} has {c.slots:,} slots, and {peak:,} were on loan at once")
        return tuple(faults)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it as JSON, a line for each class, to be committed beside the code that it is for.

        Raises:
            OSError: Where the file cannot be written.
        """
        lines = [
            json.dumps(
                {"dtype": c.size_class.dtype.name, "shape": c.size_class.shape, "axis": c.axis, "slots": c.slots}
            )
            for c in self.classes
        ]
        head = {"arenax_plan": FORMAT, "trace": self.trace, "peak_bytes": self.peak_bytes}
        fields = "".join(f"  {json.dumps(name)}: {json.dumps(value)},\n" for name, value in head.items())
        classes = ",\n    ".join(lines)
        text = f'{{\n{fields}  "required_bytes": {self.required_bytes},\n  "classes": [\n    {classes}\n  ]\n}}\n'
        Path(path).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads what `save` wrote.

        Raises:
            ValueError: Naming the file and what is wrong in it.
            OSError: Where it cannot be read.
        """
        try:
            found: Any = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(found, dict) or found.get("arenax_plan") != FORMAT:
                raise ValueError(f'it must be an object with "arenax_plan": {FORMAT}')
            found = cast(dict[str, Any], found)
            plan = cls(
                tuple([_planned(c) for c in found["classes"]]), str(found["trace"]), _count(found, "peak_bytes", 0)
            )
            if len({c.size_class for c in plan.classes}) < len(plan.classes):
                raise ValueError("a class is there twice")
            if _count(found, "required_bytes", 0) != plan.required_bytes:
                raise ValueError(f"required_bytes must be {plan.required_bytes}, the sum over its classes")
        except (ValueError, TypeError, KeyError, RecursionError) as e:
            what = f"it lacks {e}" if isinstance(e, KeyError) else str(e)
            raise ValueError(f"{os.fspath(path)} is no plan of arenax: {what}") from None
        return plan

    def __str__(self) -> str:
        rows = [("class", "slots", "reserved")]
        rows += [(str(c.size_class), f"{c.slots:,}", human_bytes(c.size_class.nbytes * c.slots)) for c in self.classes]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        table = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}" for a, b, c in rows]
        slots = sum(c.slots for c in self.classes)
        share = f"{self.required_bytes / self.peak_bytes:.3f} times " if self.peak_bytes else ""
        needs = f"{self.required_bytes:,} bytes in {slots:,} slots"
        return "\n".join([*table, f"{needs}, {share}the peak of {self.peak_bytes:,} bytes of {self.trace!r}"])


def peak_alive(trace: Trace, members: Any) -> int:
    """The most of the buffers marked in `members` that are alive at once."""
    steps = trace.steps
    change = np.where(steps < 0, -1, 1) * np.asarray(members)[np.maximum(steps, ~steps)]
    return int(np.cumsum(change).max(initial=0))


def _families(trace: Trace, anonymous: bool = False) -> dict[Family, Ints]:
    """The buffers of each family, in the order in which the families come."""
    if trace.requests is None or anonymous:
        return {Family("uint8", (None,)): np.arange(len(trace))}
    found: dict[Family, list[int]] = {}
    known: dict[int, list[int]] = {}
    for number, request in enumerate(trace.requests):
        members = known.get(id(request))  # A recording's requests are few objects, many times over.
        if members is None:
            family = Family.of(request.shape, request.dtype, request.axis)
            members = known[id(request)] = found.setdefault(family, [])
        members.append(number)
    return {family: np.array(members) for family, members in found.items()}


def _extents(trace: Trace, family: Family, members: Ints) -> Ints:
    """How far each buffer extends along the axis that varies, at least 1; 0 where none does."""
    if None not in family.shape:
        return np.zeros(len(members), np.int64)
    if trace.requests is None or (family.shape == (None,) and family.dtype == "uint8"):
        return np.maximum(trace.sizes[members], 1)
    axis = family.shape.index(None)
    return np.array([max(trace.requests[m].shape[axis], 1) for m in members.tolist()])


def _demand(trace: Trace, family: Family, members: Ints) -> Demand:
    chosen = np.zeros(len(trace), bool)
    chosen[members] = True
    steps = trace.steps
    buffers = np.maximum(steps, ~steps)
    mine = chosen[buffers]
    extents = np.zeros(len(trace), np.int64)
    extents[members] = _extents(trace, family, members)
    row = np.dtype(family.dtype).itemsize
    for n in family.shape:
        row *= 1 if n is None else n
    return Demand(row, extents[members], np.where(steps[mine] < 0, -1, 1), extents[buffers[mine]])


def _planned(found: Any) -> PlannedClass:
    shape, axis = exact_shape(found["shape"]), found["axis"]
    if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int) or not 0 <= axis < len(shape)):
        raise ValueError(f"axis must be null or one of the shape's, got {axis!r}")
    dtype = np.dtype(found["dtype"])  # Not as the present x64 mode would have it.
    canonical_dtype(dtype)
    return PlannedClass(SizeClass(shape, dtype), axis, _count(found, "slots", 1))


def _count(found: Any, name: str, least: int) -> int:
    value = found[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    return value

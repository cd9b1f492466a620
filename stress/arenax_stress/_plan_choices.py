"""What a plan gives to each class of a trace, and what other choices would need for the same traffic."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import jax
import numpy as np

from arenax import Plan, SizeClass, SizeClasses, Trace
from arenax._plan import (
    PlannedClass,
    _extents,  # pyright: ignore[reportPrivateUsage]
    _families,  # pyright: ignore[reportPrivateUsage]
    peak_alive,
)
from arenax._trace import Ints

from ._simulate import simulate

Row = dict[str, Any]
# Names of simulated allocators, and what the table calls them.
PLACED = {"bfc": "XLA's allocator", "best_fit": "best fit"}


def load_plan(path: Path) -> Plan:
    """Reads a plan, also one with 64-bit dtypes, whose pool is to be made in x64 mode: here nothing is.

    Raises:
        ValueError: Where it is none.
        OSError: Where it cannot be read.
    """
    with jax.enable_x64(True):
        return Plan.load(path)


def by_class(trace: Trace, plan: Plan) -> list[Row]:
    """A row for each class: its slots and their bytes, its share of the requests, and what it pads them by."""
    assigned = plan.assign(trace)
    rows: list[Row] = []
    for number, c in enumerate(plan.classes):
        mine = assigned == number
        served, given = int(mine.sum()), int(mine.sum()) * c.size_class.nbytes
        rows.append(
            {
                "class": str(c.size_class),
                "slots": c.slots,
                "bytes": c.slots * c.size_class.nbytes,
                "share": served / max(len(trace), 1),
                "padding": 1 - trace.sizes[mine].sum(dtype=np.float64).item() / given if given else 0.0,
            }
        )
    return rows


def choices(trace: Trace, plan: Plan, max_classes: int) -> list[Row]:
    """A row for the plan and for each of what is taken in its place.

    Powers of two and the classes that pad least get a slot for each buffer that is ever alive at once in its class. The
    allocators that place buffers where they like do so with the arrays as they were asked for, without padding.

    Args:
        trace: The traffic.
        plan: A plan that serves it.
        max_classes: The most classes of the choice that pads least, for requests that can share them.

    Example:
        >>> trace = Trace.from_events([("allocate", i, size) for i, size in enumerate([100, 900, 1000])])
        >>> for row in choices(trace, Plan.fit(trace, max_classes=2), 2):
        ...     print(row["choice"], row["bytes"])
        this plan 2100
        powers of two 2128
        least padding 2100
        XLA's allocator 2304
        best fit 2304
    """

    def powers(extents: Ints) -> SizeClasses:
        return SizeClasses.pow2(1, int(extents.max()))

    def least_padding(extents: Ints) -> SizeClasses:
        return SizeClasses.fit(extents, max_classes)

    rivals = {"powers of two": with_slots(trace, powers), "least padding": with_slots(trace, least_padding)}
    rows = [_pool_row(name, trace, p) for name, p in ({"this plan": plan} | rivals).items()]
    for allocator, name in PLACED.items():
        result = simulate(trace, allocator)
        rows.append(_row(name, trace, result.peak_reserved_bytes, None, None, None))
    return rows


def with_slots(trace: Trace, boundaries: Callable[[Ints], SizeClasses]) -> Plan:
    """The plan with these classes for the extents of each family, and slots for all that is alive at once of each."""
    classes: list[PlannedClass] = []
    for family, members in _families(trace).items():
        axis = family.shape.index(None) if None in family.shape else None
        capacities = (0,) if axis is None else boundaries(_extents(trace, family, members)).boundaries
        for capacity in capacities:
            shape = tuple([capacity if n is None else n for n in family.shape])
            classes.append(PlannedClass(SizeClass(shape, np.dtype(family.dtype)), axis, 1))
    plan = Plan(tuple(classes), trace.name, trace.peak_bytes)
    assigned = plan.assign(trace)
    peaks = [peak_alive(trace, assigned == number) for number in range(len(classes))]
    used = [attrs.evolve(c, slots=peak) for c, peak in zip(classes, peaks, strict=True) if peak]
    return attrs.evolve(plan, classes=tuple(used))


def _pool_row(name: str, trace: Trace, plan: Plan) -> Row:
    slots = sum(c.slots for c in plan.classes)
    nbytes = np.array([c.size_class.nbytes for c in plan.classes])
    # As floats: over a whole trace the bytes may be more than an int64 holds.
    given = nbytes[plan.assign(trace)].sum(dtype=np.float64).item()
    padding = 1 - trace.sizes.sum(dtype=np.float64).item() / given if given else 0.0
    return _row(name, trace, plan.required_bytes, len(plan.classes), slots, padding)


def _row(name: str, trace: Trace, nbytes: int, classes: int | None, slots: int | None, padding: float | None) -> Row:
    return {
        "choice": name,
        "classes": classes,
        "slots": slots,
        "padding": padding,
        "bytes": nbytes,
        "of the peak": nbytes / trace.peak_bytes if trace.peak_bytes else None,
    }

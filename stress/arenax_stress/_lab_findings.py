"""What the laboratory found of one trace: plain figures, from which the verdict, the charts and the page are made."""

import attrs

from ._lab_least import Least
from ._lab_map import Occupancy
from ._result import Curve, Failure, Result
from ._simulate import ALLOCATORS, POOL

PLAN = "plan"
NAMES = (*ALLOCATORS, POOL, PLAN)
# The device of the long run, as a multiple of the peak of live bytes.
TIGHT = 1.05


@attrs.frozen
class Facts:
    """What is known of a trace before anything is simulated.

    Attributes:
        name: Its name.
        buffers: How many buffers it allocates.
        events: How many allocations and frees.
        peak_bytes: The most bytes alive at once.
        distinct_sizes: How many sizes there are.
        largest_bytes: The largest buffer.
        left_bytes: Bytes that are alive at its end.
        families: Kinds of request that cannot share a class; 0 where no more is known than bytes.
        classes: The size classes of the plan.
        story: What it is, where that is known: of a workload or a scenario.
    """

    name: str
    buffers: int
    events: int
    peak_bytes: int
    distinct_sizes: int
    largest_bytes: int = 0
    left_bytes: int = 0
    families: int = 0
    classes: int = 0
    story: str = ""


@attrs.frozen
class Waste:
    """From the peak of live bytes to what is needed of a device without bounds.

    Attributes:
        live_bytes: The most bytes alive at once.
        rounding_bytes: What chunks or slots take on top, each at its own peak: rounding, a chunk given whole, padding.
        unused_bytes: What the allocator holds on top: holes between chunks, cached blocks, or idle slots.
        hole_bytes: What lies between the pool's slots on the device; 0 but for the pool.
    """

    live_bytes: int
    rounding_bytes: int
    unused_bytes: int
    hole_bytes: int = 0

    @classmethod
    def of(cls, result: Result) -> "Waste":
        """Returns that of a result without failures and bounds."""
        live, reserved = result.peak_requested_bytes, result.peak_reserved_bytes
        device = reserved if result.device_ratio is None else max(round(result.device_ratio * live), reserved)
        return cls(live, result.peak_allocated_bytes - live, reserved - result.peak_allocated_bytes, device - reserved)

    @property
    def total_bytes(self) -> int:
        """All that is needed of the device."""
        return self.live_bytes + self.rounding_bytes + self.unused_bytes + self.hole_bytes


@attrs.frozen
class LongRun:
    """The trace again and again on one device.

    Attributes:
        limit_bytes: The device's bytes.
        passes: How often.
        requests: Allocations in all.
        failed: How many failed; a program would have ended at the first.
        first: The first failure, or None.
        creations: How often it asked the device for memory, what a plan reserves ahead left out; 0 where it has one
            region.
        conversions: How often the pool gave idle slots up for one of another class.
        fragmentation: The share of what is free that is not in the largest piece, when the last pass ends.
        worst_fragmentation: The most of that at any time, where at least one per cent of the device was free.
        needs_bytes: What the plan's slots take, where that is more than the device has: nothing was run. Else 0.
    """

    limit_bytes: int
    passes: int
    requests: int = 0
    failed: int = 0
    first: Failure | None = None
    creations: int = 0
    conversions: int = 0
    fragmentation: float = 0.0
    worst_fragmentation: float = 0.0
    needs_bytes: int = 0

    @property
    def per_thousand(self) -> tuple[float, float]:
        """Creations and conversions for each thousand requests."""
        requests = max(self.requests, 1)
        return 1000 * self.creations / requests, 1000 * self.conversions / requests


@attrs.define
class Found:
    """What one allocator did with the trace; None where that part was not run.

    Attributes:
        waste: Without bounds.
        least: The least device.
        long: A long run in a device of 105 % of the peak.
    """

    waste: Waste | None = None
    least: Least | None = None
    long: LongRun | None = None

    @property
    def need_bytes(self) -> int | None:
        """What it needs of a device: the least that serves, or where that is not known what it took without bounds."""
        if self.least is not None and self.least.bytes is not None:
            return self.least.bytes
        return None if self.waste is None else self.waste.total_bytes


@attrs.define(eq=False)
class Findings:
    """All that the laboratory found of one trace; filled while it runs, so that an interrupt leaves what there is.

    Attributes:
        facts: Of the trace.
        by_allocator: What each did, in the order asked for.
        plan_bytes: What a plan of at most so many classes takes.
        curves: Bytes over time without bounds, by allocator.
        tight_curves: The same in the long run.
        maps: Who was where without bounds, by allocator.
    """

    facts: Facts
    by_allocator: dict[str, Found]
    plan_bytes: dict[int, int] = attrs.field(factory=dict)
    curves: dict[str, Curve] = attrs.field(factory=dict)
    tight_curves: dict[str, Curve] = attrs.field(factory=dict)
    maps: dict[str, Occupancy] = attrs.field(factory=dict)

    @property
    def missing(self) -> tuple[str, ...]:
        """What was not run, in words."""
        parts = {"waste": "without bounds", "least": "the least device", "long": "the long run"}
        found: list[str] = []
        for part, name in parts.items():
            lacking = [a for a, f in self.by_allocator.items() if getattr(f, part) is None]
            if lacking:
                found.append(f"{name} of {', '.join(lacking)}")
        return tuple(found)

    def need(self, allocator: str) -> float | None:
        """What an allocator needs of a device, as a multiple of the peak; None where that is not known."""
        found = self.by_allocator.get(allocator)
        need = None if found is None else found.need_bytes
        return None if need is None else need / max(self.facts.peak_bytes, 1)

"""The three parts of the laboratory: without bounds, a long run in a tight device, the least device. No output."""

from collections.abc import Callable, Sequence

import numpy as np

from arenax import Plan, Trace

from ._allocator import Allocator, round_up
from ._lab_findings import NAMES, PLAN, TIGHT, Facts, Findings, Found, LongRun, Waste
from ._lab_least import MULTIPLE_OF, least
from ._lab_map import Occupancy
from ._lab_pool import DevicePool
from ._replay import replay
from ._sim_bfc import Bfc
from ._sim_pool import MAX_CLASSES, Pool, simulate_pool
from ._simulate import ALLOCATORS, POOL

DEFAULT = ("bfc", "pytorch", "cupy", "rmm", "best_fit", POOL, PLAN)
# Those of which a map is drawn: what the program would have without a pool, and with one.
MAPPED = ("bfc", PLAN, POOL)
# Those whose memory is whole again when all is freed; the others are tried on two passes, which differ.
FORGETFUL = ("bfc", "best_fit", "first_fit")
# Events to simulate for each allocator in a long run, and in a scan: so that a long trace does not take for ever.
LONG_EVENTS, SCAN_EVENTS = 100_000, 500_000
# A trace of a few events has shown all that it can by then.
MOST_PASSES = 200
MOST_TRIES, LEAST_TRIES = 30, 10
# How many classes a plan might have instead.
CLASS_COUNTS = (2, 4, 8, 16, 32, 64)

# What is being done, and how much of all is done.
Progress = Callable[[str, float], None]


class Laboratory:
    """One trace, and all that is to be tried on it.

    Args:
        trace: The trace; one of a recorded pool is served by the pool's own classes.
        allocators: Of `NAMES`.
        max_classes: The most size classes.
        passes: How often the trace runs in the long run; None is as often as 100,000 events take, from 2 to 200 times.
        story: What the trace is, in words.

    Attributes:
        findings: What there is so far.
        plan: The plan fitted to the trace.
        class_of: The number of each buffer's class in it.

    Raises:
        ValueError: For a trace of nothing, and an allocator that is not known.

    Example:
        >>> from arenax_stress._lab_runs import Laboratory
        >>> lab = Laboratory(Trace.from_events([("allocate", i, 1000) for i in range(3)]), ("bfc", "plan"), passes=2)
        >>> lab.run()
        >>> {name: found.need_bytes for name, found in lab.findings.by_allocator.items()}
        {'bfc': 3072, 'plan': 3072}
    """

    def __init__(
        self,
        trace: Trace,
        allocators: Sequence[str] = DEFAULT,
        *,
        max_classes: int = MAX_CLASSES,
        passes: int | None = None,
        story: str = "",
    ) -> None:
        for name in allocators:
            if name not in NAMES:
                raise ValueError(f"an allocator must be one of {', '.join(NAMES)}, got {name!r}")
        if not len(trace) or not trace.peak_bytes:
            raise ValueError(f"trace {trace.name!r} allocates nothing")
        self.trace = trace
        self.plan = Plan.fit(trace, max_classes)
        self.class_of = self.plan.assign(trace).tolist()
        self.max_classes = max_classes
        if passes is None:
            passes = min(max(2, -(-LONG_EVENTS // len(trace.steps))), MOST_PASSES)
        self._passes = passes
        self._long_trace: Trace | None = None
        self.findings = Findings(_facts(trace, self.plan, story), {name: Found() for name in dict.fromkeys(allocators)})

    def run(self, progress: Progress | None = None) -> None:
        """Runs all three parts, each for every allocator, into `findings`."""
        found = self.findings.by_allocator
        jobs: list[tuple[str, str, Callable[[str], None]]] = [
            *(("without bounds", name, self._without_bounds) for name in found),
            ("plans", "", self._other_plans),
            # First, so that no device is called enough in which the long run fails.
            *(("long run", name, self._long_run) for name in found),
            *(("least device", name, self._least_device) for name in found),
        ]
        for number, (what, name, job) in enumerate(jobs):
            if progress is not None:
                progress(f"{what} {name}".rstrip(), number / len(jobs))
            job(name)
        if progress is not None:
            progress("done", 1.0)

    def _without_bounds(self, name: str) -> None:
        observer = Occupancy(name in (POOL, PLAN), name == PLAN) if name in MAPPED else None
        if name in (POOL, PLAN):
            plan = self.plan if name == PLAN else None
            result = simulate_pool(self.trace, None, plan, self._pool_classes if plan is None else None, observer)
        else:
            result = replay(self.trace, ALLOCATORS[name](None), name, observer)
        self.findings.by_allocator[name].waste = Waste.of(result)
        self.findings.curves[name] = result.curve
        if observer is not None:
            self.findings.maps[name] = observer

    @property
    def _pool_classes(self) -> int | None:
        """None where the recording knows them."""
        return self.max_classes if self.trace.requests is None else None

    def _other_plans(self, _: str) -> None:
        counts = {*CLASS_COUNTS, self.max_classes} if self.findings.facts.distinct_sizes > 1 else {self.max_classes}
        for count in sorted(counts):
            plan = self.plan if count == self.max_classes else Plan.fit(self.trace, count)
            self.findings.plan_bytes[count] = plan.required_bytes

    def _least_device(self, name: str) -> None:
        found = self.findings.by_allocator[name]
        need = self._unbounded_need(name)
        if name == PLAN and found.least is not None:
            return
        if name == PLAN:  # It serves the trace that it is fitted to; but its slots must find a place.
            found.least = least(self._places_plan, need, need, MOST_TRIES)
            return
        tries = min(MOST_TRIES, max(LEAST_TRIES, SCAN_EVENTS // len(self.trace.steps)))
        trace = self.trace if name in FORGETFUL else self.trace.repeat(2)
        start = max(need, self.trace.peak_bytes) * 11 // 10
        seen = {} if found.long is None else {found.long.limit_bytes: not found.long.failed}
        found.least = least(lambda size: self._serves(name, trace, size), self.trace.peak_bytes, start, tries, seen)

    def _places_plan(self, limit: int) -> bool:
        """Whether the slots of the plan, in the order in which they are reserved, find a place on a device."""
        device = Bfc(limit)
        sizes = [c.size_class.nbytes for c in self.plan.classes for _ in range(c.slots)]
        return all(device.allocate(n, size) is not None for n, size in enumerate(sizes) if size)

    def _unbounded_need(self, name: str) -> int:
        found = self.findings.by_allocator[name]
        if found.waste is None:
            self._without_bounds(name)
        assert found.waste is not None
        return found.waste.total_bytes

    def _serves(self, name: str, trace: Trace, limit: int) -> bool:
        """Whether it serves the whole trace in a device of so many bytes; the first failure ends it."""
        allocator, sizes = self._allocator(name, trace, limit), trace.sizes.tolist()
        for step in trace.steps.tolist():
            if step < 0:
                if sizes[~step]:
                    allocator.free(~step)
            elif sizes[step] and allocator.allocate(step, sizes[step]) is None:
                return False
        return True

    def _allocator(self, name: str, trace: Trace, limit: int) -> Allocator:
        if name == POOL:
            return DevicePool(trace, self._pool_classes, limit)
        return Pool(trace, self.plan, None, limit) if name == PLAN else ALLOCATORS[name](limit)

    def _long_run(self, name: str) -> None:
        limit = round_up(int(self.trace.peak_bytes * TIGHT), MULTIPLE_OF)
        found = self.findings.by_allocator[name]
        if name == PLAN and not self._places_plan(limit):
            self._least_device(name)
            found.long = LongRun(limit, self._passes, needs_bytes=found.need_bytes or 0)
            return
        if self._long_trace is None:
            self._long_trace = self.trace.repeat(self._passes)
        allocator = self._allocator(name, self._long_trace, limit)
        before = allocator.creations  # Those that a plan has reserved.
        result = replay(self._long_trace, allocator, name)
        curve = result.curve
        conversions = allocator.conversion_count if isinstance(allocator, Pool) else 0
        # Where hardly anything is free it does not matter in how many pieces.
        broken = np.where(limit - curve.allocated_bytes >= limit // 100, curve.fragmentation, 0.0)
        found.long = LongRun(
            limit_bytes=limit,
            passes=self._passes,
            requests=len(self._long_trace),
            failed=len(result.failures),
            first=result.failures[0] if result.failures else None,
            creations=result.creations - before,
            conversions=conversions,
            fragmentation=float(curve.fragmentation[-1]),
            worst_fragmentation=float(broken.max(initial=0.0)),
        )
        self.findings.tight_curves[name] = curve


def _facts(trace: Trace, plan: Plan, story: str) -> Facts:
    families = 0 if trace.requests is None else len({(str(c.family)) for c in plan.classes})
    return Facts(
        name=trace.name,
        buffers=len(trace),
        events=len(trace.steps),
        peak_bytes=trace.peak_bytes,
        distinct_sizes=len(np.unique(trace.sizes)),
        largest_bytes=int(trace.sizes.max()),
        left_bytes=int(trace.live_bytes[-1]),
        families=families,
        classes=len(plan.classes),
        story=story,
    )

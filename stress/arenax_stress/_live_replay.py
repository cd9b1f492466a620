"""A trace as real arrays on the default device: what it takes in time, resident memory and page faults."""

import contextlib
import os
import time
import warnings
from collections.abc import Generator
from typing import Any, Self

import attrs
import jax
import numpy as np

from arenax import Plan, Trace
from arenax._compiles import CompileCounter
from arenax._landing import is_out_of_memory

from ._bench_clock import minor_faults
from ._bench_forms import default_device
from ._bench_loader_cost import give_back_memory, resident_bytes
from ._live_allocators import Fresh, Pooled, Serves, Unserved

# How often resident memory is looked at, beside the moments at which most bytes are alive.
_LOOKS = 256


@attrs.frozen
class Failed:
    """An allocation that was not served; the run goes on without it.

    Attributes:
        event: The number of its event.
        buffer: The number of its buffer.
        size: The bytes that were asked for.
        reason: The first line of what the device said, or that no size class serves it.
    """

    event: int
    buffer: int
    size: int
    reason: str


@attrs.define
class Replayed:
    """What one allocator did with the trace.

    Attributes:
        allocator: ``"jax"`` or ``"pool"``.
        platform: That of the device.
        event_count: Events that were run.
        planned_count: Those of the trace, all passes together.
        interrupted: Whether it was stopped before its end.
        pass_seconds: Of each pass that was begun, the seconds that its events took.
        pass_faults: Of each, the minor page faults.
        peak_bytes: The most bytes alive at once, as they were asked for; failures left out.
        resident_start_bytes: Resident memory of the process before the first slot or array; None where the system does
            not tell.
        resident_peak_bytes: The most that was seen.
        setup_compiles: Programs compiled before the clock started.
        compiles: Programs compiled afterwards.
        failures: What was not served.
        reserved_bytes: The most that the pool held; None without it, as all figures of the pool.
        creations: Slots that it made.
        conversions: Slots that were given up for one of another class.
        spills: Requests served outside of it.
        device_before: `Device.memory_stats` before the first event, None where the device has none.
        device_after: The same at the end, before anything is freed that outlives it.
        simulated_bytes: The peak of reserved bytes that the simulator of this allocator predicts.
    """

    allocator: str
    platform: str = ""
    event_count: int = 0
    planned_count: int = 0
    interrupted: bool = False
    pass_seconds: list[float] = attrs.field(factory=list[float])
    pass_faults: list[int] = attrs.field(factory=list[int])
    peak_bytes: int = 0
    resident_start_bytes: int | None = None
    resident_peak_bytes: int | None = None
    setup_compiles: int = 0
    compiles: int = 0
    failures: list[Failed] = attrs.field(factory=list[Failed])
    reserved_bytes: int | None = None
    creations: int | None = None
    conversions: int | None = None
    spills: int | None = None
    device_before: dict[str, int] | None = None
    device_after: dict[str, int] | None = None
    simulated_bytes: int = 0

    @classmethod
    def of(cls, found: dict[str, Any]) -> Self:
        """Reads what `attrs.asdict` made of one."""
        failures: Any = [Failed(**failure) for failure in found["failures"]]
        return cls(**found | {"failures": failures})

    @property
    def growth_bytes(self) -> int | None:
        """By how much resident memory grew, at most."""
        if self.resident_peak_bytes is None or self.resident_start_bytes is None:
            return None
        return self.resident_peak_bytes - self.resident_start_bytes


def replay_live(
    trace: Trace, allocator: str, passes: int = 1, plan: Plan | None = None, budget: int | None = None
) -> Replayed:
    """Runs a trace as real arrays. An interrupt ends the run, and what it has by then is returned.

    Args:
        trace: The trace; a buffer of no bytes gets no array.
        allocator: ``"jax"`` for a fresh array each, ``"pool"`` for leases of a pool.
        passes: How often it is run; what outlives a pass is freed at its end.
        plan: For the pool: its slots are reserved before the clock starts.
        budget: For the pool.

    Returns:
        What it took, without a prediction.
    """
    whole = trace.repeat(passes)
    serves: Serves = Fresh(whole.sizes.tolist()) if allocator == "jax" else Pooled(whole, plan, budget)
    device = default_device()
    found = Replayed(allocator, device.platform, planned_count=len(whole.steps))
    setup, counter = CompileCounter(), CompileCounter()
    with warnings.catch_warnings(), jax.enable_x64(True):  # A recording may have 64-bit dtypes, whatever the mode here.
        warnings.simplefilter("ignore", RuntimeWarning)  # Of spills: they are counted.
        with setup.watch():
            serves.warm_up()
            give_back_memory()
            found.resident_start_bytes = found.resident_peak_bytes = resident_bytes([os.getpid()])
            found.device_before = _memory_stats(device)
            serves.begin()
        try:
            with counter.watch():
                _drive(whole, _ends(trace, passes), serves, found)
        except KeyboardInterrupt:
            found.interrupted = True
        found.device_after = _memory_stats(device)
        figures = serves.end()
    return attrs.evolve(found, setup_compiles=setup.count, compiles=counter.count, **figures)


def _drive(whole: Trace, ends: list[int], serves: Serves, found: Replayed) -> None:
    """Runs the events; `ends` are those that begin the next pass, and the count of all."""
    sizes = whole.sizes.tolist()
    looks = iter([*_looks(whole, ends), -1])
    look, passes = next(looks), iter(ends)
    end = next(passes)
    alive: set[int] = set()
    requested = 0
    watch = _Stopwatch(found)
    with watch.running():
        for event, step in enumerate(whole.steps.tolist()):
            if event == end:
                watch.lap()
                end = next(passes)
            if step < 0:
                if ~step in alive:
                    serves.free(~step)
                    alive.remove(~step)
                    requested -= sizes[~step]
            elif sizes[step]:
                try:
                    serves.allocate(step)
                except Exception as e:
                    if not (isinstance(e, Unserved) or is_out_of_memory(e)):
                        raise
                    found.failures.append(Failed(event, step, sizes[step], str(e).partition("\n")[0]))
                else:
                    alive.add(step)
                    requested += sizes[step]
                    found.peak_bytes = max(found.peak_bytes, requested)
            found.event_count = event + 1
            if event == look:
                look = next(looks)
                watch.pause()
                resident = resident_bytes([os.getpid()])
                if resident is not None:
                    found.resident_peak_bytes = max(found.resident_peak_bytes or 0, resident)
                watch.go_on()


class _Stopwatch:
    """Takes seconds and page faults of each pass; it stands still where memory is looked at."""

    def __init__(self, found: Replayed) -> None:
        self._found = found
        self._seconds, self._faults = 0.0, 0
        self._began, self._faults_before = 0.0, 0

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """A scope that is timed; what an interrupt ends is kept."""
        self.go_on()
        try:
            yield
        finally:
            self.lap()

    def lap(self) -> None:
        """Ends a pass and begins the next."""
        self.pause()
        self._found.pass_seconds.append(self._seconds)
        self._found.pass_faults.append(self._faults)
        self._seconds, self._faults = 0.0, 0
        self.go_on()

    def pause(self) -> None:
        """Stands still."""
        self._seconds += time.perf_counter() - self._began
        self._faults += minor_faults() - self._faults_before

    def go_on(self) -> None:
        """Runs again."""
        self._faults_before, self._began = minor_faults(), time.perf_counter()


def _ends(trace: Trace, passes: int) -> list[int]:
    survivors = int((trace.lifetimes[1] == len(trace.steps)).sum())
    once = len(trace.steps) + survivors
    return [*(once * i for i in range(1, passes)), once * passes - survivors]


def _looks(whole: Trace, ends: list[int]) -> list[int]:
    """The events after which resident memory is looked at: evenly spaced, and of each pass that with most alive."""
    count, live = len(whole.steps), whole.live_bytes
    spaced = np.linspace(0, count - 1, min(_LOOKS, count)).astype(np.int64).tolist()
    peaks = [start + int(live[start:stop].argmax()) for start, stop in zip([0, *ends], ends, strict=False)]
    return sorted({*spaced, *peaks})


def _memory_stats(device: Any) -> dict[str, int] | None:
    stats = device.memory_stats()
    return None if stats is None else {key: int(value) for key, value in stats.items()}

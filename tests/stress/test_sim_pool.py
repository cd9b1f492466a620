"""The simulated pool is the pool: the same policy, on a device without bytes, its slots placed by XLA's rules."""

import itertools
import warnings
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import arenax
from arenax import Plan, SizeClasses, Trace
from arenax.testing import FakeDevice
from arenax_stress import simulate
from arenax_stress._sim_pool import Pool
from arenax_stress._workloads import WORKLOADS
from tests.stress.allocations import made, public, traces

SIZES = st.integers(1, 3000)


@hypothesis.given(trace=traces(SIZES), k=st.integers(1, 6), slack=st.none() | st.floats(1.0, 3.0))
def test_it_does_what_a_pool_does(trace: Trace, k: int, slack: float | None) -> None:
    """The same figures as a `BufferPool` whose user asks for the same."""
    hypothesis.assume(len(trace))
    limit = None if slack is None else max(1, int(slack * trace.peak_bytes))
    result = simulate(trace, "pool", max_classes=k, limit_bytes=limit)
    classes = SizeClasses.fit(trace.sizes, k=k, multiple_of=256)
    ragged = arenax.Ragged(0, classes)
    with arenax.BufferPool(FakeDevice(), ragged, budget=limit) as pool:
        held: dict[int, Any] = {}
        failed: list[int] = []
        for event in trace:
            if event.action == "free":
                held.pop(event.buffer, None)
            elif _spills(pool, event.size, held, event.buffer):
                failed.append(event.buffer)
        stats = pool.stats()
        assert [f.buffer for f in result.failures] == failed
        assert (result.conversions, result.peak_reserved_bytes) == (stats.conversion_count, stats.peak_reserved_bytes)
        assert result.peak_allocated_bytes == stats.peak_leased_bytes
        assert result.creations == stats.creation_count
        held.clear()


def _spills(pool: arenax.BufferPool, size: int, held: dict[int, Any], buffer: int) -> bool:
    """Draws, and drops what was spilled."""
    before = pool.stats().spill_count
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        array = pool.put(np.broadcast_to(np.uint8(0), (size,)))
    if pool.stats().spill_count > before:
        return True
    held[buffer] = array
    return False


@hypothesis.given(trace=traces(SIZES), k=st.integers(1, 6))
def test_a_plan_serves_its_trace_with_what_it_requires(trace: Trace, k: int) -> None:
    hypothesis.assume(len(trace))
    plan = Plan.fit(trace, max_classes=k)
    result = simulate(trace, "pool", plan=plan)
    assert (result.failures, result.conversions, result.peak_reserved_bytes) == ((), 0, plan.required_bytes)
    assert result.creations == sum(c.slots for c in plan.classes)
    assert result.created_bytes == plan.required_bytes
    assert result.device_ratio is not None
    assert result.device_ratio >= result.ratio


@hypothesis.given(trace=traces(SIZES), limit=st.none() | st.integers(1, 20_000))
def test_slots_overlap_nowhere_and_the_limit_holds(trace: Trace, limit: int | None) -> None:
    pool = Pool(trace, limit_bytes=limit)
    for step in trace.steps.tolist():
        if step >= 0:
            pool.allocate(step, int(trace.sizes[step]))
        elif ~step in pool.chunks:
            pool.free(~step)
        spans = sorted(pool.chunks.values())
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(spans))
        assert limit is None or pool.reserved_bytes <= limit
        assert pool.reserved_bytes <= pool.device.allocated_bytes  # Which rounds each slot up.
        assert pool.allocated_bytes == sum(n for _, n in spans) <= pool.reserved_bytes
    pool._arena.check()


def test_conversion_is_counted_with_what_it_makes() -> None:
    trace = made(("a", 0, 256), ("f", 0), ("a", 1, 512), ("f", 1), ("a", 2, 256), ("a", 3, 256), ("a", 4, 256))
    result = simulate(trace, "pool", limit_bytes=512)
    assert (result.creations, result.created_bytes, result.conversions) == (4, 1280, 2)
    (failure,) = result.failures
    assert (failure.buffer, failure.size, failure.free_bytes) == (4, 256, 0)


def test_a_recording_keeps_its_own_classes() -> None:
    ragged = arenax.Ragged(0, SizeClasses.explicit([8, 64]))
    with arenax.BufferPool(FakeDevice(), ragged) as pool, pool.record() as trace:
        for n in (3, 40, 5):
            with pool.step() as step:
                step.put(np.ones(n, np.float32))
    result = simulate(trace, "pool")
    assert (result.creations, result.created_bytes) == (2, 32 + 256)
    assert simulate(trace, "pool", max_classes=1).creations == 1
    plan = Plan.fit(trace, max_classes=2)
    assert simulate(trace, "pool", plan=plan).failures == ()


def test_what_no_class_of_a_plan_serves_is_a_failure() -> None:
    plan = Plan.fit(made(("a", 0, 100)))
    result = simulate(made(("a", 0, 101), ("f", 0), ("a", 1, 50)), "pool", plan=plan)
    assert [f.buffer for f in result.failures] == [0]


def test_an_empty_trace_needs_nothing() -> None:
    result = simulate(made(), "pool")
    assert (result.peak_reserved_bytes, result.creations, result.failures) == (0, 0, ())


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"plan": "plan.json"}, TypeError, r"plan must be an arenax\.Plan"),
        ({"max_classes": 0}, ValueError, "max_classes must be at least 1"),
        ({"max_classes": 1.5}, TypeError, "max_classes must be an integer"),
        ({"plan": Plan.fit(made(("a", 0, 9))), "max_classes": 2}, ValueError, "for a pool without a plan"),
        ({"plan": Plan.fit(made(("a", 0, 9))), "limit_bytes": 8}, ValueError, "at least the 9 that the plan requires"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        simulate(made(("a", 0, 9)), "pool", **options)


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_run_through_it(name: str) -> None:
    trace = WORKLOADS[name](seed=1)
    result = simulate(trace, "pool", limit_bytes=2 * trace.peak_bytes)
    assert result.peak_reserved_bytes <= 2 * trace.peak_bytes
    assert result.curve.requested_bytes.max() <= trace.peak_bytes


@pytest.mark.parametrize(
    ("name", "planned", "rate"),
    [("somas_tensors_resnet50", 1.108, 17), ("iopddl_G_1", 1.137, 10), ("iopddl_Y_1", 1.054, 0.1)],
)
def test_real_programs_need_what_a_prototype_found(name: str, planned: float, rate: float) -> None:
    trace = public(name)
    plan = simulate(trace, "pool", plan=Plan.fit(trace, max_classes=16))
    assert plan.ratio <= planned
    assert not plan.conversions
    assert not plan.failures
    limit = int(1.10 * trace.peak_bytes)
    one, two = (simulate(trace.repeat(n), "pool", max_classes=16, limit_bytes=limit) for n in (1, 2))
    assert not two.failures
    assert two.peak_reserved_bytes <= limit
    assert 1000 * (two.creations - one.creations) / len(trace) <= rate

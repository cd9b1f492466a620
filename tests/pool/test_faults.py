"""Whatever phase of whatever operation fails, before or after it is done, the pool is whole and the next one right."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

import arenax
from arenax.testing import PHASES, FakeDevice, fail

from .conftest import pool_on
from .operations import OPERATIONS, Bench, Operation, landing_of, put_three, read, struck, values, whole

pytestmark = [
    pytest.mark.filterwarnings("ignore:a lease of .* was dropped:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:an array of .* was donated away:RuntimeWarning"),
]
ERRORS = (RuntimeError, KeyboardInterrupt, MemoryError)
# What differs between the landings; the policy is the same on every device.
ON_DEVICE = ("put_three_again", "put_ragged", "put_from_device", "put_after_donation", "put_under_a_view", "step_put")
ON_DEVICE += ("step_factories", "step_keep", "lease_life", "lease_detach", "reserve", "convert_in_place", "ahead")
ON_RING = ("put_three", "put_ragged", "step_put", "lease_life")
ON_MESH = ("put_three_again", "put_ragged", "step_put", "lease_life", "lease_detach")
ON_DEVICES = {"cpu": ON_DEVICE, "ring": ON_RING, "replicated": ON_MESH}


def new_bench(operation: Operation, kind: str, warm: bool) -> Bench:
    bench = operation.bench(kind, landing_of(kind))
    if warm and operation.name != "close":
        operation.run(bench)
        bench.seen.clear()
    return bench


def is_called(operation: Operation, kind: str, phase: str) -> bool:
    bench = new_bench(operation, kind, False)
    with fail(bench.pool, phase, nth=1 << 60) as fault:
        operation.run(bench)
    return fault.call_count > 0


def losses(operation: Operation, kind: str, phase: str, error: type[BaseException], warm: bool) -> Iterator[str]:
    """Lets each call of a phase fail in turn, and tells what that broke."""
    for when in ("before", "after"):
        for nth in itertools.count(1):
            bench = new_bench(operation, kind, warm)
            with struck(error) as places:
                with fail(bench.pool, phase, nth, error, when) as fault:
                    operation.run(bench)
            try:
                # A landing is tried again after an Exception, and nobody asks for the errors of a thread he has ended.
                if error is KeyboardInterrupt and not operation.name.startswith("ahead"):
                    assert bool(places) == fault.fired
                whole(bench, operation)
            except Exception as e:
                yield f"{operation.name} on {kind}, {error.__name__} {when} {phase} {nth}, warm {warm}: {e!r}"
            bench.pool.close()
            if fault.call_count < nth:
                break


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_failed_phase_leaves_the_pool_whole(name: str, phase: str) -> None:
    operation = OPERATIONS[name]
    found = [
        loss
        for warm in (False, True)
        if is_called(operation, "fake", phase)
        for error in ERRORS
        for loss in losses(operation, "fake", phase, error, warm)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in ON_DEVICES.items() for name in names])
def test_a_failed_phase_leaves_the_pool_on_a_device_whole(kind: str, name: str) -> None:
    operation = OPERATIONS[name]
    found = [
        loss
        for phase in PHASES
        if is_called(operation, kind, phase)
        for error in (RuntimeError, KeyboardInterrupt)
        for loss in losses(operation, kind, phase, error, warm=True)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("kind", ["fake", "cpu", "ring"])
@pytest.mark.parametrize(("phase", "when"), [("create", "before"), ("create", "after"), ("replace", "before")])
def test_a_slot_that_was_not_detached_after_all_is_not_taken_for_zeros(kind: str, phase: str, when: str) -> None:
    with arenax.BufferPool(landing_of(kind)) as pool:
        with pool.lease((4,), fill=7) as lease:
            with struck(KeyboardInterrupt), fail(pool, phase, error=KeyboardInterrupt, when=when):
                lease.detach()
            assert (read(lease.array) == 7).all()
            lease.fill(0)
            assert (read(lease.array) == 0).all()
            lease.fill(7)
            with struck(KeyboardInterrupt), fail(pool, phase, error=KeyboardInterrupt, when=when):
                lease.detach()
        with pool.step() as step:
            assert (read(step.zeros((4,))) == 0).all()
        pool.check()


def test_every_phase_is_part_of_some_operation() -> None:
    assert {p for p in PHASES if any(is_called(o, "fake", p) for o in OPERATIONS.values())} == {*PHASES}


# What `fail` itself promises. -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"), [({"phase": "x"}, "phase"), ({"nth": 0}, "nth"), ({"when": "then"}, "when")]
)
def test_what_is_out_of_range_is_refused(options: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=f"{match} must be"):
        fail(arenax.BufferPool(FakeDevice()), **({"phase": "land"} | options))  # type: ignore[arg-type]


def test_a_fault_strikes_once_and_is_gone_with_its_scope() -> None:
    bench = Bench(pool_on("fake", ragged={"fix": None, "rag": None}))
    pool = bench.pool
    for phase in PHASES:
        before = vars(pool.landing).get(phase), vars(pool.arena).get(phase)
        with fail(pool, phase, nth=1 << 60), fail(pool, phase, nth=1 << 60):
            put_three(bench)
        assert (vars(pool.landing).get(phase), vars(pool.arena).get(phase)) == before
    error = OSError("full")
    with fail(pool, "land", nth=2, error=error) as fault:
        pool.put(values(4), False)
        with pytest.raises(OSError, match="full") as e:
            pool.put({"fix": [values(4)], "rag": []})
        assert e.value is error
        put_three(bench)
    assert fault.fired
    assert fault.call_count == 3


def test_after_means_that_it_was_done() -> None:
    with arenax.BufferPool(FakeDevice()) as pool, pool.lease((3,)) as lease:
        for when, is_done in (("before", False), ("after", True)):
            x = values(3)
            with pytest.raises(RuntimeError, match=f"a fault {when} write, call 1"):
                with fail(pool, "write", when=when):
                    lease.write(x)
            assert (np.array(lease.array) == x).all() == is_done

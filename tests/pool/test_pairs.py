"""Every phase of one thread against every operation of another: the one stands still there while the other runs."""

import gc
import threading
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest

import arenax
from arenax.testing import FakeDevice

from .conftest import MakePool

X = np.arange(6, dtype=np.float32).reshape(2, 3)
Y = {"a": X + 1, "b": X + 2}


def put(pool: arenax.BufferPool) -> None:
    got = pool.put(Y)
    np.testing.assert_array_equal(np.array(got["a"]), Y["a"])
    np.testing.assert_array_equal(np.array(got["b"]), Y["b"])


def step(pool: arenax.BufferPool) -> None:
    with pool.step() as scope:
        x, zeros = scope.put(X), scope.zeros((2, 3))
        np.testing.assert_array_equal(np.array(x), X)
        assert not np.array(zeros).any()


def strict_step(pool: arenax.BufferPool) -> None:
    with pool.step(strict=True) as scope:
        np.testing.assert_array_equal(np.array(scope.put(X)), X)


def lease(pool: arenax.BufferPool) -> None:
    with pool.lease((2, 3), "float32") as slot:
        slot.write(X[1:], at=(1, 0))
        slot.fill(5)
        slot.append(X[:1])
        assert np.array(slot.array).tolist() == [X[0].tolist(), [5, 5, 5]]


def keep(pool: arenax.BufferPool) -> None:
    with pool.step() as scope:
        kept = scope.keep(scope.put(X))
    np.testing.assert_array_equal(np.array(kept), X)


def stats(pool: arenax.BufferPool) -> None:
    s = pool.stats()
    assert s.reserved_bytes == s.leased_bytes + s.idle_bytes == sum(c.reserved_bytes for c in s.by_class.values())


def cycle(pool: arenax.BufferPool) -> None:
    loop: list[Any] = [pool.put(X)]
    loop.append(loop)
    del loop
    gc.collect()


def measure(pool: arenax.BufferPool) -> None:
    with pool.measure() as m:
        put(pool)
    assert m.stats.write_count >= 2


def reserve(pool: arenax.BufferPool) -> None:
    pool.reserve(X, slots=2)


OPERATIONS: list[Callable[[arenax.BufferPool], None]] = [
    put,
    step,
    strict_step,
    lease,
    keep,
    stats,
    cycle,
    measure,
    reserve,
    arenax.BufferPool.check,
]
PHASES = {
    "arena": ("checkout", "hand_over", "wrote", "settle", "replace"),
    "landing": ("create", "land", "fill", "write", "is_whole", "revoke"),
}
PAIRS = [
    (first, owner, phase, when)
    for first, phases in {
        put: ("checkout", "hand_over", "land", "create"),
        step: ("checkout", "land", "fill", "is_whole"),
        strict_step: ("revoke",),
        lease: ("checkout", "fill", "write", "wrote"),
        keep: ("replace", "create"),
        reserve: ("create", "settle"),
    }.items()
    for owner, names in PHASES.items()
    for phase in phases
    if phase in names
    for when in ("before", "after")
]


pairs = pytest.mark.parametrize(("first", "owner", "phase", "when"), PAIRS, ids=lambda x: getattr(x, "__name__", x))


@pytest.fixture(scope="module", params=["fake", "host", "ring"])
def shared(request: pytest.FixtureRequest) -> Generator[arenax.BufferPool]:
    """One pool of each kind for all, for the sake of its compiles."""
    fake = request.param == "fake"
    with arenax.BufferPool(FakeDevice() if fake else None, landing=None if fake else request.param) as pool:
        yield pool


@pairs
def test_a_phase_stands_still_while_everything_else_goes_on(
    shared: arenax.BufferPool, monkeypatch: pytest.MonkeyPatch, first: Any, owner: str, phase: str, when: str
) -> None:
    for second in OPERATIONS:
        # Nothing is free where a slot is to be made.
        idle = shared.stats().slot_count - shared.stats().leased_count if phase == "create" and first is put else 0
        held = [shared.lease((2, 3), "float32") for _ in range(idle)]
        with monkeypatch.context() as patch:
            errors = _race(shared, patch, first, (owner, phase, when), second)
        assert not errors
        assert shared.stats().leased_count == idle
        for one in held:
            one.release()
        shared.check()


@pairs
def test_a_phase_stands_still_while_the_pool_is_closed(
    make_fake: MakePool, monkeypatch: pytest.MonkeyPatch, first: Any, owner: str, phase: str, when: str
) -> None:
    pool = make_fake()
    if phase != "create":
        put(pool)
        lease(pool)
    errors = _race(pool, monkeypatch, first, (owner, phase, when), arenax.BufferPool.close)
    assert not errors or isinstance(errors[0], arenax.PoolClosed)
    assert (pool.stats().slot_count, pool.stats().leased_count) == (0, 0)
    pool.check()


def _race(
    pool: arenax.BufferPool, patch: pytest.MonkeyPatch, first: Any, point: tuple[str, str, str], second: Any
) -> list[BaseException]:
    """Has `first` stand still in another thread while this one does `second`; returns its errors."""
    owner, phase, when = point
    reached, go_on = threading.Event(), threading.Event()
    thing = getattr(pool, owner)
    real = getattr(thing, phase)
    errors: list[BaseException] = []

    def stand_still() -> None:
        if threading.current_thread() is thread and not reached.is_set():
            reached.set()
            assert go_on.wait(30)

    def gated(*args: Any, **kwargs: Any) -> Any:
        if when == "before":
            stand_still()
        result = real(*args, **kwargs)
        if when == "after":
            stand_still()
        return result

    def run() -> None:
        try:
            first(pool)
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=run, daemon=True)
    patch.setattr(thing, phase, gated)
    thread.start()
    try:
        assert reached.wait(30), f"{first.__name__} never came to {phase}: {errors}"
        second(pool)  # Waits for nobody.
    finally:
        go_on.set()
        thread.join(30)
    assert not thread.is_alive()
    return errors

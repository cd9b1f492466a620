"""The policy of the arena, on the fake device: free lists, budget, conversion, sweeping, and what `check` finds."""

import gc
import itertools
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest

import arenax
from arenax import _trace_leases
from arenax._arena import Holder
from arenax._slot import Slot
from arenax._waiters import Waiter
from arenax.testing import FakeDevice

from .conftest import MakePool, address


def lease(pool: arenax.BufferPool, n: int) -> arenax.Lease:
    return pool.lease((n,), "uint8", fill=None)


def slots_of(pool: arenax.BufferPool) -> dict[str, int]:
    return {str(c): s.slot_count for c, s in pool.stats().by_class.items() if s.slot_count}


def test_the_most_recently_returned_slot_serves_next(make_fake: MakePool) -> None:
    pool = make_fake()
    a, b = lease(pool, 4), lease(pool, 4)
    where = address(a.array)
    b.release()
    a.release()
    with lease(pool, 4) as c:
        assert address(c.array) == where


def test_the_budget_is_never_passed(make_fake: MakePool) -> None:
    pool = make_fake(budget=100)
    with pytest.warns(RuntimeWarning, match="raise the budget"):
        held = [lease(pool, n) for n in (60, 50, 40, 1)]
    stats = pool.stats()
    assert (stats.reserved_bytes, stats.peak_reserved_bytes, stats.spill_count) == (100, 100, 2)
    assert (stats.creation_count, stats.slot_count, stats.leased_bytes) == (2, 2, 100)
    for x in held:
        x.release()
    assert pool.stats().idle_bytes == 100


def test_idle_slots_are_converted_when_the_budget_is_spent(make_fake: MakePool) -> None:
    pool = make_fake(budget=100)
    pool.reserve(arenax.ArraySpec((50,), "uint8"), slots=2)
    with lease(pool, 30):
        assert slots_of(pool) == {"uint8[50]": 1, "uint8[30]": 1}
        with lease(pool, 70):
            assert slots_of(pool) == {"uint8[30]": 1, "uint8[70]": 1}
    stats = pool.stats()
    assert (stats.conversion_count, stats.creation_count, stats.spill_count) == (2, 4, 0)
    assert {str(c): s.conversion_count for c, s in stats.by_class.items()} == {
        "uint8[50]": 0,
        "uint8[30]": 1,
        "uint8[70]": 1,
    }


def test_conversion_frees_the_old_buffer_before_it_makes_the_new_one() -> None:
    device = FakeDevice(bytes_limit=100)
    pool = arenax.BufferPool(device, budget=1.0)
    pool.reserve(arenax.ArraySpec((50,), "uint8"), slots=2)
    with lease(pool, 100):
        assert device.bytes_in_use == 100


def test_what_is_given_up_is_freed_also_where_somebody_keeps_the_lease(make_fake: MakePool) -> None:
    device = FakeDevice()
    pool = arenax.BufferPool(device, budget=100)
    old = lease(pool, 100)
    old.release()
    with pool.step() as step:
        step.zeros((100,), "uint8")
    assert device.bytes_in_use == 100
    new = lease(pool, 60)
    assert device.bytes_in_use == pool.stats().reserved_bytes == 60
    new.release()
    pool.close()
    assert device.bytes_in_use == 0
    spilling = arenax.BufferPool(device, on_exhausted="spill")
    with pytest.warns(RuntimeWarning, match="fresh array"):
        spilled = lease(spilling, 10)
    spilled.release()
    with spilling.step() as step:
        step.zeros((10,), "uint8")
    assert device.bytes_in_use == 0


def test_a_checkout_that_finds_a_slot_sweeps_nothing(make_fake: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_fake(on_exhausted="wait")
    pool.reserve([arenax.ArraySpec((4,), "uint8"), arenax.ArraySpec((8,), "uint8")], slots=1)
    (four, _) = pool.arena.shelves.values()
    holder = Holder()
    pool.arena._line.append(Waiter((four, four), (4, 4), pool.arena.loan(holder), None))
    monkeypatch.setattr(pool.arena, "_sweep", lambda shelves: pytest.fail("swept"))
    lease(pool, 8).release()
    pool.arena._line.clear()


def test_greedy_dual_size_gives_up_the_large_and_the_long_idle_first(make_fake: MakePool) -> None:
    pool = make_fake(budget=170)
    for n in (100, 10, 60):
        lease(pool, n).release()
    # Returned at clock 0: the priority of the largest, 1/100, is the least.
    lease(pool, 90).release()
    assert slots_of(pool) == {"uint8[10]": 1, "uint8[60]": 1, "uint8[90]": 1}
    # The clock is 1/100 now; uint8[90] has 1/100 + 1/90, uint8[60] has 1/60 and is the least.
    lease(pool, 20).release()
    assert slots_of(pool) == {"uint8[10]": 1, "uint8[90]": 1, "uint8[20]": 1}


def test_what_a_batch_needs_itself_is_not_given_up_for_it(make_fake: MakePool) -> None:
    pool = make_fake(budget=100)
    pool.reserve([arenax.ArraySpec((40,), "uint8"), arenax.ArraySpec((60,), "uint8")], slots=1)
    with pool.step() as step:
        with pytest.warns(RuntimeWarning, match="outside the pool"):
            step.put([np.ones(40, np.uint8), np.ones(60, np.uint8), np.ones(50, np.uint8)])
        assert (pool.stats().hit_count, pool.stats().spill_count) == (2, 1)


def test_a_batch_takes_all_its_slots_or_none(make_fake: MakePool) -> None:
    pool = make_fake(on_exhausted="raise")
    pool.reserve(arenax.ArraySpec((4,), "uint8"), slots=3)
    pool.reserve(arenax.ArraySpec((8,), "uint8"), slots=1)
    batch = [np.ones(n, np.uint8) for n in (4, 8, 4, 8)]
    with pytest.raises(arenax.PoolExhausted, match=r"2 x uint8\[4\].*2 x uint8\[8\] \(0 of 1 slots leased\)") as error:
        pool.put(batch)
    assert (error.value.slot_count, error.value.leased_count, error.value.idle_bytes) == (4, 0, 20)
    assert pool.stats().leased_count == 0
    x = pool.put(batch[:2])
    assert pool.stats().leased_count == 2
    del x


def test_a_refused_buffer_leaves_no_trace(make_fake: MakePool) -> None:
    pool = make_fake(bytes_limit=100)
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        pool.reserve(arenax.ArraySpec((30,), "uint8"), slots=4)
    assert pool.stats().slot_count == 0
    with lease(pool, 60):
        with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
            pool.put([np.ones(10, np.uint8), np.ones(50, np.uint8)])
        stats = pool.stats()
        assert (stats.slot_count, stats.leased_count) == (2, 1)
    pool.put(np.ones(30, np.uint8))


def test_a_refused_replacement_leaves_the_array_where_it_was(make_fake: MakePool) -> None:
    pool = make_fake(bytes_limit=100)
    with lease(pool, 60) as held:
        with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
            held.detach()
        assert held.array is not None
    assert pool.stats().slot_count == 1


def test_a_lost_return_is_swept_up(make_fake: MakePool) -> None:
    """An interrupt may strike between the queue's `get` and the next bytecode, and the item is gone."""
    for mode in ("raise", "grow"):
        pool = make_fake(on_exhausted=mode)
        pool.reserve(arenax.ArraySpec((4,), "uint8"), slots=2)
        held = [lease(pool, 4) for _ in range(2)]
        held.clear()
        while not pool.arena._returned.empty():
            pool.arena._returned.get()
        held.append(lease(pool, 4))
        assert pool.stats().leased_count == len(held)
        held.clear()
        while not pool.arena._returned.empty():
            pool.arena._returned.get()
        pool.check()
        assert pool.stats().leased_count == 0


def test_free_means_cheap(make_fake: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkout and return make the same calls with ten slots and with a hundred thousand."""
    monkeypatch.setattr(_trace_leases, "turns", itertools.repeat(False))  # Or one lease in 127 would note its line.

    def calls(count: int) -> Counter[str]:
        pool = make_fake()
        pool.reserve(arenax.ArraySpec((4,), "uint8"), slots=count)
        lease(pool, 4).release()
        seen = Counter[str]()

        def trace(frame: Any, event: str, arg: Any) -> None:
            name = arg.__name__ if event.startswith("c_") else frame.f_code.co_name
            seen[f"{event} {name}"] += 1

        gc.disable()  # JAX hears of every collection, and would be counted
        sys.setprofile(trace)
        try:
            for _ in range(5):
                lease(pool, 4).release()
        finally:
            sys.setprofile(None)
            gc.enable()
        return seen

    assert calls(10) == calls(100_000)


@pytest.mark.parametrize(
    ("breaking", "says"),
    [
        (lambda shelf, slot: shelf.free.append(slot), "twice"),
        (lambda shelf, slot: shelf.free.clear(), "neither free nor on loan"),
        (lambda shelf, slot: setattr(slot, "array", None), "no buffer"),
        (lambda shelf, slot: setattr(shelf.tally, "slot_count", 5), "slot_count says 5"),
        (lambda shelf, slot: setattr(shelf.tally, "requested_bytes", 5), "requested_bytes says 5"),
        (lambda shelf, slot: setattr(shelf.tally, "peak_slot_count", 0), "above its peak"),
    ],
)
def test_check_finds_what_is_broken(breaking: Any, says: str) -> None:
    pool = arenax.BufferPool(FakeDevice())
    pool.reserve(arenax.ArraySpec((4,), "uint8"), slots=1)
    (shelf,) = pool.arena.shelves.values()
    slot: Slot = shelf.free[0]
    pool.check()
    breaking(shelf, slot)
    with pytest.raises(AssertionError, match=says):
        pool.check()


def test_check_finds_broken_loans_sums_and_budgets() -> None:
    pool = arenax.BufferPool(FakeDevice(), budget=100)
    held = lease(pool, 4)
    held._slot.shelf.free.append(held._slot)
    with pytest.raises(AssertionError, match="free and on loan"):
        pool.check()
    held._slot.shelf.free.clear()
    held._slot.loan.slots = []
    with pytest.raises(AssertionError, match="does not list its slot"):
        pool.check()
    held._slot.loan.slots = [held._slot]
    pool.arena.tally.leased_bytes += 1
    with pytest.raises(AssertionError, match="the sum over its classes"):
        pool.check()
    pool.arena.tally.leased_bytes -= 1
    pool.arena.tally.peak_reserved_bytes = 101
    with pytest.raises(AssertionError, match="budget of 100 bytes was passed"):
        pool.check()


def test_peaks_and_stranding(make_fake: MakePool) -> None:
    pool = make_fake()
    with lease(pool, 60):
        pass
    with lease(pool, 40):
        pass
    stats = pool.stats()
    assert (stats.peak_leased_bytes, stats.peak_reserved_bytes, stats.peak_idle_bytes) == (60, 100, 100)
    assert stats.stranding == pytest.approx(100 / 60)
    assert stats.realized_fragmentation == pytest.approx(40 / 60)
    assert stats.by_device["fake:0"].reserved_bytes == 100


def test_the_fake_device_says_when_its_array_is_deleted() -> None:
    pool = arenax.BufferPool(FakeDevice())
    x = pool.put(np.ones(3, np.float32))
    assert repr(x) == "FakeArray(float32[3])"
    assert x.block_until_ready() is x
    x.donate()
    assert x.is_deleted()
    assert "deleted" in repr(x)
    for use in (lambda: np.asarray(x), x.donate, x.export, x.block_until_ready):
        with pytest.raises(RuntimeError, match="deleted"):
            use()


def test_a_fake_array_is_a_source_too() -> None:
    pool = arenax.BufferPool(FakeDevice())
    x = pool.put(np.arange(3, dtype=np.int32))
    np.testing.assert_array_equal(pool.put(x), [0, 1, 2])

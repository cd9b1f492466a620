"""Where a pool stops: steady, exhaustion, spills, reserves and the end, on the fake device and on the real one."""

import gc
import os
import sys
import warnings
from typing import Any

import jax
import numpy as np
import pytest

import arenax
from arenax.testing import FakeDevice

from .conftest import MakePool, arenas, copies, donate

CLASSES = arenax.SizeClasses.explicit([4, 8, 16])
X = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_steady_names_each_cause_at_once(make_pool: MakePool) -> None:
    small, big = np.ones(4, np.float32), np.ones(8, np.float32)
    grow = make_pool()
    with pytest.raises(arenax.NotSteady) as creation, grow.steady():
        grow.put(small)
    with pytest.raises(arenax.NotSteady) as reserved, grow.steady():
        grow.reserve(small, slots=1)
    spill = make_pool(on_exhausted="spill")
    with pytest.raises(arenax.NotSteady) as spilled, spill.steady():
        spill.put(small)
    tight = make_pool(budget=32 * copies(grow))
    tight.reserve(small, slots=2)
    with pytest.raises(arenax.NotSteady) as converted, tight.steady():
        tight.put(big)
    with pytest.raises(arenax.NotSteady) as too_big, tight.steady():
        tight.put(np.ones(16, np.float32))
    causes = [e.value.cause for e in (creation, reserved, spilled, converted, too_big)]
    assert causes == ["creation", "creation", "spill", "conversion", "spill"]
    assert all("test_limits.py" in e.value.call_site for e in (creation, spilled, converted))
    for pool in (grow, spill, tight):
        stats = pool.stats()
        assert (stats.leased_count, stats.spill_count, stats.conversion_count) == (0, 0, 0)
    tight.put(big)


def test_steady_names_what_was_compiled(make_pool: MakePool) -> None:
    import jax

    pool = make_pool()
    with pytest.raises(arenax.NotSteady, match=r"1 programs.*jit\(") as error, pool.steady():
        jax.jit(lambda x: x + 1)(np.ones(int.from_bytes(os.urandom(2), "big") + 1, np.float32))
    assert error.value.cause == "compile"
    with pytest.raises(ZeroDivisionError), pool.steady():  # An error of the body goes first.
        jax.jit(lambda x: x + 2)(np.ones(3, np.float32))
        raise ZeroDivisionError
    with pool.steady():
        pass


def test_exhaustion_says_what_would_help(make_pool: MakePool) -> None:
    needs = 24 * copies(make_pool())
    for options, says in [
        ({}, r"reserve\(example, slots=...\) first"),
        ({"budget": 20}, f"needs {needs} bytes at once and the budget is 20"),
    ]:
        with pytest.raises(arenax.PoolExhausted, match=says):
            make_pool(on_exhausted="raise", **options).put(X)
    pool = make_pool(on_exhausted="raise")
    pool.reserve(X, slots=1)
    held = pool.put(X)
    with pytest.raises(arenax.PoolExhausted, match="release leases sooner"):
        pool.put(X)
    del held


def test_exhaustion_says_who_holds_the_slots(make_pool: MakePool) -> None:
    pool = make_pool(on_exhausted="raise")
    pool.reserve(X, slots=5)
    held: list[Any] = [pool.put(X), pool.lease((2, 3), "float32")]
    with arenax.trace_leases():
        held += [pool.lease((2, 3), "float32"), pool.put(X)]
        line = sys._getframe().f_lineno - 1
    held.append(pool.lease((2, 3), "float32"))
    says = r"held: .*3 by Lease.*the oldest: .*Array.* of float32\[2,3\].* for 0.* s, Lease of .*, Lease of .* from .*"
    with pytest.raises(arenax.PoolExhausted, match=says + rf"test_limits.py:{line}\)") as error:
        pool.put(X)
    assert error.value.holders["Lease"] == 3
    assert sum(error.value.holders.values()) == len(held)
    assert error.value.oldest_seconds >= 0
    assert len(error.value.oldest) == 3
    for lease in held:
        if isinstance(lease, arenax.Lease):
            lease.release()


def test_donating_a_drawn_array_hints_once_at_what_it_costs(make_pool: MakePool) -> None:
    with make_pool() as pool:
        with pytest.warns(RuntimeWarning, match="was donated away.*lease.update.*step.keep") as hints:
            _ = [donate(pool.put(X)) for _ in range(3)]
        assert len(hints) == 1
        assert hints[0].filename == __file__
        assert pool.stats().creation_count == 3


def test_growth_far_past_a_draw_warns_once_a_class(make_fake: MakePool) -> None:
    pool = make_fake()
    with pytest.warns(RuntimeWarning, match="grows to 128 slots of uint8.*reference cycles") as warned:
        held = [pool.put([np.zeros(4, np.uint8)] * 2) for _ in range(100)]
    assert len(warned) == 1
    assert warned[0].filename == __file__
    pool = make_fake()
    pool.reserve([np.zeros(4, np.uint8)] * 2, slots=100)
    held = [pool.put([np.zeros(4, np.uint8)] * 2) for _ in range(110)]
    assert pool.stats().leased_count == 2 * len(held)


def test_a_warm_loop_is_steady(make_pool: MakePool) -> None:
    pool = make_pool(ragged={"x": arenax.Ragged(0, CLASSES), "y": None})
    batches = [{"x": np.ones((n, 2), np.float32), "y": X} for n in (3, 8, 16)]
    pool.reserve(batches[0], slots=2)
    for batch in batches:
        with pool.step() as step:
            step.put(batch, with_sizes=True)
    with pool.steady():
        for i in range(30):
            with pool.step() as step:
                step.put(batches[i % 3], with_sizes=True)
            x = pool.put(batches[i % 3], with_sizes=True)
            del x


def test_close_lets_go_of_idle_slots_and_leaves_loans_alone(make_pool: MakePool) -> None:
    pool = make_pool()
    pool.reserve(X, slots=4)
    x, lease = pool.put(X), pool.lease((2, 3), "float32", fill=2)
    step = pool.step()
    step.__enter__()
    y = step.put(X + 2)
    pool.close()
    pool.close()
    assert "closed" in repr(pool)
    stats = pool.stats()
    assert (stats.slot_count, stats.leased_count, stats.reserved_bytes) == (0, 0, 0)
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, X + 2)
    assert (np.asarray(lease.array) == 2).all()
    lease.write(np.ones((1, 1)))
    lease.release()
    step.__exit__(None, None, None)
    for use in (
        lambda: pool.put(X),
        lambda: pool.lease((3,)),
        lambda: pool.reserve(X),
        lambda: pool.step().__enter__().put(X),
    ):
        with pytest.raises(arenax.PoolClosed, match="closed"):
            use()
    pool.check()


def test_arrays_are_freed_when_dropped_after_close() -> None:
    device = FakeDevice()
    gc.collect()
    gc.disable()
    try:
        pool = arenax.BufferPool(device)
        x, lease, step = pool.put(X), pool.lease((2, 3), "float32"), pool.step()
        with step:
            step.put(X)
            pool.close()
        lease.release()
        del x, lease, step
        assert device.bytes_in_use == 0
    finally:
        gc.enable()


def test_spill_is_counted_warned_once_and_freed(make_pool: MakePool) -> None:
    pool = make_pool(on_exhausted="spill")
    pool.reserve(X, slots=1)
    first = pool.put(X)
    with pytest.warns(RuntimeWarning, match=r"no free slot .*float32\[2,3\].*fresh array outside the pool") as seen:
        second = pool.put(X + 1)
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        third = pool.put(X + 2)
    np.testing.assert_array_equal(second, X + 1)
    stats = pool.stats()
    made = arenas(pool)
    assert (stats.spill_count, stats.slot_count, stats.leased_count, stats.creation_count) == (2, made, 1, made)
    del first, second, third
    assert pool.stats().leased_count == 0
    x = pool.put(X)
    assert pool.stats().hit_count == 2
    del x


def test_a_spilled_lease_or_step_works_as_any_other(make_pool: MakePool) -> None:
    pool = make_pool(on_exhausted="spill")
    with pytest.warns(RuntimeWarning, match="fresh array"):
        lease = pool.lease((3,), "int32")
    with lease:
        lease.write([1, 2, 3])
        np.testing.assert_array_equal(lease.detach(), [1, 2, 3])
    with pool.step() as step:
        kept = step.keep(step.put(X))
    np.testing.assert_array_equal(kept, X)
    assert pool.stats().slot_count == 0


def test_reserve_is_in_full_or_not_at_all(make_pool: MakePool) -> None:
    n = copies(make_pool())
    pool = make_pool(budget=100 * n, on_exhausted="raise")
    pool.reserve(X, slots=2)
    says = f"cannot reserve {72 * n} bytes: {48 * n} of its budget of {100 * n}"
    with pytest.raises(arenax.PoolExhausted, match=says) as error:
        pool.reserve(X, slots=3)
    assert isinstance(error.value, MemoryError)
    figures = (error.value.asked_bytes, error.value.reserved_bytes, error.value.budget_bytes)
    assert figures == (72 * n, 48 * n, 100 * n)
    n *= arenas(pool)
    assert pool.stats().reserved_bytes == 48 * n
    pool.reserve(X, slots=2)
    stats = pool.stats()
    assert (stats.slot_count, stats.idle_bytes, stats.peak_leased_count) == (4 * arenas(pool), 96 * n, 0)
    for bad, error in ((0, ValueError), (-1, ValueError), (True, TypeError), (1.5, TypeError)):
        with pytest.raises(error):
            pool.reserve(X, slots=bad)


def test_reserve_takes_specifications_and_covers_every_class(make_pool: MakePool) -> None:
    import jax

    pool = make_pool(ragged={"x": arenax.Ragged(0, CLASSES), "y": None, "z": None})
    spec = {
        "x": jax.ShapeDtypeStruct((5, 2), np.float32),
        "y": [arenax.ArraySpec((3, CLASSES), "int8"), 1.5],
        "z": arenax.ArraySpec((), "bool"),
    }
    pool.reserve(spec, slots=2)
    by_class = {str(c).partition(" over")[0]: s.slot_count for c, s in pool.stats().by_class.items()}
    names = {f"float32[{n},2]" for n in (4, 8, 16)} | {f"int8[3,{n}]" for n in (4, 8, 16)}
    assert by_class == dict.fromkeys(names | {"float32[]", "bool[]", "int32[]"}, 2 * arenas(pool))
    with pytest.raises(arenax.NoSizeClass):
        pool.reserve({**spec, "x": jax.ShapeDtypeStruct((17, 2), np.float32)})


def test_two_leaves_of_one_class_have_a_slot_each(make_pool: MakePool) -> None:
    pool = make_pool(on_exhausted="raise")
    pool.reserve({"a": X, "b": X + 1}, slots=1)
    assert pool.stats().slot_count == 2 * arenas(pool)
    with pool.step() as step:
        got = step.put({"a": X, "b": X + 1})
        np.testing.assert_array_equal(got["a"], X)
        np.testing.assert_array_equal(got["b"], X + 1)


def test_a_spill_is_freed_when_it_is_dropped_also_after_the_end(make_pool: MakePool) -> None:
    pool = make_pool(on_exhausted="spill")
    device = pool.landing

    def alive() -> int:
        if isinstance(device, FakeDevice):
            return device.bytes_in_use
        return sum(x.shape == (4093,) and x.sharding.memory_kind != "pinned_host" for x in jax.live_arrays())

    with pytest.warns(RuntimeWarning, match="no free slot"):
        spilled = [pool.put(np.ones(4093, np.float32)), pool.lease((4093,), "float32")]
    pool.close()
    assert alive()
    spilled.clear()
    assert not alive()

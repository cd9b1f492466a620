"""Idle slots that are given up for slots of other classes: in place where it can be, otherwise before the new ones."""

import gc
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import arenax
from arenax.testing import FakeDevice, fail

from .conftest import MakePool, pool_on, view

KINDS = ("fake", "host", "ring")
PAIRS = [
    ("float32[6,4]", "int32[24]"),
    ("int32[24]", "float32[2,12]"),
    ("bfloat16[8]", "uint16[2,4]"),
    ("float8_e4m3fn[16]", "int8[16]"),
    ("bool[16]", "bool[4,4]"),
    ("complex64[6]", "complex64[2,3]"),
]
APART = [("float32[4]", "int16[8]"), ("bool[8]", "int8[8]"), ("complex64[4]", "float32[8]"), ("int32[4]", "int32[5]")]


def parse(text: str) -> tuple[tuple[int, ...], str]:
    dtype, shape = text[:-1].split("[")
    return tuple(map(int, shape.split(","))), dtype


def one(kind: str, budget: int) -> arenax.BufferPool:
    return arenax.BufferPool(
        FakeDevice() if kind == "fake" else None, budget=budget, landing=None if kind == "fake" else kind
    )


def address(array: Any) -> int:
    return array.unsafe_buffer_pointer()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_a_slot_of_the_same_bytes_and_item_size_is_converted_where_it_lies(kind: str, old: str, new: str) -> None:
    (shape, dtype), (new_shape, new_dtype) = parse(old), parse(new)
    nbytes = np.dtype(jnp.dtype(dtype)).itemsize * int(np.prod(shape))
    with one(kind, nbytes) as pool:
        with pool.lease(shape, dtype, fill=1) as lease:
            where = address(lease.array)
        value = np.arange(np.prod(new_shape)).reshape(new_shape).astype(jnp.dtype(new_dtype))
        for _ in range(3):
            got = pool.put(value)
            assert address(got) == where
            np.testing.assert_array_equal(np.array(got), value)
            del got
            with pool.lease(shape, dtype) as lease:
                assert address(lease.array) == where
                assert not np.array(lease.array).any()
        stats = pool.stats()
        assert (stats.creation_count, stats.conversion_count, stats.spill_count, stats.copy_count) == (1, 6, 0, 0)
        assert stats.converted_bytes == 6 * nbytes
        assert {str(c): s.conversion_count for c, s in stats.by_class.items()} == {old: 3, new: 3}
        pool.check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("old", "new"), APART)
def test_any_other_is_freed_and_made(kind: str, old: str, new: str) -> None:
    (shape, dtype), (new_shape, new_dtype) = parse(old), parse(new)
    with one(kind, 40) as pool:
        budget = max(arenax.SizeClass(s, np.dtype(d)).nbytes for s, d in (parse(old), parse(new)))
        pool.arena.budget = budget
        pool.lease(shape, dtype, fill=None).release()
        with pool.lease(new_shape, new_dtype) as lease:
            assert not np.array(lease.array).any()
        stats = pool.stats()
        assert (stats.creation_count, stats.conversion_count, stats.slot_count) == (2, 1, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_made_good_in_what_another_class_has_left(kind: str) -> None:
    ragged = {"rag": arenax.Ragged(0, arenax.SizeClasses.explicit([6]), pad_value=-1), "fix": None}
    with arenax.BufferPool(
        FakeDevice() if kind == "fake" else None, ragged, budget=24, landing=None if kind == "fake" else kind
    ) as pool:
        pool.lease((2, 3), "float32", fill=np.nan).release()
        got = pool.put({"rag": np.arange(4, dtype=np.int32), "fix": ()})["rag"]
        assert np.array(got).tolist() == [0, 1, 2, 3, -1, -1]
        assert pool.stats().conversion_count == 1
        assert pool.stats().creation_count == 1


@pytest.mark.parametrize("kind", ["host", "ring"])
def test_programs_of_conversion_are_bounded_by_the_classes(kind: str) -> None:
    shapes = [(24,), (2, 12), (12, 2), (3, 8), (8, 3), (4, 6)]
    with one(kind, 96) as pool:
        for _ in range(2):
            for a in shapes:
                for b in shapes:
                    pool.lease(a, "float32", fill=None).release()
                    pool.lease(b, "int32", fill=None).release()
        assert pool.stats().creation_count == 1
        assert pool.stats().compile_count <= 1 + 2 * 2 * len(shapes)


def test_a_slot_whose_last_borrower_donated_it_away_is_made_anew() -> None:
    with one("host", 64) as pool:
        with pool.step() as step:
            x = step.zeros((16,))
            jax.jit(lambda x: x + 1, donate_argnums=0)(x)
            del x
        x = pool.put(np.arange(16, dtype=np.int32))
        assert np.array(x).tolist() == [*range(16)]
        stats = pool.stats()
        assert (stats.conversion_count, stats.creation_count, stats.slot_count) == (1, 2, 1)
        pool.check()


def test_a_view_of_the_last_array_keeps_its_values() -> None:
    with one("host", 64) as pool:
        lease = pool.lease((16,), fill=7)
        seen = view(lease.array)
        lease.release()
        x = pool.put(np.arange(16, dtype=np.int32))
        assert np.array(x).tolist() == [*range(16)]
        assert (seen == 7).all()
        del x
        pool.check()


def test_what_is_converted_first_is_the_kin_that_lay_idle_longest(make_fake: MakePool) -> None:
    pool = make_fake(budget=48 + 64)
    pool.lease((1, 64), "uint8").release()
    first = pool.lease((4,), "float32")
    second = pool.lease((2, 2), "float32")
    third = pool.lease((4, 1), "float32")
    second.release()
    first.release()
    third.release()
    pool.lease((4,), "int32").release()
    left = {str(c): s.slot_count for c, s in pool.stats().by_class.items()}
    assert left == {"uint8[1,64]": 1, "float32[4]": 1, "float32[2,2]": 0, "float32[4,1]": 1, "int32[4]": 1}


def test_within_the_budget_nothing_is_converted(make_fake: MakePool) -> None:
    pool = make_fake(budget=32)
    pool.lease((4,), "float32").release()
    pool.lease((4,), "int32").release()
    stats = pool.stats()
    assert (stats.creation_count, stats.conversion_count, stats.slot_count) == (2, 0, 2)


def test_conversion_in_place_is_not_steady(make_fake: MakePool) -> None:
    pool = make_fake(budget=16)
    pool.lease((4,), "float32").release()
    with pool.steady(), pytest.raises(arenax.NotSteady, match="conversion") as e:
        pool.lease((4,), "int32")
    assert e.value.cause == "conversion"
    pool.check()


# ------------------------------------------------------------------------------------------ a device that has no memory


def test_idle_slots_are_given_up_where_the_device_has_no_memory() -> None:
    device = FakeDevice(bytes_limit=100)
    with arenax.BufferPool(device) as pool:
        for n in (40, 30, 20):
            pool.lease((n,), "uint8").release()
        with pool.lease((50,), "uint8"):
            assert device.bytes_in_use <= 100
        stats = pool.stats()
        assert (stats.conversion_count, stats.converted_bytes, stats.spill_count) == (1, 50, 0)
        assert stats.by_class[arenax.SizeClass((40,), np.dtype("uint8"))].slot_count == 0
        pool.check()
        assert device.bytes_in_use == stats.reserved_bytes


def test_all_idle_slots_are_tried_before_the_devices_own_error_comes() -> None:
    device = FakeDevice(bytes_limit=100)
    with arenax.BufferPool(device) as pool:
        held = pool.lease((60,), "uint8")
        pool.lease((30,), "uint8").release()
        with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
            pool.lease((50,), "uint8")
        pool.check()
        assert pool.stats().reserved_bytes == device.bytes_in_use == 60
        held.release()
        pool.lease((90,), "uint8").release()


@pytest.mark.parametrize("mode", ["spill", "wait", "raise"])
def test_reserved_slots_are_not_given_up_unless_the_pool_may_grow(mode: str) -> None:
    device = FakeDevice(bytes_limit=100)
    with arenax.BufferPool(device, on_exhausted=mode) as pool:
        pool.reserve(arenax.ArraySpec((30,), "uint8"), slots=2)
        with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
            pool.reserve(arenax.ArraySpec((50,), "uint8"), slots=1)
        assert pool.stats().slot_count == 2


def test_reserve_takes_nothing_from_others() -> None:
    device = FakeDevice(bytes_limit=100)
    with arenax.BufferPool(device) as pool:
        pool.reserve(arenax.ArraySpec((30,), "uint8"), slots=2)
        with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
            pool.reserve(arenax.ArraySpec((50,), "uint8"), slots=1)
        assert (pool.stats().slot_count, pool.stats().conversion_count) == (2, 0)


def test_any_other_failure_costs_no_slot(make_fake: MakePool) -> None:
    pool = make_fake()
    pool.lease((4,), "uint8").release()
    with fail(pool, "create", error=RuntimeError("INTERNAL: a bug")), pytest.raises(RuntimeError, match="INTERNAL"):
        pool.lease((8,), "uint8")
    assert pool.stats().slot_count == 1


def test_a_real_device_says_that_it_has_no_memory_in_the_way_that_is_looked_for() -> None:
    from arenax._landing import is_out_of_memory

    with arenax.BufferPool() as pool, pytest.raises(Exception, match=r"(?i)out of memory|RESOURCE_EXHAUSTED") as e:
        pool.lease((1 << 55,), "uint8", fill=None)
    assert is_out_of_memory(e.value)


# ----------------------------------------------------------------------------------------------------------------- trim


def test_trim_gives_idle_memory_back_to_the_device() -> None:
    device = FakeDevice()
    with arenax.BufferPool(device) as pool:
        pool.reserve(arenax.ArraySpec((50,), "uint8"), slots=4)
        with pool.lease((50,), "uint8"):
            assert pool.trim(to_bytes=120) == 100
            assert pool.stats().reserved_bytes == device.bytes_in_use == 100
            assert pool.trim() == 50
            assert pool.stats().reserved_bytes == device.bytes_in_use == 50
            assert pool.trim() == 0
        assert pool.trim(to_bytes=50) == 0
        assert pool.trim(to_bytes=49) == 50
        assert pool.stats().conversion_count == 0
        pool.check()


def test_trim_frees_first_what_is_of_least_use(make_fake: MakePool) -> None:
    pool = make_fake()
    leases = [pool.lease((n,), "uint8") for n in (10, 100, 20)]
    for lease in leases:
        lease.release()
    pool.trim(to_bytes=30)
    assert {c.shape: s.slot_count for c, s in pool.stats().by_class.items()} == {(10,): 1, (100,): 0, (20,): 1}


def test_trim_takes_back_what_was_dropped_just_now(make_fake: MakePool) -> None:
    pool = make_fake()
    x = pool.put(np.ones(8, np.uint8))
    del x
    assert pool.trim() == 8


def test_trim_leaves_a_live_device_array_alone() -> None:
    with pool_on("host") as pool:
        x = pool.put(np.arange(8, dtype=np.int32))
        pool.trim()
        assert np.array(x).tolist() == [*range(8)]


@pytest.mark.parametrize(("value", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError), (None, TypeError)])
def test_trim_says_what_it_takes(make_fake: MakePool, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="to_bytes must be"):
        make_fake().trim(value)


def test_trim_and_draws_race(make_fake: MakePool) -> None:
    pool = make_fake(budget=1 << 12)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(300):
                shape = (int(rng.integers(1, 5)),)
                dtype = ("float32", "int32", "uint8")[rng.integers(3)]
                if rng.random() < 0.2:
                    pool.trim(to_bytes=int(rng.integers(0, 64)))
                with pool.lease(shape, dtype, fill=seed) as lease:
                    assert (np.array(lease.array) == seed).all()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    gc.collect()
    pool.check()
    assert pool.stats().leased_count == 0

"""Donation that quietly becomes a copy, and arrays donated away: counted, named, and never seen by the next tenant."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

import arenax

from .conftest import address, donate, pool_on

X = np.arange(6, dtype=np.float32).reshape(2, 3)
Hold = Callable[[jax.Array], Any]
holds = pytest.mark.parametrize("hold", [np.asarray, np.from_dlpack, memoryview], ids=["view", "dlpack", "memoryview"])


@pytest.fixture(params=["cpu", "ring"])
def pool(request: pytest.FixtureRequest) -> Iterator[arenax.BufferPool]:
    with pool_on(request.param) as pool:
        yield pool
        pool.check()


@holds
def test_a_view_that_outlives_its_step_keeps_its_data_and_is_counted(pool: arenax.BufferPool, hold: Hold) -> None:
    pool.reserve(X, slots=1)
    views, addresses = [], set()
    for i in range(4):
        with pool.step() as step:
            x = step.put(X + i)
            views.append(hold(x))
            addresses.add(address(x))
            del x
        assert pool.stats().copy_count == i
    for i, view in enumerate(views):
        np.testing.assert_array_equal(np.asarray(view), X + i)
    assert len(addresses) == 4
    stats = pool.stats()
    assert (stats.slot_count, stats.leased_count, stats.spill_count) == (1, 0, 0)
    assert {str(c): s.copy_count for c, s in stats.by_class.items()} == {"float32[2,3]": 3}
    del views, view
    with pool.step() as step:
        np.testing.assert_array_equal(step.put(X), X)
    before = pool.stats().copy_count
    with pool.step() as step:
        step.put(X)
    assert pool.stats().copy_count == before


@holds
def test_a_view_is_named_under_steady(pool: arenax.BufferPool, hold: Hold) -> None:
    pool.reserve(X, slots=1)
    with pool.step() as step:
        view = hold(step.put(X))
    with pytest.raises(arenax.NotSteady, match=r"float32\[2,3\] moved: a NumPy view or DLPack") as error, pool.steady():
        with pool.step() as step:
            step.put(X + 1)
    assert error.value.cause == "copy"
    assert "test_landing_copies.py" in error.value.call_site
    np.testing.assert_array_equal(np.asarray(view), X)
    assert pool.stats().leased_count == 0
    with pool.step() as step:
        np.testing.assert_array_equal(step.put(X + 2), X + 2)
    np.testing.assert_array_equal(np.asarray(view), X)


@pytest.mark.parametrize("which", ["a", "b", "c"])
def test_a_view_of_one_leaf_is_named_as_a_copy_and_costs_the_others_nothing(
    pool: arenax.BufferPool, which: str
) -> None:
    batch = {"a": X, "b": X + 1, "c": X + 2}
    pool.reserve(batch, slots=1)
    with pool.step() as step:
        view = np.asarray(step.put(batch)[which])
    before = pool.stats().creation_count
    with pytest.raises(arenax.NotSteady) as error, pool.steady(), pool.step() as step:
        step.put(batch)
    assert error.value.cause == "copy"
    for _ in range(2):
        with pool.step() as step:
            for name, x in step.put(batch).items():
                np.testing.assert_array_equal(x, batch[name])
    assert pool.stats().creation_count == before
    np.testing.assert_array_equal(view, batch[which])


def test_a_view_of_a_lent_array_holds_the_loan(pool: arenax.BufferPool) -> None:
    x = pool.put(X)
    view = np.asarray(x)
    del x
    assert pool.stats().leased_count == 1
    y = pool.put(X + 1)
    np.testing.assert_array_equal(view, X)
    del view
    assert pool.stats().leased_count == 1
    del y
    assert pool.stats().leased_count == 0


def test_a_dlpack_export_does_not_hold_the_loan_and_keeps_its_data(pool: arenax.BufferPool) -> None:
    x = pool.put(X)
    view = np.from_dlpack(x)
    del x
    gc.collect()
    y = pool.put(X + 1)
    np.testing.assert_array_equal(view, X)
    np.testing.assert_array_equal(y, X + 1)
    del y


@holds
def test_a_view_of_a_leases_array(pool: arenax.BufferPool, hold: Hold) -> None:
    with pool.lease((2, 3)) as lease:
        for i, change in enumerate([lambda: lease.write(X), lambda: lease.fill(5), lambda: lease.update(_double)]):
            before = np.array(lease.array)
            view = hold(lease.array)
            change()
            np.testing.assert_array_equal(np.asarray(view), before)
            assert pool.stats().copy_count == i + 1
            del view
        np.testing.assert_array_equal(lease.array, np.full((2, 3), 10))


def _double(x: jax.Array) -> jax.Array:
    return x * 2


@pytest.fixture(scope="module", params=["cpu", "ring"])
def shared(request: pytest.FixtureRequest) -> Iterator[arenax.BufferPool]:
    """One pool with one slot, so that its programs are compiled once."""
    with pool_on(request.param) as pool:
        pool.reserve(X, slots=1)
        yield pool


@pytest.mark.filterwarnings("ignore:an array of .* was donated away:RuntimeWarning")
@pytest.mark.parametrize("first", ["put", "zeros", "ones", "empty", "lease", "pool.put"])
@pytest.mark.parametrize("then", ["put", "zeros", "ones", "empty", "lease", "lease-none", "array", "pool.put"])
def test_whatever_is_drawn_after_an_array_was_donated_away_is_whole(
    shared: arenax.BufferPool, first: str, then: str
) -> None:
    pool, before = shared, shared.stats()

    def draw(step: arenax.Step, how: str) -> jax.Array:
        match how:
            case "put":
                return step.put(X)
            case "array":
                return step.array(jax.device_put(X))
            case "pool.put":
                return pool.put(X)
            case _:
                return getattr(step, how)((2, 3))

    assert (before.slot_count, before.leased_count) == (1, 0)
    if first == "lease":
        with pool.lease((2, 3)) as lease:
            donate(lease.array)
    else:
        with pool.step() as step:
            donate(draw(step, first))
    expected = {"zeros": 0 * X, "ones": 0 * X + 1, "lease": 0 * X}.get(then, X)
    if then.startswith("lease"):
        with pool.lease((2, 3), fill=0 if then == "lease" else None) as lease:
            if then == "lease-none":
                lease.write(X)
            np.testing.assert_array_equal(lease.array, expected)
    else:
        with pool.step() as step:
            x = draw(step, then)
            assert not x.is_deleted()
            if then != "empty":
                np.testing.assert_array_equal(x, expected)
            del x
    stats = pool.stats()
    assert (stats.slot_count, stats.leased_count, stats.copy_count) == (1, 0, 0)
    assert stats.creation_count == before.creation_count + 1
    pool.check()


@pytest.mark.parametrize(("dtype", "keeps"), [("float32", True), ("bfloat16", False)])
def test_a_numpy_view_keeps_its_loan_except_of_bfloat16(dtype: str, keeps: bool) -> None:
    """`numpy.asarray` of a bfloat16 array keeps the memory alive but not the array; the next landing is a copy then."""
    value = np.ones(16).astype(jax.numpy.dtype(dtype))
    with arenax.BufferPool() as pool:
        pool.reserve(value, slots=1)
        x = pool.put(value)
        held = np.asarray(x)
        del x
        assert pool.stats().leased_count == keeps
        with pool.step() as step:
            step.put(value * 0)
        assert (held == value).all()
        assert pool.stats().copy_count == (not keeps)

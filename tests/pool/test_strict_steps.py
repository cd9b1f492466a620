"""Strict steps: what they drew is deleted when they end, in place, and nothing else is."""

import contextlib
import gc
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import arenax

from .conftest import MakePool, address, donate, view
from .test_facts_of_programs import LARGE, failed_later
from .test_facts_of_programs import settled as settled

X = np.arange(6, dtype=np.float32).reshape(2, 3)
BATCH = {"x": X, "n": np.arange(3, dtype=np.int32), "nothing": np.zeros((0, 2), np.float32)}


def draw(step: arenax.Step, i: float = 0) -> list[Any]:
    return [*jax.tree.leaves(step.put(BATCH)), step.put(X + i), step.full((4,), i), step.empty((5,)), step.array(X)]


def deleted(array: Any) -> bool:
    try:
        np.asarray(array)
    except RuntimeError as e:
        return "deleted" in str(e)
    return False


def test_what_a_strict_step_drew_is_deleted_when_it_ends(make_pool: MakePool) -> None:
    pool = make_pool()
    with pool.step(strict=True) as step:
        arrays = draw(step)
        assert not any(deleted(a) for a in arrays)
    assert all(deleted(a) for a in arrays)
    assert pool.stats().leased_count == 0


def test_what_any_other_step_drew_is_not_deleted_by_its_end(make_pool: MakePool) -> None:
    pool = make_pool()
    with pool.step() as step:
        arrays = draw(step, 5)
    assert not any(deleted(a) for a in arrays)


def test_it_is_in_place_steady_and_copies_nothing(make_pool: MakePool) -> None:
    pool = make_pool()

    def addresses(i: int) -> list[int]:
        with pool.step(strict=True) as step:
            arrays = draw(step, i)
            np.testing.assert_array_equal(arrays[3], X + i)
            np.testing.assert_array_equal(arrays[4], [i] * 4)
            return [address(a) for a in arrays if 0 not in a.shape]

    where, before = sorted(addresses(7)), pool.stats()
    with pool.steady():
        for i in range(5):
            assert sorted(addresses(i)) == where
    stats = pool.stats()
    assert (stats.creation_count, stats.compile_count) == (before.creation_count, before.compile_count)
    assert (stats.copy_count, stats.spill_count) == (0, 0)


def test_it_compiles_no_more_than_one_program_a_class() -> None:
    ragged = arenax.Ragged(1, arenax.SizeClasses.explicit([4, 8]))
    for landing in ("host", "ring"):
        with arenax.BufferPool(ragged={"x": ragged, "y": None}, landing=landing) as pool:

            def run(n: int, strict: bool, pool: arenax.BufferPool = pool) -> None:
                with pool.step(strict) as step:
                    step.put({"x": np.ones((2, n), np.float32), "y": X})

            for n in (3, 7):
                run(n, strict=False)
            before = pool.stats().compile_count
            for n in (1, 2, 3, 4, 5, 6, 7, 8):
                run(n, strict=True)
            assert pool.stats().compile_count - before <= 3


def test_what_was_kept_stays(make_pool: MakePool) -> None:
    pool = make_pool()
    with pool.step(strict=True) as step:
        kept, other = step.keep(step.put(X)), step.put(X)
    assert deleted(other)
    for _ in range(3):
        with pool.step(strict=True) as step:
            assert address(step.put(X + 1)) != address(kept)
    np.testing.assert_array_equal(kept, X)


def test_it_holds_after_an_exception_in_the_body(make_pool: MakePool) -> None:
    pool = make_pool()
    arrays: list[Any] = []
    with pytest.raises(ZeroDivisionError), pool.step(strict=True) as step:
        arrays += draw(step)
        raise ZeroDivisionError
    assert all(deleted(a) for a in arrays)
    assert pool.stats().leased_count == 0


def test_what_was_donated_away_is_passed_over(make_pool: MakePool) -> None:
    pool = make_pool()
    with pool.step(strict=True) as step:
        first, gone, last = step.put(X), step.put(X + 1), step.put(X + 2)
        donate(gone)
    assert all(deleted(a) for a in (first, gone, last))
    with _no_matter_what_is_warned_of(), pool.step(strict=True) as step:
        for i in range(3):
            np.testing.assert_array_equal(step.put(X + i), X + i)
    assert pool.stats().slot_count == 3


@contextlib.contextmanager
def _no_matter_what_is_warned_of() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_a_view_keeps_its_data_and_the_copy_is_counted(make_pool: MakePool) -> None:
    pool = make_pool()
    with pool.step(strict=True) as step:
        x, y = step.put(X), step.put(X + 1)
        held = view(x)
    assert deleted(x)
    assert deleted(y)
    assert pool.stats().copy_count == 1
    with pool.step(strict=True) as step:
        for i in range(4):
            np.testing.assert_array_equal(step.put(X + 5 + i), X + 5 + i)
    np.testing.assert_array_equal(getattr(held, "values", held), X)
    assert pool.stats().copy_count == 1


def test_under_steady_a_view_is_named_and_the_others_are_deleted_all_the_same(make_pool: MakePool) -> None:
    pool = make_pool()
    with pool.step(strict=True) as step:
        for _ in range(3):
            step.put(X)
    with pytest.raises(arenax.NotSteady) as error, pool.steady(), pool.step(strict=True) as step:
        arrays = [step.put(X + i) for i in range(3)]
        held = view(arrays[1])
    assert error.value.cause == "copy"
    assert all(deleted(a) for a in arrays)
    assert pool.stats().leased_count == 0
    np.testing.assert_array_equal(getattr(held, "values", held), X + 1)


def test_a_spilled_array_is_deleted_too(make_pool: MakePool) -> None:
    pool = make_pool(on_exhausted="spill")
    with _no_matter_what_is_warned_of(), pool.step(strict=True) as step:
        x = step.put(X)
        kept = step.keep(step.put(X + 1))
    assert deleted(x)
    np.testing.assert_array_equal(kept, X + 1)
    assert pool.stats().slot_count == 0


def test_a_failure_costs_one_slot_and_nothing_else(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool()
    with pool.step() as step:
        step.put(X)
        step.ones((4,))
    attribute = next(a for a in ("_donate", "take_over", "_put_together") if hasattr(pool.landing, a))
    real = getattr(pool.landing, attribute)

    def fail(slot: Any, *args: Any) -> None:  # After the donation, where there is one.
        if slot.size_class.shape == (2, 3):
            raise ZeroDivisionError
        real(slot, *args)

    with pytest.raises(ZeroDivisionError), pool.step(strict=True) as step:
        x, y = step.put(X), step.ones((4,))
        monkeypatch.setattr(pool.landing, attribute, fail)
    monkeypatch.undo()
    assert deleted(y)
    assert pool.stats().leased_count == 0
    pool.check()
    with _no_matter_what_is_warned_of(), pool.step(strict=True) as step:
        np.testing.assert_array_equal(step.put(X + 1), X + 1)
    del x


def test_an_array_that_fails_to_be_computed_is_the_readers_error_and_not_that_of_the_end(settled: None) -> None:
    for landing in ("host", "ring"):
        with arenax.BufferPool(landing=landing) as pool:
            with pool.step(strict=True) as step:
                good = step.put(X)
                source = failed_later()
                # First it has failed: to make a buffer while a callback runs may wait for it with the GIL held.
                with contextlib.suppress(RuntimeError):
                    source.block_until_ready()
                failed = step.put(source)
            assert deleted(good)
            assert deleted(failed)
            with pool.step(strict=True) as step:
                np.testing.assert_array_equal(step.put(np.ones(LARGE.shape, LARGE.dtype)), 1)
            assert pool.stats().leased_count == 0


def test_a_reader_under_way_is_neither_waited_for_nor_disturbed() -> None:
    @jax.jit
    def slow(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 200, lambda i, s: jnp.sin(s) + x, x * 0).sum()

    value = np.linspace(0, 1, 1 << 16, dtype=np.float32)
    expected = slow(jnp.array(value))
    for landing in ("host", "ring"):
        with arenax.BufferPool(landing=landing) as pool:
            for i in range(4):
                with pool.step(strict=True) as step:
                    result = slow(step.put(value))
                with pool.step(strict=True) as step:
                    step.put(value + i)
                assert result == expected
            assert pool.stats().slot_count == 1


def test_another_array_object_on_the_same_buffer_is_deleted_too() -> None:
    with arenax.BufferPool() as pool:
        with pool.step(strict=True) as step:
            x = step.put(X)
            other = jax.device_put(x, jax.devices()[0])
        assert other is not x
        assert deleted(other)


def test_the_padding_is_still_known_after_it(make_pool: MakePool) -> None:
    pool = make_pool(ragged=arenax.Ragged(0, arenax.SizeClasses.explicit([8]), pad_value=7))
    for n in (8, 3, 5, 2, 6, 0):
        with pool.step(strict=True) as step:
            x = np.asarray(step.put(np.full(n, n, np.float32)))
            np.testing.assert_array_equal(x, [n] * n + [7] * (8 - n))
            del x
    gc.collect()
    assert pool.stats().slot_count == 1


def test_a_landing_of_another_thread_ends_first_and_is_deleted_with_the_rest(
    make_fake: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_fake()
    inside, go_on = threading.Event(), threading.Event()
    land, drawn = pool.landing.land, []

    def slow(*args: Any) -> None:
        inside.set()
        assert go_on.wait(30)
        land(*args)

    monkeypatch.setattr(pool.landing, "land", slow)
    step = pool.step(strict=True)
    with step:
        put = threading.Thread(target=lambda: drawn.append(step.put(X)))
        put.start()
        assert inside.wait(30)
        go_on.set()
    put.join()
    assert deleted(drawn[0])
    assert pool.stats().leased_count == 0

"""Landing with 64-bit types on, off, and toggled in between."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import arenax


@pytest.fixture
def pool() -> Iterator[arenax.BufferPool]:
    with arenax.BufferPool() as pool:
        yield pool
        pool.check()
        assert pool.stats().leased_count == 0


def _add(slot: jax.Array, x: Any) -> jax.Array:
    return slot + x


def test_x64_may_be_toggled_between_puts(pool: arenax.BufferPool) -> None:
    wide = np.array([1 / 3, 2 / 3])
    for _ in range(3):
        for x64, dtype in ((False, np.float32), (True, np.float64)):
            with jax.enable_x64(x64), pool.step() as step:
                x, y = pool.put(wide), step.put({"x": wide})["x"]
                ints = pool.put(7)
                assert (x.dtype, y.dtype, ints.dtype) == (dtype, dtype, np.int64 if x64 else np.int32)
                assert step.zeros(2).dtype == dtype
                np.testing.assert_array_equal(x, wide.astype(dtype))
                np.testing.assert_array_equal(y, wide.astype(dtype))
                del x, y, ints
    assert {str(c): s.slot_count for c, s in pool.stats().by_class.items()} == {
        "float32[2]": 3,
        "float64[2]": 3,
        "int32[]": 1,
        "int64[]": 1,
    }


@pytest.mark.parametrize("name", ["float64", "int64", "complex128"])
def test_a_wide_slot_outlives_the_x64_mode_that_it_was_asked_for_in(name: str) -> None:
    with jax.enable_x64(True):
        spec = arenax.ArraySpec((5,), name)
        pool = arenax.BufferPool()
    pool.reserve(spec, slots=1)  # Its buffer must be as wide as the class says: what lands in it is.
    (shelf,) = pool.arena.shelves.values()
    assert [(s.array.dtype.name, s.array.nbytes) for s in shelf.slots] == [(name, shelf.nbytes)]
    with jax.enable_x64(True):
        lease = pool.lease((5,), name)
    for value in (np.arange(5), np.arange(5).astype(name)):
        lease.fill(1)
        lease.write(value.astype(name))
        lease.update(_double)
        np.testing.assert_array_equal(np.asarray(lease.array), 2 * value)
    assert lease.array.dtype == name
    lease.release()
    pool.check()
    pool.close()


def _double(x: jax.Array) -> jax.Array:
    return x + x


@pytest.mark.parametrize(
    ("dtype", "arg"),
    [
        ("float32", np.float64(2)),
        ("float32", np.full(3, 2.0)),
        ("float32", 2.0),
        ("float32", 2),
        ("int32", np.int64(2)),
        ("int32", np.full(3, 2)),
        ("complex64", np.complex128(2)),
        ("complex64", np.full(3, 2, np.complex64)),
    ],
    ids=str,
)
def test_an_update_follows_the_callers_x64_mode(pool: arenax.BufferPool, dtype: str, arg: Any) -> None:
    with pool.lease((3,), dtype, fill=1) as lease:
        lease.update(_add, arg)
        assert lease.array.dtype == dtype
        np.testing.assert_array_equal(np.asarray(lease.array), [3, 3, 3])


def test_an_update_of_complex_numbers_is_not_traced_wide(pool: arenax.BufferPool) -> None:
    seen = []

    def note(x: jax.Array) -> jax.Array:
        seen.append(jnp.ones(3).dtype.name)
        return x + x

    with pool.lease((3,), "complex64", fill=1) as lease:
        lease.update(note)
        np.testing.assert_array_equal(np.asarray(lease.array), [2, 2, 2])
    assert seen == ["float32"]

"""Debug mode: what was returned raises or shows the poison, and messages name the lines that drew what is on loan."""

import gc
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import arenax
from arenax._debug import VARIABLE, poison
from arenax._request import SizeClass
from arenax._trace_leases import trace_leases

from .conftest import MakePool

X = np.arange(6, dtype=np.float32)
CLASSES = arenax.SizeClasses.explicit([4, 8])


def test_what_was_returned_is_poisoned_by_the_next_call(make_pool: MakePool) -> None:
    with make_pool(debug=True) as pool:
        stale = pool.put(X)
        again = stale if isinstance(stale, jax.Array) else None
        handle = again.addressable_data(0) if again is not None else stale.another()
        del stale, again
        pool.stats()
        with pytest.raises(RuntimeError, match="deleted"):
            np.asarray(handle)
        with pool.lease((6,), "float32", fill=None) as lease:
            assert np.isnan(np.array(lease.array)).all()
        np.testing.assert_array_equal(np.array(pool.put(X)), X)
        pool.check()
        assert pool.stats().creation_count == 1
        assert pool.stats().copy_count == 0


@pytest.mark.parametrize("how", ["lease", "step", "dropped step", "cycle"])
def test_every_way_back_goes_through_the_quarantine(make_pool: MakePool, how: str) -> None:
    with make_pool(debug=True, on_exhausted="raise") as pool:
        pool.reserve(X, slots=1)
        for _ in range(3):
            if how == "lease":
                pool.lease((6,), "float32", fill=1).release()
            elif how == "step":
                with pool.step() as step:
                    step.put(X)
            elif how == "dropped step":
                step = pool.step().__enter__()
                step.put(X)
                del step
            else:
                loop: list[Any] = [pool.put(X)]
                loop.append(loop)
                del loop
                gc.collect()
            with pool.lease((6,), "float32", fill=None) as lease:
                assert np.isnan(np.array(lease.array)).all()
        pool.check()
        assert pool.stats().leased_count == 0


@pytest.mark.parametrize(
    "dtype",
    ["bool", "int8", "uint8", "int32", "uint32", "float16", "bfloat16", "float32", "complex64", "float8_e4m3fn"],
)
def test_every_dtype_has_a_poison(dtype: str) -> None:
    value = poison(SizeClass((2,), jnp.dtype(dtype)))
    if jnp.issubdtype(jnp.dtype(dtype), jnp.inexact):
        assert np.isnan(np.asarray(value))
    with arenax.BufferPool(debug=True) as pool:
        pool.put(np.zeros(2, jnp.dtype(dtype)))
        with pool.lease((2,), dtype, fill=None) as lease:
            assert np.asarray(lease.array).tobytes() == np.full(2, value, jnp.dtype(dtype)).tobytes()


def test_an_overwritten_padding_is_told(make_pool: MakePool) -> None:
    with make_pool(debug=True, ragged=arenax.Ragged(0, CLASSES)) as pool:
        x = pool.put(X[:3])
        line = sys._getframe().f_lineno - 1
        slot = next(slot for shelf in pool.arena.shelves.values() for slot in shelf.slots if slot.loan is not None)
        if slot.view is None:
            slot.array = pool.put(X[:4])  # Another's bytes, in place of a write by force.
        else:
            slot.view[3] = 7
        del x
        with pytest.warns(
            RuntimeWarning, match=rf"padding of an array of float32\[4\].*, drawn at .*:{line}, .* 1 of 1"
        ):
            pool.stats()


def test_messages_name_the_lines(make_pool: MakePool) -> None:
    with make_pool(debug=True, on_exhausted="raise") as pool:
        pool.reserve(X, slots=1)
        held = pool.put(X)
        line = sys._getframe().f_lineno - 1
        with pytest.raises(arenax.PoolExhausted, match=rf"from .*test_debug.py:{line}"):
            pool.put(X)
        del held


def test_a_waiter_gets_what_was_poisoned(make_pool: MakePool) -> None:
    import threading

    with make_pool(debug=True, on_exhausted="wait", timeout=20) as pool:
        pool.reserve(X, slots=1)
        lease = pool.lease((6,), "float32")
        got: list[Any] = []
        thread = threading.Thread(target=lambda: got.append(np.array(pool.put(X))))
        thread.start()
        while not pool.stats().wait_count:
            pass
        lease.release()
        thread.join()
        np.testing.assert_array_equal(got[0], X)
        pool.check()


def test_a_donated_array_is_left_to_the_next_borrower(make_pool: MakePool) -> None:
    from .conftest import donate

    with make_pool(debug=True) as pool:
        donate(pool.put(X))
        pool.check()
        with pytest.warns(RuntimeWarning, match="donated away"):
            np.testing.assert_array_equal(np.array(pool.put(X)), X)


def test_tracing_ends_with_the_pool() -> None:
    from arenax import _trace_leases

    assert not _trace_leases.enabled
    pool = arenax.BufferPool(debug=True)
    assert _trace_leases.enabled
    with trace_leases():
        pool.close()
        pool.close()
    assert not _trace_leases.enabled


@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False), ("", False)])
def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch, value: str, on: bool) -> None:
    monkeypatch.setenv(VARIABLE, value)
    for debug, expected in ((None, on), (True, True), (False, False)):
        with arenax.BufferPool(debug=debug) as pool:
            pool.put(X)
            pool.stats()
            with pool.lease((6,), "float32", fill=None) as lease:
                assert np.isnan(np.asarray(lease.array)).any() == expected


def test_a_bad_switch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="debug must be True, False, or None"):
        arenax.BufferPool(debug="yes")  # pyright: ignore[reportArgumentType]
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(ValueError, match="ARENAX_DEBUG must be 0 or 1"):
        arenax.BufferPool()

"""Landing whatever switches of JAX are on: traces, debugging modes, x64, caches, default devices, guards."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import arenax
from arenax._compiles import CompileCounter

from .conftest import address

X = np.arange(6, dtype=np.float32).reshape(2, 3)
NAN = np.full((2, 3), np.nan, np.float32)
DEVICES = jax.devices()


@pytest.fixture
def pool() -> Iterator[arenax.BufferPool]:
    with arenax.BufferPool() as pool:
        yield pool
        pool.check()
        assert pool.stats().leased_count == 0


@pytest.fixture(scope="module")
def warm() -> Iterator[arenax.BufferPool]:
    """One pool that has compiled all it needs, for the whole file."""
    with arenax.BufferPool() as pool:
        everything(pool)
        yield pool


def in_a_trace(call: Callable[[], Any]) -> list[Any]:
    """What `call` returns while jit traces."""
    got: list[Any] = []

    def traced(x: jax.Array) -> jax.Array:
        got.append(call())
        return x

    jax.jit(traced)(1.0)
    return got


def _add(slot: jax.Array, x: Any) -> jax.Array:
    return slot + x


def _double(x: jax.Array) -> jax.Array:
    return x + x


def everything(pool: arenax.BufferPool) -> None:
    """Every way to land and write, each checked."""
    x = pool.put(NAN)
    del x
    x = pool.put(X)
    with pool.step() as step:
        got = step.put({"a": X, "b": X + 1})
        tools = [step.zeros((2, 3)), step.ones((2, 3)), step.full((2, 3), np.nan), step.arange(3), step.eye(2)]
        on_device = step.array(got["a"])
        for array, expected in [
            (x, X),
            (got["a"], X),
            (got["b"], X + 1),
            (on_device, X),
            *zip(tools, (0 * X, 0 * X + 1, NAN, np.arange(3), np.eye(2)), strict=True),
        ]:
            assert not isinstance(array, jax.core.Tracer)
            np.testing.assert_array_equal(np.asarray(array), expected)
        del got, tools, on_device, array
    with pool.lease((2, 3), fill=1) as lease:
        lease.write(NAN)
        lease.write(X)
        lease.append(X[:1])
        lease.update(_add, np.float32(1))
        np.testing.assert_array_equal(lease.array, X + 1)
    del x


SWITCHES: dict[str, Callable[[], Any]] = {
    "none": contextlib.nullcontext,
    "disable_jit": jax.disable_jit,
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_infs": lambda: jax.debug_infs(True),
    "checking_leaks": jax.checking_leaks,
    "enable_x64": lambda: jax.enable_x64(True),
    "default_device": lambda: jax.default_device(DEVICES[3]),
    "precision": lambda: jax.default_matmul_precision("float32"),
    "log_compiles off": lambda: jax.log_compiles(False),
    "device_to_device guard": lambda: jax.transfer_guard_device_to_device("disallow"),
}


@pytest.mark.parametrize("name", ["disable_jit", "debug_nans", "checking_leaks", "enable_x64", "default_device"])
def test_everything_compiles_and_lands_under_a_switch(pool: arenax.BufferPool, name: str) -> None:
    with SWITCHES[name]():
        everything(pool)
    everything(pool)
    assert pool.stats().copy_count == 0
    for shelf in pool.arena.shelves.values():
        assert all(slot.array.devices() == {DEVICES[0]} for slot in shelf.slots)


@pytest.mark.parametrize("name", SWITCHES)
def test_everything_lands_under_a_switch_as_without_it(warm: arenax.BufferPool, name: str) -> None:
    before = warm.stats()
    for switch in (SWITCHES[name], contextlib.nullcontext, SWITCHES[name]):
        with switch():
            everything(warm)
    after = warm.stats()
    assert (after.leased_count, after.copy_count) == (0, 0)
    if name != "enable_x64":  # There the factories make arrays of other dtypes.
        assert after.creation_count == before.creation_count
        assert after.compile_count == before.compile_count
    for shelf in warm.arena.shelves.values():
        assert all(slot.array.devices() == {DEVICES[0]} for slot in shelf.slots)
    warm.check()


@pytest.mark.parametrize("when", ["cold", "warm"])
def test_everything_lands_while_jit_traces(request: pytest.FixtureRequest, when: str) -> None:
    pool = request.getfixturevalue("warm" if when == "warm" else "pool")
    assert in_a_trace(lambda: everything(pool)) == [None]
    everything(pool)
    assert pool.stats().copy_count == 0
    pool.check()


@pytest.mark.parametrize("name", ["numpy", "scalar", "device", "another device", "stale", "ragged"])
def test_put_in_a_trace_returns_concrete_arrays(name: str) -> None:
    classes = arenax.SizeClasses.explicit([4])
    ragged = {"x": arenax.Ragged(0, classes)} if name == "ragged" else None
    with arenax.BufferPool(ragged=ragged) as pool:
        pool.reserve({"x": X}, slots=1)
        with pool.step() as step:
            stale = step.put({"x": X})["x"]
        source = {
            "numpy": X,
            "scalar": 2.5,
            "device": jnp.asarray(X),
            "another device": jax.device_put(X, DEVICES[1]),
            "stale": stale,
            "ragged": X,
        }[name]
        expected = np.pad(X, ((0, 2), (0, 0))) if name == "ragged" else np.asarray(source)
        (got,) = in_a_trace(lambda: pool.put({"x": source})["x"])
        assert not isinstance(got, jax.core.Tracer)
        assert got.devices() == {DEVICES[0]}
        np.testing.assert_array_equal(got, expected)
        del got
        pool.check()
        assert pool.stats().leased_count == 0


def test_a_tracer_as_a_leaf_is_refused_by_name(pool: arenax.BufferPool) -> None:
    def put(x: jax.Array) -> jax.Array:
        return pool.put({"x": x})["x"]

    def write(x: jax.Array) -> jax.Array:
        with pool.lease((2, 3)) as lease:
            lease.write(x)
            return lease.array

    for call, says in ((put, r"leaf \['x'\] is a tracer"), (write, "cannot take a tracer")):
        for transform in (jax.jit, jax.vmap, jax.grad):
            with pytest.raises(TypeError, match=says):
                transform(call)(X)
    assert pool.stats().leased_count == 0


def test_a_nan_of_the_last_tenant_does_not_raise_under_debug_nans(pool: arenax.BufferPool) -> None:
    for how in ("put", "step", "lease"):
        x = pool.put(NAN)
        where = address(x)
        del x
        with jax.debug_nans(True):
            if how == "put":
                x = pool.put(X)
                assert address(x) == where
                np.testing.assert_array_equal(x, X)
                del x
            elif how == "step":
                with pool.step() as step:
                    assert address(step.put(X)) == where
            else:
                with pool.lease((2, 3), fill=None) as lease:
                    lease.write(X[:1], at=(1, 0))
                    assert address(lease.array) == where
    with jax.debug_nans(True):
        for source in (jax.device_put(NAN, DEVICES[1]), jax.device_put(NAN)):
            x = pool.put(source)
            del x
    with pool.step() as step:
        stale = step.put(NAN)
    with jax.debug_nans(True):
        x = pool.put(stale)  # Copied, since it lies in the very slot.
        del x
    assert pool.stats().copy_count == 0


def test_debug_nans_is_still_on_for_the_caller(pool: arenax.BufferPool) -> None:
    with jax.debug_nans(True), pool.step() as step:
        x = step.put(NAN)
        with pytest.raises(FloatingPointError):
            jax.block_until_ready(jax.jit(lambda x: x + 1)(x))


def test_clear_caches_costs_the_pool_no_compile(pool: arenax.BufferPool) -> None:
    batch = {"a": X, "b": np.arange(5)}
    for _ in range(2):
        x = pool.put(batch)
        del x
        with pool.step() as step:
            step.put(batch)
            step.zeros((2, 3))
            step.ones((2, 3))
    jax.clear_caches()
    counter = CompileCounter()
    with counter.watch(), pool.steady():
        for _ in range(3):
            x = pool.put(batch)
            del x
            with pool.step() as step:
                step.put(batch)
                step.zeros((2, 3))
                step.ones((2, 3))
    assert counter.count == 0


@pytest.mark.parametrize("number", [None, 2])
def test_the_default_device_of_the_moment_changes_nothing(number: int | None) -> None:
    home = DEVICES[number or 0]
    with arenax.BufferPool(None if number is None else home) as pool:
        with jax.default_device(DEVICES[5]):
            pool.reserve(X, slots=1)
            for _ in range(3):
                x = pool.put(X)
                with pool.step() as step:
                    y, z = step.put(X + 1), step.zeros((7,))
                    stale = step.put(X[:1])
                    assert x.devices() == y.devices() == z.devices() == {home}
                    assert {a.committed for a in (x, y, z)} == {number is not None}
                    np.testing.assert_array_equal(x, X)
                    np.testing.assert_array_equal(y, X + 1)
                with pool.step() as step:
                    again = step.put(stale)  # Its own slot's last array: copied first, and that on the pool's device.
                    assert again.devices() == {home}
                    np.testing.assert_array_equal(again, X[:1])
                with pool.lease((2, 3)) as lease:
                    lease.write(X)
                    lease.update(_double)
                    assert lease.array.devices() == {home}
                del x, y, z, stale, again
        assert pool.stats().copy_count == 0


def test_a_pool_made_under_a_default_device_lives_there() -> None:
    with jax.default_device(DEVICES[5]):
        pool = arenax.BufferPool()
    x = pool.put(X)
    assert x.devices() == {DEVICES[5]}
    assert not x.committed
    del x
    pool.close()


def test_landing_is_no_implicit_transfer(pool: arenax.BufferPool) -> None:
    batch = {"a": X, "b": 2.5, "c": np.array([1, 2], jnp.bfloat16)}
    with jax.transfer_guard("disallow"):
        for _ in range(2):
            with pool.step() as step:
                got = step.put(batch)
                x = pool.put(X)
            with jax.transfer_guard("allow"):
                np.testing.assert_array_equal(x, X)
                assert got["c"].tolist() == [1, 2]
            del got, x


@pytest.mark.parametrize("what", ["zeros", "full", "lease", "write", "append", "fill"])
def test_neither_is_any_other_call_of_the_pools(warm: arenax.BufferPool, what: str) -> None:
    pool = warm
    with pool.lease((2, 3), fill=None) as lease:
        lease.write(X)
    calls = {
        "zeros": lambda step, lease: step.zeros((2, 3)),
        "full": lambda step, lease: step.full((2, 3), 7.0),
        "lease": lambda step, lease: pool.lease((2, 3), fill=5).release(),
        "write": lambda step, lease: lease.write(X),
        "append": lambda step, lease: lease.append(X[:1]),
        "fill": lambda step, lease: lease.fill(3),
    }
    with pool.step() as step, pool.lease((2, 3)) as lease, jax.transfer_guard("disallow"):
        calls[what](step, lease)

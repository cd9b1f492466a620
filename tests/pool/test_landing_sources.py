"""Landing a `jax.Array`: from anywhere, never through the host, and a dead one costs nothing."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import arenax

from .conftest import address

X = np.arange(12, dtype=np.float32).reshape(4, 3)
CLASSES = arenax.SizeClasses.explicit([4, 8])


@pytest.fixture
def pool() -> Iterator[arenax.BufferPool]:
    with arenax.BufferPool() as pool:
        yield pool
        pool.check()
        assert pool.stats().leased_count == 0


@pytest.fixture(scope="module", params=[None, 0, 1])
def placed(request: pytest.FixtureRequest) -> Iterator[tuple[arenax.BufferPool, jax.Device, bool]]:
    """A pool for the whole file, so that its programs are compiled once; its device, and whether that was named."""
    device = jax.devices()[request.param or 0]
    with arenax.BufferPool(None if request.param is None else device) as pool:
        yield pool, device, request.param is not None


def sources() -> dict[str, jax.Array]:
    devices = jax.devices()
    two = Mesh(np.array(devices[:2]), ("d",))
    return {
        "uncommitted": jnp.asarray(X),
        "computed": jax.jit(lambda x: x + 0)(X),
        "committed": jax.device_put(X, devices[0]),
        "another device": jax.device_put(X, devices[1]),
        "sharded": jax.device_put(X, NamedSharding(two, PartitionSpec("d"))),
        "replicated": jax.device_put(X, NamedSharding(two, PartitionSpec())),
        "mesh of one": jax.device_put(X, NamedSharding(Mesh(np.array(devices[:1]), ("d",)), PartitionSpec("d"))),
        "mesh of another": jax.device_put(X, NamedSharding(Mesh(np.array(devices[2:3]), ("d",)), PartitionSpec())),
        "pinned host": jax.device_put(X, SingleDeviceSharding(devices[0], memory_kind="pinned_host")),
        "another's pinned host": jax.device_put(X, SingleDeviceSharding(devices[1], memory_kind="pinned_host")),
        "aliases NumPy": jax.device_put(_aligned(X)),
        "a slice": jnp.concatenate([X, X])[:4],
    }


def _aligned(x: np.ndarray) -> np.ndarray:
    raw = np.zeros(x.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    result = raw[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    result[...] = x
    return result


SOURCES = list(sources())


@pytest.mark.parametrize("name", SOURCES)
def test_a_jax_array_lands_from_anywhere(placed: tuple[arenax.BufferPool, jax.Device, bool], name: str) -> None:
    pool, device, committed = placed
    source = sources()[name]
    for _ in range(3):
        x = pool.put(source)
        assert x is not source
        assert (x.devices(), x.committed, x.sharding.memory_kind) == ({device}, committed, "device")
        np.testing.assert_array_equal(x, X)
        with pool.step() as step:
            np.testing.assert_array_equal(step.put({"x": source})["x"], X)
            np.testing.assert_array_equal(step.array(source), X)
        with pool.lease((6, 3)) as lease:
            lease.write(source, at=(1, 0))
            lease.append(source)
            np.testing.assert_array_equal(lease.array, [*X, X[3], [0, 0, 0]])
        del x
    assert pool.stats().leased_count == 0
    assert pool.stats().copy_count == 0
    np.testing.assert_array_equal(source, X)  # And it is still the caller's.
    pool.check()


@pytest.mark.parametrize("name", SOURCES)
def test_a_jax_array_never_passes_through_the_host(
    placed: tuple[arenax.BufferPool, jax.Device, bool], name: str
) -> None:
    pool, *_ = placed
    source = sources()[name]
    for guard in ("allow", "disallow"):  # The first time around compiles.
        with jax.transfer_guard_device_to_host(guard), pool.step() as step:
            step.put(source)
            x = pool.put(source)
        np.testing.assert_array_equal(x, X)
        del x


def test_a_jax_array_on_the_pools_device_is_no_host_transfer_at_all(pool: arenax.BufferPool) -> None:
    source = jnp.asarray(X)
    for guard in ("allow", "disallow"):
        with jax.transfer_guard(guard), pool.step() as step:
            step.put(source)
            x = pool.put(source)
        np.testing.assert_array_equal(x, X)
        del x


@pytest.mark.parametrize("name", ["uncommitted", "another device", "sharded", "a slice"])
def test_a_ragged_jax_array_is_padded(name: str) -> None:
    with arenax.BufferPool(ragged=arenax.Ragged(0, CLASSES, pad_value=9)) as pool:
        source = sources()[name]
        for n in (0, 2, 4):
            for _ in range(2):
                x = pool.put(np.full((4, 3), np.nan, np.float32))
                del x
                x, size = pool.put(source if n == 4 else source[:n], with_sizes=True)
                assert int(size) == n
                np.testing.assert_array_equal(x, [*X[:n], *[[9, 9, 9]] * (4 - n)])
                del x, size
                y = pool.put(X[:1])  # What it left behind is known right.
                np.testing.assert_array_equal(y, [X[0], *[[9, 9, 9]] * 3])
                del y


def test_a_source_drawn_from_the_same_pool(pool: arenax.BufferPool) -> None:
    x = pool.put(X)
    y = pool.put(x)
    assert address(y) != address(x)
    z = pool.put(x[:])  # The same object, as JAX has it.
    part = pool.put(x[1:3])
    with pool.step() as step:
        a = step.put(X + 1)
        b = step.put(a)
        assert address(a) != address(b)
        np.testing.assert_array_equal(a, X + 1)
        np.testing.assert_array_equal(b, X + 1)
        both = step.put({"a": a, "b": x, "c": a})
        np.testing.assert_array_equal(both["c"], X + 1)
    del a, b, both
    for got, expected in ((x, X), (y, X), (z, X), (part, X[1:3])):
        np.testing.assert_array_equal(got, expected)
    assert pool.stats().copy_count == 0
    del x, y, z, part, got


def test_the_last_steps_array_may_be_put_into_its_own_slot(pool: arenax.BufferPool) -> None:
    pool.reserve(X, slots=1)
    with pool.step() as step:
        stale = step.put(X)
    with pool.step() as step:
        x = step.put(stale)
        np.testing.assert_array_equal(x, X)
    assert pool.stats().creation_count == 1
    with pool.lease((4, 3), fill=None) as lease:
        lease.write(X + 1)
        lease.write(lease.array)
        np.testing.assert_array_equal(lease.array, X + 1)
        lease.write(lease.array[1:3], at=(0, 0))
        np.testing.assert_array_equal(lease.array, [*X[1:3] + 1, *X[2:] + 1])


def test_another_handle_on_a_free_slot_is_never_another_tenants_data(pool: arenax.BufferPool) -> None:
    pool.reserve(X, slots=1)
    x = pool.put(X)
    handle = jax.device_put(x, jax.devices()[0])
    assert address(handle) == address(x)
    del x
    y = pool.put(X + 1)
    if not handle.is_deleted():
        np.testing.assert_array_equal(handle, X)
    np.testing.assert_array_equal(y, X + 1)
    del y


def test_a_weakly_typed_scalar_lands_strongly_typed(pool: arenax.BufferPool) -> None:
    weak = jnp.asarray(3.0)
    assert weak.weak_type
    for source in (weak, jnp.asarray(3)):
        x = pool.put(source)
        assert (x.dtype, x.weak_type, float(x)) == (source.dtype, False, 3)
        del x


@pytest.mark.parametrize("name", ["bool", "int8", "bfloat16", "float16", "complex64", "float8_e4m3fn"])
def test_a_jax_array_of_every_width(pool: arenax.BufferPool, name: str) -> None:
    source = jax.device_put(np.arange(3).astype(jnp.dtype(name)))
    x = pool.put(source)
    assert np.asarray(x).tobytes() == np.asarray(source).tobytes()
    del x


def test_a_wide_jax_array_is_narrowed_outside_x64(pool: arenax.BufferPool) -> None:
    with jax.enable_x64(True):
        wide = {"f": jnp.asarray([1 / 3, 2]), "i": jnp.asarray([1, 2]), "c": jnp.asarray([1 / 3 + 1j])}
        assert [x.dtype.name for x in wide.values()] == ["float64", "int64", "complex128"]
        kept = pool.put(wide)
        assert {k: x.dtype.name for k, x in kept.items()} == {"f": "float64", "i": "int64", "c": "complex128"}
    got = pool.put(wide)
    assert {k: x.dtype.name for k, x in got.items()} == {"f": "float32", "i": "int32", "c": "complex64"}
    for name in wide:
        np.testing.assert_allclose(got[name], np.asarray(wide[name]), rtol=1e-6)
        np.testing.assert_array_equal(kept[name], np.asarray(wide[name]))
    del got, kept


@pytest.mark.parametrize("number", [0, 1])
def test_a_deleted_source_is_a_clear_error_and_nothing_is_lost(pool: arenax.BufferPool, number: int) -> None:
    dead = jax.device_put(X, jax.devices()[number])
    dead.delete()
    ragged = arenax.BufferPool(ragged={"a": None, "dead": arenax.Ragged(0, CLASSES), "z": None})
    for a_pool in (pool, ragged):
        a_pool.reserve({"a": X, "dead": jax.ShapeDtypeStruct((4, 3), np.float32), "z": X}, slots=1)
        before = a_pool.stats()
        for _ in range(3):
            with pytest.raises(RuntimeError, match="deleted"):
                a_pool.put({"a": X, "dead": dead, "z": X})
            with pytest.raises(RuntimeError, match="deleted"), a_pool.step() as step:
                step.put({"a": X, "dead": dead, "z": X})
            with a_pool.lease((4, 3), fill=7) as lease:
                with pytest.raises(RuntimeError, match="deleted"):
                    lease.write(dead)
                np.testing.assert_array_equal(lease.array, np.full((4, 3), 7))
        a_pool.check()
        after = a_pool.stats()
        assert (after.leased_count, after.slot_count) == (0, before.slot_count)
        assert (after.creation_count, after.copy_count) == (before.creation_count, 0)
        with a_pool.step() as step:
            for x in step.put({"a": X, "dead": X, "z": X}).values():
                np.testing.assert_array_equal(x, X)
    ragged.close()


def test_a_source_on_the_device_compiles_once_a_shape() -> None:
    with arenax.BufferPool(ragged=arenax.Ragged(0, CLASSES)) as pool:
        for _ in range(2):
            for n in (1, 2, 3):
                x = pool.put(jnp.ones((n, 5)))
                del x
            if not _:
                count = pool.stats().compile_count
        assert pool.stats().compile_count == count
        assert count <= 3 + 2

"""One behaviour suite for every landing: `make_pool` makes pools on a fake device and on the real one."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

import arenax
from arenax.testing import FakeArray, FakeDevice

MakePool = Callable[..., arenax.BufferPool]
_eat = jax.jit(lambda x: x * 1, donate_argnums=0)


def donate(array: Any) -> None:
    """Passes an array to a function that donates it."""
    if isinstance(array, FakeArray):
        array.donate()
    else:
        jax.block_until_ready(_eat(array))


def view(array: Any) -> Any:
    """A view of the array's memory; while it is alive donation copies."""
    return array.export() if isinstance(array, FakeArray) else np.asarray(array)


def address(array: Any) -> int:
    if isinstance(array, FakeArray) or len(array.sharding.device_set) == 1:
        return array.unsafe_buffer_pointer()
    return hash(tuple(shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards))


def copies(pool: arenax.BufferPool) -> int:
    """How many times the bytes of a slot are held: once on each device that has all of it."""
    return len(pool.landing.devices)


def arenas(pool: arenax.BufferPool) -> int:
    """How many arenas a reservation is made in."""
    return len(pool.homes)


def pool_on(kind: str, **options: Any) -> arenax.BufferPool:
    """A pool on a fake device, or on the real one with the landing named."""
    if kind == "fake":
        return arenax.BufferPool(FakeDevice(), **options)
    if kind == "sequence":
        return arenax.BufferPool(jax.devices()[:2], **options)
    if kind == "replicated":  # Any shape may lie so, and each landing goes to two devices.
        mesh = jax.make_mesh((2,), ("copies",), devices=jax.devices()[2:4])
        return arenax.BufferPool(jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()), **options)
    return arenax.BufferPool(landing="host" if kind == "cpu" else kind, **options)


@pytest.fixture(params=["fake", "cpu", "ring", "sequence", "replicated"])
def device_kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make_pool(device_kind: str) -> Iterator[MakePool]:
    pools: list[arenax.BufferPool] = []

    def make(**options: Any) -> arenax.BufferPool:
        pool = pool_on(device_kind, **options)
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        pool.check()
        pool.close()


@pytest.fixture
def make_fake() -> Iterator[MakePool]:
    """Pools on the fake device alone, for policy."""
    pools: list[arenax.BufferPool] = []

    def make(**options: Any) -> arenax.BufferPool:
        pools.append(arenax.BufferPool(FakeDevice(bytes_limit=options.pop("bytes_limit", None)), **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.check()
        pool.close()

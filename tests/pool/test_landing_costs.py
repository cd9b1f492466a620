"""What a landing costs, in counts: addresses that stay, compiles, page faults; and where its arrays are committed."""

import os
import resource
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import arenax
from arenax import SizeClass
from arenax._compiles import CompileCounter

from .conftest import address, pool_on


@pytest.mark.parametrize("name", ["float32", "bool", "bfloat16", "complex64", "float8_e5m2"])
@pytest.mark.parametrize("kind", ["cpu", "ring"])
def test_a_slots_address_stays_over_200_landings(kind: str, name: str) -> None:
    value = np.ones((16, 4), jnp.dtype(name))
    pool = pool_on(kind)
    seen: dict[str, set[int]] = {"put": set(), "step": set(), "lease": set()}
    for _ in range(200):
        x = pool.put(value)
        seen["put"].add(address(x))
        del x
        with pool.step() as step:
            seen["step"].add(address(step.put(value)))
        with pool.lease((16, 4), value.dtype, fill=None) as lease:
            lease.write(value)
            seen["lease"].add(address(lease.array))
    assert seen["put"] == seen["step"] == seen["lease"]
    assert len(seen["put"]) == 1
    stats = pool.stats().by_class[SizeClass((16, 4), value.dtype)]
    assert (stats.creation_count, stats.copy_count, stats.write_count) == (1, 0, 600)
    pool.check()
    pool.close()


@pytest.mark.parametrize("kind", ["cpu", "ring"])
@pytest.mark.parametrize("with_sizes", [False, True])
def test_compiles_are_bounded_by_the_classes_whatever_lengths_come(kind: str, with_sizes: bool) -> None:
    classes = arenax.SizeClasses.explicit([20, 41, 83, 167])
    random = np.random.default_rng(0)
    counter = CompileCounter()
    jax.clear_caches()  # JAX keeps what it has compiled from one pool to the next.
    with pool_on(kind, ragged=arenax.Ragged(0, classes)) as pool, counter.watch():
        for n in random.integers(0, 168, 200):
            x = pool.put(np.ones((n, 3), np.float32), with_sizes=with_sizes)
            del x
        first = counter.count
        assert len(classes.boundaries) < first <= 2 * len(classes.boundaries) + 2
        for n in random.integers(0, 168, 200):
            with pool.step() as step:
                step.put(np.ones((n, 3), np.float32), with_sizes=with_sizes)
        assert counter.count == first


def test_fixed_leaves_land_by_one_program_a_set() -> None:
    pool = arenax.BufferPool()
    batch = {f"leaf{i}": np.ones(191 + i // 4, np.float32) for i in range(12)}
    pool.reserve(batch, slots=1)
    before = pool.stats().compile_count
    for _ in range(5):
        with pool.step() as step:
            step.put(batch)
    assert pool.stats().compile_count == before + 1


@pytest.mark.skipif(sys.platform != "linux", reason="page faults are read as Linux counts them")
@pytest.mark.parametrize("draw", ["put", "step"])
def test_landing_8_mib_takes_no_page_faults_once_warm(draw: str) -> None:
    pool = arenax.BufferPool()
    source = np.ones((2048, 1024), np.float32)

    def land() -> None:
        if draw == "put":
            pool.put(source)
        else:
            with pool.step() as step:
                step.put(source)

    for _ in range(3):
        land()
    faults = []
    for _ in range(20):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        land()
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    # device_put takes 250 to 1,000 each time; a thread of XLA's or ours may start, or touch a new page, now and then.
    # So most take none, and all of them together less than one that had to allocate.
    assert sorted(faults)[len(faults) // 2] <= 1
    assert sum(faults) < 250


@pytest.mark.parametrize("number", [None, 0, 3])
def test_placement_none_is_uncommitted_and_a_device_is_committed(number: int | None) -> None:
    device = jax.devices()[number or 0]
    value = np.ones((4, 3), np.float32)
    with arenax.BufferPool(None if number is None else device) as pool:

        def check(x: jax.Array) -> None:
            assert (x.committed, x.devices()) == (number is not None, {device})

        for _ in range(3):  # A slot goes from one kind of loan to the next.
            check(pool.put(value))
            with pool.step() as step:
                check(step.empty((4, 3)))
                check(step.zeros((4, 3)))
                check(step.put(value))
                check(step.put(jax.device_put(value, device)))
                check(step.put(jax.device_put(value, jax.devices()[5])))
        with pool.lease((4, 3)) as lease:
            for change in (lambda: lease.write(value), lambda: lease.fill(1), lambda: lease.update(_identity)):
                change()
                check(lease.array)
            assert lease.device == device


def _identity(x: jax.Array) -> jax.Array:
    return x


@pytest.mark.skipif(sys.platform != "linux", reason="page faults are read as Linux counts them")
@pytest.mark.parametrize("kind", ["cpu", "ring"])
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("source", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_a_small_write_touches_a_small_part_of_a_large_slot(kind: str, rows: int, source: Any) -> None:
    """jax-ml/jax#40101: XLA rewrote the whole buffer to place less than 480 bytes. Whatever is written after a fork is
    copied first, a page fault for each page: 16,384 for the whole slot, a few hundred for Python and XLA themselves."""
    value = source(np.ones((rows, 64), np.float32))
    with pool_on(kind) as pool, pool.lease((1 << 18, 64), "float32") as lease:
        lease.write(value, (3, 0))
        jax.block_until_ready(lease.array)
        ends, started = os.pipe()
        child = os.fork()
        if not child:
            os.close(started)
            os.read(ends, 1)  # Until the parent closes its end.
            os._exit(0)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        lease.write(value, (1 << 17, 0))
        jax.block_until_ready(lease.array)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        os.close(started)
        os.close(ends)
        os.waitpid(child, 0)
        assert faults < 4096
        assert float(lease.array[1 << 17, 0]) == 1

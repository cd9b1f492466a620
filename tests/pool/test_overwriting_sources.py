"""The caller may overwrite his array the moment a landing or a write returns, also while a slow reader holds it up."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import arenax

from .conftest import pool_on

N = 1 << 16
_slow = jax.jit(lambda x: jax.lax.fori_loop(0, 300, lambda _, a: jnp.sin(a) + 0.1, x).sum())


def aligned(value: float) -> np.ndarray[Any, Any]:
    """An array at 64 bytes, which JAX would alias."""
    raw = np.zeros(N * 4 + 64, np.uint8)
    array = raw[-raw.ctypes.data % 64 :][: N * 4].view(np.float32)
    array[:] = value
    return array


@pytest.fixture(params=["cpu", "ring"])
def pool(request: pytest.FixtureRequest) -> Any:
    with pool_on(request.param) as pool:
        pool.reserve(aligned(0), slots=1)
        jax.block_until_ready(_slow(jnp.ones(N)))
        yield pool


def test_a_landing_behind_a_slow_reader(pool: arenax.BufferPool) -> None:
    expected = float(_slow(jnp.full(N, 0.5, jnp.float32)))
    for i in range(3):
        with pool.step() as step:
            read = _slow(step.put(aligned(0.5)))
        source = aligned(i)
        with pool.step() as step:
            x = step.put(source)
            source[:] = -1
            assert (np.asarray(x) == i).all()
            assert float(read) == expected


@pytest.mark.parametrize("operation", ["write", "append", "update"])
def test_a_write_behind_a_slow_reader(pool: arenax.BufferPool, operation: str) -> None:
    expected = float(_slow(jnp.full(N, 0.5, jnp.float32)))
    for i in range(3):
        with pool.lease((N,), "float32", fill=0.5) as lease:
            read = _slow(lease.array)
            source = aligned(i)
            if operation == "update":
                lease.update(_second, source)
            else:
                getattr(lease, operation)(source)
            source[:] = -1
            assert (np.asarray(lease.array) == i).all()
            assert float(read) == expected


def _second(slot: jax.Array, x: jax.Array) -> jax.Array:
    return slot * 0 + x

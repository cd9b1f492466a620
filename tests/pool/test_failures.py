"""Failures of the runtime: the slot is replaced, the innocent next borrower sees nothing of it, the sums stay right."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import arenax
import arenax._donation as donation
import arenax._host_write as host_write
import arenax._placing as placing
import arenax._programs as programs
import arenax._ring as ring

from .conftest import pool_on


@pytest.fixture(params=["cpu", "ring"])
def pool(request: pytest.FixtureRequest) -> Any:
    with pool_on(request.param) as pool:
        yield pool
        pool.check()


def replace_run(patch: pytest.MonkeyPatch, run: Any) -> None:
    for module in (programs, donation, host_write, placing, ring):
        patch.setattr(module, "run", run)


def _fail(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    raise ZeroDivisionError("in a callback")


def failing(slot: jax.Array) -> jax.Array:
    return slot + jax.pure_callback(_fail, jax.ShapeDtypeStruct((), jnp.float32), slot.ravel()[0])


# A small program raises when it is called, a large one when its result is awaited.
@pytest.mark.parametrize("size", [4, 1 << 16])
def test_a_failed_update_is_the_borrowers_own_error(pool: arenax.BufferPool, size: int) -> None:
    for again in range(3):
        lease = pool.lease((size,), "float32")
        with pytest.raises(Exception, match="in a callback"):
            lease.update(failing)
            jax.block_until_ready(lease.array)
        lease.release()
        assert pool.stats().leased_count == 0
        with pool.lease((size,), "float32", fill=None if again == 1 else 3) as fresh:
            got = np.asarray(fresh.array)
            assert again == 1 or (got == 3).all()
            del got
        x = pool.put(np.full(size, 2, np.float32))
        assert (np.asarray(x) == 2).all()
        x = pool.put(jnp.full(size, 5, np.float32))
        assert (np.asarray(x) == 5).all()
        del x
    assert pool.stats().slot_count <= 2


@pytest.mark.parametrize("size", [4, 1 << 16])
@pytest.mark.parametrize("source", [np.ones, jnp.ones])
def test_the_next_put_finds_a_failed_result(pool: arenax.BufferPool, size: int, source: Any) -> None:
    lease = pool.lease((size,), "float32")
    with pytest.raises(Exception, match="in a callback"):
        lease.update(failing)
        jax.block_until_ready(lease.array)
    lease.release()
    with pool.step() as step:
        assert (np.asarray(step.put({"a": source(size, np.float32)})["a"]) == 1).all()
    assert pool.stats().slot_count == 1


def test_an_error_in_tracing_leaves_the_contents(pool: arenax.BufferPool) -> None:
    with pool.lease((3,), "float32", fill=7) as lease:
        with pytest.raises(TypeError):
            lease.update(lambda slot: slot + "text")
        assert (np.asarray(lease.array) == 7).all()
    assert pool.stats().creation_count == 1


def test_a_failure_in_the_middle_of_a_batch_lands_none_of_it(
    pool: arenax.BufferPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = {"a": np.ones(3, np.float32), "b": jnp.ones(4, np.float32)}
    for _ in range(2):
        with pool.step() as step:
            step.put(batch)
    real, calls = programs.run, []

    def run(program: Any, *args: Any) -> Any:
        calls.append(program)
        if len(calls) == 2:
            raise RuntimeError("the second program fails")
        return real(program, *args)

    replace_run(monkeypatch, run)
    with pytest.raises(RuntimeError, match="second program"):
        pool.put(batch)
    assert pool.stats().leased_count == 0
    monkeypatch.undo()
    with pool.step() as step:
        got = step.put(batch)
        assert (np.asarray(got["a"]) == 1).all()
        assert (np.asarray(got["b"]) == 1).all()
    assert pool.stats().slot_count == 2


def test_a_program_that_returns_its_argument_is_never_written_through(
    pool: arenax.BufferPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a jitted identity does under disable_jit: the last borrower's own array would be overwritten."""
    with pool.step() as step:
        stale = step.put(np.ones(3, np.float32))
    real = programs.run

    def run(program: Any, *args: Any) -> Any:
        return real(program) if not args else args[0]

    with monkeypatch.context() as patch:
        replace_run(patch, run)
        with pytest.raises(RuntimeError, match="very array"), pool.step() as step:
            step.put(np.zeros(3, np.float32))
    assert (np.asarray(stale) == 1).all()
    with pool.step() as step:
        assert (np.asarray(step.put(np.zeros(3, np.float32))) == 0).all()


@pytest.mark.parametrize("size", [3, 1 << 16])
def test_a_deleted_source_is_refused(pool: arenax.BufferPool, size: int) -> None:
    source = jnp.ones(size)
    source.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        pool.put([np.ones(2), source])
    assert pool.stats().leased_count == 0


def test_a_failed_array_takes_no_other_leaf_with_it(pool: arenax.BufferPool) -> None:
    """All leaves of a batch land by one program, so that one errored input would make each of its results errored."""
    good, bad = np.ones(1 << 16, np.int32), np.full(1 << 16, 2, np.float32)
    with pool.lease(good.shape, "int32") as lease:  # Known to be whole from here on.
        jax.block_until_ready(lease.array)
    lease = pool.lease(bad.shape, "float32")
    with pytest.raises(Exception, match="in a callback"):
        lease.update(failing)
        jax.block_until_ready(lease.array)
    lease.release()
    for _ in range(3):
        got = pool.put({"a": good, "b": bad})
        assert (np.asarray(got["a"]) == 1).all()
        assert (np.asarray(got["b"]) == 2).all()
        del got
        alone = pool.put(good)
        assert (np.asarray(alone) == 1).all()
        del alone
    assert pool.stats().creation_count <= 4

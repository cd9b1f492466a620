"""The private names of JAX used for speed: they are there, do what they are used for, and can be missed."""

import jax
import numpy as np
import pytest

import arenax
import arenax._private as private
import arenax._programs as programs
from arenax._private import CPP_CALL, second_handle


def _program() -> jax.stages.Compiled:
    like = jax.ShapeDtypeStruct((4,), np.float32)
    return jax.jit(lambda b: b, donate_argnums=0, keep_unused=True).lower(like).compile()


def _slot() -> jax.Array:
    return jax.jit(lambda: jax.numpy.zeros(4))()


def test_a_compiled_program_has_a_call_below_its_own_from_its_second_call_on() -> None:
    program, slot = _program(), _slot()
    address = slot.unsafe_buffer_pointer()
    slot = program(slot)
    result = getattr(program, CPP_CALL)(slot)
    assert slot.is_deleted()
    assert result.unsafe_buffer_pointer() == address
    with pytest.raises(TypeError):
        getattr(program, CPP_CALL)(np.zeros(5))


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("name", ["array_result_handler", "_there_is_no_such_name"])
def test_a_second_handle_is_another_object_on_the_same_buffer(
    name: str, committed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private, "ARRAY_MAKER", name)
    slot = jax.device_put(_slot(), jax.devices()[0]) if committed else _slot()
    make = second_handle(slot)
    assert (type(make).__name__ == "ResultHandler") == (name == "array_result_handler")
    slot = _program()(slot)  # What makes it was made for an array that is no more.
    handle = make([slot])
    assert handle is not slot
    assert (handle.shape, handle.dtype, handle.sharding) == (slot.shape, slot.dtype, slot.sharding)
    assert handle.unsafe_buffer_pointer() == slot.unsafe_buffer_pointer()
    if name == "array_result_handler":
        assert handle.committed == committed
    del slot
    assert not np.asarray(_program()(make([handle]))).any()
    assert handle.is_deleted()


@pytest.mark.parametrize("kind", ["host", "ring"])
def test_without_them_the_public_ways_are_taken(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "CPP_CALL", "_there_is_no_such_name")
    monkeypatch.setattr(private, "ARRAY_MAKER", "_there_is_no_such_name")
    with arenax.BufferPool(landing=kind) as pool:
        value = np.arange(4, dtype=np.float32)
        first = pool.put(value)
        address = first.unsafe_buffer_pointer()
        np.testing.assert_array_equal(first, value)
        for i in range(3):
            del first
            first = pool.put(value + i)
            np.testing.assert_array_equal(np.array(first), value + i)
            assert first.unsafe_buffer_pointer() == address
        assert pool.stats().copy_count == 0

"""What the pool takes for granted of JAX's memory, without the pool: who owns it, who waits for whom, when it dies.

Each test is one fact, and needs jax and numpy only. A red one means that this JAX behaves in another way than the pool
was built for. Addresses and counts, never seconds. See also `test_facts_of_donation.py`, `test_facts_of_programs.py`.
"""

import ctypes
import functools
import gc
import queue
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

cpu_only = pytest.mark.skipif("jax.default_backend() != 'cpu'", reason="measured on the CPU backend only")

N = 1024
SPEC = jax.ShapeDtypeStruct((N,), jnp.float32)
LARGE = jax.ShapeDtypeStruct((1 << 16,), jnp.float32)
START = jax.ShapeDtypeStruct((), jnp.int32)


@functools.cache
def zeros_program(sharding, n, dtype):
    return jax.jit(lambda: jnp.zeros(n, dtype), out_shardings=sharding)


def zeros(sharding=None, n=N, dtype=jnp.float32):
    """A buffer that XLA owns."""
    return zeros_program(sharding, n, dtype)()


def addresses(x):
    return [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]


def identity(spec=SPEC, **options):
    return jax.jit(lambda b: b, donate_argnums=0, **options).lower(spec).compile()


def landing(spec=SPEC, extent=16):
    def write(buffer, update, start):
        return lax.dynamic_update_slice(buffer, update, (start,))

    return jax.jit(write, donate_argnums=0).lower(spec, jax.ShapeDtypeStruct((extent,), spec.dtype), START).compile()


def host_view(x):
    """The bytes of a CPU array."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * x.nbytes).from_address(x.unsafe_buffer_pointer())).view(x.dtype)


def stage(n=N, off=0):
    """NumPy memory at `off` mod 64, and the array that owns it."""
    room = np.zeros(4 * n + 128, np.uint8)
    start = -room.ctypes.data % 64 + off
    return room, room[start : start + 4 * n].view(np.float32)


@functools.cache
def slow():
    """A compiled program that reads its argument for some 50 ms, in the background, and returns 2001 times it."""
    return jax.jit(lambda b: lax.fori_loop(0, 2_000, lambda _, sum_: sum_ + b, b)).lower(LARGE).compile()


@pytest.fixture
def sharding():
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    return NamedSharding(Mesh(np.array(jax.devices()), ("d",)), PartitionSpec("d"))


# --------------------------------------------------------------------------------- NumPy memory and JAX race each other
@cpu_only
@pytest.mark.parametrize(
    "bring",
    [jax.device_put, lambda s: jax.device_put(s, jax.devices()[0]), lambda s: jax.device_put(s, may_alias=False)],
    ids=["device_put", "to_a_device", "may_alias_False"],
)
def test_device_put_aliases_aligned_numpy_memory(bring):
    """jax-ml/jax#37830: also with `may_alias=False`. Waiting does not make the memory free for reuse."""
    _, s = stage()
    x = bring(s).block_until_ready()
    assert addresses(x) == [s.ctypes.data]
    s[:] = 7
    assert np.asarray(x)[0] == 7


@cpu_only
def test_jitted_call_aliases_an_aligned_numpy_argument():
    """Compiled or not; memory at 16 mod 64, where NumPy's own large arrays lie, is copied."""
    seen = []
    for off in (0, 16):
        _, s = stage(off=off)

        def overwrite(_, s=s):
            s[:] = 7
            return np.float32(0)

        def late(b, overwrite=overwrite):
            return b + jax.pure_callback(overwrite, jax.ShapeDtypeStruct((), jnp.float32), b[0])

        seen.append(float(jax.jit(late)(s)[-1]))
        s[:] = 0
        seen.append(float(jax.jit(late).lower(SPEC).compile()(s)[-1]))
    assert seen == [7, 7, 0, 0]


@cpu_only
@pytest.mark.parametrize("bring", [jnp.array, lambda s: jnp.asarray(s, copy=True)], ids=["array", "asarray_copy"])
def test_jnp_array_copies_aligned_numpy_memory(bring):
    _, s = stage()
    x = bring(s).block_until_ready()
    s[:] = 7
    assert np.asarray(x)[0] == 0


@pytest.mark.parametrize("off", [0, 16])
def test_stage_may_be_reused_once_the_write_that_consumed_it_is_ready(off):
    """That is, the donated write; the slot keeps what it was given."""
    program, x = landing(LARGE, LARGE.size), zeros(n=LARGE.size)
    _, s = stage(LARGE.size, off)
    before = addresses(x)
    for k in range(50):
        s[:] = k
        x = program(x, s, np.int32(0)).block_until_ready()
        s[:] = -1
        np.testing.assert_array_equal(np.asarray(jnp.copy(x)), np.float32(k))
        assert addresses(x) == before


@cpu_only
def test_stage_that_xla_owns_is_read_by_the_write_and_free_after_it():
    """The pinned ring: written through a NumPy view, moved and placed by one program, no temporary memory."""
    pinned = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")

    def land(slot, chunk, start):
        return lax.dynamic_update_slice(slot, jax.device_put(chunk, jax.memory.Space.Device), (start,))

    x, chunk = zeros(), zeros(pinned, n=64).block_until_ready()
    spec = jax.ShapeDtypeStruct((64,), jnp.float32, sharding=pinned)
    program = jax.jit(land, donate_argnums=0).lower(SPEC, spec, START).compile()
    assert program.memory_analysis().temp_size_in_bytes == 0
    before, view = addresses(x), host_view(chunk)
    for k in range(16):
        view[:] = k
        x = program(x, chunk, np.int32(64 * k)).block_until_ready()
        view[:] = -1
        assert addresses(x) == before
    np.testing.assert_array_equal(np.asarray(x), np.repeat(np.arange(16), 64))


@cpu_only
def test_host_write_into_a_donated_slot_shows_in_its_array():
    """Donate the slot to itself, wait, copy through a view of its address: no other copy anywhere."""
    program, x = identity(), zeros()
    for k in range(1, 4):
        x = program(x).block_until_ready()
        np.copyto(host_view(x), np.float32(k))
        np.testing.assert_array_equal(np.asarray(jnp.copy(x)), np.float32(k))


@pytest.mark.parametrize("read", [np.asarray, np.array])
def test_numpy_waits_for_the_array_by_itself(read):
    np.testing.assert_array_equal(read(slow()(jnp.ones(LARGE.size))), 2_001.0)


@cpu_only
def test_numpy_memory_stays_alive_until_array_and_computations_are_done_with_it():
    room, s = stage(LARGE.size)
    s[:] = 1
    dead = threading.Event()
    weakref.finalize(room, dead.set)
    x = jax.device_put(s).block_until_ready()
    assert addresses(x) == [s.ctypes.data]
    del room, s
    assert not dead.is_set()
    reader = slow()(x)
    del x
    np.testing.assert_array_equal(np.asarray(reader), 2_001.0)
    for _ in range(1_000):  # freed by XLA's own thread, and by the next one that enters JAX
        if dead.wait(0.01):
            break
        zeros().block_until_ready()
    assert dead.is_set()


# ------------------------------------------------------------------------------------------------------------ lifetimes
def test_addressable_data_is_a_second_handle_and_a_weak_reference_tells_when_the_first_was_dropped():
    """The kept handle is then donated in place."""
    lent = zeros()
    before, kept, seen = addresses(lent), lent.addressable_data(0), weakref.ref(lent)
    assert kept is not lent
    assert addresses(kept) == before
    gc.disable()  # reference counts do it, no collection
    try:
        del lent
        assert seen() is None
    finally:
        gc.enable()
    assert addresses(identity()(kept)) == before


def test_sharded_array_takes_one_handle_a_shard_and_is_reassembled_on_the_same_buffers(sharding):
    """`addressable_data(0)` is shard 0 only. Donating the reassembled array keeps every address."""
    n = 128 * len(jax.devices())
    lent = zeros(sharding, n)
    before, seen = addresses(lent), weakref.ref(lent)
    kept = [lent.addressable_data(k) for k in range(len(before))]
    assert [handle.unsafe_buffer_pointer() for handle in kept] == before
    del lent
    assert seen() is None
    x = jax.make_array_from_single_device_arrays((n,), sharding, kept)
    y = identity(jax.ShapeDtypeStruct((n,), jnp.float32, sharding=sharding))(x)
    assert addresses(y) == before
    assert all(handle.is_deleted() for handle in kept)


def test_weak_reference_to_an_array_is_compared_by_identity_only():
    """It cannot be hashed, and `==` compares elements."""
    x, y = zeros(), zeros()
    with pytest.raises(TypeError, match="unhashable"):
        hash(weakref.ref(x))
    assert isinstance(weakref.ref(x) == weakref.ref(y), jax.Array)


class Loan(weakref.ref):
    """A weak reference that knows its slot."""

    __slots__ = ("slot",)


def test_weak_reference_with_a_slot_and_simplequeue_put_as_its_callback_loses_nothing():
    """Also with a collection at every allocation, and arrays that die in cycles."""
    returned, loans, arrays = queue.SimpleQueue(), [], [zeros(n=4) for _ in range(100)]
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for slot in range(100):
            x = arrays.pop()
            loan = Loan(x, returned.put)
            loan.slot = slot
            loans.append(loan)
            if slot % 2:
                cycle = [x]
                cycle.append(cycle)
                del cycle
            del x
    finally:
        gc.set_threshold(*threshold)
        gc.collect()
    assert sorted(returned.get_nowait().slot for _ in range(100)) == list(range(100))
    assert returned.empty()


@pytest.mark.parametrize(
    "form",
    [
        lambda x: x[:],
        lambda x: x[...],
        jnp.asarray,
        lambda x: x.astype(x.dtype),
        lambda x: x.reshape(x.shape),
        jax.device_put,
    ],
    ids=["slice", "ellipsis", "asarray", "astype", "reshape", "device_put"],
)
def test_form_that_changes_nothing_returns_the_same_object(form):
    x = zeros()
    assert form(x) is x


@pytest.mark.parametrize(
    "form",
    [
        lambda x, d: jax.device_put(x, d),
        lambda x, d: x.to_device(d),
        lambda x, d: jax.device_put(x, NamedSharding(Mesh(np.array(jax.devices()), ("d",)), PartitionSpec())),
        lambda x, d: jax.make_array_from_single_device_arrays(x.shape, SingleDeviceSharding(d), [x]),
    ],
    ids=["device_put", "to_device", "replicated", "make_array"],
)
def test_other_object_on_the_same_buffer_is_not_seen_and_is_deleted_by_donation(form):
    """Its user gets an error, never the next tenant's data."""
    lent = zeros()
    before, kept, seen = addresses(lent), lent.addressable_data(0), weakref.ref(lent)
    other = form(lent, jax.devices()[0])
    assert other is not lent
    assert addresses(other)[:1] == before
    del lent
    assert seen() is None
    assert addresses(identity()(kept)) == before
    assert other.is_deleted()
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(other)


@cpu_only
@pytest.mark.parametrize(
    ("view", "kept"),
    [(np.asarray, True), (memoryview, True), (jax.device_get, False), (np.from_dlpack, False), (np.array, False)],
    ids=["asarray", "memoryview", "device_get", "dlpack", "array"],
)
def test_asarray_and_memoryview_keep_the_array_alive_and_device_get_and_dlpack_do_not(view, kept):
    x = zeros()
    seen, alive = weakref.ref(x), view(x)
    del x
    assert (seen() is not None) is kept
    del alive
    assert seen() is None


def test_user_who_donates_the_lent_array_marks_the_kept_handle_deleted():
    lent = zeros()
    kept = lent.addressable_data(0)
    identity()(lent)
    assert kept.is_deleted()


def test_user_who_donates_one_shard_leaves_the_whole_array_undeleted(sharding):
    """So each shard is asked."""
    x = zeros(sharding, n=128 * len(jax.devices()))
    jax.jit(lambda b: b, donate_argnums=0)(x.addressable_data(1))
    assert not x.is_deleted()
    assert [shard.data.is_deleted() for shard in x.addressable_shards][:2] == [False, True]


@pytest.mark.parametrize("dtype", ["int4", "uint4"])
def test_sub_byte_array_may_be_smaller_than_its_nbytes(dtype):
    """64 bytes in jax 0.10, 32 in 0.12, and `nbytes` says 64: a host view of `nbytes` would overrun."""
    x = zeros(n=64, dtype=dtype)
    assert x.nbytes == 64
    assert x.on_device_size_in_bytes() in (32, 64)


@cpu_only
def test_cpu_reports_no_memory_statistics():
    assert jax.devices()[0].memory_stats() is None

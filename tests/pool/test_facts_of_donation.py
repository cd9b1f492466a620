"""What the pool takes for granted of JAX's donation, without the pool: it is the in-place write, and it fails silently.

Each test is one fact, and needs jax and numpy only. A red one means that this JAX behaves in another way than the pool
was built for. Addresses and counts, never seconds. See also `test_facts_of_memory.py`, `test_facts_of_programs.py`.
"""

import ctypes
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

# The warning names some of the donations that are lost, and not others: the facts below say which by address.
pytestmark = pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
cpu_only = pytest.mark.skipif("jax.default_backend() != 'cpu'", reason="measured on the CPU backend only")

N = 1024
DTYPES = (
    *("bool", "int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32"),
    *("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float32", "complex64"),
)
SPEC = jax.ShapeDtypeStruct((N,), jnp.float32)
START = jax.ShapeDtypeStruct((), jnp.int32)


@functools.cache
def zeros_program(shape, dtype, sharding):
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


def zeros(shape=(N,), dtype=jnp.float32, sharding=None):
    """A buffer that XLA owns."""
    return zeros_program(shape, dtype, sharding)()


def addresses(x):
    return [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]


def identity(buffer):
    return buffer


def write(buffer, update, start):
    return lax.dynamic_update_slice(buffer, update, (start,) + (0,) * (buffer.ndim - 1))


def donating(function, *specs, **options):
    """`function`, compiled ahead of time for `specs` (one slot where there are none), its first argument donated."""
    return jax.jit(function, donate_argnums=0, **options).lower(*(specs or (SPEC,))).compile()


def jitted(function):
    """As `donating`, compiled at the first call. A function of its own, so that no other test's cache is hit."""
    return jax.jit(lambda *args: function(*args), donate_argnums=0)


def in_place(program, x, *args):
    before = addresses(x)
    return addresses(program(x, *args)) == before


@functools.cache
def slow():
    """A compiled program that reads its argument for some 50 ms, in the background, and returns 2001 times it."""
    spec = jax.ShapeDtypeStruct((1 << 16,), jnp.float32)
    return jax.jit(lambda b: lax.fori_loop(0, 2_000, lambda _, sum_: sum_ + b, b)).lower(spec).compile()


@pytest.fixture
def second_device():
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    return jax.devices()[1]


@pytest.fixture
def sharded():
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    return NamedSharding(Mesh(np.array(jax.devices()), ("d",)), PartitionSpec("d"))


# --------------------------------------------------------------------------------------- donation is the in-place write
@pytest.mark.parametrize("dtype", DTYPES)
def test_donated_write_with_traced_start_keeps_the_address(dtype):
    """Whatever the dtype; the rest of the slot keeps its values."""
    x, update = zeros((64,), dtype), jax.jit(lambda: jnp.ones(8, dtype))()
    before, program = addresses(x), jitted(write)
    for start in (8, 40):
        x = program(x, update, np.int32(start))
        assert addresses(x) == before
    assert np.flatnonzero(np.asarray(x).astype(np.complex64)).tolist() == [*range(8, 16), *range(40, 48)]


def test_donated_write_keeps_every_address_of_a_sharded_array(sharded):
    """Also where the update spans two shards."""
    x = zeros((128 * len(jax.devices()),), sharding=sharded)
    program = jax.jit(write, donate_argnums=0, out_shardings=sharded)
    assert in_place(program, x, np.ones(4, np.float32), np.int32(126))


def test_donated_write_keeps_the_address_in_pinned_host():
    device = jax.devices()[0]
    if "pinned_host" not in {memory.kind for memory in device.addressable_memories()}:
        pytest.skip("no pinned_host here")
    pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
    x = zeros(sharding=pinned)
    assert x.sharding.memory_kind == "pinned_host"
    program = jax.jit(write, donate_argnums=0, out_shardings=pinned)
    assert in_place(program, x, np.ones(8, np.float32), np.int32(3))


@pytest.mark.parametrize("n", [1 << 16, 1 << 22])
def test_donated_write_takes_no_memory_whatever_the_size_of_the_buffer(n):
    """The whole buffer is aliased, and nothing temporary is needed: the cost is that of the update."""
    spec, update = jax.ShapeDtypeStruct((n,), jnp.float32), jax.ShapeDtypeStruct((16,), jnp.float32)
    memory = donating(write, spec, update, START).memory_analysis()
    assert (memory.alias_size_in_bytes, memory.temp_size_in_bytes) == (4 * n, 0)


@pytest.mark.parametrize("keep_unused", [False, True])
def test_overwriting_the_whole_buffer_needs_keep_unused(keep_unused):
    """Without it the unused operand is dropped, and the donation with it: no warning, the old array is not deleted."""
    x, value = zeros(), jnp.ones(N)
    program = donating(lambda b, v: v, SPEC, SPEC, keep_unused=keep_unused)
    assert in_place(program, x, value) is keep_unused
    assert x.is_deleted() is keep_unused
    assert not value.is_deleted()


@pytest.mark.parametrize("compiled", [donating, jitted])
def test_donated_identity_keeps_the_address_and_returns_another_object(compiled):
    x = zeros()
    before, y = addresses(x), compiled(identity)(x)
    assert y is not x
    assert x.is_deleted()
    assert addresses(y) == before


@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 4), (3, 0)])
def test_donated_identity_keeps_the_address_of_0_d_and_zero_size_arrays(shape):
    """Each has an address of its own, also where it has no bytes."""
    x, other = zeros(shape), zeros(shape)
    assert addresses(x) != addresses(other)
    assert in_place(donating(identity, jax.ShapeDtypeStruct(shape, jnp.float32)), x)
    assert x.is_deleted()


@cpu_only
@pytest.mark.parametrize(
    "function",
    [identity, lambda b: b * jnp.float32(0), lambda b: lax.dynamic_update_slice(b, b[:8] * jnp.float32(0), (0,))],
    ids=["identity", "whole", "slice"],
)
def test_donated_program_waits_for_a_slow_reader(function):
    """So "donate, then wait" is exclusive ownership: the host may write. Only the reader's `is_ready()` may lag."""
    n = 1 << 16
    program = donating(function, jax.ShapeDtypeStruct((n,), jnp.float32))
    for _ in range(3):
        x = jax.jit(lambda: jnp.ones(n, jnp.float32))().block_until_ready()
        before, reader = addresses(x), slow()(x)
        y = program(x).block_until_ready()
        assert addresses(y) == before
        np.ctypeslib.as_array((ctypes.c_float * n).from_address(before[0]))[:] = -1.0
        np.testing.assert_array_equal(np.asarray(reader), 2_001.0)


@pytest.mark.parametrize(
    ("retype", "kept"),
    [
        (lambda b: lax.bitcast_convert_type(b, jnp.int32).reshape(8, 128), True),
        (lambda b: b.astype(jnp.int32).reshape(4, 256), True),
        (lambda b: b.astype(jnp.float16), False),
        (lambda b: lax.bitcast_convert_type(b, jnp.int16), False),
        (lambda b: jnp.concatenate([b, b]).astype(jnp.float16), False),
    ],
    ids=["bits_to_int32", "values_to_int32", "half_the_bytes", "same_bytes_as_int16", "same_bytes_as_float16"],
)
def test_retyping_in_place_needs_the_same_bytes_and_the_same_item_size(retype, kept):
    x = zeros()
    assert in_place(jitted(retype), x) is kept
    assert x.is_deleted() is kept


def test_start_out_of_range_is_clamped_silently():
    x = jitted(write)(zeros(), np.ones(4, np.float32), np.int32(5_000))
    assert np.flatnonzero(np.asarray(x)).tolist() == [N - 4, N - 3, N - 2, N - 1]


@cpu_only
@pytest.mark.parametrize(("extent", "written"), [(1, 0), (4, 4)])
def test_start_out_of_range_along_a_sharded_axis_drops_a_write_of_extent_1(sharded, extent, written):
    """openxla/xla#49118: dropped where the extent is 1; longer updates are clamped as on one device."""
    x = zeros((128 * len(jax.devices()),), sharding=sharded)
    program = jax.jit(write, donate_argnums=0, out_shardings=sharded)
    y = program(x, np.ones(extent, np.float32), np.int32(1_000_000))
    assert np.count_nonzero(np.asarray(y)) == written


@cpu_only
@pytest.mark.xfail(reason="openxla/xla#49176: where this passes, the rule that it stands for can go", strict=True)
def test_update_operand_may_be_a_slice_of_the_same_buffer():
    """openxla/xla#49176: with a reshape after it, the update reads what it has already overwritten."""
    x = np.arange(128, dtype=np.int32).reshape(8, 16)
    y = jitted(lambda b: lax.dynamic_update_slice(b, b[:-1], (1, 0)).reshape(1, 8, 16))(jnp.array(x))
    np.testing.assert_array_equal(np.asarray(y)[0, 1:], x[:-1])


@cpu_only
def test_reading_and_writing_a_slot_in_one_program_copies_it_twice():
    """jax-ml/jax#25399: out of the slot and back. The address is kept, so only the temporary memory shows it."""

    def swap(buffer, update, start):
        return write(buffer, update, start), lax.dynamic_slice(buffer, (start,), (16,))

    program = donating(swap, SPEC, jax.ShapeDtypeStruct((16,), jnp.float32), START)
    assert program.memory_analysis().temp_size_in_bytes >= 4 * N
    assert program.as_text().count(" copy(") == 2


# ---------------------------------------------------------------------------------------------- donation fails silently
@cpu_only
@pytest.mark.parametrize(
    "view", [np.asarray, np.from_dlpack, lambda x: x.__dlpack__(), jax.dlpack.from_dlpack, memoryview]
)
@pytest.mark.parametrize("compiled", [donating, jitted])
def test_view_that_is_alive_turns_donation_into_a_copy(view, compiled):
    """No warning, and the old array is not even marked deleted. It works again once the view is dropped."""
    x, program = zeros(), compiled(identity)
    alive = view(x)
    assert not in_place(program, x)
    assert not x.is_deleted()
    del alive
    assert in_place(program, x)


@cpu_only
def test_buffer_that_aliases_numpy_memory_is_copied_though_marked_deleted():
    """So preallocate with a jitted `zeros`, never with `device_put`; and `is_deleted()` is no proof of donation."""
    room = np.zeros(4 * N + 64, np.uint8)
    stage = room[-room.ctypes.data % 64 :][: 4 * N].view(np.float32)
    x = jax.device_put(stage)
    assert addresses(x) == [stage.ctypes.data]
    assert not in_place(donating(identity), x)
    assert x.is_deleted()


@pytest.mark.parametrize("compiled", [donating, jitted])
def test_program_traced_under_debug_nans_does_not_donate(compiled):
    """Not even once the flag is off again, a jitted one neither."""
    x = zeros()
    with jax.debug_nans(True):
        program = compiled(identity)
        assert not in_place(program, x)
    assert not in_place(program, x)
    assert not x.is_deleted()


def test_debug_nans_makes_a_compiled_program_raise_on_the_last_tenants_nan_and_lose_the_buffer():
    """The error is none of FloatingPointError, and names neither buffer nor pool."""
    x, program = jax.jit(lambda: jnp.full(N, jnp.nan))(), donating(identity)
    with jax.debug_nans(True), pytest.raises(Exception, match="nan"):
        program(x)
    assert x.is_deleted()


def test_compiled_program_runs_in_place_with_debug_nans_switched_off_around_it():
    x, program = jax.jit(lambda: jnp.full(N, jnp.nan))(), donating(identity)
    with jax.debug_nans(True):
        with jax.debug_nans(False):
            assert in_place(program, x)
        assert jax.config.jax_debug_nans


def test_disable_jit_makes_a_jitted_identity_return_the_very_same_array():
    """The address alone would not show that nothing was donated."""
    x = zeros()
    with jax.disable_jit():
        assert jitted(identity)(x) is x
    assert not x.is_deleted()


def test_disable_jit_makes_a_compiled_program_raise_before_it_donates():
    x, program = zeros(), donating(identity)
    with jax.disable_jit(), pytest.raises(ValueError, match="Disable jit"):
        program(x)
    assert in_place(program, x)


def test_compiled_program_runs_in_place_with_disable_jit_switched_off_around_it():
    x, program = zeros(), donating(identity)
    with jax.disable_jit():
        with jax.disable_jit(False):
            assert in_place(program, x)
        assert jax.config.jax_disable_jit


def test_jitted_program_in_a_trace_does_not_donate():
    x, program = zeros(), jitted(identity)
    jax.jit(lambda t: t + program(x)[0])(jnp.float32(1))
    assert not x.is_deleted()


def test_default_device_moves_an_uncommitted_array_of_a_jitted_program(second_device):
    x, program = zeros(), jitted(identity)
    with jax.default_device(second_device):
        y = program(x)
    assert y.devices() == {second_device}
    assert not x.is_deleted()


def test_jitted_function_that_returns_its_argument_copies_it():
    """Without donation: another object on another buffer, not a second handle."""
    x = zeros()
    for program in (jax.jit(lambda b: b), jax.jit(lambda b: b).lower(SPEC).compile()):
        y = program(x)
        assert y is not x
        assert addresses(y) != addresses(x)


def test_donating_a_buffer_twice_raises():
    """A ValueError in jax 0.10, a RuntimeError in 0.12; and in one call."""
    x, program = zeros(), donating(identity)
    program(x)
    with pytest.raises((ValueError, RuntimeError), match="deleted"):
        program(x)
    x = zeros()
    with pytest.raises((ValueError, RuntimeError), match="donate"):
        jax.jit(lambda a, b: (a, b), donate_argnums=(0, 1))(x, x.addressable_data(0))


def test_error_before_the_run_does_not_lose_the_buffer():
    """A shape error of the trace, or an argument that the compiled program was not made for."""
    x, program = zeros(), donating(write, SPEC, jax.ShapeDtypeStruct((4,), jnp.float32), START)
    with pytest.raises(TypeError):
        jitted(lambda b: b.reshape(3))(x)
    with pytest.raises(TypeError):
        program(x, np.ones(5, np.float32), np.int32(0))
    assert in_place(donating(identity), x)

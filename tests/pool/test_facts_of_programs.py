"""What the pool takes for granted of JAX's compiled programs, without the pool: traces, flags, placement, failures.

Each test is one fact, and needs jax and numpy only. A red one means that this JAX behaves in another way than the pool
was built for. Addresses and counts, never seconds. See also `test_facts_of_donation.py`, `test_facts_of_memory.py`.
"""

import ctypes
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import SingleDeviceSharding

cpu_only = pytest.mark.skipif("jax.default_backend() != 'cpu'", reason="measured on the CPU backend only")

N = 1024
SPEC = jax.ShapeDtypeStruct((N,), jnp.float32)
LARGE = jax.ShapeDtypeStruct((1 << 16,), jnp.float32)
START = jax.ShapeDtypeStruct((), jnp.int32)
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@functools.cache
def zeros_program(n, dtype):
    return jax.jit(lambda: jnp.zeros(n, dtype))


def zeros(n=N, dtype=jnp.float32):
    """A buffer that XLA owns."""
    return zeros_program(n, dtype)()


def address(x):
    return x.unsafe_buffer_pointer()


def identity(spec=SPEC, **options):
    return jax.jit(lambda b: b, donate_argnums=0, **options).lower(spec).compile()


def landing(spec=SPEC, extent=16):
    def write(buffer, update, start):
        return lax.dynamic_update_slice(buffer, update, (start,))

    return jax.jit(write, donate_argnums=0).lower(spec, jax.ShapeDtypeStruct((extent,), spec.dtype), START).compile()


def host_view(x):
    """The bytes of a CPU array."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * x.nbytes).from_address(x.unsafe_buffer_pointer())).view(x.dtype)


@functools.cache
def slow():
    """A compiled program that reads its argument for some 50 ms, in the background, and returns 2001 times it."""
    return jax.jit(lambda b: lax.fori_loop(0, 2_000, lambda _, sum_: sum_ + b, b)).lower(LARGE).compile()


@functools.cache
def failing():
    """A compiled program, not donated, whose callback raises."""

    def callback(_):
        raise RuntimeError("boom")

    return jax.jit(lambda b: jax.pure_callback(callback, LARGE, b)).lower(LARGE).compile()


def failed_later():
    """An array whose computation is dispatched and fails while nobody looks."""
    for _ in range(20):
        try:
            return failing()(slow()(zeros(n=LARGE.size)))
        except RuntimeError:  # its operand was ready at once, on a machine that had paused us: it failed at dispatch
            pass
    raise AssertionError("the callback's failure is always raised at dispatch now")


@pytest.fixture
def settled():
    """A later success takes the place of the failed token, which else each `jax.effects_barrier()` raises again."""
    yield
    spec = jax.ShapeDtypeStruct((), jnp.float32)
    jax.jit(lambda t: jax.pure_callback(lambda t: t, spec, t))(jnp.float32(0)).block_until_ready()
    jax.effects_barrier()


@pytest.fixture
def device():
    return jax.devices()[-1]


@pytest.fixture
def second_device():
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    return jax.devices()[1]


# ----------------------------------------------------------------------------------------------------- traces and flags
@pytest.mark.parametrize(
    "trace",
    [
        lambda f: jax.jit(f)(jnp.float32(1)),
        lambda f: jax.vmap(f)(jnp.ones(3)),
        lambda f: jax.grad(f)(jnp.float32(1)),
        lambda f: jax.eval_shape(f, jnp.float32(1)),
        lambda f: lax.scan(lambda c, t: (c, f(t)), jnp.float32(0), jnp.ones(3)),
    ],
    ids=["jit", "vmap", "grad", "eval_shape", "scan"],
)
@pytest.mark.parametrize("compile_inside", [False, True])
def test_compiled_program_in_a_trace_runs_for_real_and_in_place(trace, compile_inside):
    """Also one that is lowered and compiled inside the trace, and with NumPy arguments."""

    def programs():
        create = jax.jit(lambda: jnp.zeros(N, jnp.float32)).lower().compile()
        return create, landing(extent=4)

    outside, seen = None if compile_inside else programs(), []

    def traced(t):
        create, land = programs() if compile_inside else outside
        x = create()
        before = address(x)
        y = land(x, np.ones(4, np.float32), np.int32(3)).block_until_ready()
        seen.append(address(y) == before and address(y.addressable_data(0)) == before)
        seen.append(np.flatnonzero(np.asarray(y)).tolist() == [3, 4, 5, 6])
        return t * t

    trace(traced)
    assert seen
    assert all(seen)


def test_compiled_program_is_immune_to_later_changes_of_the_configuration(second_device):
    """`default_device`, precision, `enable_x64`, `checking_leaks`, `clear_caches`: still in place, still float32."""
    x, program = zeros(), landing(extent=4)
    before = address(x)
    update, start = np.ones(4, np.float32), np.int32(3)
    for context in (
        jax.default_device(second_device),
        jax.default_matmul_precision("highest"),
        jax.enable_x64(True),
        jax.checking_leaks(),
    ):
        with context:
            x = program(x, update, start)
        assert address(x) == before
    jax.clear_caches()
    x = program(x, update, start)
    assert address(x) == before
    assert x.dtype == jnp.float32


def test_float64_program_still_runs_in_place_with_x64_off():
    """On arrays. A NumPy float64 argument becomes float32 first, and is refused: pass it under `enable_x64`."""
    with jax.enable_x64(True):
        program = landing(jax.ShapeDtypeStruct((N,), jnp.float64), extent=4)
        x, third = zeros(dtype=jnp.float64), jnp.full(4, 1 / 3, jnp.float64)
    before = address(x)
    with jax.enable_x64(False):
        x = program(x, third, np.int32(3))
        assert (x.dtype, address(x)) == (np.float64, before)
        with pytest.raises(TypeError, match="enable_x64"):
            program(x, np.full(4, 1 / 3), np.int32(8))
        with jax.enable_x64(True):
            x = program(x, np.full(4, 1 / 3), np.int32(8))
    assert address(x) == before
    assert np.flatnonzero(np.asarray(x) == 1 / 3).tolist() == [3, 4, 5, 6, 8, 9, 10, 11]


# ---------------------------------------------------------------------------- placement, guards, reports of compilation
def test_program_lowered_under_default_device_yields_uncommitted_arrays_there(device):
    """Also from a donated handle of `addressable_data(0)`, and in place."""
    with jax.default_device(device):
        create = jax.jit(lambda: jnp.zeros(N, jnp.float32)).lower().compile()
        own = identity()
    x = create()
    before, handle = address(x), x.addressable_data(0)
    del x
    y = own(handle)
    assert (handle.committed, y.committed, y.devices(), address(y)) == (False, False, {device}, before)


def test_program_lowered_with_an_output_sharding_yields_committed_arrays_there(device):
    """One lowered without it makes an uncommitted array of a committed one."""
    here = SingleDeviceSharding(device)
    x = jax.jit(lambda: jnp.zeros(N, jnp.float32), out_shardings=here).lower().compile()()
    before = address(x)
    assert x.committed
    y = identity(out_shardings=here)(x.addressable_data(0))
    assert (y.committed, y.devices(), address(y)) == (True, {device}, before)
    y = identity(jax.ShapeDtypeStruct((N,), jnp.float32, sharding=here))(y)
    assert (y.committed, address(y)) == (True, before)
    with jax.default_device(device):
        y = identity()(y)
    assert (y.committed, address(y)) == (False, before)


def test_compiled_program_moves_an_uncommitted_array_of_another_device_and_refuses_a_committed_one(second_device):
    """The move is a silent copy: the old one is not deleted."""
    first = jax.devices()[0]
    with jax.default_device(second_device):
        stray = jax.jit(lambda: jnp.zeros(N, jnp.float32)).lower().compile()()
    with jax.default_device(first):
        program = identity()
    assert program(stray).devices() == {first}
    assert not stray.is_deleted()
    with pytest.raises(ValueError, match="sharding"):
        program(jax.device_put(zeros(), second_device))


def test_default_device_is_thread_local(second_device):
    seen = []
    with jax.default_device(second_device):
        thread = threading.Thread(target=lambda: seen.append(zeros().devices()))
        thread.start()
        thread.join()
        assert zeros().devices() == {second_device}
    assert seen == [{jax.devices()[0]}]


@cpu_only
@pytest.mark.parametrize("level", ["disallow", "disallow_explicit"])
def test_transfer_guard_does_not_touch_donation_handles_waits_and_host_writes(level):
    x, create, own = zeros(), jax.jit(lambda: jnp.zeros(N, jnp.float32)).lower().compile(), identity()
    with jax.transfer_guard(level):
        before = address(x)
        y = own(x).block_until_ready().addressable_data(0)
        np.copyto(host_view(y), np.float32(3))
        assert address(y) == before
        assert np.asarray(y)[0] == 3
        create()


def test_transfer_guard_refuses_a_numpy_argument_before_anything_is_donated():
    """Arrays and scalars alike. `device_put` passes under "disallow", an inner "allow" under both."""
    x, program, update, start = zeros(), landing(), np.ones(16, np.float32), jnp.int32(3)
    before, on_device = address(x), jnp.asarray(update)
    for level in ("disallow", "disallow_explicit"):
        with jax.transfer_guard(level):
            for arguments in ((update, start), (on_device, np.int32(3))):
                with pytest.raises(RuntimeError, match="Disallowed host-to-device"):
                    program(x, *arguments)
            with jax.transfer_guard("allow"):
                x = program(x, update, np.int32(3))
    with jax.transfer_guard("disallow"):
        x = program(x, jax.device_put(update), jax.device_put(np.int32(3)))
    assert address(x) == before


@pytest.fixture
def compiles():
    """(name, thread) of each backend compile."""
    seen = []

    def listen(event, _seconds, **fields):
        if event == COMPILE_EVENT:
            seen.append((fields.get("fun_name"), threading.get_ident()))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def test_compile_is_reported_in_the_compiling_thread_with_the_functions_name(compiles):
    """Once a compile, nothing for a call; ahead of time and jitted."""

    def compiled_by_name(b):
        return b * jnp.float32(5)

    idents = [threading.get_ident()]

    def work():
        idents.append(threading.get_ident())
        program = jax.jit(compiled_by_name).lower(SPEC).compile()
        program(program(np.ones(N, np.float32)))

    jax.jit(compiled_by_name)(np.float32(1))
    jax.jit(compiled_by_name)(np.float32(2))
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    named = [entry for entry in compiles if "compiled_by_name" in str(entry[0])]
    assert named == [("jit(compiled_by_name)", ident) for ident in idents]


def test_hit_in_the_persistent_cache_is_reported_as_a_compile_too(compiles, tmp_path):
    def compiled_to_disk(b):
        return b * jnp.float32(7)

    options = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        for _ in range(2):
            jax.clear_caches()
            jax.jit(compiled_to_disk).lower(SPEC).compile()
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    assert len(list(tmp_path.iterdir())) > 0
    assert [name for name, _ in compiles if "compiled_to_disk" in str(name)] == ["jit(compiled_to_disk)"] * 2


# ------------------------------------------------------------------------------------------------------------- failures
@cpu_only
@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("operand", ["ready", "computing"])
def test_callback_that_raises_loses_the_donated_buffer(operand):
    """Raised at dispatch where the operand is ready, else when awaited, and then the result still shows the address."""

    def callback(_):
        raise RuntimeError("boom")

    program = jax.jit(lambda b: jax.pure_callback(callback, LARGE, b), donate_argnums=0).lower(LARGE).compile()
    for _ in range(20):
        x = zeros(n=LARGE.size).block_until_ready()
        x = x if operand == "ready" else slow()(x)
        before, handle, result = address(x), x.addressable_data(0), None
        with pytest.raises(RuntimeError, match="boom"):
            result = program(x)
            assert address(result) == before
            result.block_until_ready()
        assert x.is_deleted()
        assert handle.is_deleted()
        if (result is None) is (operand == "ready"):
            return
    pytest.fail("the failure shows at another moment now")


@cpu_only
@pytest.mark.usefixtures("settled")
def test_array_whose_computation_failed_is_accepted_at_dispatch_and_fails_when_awaited():
    """Also once the failure is known. Donation consumes it, and its address reads as that of a healthy slot."""
    for known in (False, True):
        x = failed_later()
        before = address(x)
        if known:
            with pytest.raises(RuntimeError, match="boom"):
                x.block_until_ready()
        y = identity(LARGE)(x)
        assert x.is_deleted()
        assert address(y) == before
        with pytest.raises(RuntimeError, match="boom"):
            y.block_until_ready()


@cpu_only
@pytest.mark.usefixtures("settled")
def test_failure_outlives_a_write_over_the_whole_buffer():
    """The slot is lost: it must be replaced, not overwritten."""
    clear = jax.jit(lambda b: jnp.zeros_like(b), donate_argnums=0, keep_unused=True).lower(LARGE).compile()
    with pytest.raises(RuntimeError, match="boom"):
        clear(failed_later()).block_until_ready()


@cpu_only
@pytest.mark.usefixtures("settled")
def test_reader_that_fails_does_not_spoil_the_buffer_that_it_read():
    x, late = zeros(n=LARGE.size), slow()(zeros(n=LARGE.size))
    before = address(x)

    def callback(_):
        raise RuntimeError("boom")

    reader = jax.jit(lambda b, o: jax.pure_callback(callback, LARGE, b + o)).lower(LARGE, LARGE).compile()
    with pytest.raises(RuntimeError, match="boom"):
        failed = reader(x, late)
        y = identity(LARGE)(x).block_until_ready()
        x = y
        failed.block_until_ready()
    assert address(x) == before
    np.testing.assert_array_equal(np.asarray(identity(LARGE)(x)), 0.0)

"""An interrupt at any point of any operation leaves the pool whole: each point is tried, one by one."""

import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import hypothesis
import jax
import numpy as np
import pytest

import arenax
from arenax._compiles import CompileCounter
from arenax._programs import Programs, run_with_host
from arenax.testing import FakeDevice, fail, interrupt

from .operations import OPERATIONS, Bench, Operation, batch, landing_of, read, struck, values, whole

pytestmark = [
    pytest.mark.filterwarnings("ignore:a lease of .* was dropped:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:an array of .* was donated away:RuntimeWarning"),
    pytest.mark.skipif(sys.implementation.name != "cpython", reason="points are CPython's"),
]
# What the pool's code calls in Python counts as its own, but for JAX.
PACKAGES = ("arenax", "arenax_adapters", "contextlib")
# Places of one operation that are tried, each when it is first passed; of more, every second, third, ...
MOST = 100_000 if hypothesis.settings().max_examples > 1000 else 48
ON_DEVICE = ("put_fixed", "put_three_again", "put_ragged", "put_from_device", "put_after_donation", "step_put")
ON_DEVICE += ("step_keep", "lease_life", "lease_detach", "reserve", "convert_in_place", "ahead")
ON_RING = ("put_three_again", "put_ragged", "lease_life")
ON_MESH = ("put_three_again", "put_ragged", "lease_life", "lease_detach")
ON_DEVICES = {"cpu": ON_DEVICE, "ring": ON_RING, "replicated": ON_MESH}


def points(operation: Operation, kind: str, warm: bool, most: int) -> list[int]:
    """The points to try, the last one behind the end."""
    with interrupt(None, packages=PACKAGES) as at:
        operation.run(warmed(operation, kind, warm))
    if len(at.points) < MOST:
        return [*range(1, len(at.points) + 2)]
    firsts = sorted(dict(reversed([(where, n) for n, where in enumerate(at.points, 1)])).values())
    return [*firsts[:: -(-len(firsts) // most)], len(at.points) + 1]


def warmed(operation: Operation, kind: str, warm: bool) -> Bench:
    bench = operation.bench(kind, landing_of(kind))
    if warm and operation.name != "close":
        operation.run(bench)
        bench.seen.clear()
    return bench


def losses(operation: Operation, kind: str, warm: bool, most: int = MOST) -> Iterator[str]:
    for nth in points(operation, kind, warm, most):
        bench = warmed(operation, kind, warm)
        with struck(KeyboardInterrupt) as places:
            with interrupt(nth, packages=PACKAGES) as at:
                operation.run(bench)
        try:
            assert bool(places) == at.fired
            whole(bench, operation)
        except Exception as e:
            yield f"{operation.name} on {kind}, warm {warm}, point {nth} ({at.points[-1]}), {places[-2:]}: {e!r}"
        bench.pool.close()


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_interrupt_leaves_the_pool_whole(name: str, warm: bool) -> None:
    found = [*losses(OPERATIONS[name], "fake", warm)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in ON_DEVICES.items() for name in names])
def test_an_interrupt_leaves_the_pool_on_a_device_whole(kind: str, name: str) -> None:
    found = [*losses(OPERATIONS[name], kind, warm=True)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", ["put_three", "step_put", "lease_life"])
def test_an_interrupt_while_programs_are_compiled_leaves_the_pool_whole(name: str) -> None:
    """A few points only, since each needs programs of its own."""
    operation = OPERATIONS[name]
    with interrupt(None, packages=PACKAGES) as at:
        operation.run(operation.bench("cpu"))
    for nth in range(1, len(at.points), len(at.points) // 8):
        bench = operation.bench("cpu")
        with struck(KeyboardInterrupt):
            with interrupt(nth, packages=PACKAGES):
                operation.run(bench)
        whole(bench, operation)


@pytest.mark.parametrize(("phase", "name"), [("create", "put_three"), ("land", "put_three"), ("land", "step_put")])
def test_an_interrupt_while_a_failure_is_cleaned_up(phase: str, name: str) -> None:
    operation = OPERATIONS[name]
    nth, fired = 0, True
    while fired:
        nth += 1
        bench = warmed(operation, "fake", phase != "create")
        with struck(KeyboardInterrupt, MemoryError):
            with fail(bench.pool, phase, error=MemoryError), interrupt(nth, packages=PACKAGES) as at:
                operation.run(bench)
        fired = at.fired
        whole(bench, operation)
        bench.pool.close()


@pytest.mark.parametrize("call", ["compile", "run_with_host"])
def test_an_interrupt_leaves_no_switch_of_jax_turned(call: str) -> None:
    """JAX's contexts alone would: struck as its `__exit__` begins, one does not go back."""
    config: Any = jax.config
    device = jax.devices()[0]
    programs = Programs(device, jax.sharding.SingleDeviceSharding(device), CompileCounter())
    wide = jax.ShapeDtypeStruct((), np.dtype("int64"))
    program = programs.compile(lambda x: x, (wide,), (0,), False)
    nth, fired = 0, True
    while fired:
        nth += 1
        with struck(KeyboardInterrupt), interrupt(nth, packages=PACKAGES) as at:
            if call == "compile":
                programs.compile(lambda x: x + 1, (wide,), (0,), False)
            else:
                run_with_host(program, np.int64(1))
        fired = at.fired
        switches = (config.jax_enable_x64, config.jax_disable_jit, config.jax_debug_nans, config.jax_default_device)
        assert switches == (False, False, False, None), at.points[-1]
    assert nth > 10


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="POSIX only")
def test_signals_at_random_times_leave_the_pool_whole() -> None:
    rng = random.Random(1)
    pool = arenax.BufferPool(landing_of("cpu"), ragged={"fix": None, "rag": None})
    bench = Bench(pool)
    count = 0
    operations = [OPERATIONS[name].run for name in ("put_three", "step_put", "step_keep", "lease_detach")]
    for run in operations:  # Compiles: JAX turns an interrupt in the middle of that into errors of other kinds.
        run(bench)
    bench.seen.clear()
    armed = False

    def handler(*_: object) -> None:
        if armed:  # It may run late, when the timer is off already.
            raise KeyboardInterrupt

    def run_until_struck(places: list[str]) -> None:
        nonlocal armed
        armed = True
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 5e-3))
        while not places and time.monotonic() < deadline:  # One may strike in a `__del__`, and be ignored.
            rng.choice(operations)(bench)
            bench.seen.clear()
        armed = False

    before = signal.signal(signal.SIGALRM, handler)
    deadline = time.monotonic() + 2
    try:
        while time.monotonic() < deadline:
            # In a function of its own: CPython 3.13 lets one that strikes at the head of a loop slip past a handler.
            with struck(KeyboardInterrupt) as places:
                run_until_struck(places)
            armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            count += bool(places)
            bench.verify()
            bench.seen.clear()
            pool.check()
            assert pool.stats().leased_count == 0
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert count > 20
    whole(bench, OPERATIONS["put_three"])


# What `interrupt` itself promises. ------------------------------------------------------------------------------------


def test_points_are_only_where_cpython_looks() -> None:
    """A lock taken by `with` is always let go of: there is no point between the two."""
    lock, log = threading.Lock(), []

    def body() -> None:
        with lock:
            log.append(1)
            log.append(2)
        with lock:
            return log.append(3)

    names = []
    for nth in range(1, 99):
        log.clear()
        with struck(ZeroDivisionError):
            with interrupt(nth, ZeroDivisionError("here"), packages=(__name__.partition(".")[0],)) as at:
                body()
        assert not lock.locked()
        names.append(len(log))
        if not at.fired:
            break
    assert {1, 2, 3} <= {*names}
    assert names[-1] == 3


def test_an_interrupt_restores_what_it_replaced() -> None:
    trace, handler = sys.gettrace(), signal.getsignal(signal.SIGINT)
    bench = Bench(arenax.BufferPool(FakeDevice(), ragged={"fix": None, "rag": None}))
    for nth in (None, 1, 50, 10_000):
        with struck(KeyboardInterrupt):
            with interrupt(nth) as at:
                bench.see(bench.pool.put(batch(x := values(3)))["fix"][0], x)
        assert at.fired == (nth in (1, 50))
        assert (sys.gettrace(), signal.getsignal(signal.SIGINT)) == (trace, handler)
    assert (read(bench.seen[0].array) == np.asarray(bench.seen[0].expected)).all()


def test_a_point_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="nth must be"):
        interrupt(0)

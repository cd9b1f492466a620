"""A pool in a forked child refuses every use with the reason, never hangs, and lets go of nothing."""

import contextlib
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import arenax
from arenax.testing import FakeDevice

from .conftest import MakePool

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

SECONDS = 20  # Only a child that hangs takes them.
ROWS = np.ones((2, 3), np.float32)


def in_child(body: Callable[[], None]) -> None:
    """Runs `body` in a forked child, and fails with its traceback if it raises, or hangs."""
    report, theirs = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # Kills, whatever the child waits for.
            signal.alarm(SECONDS)
            body()
            status = 0
        except BaseException:
            os.write(theirs, traceback.format_exc().encode())
        finally:
            os._exit(status)
    os.close(theirs)
    with os.fdopen(report, "rb") as pipe:
        text = pipe.read().decode()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code != -signal.SIGALRM, "the child hung"
    assert code == 0, text


def refused(call: Callable[[], Any], home: int) -> None:
    with pytest.raises(arenax.PoolClosed) as caught:
        call()
    text = str(caught.value)
    assert f"made in process {home} and cannot be used in process {os.getpid()}" in text
    assert "does not survive a fork" in text
    assert '"spawn"' in text
    assert caught.value.pool == "p"


def in_another_thread(pool: arenax.BufferPool) -> AbstractContextManager[None]:
    """Another thread is in the critical section of the pool."""
    return staying(pool.arena.snapshot)


def held_by_another_thread(lock: Any) -> AbstractContextManager[None]:
    """Another thread has the lock."""

    def hold(stay: Callable[[], None]) -> None:
        with lock:
            stay()

    return staying(hold)


@contextlib.contextmanager
def staying(call: Callable[[Callable[[], None]], Any]) -> Generator[None]:
    """Another thread stays inside of what `call` calls."""
    inside, done = threading.Event(), threading.Event()

    def stay() -> None:
        inside.set()
        done.wait()

    thread = threading.Thread(target=call, args=(stay,))
    thread.start()
    inside.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()


@pytest.fixture(params=["idle", "locked"])
def at_fork(request: pytest.FixtureRequest) -> Callable[[arenax.BufferPool], AbstractContextManager[None]]:
    """What the pool is doing at the fork: nothing, or something in another thread that has its lock."""
    return in_another_thread if request.param == "locked" else contextlib.nullcontext


USES: dict[str, Callable[[arenax.BufferPool], Any]] = {
    "put": lambda pool: pool.put(ROWS),
    "put of a new shape": lambda pool: pool.put(np.ones((7, 7), np.int8)),
    "put of a tree": lambda pool: pool.put({"a": ROWS, "b": 1.0}, with_sizes=True),
    "step.put": lambda pool: pool.step().__enter__().put(ROWS),
    "step.zeros": lambda pool: pool.step().__enter__().zeros((5,)),
    "lease": lambda pool: pool.lease((2, 3)),
    "lease of a new shape": lambda pool: pool.lease((1, 9), "int8"),
    "reserve": lambda pool: pool.reserve(ROWS),
    "steady": lambda pool: pool.steady().__enter__(),
    "check": lambda pool: pool.check(),
}
OPERATIONS: dict[str, Callable[[arenax.Lease], Any]] = {
    "write": lambda lease: lease.write(ROWS[:1]),
    "write at": lambda lease: lease.write(ROWS[:1, :1], at=(1, 1)),
    "append": lambda lease: lease.append(ROWS[:1]),
    "fill": lambda lease: lease.fill(7),
    "update": lambda lease: lease.update(jnp.negative),
    "detach": lambda lease: lease.detach(),
}


def test_every_use_of_an_inherited_pool_is_refused(make_pool: MakePool, at_fork: Any) -> None:
    pool, home = make_pool(name="p"), os.getpid()
    x = pool.put(ROWS)

    def body() -> None:
        for use in USES.values():
            refused(lambda use=use: use(pool), home)

    with at_fork(pool):
        in_child(body)
    del x
    x = pool.put(ROWS)
    assert (np.asarray(x) == 1).all()
    assert pool.stats().creation_count == 1


def test_every_operation_of_an_inherited_lease_is_refused(make_pool: MakePool, at_fork: Any) -> None:
    pool, home = make_pool(name="p"), os.getpid()

    def body() -> None:
        for operate in OPERATIONS.values():
            refused(lambda operate=operate: operate(lease), home)
        assert (lease.shape, lease.released) == ((2, 3), False)
        lease.release()
        with pytest.raises(arenax.LeaseReleased):
            lease.write(ROWS)

    with pool.lease((2, 3)) as lease:
        lease.write(ROWS)
        with at_fork(pool):
            in_child(body)
        lease.fill(2)
        assert (np.asarray(lease.array) == 2).all()


def test_an_operation_under_way_at_the_fork_blocks_nobody_in_the_child(make_pool: MakePool) -> None:
    pool, home = make_pool(name="p"), os.getpid()

    def body() -> None:
        refused(lambda: lease.write(ROWS), home)
        refused(lambda: step.put(ROWS), home)
        step.__exit__()

    with pool.lease((2, 3)) as lease, pool.step() as step:
        step.put(ROWS)
        with held_by_another_thread(lease._lock), held_by_another_thread(step._lock):
            in_child(body)
        lease.fill(2)
        assert (np.asarray(lease.array) == 2).all()


def test_every_draw_of_an_inherited_step_is_refused(make_pool: MakePool, at_fork: Any) -> None:
    pool, home = make_pool(name="p"), os.getpid()

    def body() -> None:
        refused(lambda: step.put(ROWS), home)
        refused(lambda: step.ones((4,)), home)
        refused(lambda: step.keep(x), home)
        step.__exit__()

    with pool.step() as step:
        x = step.put(ROWS)
        with at_fork(pool):
            in_child(body)
        assert (np.asarray(step.ones((4,))) == 1).all()


def test_the_child_may_read_the_figures_and_close(make_pool: MakePool, at_fork: Any) -> None:
    pool = make_pool(name="p")
    arrays = [pool.put(ROWS), pool.put(ROWS)]
    lease = pool.lease((2, 3))
    in_use = getattr(pool.landing, "bytes_in_use", None)

    def body() -> None:
        with pool, lease, pool.measure() as m:
            assert pool.stats().leased_count == m.stats.peak_leased_count == 3
            where = ", ".join(home.landing.name for home in pool.homes)
            assert repr(pool) == f"<BufferPool 'p' on {where}: closed>"
        arrays.clear()
        pool.close()
        gc.collect()
        assert pool.stats().slot_count == 3
        assert getattr(pool.landing, "bytes_in_use", None) == in_use

    with at_fork(pool):
        in_child(body)
    lease.release()
    assert pool.stats().leased_count == 2


def test_scopes_that_are_open_at_the_fork_end_in_silence(make_pool: MakePool) -> None:
    pool = make_pool(name="p")
    x = pool.put(ROWS)
    del x

    def enter() -> Generator[None]:
        with pool, pool.steady(), pool.measure(), pool.lease((2, 3)), pool.step():
            yield

    scopes = enter()
    next(scopes)
    in_child(scopes.close)

    def body() -> None:
        with pytest.raises(ZeroDivisionError):
            scopes.throw(ZeroDivisionError())

    in_child(body)
    scopes.close()


def test_a_pool_made_in_the_child_is_the_childs_and_is_refused_in_its_child() -> None:
    inherited, parent = arenax.BufferPool(FakeDevice(), name="p"), os.getpid()

    def body() -> None:
        own, child = arenax.BufferPool(FakeDevice(), name="p"), os.getpid()
        assert own.put(ROWS).shape == (2, 3)
        in_child(lambda: refused(lambda: own.put(ROWS), child))
        in_child(lambda: refused(lambda: inherited.put(ROWS), parent))
        own.check()

    in_child(body)
    inherited.check()


def test_pools_that_are_gone_are_not_remembered() -> None:
    from arenax import _fork

    before = len(_fork._homes)
    pools = [arenax.BufferPool(FakeDevice()) for _ in range(3)]
    assert len(_fork._homes) == before + 3
    del pools
    gc.collect()
    assert len(_fork._homes) <= before


def test_nothing_of_an_arena_or_a_landing_is_overlooked() -> None:
    """What is public and can be called refuses, but what a clean-up or a look at the figures needs."""
    pool = arenax.BufferPool(name="p")
    fake = arenax.BufferPool(FakeDevice(), name="p")

    def body() -> None:
        harmless = {"close", "settle", "snapshot", "give_back", "is_whole", "moved", "varieties", "end_recording"}
        for part in (pool.arena, pool.landing, pool.planner, pool.exact_planner, fake.landing):
            names = [n for n in dir(part) if not n.startswith("_") and callable(getattr(part, n))]
            for name in set(names) - harmless:
                with pytest.raises(arenax.PoolClosed):
                    getattr(part, name)()

    in_child(body)


def test_a_worker_of_multiprocessing_ends_in_silence(capfd: pytest.CaptureFixture[str]) -> None:
    pool = arenax.BufferPool(name="p")
    held = [pool.put(ROWS), pool.lease((2, 3))]
    capfd.readouterr()
    worker = multiprocessing.get_context("fork").Process(target=held.clear)
    worker.start()
    worker.join(SECONDS)
    assert worker.exitcode == 0
    assert capfd.readouterr() == ("", "")
    held[1].release()
    del held
    pool.check()


def test_a_child_without_a_backend_exits_in_silence() -> None:
    """With one, JAX's own clean-up crashes at the exit of a forked child, whether or not there is a pool."""
    code = """
import os, sys, warnings
import arenax, numpy as np
from arenax.testing import FakeDevice
warnings.simplefilter("ignore")
pool = arenax.BufferPool(FakeDevice())
held = [pool.put(np.ones(3)), pool.lease((3,))]
child = os.fork()
if child:
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    held[1].release()
    pool.check()
    sys.exit(status)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_fork_in_the_middle_of_other_threads_work(make_pool: MakePool) -> None:
    pool, home, stop = make_pool(name="p"), os.getpid(), threading.Event()

    def work() -> None:
        while not stop.is_set():
            with pool.step() as step:
                step.put({"a": ROWS, "b": np.ones(5, np.int8)})

    def body() -> None:
        for use in USES.values():
            refused(lambda use=use: use(pool), home)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(8):
            in_child(body)
    finally:
        stop.set()
        for thread in threads:
            thread.join()

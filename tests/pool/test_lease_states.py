"""The states of a lease: each call in each state does what the class docstring's table says."""

import gc
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import arenax
from arenax.testing import FakeDevice

from .conftest import MakePool

OPERATIONS: dict[str, Callable[[arenax.Lease], Any]] = {
    "array": lambda lease: lease.array,
    "write": lambda lease: lease.write(np.ones(1, np.float32)),
    "append": lambda lease: lease.append(np.ones(1, np.float32)),
    "fill": lambda lease: lease.fill(2),
    "update": lambda lease: lease.update(_same),
    "release": lambda lease: lease.release(),
    "detach": lambda lease: lease.detach(),
}
STATES = ("open", "busy", "released", "detached")
ERRORS = {"LeaseReleased": arenax.LeaseReleased, "RuntimeError": RuntimeError}


def _same(slot: Any) -> Any:
    return slot


def read_table() -> dict[tuple[str, str], str]:
    """The table of the class docstring: what it says of each operation in each state."""
    lines = [line.strip() for line in (arenax.Lease.__doc__ or "").splitlines()]
    start = next(i for i, line in enumerate(lines) if line.startswith("state "))
    rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines[start : start + 5]]
    heads = rows[0][1:]
    return {
        (row[0], operation): cell
        for row in rows[1:]
        for head, cell in zip(heads, row[1:], strict=True)
        for operation in head.split(", ")
    }


TABLE = read_table()


def state_of(lease: arenax.Lease) -> str:
    return "busy" if lease._busy else lease._end or "open"


def in_state(pool: arenax.BufferPool, state: str) -> arenax.Lease:
    lease = pool.lease((4,))
    if state == "released":
        lease.release()
    elif state == "detached":
        lease.detach()
    return lease


def test_the_table_tells_of_every_operation_in_every_state() -> None:
    assert set(TABLE) == {(state, operation) for state in STATES for operation in OPERATIONS}


@pytest.mark.parametrize(("state", "operation"), TABLE)
def test_a_lease_does_what_the_table_says(make_pool: MakePool, state: str, operation: str) -> None:
    pool = make_pool()
    lease = in_state(pool, state)
    tenant = None if state in ("open", "busy") else pool.lease((4,), fill=7)
    says = TABLE[state, operation]
    seen: list[str] = []

    def call(slot: Any = None) -> Any:
        seen.append(state_of(lease))
        before = pool.stats()
        if says in ERRORS:
            with pytest.raises(ERRORS[says]) as error:
                OPERATIONS[operation](lease)
            assert isinstance(error.value, arenax.LeaseReleased) == (says == "LeaseReleased")
            assert pool.stats() == before
        else:
            OPERATIONS[operation](lease)
        seen.append(state_of(lease))
        return slot

    if state == "busy":
        lease.update(call)
        expected = ["busy", "busy", "open"]
    else:
        call()
        expected = [state, {"read": state}.get(says, state if says in ERRORS else says.split("then ")[-1])]
        expected.append(expected[-1])
    assert [*seen, state_of(lease)] == expected
    assert lease.released == (expected[-1] not in ("open", "busy"))
    if tenant is not None:
        np.testing.assert_array_equal(tenant.array, [7, 7, 7, 7])
        assert pool.stats().leased_count == 1
        tenant.release()
    if not lease.released:
        lease.release()
    assert pool.stats().leased_count == 0


@pytest.mark.parametrize("state", ["open", "released", "detached"])
def test_the_end_of_a_with_releases_what_is_open_and_leaves_the_rest(make_pool: MakePool, state: str) -> None:
    pool = make_pool()
    with in_state(pool, state) as lease:
        pass
    assert lease.released
    assert state_of(lease) == ("released" if state == "open" else state)
    assert repr(lease).endswith(f"{state_of(lease)}>")


@pytest.mark.parametrize("operation", ["write", "append", "fill", "update", "detach"])
def test_an_operation_that_fails_leaves_the_lease_open(
    make_pool: MakePool, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool()
    with pool.lease((4,), fill=3) as lease:
        with monkeypatch.context() as patch:
            for name in ("write", "fill", "update", "create"):
                patch.setattr(pool.landing, name, _fail)
            with pytest.raises(ZeroDivisionError):
                OPERATIONS[operation](lease)
        assert state_of(lease) == "open"
        np.testing.assert_array_equal(lease.array, [3, 3, 3, 3])
        lease.fill(4)
        np.testing.assert_array_equal(lease.array, [4, 4, 4, 4])


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


def test_of_two_threads_that_release_at_once_one_is_told(make_fake: MakePool) -> None:
    pool = make_fake()
    for _ in range(50):
        lease = pool.lease((4,))
        start, refused = threading.Barrier(2), []

        def release(lease: arenax.Lease = lease, start: Any = start, refused: list[Any] = refused) -> None:
            start.wait(30)
            try:
                lease.release()
            except arenax.LeaseReleased as e:
                refused.append(e)

        threads = [threading.Thread(target=release) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(refused) == 1
        with pool.lease((4,)) as tenant:
            assert pool.stats().leased_count == 1
            assert not tenant.released
    assert pool.stats().slot_count == 1


def test_an_interrupt_in_a_release_leaves_the_lease_on_loan_or_returned(make_fake: MakePool) -> None:
    pool = make_fake()
    lines = 0
    for stop in range(1, 40):
        lease = pool.lease((4,))
        left = stop

        def trace(frame: Any, event: str, arg: Any) -> Any:
            nonlocal left
            if frame.f_code is not arenax.Lease.release.__code__:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                left -= 1
                if left == 0:
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            lease.release()
        except KeyboardInterrupt:
            lines += 1
        finally:
            sys.settrace(before)
        assert lease.released == (pool.stats().leased_count == 0)
        if lease.released:
            with pytest.raises(arenax.LeaseReleased):
                lease.fill(1)
        else:
            lease.fill(1)
            lease.release()
    assert lines > 10
    assert pool.stats().slot_count == 1


def test_use_after_the_return_says_what_it_was_and_how_long_ago(make_fake: MakePool) -> None:
    pool = make_fake()
    lease = pool.lease((4,))
    lease.release()
    lease._ended -= 90
    lease._site = None  # It may have been sampled.
    with pytest.raises(
        arenax.LeaseReleased, match=r"^write on a lease of float32\[4\] that was released 90 s ago: "
    ) as e:
        lease.write(np.ones(4, np.float32))
    assert (e.value.size_class, e.value.call_site) == ("float32[4]", None)
    assert 90 <= e.value.released_seconds < 120
    again = pickle.loads(pickle.dumps(e.value))
    assert (str(again), vars(again)) == (str(e.value), vars(e.value))
    lease = pool.lease((4,))
    lease.detach()
    with pytest.raises(arenax.LeaseReleased, match=r"that was detached .* s ago"):
        lease.detach()


def test_a_dropped_lease_comes_back_and_is_warned_of(make_pool: MakePool) -> None:
    pool = make_pool()
    lease = pool.lease((4,))
    with pytest.warns(ResourceWarning, match=r"float32\[4\].* was dropped and not released") as warned:
        del lease
    assert warned[0].filename == __file__
    assert pool.stats().leased_count == 0
    assert pool.stats().slot_count == 1


def test_a_dropped_lease_that_had_spilled_is_warned_of_too(make_pool: MakePool) -> None:
    pool = make_pool(on_exhausted="spill")
    with pytest.warns(RuntimeWarning, match="fresh array"):
        lease = pool.lease((4,))
    with pytest.warns(ResourceWarning, match="dropped"):
        del lease


@pytest.mark.parametrize("how", ["with", "release", "detach", "closed", "failed fill", "exhausted"])
def test_there_is_no_warning_of_a_lease_that_was_not_forgotten(how: str) -> None:
    pool = arenax.BufferPool(FakeDevice(), on_exhausted="raise" if how == "exhausted" else "grow")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if how == "exhausted":
            with pytest.raises(arenax.PoolExhausted):
                pool.lease((4,))
        elif how == "failed fill":
            pool.landing.fill = _fail
            with pytest.raises(ZeroDivisionError):
                pool.lease((4,))
        else:
            lease = pool.lease((4,))
            if how == "with":
                with lease:
                    pass
            elif how == "closed":
                pool.close()
            else:
                OPERATIONS[how](lease)
            del lease
        gc.collect()
    assert not warned
    pool.close()


def test_the_warning_takes_no_lock_and_may_come_while_the_arena_is_locked(make_fake: MakePool) -> None:
    pool = make_fake()
    cycle: list[Any] = [[pool.lease((4,))]]
    cycle[0].append(cycle[0])

    def read() -> int:  # Runs under the lock.
        cycle.clear()
        return gc.collect()

    with pytest.warns(ResourceWarning, match="dropped"):
        pool.arena.snapshot(read)
    assert pool.stats().leased_count == 0


def test_where_warnings_are_errors_the_slot_comes_back_all_the_same(
    make_fake: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_fake()
    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda hook: seen.append(hook.exc_type))
    lease = pool.lease((4,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del lease
    assert seen == [ResourceWarning]
    assert pool.stats().leased_count == 0


def test_the_exit_of_the_interpreter_is_silent() -> None:
    program = """if True:
        import arenax
        from arenax.testing import FakeDevice
        pool = arenax.BufferPool(FakeDevice())
        lease = pool.lease((4,))
        cycle = [pool.lease((4,))]
        cycle.append(cycle)
        class Kept: pass
        arenax.kept = Kept()
        arenax.kept.lease = pool.lease((4,))
    """
    run = [sys.executable, "-X", "dev", "-W", "ignore", "-W", "always::ResourceWarning", "-c", program]
    result = subprocess.run(run, capture_output=True, text=True, timeout=100)
    assert (result.returncode, result.stderr) == (0, "")

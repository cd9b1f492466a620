"""Tracing of leases: which ones note their lines, what the lines are, and that it ends."""

import sys
import threading
import warnings
from typing import Any

import numpy as np
import pytest

import arenax
import arenax._trace_leases as trace
from arenax._call_site import call_site
from arenax.testing import FakeDevice
from arenax_adapters.prefetch import prefetch

from .conftest import MakePool


def here() -> str:
    """``file:line`` of the line that calls this."""
    frame = sys._getframe(1)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@pytest.fixture(autouse=True)
def _no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases are traced by the scope alone, unless a test says otherwise."""
    sampled = iter(lambda: False, None)
    monkeypatch.setattr(trace, "_sampled", sampled)
    monkeypatch.setattr(trace, "turns", sampled)


def warning_of(lease: list[arenax.Lease]) -> str:
    """The warning that comes when the list, which holds the last reference, is cleared."""
    with pytest.warns(ResourceWarning) as warned:
        lease.clear()
    return str(warned[0].message)


def test_a_traced_lease_that_is_dropped_names_the_line_that_made_it(make_pool: MakePool) -> None:
    pool = make_pool()
    with arenax.trace_leases():
        held, line = [pool.lease((4,))], here()
    assert f"it was made at {line}" in warning_of(held)


def test_an_untraced_one_says_how_to_find_out(make_pool: MakePool) -> None:
    pool = make_pool()
    says = warning_of([pool.lease((4,))])
    assert "with arenax.trace_leases()" in says
    assert ".py" not in says


@pytest.mark.parametrize("end", ["release", "detach", "with"])
def test_use_after_the_return_names_the_line_of_the_return(make_pool: MakePool, end: str) -> None:
    pool = make_pool()
    with arenax.trace_leases():
        lease = pool.lease((4,))
    if end == "with":
        with lease: line = here()  # fmt: skip # noqa: E701
    else:
        getattr(lease, end)(); line = here()  # fmt: skip # noqa: E702
    with pytest.raises(arenax.LeaseReleased) as error:
        lease.write(np.ones(4, np.float32))
    assert error.value.call_site == line
    assert f" s ago at {line}: check out" in str(error.value)


def test_an_untraced_return_names_no_line(make_pool: MakePool) -> None:
    lease = make_pool().lease((4,))
    with arenax.trace_leases():
        lease.release()
    with pytest.raises(arenax.LeaseReleased) as error:
        lease.release()
    assert error.value.call_site is None


def test_scopes_nest_and_overlap_and_tracing_lasts_as_long_as_one_of_them() -> None:
    first, second = arenax.trace_leases(), arenax.trace_leases()
    assert not trace.enabled
    for change, enabled in [
        (first.__enter__, True),
        (second.__enter__, True),
        (lambda: first.__exit__(None, None, None), True),
        (lambda: second.__exit__(None, None, None), False),
    ]:
        change()
        assert trace.enabled is enabled
        assert next(trace.turns) is enabled
    with pytest.raises(ZeroDivisionError), arenax.trace_leases():
        raise ZeroDivisionError
    assert not trace.enabled


def test_it_is_of_all_threads_and_any_number_of_them_may_open_it(make_fake: MakePool) -> None:
    pool = make_fake()
    start = threading.Barrier(8)
    failed: list[int] = []

    def work() -> None:
        start.wait(30)
        for _ in range(200):
            with arenax.trace_leases(), pool.lease((4,)) as lease:
                if lease._site is None or not trace.enabled:
                    failed.append(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert not trace.enabled


def test_one_lease_in_so_many_is_traced_without_a_scope(make_fake: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    pool = make_fake()
    n = trace.SAMPLE_EVERY
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(3 * n):
            pool.lease((4,))
    assert sum(__file__ in str(w.message) for w in warned) == 3
    # In a loop with two leases a round, each has its turn.
    lines: set[Any] = set()
    for _ in range(2 * n):
        with pool.lease((4,)) as a:
            lines.add(a._site)
        with pool.lease((4,)) as b:
            lines.add(b._site)
    assert len(lines - {None}) == 2


def test_the_line_is_looked_for_only_where_the_lease_is_traced(
    make_fake: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_fake()
    monkeypatch.setattr("arenax._lease.call_site", lambda: pytest.fail("looked for"))
    with pool.lease((4,)):
        pass


def test_a_thread_that_lands_ahead_blames_the_line_that_called_prefetch(make_fake: MakePool) -> None:
    pool = make_fake()
    batches = [np.ones(3, np.float32)]
    with pool.steady():
        ahead, line = prefetch(batches, pool), here()
        with pytest.raises(arenax.NotSteady) as error:
            next(ahead)
    assert (error.value.cause, error.value.call_site) == ("creation", line)


def test_the_iterables_own_lines_go_before_that(make_fake: MakePool) -> None:
    pool = make_fake()
    lines: list[str] = []

    def batches() -> Any:
        with arenax.trace_leases():
            lease = pool.lease((4,)); lines.append(here())  # fmt: skip # noqa: E702
        lines.append(str(lease._site))
        lease.release()
        yield np.ones(3, np.float32)

    with prefetch(batches(), pool) as ahead:
        next(ahead)
    assert lines[0] == lines[1]


def test_a_thread_without_a_line_of_the_users_is_blamed_on_threading() -> None:
    lines: list[str] = []
    look = eval("lambda: lines.append(call_site())", {"__name__": "arenax", "call_site": call_site, "lines": lines})
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert "threading.py:" in lines[0]


def test_a_lease_of_the_sample_is_named_among_the_holders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "turns", iter([False, True]))
    with arenax.BufferPool(FakeDevice(), on_exhausted="raise") as pool:
        pool.reserve(arenax.ArraySpec((4,), "float32"), slots=2)
        with pool.lease((4,)), pool.lease((4,)), pytest.raises(arenax.PoolExhausted) as error:
            pool.put(np.zeros(4, np.float32))
        assert [__file__ in text for text in error.value.oldest] == [False, True]

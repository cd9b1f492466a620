"""How `prefetch` ends when it is closed or dropped: at once, from anywhere, and with nothing left."""

import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from arenax_adapters.prefetch import Prefetcher, prefetch
from tests.adapters.conftest import MakePool, assert_nothing_left, prefetch_threads
from tests.adapters.gates import SECONDS, SPEC, Source, batch_of, number, waiting


def test_leaving_the_with_statement_early(make_pool: MakePool):
    pool, source = make_pool(), Source()
    with prefetch(source, pool, size=3) as ahead:
        for batch in ahead:
            if number(batch) == 4:
                break
        del batch
    assert_nothing_left(pool)
    assert source.closed_by == source.opened_by
    assert source.closed_by != [threading.current_thread()]
    assert list(ahead) == []
    ahead.close()


def test_dropping(make_pool: MakePool):
    pool, source = make_pool(), Source()
    ahead = prefetch(source, pool, size=3)
    assert number(next(ahead)) == 0
    del ahead
    assert_nothing_left(pool)
    assert source.closed_by == source.opened_by


def test_breaking_out_of_a_loop_drops(make_pool: MakePool):
    pool = make_pool()
    for batch in prefetch(Source(), pool):
        assert number(batch) == 0
        break
    del batch
    assert_nothing_left(pool)


def test_dropping_in_a_cycle(make_pool: MakePool):
    pool = make_pool()
    cycle: list[Any] = [prefetch(Source(), pool)]
    assert number(next(cycle[0])) == 0
    cycle.append(cycle)
    del cycle
    assert len(prefetch_threads()) == 1
    gc.collect()
    assert_nothing_left(pool)


def test_closing_at_the_end_changes_nothing(make_pool: MakePool):
    pool = make_pool()
    with prefetch([batch_of(0)], pool) as ahead:
        assert [number(b) for b in ahead] == [0]
        assert prefetch_threads() == []
    ahead.close()
    assert_nothing_left(pool)


@pytest.mark.parametrize("end", ["close", "drop"])
def test_while_the_thread_waits_for_a_slot(make_pool: MakePool, end: str):
    pool, source = make_pool(on_exhausted="wait"), Source(hold=0)
    pool.reserve(SPEC, slots=2)
    ahead, held = waiting(pool, source)
    if end == "close":
        ahead.close()
        assert list(ahead) == []
    del ahead
    assert prefetch_threads() == []
    assert pool.stats().leased_count == len(held)
    held.clear()
    assert_nothing_left(pool)
    assert source.closed_by == source.opened_by


def test_closing_while_the_iterable_runs_waits_for_it(make_pool: MakePool):
    pool, source = make_pool(), Source(hold=2)
    ahead = prefetch(source, pool, size=5)
    assert source.holding.wait(SECONDS)
    discarded = threading.Event()
    discard = ahead._feed.discard
    ahead._feed.discard = lambda: (discard(), discarded.set())
    closing = threading.Thread(target=ahead.close)
    closing.start()
    assert discarded.wait(SECONDS)
    assert pool.stats().leased_count == 0  # What was landed need not wait for the iterable.
    closing.join(0.05)
    assert closing.is_alive()
    source.go.set()
    closing.join(SECONDS)
    assert_nothing_left(pool)
    assert source.closed_by == source.opened_by


def test_dropping_while_the_iterable_blocks_gives_the_leases_back_now(make_pool: MakePool, no_grace: None):
    pool, source = make_pool(), Source(hold=2)
    ahead = prefetch(source, pool, size=5)
    assert source.holding.wait(SECONDS)
    assert pool.stats().leased_count == 2
    del ahead
    assert pool.stats().leased_count == 0
    (thread,) = prefetch_threads()
    source.go.set()
    thread.join(SECONDS)
    assert_nothing_left(pool)


def test_a_batch_that_lands_after_the_drop_goes_back(make_pool: MakePool, no_grace: None):
    # The thread has asked whether it shall go on, and then hands over what nobody will take.
    pool = make_pool()
    ahead = prefetch(source := Source(hold=1), pool)
    assert source.holding.wait(SECONDS)
    feed, (thread,) = ahead._feed, prefetch_threads()
    put, in_put, go = pool.put, threading.Event(), threading.Event()

    def gated(*args: Any, **options: Any) -> Any:
        in_put.set()
        assert go.wait(SECONDS)
        return put(*args, **options)

    pool.put = gated
    source.go.set()
    assert in_put.wait(SECONDS)
    del ahead
    go.set()
    thread.join(SECONDS)
    assert_nothing_left(pool)
    assert feed.closed  # And is alive: it was not its end that freed the batch.


@pytest.mark.parametrize("state", ["idle", "waiting"])
def test_a_collection_under_the_arenas_lock(make_pool: MakePool, no_grace: None, state: str):
    # A collector may run wherever something is allocated: what it finalizes must not ask for a lock.
    pool, source = make_pool(on_exhausted="wait"), Source(hold=0)
    pool.reserve(SPEC, slots=3)
    held: list[Any] = []
    if state == "waiting":
        ahead, held = waiting(pool, source)
    else:
        ahead = prefetch(Source(), pool)
        assert number(next(ahead)) == 0
    box = [ahead]
    del ahead
    pool.arena.snapshot(box.clear)
    for thread in prefetch_threads():
        thread.join(SECONDS)
    held.clear()
    assert_nothing_left(pool)


def test_a_collection_under_the_feeds_own_lock(make_pool: MakePool, no_grace: None):
    pool = make_pool()
    ahead = prefetch(Source(), pool)
    assert number(next(ahead)) == 0
    feed = ahead._feed
    with feed._lock:
        del ahead
    for thread in prefetch_threads():
        thread.join(SECONDS)
    del feed
    assert_nothing_left(pool)


def test_a_collection_in_the_thread_itself(make_pool: MakePool):
    pool, source = make_pool(), Source(hold=1)
    cycle: list[Any] = [prefetch(source, pool, size=5)]
    cycle.append(cycle)
    assert source.holding.wait(SECONDS)
    (thread,) = prefetch_threads()
    source.hold = 2
    source.before_holding = gc.collect
    source.holding.clear()
    del cycle
    source.go.set()
    thread.join(SECONDS)
    assert_nothing_left(pool)


def test_the_iterable_may_close_its_own_consumer(make_pool: MakePool):
    pool = make_pool()
    box: list[Prefetcher] = []
    made, closed = threading.Event(), threading.Event()

    def closing() -> Iterator[np.ndarray]:
        assert made.wait(SECONDS)
        box[0].close()
        closed.set()
        yield batch_of(0)

    box.append(prefetch(closing(), pool))
    (thread,) = prefetch_threads()
    made.set()
    thread.join(SECONDS)
    assert closed.is_set()
    assert list(box[0]) == []
    assert_nothing_left(pool)


def test_a_thread_that_cannot_start_leaves_nothing(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    pool, source = make_pool(), Source()
    with pytest.raises(RuntimeError, match="can't start"):
        prefetch(source, pool)
    assert source.opened_by == []
    assert_nothing_left(pool)

"""Interrupts, several consumers, and the end of the interpreter. Races are forced by events, never by sleeping."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import arenax
from arenax_adapters.prefetch import prefetch
from tests.adapters.conftest import MakePool, assert_nothing_left, prefetch_threads
from tests.adapters.gates import SECONDS, SPEC, Source, at_a_wait, batch_of, in_thread, number, waiting, when_blocked


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Interrupts the main thread once, from another one.

    The signal is sent until it is noticed: where it arrives just before a wait begins, CPython goes to sleep on it.
    """
    noticed = threading.Event()

    def handler(*_: object) -> None:
        if not noticed.is_set():
            noticed.set()
            raise KeyboardInterrupt

    def send() -> None:
        while not noticed.is_set():
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            noticed.wait(0.01)

    before = signal.signal(signal.SIGINT, handler)
    yield send
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_of_a_consumer_whose_iterable_blocks(
    make_pool: MakePool, no_grace: None, interrupt: Callable[[], None]
):
    pool, made = make_pool(), threading.Event()
    blocked: list[threading.Event] = []

    def interrupt_when_blocked() -> None:
        assert made.wait(SECONDS)
        assert blocked[0].wait(SECONDS)
        interrupt()

    source = Source(hold=0, before_holding=interrupt_when_blocked)
    ahead = prefetch(source, pool)
    blocked.append(when_blocked(ahead))
    made.set()
    with pytest.raises(KeyboardInterrupt):
        next(ahead)
    assert pool.stats().leased_count == 0
    assert list(ahead) == []
    (thread,) = prefetch_threads()
    source.go.set()
    thread.join(SECONDS)
    assert_nothing_left(pool)
    assert source.closed_by == source.opened_by


def test_an_interrupt_sends_other_consumers_away(make_pool: MakePool, no_grace: None, interrupt: Callable[[], None]):
    pool, source = make_pool(), Source(hold=0)
    ahead = prefetch(source, pool)
    blocked = when_blocked(ahead)
    other = in_thread(lambda: list(ahead))
    assert blocked.wait(SECONDS)
    blocked = when_blocked(ahead)
    helper = in_thread(lambda: (blocked.wait(SECONDS), interrupt()))
    with pytest.raises(KeyboardInterrupt):
        next(ahead)
    other.join(SECONDS)  # Though the iterable still blocks.
    assert not other.is_alive()
    source.go.set()
    helper.join(SECONDS)
    ahead.close()
    assert_nothing_left(pool)


@pytest.mark.parametrize("where", ["under the lock", "blocked"])
def test_an_interrupt_of_a_consumer_whose_thread_waits_for_a_slot(
    make_pool: MakePool, interrupt: Callable[[], None], where: str
):
    pool, source = make_pool(on_exhausted="wait"), Source(hold=0)
    pool.reserve(SPEC, slots=2)
    ahead, held = waiting(pool, source)
    if where == "under the lock":
        when_blocked(ahead, interrupt)
    else:
        blocked = when_blocked(ahead)
        in_thread(lambda: (blocked.wait(SECONDS), interrupt()))
    with pytest.raises(KeyboardInterrupt):
        next(ahead)
    assert prefetch_threads() == []
    held.clear()
    assert_nothing_left(pool)


def test_an_interrupt_that_comes_with_the_batch(make_pool: MakePool):
    # The traceback is alive, and must not keep the batch.
    pool, source = make_pool(), Source(hold=0)
    ahead = prefetch(source, pool, size=1)
    put = ahead._feed._taken.put

    class Interrupting:
        get = ahead._feed._taken.get

        def put(self, item: None) -> None:
            put(item)
            if threading.current_thread() is threading.main_thread() and not ahead._feed.closed:
                raise KeyboardInterrupt  # As a signal handler does, which runs wherever it likes.

    ahead._feed._taken = Interrupting()
    source.go.set()
    with pytest.raises(KeyboardInterrupt) as caught:
        next(ahead)
    assert caught.tb is not None
    assert_nothing_left(pool)


# Several consumers. ---------------------------------------------------------------------------------------------------


def test_two_consumers_get_each_batch_once(make_pool: MakePool):
    pool = make_pool(on_exhausted="wait")
    pool.reserve(SPEC, slots=4)
    ahead = prefetch((batch_of(i) for i in range(400)), pool)
    seen: list[int] = []

    def consume() -> None:
        seen.extend(number(batch) for batch in ahead)

    consumers = [in_thread(consume) for _ in range(2)]
    for consumer in consumers:
        consumer.join(SECONDS)
    assert sorted(seen) == list(range(400))
    assert_nothing_left(pool)


def test_closing_sends_a_blocked_consumer_away(make_pool: MakePool, no_grace: None):
    pool, source = make_pool(), Source(hold=0)
    ahead = prefetch(source, pool)
    blocked = when_blocked(ahead)
    got: list[Any] = []
    consumer = in_thread(lambda: got.extend(ahead))
    assert blocked.wait(SECONDS)
    closing = in_thread(ahead.close)
    consumer.join(SECONDS)  # Though the iterable still blocks.
    assert not consumer.is_alive()
    assert closing.is_alive()
    source.go.set()
    closing.join(SECONDS)
    assert got == []
    assert_nothing_left(pool)


def test_a_consumer_waits_where_another_may_yet_return_a_slot(make_pool: MakePool):
    pool, source = make_pool(on_exhausted="wait"), Source(hold=0)
    pool.reserve(SPEC, slots=2)
    ahead = prefetch(source, pool)
    reached = at_a_wait(pool)
    may_drop = threading.Event()
    took = threading.Event()

    def other() -> None:
        batch = next(ahead)
        took.set()
        assert may_drop.wait(SECONDS)
        del batch

    class Watched(type(ahead._feed._blocked)):
        def append(self, item: Any) -> None:
            super().append(item)
            if item[0] is threading.main_thread():
                watched.set()

    watched = threading.Event()
    source.go.set()
    consumer = in_thread(other)
    assert took.wait(SECONDS)
    held = next(ahead)
    assert reached.wait(SECONDS)  # Both slots are with the two consumers, and the thread waits for one.
    ahead._feed._blocked = Watched()

    def drop_when_blocked() -> None:
        assert watched.wait(SECONDS)
        with ahead._feed._lock:  # He has decided whether he starves.
            may_drop.set()

    helper = in_thread(drop_when_blocked)
    assert number(next(ahead)) == 2
    for thread in (consumer, helper):
        thread.join(SECONDS)
    ahead.close()
    del held
    assert_nothing_left(pool)


def test_two_consumers_that_hold_every_slot_are_told(make_pool: MakePool):
    pool = make_pool(on_exhausted="wait")
    pool.reserve(SPEC, slots=2)
    ahead = prefetch(Source(), pool)
    both = threading.Barrier(2, timeout=SECONDS)
    ends: list[str] = []

    def greedy() -> None:
        held = [next(ahead)]
        both.wait()
        try:
            held.append(next(ahead))
        except (arenax.PoolExhausted, StopIteration) as end:
            ends.append(type(end).__name__)
        held.clear()
        both.wait()

    consumers = [in_thread(greedy) for _ in range(2)]
    for consumer in consumers:
        consumer.join(SECONDS)
    assert sorted(ends) == ["PoolExhausted", "StopIteration"]
    assert_nothing_left(pool)


def test_a_consumer_that_is_slow_to_wake_up_does_not_starve(make_pool: MakePool):
    # Batch 1 is handed over to a blocked consumer who holds batch 0; before he is awake, the thread asks for a third.
    pool, source = make_pool(on_exhausted="wait"), Source(hold=1)
    pool.reserve(SPEC, slots=2)
    ahead = prefetch(source, pool)
    starving: list[bool] = []
    reached = at_a_wait(pool, lambda: starving.append(ahead._feed.token.starving))
    when_blocked(ahead, source.go.set)
    held = [next(ahead)]
    held.append(next(ahead))
    assert reached.wait(SECONDS)
    assert starving == [False]
    held.clear()
    assert number(next(ahead)) == 2
    ahead.close()
    assert_nothing_left(pool)


# The end of the interpreter. ------------------------------------------------------------------------------------------

PROGRAM = """
import itertools, threading
import numpy as np
import arenax
from arenax_adapters.prefetch import prefetch

def blocked():
    yield np.zeros((256, 256), np.float32)
    threading.Event().wait()

def running():
    while True:
        yield np.zeros((256, 256), np.float32)

pool = arenax.BufferPool(on_exhausted="wait")
pool.reserve(np.zeros((256, 256), np.float32), slots=3)
ahead = prefetch({iterable}, pool, size={size})
kept = [next(ahead)]
{last}
"""


@pytest.mark.parametrize(
    ("iterable", "size", "last"),
    [
        ("running()", 2, ""),
        ("running()", 9, ""),  # The thread waits for a slot.
        ("blocked()", 2, ""),
        # Not with a daemon thread of the user's own that still takes batches: CPython ends it at exit wherever it is,
        # and where that is in C++, the process aborts (python/cpython#87135). Ours is stopped first.
    ],
)
def test_the_interpreter_exits_in_silence(iterable: str, size: int, last: str):
    program = PROGRAM.format(iterable=iterable, size=size, last=last)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

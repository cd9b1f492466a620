"""How `prefetch` ends: at once, from anywhere, and with nothing left. Races are forced by events, never by sleeping."""

import gc
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import arenax
from arenax_adapters import prefetch as module
from arenax_adapters.prefetch import Prefetcher, prefetch
from tests.adapters.conftest import MakePool, assert_nothing_left, prefetch_threads

SPEC = arenax.ArraySpec((4,), "int32")
SECONDS = 60  # No wait of a test that passes comes near it.


def batch_of(i: int) -> np.ndarray:
    return np.full((4,), i, np.int32)


def number(batch: Any) -> int:
    (value,) = set(np.array(batch))
    return int(value)


class Source:
    """Batches without end; `hold` makes the iterable block before one of them until `go` is set."""

    def __init__(self, hold: int | None = None, before_holding: Callable[[], object] = lambda: None) -> None:
        self.hold = hold
        self.before_holding = before_holding
        self.holding = threading.Event()
        self.go = threading.Event()
        self.closed_by: list[threading.Thread] = []
        self.opened_by: list[threading.Thread] = []

    def __iter__(self) -> Iterator[np.ndarray]:
        self.opened_by.append(threading.current_thread())
        try:
            i = 0
            while True:
                if i == self.hold:
                    self.before_holding()
                    self.holding.set()
                    assert self.go.wait(SECONDS)
                yield batch_of(i)
                i += 1
        finally:
            self.closed_by.append(threading.current_thread())


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GRACE_SECONDS", 0)


def at_a_wait(pool: arenax.BufferPool, call: Callable[[], object] = lambda: None) -> threading.Event:
    """An event that is set when a thread is in the line for a slot; `call` runs just before."""
    wait, reached = pool.arena._wait, threading.Event()

    def waited(waiter: Any) -> Any:
        call()
        reached.set()
        return wait(waiter)

    pool.arena._wait = waited
    return reached


def waiting(pool: arenax.BufferPool, source: Source) -> tuple[Prefetcher, list[Any]]:
    """A prefetcher whose thread waits for a slot, all being held here and not by its consumer."""
    held = [pool.put(batch_of(-1)) for _ in range(pool.stats().slot_count)]
    reached = at_a_wait(pool)
    ahead = prefetch(source, pool)
    source.go.set()
    assert reached.wait(SECONDS)
    return ahead, held


# Closing and dropping. ------------------------------------------------------------------------------------------------


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
    stopped = threading.Event()
    stop = ahead._feed.stop
    ahead._feed.stop = lambda: (stop(), stopped.set())
    closing = threading.Thread(target=ahead.close)
    closing.start()
    assert stopped.wait(SECONDS)
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
    made = threading.Event()

    def closing() -> Iterator[np.ndarray]:
        assert made.wait(SECONDS)
        box[0].close()
        yield batch_of(0)

    box.append(prefetch(closing(), pool))
    (thread,) = prefetch_threads()
    made.set()
    thread.join(SECONDS)
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


# What is closed, and what is kept alive. ------------------------------------------------------------------------------


def test_an_iterator_of_the_callers_own_is_not_closed(make_pool: MakePool):
    class File:
        closed = False

        def __iter__(self) -> Iterator[np.ndarray]:
            return self

        def __next__(self) -> np.ndarray:
            return batch_of(7)

        def close(self) -> None:
            self.closed = True

    file = File()
    with prefetch(file, make_pool()) as ahead:
        assert number(next(ahead)) == 7
    assert not file.closed


def test_a_generator_is_closed(make_pool: MakePool):
    generator = iter(Source())
    with prefetch(generator, make_pool()) as ahead:
        assert number(next(ahead)) == 0
    assert list(generator) == []


def failing_to_close() -> Iterator[np.ndarray]:
    try:
        while True:
            yield batch_of(0)
    finally:
        raise OSError("the disk is full")


def test_an_error_of_closing_the_iterable_comes_out_of_close(make_pool: MakePool):
    pool = make_pool()
    ahead = prefetch(failing_to_close(), pool)
    assert number(next(ahead)) == 0
    with pytest.raises(OSError, match="disk is full") as caught:
        ahead.close()
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "failing_to_close"
    ahead.close()
    assert_nothing_left(pool)


def test_an_error_of_closing_a_dropped_iterable_is_reported(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch):
    reported: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: reported.append(args.exc_value))
    pool = make_pool()
    ahead = prefetch(failing_to_close(), pool)
    assert number(next(ahead)) == 0
    del ahead
    assert [str(error) for error in reported] == ["the disk is full"]
    assert_nothing_left(pool)


def test_a_batch_is_the_consumers_alone(make_pool: MakePool):
    # No local variable of the thread, of the feed or of `next` keeps it, nor the host's arrays.
    pool, source = make_pool(), Source(hold=1)
    hosts: list[weakref.ref[Any]] = []

    def watched() -> Iterator[np.ndarray]:
        batches = iter(source)
        while True:
            hosts.append(weakref.ref(batch := next(batches)))
            yield batch
            del batch

    ahead = prefetch(watched(), pool)
    batch = next(ahead)
    assert source.holding.wait(SECONDS)
    assert pool.stats().leased_count == 1
    assert hosts[0]() is None
    del batch
    assert pool.stats().leased_count == 0
    source.go.set()
    ahead.close()


def test_an_error_keeps_nothing_alive(make_pool: MakePool):
    def failing() -> Iterator[np.ndarray]:
        yield batch_of(0)
        raise OSError

    pool = make_pool()
    ahead = prefetch(failing(), pool)
    seen = weakref.ref(ahead)
    feed = weakref.ref(ahead._feed)
    assert number(next(ahead)) == 0
    try:
        next(ahead)
    except OSError:
        pass
    assert_nothing_left(pool)
    del ahead
    assert seen() is None  # The collector is off: no cycle.
    assert feed() is None


def test_the_iterable_is_never_further_ahead_than_size(make_pool: MakePool):
    pool, source = make_pool(), Source()
    drawn: list[int] = []

    def counted() -> Iterator[np.ndarray]:
        for batch in source:
            drawn.append(int(batch[0]))
            yield batch

    with prefetch(counted(), pool, size=3) as ahead:
        full = threading.Event()
        take = ahead._feed._taken.get

        class Watched:
            def get(self) -> None:
                full.set()
                take()

            put = ahead._feed._taken.put

        ahead._feed._taken = Watched()
        for i in range(5):
            assert number(next(ahead)) == i
            full.clear()
        assert number(next(ahead)) == 5
        assert full.wait(SECONDS)
        assert len(drawn) <= 6 + 3


# Interrupts. ----------------------------------------------------------------------------------------------------------


def interrupt_main() -> None:
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def when_blocked(ahead: Prefetcher, call: Callable[[], object] = lambda: None) -> threading.Event:
    """An event that is set when a consumer is about to block; `call` runs then, in his thread."""
    token, blocked = ahead._feed.token, threading.Event()
    starve = token.starve

    def starved(starving: bool) -> None:
        if starving:
            blocked.set()
            call()
        starve(starving)

    token.starve = starved
    return blocked


def test_an_interrupt_of_a_consumer_whose_iterable_blocks(make_pool: MakePool, no_grace: None):
    pool, made = make_pool(), threading.Event()
    blocked: list[threading.Event] = []

    def interrupt() -> None:
        assert made.wait(SECONDS)
        assert blocked[0].wait(SECONDS)
        interrupt_main()

    source = Source(hold=0, before_holding=interrupt)
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


def test_an_interrupt_of_a_consumer_whose_thread_waits_for_a_slot(make_pool: MakePool):
    pool, source = make_pool(on_exhausted="wait"), Source(hold=0)
    pool.reserve(SPEC, slots=2)
    ahead, held = waiting(pool, source)
    when_blocked(ahead, interrupt_main)
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
                signal.raise_signal(signal.SIGINT)

    ahead._feed._taken = Interrupting()
    source.go.set()
    with pytest.raises(KeyboardInterrupt) as caught:
        next(ahead)
    assert caught.tb is not None
    assert_nothing_left(pool)


# Several consumers. ---------------------------------------------------------------------------------------------------


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, name="consumer")
    thread.start()
    return thread


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
        ("running()", 2, "threading.Thread(target=lambda: [None for _ in ahead], daemon=True).start()"),
    ],
)
def test_the_interpreter_exits_in_silence(iterable: str, size: int, last: str):
    program = PROGRAM.format(iterable=iterable, size=size, last=last)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

"""Waiting: order of arrival, one deadline, hand-over, no wait that nobody can end. Races are gated, never slept for."""

import gc
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

import arenax
from arenax._arena import Holder
from arenax._waiters import Waiter

from .conftest import MakePool, arenas

ROW = np.ones(4, np.uint8)


def waiting(pool: arenax.BufferPool, count: int) -> None:
    """Returns when `count` checkouts wait."""
    for _ in range(100_000):
        if sum(not w.settled for w in list(pool.arena._line)) == count:
            return
        threading.Event().wait(0.0005)
    raise AssertionError(f"{len(pool.arena._line)} wait, not {count}")


class Thread(threading.Thread):
    """Runs a function and keeps its result or its exception."""

    def __init__(self, run: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.result: Any = None
        self.error: BaseException | None = None
        self._run_it = run
        self.start()

    def run(self) -> None:
        try:
            self.result = self._run_it()
        except BaseException as e:
            self.error = e

    def finish(self) -> Any:
        self.join(30)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.result


def one_slot(make: MakePool, slots: int = 1, **options: Any) -> arenax.BufferPool:
    pool = make(on_exhausted="wait", **options)
    pool.reserve(ROW, slots=slots)
    return pool


def test_waiters_are_served_in_order_of_arrival(make_pool: MakePool) -> None:
    pool = one_slot(make_pool)
    held = pool.lease((4,), "uint8")
    order: list[int] = []

    def wait(i: int) -> None:
        with pool.lease((4,), "uint8"):
            order.append(i)

    threads = []
    for i in range(6):
        threads.append(Thread(lambda i=i: wait(i)))
        waiting(pool, i + 1)
    held.release()
    for t in threads:
        t.finish()
    assert order == list(range(6))
    assert pool.stats().wait_count == 6


def test_a_dropped_array_serves_a_waiter(make_pool: MakePool) -> None:
    pool = one_slot(make_pool)
    x = pool.put(ROW)
    thread = Thread(lambda: np.asarray(pool.put(ROW * 3)).tolist())
    waiting(pool, 1)
    del x
    assert thread.finish() == [3, 3, 3, 3]
    assert pool.stats().hit_count == 2


def test_nobody_barges_in_before_one_who_waits_for_the_same_class(make_pool: MakePool) -> None:
    pool = one_slot(make_pool, slots=2)
    held = [pool.lease((4,), "uint8") for _ in range(2)]
    both = Thread(lambda: pool.put([ROW, ROW]))
    waiting(pool, 1)
    held.pop().release()
    pool.check()  # Frees the slot now: `both`, which is on duty, may have the return in its hand.
    late = Thread(lambda: pool.put(ROW))
    waiting(pool, 2)
    stats = pool.stats()
    assert (stats.leased_count, stats.hit_count) == (1, 2)  # The free slot is kept for the first in the line.
    held.pop().release()
    assert len(both.finish()) == 2
    both.result = None
    late.finish()


def test_nobody_barges_in_while_the_first_has_a_return_in_its_hand(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Python 3.13 on, `SimpleQueue.put` hands its item straight to who waits for it, before that thread runs."""
    pool = one_slot(make_pool, slots=2)
    held = [pool.lease((4,), "uint8") for _ in range(2)]
    settle, in_hand, go_on = pool.arena.settle, threading.Event(), threading.Event()

    def slow(returns: Any = ()) -> None:
        if returns:
            in_hand.set()
            assert go_on.wait(30)
        settle(returns)

    monkeypatch.setattr(pool.arena, "settle", slow)
    both = Thread(lambda: pool.put([ROW, ROW]))
    waiting(pool, 1)
    held.pop().release()
    assert in_hand.wait(30)
    late = Thread(lambda: pool.put(ROW))
    waiting(pool, 2)
    pool.check()
    stats = pool.stats()
    assert (stats.leased_count, stats.hit_count) == (1, 2)
    waiting(pool, 2)
    go_on.set()
    held.pop().release()
    assert len(both.finish()) == 2
    both.result = None
    late.finish()


def test_one_who_waits_for_another_class_does_not_stand_in_the_way(make_pool: MakePool) -> None:
    pool = one_slot(make_pool)
    pool.reserve(np.ones(8, np.uint8), slots=1)
    held = pool.lease((4,), "uint8")
    thread = Thread(lambda: pool.put(ROW))
    waiting(pool, 1)
    pool.lease((8,), "uint8").release()
    held.release()
    thread.finish()


def test_a_timeout_names_itself_and_leaves_the_line(make_pool: MakePool) -> None:
    pool = one_slot(make_pool, timeout=0.05)
    held = pool.lease((4,), "uint8")
    with pytest.raises(arenax.PoolExhausted, match=r"after a wait of 0\.05 s") as error:
        pool.lease((4,), "uint8")
    assert isinstance(error.value, TimeoutError)
    assert error.value.timeout_seconds == 0.05
    assert (error.value.leased_count, error.value.slot_count) == (1, 1)
    assert not pool.arena._line
    held.release()
    pool.lease((4,), "uint8").release()


def test_a_refused_wait_keeps_no_lease_alive(make_pool: MakePool) -> None:
    """As an exception whose traceback leads back to itself would, until the next collection."""
    pool = one_slot(make_pool, timeout=0)

    def refused() -> None:
        held = pool.lease((4,), "uint8")
        assert not held.released
        with pytest.raises(arenax.PoolExhausted):
            pool.lease((4,), "uint8")

    gc.disable()
    try:
        refused()
        assert pool.stats().leased_count == 0
    finally:
        gc.enable()


def test_a_loan_on_its_way_back_is_not_held(make_pool: MakePool) -> None:
    pool = one_slot(make_pool)
    token = arenax.CancelToken()
    x = pool.put(ROW, cancel=token)
    thread = Thread(lambda: pool.put(ROW, cancel=token))
    waiting(pool, 1)
    with pool.arena._section.lock:
        token.starving = True
        (waiter,) = pool.arena._line
        assert waiter.is_hopeless()
        returned, pool.arena._returned = pool.arena._returned, SimpleQueue()  # The return is in somebody's hand.
        del x
        assert not waiter.is_hopeless()
        pool.arena._returned = returned
    thread.finish()


def test_a_timeout_of_zero_tries_once(make_pool: MakePool) -> None:
    pool = one_slot(make_pool, timeout=0)
    held = pool.put(ROW)
    with pytest.raises(arenax.PoolExhausted):
        pool.put(ROW)
    del held
    pool.put(ROW)


def test_the_next_in_line_takes_over_the_duty_when_the_first_gives_up(make_pool: MakePool) -> None:
    pool = one_slot(make_pool)
    x = pool.put(ROW)
    token = arenax.CancelToken()
    first = Thread(lambda: pool.put(ROW, cancel=token))
    waiting(pool, 1)
    second = Thread(lambda: pool.put(ROW))
    waiting(pool, 2)
    token.cancel()
    with pytest.raises(arenax.PoolExhausted, match="cancelled"):
        first.finish()
    waiting(pool, 1)
    del x  # Only a finalizer says so, to whoever is on duty.
    second.finish()


def test_what_can_never_be_served_raises_at_once(make_pool: MakePool) -> None:
    pool = one_slot(make_pool)
    for batch in ([ROW, ROW], np.ones(5, np.uint8)):
        with pytest.raises(arenax.PoolExhausted, match="no wait could end"):
            pool.put(batch)
    assert pool.stats().wait_count == 0


def test_a_starving_consumer_that_holds_every_slot_is_told(make_pool: MakePool) -> None:
    pool = one_slot(make_pool)
    token = arenax.CancelToken()
    x = pool.put(ROW, cancel=token)
    thread = Thread(lambda: pool.put(ROW, cancel=token))
    waiting(pool, 1)
    token.starve(False)
    waiting(pool, 1)
    token.starve(True)
    with pytest.raises(arenax.PoolExhausted, match="holds them all"):
        thread.finish()
    with pytest.raises(arenax.PoolExhausted, match="holds them all"):  # The other way round: starving already.
        pool.put(ROW, cancel=token)
    del x


def test_a_starving_consumer_waits_for_what_others_hold(make_pool: MakePool) -> None:
    pool = one_slot(make_pool, slots=2)
    token = arenax.CancelToken()
    mine, theirs = pool.put(ROW, cancel=token), pool.put(ROW)
    token.starve(True)
    thread = Thread(lambda: pool.put(ROW, cancel=token))
    waiting(pool, 1)
    del theirs
    thread.finish()
    del mine


def test_close_refuses_whoever_waits(make_pool: MakePool) -> None:
    pool = one_slot(make_pool)
    held = pool.lease((4,), "uint8")
    threads = []
    for i in range(3):
        threads.append(Thread(lambda: pool.lease((4,), "uint8")))
        waiting(pool, i + 1)
    pool.close()
    for t in threads:
        with pytest.raises(arenax.PoolClosed):
            t.finish()
    held.release()


def test_an_abandoned_waiter_does_not_hold_up_the_line(make_pool: MakePool) -> None:
    """An interrupt in its own clean-up can leave a waiter in the line, on duty, with its loan's holder dead."""
    pool = one_slot(make_pool)
    x = pool.put(ROW)
    holder = Holder()
    (shelf,) = pool.arena.shelves.values()
    pool.arena._line.append(Waiter((shelf,), (4,), pool.arena.loan(holder), None))
    thread = Thread(lambda: pool.put(ROW))
    waiting(pool, 2)
    del holder, x
    thread.finish()
    assert not pool.arena._line


def test_a_step_ends_while_another_thread_waits_for_its_slot(make_pool: MakePool) -> None:
    pool = one_slot(make_pool)
    with pool.step() as step:
        step.put(ROW)
        thread = Thread(lambda: step.put(ROW))
        waiting(pool, 1)
    with pytest.raises(RuntimeError, match="over"):
        thread.finish()
    assert pool.stats().leased_count == 0
    with pool.step() as step:
        step.put(ROW)


def test_an_interrupt_in_the_wait_loses_nothing(make_fake: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = one_slot(make_fake)
    x = pool.put(ROW)

    class Interrupting:
        """The queue, with a get that takes an item and is interrupted before it hands it over."""

        def __init__(self, queue: Any) -> None:
            self.put, self.qsize, self.get_nowait, self._get = queue.put, queue.qsize, queue.get_nowait, queue.get

        def get(self, timeout: float | None = None) -> None:
            nonlocal x
            del x
            self._get(timeout=timeout)
            raise KeyboardInterrupt

    monkeypatch.setattr(pool.arena, "_returned", Interrupting(pool.arena._returned))
    with pytest.raises(KeyboardInterrupt):
        pool.put(ROW)
    monkeypatch.undo()
    assert not pool.arena._line
    y = pool.put(ROW)
    assert pool.stats().leased_count == 1
    del y


def test_many_threads_share_few_slots(make_pool: MakePool) -> None:
    pool = one_slot(make_pool, slots=3)

    def work(tag: int) -> None:
        for i in range(60):
            value = (tag * 60 + i) % 251
            if i % 3 == 0:
                with pool.lease((4,), "uint8", fill=value) as lease:
                    assert (np.asarray(lease.array) == value).all()
            elif i % 3 == 1:
                with pool.step() as step:
                    assert (np.asarray(step.put(ROW * value)) == np.uint8(value)).all()
            else:
                x = pool.put(ROW * value)
                assert (np.asarray(x) == np.uint8(value)).all()
                del x

    for t in [Thread(lambda tag=tag: work(tag)) for tag in range(8)]:
        t.finish()
    stats = pool.stats()
    assert (stats.leased_count, stats.slot_count, stats.copy_count) == (0, 3 * arenas(pool), 0)


def test_a_release_waits_for_the_operation_in_progress(make_fake: MakePool) -> None:
    pool = make_fake()
    lease = pool.lease((4,), "uint8")
    inside, go_on = threading.Event(), threading.Event()

    def slow(slot: Any) -> Any:
        inside.set()
        assert go_on.wait(30)
        return slot + 1

    update = Thread(lambda: lease.update(slow))
    assert inside.wait(30)
    release = Thread(lease.release)
    assert not lease.released
    assert pool.stats().leased_count == 1
    go_on.set()
    update.finish()
    release.finish()
    assert lease.released
    assert pool.stats().leased_count == 0


def test_an_operation_inside_an_operation_is_refused(make_fake: MakePool) -> None:
    pool = make_fake()
    with pool.lease((4,), "uint8") as lease:

        def nested(slot: Any) -> Any:
            lease.release()
            return slot

        with pytest.raises(RuntimeError, match="inside another operation"):
            lease.update(nested)
        assert not lease.released


def test_the_end_of_a_step_waits_for_a_put_of_another_thread(
    make_fake: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_fake()
    inside, go_on = threading.Event(), threading.Event()
    land = pool.landing.land

    def slow(*args: Any) -> None:
        inside.set()
        assert go_on.wait(30)
        land(*args)

    monkeypatch.setattr(pool.landing, "land", slow)
    step = pool.step()
    step.__enter__()
    put = Thread(lambda: step.put(ROW))
    assert inside.wait(30)
    done = threading.Event()
    end = Thread(lambda: (step.__exit__(None, None, None), done.set()))
    assert not done.wait(0.05)
    assert pool.stats().leased_count == 1
    go_on.set()
    put.finish()
    end.finish()
    assert pool.stats().leased_count == 0

"""What `prefetch` closes and reports when it ends, and what it keeps alive: nothing."""

import threading
import traceback
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from arenax_adapters.prefetch import prefetch
from tests.adapters.conftest import MakePool, assert_nothing_left
from tests.adapters.gates import SECONDS, Source, batch_of, number


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
    seen = weakref.ref(ahead._feed)
    del ahead, caught
    assert seen() is None  # The collector is off: no cycle.


def test_an_error_of_closing_an_exhausted_iterable_comes_after_its_batches(make_pool: MakePool):
    class Reader:
        def __init__(self, count: int) -> None:
            self.left = count

        def __iter__(self) -> Iterator[np.ndarray]:
            return Reader(self.left)

        def __next__(self) -> np.ndarray:
            self.left -= 1
            if self.left < 0:
                raise StopIteration
            return batch_of(self.left)

        def close(self) -> None:
            raise OSError("checksum")

    ahead = prefetch(Reader(2), make_pool())
    assert [number(next(ahead)), number(next(ahead))] == [1, 0]
    with pytest.raises(OSError, match="checksum"):
        next(ahead)
    assert list(ahead) == []


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

"""Gates: a source of batches that can be held, and events that tell where the threads of `prefetch` are."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import arenax
from arenax_adapters.prefetch import Prefetcher, prefetch

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


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, name="consumer")
    thread.start()
    return thread

"""What every adapter must leave behind: no thread of its own, no lease, a pool whose invariants hold."""

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import arenax
from arenax_adapters import prefetch as module

MakePool = Callable[..., arenax.BufferPool]


def prefetch_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("arenax-prefetch")]


def assert_nothing_left(pool: arenax.BufferPool) -> None:
    """Neither a thread nor a lease, now: nobody waits for the collector, nor for a thread that is about to end."""
    assert prefetch_threads() == []
    assert pool.stats().leased_count == 0
    pool.check()


@pytest.fixture
def make_pool() -> Iterator[MakePool]:
    """Makes pools. The collector is off, so that what only a collection would free counts as left."""
    pools: list[arenax.BufferPool] = []

    def make(**options: Any) -> arenax.BufferPool:
        pools.append(arenax.BufferPool(**options))
        return pools[-1]

    gc.collect()
    gc.disable()
    try:
        yield make
    finally:
        gc.enable()
    for pool in pools:
        pool.check()
        pool.close()
    assert prefetch_threads() == []


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GRACE_SECONDS", 0)

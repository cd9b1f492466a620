"""What strikes inside an arena's critical section: it is mended at the next entry, and nobody waits for himself."""

import gc
import signal
import threading
from collections import deque
from typing import Any

import numpy as np
import pytest

import arenax
from arenax._arena import Arena
from arenax._section import TORN
from arenax._slot import Slot
from arenax._stats import Tally

from .conftest import MakePool

X = np.arange(6, dtype=np.float32)


class Strike(BaseException):
    """What a signal handler raises."""


def strike(*_: object) -> None:
    raise Strike


@pytest.mark.parametrize("leaves", [1, 3])
@pytest.mark.parametrize("name", ["_take", "_pass_on", "_lend", "_settle", "_end", "_decide", "_new_slot", "_grow"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_struck_section_is_mended_at_the_next_entry(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, name: str, when: str, leaves: int
) -> None:
    pool, batch = make_pool(), [X + i for i in range(leaves)]
    kept = pool.put(batch)
    del kept[0]
    struck = 0
    for _ in range(4):
        real = getattr(Arena, name)

        def broken(self: Arena, *args: Any, real: Any = real) -> Any:
            if when == "after":
                real(self, *args)
            raise Strike

        with monkeypatch.context() as patch:
            patch.setattr(Arena, name, broken)
            try:
                got = pool.put(batch)
            except Strike:
                struck += 1
            else:
                del got
        pool.check()
        assert pool.stats().leased_count == leaves - 1
    got = pool.put(batch)
    for one, expected in zip(got, batch, strict=True):
        np.testing.assert_array_equal(np.array(one), expected)
    del got, kept, one
    pool.check()
    stats = pool.stats()
    assert stats.leased_count == 0
    assert struck or name in ("_pass_on", "_end", "_lend", "_decide", "_new_slot", "_grow", "_settle")


def test_mending_finds_every_slot_and_sum_again(make_fake: MakePool) -> None:
    pool = make_fake(budget=1000)
    pool.reserve(arenax.ArraySpec((4,), "uint8"), slots=6)
    leases = [pool.lease((4,), "uint8") for _ in range(3)]
    arena = pool.arena
    (shelf,) = arena.shelves.values()
    before = pool.stats()
    lost = shelf.free.pop()  # As if struck on its way out,
    shelf.free.append(shelf.free[0])  # put back twice,
    gone = leases.pop()._slot
    gone.loan = None  # or on its way back,
    shelf.slots.add(Slot(shelf, loan=leases[0]._slot.loan))  # or made for nobody,
    arena.tally.leased_count += 5  # or between two sums.
    shelf.tally.reserved_bytes -= 4
    arena._section.inside = 1
    pool.check()
    after = pool.stats()
    assert (after.slot_count, after.leased_count, after.reserved_bytes) == (6, 2, 24)
    assert after.leased_bytes == before.leased_bytes - 4
    assert {lost, gone} <= {*shelf.free}
    assert len(shelf.free) == len({*shelf.free}) == 4
    for lease in leases:
        lease.release()


@pytest.mark.parametrize("entry", ["put", "lease", "step"])
def test_a_checkout_mends_before_it_looks_for_a_slot(make_fake: MakePool, entry: str) -> None:
    pool = make_fake(on_exhausted="raise")
    pool.reserve(X, slots=1)
    pool.put(X)  # Or its plan would ask for the shelf first, and so mend.
    pool.lease((6,)).release()
    pool.stats()
    (shelf,) = pool.arena.shelves.values()
    shelf.free.clear()  # As if struck on its way out.
    pool.arena._section.inside = TORN
    if entry == "put":
        pool.put(X)
    elif entry == "lease":
        pool.lease((6,)).release()
    else:
        with pool.step() as step:
            step.put(X)
    pool.check()
    assert (pool.stats().slot_count, pool.stats().leased_count) == (1, 0)


def test_mending_leaves_alone_what_is_being_made(make_fake: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that has no buffer yet is on the loan of the thread that makes it."""
    pool = make_fake()
    made, go_on = threading.Event(), threading.Event()
    real = pool.landing.create

    def create(slot: Slot) -> None:
        made.set()
        go_on.wait(10)
        real(slot)

    monkeypatch.setattr(pool.landing, "create", create)
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(pool.put(X)))
    thread.start()
    assert made.wait(10)
    pool.arena._section.inside = 1
    assert pool.stats().slot_count == 1
    go_on.set()
    thread.join()
    np.testing.assert_array_equal(np.asarray(got[0]), X)
    pool.check()
    assert pool.stats().leased_count == 1


def test_a_refusal_is_orderly(make_fake: MakePool) -> None:
    pool = make_fake(on_exhausted="raise")
    for _ in range(3):
        with pytest.raises(arenax.PoolExhausted):
            pool.put(X)
        assert not pool.arena._section.inside


# -------------------------------------------------------------------------------------------- calls from the inside


def call_inside(pool: arenax.BufferPool, monkeypatch: pytest.MonkeyPatch, call: Any) -> list[BaseException]:
    """Has `call` called in the middle of the bookkeeping of a put, as a finalizer would be; returns its errors."""
    errors: list[BaseException] = []
    real = pool.arena._take

    def take(*args: Any) -> Any:
        try:
            call()
        except BaseException as e:
            errors.append(e)
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(pool.arena, "_take", take)
        pool.put(X)
    return errors


@pytest.mark.parametrize("call", ["put", "stats", "check", "close", "lease", "reserve"])
def test_a_call_in_the_middle_of_the_bookkeeping_is_refused_and_never_waits(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    pool = make_pool()
    calls = {
        "put": lambda: pool.put(X),
        "stats": pool.stats,
        "check": pool.check,
        "close": pool.close,
        "lease": lambda: pool.lease((4,)),
        "reserve": lambda: pool.reserve(X),
    }
    (error,) = call_inside(pool, monkeypatch, calls[call])
    assert isinstance(error, RuntimeError)
    assert "in the middle of its own bookkeeping" in str(error)
    pool.check()
    assert pool.stats().slot_count == 1


def test_another_pool_may_be_called_there(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    other = make_pool()
    assert call_inside(make_pool(), monkeypatch, lambda: other.put(X)) == []
    assert other.stats().hit_count + other.stats().creation_count == 1


def test_returns_may_come_from_a_collection_in_the_middle_of_it(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool()

    class Node:
        def __init__(self, held: Any) -> None:
            self.held, self.me = held, self

    gc.disable()
    try:
        for _ in range(3):
            Node(pool.put(X))
        assert pool.stats().leased_count == 3
        assert call_inside(pool, monkeypatch, gc.collect) == []
    finally:
        gc.enable()
    assert pool.stats().leased_count == 0
    pool.check()


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs POSIX timers")
def test_a_signal_handler_that_draws_never_deadlocks(make_fake: MakePool) -> None:
    pool = make_fake()
    pool.reserve(X, slots=4)
    outcomes = deque[str](maxlen=1000)

    def handler(*_: object) -> None:
        try:
            pool.put(X)
        except RuntimeError:
            outcomes.append("refused")
        else:
            outcomes.append("drawn")

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        for _ in range(3000):
            pool.put(X)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert outcomes
    pool.check()
    assert pool.stats().leased_count == 0


def test_a_tally_is_plain_data() -> None:
    """What `mend` sets is all that there is."""
    gauges = {n for n in vars(Tally) if not n.startswith(("_", "peak_")) and n.endswith(("_count", "_bytes"))}
    assert {"slot_count", "leased_count", "reserved_bytes", "leased_bytes", "requested_bytes"} <= gauges

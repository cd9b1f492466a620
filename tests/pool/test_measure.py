"""Scopes of `pool.measure()`: their peaks and counts, against a model, nested, across threads and interrupted."""

import contextlib
import itertools
import sys
import threading
from collections import Counter
from types import FrameType
from typing import Any

import attrs
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import arenax
from arenax import SizeClass
from arenax._stats import COUNTERS, GAUGES, PEAKS
from arenax.testing import FakeDevice, interrupt

from .conftest import MakePool, copies

CAPACITIES = (4, 16)
RAGGED = arenax.Ragged(0, arenax.SizeClasses.explicit([*CAPACITIES]))
CLASSES = {n: SizeClass((n,), np.dtype(np.int8)) for n in CAPACITIES}


@attrs.define(eq=False)
class Class:
    """What the model knows of one size class: how many slots there are, and the bytes asked for in each loan."""

    nbytes: int
    slots: int = 0
    loans: list[int] = attrs.field(factory=list)
    counts: dict[str, int] = attrs.field(factory=lambda: dict.fromkeys(COUNTERS, 0))

    def gauges(self) -> dict[str, int]:
        leased = len(self.loans)
        return {
            "reserved_bytes": self.slots * self.nbytes,
            "leased_bytes": leased * self.nbytes,
            "requested_bytes": sum(self.loans),
            "idle_bytes": (self.slots - leased) * self.nbytes,
            "slot_count": self.slots,
            "leased_count": leased,
        }


class Model:
    """All figures after each event, and the event at which each scope begins: peaks are maxima over that list."""

    def __init__(self) -> None:
        self.classes = {n: Class(n) for n in CAPACITIES}
        self.history: list[dict[Any, dict[str, int]]] = []
        self.note()

    def note(self) -> None:
        parts: dict[Any, dict[str, int]] = {CLASSES[n]: c.gauges() | c.counts for n, c in self.classes.items()}
        parts[None] = {name: sum(part[name] for part in parts.values()) for name in (*GAUGES, *COUNTERS)}
        self.history.append(parts)

    def lend(self, size: int, lands: bool) -> tuple[Class, int]:
        of_class = self.classes[4 if size <= 4 else 16]
        requested = size if lands else of_class.nbytes
        if len(of_class.loans) < of_class.slots:
            of_class.counts["hit_count"] += 1
        else:
            of_class.slots += 1
            of_class.counts["creation_count"] += 1
        if lands:
            of_class.counts["write_count"] += 1
            of_class.counts["written_bytes"] += requested
        of_class.loans.append(requested)
        self.note()
        return of_class, requested

    def give_back(self, loan: tuple[Class, int]) -> None:
        loan[0].loans.remove(loan[1])
        self.note()

    def reserve(self, size: int) -> None:
        of_class = self.classes[size]
        of_class.slots += 1
        of_class.counts["creation_count"] += 1
        self.note()

    def figures(self, since: int, until: int) -> dict[Any, dict[str, int]]:
        return {
            key: {g: last[g] for g in GAUGES}
            | {p: max(parts[key][g] for parts in self.history[since:until]) for g, p in zip(GAUGES, PEAKS, strict=True)}
            | {n: last[n] - self.history[since][key][n] for n in COUNTERS}
            for key, last in self.history[until - 1].items()
        }


def compare(stats: arenax.Stats, expected: dict[Any, dict[str, int]]) -> None:
    for key, figures in expected.items():
        part = stats if key is None else stats.by_class.get(key, arenax.Stats())
        assert {name: getattr(part, name) for name in figures} == figures, key


EVENTS = st.sampled_from(["put", "lease", "drop", "drop", "reserve", "enter", "exit", "read", "life"])


@given(st.lists(st.tuples(EVENTS, st.integers(1, 16)), max_size=60))
def test_a_scope_has_the_peaks_and_counts_of_a_model(events: list[tuple[str, int]]) -> None:
    with arenax.BufferPool(FakeDevice(), ragged=RAGGED) as pool:
        model, held, scopes = Model(), [], []
        ended: list[tuple[arenax.Measure, int, int]] = []
        for event, n in events:
            if event == "put":
                held.append((pool.put(np.ones(n, np.int8)), model.lend(n, True)))
            elif event == "lease":
                held.append((pool.lease((4 if n <= 4 else 16,), "int8", fill=None), model.lend(n, False)))
            elif event == "drop" and held:
                thing, loan = held.pop(n % len(held))
                if isinstance(thing, arenax.Lease):
                    thing.release()
                del thing
                model.give_back(loan)
            elif event == "reserve":
                capacity = CAPACITIES[n % 2]
                pool.arena.reserve(Counter({CLASSES[capacity]: 1}))
                model.reserve(capacity)
            elif event == "enter":
                scopes.append((pool.measure().__enter__(), len(model.history) - 1))
            elif event == "exit" and scopes:
                scope, since = scopes.pop(n % len(scopes))
                scope.__exit__(None, None, None)
                ended.append((scope, since, len(model.history)))
            elif event == "read" and scopes:
                scope, since = scopes[n % len(scopes)]
                compare(scope.stats, model.figures(since, len(model.history)))
            elif event == "life":
                compare(pool.stats(), model.figures(0, len(model.history)))
                pool.check()
        for scope, since, until in ended:
            compare(scope.stats, model.figures(since, until))
        for scope, since in scopes:
            compare(scope.stats, model.figures(since, len(model.history)))
        compare(pool.stats(), model.figures(0, len(model.history)))
        pool.check()
        for thing, _ in held:
            if isinstance(thing, arenax.Lease):
                thing.release()


def test_a_scope_on_any_device(make_pool: MakePool) -> None:
    lengths = arenax.SizeClasses.explicit([8, 32])
    pool = make_pool(ragged=arenax.Ragged(0, lengths), name="p")
    compiles = not isinstance(pool.landing, FakeDevice)
    high = [pool.put(np.ones((30, 4), np.float32)) for _ in range(3)]
    del high
    with pool.measure() as cold:
        x = pool.put(np.ones((5, 4), np.float32))
        del x
    with pool.measure() as warm:
        for _ in range(4):
            with pool.step() as step:
                step.put(np.ones((6, 4), np.float32))
    small, large = (pool.arena.shelf(pool.homes[0].exact((n, 4), np.float32)).size_class for n in (8, 32))
    assert (cold.stats.creation_count, cold.stats.hit_count, cold.stats.compile_count > 0) == (1, 0, compiles)
    assert (warm.stats.creation_count, warm.stats.hit_count, warm.stats.compile_count) == (0, 4, 0)
    row = 16 * copies(pool)
    assert (warm.stats.write_count, warm.stats.written_bytes) == (4, 4 * 6 * row)
    assert (warm.stats.peak_leased_bytes, warm.stats.peak_requested_bytes) == (8 * row, 6 * row)
    assert warm.stats.by_class[large].peak_leased_count == warm.stats.by_class[large].hit_count == 0
    assert warm.stats.by_class[small].peak_leased_count == 1
    assert warm.stats.by_class[large].peak_slot_count == warm.stats.by_class[large].slot_count == 3
    assert warm.stats.landing == pool.stats().landing
    if copies(pool) == 1:
        assert warm.stats.by_device[pool.landing.name].by_class == warm.stats.by_class
    assert pool.stats().peak_leased_bytes == 3 * 32 * row


def test_the_compiles_of_a_step_are_those_of_the_scopes_around_it() -> None:
    with arenax.BufferPool() as pool, pool.measure() as outer:
        with pool.step() as step:
            x = step.ones((3,))
            with pool.measure() as inner:
                jax.block_until_ready(jax.jit(lambda x: x * 3 + 1)(x))
        with pool.measure() as later:
            pass
    assert inner.stats.compile_count == 1
    assert outer.stats.compile_count > 1
    assert later.stats.compile_count == 0


def test_a_class_that_appears_in_the_scope_counts_from_nothing() -> None:
    with arenax.BufferPool(FakeDevice()) as pool, pool.measure() as m:
        assert m.stats.by_class == {}
        x = pool.put(np.ones(4, np.int8))
        y = pool.put(np.ones(4, np.int8))
        del x
        part = m.stats.by_class[CLASSES[4]]
        assert (part.peak_leased_count, part.leased_count, part.creation_count) == (2, 1, 2)
        del y


def test_a_scope_over_a_close_keeps_its_peaks() -> None:
    pool = arenax.BufferPool(FakeDevice())
    with pool.measure() as m:
        x = pool.put(np.ones(4, np.int8))
        del x
        pool.close()
    assert (m.stats.peak_reserved_bytes, m.stats.reserved_bytes) == (4, 0)
    with pool.measure() as after:
        pass
    assert after.stats.peak_reserved_bytes == 0
    assert pool.stats().peak_reserved_bytes == 4


def test_the_figures_are_frozen_at_the_end_also_by_an_exception() -> None:
    with arenax.BufferPool(FakeDevice()) as pool:
        with pytest.raises(ZeroDivisionError), pool.measure() as m:
            x = pool.put(np.ones(4, np.int8))
            _ = 1 / 0
        stats = m.stats
        assert stats.peak_leased_bytes == 4
        y = pool.put(np.ones(4, np.int8))
        assert m.stats is stats
        m.__exit__(None, None, None)
        assert m.stats is stats
        del x, y


def test_a_measure_is_entered_once_and_has_no_figures_before() -> None:
    with arenax.BufferPool(FakeDevice()) as pool:
        m = pool.measure()
        with pytest.raises(RuntimeError, match="before it is entered"):
            _ = m.stats
        with m, pytest.raises(RuntimeError, match="entered once"):
            m.__enter__()
        with pytest.raises(RuntimeError, match="entered once"):
            m.__enter__()


def test_peaks_are_never_below_their_gauges_while_slots_are_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, seen = arenax.BufferPool(FakeDevice()), []
    real = pool.landing.create

    def create(slot: Any) -> None:
        seen.append(pool.stats())
        real(slot)

    monkeypatch.setattr(pool.landing, "create", create)
    with pool.measure() as m:
        pool.reserve(arenax.ArraySpec((4,), "int8"), slots=2)
        x = pool.put(np.ones((3, 3), np.int8))
        del x
    for stats in (*seen, m.stats, pool.stats()):
        for part in (stats, *stats.by_class.values()):
            assert all(getattr(part, p) >= getattr(part, g) for g, p in zip(GAUGES, PEAKS, strict=True))
    assert len(seen) == 3


def test_many_threads_measure_at_once() -> None:
    with arenax.BufferPool(FakeDevice(), ragged=RAGGED) as pool:
        errors: list[BaseException] = []
        start = threading.Barrier(4)

        def work(seed: int) -> None:
            try:
                start.wait()
                for i in range(60):
                    with pool.measure() as m:
                        held = [pool.put(np.ones(1 + (seed + i + j) % 16, np.int8)) for j in range(3)]
                        now = m.stats
                        assert now.peak_leased_count >= now.leased_count >= 3
                        del held
                    assert m.stats.write_count >= 3
                    assert m.stats.peak_leased_count >= 3
            except BaseException as e:
                errors.append(e)

        with pool.measure() as all_of_it:
            threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not errors
        assert all_of_it.stats.write_count == pool.stats().write_count == 4 * 60 * 3
        for peak in PEAKS:
            assert getattr(all_of_it.stats, peak) == getattr(pool.stats(), peak)
        pool.check()


def test_checkouts_and_returns_know_nothing_of_scopes() -> None:
    def calls_of_a_loop() -> int:
        calls = 0

        def count(frame: FrameType, event: str, arg: object) -> None:
            nonlocal calls
            calls += frame.f_globals["__name__"].startswith("arenax")

        pool.stats()  # As to enter a scope does, this processes what was returned.
        sys.setprofile(count)
        for _ in range(10):
            x = pool.put(ones)
            del x
            with pool.step() as step:
                step.put(ones)
        sys.setprofile(None)
        return calls

    with arenax.BufferPool(FakeDevice()) as pool, contextlib.ExitStack() as scopes:
        ones = np.ones(4, np.int8)
        calls_of_a_loop()
        before = calls_of_a_loop()
        for _ in range(50):
            scopes.enter_context(pool.measure())
        assert calls_of_a_loop() == before > 100


def test_an_interrupt_leaves_no_scope_open_and_all_peaks_right() -> None:
    pool = arenax.BufferPool(FakeDevice())
    held = [pool.put(np.ones(4, np.int8)) for _ in range(5)]
    del held
    with pool.measure() as outer:
        for n in itertools.count(1):
            low = pool.put(np.ones(4, np.int8))
            m = None
            try:
                with interrupt(n) as at:
                    with pool.measure() as m:
                        pass
            except KeyboardInterrupt:
                pass
            if m is not None:
                assert m.stats.peak_leased_bytes == 4
            del low, m
            pool.check()
            assert pool.stats().peak_leased_bytes == 20
            assert outer.stats.peak_leased_bytes == 4
            assert len(pool._meter._scopes()) == 1
            if not at.fired:
                break
        assert n > 20

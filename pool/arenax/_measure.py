"""Figures over stretches of a pool's life: the whole of it, for `BufferPool.stats`, and scopes, for `measure`."""

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Self

import attrs

from ._arena import Arena
from ._compiles import CompileCounter
from ._landing import Landing
from ._request import SizeClass
from ._stats import COUNTERS, GAUGES, Stats, Tally

NO_PEAKS = (0,) * len(GAUGES)
NO_COUNTS = (0,) * len(COUNTERS)


@attrs.define(eq=False)
class Span:
    """A stretch of a pool's life, and what is remembered of it: of each class, and under None of the whole.

    Attributes:
        peaks: The highest gauges so far.
        before: The counters when it began; a class that is not there came later.
        compiled: Programs compiled when it began.
        result: Its figures, once it has ended.
    """

    peaks: dict[SizeClass | None, tuple[int, ...]] = attrs.field(factory=dict)
    before: dict[SizeClass | None, tuple[int, ...]] = attrs.field(factory=dict)
    compiled: int = 0
    result: Stats | None = None


class Meter:
    """Keeps the peaks of one arena over its whole life and over every open scope.

    A tally knows one peak of each gauge, that since it was last asked. Whoever begins, reads or ends a span first folds
    these into all spans and has them begin anew. So checkouts and returns know nothing of spans, and cost the same
    however many are open. Folding takes maxima: one that an exception cuts short is made good by the next. Scopes are
    held weakly: one whose end was lost to an exception is gone when nobody can ask for its figures any more.
    """

    def __init__(self, arena: Arena, landing: Landing, compiles: CompileCounter) -> None:
        self._arena = arena
        self._landing = landing
        self._compiles = compiles
        self._life = Span()
        self._open: list[weakref.ref[Span]] = []

    def of_life(self) -> Stats:
        """The figures since the pool was made."""
        return self.of(self._life)

    def begin(self) -> Span:
        """Begins a scope, which lasts until `end`, or until nobody holds it."""
        return self._arena.snapshot(self._begin)

    def of(self, span: Span) -> Stats:
        """The figures of a span up to now, or up to its end."""
        return self._arena.snapshot(lambda: self._read(span))

    def end(self, span: Span) -> None:
        """Ends a scope; its figures change no more."""
        self._arena.snapshot(lambda: self._end(span))

    # Under the arena's lock. ------------------------------------------------------------------------------------------

    def _tallies(self) -> Iterator[tuple[SizeClass | None, Tally]]:
        yield None, self._arena.tally
        for size_class, shelf in self._arena.shelves.items():
            yield size_class, shelf.tally

    def _scopes(self) -> list[Span]:
        """Those that are open."""
        return [span for span in (ref() for ref in self._open) if span is not None and span.result is None]

    def _fold(self) -> None:
        spans = [self._life, *self._scopes()]
        for key, tally in self._tallies():
            peaks = tally.peaks()
            for span in spans:
                span.peaks[key] = tuple(map(max, span.peaks.get(key, NO_PEAKS), peaks))
        for _, tally in self._tallies():  # Only now that every span has them.
            tally.restart_peaks()

    def _begin(self) -> Span:
        self._fold()
        span = Span(before={key: tally.counters() for key, tally in self._tallies()}, compiled=self._compiles.count)
        self._open = [*map(weakref.ref, self._scopes()), weakref.ref(span)]
        return span

    def _read(self, span: Span) -> Stats:
        if span.result is not None:
            return span.result
        self._fold()
        peaks, before = span.peaks, span.before
        by_class = {
            size_class: Stats.of(shelf.tally, peaks[size_class], before.get(size_class, NO_COUNTS))
            for size_class, shelf in self._arena.shelves.items()
        }
        whole = Stats.of_arena(
            self._arena.tally,
            peaks[None],
            before.get(None, NO_COUNTS),
            by_class,
            budget_bytes=self._arena.budget,
            landing=self._landing.kind,
        )
        names = self._landing.device_names
        by_device = dict.fromkeys(names, whole if len(names) == 1 else whole.share(len(names)))
        return attrs.evolve(whole, by_device=by_device, compile_count=self._compiles.count - span.compiled)

    def _end(self, span: Span) -> None:
        span.result = self._read(span)


class JointMeter:
    """The figures of several arenas, as those of one.

    Args:
        meters: One for each.
    """

    def __init__(self, meters: Sequence[Meter]) -> None:
        self._meters = tuple(meters)

    def of_life(self) -> Stats:
        """The figures since the pool was made."""
        return Stats.joint([meter.of_life() for meter in self._meters])

    def begin(self) -> list[Span]:
        """Begins a scope."""
        return [meter.begin() for meter in self._meters]

    def of(self, spans: list[Span]) -> Stats:
        """The figures of a span up to now, or up to its end."""
        return Stats.joint([meter.of(span) for meter, span in zip(self._meters, spans, strict=True)])

    def end(self, spans: list[Span]) -> None:
        """Ends a scope; its figures change no more."""
        for meter, span in zip(self._meters, spans, strict=True):
            meter.end(span)


class Measure:
    """The figures of a scope, made by `BufferPool.measure`; a context manager that is entered once.

    Scopes nest, overlap, and end in any order, in any thread; each counts what the whole pool does, whichever thread
    does it.

    Example:
        >>> import arenax, numpy as np
        >>> with arenax.BufferPool() as pool:
        ...     epoch = [pool.put(np.zeros(256, np.float32)) for _ in range(3)]
        ...     del epoch
        ...     with pool.measure() as m:
        ...         x = pool.put(np.ones(256, np.float32))
        ...         del x
        ...     (m.stats.peak_leased_bytes, pool.stats().peak_leased_bytes), m.stats.hit_count
        ((1024, 3072), 1)
    """

    __slots__ = ("_meter", "_span")

    def __init__(self, meter: Meter | JointMeter) -> None:
        self._meter: Any = meter
        self._span: Any = None

    @property
    def stats(self) -> Stats:
        """A `Stats` of the scope up to now, or once it is over, up to its end.

        The counters are what was counted in the scope; each ``peak_*`` is the highest that its gauge was in it, at its
        beginning too; the gauges are as they are now, or were at its end.

        Raises:
            RuntimeError: Before the scope is entered.
        """
        if self._span is None:
            raise RuntimeError("a measure has no figures before it is entered: use `with pool.measure() as m`")
        return self._meter.of(self._span)

    def __enter__(self) -> Self:
        if self._span is not None:
            raise RuntimeError("a measure is entered once: call pool.measure() each time")
        self._span = self._meter.begin()
        return self

    def __exit__(self, *_: object) -> None:
        if self._span is not None:
            self._meter.end(self._span)

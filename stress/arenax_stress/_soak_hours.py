"""`arenax stress --hours`: the soak for long, with failures on purpose, a loader whose workers die, and a diary."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from pathlib import Path

import arenax

from ._bench_table import size_text
from ._lab_report import page_of, write_report
from ._soak import MODES, soak
from ._soak_loader import KILL_SECONDS, KilledLoader
from ._soak_report import Failure, Report
from ._soak_steps import resident_bytes

LINE_SECONDS = 60.0
# What the recording of the last stretch has at most; the laboratory takes a minute or two for as much.
STRETCH_SECONDS, STRETCH_EVENTS = 300.0, 50_000
STORY = "The last stretch of a soak by `arenax stress`: random shapes, holds and drops, with failures on purpose."


def soak_for_hours(
    hours: float,
    *,
    seed: int = 0,
    threads: int = 4,
    classes: int = 6,
    budget: str | int | None = None,
    modes: Sequence[str] = MODES,
    omit: Collection[str] = (),
    page: str | Path = "arenax-lab",
    say: Callable[[str], None] = print,
    line_seconds: float = LINE_SECONDS,
    kill_seconds: float = KILL_SECONDS,
    devices: int | None = None,
) -> Report:
    """Soaks with failures on purpose beside a loader whose workers are killed, and writes a page on its last stretch.

    Args:
        hours: How long; the page comes after it.
        seed: The seed.
        threads: Threads, without that of the loader.
        classes: As `soak` takes it.
        budget: As `soak` takes it.
        modes: As `soak` takes it.
        omit: As `soak` takes it.
        page: Where the laboratory's page goes, as `write_report` takes it.
        say: Called with each line of the diary.
        line_seconds: Seconds between two lines.
        kill_seconds: Seconds between two kills of a worker, on average.
        devices: As `soak` takes it.

    Returns:
        The report; what went wrong with the loader is among its failures.
    """
    loader = KilledLoader(seed, kill_seconds)
    diary = _Diary(say, line_seconds, loader)
    loader.start()
    try:
        report = soak(
            seconds=hours * 3600,
            seed=seed,
            threads=threads,
            classes=classes,
            budget=budget,
            modes=modes,
            omit=omit,
            faults=True,
            progress=diary.progress,
            observe=diary.phase,
            devices=devices,
        )
    finally:
        loader.finish()
    if loader.failure is not None and not report.interrupted:  # Ctrl-C ends the workers too.
        report.failures.append(loader.failure)
    say(f"{loader}, {loader.restart_count:,} new loaders in place of broken ones" if loader.kind else str(loader))
    if not report.interrupted:
        try:
            diary.write(page)
        except Exception as e:
            report.failures.append(Failure("", -1, -1, "the page", f"{type(e).__name__}: {e}"))
    return report


class _Diary:
    """A line now and then, and a recording of the last stretch."""

    def __init__(self, say: Callable[[str], None], line_seconds: float, loader: KilledLoader) -> None:
        self._say = say
        self._line_seconds = line_seconds
        self._loader = loader
        self._next_line = line_seconds
        self._pool: arenax.BufferPool | None = None
        self._recording = contextlib.ExitStack()
        self._began = (0.0, 0)
        # The present stretch and the one before it, whose files go with them.
        self._stretches: deque[arenax.Trace] = deque(maxlen=2)

    @contextlib.contextmanager
    def phase(self, pool: arenax.BufferPool) -> Generator[None]:
        """The life of one of the soak's pools."""
        self._pool = pool
        self._record(pool)
        try:
            yield
        finally:
            self._recording.close()
            self._pool = None

    def progress(self, mode: str, elapsed: float, done: int) -> None:
        """See `soak`."""
        pool = self._pool
        if pool is None or elapsed < self._next_line:
            return
        self._next_line = elapsed + self._line_seconds
        stats = pool.stats()
        minutes, seconds = divmod(int(elapsed), 60)
        clock = f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02}"
        self._say(
            f"{clock}  {mode:<5} {done:,} events, {stats.spill_count:,} spills, "
            f"{stats.conversion_count:,} conversions, {size_text(resident_bytes())} resident, "
            f"{size_text(stats.leased_bytes)} leased, {size_text(stats.reserved_bytes)} reserved; {self._loader}"
        )
        began, drawn = self._began
        if time.monotonic() - began > STRETCH_SECONDS or 2 * (_drawn(stats) - drawn) > STRETCH_EVENTS:
            self._recording.close()
            self._record(pool)

    def write(self, page: str | Path) -> None:
        """Writes the page of the longer one of the last two stretches."""
        trace = max(self._stretches, key=lambda trace: len(trace.steps), default=None)
        if trace is None or not trace.peak_bytes:
            self._say("No page: nothing was recorded.")
            return
        kept = trace.steps[:STRETCH_EVENTS]  # A whole stretch may have more: it is looked at once a line.
        count = int((kept >= 0).sum())
        requests = None if trace.requests is None else trace.requests[:count]
        self._say(f"{len(kept):,} events of the last stretch go to the laboratory.")
        name = f"{trace.name}, last stretch"
        write_report(arenax.Trace(kept, trace.sizes[:count], requests=requests, name=name), page, story=STORY)
        self._say(f"The page is {page_of(page)}")

    def _record(self, pool: arenax.BufferPool) -> None:
        self._began = time.monotonic(), _drawn(pool.stats())
        self._recording = contextlib.ExitStack()
        self._stretches.append(self._recording.enter_context(pool.record()))


def _drawn(stats: arenax.Stats) -> int:
    return stats.hit_count + stats.creation_count + stats.spill_count

"""Recording: what a pool is asked for and gets back, as a trace that is written while it goes on."""

import os
import tempfile
import threading
import weakref
from _thread import get_ident
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic, time
from typing import NamedTuple, TextIO, cast

from ._slot import Shelf, Slot
from ._trace import Trace
from ._trace_csv import HEADER, class_text, read, shape_text

VARIABLE = "ARENAX_RECORD"
# Events held before they are written: some ten milliseconds of work, once in thousands of batches.
CHUNK = 4096
# Events share a time, and with it a text: those of a millisecond, or of four where more than so many come in one. Marks
# are the dearest part of a recording, as they are the part that a loop's caches do not hold.
TICK_SECONDS = 1e-3
DENSE_TICK_SECONDS = 4e-3
DENSE = 16
# Ends of lines that are kept, since a loop draws the same again and again.
MAX_TEXTS = 16_384

# Files that the environment variable has led to in this process.
_taken: set[Path] = set()
# The slot alone, where a loan ends and the next one begins at once for as many bytes, which is what a loop does all the
# time; else with these bytes, or None where a loan ends.
Event = Slot | tuple[Slot, int | None]


class Mark(NamedTuple):
    """The thread and the time of the events that follow, by `time.monotonic`."""

    thread: int
    moment: float


class Recorder:
    """One recording of a pool: events come in under the arena's lock, and are written outside of it.

    The pointer of a slot is the number of its object, since its address is not known before its buffer is made.

    Args:
        file: Where the lines go; the recorder closes it.
        path: Its name, or None where it is nameless and goes with the trace.

    Attributes:
        thread: The thread of what was noted last.
        until: The end of its tick, by `time.monotonic`.
        add: Notes an event of that thread, before that time: what `note` does to most.
        due: Whether there is enough to be written.
        spilled: Slots outside the pool whose end is to be recorded.
        over: Whether it is to end, or has.
        error: What ended it early, or None.
    """

    def __init__(self, file: TextIO, path: str | None) -> None:
        self._file = file
        self._path = path
        self._events: deque[Event | Mark] = deque()  # Of several arenas, each of which has a lock of its own.
        self.thread, self.until = 0, 0.0
        self._count = 0  # Of the events at the last mark.
        self.add: Callable[[Event], None] = self._events.append
        self.due = False
        self.spilled: set[Slot] = set()
        self.over = False
        self._is_ours = True
        self.error: OSError | None = None
        self._alive: dict[int, str] = {}
        self._texts: dict[tuple[int, int, Shelf], str] = {}
        self._epoch = time() - monotonic()
        self._prefixes = ("", "")
        # What passing a slot on reads, within a tick and as long as as many bytes are asked for.
        self._known: dict[Event | Mark, str] = {}
        self._millis = 0
        self._writing = threading.RLock()  # A signal handler may record too.
        weakref.finalize(self, _close, file)
        self._write([HEADER])

    @classmethod
    def to(cls, path: str | os.PathLike[str] | None) -> "Recorder":
        """Begins a recording in a new file, or where `path` is None in a nameless one.

        Raises:
            OSError: Where the file cannot be written.
        """
        if path is None:
            return cls(cast(TextIO, tempfile.TemporaryFile("w+", encoding="utf-8", newline="")), None)
        return cls(Path(path).open("w+", encoding="utf-8", newline=""), os.fspath(path))

    def note(self, event: Event, now: float) -> None:
        """Notes what happens to a slot in this thread, now by `time.monotonic`; under the arena's lock."""
        # Exact also where another arena notes at this moment: CPython changes threads after a call, and there is none
        # between the look at what was marked and the event's way in, nor between a new mark and its.
        thread = get_ident()
        if thread == self.thread and now < self.until:
            self.add(event)
        else:
            both = Mark(thread, now), event
            count = len(self._events)
            tick = DENSE_TICK_SECONDS if count - self._count > DENSE else TICK_SECONDS
            self.thread, self.until, self._count = thread, now + tick, count
            self._events.extend(both)
            self.due = count >= CHUNK

    def take(self) -> list[Event | Mark]:
        """Hands over what is to be written; under the arena's lock."""
        self.due = False
        events = [*self._events]
        self._events.clear()  # No other arena notes between these two: there is no call.
        return events

    def flush(self, take: Callable[[Callable[[], list[Event | Mark]]], list[Event | Mark]]) -> None:
        """Writes what has come in; `take` calls its argument under the arena's lock.

        A recording that cannot be written ends, with the reason in `error`: whoever draws from the pool is not to
        suffer for it.
        """
        with self._writing:
            self._write(self._format(take(self.take)))

    def end(self) -> None:
        """Ends it; the events must be flushed."""
        self.over = True
        with self._writing:
            if self._path is not None:
                _close(self._file)

    def finish(self) -> None:
        """Writes the rest and ends it, where its pool is dead or the interpreter ends: nobody else is at it."""
        self.flush(lambda take: take())
        self.end()

    def read(self) -> Trace:
        """Returns what is written so far."""
        with self._writing:
            if self._path is not None and self.over:
                return Trace.from_rmm_csv(self._path)
            self._file.seek(0)
            try:
                return read(self._file, self._path or "the recording").build(Trace, "")
            finally:
                self._file.seek(0, os.SEEK_END)

    def abandon(self) -> None:
        """Ends it without a word more, in a forked child: the file is the parent's."""
        self.over, self._is_ours = True, False
        self.spilled, self.due = set(), False
        self._events.clear()

    def _write(self, lines: list[str]) -> None:
        if not self._is_ours or self.error is not None or self._file.closed:
            return
        try:
            self._file.write("".join(lines))
            # What a killed process leaves behind is a recording too; and a forked child must find nothing to write.
            self._file.flush()
        except OSError as e:
            self.error = e

    def _format(self, events: list[Event | Mark]) -> list[str]:
        """The lines of the events; the ends of loans that were never seen to begin are left out."""
        known, line = self._known.get, self._line
        lines = [known(event) or line(event) for event in events]
        self._known.clear()
        return lines

    def _line(self, event: Event | Mark) -> str:
        """The lines of one event that is not known yet."""
        if isinstance(event, Mark):
            self._known.clear()
            self._prefixes = self._prefixes_of(event)
            return ""
        free, allocate = self._prefixes
        if isinstance(event, Slot):
            text = self._alive.get(id(event))
            if text is not None:  # Not what it holds now, which may be the request of a later event.
                lines = self._known[event] = f"{free}{text}{allocate}{text}"
                return lines
            event = event, event.requested
        slot, requested = event
        self._known.pop(slot, None)
        text = self._alive.pop(id(slot), None)
        lines = "" if text is None else free + text
        if requested is not None:
            text = self._alive[id(slot)] = self._text(slot, requested)
            lines += allocate + text
        return lines

    def _prefixes_of(self, mark: Mark) -> tuple[str, str]:
        # A loan says when it was asked for, which may be before others that came to their slots sooner.
        self._millis = millis = max(self._millis, int((mark.moment + self._epoch) * 1000))
        prefix = f"{mark.thread},{millis // 1000}.{millis % 1000:03d},"
        return f"{prefix}free,", f"{prefix}allocate,"

    def _text(self, slot: Slot, requested: int) -> str:
        """The end of a line: what it was that was lent."""
        what = (id(slot), requested, slot.shelf)
        text = self._texts.get(what)
        if text is None:
            if len(self._texts) >= MAX_TEXTS:
                self._texts.clear()
            text = self._texts[what] = _text(*what)
        return text


class Recorders:
    """Several recordings of one arena, to which it notes as to one.

    Attributes:
        thread: No thread's.
        until: Before any time, so that each event comes by `note`, and each recorder looks for itself.
        add: That of the first.
    """

    thread, until = 0, 0.0

    def __init__(self, recorders: Sequence[Recorder]) -> None:
        self._recorders = recorders
        self.add = recorders[0].add

    @property
    def due(self) -> bool:
        """Whether one of them has enough to be written."""
        return any(recorder.due for recorder in self._recorders)

    def note(self, event: Event, now: float) -> None:
        """As `Recorder.note`."""
        for recorder in self._recorders:
            recorder.note(event, now)


def _text(pointer: int, requested: int, shelf: Shelf) -> str:
    size_class, axis = shelf.size_class, shelf.ragged_axis
    shape, along = size_class.shape, ""
    if axis is not None and shelf.nbytes:
        shape = (*shape[:axis], requested * shape[axis] // shelf.nbytes, *shape[axis + 1 :])
        along = str(axis)
    return f"{pointer:#x},{requested},0,{class_text(size_class)},{shape_text(shape)},{along}\n"


def _close(file: TextIO) -> None:
    try:
        file.close()
    except OSError:  # It holds what could not be written, which is in `error` already.
        pass


def from_environment(name: str) -> Recorder | None:
    """The recording that the environment asks for, or None; the first pool writes the file itself, others beside it.

    Raises:
        OSError: Where the file cannot be written.
    """
    asked = os.environ.get(VARIABLE)
    if not asked:
        return None
    path = Path(asked)
    if path in _taken:
        path = path.with_name(f"{path.stem}.{name}{path.suffix}")
    _taken.add(path)
    return Recorder.to(path)

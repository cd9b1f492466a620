"""Recording: what a pool is asked for and gets back, as a trace that is written while it goes on."""

import os
import tempfile
import threading
import weakref
from _thread import get_ident
from collections import deque
from collections.abc import Callable
from pathlib import Path
from time import time_ns
from typing import TextIO, cast

from ._slot import Shelf, Slot
from ._trace import Trace
from ._trace_csv import HEADER, class_text, read, shape_text

VARIABLE = "ARENAX_RECORD"
# Events held before they are written: some ten milliseconds of work, once in a thousand batches.
CHUNK = 4096
# Ends of lines that are kept, since a loop draws the same again and again.
MAX_TEXTS = 16_384

# Files that the environment variable has led to in this process.
_taken: set[Path] = set()
# Whether a loan begins or ends, the thread, nanoseconds since the epoch, the slot's number, bytes asked for, its shelf.
Event = tuple[bool, int, int, int, int, Shelf]


def event_of(begins: bool, slot: Slot, requested: int) -> Event:
    """The event that a loan of a slot begins or ends now, in this thread."""
    return begins, get_ident(), time_ns(), id(slot), requested, slot.shelf


class Recorder:
    """One recording of a pool: events come in under the arena's lock, and are written outside of it.

    The pointer of a slot is the number of its object, since its address is not known before its buffer is made. Times
    are written to the millisecond: a text that many events share.

    Args:
        file: Where the lines go; the recorder closes it.
        path: Its name, or None where it is nameless and goes with the trace.

    Attributes:
        events: Those that are not written yet.
        spilled: Slots outside the pool whose end is to be recorded.
        over: Whether it is to end, or has.
        error: What ended it early, or None.
    """

    def __init__(self, file: TextIO, path: str | None) -> None:
        self._file = file
        self._path = path
        self.events: deque[Event] = deque()  # Of several arenas, each of which has a lock of its own.
        self.spilled: set[Slot] = set()
        self.over = False
        self._is_ours = True
        self.error: OSError | None = None
        self._alive: dict[int, str] = {}
        self._texts: dict[tuple[int, int, Shelf], str] = {}
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

    def take(self) -> list[Event]:
        """Hands over what is to be written; under the arena's lock."""
        return [self.events.popleft() for _ in range(len(self.events))]

    def flush(self, take: Callable[[Callable[[], list[Event]]], list[Event]]) -> None:
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
        self.events, self.spilled = deque(), set()

    def _write(self, lines: list[str]) -> None:
        if not self._is_ours or self.error is not None or self._file.closed:
            return
        try:
            self._file.write("".join(lines))
            # What a killed process leaves behind is a recording too; and a forked child must find nothing to write.
            self._file.flush()
        except OSError as e:
            self.error = e

    def _format(self, events: list[Event]) -> list[str]:
        """The lines of the events; the ends of loans that were never seen to begin are left out."""
        found: list[str] = []
        alive, texts, key, prefix = self._alive, self._texts, None, ""
        for begins, thread, now, pointer, requested, shelf in events:
            moment = (thread, now // 1_000_000)
            if moment != key:
                key = moment
                prefix = f"{thread},{moment[1] // 1000}.{moment[1] % 1000:03d},"
            text = alive.pop(pointer, None)
            if text is not None:
                found += (prefix, "free,", text)
            if begins:
                what = (pointer, requested, shelf)
                text = texts.get(what)
                if text is None:
                    if len(texts) >= MAX_TEXTS:
                        texts.clear()
                    text = texts[what] = _text(pointer, requested, shelf)
                alive[pointer] = text
                found += (prefix, "allocate,", text)
        return found


def _text(pointer: int, requested: int, shelf: Shelf) -> str:
    """The end of a line: what it was that was lent."""
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

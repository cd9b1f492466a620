"""Traces: what a program asked of an allocator, and when it gave each thing back."""

import os
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol, Self

import attrs
import numpy as np

from ._errors import BadTrace
from ._request import SizeClass

Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]
ACTIONS = ("allocate", "free")
MAX_BYTES = 2**62
_COLUMNS = ("steps", "sizes", "times", "threads", "requests")


class Source(Protocol):
    """What a `Trace` may be read from later.

    Attributes:
        over: Whether it is complete.
    """

    over: bool

    def read(self) -> "Trace":
        """Returns what there is so far."""
        ...


@attrs.frozen
class Request:
    """The array that a recorded buffer was asked for.

    Attributes:
        shape: The shape that was asked for.
        dtype: The dtype.
        axis: The axis that is padded to a size class; None where the shape is exact, or not known to vary.
        size_class: The class that served it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    axis: int | None
    size_class: SizeClass


class Event(NamedTuple):
    """One event of a trace.

    Attributes:
        action: ``"allocate"`` or ``"free"``.
        buffer: The buffer's number: they count up from 0 in the order in which they are allocated.
        size: The buffer's bytes.
        time: Seconds, or whatever its source counts in; the number of the event where its source has no times.
        thread: The thread that caused it, 0 where that is not known.
    """

    action: str
    buffer: int
    size: int
    time: float
    thread: int


class Trace:
    """The allocations and frees of a program, in their order; `len` counts its buffers.

    Made by `from_events`, `from_rmm_csv` or `BufferPool.record`; `arenax_stress.Trace` reads further formats and
    generates workloads.

    Attributes:
        steps: An int64 for each event: ``b`` where buffer b is allocated, ``~b`` where it is freed.
        sizes: An int64 for each buffer: bytes that were asked for.
        times: A float64 for each event, or None.
        threads: An int64 for each event, or None.
        requests: The `Request` of each buffer where it is known, or None.
        name: What tables call it.

    Example:
        >>> import arenax
        >>> trace = arenax.Trace.from_events([("allocate", "a", 512), ("allocate", "b", 256), ("free", "a", 512)])
        >>> len(trace), trace.peak_bytes
        (2, 768)
        >>> [event[:3] for event in trace]
        [('allocate', 0, 512), ('allocate', 1, 256), ('free', 0, 512)]
    """

    _source: "Source"

    def __init__(
        self,
        steps: Any,
        sizes: Any,
        *,
        times: Any = None,
        threads: Any = None,
        requests: tuple[Request, ...] | None = None,
        name: str = "trace",
    ) -> None:
        self.steps = _frozen(steps, np.int64)
        self.sizes = _frozen(sizes, np.int64)
        self.times = None if times is None else _frozen(times, np.float64)
        self.threads = None if threads is None else _frozen(threads, np.int64)
        self.requests = requests
        self.name = name

    @classmethod
    def of(cls, source: "Source", name: str) -> Self:
        """Returns the trace of a recording, which is read when it is looked at: so far, or once it is over for good."""
        trace = cls.__new__(cls)
        trace.name = name
        trace._source = source
        return trace

    def __getattr__(self, name: str) -> Any:
        source = self.__dict__.get("_source")
        if source is None or name not in _COLUMNS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        is_over = source.over
        found = source.read()
        if is_over:
            for column in _COLUMNS:
                setattr(self, column, getattr(found, column))
            del self._source
        return getattr(found, name)

    @classmethod
    def from_events(cls, events: Iterable[tuple[str, Hashable, int]], name: str = "trace") -> Self:
        """Returns the trace of ``(action, id, size)`` in their order.

        Args:
            events: The action is ``"allocate"`` or ``"free"``; the size of a free is not looked at. An id may be used
                again once its buffer is freed.
            name: What tables call it.

        Raises:
            BadTrace: For an event that cannot be; also a `ValueError`.
        """
        builder = TraceBuilder()
        for number, event in enumerate(events):
            where = f"event {number}"
            try:
                action, key, size = event
            except (TypeError, ValueError):
                builder.refuse(f"must be (action, id, size), got {event!r}", where)
            if action == "allocate":
                builder.allocate(key, size, where)
            elif action == "free":
                builder.free(key, where)
            else:
                builder.refuse(f"the action must be one of {', '.join(ACTIONS)}, got {action!r}", where)
        return builder.build(cls, name)

    @classmethod
    def from_rmm_csv(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a log of RMM, or a recording of a pool, which has further columns.

        The columns are ``Thread,Time,Action,Pointer,Size,Stream``; see RMM's guide, "Logging and Profiling". Failed
        allocations, and allocations of nothing at the null pointer, are left out.

        Raises:
            BadTrace: Naming file, line and fault; also a `ValueError`.
            OSError: Where the file cannot be read.
        """
        from ._trace_csv import read

        # What is no text is found in its own line, and not by the decoder, which reads ahead.
        with Path(path).open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            return read(file, str(path)).build(cls, Path(path).stem)

    def to_rmm_csv(self, path: str | os.PathLike[str]) -> None:
        """Writes it in the columns that RMM logs and replays, and where its requests are known their class and shape.

        Raises:
            OSError: Where the file cannot be written.
        """
        from ._trace_csv import write

        with Path(path).open("w", encoding="utf-8", newline="") as file:
            write(self, file)

    def __reduce__(self) -> tuple[Any, ...]:
        # By the constructor, since NumPy's arrays can be written again when they were pickled or copied.
        return _rebuild, (type(self), {name: getattr(self, name) for name in (*_COLUMNS, "name")})

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[Event]:
        times = range(len(self.steps)) if self.times is None else self.times.tolist()
        threads = [0] * len(self.steps) if self.threads is None else self.threads.tolist()
        sizes = self.sizes.tolist()
        for step, time, thread in zip(self.steps.tolist(), times, threads, strict=True):
            buffer = max(step, ~step)
            yield Event(ACTIONS[step < 0], buffer, sizes[buffer], time, thread)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: {len(self):,} buffers, {self.peak_bytes:,} bytes at its peak>"

    @property
    def live_bytes(self) -> Ints:
        """An int64 for each event: bytes alive after it."""
        signed = np.where(self.steps < 0, -1, 1)
        return np.cumsum(signed * self.sizes[np.maximum(self.steps, ~self.steps)])

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once."""
        return int(self.live_bytes.max(initial=0))

    @property
    def lifetimes(self) -> tuple[Ints, Ints]:
        """For each buffer, the events that allocate and free it; where none frees it, the count of events."""
        starts = np.flatnonzero(self.steps >= 0)
        ends = np.full(len(self), len(self.steps), np.int64)
        frees = np.flatnonzero(self.steps < 0)
        ends[~self.steps[frees]] = frees
        return starts, ends

    def repeat(self, n: int) -> Self:
        """Returns the trace `n` times over, with new buffers each time; what outlives a pass is freed at its end.

        Args:
            n: How often, at least 1.
        """
        if isinstance(n, bool) or not isinstance(n, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"n must be an integer, got {n!r}")
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        survivors = ~np.flatnonzero(self.lifetimes[1] == len(self.steps))
        once = np.concatenate((self.steps, survivors))
        shifted = [np.where(once < 0, once - i * len(self), once + i * len(self)) for i in range(n)]
        count = n * len(once) - len(survivors)
        times = self.times
        if times is not None:
            end = times[-1] if len(times) else 0.0
            period = end - (times[0] if len(times) else 0.0)
            ends = np.full(len(survivors), end)
            times = np.concatenate([np.concatenate((times, ends)) + i * period for i in range(n)])[:count]
        threads = self.threads
        if threads is not None:
            threads = np.tile(np.concatenate((threads, threads[self.lifetimes[0]][~survivors])), n)[:count]
        return type(self)(
            np.concatenate(shifted)[:count],
            np.tile(self.sizes, n),
            times=times,
            threads=threads,
            requests=None if self.requests is None else self.requests * n,
            name=self.name if n == 1 else f"{self.name} x {n}",
        )


class TraceBuilder:
    """Puts a trace together, event by event, and refuses what cannot be.

    Args:
        path: The file that the events come from, for messages.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = path
        self._alive: dict[Hashable, int] = {}
        self._alive_bytes = 0
        self._steps: list[int] = []
        self._sizes: list[int] = []
        self._times: list[float] = []
        self._threads: list[int] = []
        self._requests: list[Request] = []

    def allocate(
        self,
        key: Hashable,
        size: int,
        where: str,
        *,
        time: float | None = None,
        thread: int | None = None,
        request: Request | None = None,
    ) -> None:
        """Adds an allocation of `size` bytes under the name `key`; `where` is the line or event, for messages."""
        if isinstance(size, bool) or not isinstance(size, int | np.integer):  # pyright: ignore[reportUnnecessaryIsInstance]
            self.refuse(f"a size must be an integer, got {size!r}", where)
        if size < 0:
            self.refuse(f"a size must be at least 0, got {size}", where)
        if size > MAX_BYTES:
            self.refuse(f"a size must be at most {MAX_BYTES}, got {size}", where)
        self._check(key, where)
        if key in self._alive:
            self.refuse(f"allocates {key!r}, which is alive", where)
        self._alive_bytes += int(size)
        if self._alive_bytes > MAX_BYTES:
            self.refuse(f"has more than {MAX_BYTES} bytes alive", where)
        self._alive[key] = len(self._sizes)
        self._add(len(self._sizes), where, time, thread)
        self._sizes.append(int(size))
        if request is not None:
            self._requests.append(request)

    def free(self, key: Hashable, where: str, *, time: float | None = None, thread: int | None = None) -> None:
        """Adds the free of what `key` names."""
        self._check(key, where)
        buffer = self._alive.pop(key, None)
        if buffer is None:
            self.refuse(f"frees {key!r}, which is not alive", where)
        self._alive_bytes -= self._sizes[buffer]
        self._add(~buffer, where, time, thread)

    def refuse(self, fault: str, where: str | None = None) -> NoReturn:
        """Raises `BadTrace`."""
        place = ", ".join(filter(None, (self.path, where)))
        raise BadTrace(f"{place}: {fault}" if place else fault, path=self.path, where=where, fault=fault)

    def build(self, kind: type, name: str) -> Any:
        """Returns the trace; `kind` is the class it is to be of. What is not known of all of it is left out."""
        count = len(self._steps)
        return kind(
            self._steps,
            self._sizes,
            times=self._times if self._times and len(self._times) == count else None,
            threads=self._threads if self._threads and len(self._threads) == count else None,
            requests=tuple(self._requests) if self._requests and len(self._requests) == len(self._sizes) else None,
            name=name,
        )

    def _check(self, key: Hashable, where: str) -> None:
        try:
            hash(key)
        except TypeError:
            self.refuse(f"an id must be hashable, got {key!r}", where)

    def _add(self, step: int, where: str, time: float | None, thread: int | None) -> None:
        if time is not None:
            if not 0 <= time < float("inf"):
                self.refuse(f"a time must be at least 0 and finite, got {time}", where)
            self._times.append(time)
        if thread is not None:
            self._threads.append(thread)
        self._steps.append(step)


def _rebuild(kind: type[Trace], columns: dict[str, Any]) -> Trace:
    return kind(columns.pop("steps"), columns.pop("sizes"), **columns)


def _frozen(values: Any, dtype: Any) -> Any:
    array = np.array(values, dtype)
    array.flags.writeable = False
    return array

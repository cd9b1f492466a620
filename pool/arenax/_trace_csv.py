"""The columns in which RMM logs allocations, and those in which a pool's recording says more of them."""

import csv
from typing import TextIO

import numpy as np

from ._request import SizeClass
from ._trace import Request, Trace, TraceBuilder

# RMM writes them without spaces; its replay benchmark reads them by their names, and no others.
COLUMNS = ("Thread", "Time", "Action", "Pointer", "Size", "Stream")
FURTHER = ("Class", "Shape", "Axis")
HEADER = ",".join((*COLUMNS, *FURTHER)) + "\n"
_DAY = 86_400.0


def read(file: TextIO, path: str) -> TraceBuilder:
    """Reads a log; `path` is what messages call it.

    Raises:
        BadTrace: Naming file, line and fault.
    """
    builder = TraceBuilder(path)
    rows = csv.reader(file)
    try:
        header = next(rows, None)
        if header is None or tuple(header[: len(COLUMNS)]) != COLUMNS:
            builder.refuse(f"must begin with the columns {','.join(COLUMNS)}, got {header}", "line 1")
        forms = _Forms(builder) if tuple(header[len(COLUMNS) :]) == FURTHER else None
        times = _Times(builder)
        for row in rows:
            where = f"line {rows.line_num}"
            if any(map(_is_foreign, row)):
                builder.refuse("is no text", where)
            if len(row) != len(header):
                builder.refuse(f"must have {len(header)} columns, got {len(row)}", where)
            thread, time, action, pointer, size = row[:5]
            size, now = _integer(builder, size, 10, "Size", where), times.seconds(time, where)
            thread = _integer(builder, thread, 10, "Thread", where)
            if action == "allocate":
                key = _integer(builder, pointer, 16, "Pointer", where)
                if key or size:
                    request = None if forms is None else forms.request(row[6], row[7], row[8], where)
                    builder.allocate(key, size, where, time=now, thread=thread, request=request)
            elif action == "free":
                key = _integer(builder, pointer, 16, "Pointer", where)
                if key or size:
                    builder.free(key, where, time=now, thread=thread)
            elif action != "allocate failure":
                builder.refuse(f"the action must be allocate, allocate failure or free, got {action!r}", where)
    except csv.Error as e:
        builder.refuse(f"is no text in columns: {e}", f"line {rows.line_num}")
    return builder


def write(trace: Trace, file: TextIO) -> None:
    """Writes a trace; the pointer of a buffer is its number, counted from 1."""
    requests = trace.requests
    file.write(HEADER if requests else ",".join(COLUMNS) + "\n")
    for event in trace:
        line = f"{event.thread},{event.time:.6f},{event.action},{event.buffer + 1:#x},{event.size},0"
        if requests:
            request = requests[event.buffer]
            line += f",{class_text(request.size_class)},{shape_text(request.shape)},"
            line += "" if request.axis is None else str(request.axis)
        file.write(line + "\n")


def class_text(size_class: SizeClass) -> str:
    """A size class in one column: no comma in it, so that no reader must know of quotes.

    Example:
        >>> from arenax._trace_csv import class_text
        >>> import arenax, numpy as np
        >>> class_text(arenax.SizeClass((8, 1024), np.dtype("float32")))
        'float32[8x1024]'
    """
    return f"{size_class.dtype.name}[{shape_text(size_class.shape)}]"


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape in one column."""
    return "x".join(map(str, shape))


class _Forms:
    """The requests of a recording: each distinct one is parsed once, and is one object."""

    def __init__(self, builder: TraceBuilder) -> None:
        self._builder = builder
        self._known: dict[tuple[str, str, str], Request] = {}

    def request(self, class_: str, shape: str, axis: str, where: str) -> Request:
        key = (class_, shape, axis)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._parse(class_, shape, axis, where)
        return found

    def _parse(self, class_: str, shape: str, axis: str, where: str) -> Request:
        try:
            dtype_name, bracket, capacities = class_.partition("[")
            if not (bracket and capacities.endswith("]")):
                raise ValueError(f"{class_!r} is no size class")
            dtype = np.dtype(dtype_name)
            size_class = SizeClass(_shape(capacities[:-1]), dtype)
            asked, along = _shape(shape), int(axis) if axis else None
            rank = len(size_class.shape)
            if len(asked) != rank or not (along is None or 0 <= along < rank):
                raise ValueError(f"shape {shape!r} and axis {axis!r} do not belong to {class_}")
            if any(
                n > m if i == along else n != m for i, (n, m) in enumerate(zip(asked, size_class.shape, strict=True))
            ):
                raise ValueError(f"shape {shape!r} is not one that {class_} serves")
            return Request(asked, dtype, along, size_class)
        except (ValueError, TypeError) as e:
            self._builder.refuse(f"Class, Shape and Axis must be as a pool records them: {e}", where)


class _Times:
    """Seconds from the column `Time`: a number of them, or a time of day, which may pass midnight."""

    def __init__(self, builder: TraceBuilder) -> None:
        self._builder = builder
        self._last = 0.0
        self._midnights = 0.0

    def seconds(self, text: str, where: str) -> float:
        try:
            if ":" not in text:
                return float(text)
            hours, minutes, seconds = text.split(":")
            now = int(hours) * 3600 + int(minutes) * 60 + float(seconds) + self._midnights
        except ValueError:
            self._builder.refuse(f"Time must be seconds or a time of day, got {text!r}", where)
        if now < self._last - _DAY / 2:  # Rows of several threads may be a little out of order.
            self._midnights += _DAY
            now += _DAY
        self._last = now
        return now


def _is_foreign(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text)


def _integer(builder: TraceBuilder, text: str, base: int, column: str, where: str) -> int:
    try:
        return int(text, base)
    except ValueError:
        builder.refuse(f"{column} must be an integer{' to the base 16' if base == 16 else ''}, got {text!r}", where)


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split("x")) if text else ()

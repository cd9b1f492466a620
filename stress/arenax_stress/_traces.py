"""Traces from files: `arenax.Trace`, with the readers that the commands need."""

import csv
import os
from pathlib import Path
from typing import Self, TextIO

import numpy as np

import arenax
from arenax._trace import TraceBuilder

from . import _snapshot

RMM = ("Thread", "Time", "Action")
INTERVALS = ("id", "lower", "upper", "size")
_PICKLES = (".pickle", ".pkl")


class Trace(arenax.Trace):
    r"""An `arenax.Trace` that is read from further files, and that the workloads make.

    Example:
        >>> import pathlib, tempfile
        >>> from arenax_stress import Trace
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "net.csv")
        ...     _ = path.write_text("id,lower,upper,size\n0,0,2,512\n1,2,3,256\n")
        ...     trace = Trace.from_file(path)
        >>> trace
        <Trace 'net': 2 buffers, 512 bytes at its peak>
        >>> [event[:3] for event in trace]
        [('allocate', 0, 512), ('free', 0, 512), ('allocate', 1, 256), ('free', 1, 256)]
    """

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], *, device: int = 0) -> Self:
        """Reads a file of any known kind: the suffix of a pickle tells, or else the first line.

        Args:
            path: A log of RMM or a recording (`from_rmm_csv`), intervals (`from_intervals_csv`), or a snapshot of
                PyTorch (`from_pytorch_snapshot`).
            device: The device whose events are taken, where the file has several.

        Raises:
            BadTrace: Naming file, line and fault; also a `ValueError`.
            OSError: Where the file cannot be read.
        """
        with Path(path).open("rb") as file:
            start = file.readline(1000)
        if Path(path).suffix in _PICKLES or start[:1] == b"\x80":
            return cls.from_pytorch_snapshot(path, device=device)
        names = tuple(name.strip() for name in start.decode("utf-8-sig", "replace").split(","))
        if names[: len(RMM)] == RMM:
            return cls.from_rmm_csv(path)
        if names[: len(INTERVALS)] == INTERVALS:
            return cls.from_intervals_csv(path)
        TraceBuilder(str(path)).refuse(
            "must be an RMM log (Thread,Time,Action,Pointer,Size,Stream), intervals (id,lower,upper,size) or a "
            f"snapshot of PyTorch (a .pickle), and begins with {start[:60].decode('utf-8', 'replace')!r}",
            "line 1",
        )

    @classmethod
    def from_intervals_csv(cls, path: str | os.PathLike[str]) -> Self:
        """Reads the lives of buffers: ``id,lower,upper,size``, as minimalloc and idealloc have them.

        A buffer lives from `lower` to just before `upper`, in logical time; at equal times frees come before
        allocations, and ties go in the order of the rows. So an interval that is empty cannot be lived, and is refused,
        as one that ends before it begins. Further columns, such as the offsets of a solution, are not looked at.

        Raises:
            BadTrace: Naming file, line and fault; also a `ValueError`.
            OSError: Where the file cannot be read.
        """
        # Bytes that are no text come through, so that it is their row that is refused.
        with Path(path).open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            lowers, uppers, sizes = _intervals(file, TraceBuilder(str(path)))
        count = len(sizes)
        rows = np.arange(count)
        # Row r is 2r where it is freed and 2r + 1 where it is allocated.
        times = np.column_stack((uppers, lowers)).ravel()
        allocates = np.tile((False, True), count)
        order = np.lexsort((np.repeat(rows, 2), allocates, times))
        numbers = np.empty(count, np.int64)
        allocated = order[allocates[order]] // 2
        numbers[allocated] = rows
        steps = np.where(allocates[order], numbers[order // 2], ~numbers[order // 2])
        return cls(steps, sizes[allocated], times=times[order], name=Path(path).stem)

    @classmethod
    def from_pytorch_snapshot(cls, path: str | os.PathLike[str], *, device: int = 0) -> Self:
        """Reads what ``torch.cuda.memory._dump_snapshot()`` wrote while ``_record_memory_history()`` was on.

        The file is a pickle, which could run code: this reader takes plain data from it and refuses anything else. The
        size of a buffer is what was asked for, before PyTorch rounds it. It ends where its free is completed: until
        then another stream may use it. Buffers from before the recording are the first of the trace, in the order of
        their addresses: those that it frees, by the size in that event, and those alive throughout, from the segments.

        Args:
            path: The file.
            device: The index of the device.

        Raises:
            BadTrace: Naming file, event and fault; also a `ValueError`. Also for a history with a gap, in which
                buffers were allocated or freed while it was off.
            OSError: Where the file cannot be read.
        """
        if isinstance(device, bool) or not isinstance(device, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"device must be an integer, got {device!r}")
        return _snapshot.read(Path(path).read_bytes(), str(path), device).build(cls, Path(path).stem)

    def to_pytorch_snapshot(self, path: str | os.PathLike[str]) -> None:
        r"""Writes it as ``torch.cuda.memory._dump_snapshot()`` would, for the viewer at pytorch.org/memory_viz.

        A trace has no addresses: the buffers lie where XLA's allocator, simulated in one region without bounds, would
        put them. Where the requests are known, the size class of each stands in the viewer as the function that
        allocated it. Threads are not in a snapshot, and times are in it to the microsecond.

        Args:
            path: The file, by custom with the suffix ``.pickle``.

        Raises:
            OSError: Where the file cannot be written.

        Example:
            >>> import pathlib, tempfile
            >>> from arenax_stress import Trace
            >>> trace = Trace.from_events([("allocate", "a", 512), ("allocate", "b", 100), ("free", "a", 512)])
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = pathlib.Path(folder, "run.pickle")
            ...     trace.to_pytorch_snapshot(path)
            ...     [event[:3] for event in Trace.from_pytorch_snapshot(path)]
            [('allocate', 0, 512), ('allocate', 1, 100), ('free', 0, 512)]
        """
        # Imported here: the simulators need an extra, and the readers do not.
        from ._snapshot_writer import dumps

        Path(path).write_bytes(dumps(self))


def _intervals(file: TextIO, builder: TraceBuilder) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The three columns of numbers."""
    rows = csv.reader(file)
    found: list[tuple[int, int, int]] = []
    seen: dict[str, int] = {}
    try:
        header = next(rows, [])
        width = len(header)
        if tuple(name.strip() for name in header[:4]) != INTERVALS:
            builder.refuse(
                f"must begin with the columns {','.join(INTERVALS)}, got {','.join(header)[:100]!r}", "line 1"
            )
        for row in rows:
            if not row:
                continue
            if len(row) != width:
                builder.refuse(f"must have {width} columns, got {len(row)}", f"line {rows.line_num}")
            key, *texts = row[:4]
            try:
                lower, upper, size = map(int, texts)
            except ValueError:
                builder.refuse(
                    f"lower, upper and size must be integers, got {','.join(texts)[:100]!r}", f"line {rows.line_num}"
                )
            # Times become floats, which are exact as far as this.
            if not (0 <= lower < upper <= 2**53 and 0 <= size < 2**63):
                _refuse(builder, lower, upper, f"line {rows.line_num}")
            if seen.setdefault(key, rows.line_num) != rows.line_num:
                builder.refuse(f"has the id {key[:100]!r} of line {seen[key]}", f"line {rows.line_num}")
            found.append((lower, upper, size))
    except csv.Error as e:
        builder.refuse(f"is no text in columns: {e}", f"line {rows.line_num}")
    columns = np.array(found, np.int64).reshape(-1, 3)
    return columns[:, 0], columns[:, 1], columns[:, 2]


def _refuse(builder: TraceBuilder, lower: int, upper: int, where: str) -> None:
    if lower < 0 or upper > 2**53:
        builder.refuse("lower and upper must be at least 0 and at most 2**53", where)
    if lower >= upper:
        builder.refuse(f"upper must lie above lower, got the interval from {lower} to {upper}", where)
    builder.refuse("a size must be at least 0 and below 2**63", where)

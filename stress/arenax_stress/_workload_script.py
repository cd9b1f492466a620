"""Writes down what a program does with memory: the base of the workloads."""

from collections.abc import Iterable

import numpy as np

from ._traces import Trace


class Script:
    """A trace in the making, of a fixed length: what is written after it is full is left out.

    A workload can so be a loop that ends at no particular place, as a program that is stopped. Whatever was alive
    there stays alive in the trace.

    Args:
        name: What tables call it.
        events: The most events of the trace.

    Example:
        >>> from arenax_stress._workload_script import Script
        >>> script = Script("example", events=3)
        >>> while not script.full:
        ...     script.free([script.allocate(512)])
        >>> script.trace(), script.trace().steps.tolist()
        (<Trace 'example': 2 buffers, 512 bytes at its peak>, [0, -1, 1])
    """

    def __init__(self, name: str, events: int) -> None:
        if isinstance(events, bool) or not isinstance(events, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"events must be an integer, got {events!r}")
        if events < 1:
            raise ValueError(f"events must be at least 1, got {events}")
        self.name = name
        self.events = events
        self._steps: list[int] = []
        self._sizes: list[int] = []
        self._times: list[float] = []
        self._threads: list[int] = []

    @property
    def full(self) -> bool:
        """Whether nothing that is written from now on will be in the trace."""
        return len(self._steps) >= self.events

    def allocate(self, size: float, *, time: float | None = None, thread: int | None = None) -> int:
        """Writes an allocation of `size` bytes, rounded up and at least 1; returns the buffer."""
        buffer = len(self._sizes)
        self._sizes.append(max(1, int(np.ceil(size))))
        self._write(buffer, time, thread)
        return buffer

    def free(self, buffers: Iterable[int], *, time: float | None = None, thread: int | None = None) -> None:
        """Writes the frees of `buffers`, in their order."""
        for buffer in buffers:
            self._write(~buffer, time, thread)

    def trace(self) -> Trace:
        """Returns the trace. Times and threads are in it where every event has one."""
        count = self.events
        steps = np.array(self._steps[:count], np.int64)
        return Trace(
            steps,
            self._sizes[: int((steps >= 0).sum())],
            times=self._times[:count] if len(self._times) == len(self._steps) else None,
            threads=self._threads[:count] if len(self._threads) == len(self._steps) else None,
            name=self.name,
        )

    def _write(self, step: int, time: float | None, thread: int | None) -> None:
        self._steps.append(step)
        if time is not None:
            self._times.append(time)
        if thread is not None:
            self._threads.append(thread)

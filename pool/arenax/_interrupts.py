"""Interrupts on purpose: an exception wherever in the pool's code CPython may run a signal handler that raises one.

CPython looks for signals where a Python function begins or goes on after a ``yield``, when a call of C code has
returned, and at a jump backward; between any other two instructions it cannot (as between a lock's ``__enter__`` in C
and the body of its ``with``). This module does not model that. It simulates a signal just before an instruction that
looks, or leads to one that does, and CPython runs the handler, which raises, as for a real one: at the same place, with
the same ``finally`` and ``with`` blocks around it. Two such instructions may lead to the same place.

The handler would run in the trace function itself if that made one more call, so its last step is an iterator in C,
which a ``for`` advances without a call.
"""

import _thread
import dis
import signal
import sys
from collections.abc import Collection
from types import CodeType, FrameType
from typing import Any, Self

PACKAGES = ("arenax", "arenax_adapters")
# Before a return: the caller may be C code, whose own return to Python is such a place.
_LOOKS = ("CALL", "JUMP_BACKWARD", "POP_JUMP_BACKWARD", "RETURN", "YIELD")
_LEADS = ("FOR_ITER", "SEND", "BEFORE_WITH", "WITH_EXCEPT")
_NEVER = ("JUMP_BACKWARD_NO_INTERRUPT", "RETURN_GENERATOR", "CALL_INTRINSIC")
# By identity, since code objects compare by contents; each is kept, so that no other takes its place in memory.
_known: dict[int, tuple[CodeType, frozenset[int]]] = {}


class Interrupt:
    """An exception at the n-th point, made by `interrupt`; a context manager in whose scope the points are counted.

    Attributes:
        points: The points passed in the scope, as texts: function, line and instruction. None are added once it has
            fired.
        fired: Whether the signal came, and so the exception was raised somewhere in the scope.
    """

    def __init__(self, nth: int | None, error: BaseException | type[BaseException], packages: Collection[str]) -> None:
        self.points: list[str] = []
        self.fired = False
        self._nth = nth
        self._error = error
        self._packages = frozenset(packages)
        self._previous: Any = None
        self._handler: Any = None
        self._simulate = map(_thread.interrupt_main, (signal.SIGINT,))

    def __enter__(self) -> Self:
        self._handler = signal.signal(signal.SIGINT, self._handle)
        self._previous = sys.gettrace()
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *_: object) -> None:
        # Where it has fired, too: CPython takes a trace function away from a thread in which an exception passed it.
        sys.settrace(self._previous)
        if not self.fired:
            signal.signal(signal.SIGINT, self._handler)

    def _handle(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._handler)
        raise self._error

    def _on_call(self, frame: FrameType, event: str, arg: object) -> Any:  # noqa: ARG002
        if frame.f_globals.get("__name__", "").partition(".")[0] not in self._packages:
            return None
        if frame.f_code.co_filename == __file__:
            return None
        frame.f_trace = self._on_opcode  # First, or CPython 3.13 does not heed what follows.
        frame.f_trace_lines = False
        frame.f_trace_opcodes = True
        return self._on_opcode

    def _on_opcode(self, frame: FrameType, event: str, arg: object) -> Any:  # noqa: ARG002
        if event != "opcode" or self.fired or frame.f_lasti not in _points(frame.f_code):
            return self._on_opcode
        code = frame.f_code
        name = dis.opname[code.co_code[frame.f_lasti]]
        self.points.append(f"{code.co_qualname}, line {frame.f_lineno}, {name} at {frame.f_lasti}")
        if len(self.points) == self._nth:
            self.fired = True
            sys.settrace(self._previous)
            for _ in self._simulate:
                return None
        return self._on_opcode


def _points(code: CodeType) -> frozenset[int]:
    found = _known.get(id(code))
    if found is None:
        found = _known[id(code)] = (code, _find(code))
    return found[1]


def _find(code: CodeType) -> frozenset[int]:
    names = ((i.offset, i.opname) for i in dis.get_instructions(code))
    return frozenset(
        offset for offset, name in names if name.startswith(_LOOKS + _LEADS) and not name.startswith(_NEVER)
    )


def interrupt(
    nth: int | None,
    error: BaseException | type[BaseException] = KeyboardInterrupt,
    packages: Collection[str] = PACKAGES,
) -> Interrupt:
    """Raises an exception at the n-th point in the pool's code where a signal handler can run.

    To try every point, take ``nth`` = 1, 2, ... until it no longer fires. The last few points may lead to a place
    behind the pool's code, in the scope or at its very end. Needs CPython and the main
    thread, in which alone it runs handlers; a debugger's or another trace function is
    suspended in the scope, and in force again from the interrupt on.

    Args:
        nth: Which point, from 1; None only counts.
        error: What is raised: an exception, or a class of them.
        packages: Names of the packages whose functions have the points.

    Returns:
        An `Interrupt`, to be used as ``with interrupt(n) as at:`` inside a ``try``.

    Raises:
        ValueError: For an `nth` below 1.

    Example:
        >>> import arenax, itertools, numpy as np
        >>> from arenax.testing import FakeDevice, interrupt
        >>> with arenax.BufferPool(FakeDevice()) as pool:
        ...     for n in itertools.count(1):
        ...         try:
        ...             with interrupt(n) as at:
        ...                 x = pool.put(np.ones(3, np.float32))
        ...         except KeyboardInterrupt:
        ...             pass
        ...         x = None
        ...         pool.check()
        ...         if not at.fired:
        ...             break
        ...     print(n > 20, pool.stats().leased_count)
        True 0
    """
    if nth is not None and nth < 1:
        raise ValueError(f"nth must be at least 1 or None, got {nth}")
    return Interrupt(nth, error, packages)

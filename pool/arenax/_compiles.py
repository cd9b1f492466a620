"""Counts the programs that JAX compiles, through `jax.monitoring`, for a pool and its steps.

The listener runs in the compiling thread, once for each backend compile, also where a persistent cache answers it.
"""

import threading
import weakref
from collections import deque
from typing import Any, Self

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class _Active(threading.local):
    """The watches of this thread; weakly, so that a step which an interrupt kept from its end is not watched on."""

    def __init__(self) -> None:
        self.watches: list[weakref.ref[Watch]] = []

    def living(self) -> "list[Watch]":
        """Those that are not over; the others are dropped."""
        found = [(r, w) for r in self.watches if (w := r()) is not None and w._counter is not None]
        self.watches[:] = [r for r, _ in found]
        return [w for _, w in found]


_active = _Active()


class Watch:
    """One scope, in the thread that began it, whose compiles are counted; it may be ended from any thread."""

    __slots__ = ("__weakref__", "_counter")

    _counter: "CompileCounter | None"  # None when it is over; not set before it begins.

    def _begin(self, counter: "CompileCounter") -> None:
        """Counts from here on."""
        self._counter = counter
        _active.watches.append(weakref.ref(self))

    def compiled(self, name: str) -> None:
        """Called in the compiling thread for each program, with the name of the function."""

    def _end(self) -> None:
        """Counts no more."""
        self._counter = None
        watches = _active.watches
        if watches and watches[-1]() is self:
            watches.pop()
        else:  # Out of order, or another thread's, which drops it at its next compile.
            watches[:] = [w for w in watches if w() is not self]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()


class CompileCounter:
    """Counts the compiles inside its watches; any number may watch at once.

    Attributes:
        count: Programs compiled.
        names: Names of the last functions compiled.
    """

    def __init__(self) -> None:
        _listen()
        self.count = 0
        self.names: deque[str] = deque(maxlen=16)
        self._lock = threading.RLock()  # A finalizer may compile, too.

    def watch(self) -> Watch:
        """Begins a scope in this thread; a context manager."""
        watch = Watch()
        watch._begin(self)
        return watch

    def add(self, name: str) -> None:
        """Counts one program."""
        with self._lock:
            self.count += 1
            self.names.append(name)


def _on_event(event: str, duration_secs: float, **fields: Any) -> None:  # noqa: ARG001
    if event == _EVENT:
        name = str(fields.get("fun_name", "a program"))
        watches = _active.living()
        for counter in {id(w._counter): w._counter for w in watches}.values():
            if counter is not None:
                counter.add(name)
        for watch in watches:
            watch.compiled(name)


_listening = threading.Lock()
_registered = False


def _listen() -> None:
    """Registers the one listener, when the first counter is made."""
    global _registered
    with _listening:
        if not _registered:
            jax.monitoring.register_event_duration_secs_listener(_on_event)
            _registered = True

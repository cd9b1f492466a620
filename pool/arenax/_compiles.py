"""Counts the programs that JAX compiles, through `jax.monitoring`, for a pool and its steps.

The listener runs in the compiling thread, once for each backend compile, also where a persistent cache answers it.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Self

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class _Active(threading.local):
    """The watches of this thread."""

    def __init__(self) -> None:
        self.watches: list[Watch] = []


_active = _Active()


class Watch:
    """One scope, in the thread that began it, whose compiles are counted; it may be ended from any thread.

    Args:
        counter: What counts them.
        tell: Called with the name of each function that is compiled.
    """

    __slots__ = ("counter", "tell")

    def __init__(self, counter: "CompileCounter", tell: Callable[[str], None] | None = None) -> None:
        self.counter: CompileCounter | None = counter
        self.tell = tell
        _active.watches.append(self)

    def end(self) -> None:
        """Counts no more."""
        self.counter = self.tell = None
        watches = _active.watches
        if watches and watches[-1] is self:
            watches.pop()
        else:  # Out of order, or another thread's, which drops it at its next compile.
            watches[:] = [w for w in watches if w is not self]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


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
        self._lock = threading.Lock()

    def watch(self) -> Watch:
        """Begins a scope in this thread; a context manager."""
        return Watch(self)

    def add(self, name: str) -> None:
        """Counts one program."""
        with self._lock:
            self.count += 1
            self.names.append(name)


def _on_event(event: str, duration_secs: float, **fields: Any) -> None:  # noqa: ARG001
    if event == _EVENT:
        name = str(fields.get("fun_name", "a program"))
        _active.watches[:] = [w for w in _active.watches if w.counter is not None]
        for counter in {id(w.counter): w.counter for w in _active.watches}.values():
            if counter is not None:
                counter.add(name)
        for watch in _active.watches:
            if watch.tell is not None:
                watch.tell(name)


_listening = threading.Lock()
_registered = False


def _listen() -> None:
    """Registers the one listener, when the first counter is made."""
    global _registered
    with _listening:
        if not _registered:
            jax.monitoring.register_event_duration_secs_listener(_on_event)
            _registered = True

"""Counts the programs that JAX compiles, through `jax.monitoring`, for a pool and its steps.

The listener runs in the compiling thread, once for each backend compile, also where a persistent cache answers it.
"""

import threading
from collections import deque
from typing import Any, Self

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class _Watches(threading.local):
    """The counters that watch this thread."""

    def __init__(self) -> None:
        self.active: list[CompileCounter] = []


_watches = _Watches()


class CompileCounter:
    """Counts compiles of the threads that are inside ``with counter:``; nests, and any number may watch at once.

    Attributes:
        count: Programs compiled.
        names: Names of the last functions compiled.
    """

    def __init__(self) -> None:
        _listen()
        self.count = 0
        self.names: deque[str] = deque(maxlen=16)
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        _watches.active.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _watches.active.remove(self)

    def add(self, name: str) -> None:
        """Counts one program."""
        with self._lock:
            self.count += 1
            self.names.append(name)


def _on_event(event: str, _seconds: float, **fields: Any) -> None:
    if event == _EVENT:
        for counter in {id(c): c for c in _watches.active}.values():
            counter.add(str(fields.get("fun_name", "a program")))


_listening = threading.Lock()
_registered = False


def _listen() -> None:
    """Registers the one listener, when the first counter is made."""
    global _registered
    with _listening:
        if not _registered:
            jax.monitoring.register_event_duration_secs_listener(_on_event)
            _registered = True

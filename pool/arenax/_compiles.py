"""Counts the programs that JAX compiles, through `jax.monitoring`, for a pool and its steps.

The listener runs in the compiling thread, once for each backend compile, also where a persistent cache answers it.
"""

import threading
import weakref
from _thread import get_ident
from collections import deque
from typing import Any, Self

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class Watch:
    """Has the compiles of the thread that began it counted; any thread may end it."""

    __slots__ = ("__weakref__", "_reference")

    _reference: "weakref.ref[Watch]"

    def _begin(self, counter: "CompileCounter") -> None:
        """Counts from here on."""
        self._reference = weakref.ref(self)
        _watches[self._reference] = get_ident(), counter

    def compiled(self, name: str) -> None:
        """Called in the compiling thread for each program, with the name of the function."""

    def _end(self) -> None:
        """Counts no more."""
        _watches.pop(self._reference, None)


class Scope(Watch):
    """A watch from its making on, and a context manager that ends it."""

    __slots__ = ()

    def __init__(self, counter: "CompileCounter") -> None:
        self._begin(counter)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()


# The thread and the counter of those that are not over; weakly, so that a step which an interrupt kept from its end is
# not watched on. No `threading.local`, whose look-ups take a hundredth of a small put. Each change is one call of C's,
# and so atomic.
_watches: "dict[weakref.ref[Watch], tuple[int, CompileCounter]]" = {}


def _watching() -> "list[tuple[Watch, CompileCounter]]":
    """The watches of this thread; those that nobody has any more are dropped."""
    me, found = get_ident(), list[tuple[Watch, CompileCounter]]()
    for reference, (thread, counter) in [*_watches.items()]:
        watch = reference()
        if watch is None:
            _watches.pop(reference, None)
        elif thread == me:
            found.append((watch, counter))
    return found


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

    def watch(self) -> "Scope":
        """Begins a scope in this thread; a context manager."""
        return Scope(self)

    def add(self, name: str) -> None:
        """Counts one program."""
        with self._lock:
            self.count += 1
            self.names.append(name)


def _on_event(event: str, duration_secs: float, **fields: Any) -> None:  # noqa: ARG001
    if event == _EVENT:
        name = str(fields.get("fun_name", "a program"))
        watches = _watching()
        for counter in {id(counter): counter for _, counter in watches}.values():
            counter.add(name)
        for watch, _ in watches:
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

"""Tracing: while it is on, every lease notes the line that made it; otherwise one in so many does."""

import contextlib
import itertools
import threading
from collections.abc import Callable, Generator, Iterator

# One lease in so many is traced even so, and a leak in a long run shows its line in the end, as with Netty's
# ResourceLeakDetector, which takes one in 128. A prime, so that in a loop each of its leases has its turn.
SAMPLE_EVERY = 127
_sampled: Iterator[bool] = itertools.cycle([False] * (SAMPLE_EVERY - 1) + [True])

# Whether a scope of `trace_leases` is open, and whether the next lease notes its line. Both are read on every checkout,
# as attributes of this module. The iterators are C's own, since those need no lock and cost next to nothing.
enabled = False
turns = _sampled

_scopes: set[object] = set()
# Re-entrant: a garbage collection that begins while it is held may close a generator that is inside such a scope.
_lock = threading.RLock()


@contextlib.contextmanager
def trace_leases() -> Generator[None]:
    """A scope in which every lease notes the lines that make and end it, in all threads; scopes may nest and overlap.

    The warning about a lease that was dropped then names the line that made it, and `LeaseReleased` the one that
    returned it. That costs a few microseconds a lease; without it one lease in 127 is traced.

    Example:
        >>> import arenax
        >>> with arenax.BufferPool() as pool, arenax.trace_leases():
        ...     lease = pool.lease((4,), "float32")
        ...     lease.release()
        ...     try:
        ...         lease.fill(0)
        ...     except arenax.LeaseReleased as e:
        ...         print(e)
        fill on a lease of float32[4] that was released ... s ago at ...: check out a new one
    """
    scope = object()
    try:
        _change(_scopes.add, scope)
        yield
    finally:
        _change(_scopes.discard, scope)


def _change(change: Callable[[object], None], scope: object) -> None:
    global enabled, turns
    with _lock:
        change(scope)
        enabled = bool(_scopes)
        turns = itertools.repeat(True) if enabled else _sampled

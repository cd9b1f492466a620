"""Faults on purpose: makes a named phase of a pool's work fail, before it or when it is done.

A phase is a method of the pool's landing or arena that the rest of the pool calls. The fault is an attribute of that
one object, which hides the method until the scope ends: the code of the pool has no hooks, and pays for none.
"""

import threading
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from ._pool import BufferPool

# The queue's own `put`, by which a loan ends, is none of them: it is C, and runs in weak-reference callbacks, which
# swallow what is raised in them.
LANDING_PHASES = ("create", "retype", "prepare", "land", "land_array", "fill", "write", "update", "is_whole", "moved")
ARENA_PHASES = (
    "shelf",
    "loan",
    "checkout",
    "reserve",
    "hand_over",
    "detach",
    "replace",
    "wrote",
    "settle",
    "snapshot",
    "begin_steady",
    "begin_recording",
    "end_recording",
    "trim",
    "close",
    "check",
)
PHASES = LANDING_PHASES + ARENA_PHASES
_MOMENTS = ("before", "after")


class Fault:
    """A failure of one phase of one pool, made by `fail`; a context manager in whose scope it may strike.

    Attributes:
        phase: The phase.
        call_count: How often the phase was called in the scope, by any thread.
        fired: Whether it has struck. It strikes once, and not after a call that failed by itself.
    """

    def __init__(self, owner: Any, phase: str, nth: int, error: BaseException | type[BaseException], when: str) -> None:
        self.phase = phase
        self.call_count = 0
        self.fired = False
        self._owner = owner
        self._nth = nth
        self._error = error
        self._when = when
        self._lock = threading.Lock()
        self._hidden: list[Any] = []

    def __enter__(self) -> Self:
        attributes: dict[str, Any] = vars(self._owner)
        # What hides the method already: another fault, or `Landing.moved`, which the pool sets.
        self._hidden = [attributes[self.phase]] if self.phase in attributes else []
        real = getattr(self._owner, self.phase)

        def phase(*args: Any, **options: Any) -> Any:
            strikes = self._counted()
            if strikes and self._when == "before":
                raise self._struck()
            result = real(*args, **options)
            if strikes:
                del result  # Or the traceback would hold it.
                raise self._struck()
            return result

        setattr(self._owner, self.phase, phase)
        return self

    def __exit__(self, *_: object) -> None:
        if self._hidden:
            setattr(self._owner, self.phase, self._hidden.pop())
        else:
            delattr(self._owner, self.phase)

    def _counted(self) -> bool:
        with self._lock:
            self.call_count += 1
            return self.call_count == self._nth

    def _struck(self) -> BaseException:
        self.fired = True
        if isinstance(self._error, BaseException):
            return self._error
        return self._error(f"a fault {self._when} {self.phase}, call {self._nth}")


def fail(
    pool: "BufferPool",
    phase: str,
    nth: int = 1,
    error: BaseException | type[BaseException] = RuntimeError,
    when: str = "before",
) -> Fault:
    """Makes the n-th call of a phase of a pool's work fail, once, in the scope that it begins.

    Args:
        pool: The pool. Pools that share a landing share the fault of a landing's phase.
        phase: One of `arenax.testing.PHASES`: a method of ``pool.landing`` or of ``pool.arena``.
        nth: Which call fails, from 1, counted over all threads.
        error: What is raised: an exception, or a class of them.
        when: ``"before"``: the phase is not begun. ``"after"``: it is done, and its result lost.

    Returns:
        A `Fault`, to be used as ``with fail(...) as fault:``; ``fault.fired`` tells whether it came to that.

    Raises:
        ValueError: For a phase that there is not, and other arguments out of range.

    Example:
        >>> import arenax, numpy as np
        >>> from arenax.testing import FakeDevice, fail
        >>> with arenax.BufferPool(FakeDevice()) as pool:
        ...     try:
        ...         with fail(pool, "land", error=MemoryError("no memory")) as fault:
        ...             x = pool.put(np.ones(3, np.float32))
        ...     except MemoryError as e:
        ...         print(e)
        ...     pool.check()
        ...     print(fault.fired, pool.stats().leased_count)
        no memory
        True 0
    """
    if phase not in PHASES:
        raise ValueError(f"phase must be one of {', '.join(PHASES)}, got {phase!r}")
    if nth < 1:
        raise ValueError(f"nth must be at least 1, got {nth}")
    if when not in _MOMENTS:
        raise ValueError(f"when must be one of {', '.join(_MOMENTS)}, got {when!r}")
    return Fault(pool.landing if phase in LANDING_PHASES else pool.arena, phase, nth, error, when)

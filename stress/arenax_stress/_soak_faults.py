"""Failures on purpose in a soak: a phase of the pool's work fails in the thread that asked for it, and nowhere else."""

import threading
from collections import Counter
from random import Random
from typing import Any

import arenax
from arenax.testing import PHASES

# How often an operation is to fail. Most have no part in the phase that is chosen, and do not.
SHARE = 0.6
# Not what the ledger itself asks of the pool, nor what only the beginning and the end of a phase do.
SPARED = frozenset({"snapshot", "check", "close", "reserve", "settle", "begin_steady"})
STRUCK = tuple(phase for phase in PHASES if phase not in SPARED)


class Injected(Exception):
    """A failure on purpose, of the kind that a runtime raises."""


class InjectedInterrupt(BaseException):
    """A failure on purpose, of the kind that a signal handler raises."""


class _Plan(threading.local):
    """What this thread wants to fail."""

    phase = ""
    left = 0
    after = False
    error: type[BaseException] = Injected


class Faults:
    """The failures of one pool: each thread arms its own, and may hit at most one before it arms the next.

    Args:
        pool: The pool, whose landings and arenas get a wrapper around each phase, for good.

    Attributes:
        struck_count: Failures by phase.
    """

    def __init__(self, pool: arenax.BufferPool) -> None:
        self.struck_count = Counter[str]()
        self._plan = _Plan()
        self._lock = threading.Lock()
        for home in pool.homes:
            for phase in STRUCK:
                owner: Any = home.landing if hasattr(home.landing, phase) else home.arena
                setattr(owner, phase, self._wrapped(phase, getattr(owner, phase)))

    def arm(self, rng: Random) -> None:
        """Decides whether, where and how the operation that follows in this thread fails."""
        plan = self._plan
        plan.phase = rng.choice(STRUCK) if rng.random() < SHARE else ""
        plan.left = rng.choice((1, 1, 1, 2, 3))
        plan.after = rng.random() < 0.5
        plan.error = rng.choice((Injected, InjectedInterrupt))

    def disarm(self) -> None:
        """What this thread does next does not fail."""
        self._plan.phase = ""

    def _wrapped(self, phase: str, real: Any) -> Any:
        plan = self._plan

        def wrapper(*args: Any, **options: Any) -> Any:
            if plan.phase != phase:
                return real(*args, **options)
            plan.left -= 1
            if plan.left:
                return real(*args, **options)
            plan.phase = ""
            if plan.after:
                real(*args, **options)
            with self._lock:
                self.struck_count[phase] += 1
            raise plan.error(f"{'after' if plan.after else 'before'} {phase}")

        return wrapper

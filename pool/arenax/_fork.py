"""What becomes of a pool in a forked child: it refuses, at once and with the reason, whatever could reach XLA or wait.

XLA's threads do not exist there, and a lock that another thread held at the fork is never let go, so that any use could
hang. Pools do not ask for this on their way: the child, before it runs anything else, changes the classes of what they
are made of for ones whose methods raise. So it costs a pool that is not forked nothing, takes no lock, and holds for
the leases and steps that share these parts.
"""

import os
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from ._errors import PoolClosed
from ._slot import Holder


class Pool(Protocol):
    """What the child needs of a pool."""

    @property
    def name(self) -> str:
        """Its name in messages."""
        ...

    @property
    def homes(self) -> Any:
        """What lends the slots, writes into them, and says which a batch needs."""
        ...


_homes: weakref.WeakKeyDictionary[Pool, int] = weakref.WeakKeyDictionary()
_inherited: list[Pool] = []


def register(pool: Pool) -> None:
    """Notes the process that a pool belongs to."""
    _homes[pool] = os.getpid()


def _nothing(*_: object) -> None:
    """Does nothing: there is nothing in the child to close or to give back."""


def _read(_: object, read: Callable[[], Any]) -> Any:
    """Reads the figures, which are those of the fork; nobody is left to be locked out."""
    return read()


def _none(*_: object) -> list[Any]:
    """Nothing to be said."""
    return []


def _yes(*_: object) -> bool:
    """A slot whose state cannot be told without XLA; the error that made someone ask goes on."""
    return True


def _refuse_in_child() -> None:
    for pool, home in list(_homes.items()):
        _inherited.append(pool)  # For ever: to free its buffers would be a call of XLA too.
        refuse = _refusal(pool.name, home)
        for part in pool.homes:
            _refuse_parts(part, refuse)
    _homes.clear()


def _refuse_parts(home: Any, refuse: Callable[..., NoReturn]) -> None:
    arena = home.arena
    arena.closed = True
    for recorder in arena.recorders:  # Their files are the parent's.
        recorder.abandon()
    _change(arena, refuse, close=_nothing, settle=_nothing, snapshot=_read, end_recording=_nothing)
    _change(home.landing, refuse, is_whole=_yes)
    for planner in home.planners():
        _change(planner, refuse, varieties=_none)  # The end of a step may ask.
    # A lease or a step in whose operation some other thread was at the fork would wait for it for ever.
    loans = [slot.loan for shelf in arena.shelves.values() for slot in shelf.slots]
    for holder in [loan() for loan in loans if loan is not None]:
        if isinstance(holder, Holder) and hasattr(holder, "lock"):
            holder.lock._at_fork_reinit()


def _refusal(name: str, home: int) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise PoolClosed(
            f"pool {name!r} was made in process {home} and cannot be used in process {os.getpid()}, forked from it: "
            'JAX does not survive a fork. Start the child by "spawn" (multiprocessing.get_context("spawn")) and make a '
            "pool in it, or leave the pool to the parent and bring NumPy arrays there",
            pool=name,
        )

    return refuse


def _change(part: Any, refuse: Callable[..., NoReturn], **harmless: Callable[..., Any]) -> None:
    """Has all public methods of an object refuse, but the harmless ones."""
    kind = type(part)
    methods = [n for n in dir(kind) if not n.startswith("_") and callable(getattr(kind, n))]
    # Without slots of its own the class has the layout of the old one, which the object must keep.
    body = {"__slots__": (), "__module__": kind.__module__, **dict.fromkeys(methods, refuse), **harmless}
    make: Any = type(kind)  # A landing's is `ABCMeta`.
    part.__class__ = make(kind.__name__, (kind,), body)


if hasattr(os, "register_at_fork"):  # Where there is no fork there is none of this.
    os.register_at_fork(after_in_child=_refuse_in_child)

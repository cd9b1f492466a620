"""What the threads of one phase of a soak share: who holds which address, and which addresses a class has had."""

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

import arenax

from ._soak_faults import Faults
from ._soak_places import Place, address_of, values_of
from ._soak_values import Kind, difference


class Wrong(Exception):
    """Something that must not happen."""


@attrs.define(eq=False)
class Held:
    """An array that must keep its values.

    Attributes:
        array: A `jax.Array`, or a NumPy view of one.
        expected: Its values.
        born: Where it came from.
        address: The address that the ledger has for it, or None.
        lent: Whether a slot goes back when it dies.
    """

    array: Any
    expected: np.ndarray[Any, Any]
    born: str
    address: tuple[int, ...] | None = None
    lent: bool = False


@attrs.define(eq=False)
class HeldLease:
    """A lease and what its slot must hold.

    Attributes:
        lease: The lease.
        model: The slot's values.
        born: Where it came from.
        address: Where its array lies, or None where it has no bytes.
        pending: What the slot will hold if the operation under way succeeds, or None.
    """

    lease: arenax.Lease
    model: np.ndarray[Any, Any]
    born: str
    address: tuple[int, ...] | None = None
    pending: np.ndarray[Any, Any] | None = None


@attrs.define(eq=False)
class Ledger:
    """Addresses: no two holders may have the same one, and a slot may move only where the pool counts it.

    Attributes:
        pool: The pool.
        kinds: Kinds of array in play.
        batches: Batches in play, each a few kinds.
        tally: A lease of int32 that all threads add to.
        added: How often they did.
        offered: Arrays that one thread leaves to another.
        stop: Set when all should stop.
        counting: Held while `added` is raised.
        faults: What fails on purpose, or None.
        place: Where the pool lies.
    """

    pool: arenax.BufferPool
    kinds: Sequence[Kind]
    batches: Sequence[Sequence[Kind]]
    tally: arenax.Lease | None
    stop: threading.Event
    added: int = 0
    counting: threading.Lock = attrs.field(factory=threading.Lock)
    faults: Faults | None = None
    place: Place = attrs.field(factory=Place)
    offered: deque[Held] = attrs.field(factory=deque)
    seen: "defaultdict[arenax.SizeClass, set[tuple[int, ...]]]" = attrs.field(factory=lambda: defaultdict(set))
    moves: Counter[arenax.SizeClass] = attrs.field(factory=Counter)
    _owners: dict[int, str] = attrs.field(factory=dict)
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    def claim(self, array: Any, born: str, pooled: bool = True) -> tuple[int, ...] | None:
        """Notes that somebody holds this memory alone; returns its address."""
        if not array.nbytes:
            return None
        address = address_of(array)
        with self._lock:
            for part in address:
                if part in self._owners:
                    raise Wrong(f"{born} and {self._owners[part]} hold the same memory, at {part:#x}")
            self._owners |= dict.fromkeys(address, born)
        if pooled:
            self._see(array, address)
        return address

    def release(self, address: tuple[int, ...] | None) -> None:
        """Notes that the memory at this address is about to be let go."""
        if address is not None:
            with self._lock:
                self._disown(address)

    def written(self, held: HeldLease) -> None:
        """Compares the address of a lease after an operation; call it after each."""
        array = held.lease.array
        if held.address is None or (address := address_of(array)) == held.address:
            return
        size_class = held.lease.size_class
        with self._lock:
            self.moves[size_class] += 1
            moves = self.moves[size_class]
            self._disown(held.address)
            held.address = None
        held.address = self.claim(array, held.born, pooled=False)
        copies = self.pool.stats().by_class[size_class].copy_count + self._uncounted()
        if moves > copies:
            raise Wrong(
                f"the slot of {held.born}, {size_class}, moved to {_text(address)}: {moves} moves of that class "
                f"were seen, and the pool counts {copies} copies"
            )
        self._see(array, address)

    def recover(self, held: HeldLease) -> None:
        """After a failure on purpose a lease holds what it held, what it was to hold, or, in a new slot, zeros."""
        array = held.lease.array
        got = values_of(array)
        candidates = [held.model, np.zeros_like(held.model)]
        if held.pending is not None:
            candidates.append(held.pending)
        wrong = [difference(got, candidate) for candidate in candidates]
        if all(wrong):
            raise Wrong(f"after a failure on purpose {held.born}: {wrong[0]}")
        held.model, held.pending = got, None
        if held.address is not None and address_of(array) != held.address:
            self.release(held.address)
            held.address = None
            held.address = self.claim(array, held.born)

    def _disown(self, address: tuple[int, ...]) -> None:
        for part in address:
            del self._owners[part]

    def _uncounted(self) -> int:
        """Events that a failure on purpose may have kept the pool from counting."""
        return 0 if self.faults is None else self.faults.struck_count.total()

    def _see(self, array: Any, address: tuple[int, ...]) -> None:
        size_class = self.place.class_of(array)
        seen = self.seen[size_class]
        if address in seen:
            return
        with self._lock:
            seen.add(address)
            count = len(seen)
        stats = self.pool.stats().by_class[size_class]
        allowed = stats.creation_count + stats.copy_count + stats.spill_count + self._uncounted()
        if count > allowed:
            raise Wrong(
                f"{count} addresses were seen in slots of {size_class}, and the pool counts {stats.creation_count} "
                f"creations, {stats.copy_count} copies and {stats.spill_count} spills"
            )


def _text(address: tuple[int, ...]) -> str:
    return ", ".join(f"{part:#x}" for part in address)

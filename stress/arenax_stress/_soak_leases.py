"""What a thread of a soak does with leases."""

from collections.abc import Collection
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import arenax

from ._soak_holder import Holder
from ._soak_ledger import Held, HeldLease, Ledger, Wrong
from ._soak_places import values_of
from ._soak_values import Source, pattern, source


class Planned(Exception):
    """Thrown on purpose."""


def _flip(x: jax.Array) -> jax.Array:
    return jnp.flip(x)


def _second(_: jax.Array, y: jax.Array) -> jax.Array:
    return y


def _break(_: jax.Array) -> jax.Array:
    raise Planned


def add(total: jax.Array, x: jax.Array) -> jax.Array:
    """What all threads do to the ledger's `tally`."""
    return total + x


def _with_part(
    model: np.ndarray[Any, Any], where: tuple[slice, ...], value: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    result = model.copy()
    result[where] = value
    return result


class LeaseHolder(Holder):
    """A holder of leases too, each with a model of its slot; the methods are operations."""

    def __init__(self, ledger: Ledger, thread: int, omit: Collection[str]) -> None:
        super().__init__(ledger, thread, omit)
        self._leases: list[HeldLease] = []

    def _verify_lease(self, held: HeldLease) -> None:
        self._ledger.written(held)
        self._read_back(held.lease.array, held.model, held.born)

    def _lease(self, rng: Random) -> None:
        if len(self._leases) >= 3:
            self._end_lease(rng, self._leases.pop(0), "release")
        kind = rng.choice(self._ledger.kinds)
        size_class = rng.choice(kind.classes())
        # Without a fill the copies on a mesh may differ.
        fill = rng.choice((None if self._place.shardings is None else 0, 0, 1))
        lease = self._pool.lease(size_class.shape, size_class.dtype, fill=fill, **self._place.draw(rng, kind.group))
        if fill is None:
            model = values_of(lease.array)  # Undefined, and yet nobody may change it.
        else:
            model = np.full(size_class.shape, fill, size_class.dtype)
        held = HeldLease(lease, model, self._here("lease"))
        held.address = self._ledger.claim(lease.array, held.born)
        self._leases.append(held)
        self._verify_lease(held)

    def _some_lease(self, rng: Random) -> HeldLease:
        if not self._leases:
            self._lease(rng)
        return rng.choice(self._leases)

    def _written(self, rng: Random, held: HeldLease) -> None:
        held.pending = None
        self._ledger.written(held)
        if rng.random() < 0.5:
            self._verify_lease(held)

    def _part(self, rng: Random, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a part; few of them, since each compiles a program."""
        return (rng.choice((n, n // 2, min(n, 1))), *shape[1:]) if shape and (n := shape[0]) else shape

    def _write(self, rng: Random) -> None:
        held = self._some_lease(rng)
        shape = held.model.shape
        part = self._part(rng, shape)
        at = tuple(rng.randint(0, n - m) for n, m in zip(shape, part, strict=True))
        value = pattern(held.model.dtype, part, rng)
        leaf = source(value, rng, 0.2)
        if shape and rng.random() < 0.1:
            try:
                held.lease.write(leaf.value, at=tuple(n - m + 1 for n, m in zip(shape, part, strict=True)))
            except arenax.OutOfBounds:
                pass
            else:
                raise Wrong(f"a write out of bounds was accepted by {held.born}")
        where = tuple(slice(i, i + n) for i, n in zip(at, part, strict=True))
        held.pending = _with_part(held.model, where, value)
        held.lease.write(leaf.value, at=None if not any(at) else at)
        leaf.scribble()
        held.model[where] = value
        self._written(rng, held)

    def _append(self, rng: Random) -> None:
        held = self._some_lease(rng)
        if not held.model.ndim:
            return
        value = pattern(held.model.dtype, self._part(rng, held.model.shape), rng)
        leaf = source(value, rng, 0.2)
        cursor, rows = held.lease.cursor, len(value)
        try:
            held.pending = _with_part(held.model, (slice(cursor, cursor + rows),), value[: len(held.model) - cursor])
            held.lease.append(leaf.value)
        except arenax.OutOfBounds:
            if cursor + rows <= len(held.model):
                raise
            held.pending = np.ones_like(held.model)
            held.lease.fill(1)
            held.model[...] = 1
        else:
            leaf.scribble()
            held.model[cursor : cursor + rows] = value
        self._written(rng, held)

    def _fill(self, rng: Random) -> None:
        held = self._some_lease(rng)
        value = rng.choice((0, 1, 1, pattern(held.model.dtype, (), rng)[()]))
        held.pending = np.full_like(held.model, value)
        held.lease.fill(value)
        held.model[...] = value
        self._written(rng, held)

    def _update(self, rng: Random) -> None:
        held = self._some_lease(rng)
        if rng.random() < 0.15:
            try:
                held.lease.update(_break)
            except Planned:
                pass
            else:
                raise Wrong("an update swallowed its function's exception")
        elif rng.random() < 0.5:
            held.pending = np.array(np.flip(held.model))
            held.lease.update(_flip)
            held.model = np.array(np.flip(held.model))
        else:
            value = pattern(held.model.dtype, held.model.shape, rng)
            argument = value.copy() if rng.random() < 0.5 else jnp.array(value)
            held.pending = value
            held.lease.update(_second, argument)
            if isinstance(argument, np.ndarray):
                Source(None, argument).scribble()
            held.model = value
        self._written(rng, held)

    def _release(self, rng: Random) -> None:
        if self._leases:
            self._end_lease(rng, self._leases.pop(rng.randrange(len(self._leases))), "release")

    def _forget(self, rng: Random) -> None:
        if self._leases:
            self._end_lease(rng, self._leases.pop(rng.randrange(len(self._leases))), "forget")

    def _end_lease(self, rng: Random, held: HeldLease, how: str) -> None:
        self._verify_lease(held)
        array = held.lease.array
        self._ledger.release(held.address)
        if how == "forget":
            return
        if "donate" not in self._omit and rng.random() < 0.1:
            self._take(array, held.model, None, f"donated {held.born}")
            held.lease.release()
            return
        if rng.random() < 0.3:
            self._remember(array, held.model, held.born)
        held.lease.release()
        for late in (held.lease.release, lambda: held.lease.array, lambda: held.lease.fill(0), held.lease.detach):
            try:
                late()
            except arenax.LeaseReleased:
                continue
            raise Wrong(f"a lease was used after its return: {held.born}")

    def _detach(self, rng: Random) -> None:
        if self._leases:
            self._make_room(rng)
            held = self._leases.pop(rng.randrange(len(self._leases)))
            try:
                array = held.lease.detach()
            except BaseException:  # On purpose; the lease is dropped.
                self._ledger.release(held.address)
                raise
            self._hold(Held(array, held.model, f"detached {held.born}", held.address))
            self._verify(self._held[-1])

    def _peek(self, rng: Random) -> None:
        """Keeps a NumPy view of a lease, which later writes must leave alone: they are copies, and counted."""
        self._make_room(rng)
        held = self._some_lease(rng)
        self._hold(Held(np.asarray(held.lease.array), held.model.copy(), f"the NumPy view of {held.born}"))

    def _add(self, _: Random) -> None:
        """All threads write to one lease."""
        if self._ledger.tally is not None:
            self._ledger.tally.update(add, np.int32(1))
            with self._ledger.counting:
                self._ledger.added += 1

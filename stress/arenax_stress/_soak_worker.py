"""One thread of a soak: random operations on the pool, each chosen by seed, thread and number alone, each verified."""

import contextlib
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Collection
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import arenax

from ._soak_faults import Injected, InjectedInterrupt
from ._soak_leases import LeaseHolder, Planned
from ._soak_ledger import Held, Ledger, Wrong
from ._soak_places import address_of, values_of
from ._soak_report import Failure
from ._soak_values import BOUNDARIES, Kind, pattern, source

# Gives a copy of its argument, after a while.
_read = jax.jit(lambda x, turns: lax.fori_loop(0, 2 * turns, lambda _, y: jnp.flip(y), jnp.copy(x)))

# How often each operation comes.
WEIGHTS = {
    "put": 24,
    "drop": 20,
    "verify": 12,
    "hand over": 6,
    "compute": 5,
    "donate": 2,
    "view": 3,
    "lease": 6,
    "write": 10,
    "append": 6,
    "fill": 4,
    "update": 4,
    "release": 4,
    "forget": 2,
    "detach": 1,
    "peek": 1,
    "step": 16,
    "stale": 4,
    "refuse": 2,
    "add": 3,
    "check": 1,
}


class Worker(LeaseHolder):
    """Does operations until told to stop.

    Args:
        ledger: What the threads share.
        seed: The seed.
        mode: The pool's `on_exhausted`.
        thread: Number of this thread.
        omit: Operations to leave out.

    Attributes:
        done_count: Operations by name.
        refused_count: Operations that the pool refused by design, by name.
        struck_count: Operations that failed on purpose, by name.
        failure: What went wrong.
        name: The present operation.
    """

    def __init__(self, ledger: Ledger, seed: int, mode: str, thread: int, omit: Collection[str]) -> None:
        super().__init__(ledger, thread, omit)
        self.done_count = Counter[str]()
        self.refused_count = Counter[str]()
        self.struck_count = Counter[str]()
        self.failure: Failure | None = None
        self.name = ""
        self._prefix = (seed, mode, thread)
        self._operations: dict[str, Callable[[Random], None]] = {
            "put": self._put,
            "drop": self._drop,
            "verify": self._verify_one,
            "hand over": self._hand_over,
            "compute": self._compute,
            "donate": self._donate,
            "view": self._view,
            "lease": self._lease,
            "write": self._write,
            "append": self._append,
            "fill": self._fill,
            "update": self._update,
            "release": self._release,
            "forget": self._forget,
            "detach": self._detach,
            "peek": self._peek,
            "step": self._step,
            "stale": self._stale_one,
            "refuse": self._refuse,
            "add": self._add,
            "check": self._check,
        }
        self._names = [name for name in WEIGHTS if name not in omit]
        self._weights = [WEIGHTS[name] for name in self._names]

    def work(self, operations: int | None) -> None:
        """Runs operations until the ledger's `stop`, a failure, or so many operations."""
        while not self._ledger.stop.is_set() and (operations is None or self.operation < operations):
            self.operation += 1
            # By number, not by one generator for all, so that an operation is the same whatever was refused before it.
            rng = Random("/".join(map(str, (*self._prefix, self.operation))))
            self.name = rng.choices(self._names, self._weights)[0]
            faults = self._ledger.faults
            if faults is not None and self.name != "add":  # The lease that is everybody's is no one thread's to model.
                faults.arm(Random("/".join(map(str, (*self._prefix, self.operation, "fault")))))
            self._guard(self._operations[self.name], rng)

    def finish(self) -> None:
        """Verifies all that is still held, and what nobody took over, and drops it."""
        self.name = "finish"
        while self._ledger.offered:
            self._hold(self._ledger.offered.popleft())

        def finish(_: Random) -> None:
            for held in self._held:
                self._verify(held)
            for lease in self._leases:
                self._verify_lease(lease)

        self._guard(finish, Random(0))
        for held in self._held:
            self._ledger.release(held.address)
        self._held.clear()
        self._leases.clear()
        self._stale.clear()

    def _guard(self, operation: Callable[[Random], None], rng: Random) -> None:
        recovers = False
        try:
            operation(rng)
            if operation != self._recover:
                self.done_count[self.name] += 1
        except arenax.PoolExhausted:
            self.refused_count[self.name] += 1
        except (Injected, InjectedInterrupt):
            self.struck_count[self.name] += 1
            # Without the exception, whose frames hold what the operation had drawn.
            recovers = True
        except Exception as e:
            _, mode, thread = self._prefix
            what = str(e) if isinstance(e, Wrong) else f"{type(e).__name__}: {e}"
            details = "" if isinstance(e, Wrong) else traceback.format_exc(limit=-6)
            self.failure = self.failure or Failure(mode, thread, self.operation, self.name, what, details)
            self._ledger.stop.set()
        finally:
            if self._ledger.faults is not None:
                self._ledger.faults.disarm()
        if recovers:
            self._guard(self._recover, rng)

    def _recover(self, _: Random) -> None:
        """Verifies all leases after a failure on purpose, and goes on from what they hold."""
        for held in self._leases:
            self._ledger.recover(held)

    def _put(self, rng: Random) -> None:
        self._make_room(rng)
        drawn = self._draw(rng, self._pool.put)
        for array, value in drawn:
            self._claim(array, value, "put", lent=True)
        if rng.random() < 0.5:
            for held in self._held[-len(drawn) :]:
                self._verify(held)

    def _drop(self, rng: Random) -> None:
        held = self._pop(rng)
        if held is not None:
            self._let_go(held)

    def _verify_one(self, rng: Random) -> None:
        if self._held:
            self._verify(rng.choice(self._held))

    def _hand_over(self, rng: Random) -> None:
        offered = self._ledger.offered
        if (held := self._pop(rng)) is not None:
            offered.append(held)
        if len(offered) > 4:
            with contextlib.suppress(IndexError):
                self._hold(offered.popleft())
                self._verify(self._held[-1])

    def _compute(self, rng: Random) -> None:
        """Drops an array while a computation still reads it."""
        if (held := self._pop(rng, lent=True)) is not None:
            result = _read(held.array, np.int32(rng.choice((1, 4, 20))))
            self._ledger.release(held.address)
            expected, born = held.expected, f"what was computed of {held.born}"
            del held
            self._hold(Held(result, expected, born))

    def _donate(self, rng: Random) -> None:
        if (held := self._pop(rng, lent=True)) is not None:
            self._take(held.array, held.expected, held.address, f"donated {held.born}")

    def _view(self, rng: Random) -> None:
        """Keeps a NumPy view in place of the array."""
        if (held := self._pop(rng, lent=True)) is not None:
            view, array = np.asarray(held.array), weakref.ref(held.array)
            if held.address is not None and address_of(view) != held.address:
                raise Wrong(f"the NumPy view of {held.born} is a copy")
            held.born = f"the NumPy view of {held.born}"
            self._ledger.release(held.address)
            held.array = view
            # A view keeps its array alive, and with it the loan, but for bfloat16: there only the memory lives on, so
            # that the slot goes back, and the next landing in it is a copy.
            lives = array() is not None
            held.address, held.lent = self._ledger.claim(view, held.born, pooled=False) if lives else None, False
            self._hold(held)

    def _step(self, rng: Random) -> None:
        self._make_room(rng)
        drawn: list[tuple[Any, np.ndarray[Any, Any], tuple[int, ...] | None]] = []
        ended = False
        fails = rng.random() < 0.15
        try:
            with self._pool.step() as step:
                for _ in range(rng.randint(1, 3)):
                    new = self._draw(rng, step.put) if rng.random() < 0.5 else [self._factory(rng, step)]
                    drawn.extend((x, e, self._ledger.claim(x, self._here("step"))) for x, e in new)
                for array, expected, _ in drawn:
                    self._read_back(array, expected, self._here("step"))
                for _ in range(rng.choice((0, 0, 1, 2))):
                    if drawn:
                        self._take_out(rng, step, drawn)
                # The pool does not see this handle, and the step keeps its slots.
                for array, expected, _ in drawn:
                    self._read_back(array, expected, self._here("step"))
                for _, _, address in drawn:
                    self._ledger.release(address)
                ended = True
                if fails:
                    raise Planned
        except Planned:
            pass
        finally:
            if not ended:
                for _, _, address in drawn:
                    self._ledger.release(address)
        for array, expected, _ in drawn:
            if rng.random() < 0.2:
                self._remember(array, expected, self._here("step"))

    def _factory(self, rng: Random, step: arenax.Step) -> tuple[Any, np.ndarray[Any, Any]]:
        kind: Kind = rng.choice(self._ledger.kinds)
        size_class = rng.choice(kind.classes())
        shape, dtype = size_class.shape, size_class.dtype
        which = rng.randrange(6)
        where = self._place.draw(rng, kind.group)
        # What is empty has copies on a mesh that may differ.
        if which == 0 or (which == 3 and self._place.shardings is not None):
            return step.zeros(shape, dtype, **where), np.zeros(shape, dtype)
        if which == 1:
            return step.ones(shape, dtype, **where), np.ones(shape, dtype)
        if which == 2:
            value = pattern(dtype, (), rng)[()]
            return step.full(shape, value, dtype, **where), np.full(shape, value, dtype)
        if which == 3:
            array = step.empty(shape, dtype, **where)
            return array, values_of(array)
        if which == 4 and len(shape) == 2 and dtype.kind != "b":
            return step.eye(*shape, dtype=dtype, **where), np.eye(*shape).astype(dtype)
        if which == 5 and len(shape) == 1 and dtype.name in ("float32", "int32"):
            return step.arange(shape[0], dtype=dtype, **where), np.arange(shape[0], dtype=dtype)
        value = pattern(dtype, shape, rng)
        leaf = source(value, rng, 0.2)
        array = step.array(leaf.value, **where)
        leaf.scribble()
        return array, value

    def _take_out(self, rng: Random, step: arenax.Step, drawn: list[Any]) -> None:
        """Makes something outlive the step: a kept array, a result in flight, a donated array, a NumPy view."""
        i = rng.randrange(len(drawn))
        array, expected, address = drawn[i]
        how = rng.choice(("keep", "compute", "compute", "donate", "view"))
        if how == "keep":
            if step.keep(array) is not array:
                raise Wrong("keep returned another array")
            del drawn[i]
            self._hold(Held(array, expected, self._here("kept"), address))
        elif how == "compute":
            turns = np.int32(rng.choice((1, 4, 20)))
            self._hold(Held(_read(array, turns), expected, self._here("computed in step")))
        elif how == "donate" and "donate" not in self._omit:
            del drawn[i]
            self._take(array, expected, address, self._here("donated in step"))
        elif how == "view" and "view" not in self._omit:
            self._hold(Held(np.asarray(array), expected, self._here("NumPy view in step")))

    def _stale_one(self, rng: Random) -> None:
        """An array kept by mistake holds what it held, or is deleted."""
        if self._stale:
            i = rng.randrange(len(self._stale))
            array, expected, born = self._stale[i]
            try:
                got = values_of(array)
            except RuntimeError as e:
                if "deleted" not in str(e) and "donated" not in str(e):
                    raise
                del self._stale[i]
            else:
                self._compare(got, expected, f"kept by mistake from {born}")

    def _refuse(self, rng: Random) -> None:
        """What can never be served raises, and costs nothing."""
        batch = self._batch(rng)[0]
        group, leaf, error = rng.choice(
            [
                ("rows", np.zeros(BOUNDARIES[-1] + 1, np.float32), arenax.NoSizeClass),
                ("fixed", np.array([object()]), TypeError),
                ("fixed", np.array(["text"]), TypeError),
                ("columns", np.float32(1), ValueError),
            ]
        )
        batch[group].append(leaf)
        try:
            self._pool.put(batch)
        except error:
            return
        raise Wrong(f"the pool took {leaf.dtype}{list(leaf.shape)} as a leaf of {group!r}")

    def _check(self, _: Random) -> None:
        self._pool.check()
        stats = self._pool.stats()
        if stats.budget_bytes is not None and stats.reserved_bytes > stats.budget_bytes:
            raise Wrong(f"{stats.reserved_bytes:,} bytes are reserved, of a budget of {stats.budget_bytes:,}")

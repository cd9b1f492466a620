"""A step: a scope whose arrays all go back when it ends."""

from _thread import RLock  # What threading.RLock, a function, makes at several times the cost.
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, Self

import jax
import numpy as np

from ._batch import Planned
from ._compiles import Watch
from ._home import Home, land_again
from ._refusals import unsteady
from ._request import SizeClass, as_array, canonical_dtype, scalar_of
from ._slot import Holder, Loan, Slot

if TYPE_CHECKING:
    from ._pool import BufferPool


class StepHolder(Holder):
    """Holds the slots of one draw in a step."""

    __slots__ = ()

    kind = "Step"


class Step(Watch):
    """Draws arrays that go back to the pool, all at once, when the scope ends; made by `BufferPool.step`.

    The arrays may be passed to jitted functions as any others. They must not be read after the scope: the next landing
    in the slot deletes them, and a strict step does so as it ends. A result that is to outlive it must be another
    array, or be kept with `keep`.

    Example:
        >>> import arenax, jax, numpy as np
        >>> total = jax.jit(lambda batch, acc: batch["x"].sum() + acc.sum())
        >>> with arenax.BufferPool() as pool:
        ...     for i in range(3):
        ...         with pool.step() as step:
        ...             batch = step.put({"x": np.full((4, 8), i, np.float32)})
        ...             print(total(batch, step.ones((2,))))
        2.0
        34.0
        66.0
    """

    __slots__ = (
        "_compiled",
        "_draws",
        "_holders",
        "_lock",
        "_max_compiles",
        "_pool",
        "_state",
        "_strict",
    )

    def __init__(self, pool: "BufferPool", strict: bool, max_compiles: int | None = None) -> None:
        self._pool = pool
        self._strict = strict
        self._draws: list[tuple[Home, Loan]] = []
        # By themselves: an error's traceback would keep the one that a loop has looked at last.
        self._holders: list[Holder] = []
        # Held while a landing goes on, so that the end of the step waits for it; not held in the checkout before it,
        # which may itself wait for that end.
        self._lock = RLock()
        self._state = "new"
        self._compiled: list[str] | None = None
        self._max_compiles = max_compiles

    def __enter__(self) -> Self:
        if self._state != "new":
            raise RuntimeError(f"a step is entered once, and this one is {self._state}: call pool.step() each time")
        self._state = "open"
        pool = self._pool
        pool.guard.steps += 1
        self._begin(pool.compile_counter)
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        try:
            self._end()
        finally:
            with self._lock:  # Waits for a landing that another thread has begun in this step.
                self._state = "over"
                try:
                    if self._strict:
                        self._revoke()
                finally:
                    self._holders.clear()
                    for draw in self._draws:
                        for slot in draw[1].slots:
                            if slot.spilled:
                                slot.drop_buffer()
        if self._compiled is not None:
            self._judge(kind is None)

    def put(
        self,
        batch: Any,
        with_sizes: bool = False,
        *,
        device: Any = None,
        local: bool = False,
        extent: int | None = None,
    ) -> Any:
        """Lands a batch, as `BufferPool.put` does; its arrays go back when the step ends.

        Args:
            batch: A pytree of arrays.
            with_sizes: Whether to return ``(batch, sizes)``.
            device: Where it is to lie, as for `BufferPool.put`.
            local: Whether it is this process's part, as for `BufferPool.put`.
            extent: A length that all processes know, as for `BufferPool.put`.

        Returns:
            The same pytree of `jax.Array`, ragged axes padded to their size class; with `with_sizes` also the batch's
            tree of valid extents, int32 device scalars, None where a leaf is not ragged.

        Raises:
            RuntimeError: Outside of the step.
            PoolExhausted: As the pool's mode says.
            NoSizeClass: Where a ragged axis is above its largest class.
            TypeError: For a leaf that JAX cannot hold.
        """
        if self._state != "open":
            self._refuse("put")
        if device is None and not local:  # By itself, for the microseconds.
            home = self._pool.homes[0]
            return self._put(home, home.planner.plan(batch, with_sizes), with_sizes)
        home = self._home(device)
        if local:
            planned = home.local_planner_on(device).plan_part(batch, with_sizes, extent)
        else:
            planned = home.planner_on(device).plan(batch, with_sizes)
        return self._put(home, planned, with_sizes)

    def zeros(self, shape: Any, dtype: Any = None, *, device: Any = None) -> jax.Array:
        """An array of zeros of exactly this shape, as `jax.numpy.zeros`; float32 unless told otherwise."""
        return self.full(shape, 0, np.float64 if dtype is None else dtype, device=device)

    def ones(self, shape: Any, dtype: Any = None, *, device: Any = None) -> jax.Array:
        """An array of ones of exactly this shape, as `jax.numpy.ones`."""
        return self.full(shape, 1, np.float64 if dtype is None else dtype, device=device)

    def full(self, shape: Any, fill_value: Any, dtype: Any = None, *, device: Any = None) -> jax.Array:
        """An array of `fill_value`, a scalar, as `jax.numpy.full`."""
        home = self._home(device)
        size_class = home.exact(shape, np.asarray(fill_value).dtype if dtype is None else dtype, device)
        scalar_of(fill_value, size_class.dtype)
        return self._draw(home, size_class, lambda slot: home.landing.fill(slot, fill_value))

    def empty(self, shape: Any, dtype: Any = None, *, device: Any = None) -> jax.Array:
        """An array with undefined contents: whatever its slot holds."""
        home = self._home(device)
        return self._draw(home, home.exact(shape, np.float64 if dtype is None else dtype, device), None)

    def arange(
        self, start: Any, stop: Any = None, step: Any = None, dtype: Any = None, *, device: Any = None
    ) -> jax.Array:
        """Evenly spaced values, as `jax.numpy.arange`."""
        value = np.arange(start, stop, step) if stop is not None else np.arange(0, start, step)
        return self.array(value, dtype, device=device)

    def eye(self, N: int, M: int | None = None, k: int = 0, dtype: Any = None, *, device: Any = None) -> jax.Array:
        """A matrix with ones on a diagonal, as `jax.numpy.eye`."""
        return self.array(np.eye(N, M, k), dtype, device=device)

    def array(self, object: Any, dtype: Any = None, *, device: Any = None) -> jax.Array:  # noqa: A002
        """Anything that `numpy.asarray` takes, or a `jax.Array`, in a slot of exactly its shape."""
        value = as_array(object, "the object")
        if dtype is not None:
            value = value.astype(canonical_dtype(dtype))
        home = self._home(device)
        if self._state != "open":
            self._refuse("a factory")
        return self._put(home, home.planner_on(device, exact=True).plan(value, False), False)

    def keep(self, tree: Any) -> Any:
        """Takes arrays drawn in this step out of the pool for good; each one's slot gets a new buffer.

        Args:
            tree: A pytree of arrays that this step drew.

        Returns:
            The same tree.

        Raises:
            ValueError: Where a leaf was not drawn in this step; nothing is kept then.
            RuntimeError: Outside of the step.
        """
        with self._lock:
            if self._state != "open":
                self._refuse("keep")
            try:
                found = [self._slot_of(x) for x in jax.tree.leaves(tree)]
            except ValueError:
                if self._pool.arena.closed:  # What was on loan has left the pool already.
                    return tree
                raise
            for home, slot in {id(s): (h, s) for h, s in found}.values():
                home.arena.detach(slot)
        return tree

    def drew(self, array: Any) -> bool:
        """Whether this very array was drawn in this step."""
        return any(slot.array is array for _, loan in self._draws for slot in loan.slots)

    def compiled(self, name: str) -> None:
        """Notes a program that was compiled inside the step."""
        if self._compiled is None:
            self._compiled = []
        self._compiled.append(name)
        slots = [slot for _, loan in self._draws for slot in loan.slots]
        self._pool.guard.note(name, tuple(str(slot.size_class) for slot in slots))

    def _judge(self, is_orderly: bool) -> None:
        """What is to be said of the programs that the step has compiled; an error of its own comes first."""
        pool, names = self._pool, self._compiled or []
        if not is_orderly:
            return
        pool.guard.advise(pool.planner)
        if self._max_compiles is not None and len(names) > self._max_compiles:
            what = f"{len(names)} programs in one step, where {self._max_compiles} may be: {', '.join(names[:8])}"
            raise unsteady(pool.arena, "compile", what)

    def _home(self, device: Any) -> Home:
        return self._pool.homes[0] if device is None else self._pool.home(device)

    def _revoke(self) -> None:
        slots: dict[Home, list[Slot]] = {}
        for home, loan in self._draws:
            slots.setdefault(home, []).extend(loan.slots)
        for home, drawn in slots.items():
            home.landing.revoke(drawn)

    def _slot_of(self, array: Any) -> tuple[Home, Slot]:
        for home, loan in self._draws:
            for slot in loan.slots:
                if slot.array is array:
                    return home, slot
        raise ValueError(
            f"keep takes arrays that this step drew, got {type(array).__name__}; results of a jitted function "
            "are no slots and need not be kept, and an array is kept once"
        )

    def _put(self, home: Home, planned: Planned, with_sizes: bool) -> Any:
        arena, landing = home.arena, home.landing
        plan, values, requested, rags = planned
        holder = StepHolder()
        holder.lock = self._lock
        loan = arena.loan(holder, None, True)
        try:
            slots = arena.checkout(plan.shelves, requested, loan)
            with self._lock:
                if self._state != "open":  # Its end came during the checkout.
                    self._refuse("a landing")
                try:
                    if plan.fixed is not None:
                        landing.land(plan.fixed, slots, values, None)
                    else:
                        plan.land(landing, slots, values, rags)
                except Exception:
                    land_again(home, plan, slots, values, rags)
                self._draws.append((home, loan))
                self._holders.append(holder)
                if plan.lone and not with_sizes:
                    return slots[0].array
                arrays = [slot.array for slot in slots]
        except BaseException:
            arena.give_back(loan)
            raise
        return (plan.batch_of(arrays), plan.sizes_of(arrays)) if with_sizes else plan.batch_of(arrays)

    def _draw(self, home: Home, size_class: SizeClass, finish: Callable[[Slot], None] | None) -> jax.Array:
        if self._state != "open":
            self._refuse("a factory")
        arena = home.arena
        holder = StepHolder()
        holder.lock = self._lock
        loan = arena.loan(holder)
        try:
            shelf = arena.shelf(size_class)
            (slot,) = arena.checkout((shelf,), (shelf.nbytes,), loan)
            with self._lock:
                if self._state != "open":
                    self._refuse("a landing")
                if not home.landing.is_whole(slot):  # Its last borrower donated it away, or failed to compute it.
                    arena.revive(slot)
                if finish is not None:
                    finish(slot)
                self._draws.append((home, loan))
                self._holders.append(holder)
                return slot.array
        except BaseException:
            arena.give_back(loan)
            raise

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"{what} was called on a step that is {self._state}: use it inside `with pool.step() as step`"
        )

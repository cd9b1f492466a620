"""The pool: what the user holds."""

import contextlib
import itertools
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import Any, Self

import numpy as np

from . import _fork
from ._arena import MODES, Arena
from ._batch import BatchPlan, Planner, count_classes
from ._budget import budget_bytes
from ._compiles import CompileCounter
from ._debug import DebugArena, is_debugging
from ._guard import Compile, CompileGuard
from ._landing import Rag, SlotLost
from ._lease import Lease
from ._measure import Measure, Meter
from ._placement import landing_for
from ._plan import Plan
from ._record import Recorder, from_environment
from ._refusals import unsteady
from ._request import Ragged, SizeClass, canonical_dtype, exact_shape, scalar_of
from ._slot import Holder, Shelf, Slot
from ._stats import Stats, human_bytes
from ._step import Step
from ._trace import Trace
from ._waiters import CancelToken
from ._warm_up import warm_up

_numbers = itertools.count(1)


class BufferPool:
    """Preallocated device buffers of fixed size classes, lent out and recycled. A context manager that closes itself.

    Any thread may call anything.

    Args:
        placement: The device. None is JAX's default device, with uncommitted arrays as `jax.device_put` gives; a
            `jax.Device` gives committed ones. An `arenax.testing.FakeDevice` has no bytes.
        ragged: Which axes vary: None, a `Ragged`, or a pytree prefix of the batch, with None at leaves that are not
            ragged.
        budget: The most bytes that slots may take: None for no limit, bytes, a text such as ``"2GiB"``, or a fraction
            of the device's ``bytes_limit`` as a float.
        on_exhausted: What to do where no slot is free. ``"grow"``: a new slot while the budget lasts, then one at the
            price of idle slots of other classes, then a fresh array outside the pool. The other three use reserved
            slots only: ``"spill"`` gives a fresh array, ``"wait"`` waits for a return, in order of arrival,
            ``"raise"`` raises.
        timeout: Seconds that ``"wait"`` waits; None is for ever.
        name: The pool's name in messages.
        landing: How host values come into slots: None chooses by the device, ``"host"`` copies straight into memory (on
            CPU alone, and its default), ``"ring"`` goes through pinned staging buffers (the default elsewhere).
        debug: Whether returned slots are filled with NaN (integers: their largest value), at the latest by the next
            call, their padding is verified before, and messages name the lines that drew what is on loan. Slow. None
            is what the environment variable ``ARENAX_DEBUG`` says, 0 or 1.

    Raises:
        TypeError: For an argument of the wrong kind.
        ValueError: For one out of range.

    Example:
        >>> import arenax, numpy as np
        >>> with arenax.BufferPool(ragged=arenax.Ragged(0, arenax.SizeClasses.pow2(4, 64)), name="doc") as pool:
        ...     x, n = pool.put(np.arange(5, dtype=np.float32), with_sizes=True)
        ...     print(x, n)
        [0. 1. 2. 3. 4. 0. 0. 0.] 5
    """

    def __init__(
        self,
        placement: Any = None,
        ragged: Any = None,
        budget: int | float | str | None = None,
        on_exhausted: str = "grow",
        timeout: float | None = None,
        name: str | None = None,
        landing: str | None = None,
        debug: bool | None = None,
    ) -> None:
        if on_exhausted not in MODES:
            raise ValueError(f"on_exhausted must be one of {', '.join(MODES)}, got {on_exhausted!r}")
        if timeout is not None:
            if isinstance(timeout, bool) or not isinstance(timeout, int | float):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"timeout must be seconds or None, got {timeout!r}")
            if not 0 <= timeout < float("inf"):
                raise ValueError(f"timeout must be at least 0 and finite (None waits for ever), got {timeout!r}")
            if on_exhausted != "wait":
                raise ValueError(f'timeout is for on_exhausted="wait" alone, got it with {on_exhausted!r}')
        if name is not None and not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"name must be a text or None, got {name!r}")
        self.name = name or f"pool-{next(_numbers)}"
        self.placement = placement
        self.compile_counter = CompileCounter()
        self.landing = landing_for(placement, landing, self.compile_counter)
        limit = budget_bytes(budget, self.landing.bytes_limit, self.landing.name)
        kind = DebugArena if is_debugging(debug) else Arena
        self.arena = kind(self.landing, name=self.name, mode=on_exhausted, budget=limit, timeout=timeout)
        self.landing.moved = self.arena.moved
        self.planner = Planner(ragged, self.landing, self.arena.shelf)
        self._shelves: dict[Any, Shelf] = {}
        self.exact_planner = Planner(None, self.landing, self.arena.shelf)
        self.guard = CompileGuard(self.name)
        self._meter = Meter(self.arena, self.landing, self.compile_counter)
        self._recorder = from_environment(self.name)
        if self._recorder is not None:
            self.arena.begin_recording(self._recorder)
            weakref.finalize(self, self._recorder.finish)
        _fork.register(self)

    @classmethod
    def from_plan(cls, plan: Plan, **arguments: Any) -> Self:
        """Returns a pool with the slots of a plan, all reserved; its budget is what they take, if none is given.

        Args:
            plan: A `Plan`.
            **arguments: As the constructor's. `ragged` must be given where the plan was fitted to ragged batches:
                ``Ragged(axis, plan.size_classes)`` at the leaves that vary, with the pad value of each. A plan of mere
                bytes needs none, and serves arrays of uint8 with one axis.

        Raises:
            TypeError: Where it is no plan.
            ValueError: Where `ragged` is missing.

        Example:
            >>> import arenax, numpy as np
            >>> sizes = arenax.SizeClasses.pow2(4, 64)
            >>> with arenax.BufferPool(ragged=arenax.Ragged(0, sizes)) as pool, pool.record() as trace:
            ...     for n in (9, 10, 12):
            ...         with pool.step() as step:
            ...             x = step.put(np.ones(n, np.float32))
            >>> plan = arenax.Plan.fit(trace, max_classes=1)
            >>> with arenax.BufferPool.from_plan(plan, ragged=arenax.Ragged(0, plan.size_classes)) as pool:
            ...     print(pool.put(np.ones(9, np.float32)).shape, pool.stats().creation_count)
            (12,) 1
        """
        if not isinstance(plan, Plan):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"plan must be an arenax.Plan, got {type(plan).__name__}")
        if plan.ragged and arguments.get("ragged") is None:
            if not plan.is_of_bytes:
                raise ValueError(
                    f"the plan has size classes for {', '.join(plan.ragged)}, padded along the axis *: say which "
                    "leaves they are for, as in from_plan(plan, ragged=arenax.Ragged(axis, plan.size_classes))"
                )
            arguments["ragged"] = Ragged(0, plan.size_classes)
        arguments.setdefault("budget", plan.required_bytes)
        pool = cls(**arguments)
        try:
            pool.arena.reserve(Counter({c.size_class: c.slots for c in plan.classes}))
        except BaseException:
            pool.close()
            raise
        return pool

    def reserve(self, example: Any, slots: int = 3) -> None:
        """Preallocates slots, now and in full, or raises and leaves nothing half done.

        Each leaf gets slots of its own; a ragged leaf gets them in every size class, and as many int32 scalars for its
        sizes. Calls add up.

        Args:
            example: A batch, or a pytree of `ArraySpec` or `jax.ShapeDtypeStruct`.
            slots: Batches that will be alive at once.

        Raises:
            PoolExhausted: Where the budget does not suffice; also a `MemoryError`.
            TypeError: For a leaf that JAX cannot hold.

        Example:
            >>> import arenax
            >>> with arenax.BufferPool(budget="1MiB") as pool:
            ...     pool.reserve({"x": arenax.ArraySpec((8, 128), "bfloat16")}, slots=2)
            ...     pool.stats().reserved_bytes
            4096
        """
        if isinstance(slots, bool) or not isinstance(slots, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"slots must be an integer, got {slots!r}")
        if slots < 1:
            raise ValueError(f"slots must be at least 1, got {slots}")
        self.arena.reserve(count_classes(self.planner.spec_classes(example), slots))

    def planner_for(self, ragged: Any) -> Planner:
        """Returns what `put` takes as `planner`: ragged axes of one kind of batch, in place of the pool's own.

        Args:
            ragged: As the constructor's.
        """
        return Planner(ragged, self.landing, self.arena.shelf)

    def put(
        self,
        batch: Any,
        with_sizes: bool = False,
        *,
        cancel: CancelToken | None = None,
        planner: Planner | None = None,
    ) -> Any:
        """Lands a batch in recycled slots; each slot goes back when its array object dies.

        The caller's arrays are never aliased: he may overwrite them as soon as this returns. A second array object on
        the same buffer, such as `jax.device_put(x, device)` makes, does not prolong the loan.

        Args:
            batch: A pytree of arrays: NumPy arrays of any layout, scalars, `jax.Array`.
            with_sizes: Whether to return ``(batch, sizes)``.
            cancel: Lets another thread end a wait.
            planner: What `planner_for` returned, for a batch whose ragged axes are not those of the pool.

        Returns:
            The same pytree of `jax.Array`, ragged axes padded to their size class; with `with_sizes` also the batch's
            tree of valid extents, int32 device scalars, None where a leaf is not ragged.

        Raises:
            PoolExhausted: As `on_exhausted` says; also a `TimeoutError` after a wait.
            NoSizeClass: Where a ragged axis is above its largest class; also a `ValueError`.
            TypeError: For a leaf that JAX cannot hold. No leaf has landed then.
            PoolClosed: After `close`.

        Example:
            >>> import arenax, numpy as np
            >>> with arenax.BufferPool() as pool:
            ...     x = pool.put({"x": np.eye(2, dtype=np.float32)})["x"]
            ...     print(x)
            [[1. 0.]
             [0. 1.]]
        """
        arena, landing = self.arena, self.landing
        plan, values, requested, rags = (planner or self.planner).plan(batch, with_sizes)
        holder = Holder()
        loan = arena.loan(holder, cancel, True)
        try:
            slots = arena.checkout(plan.shelves, requested, loan, cancel)
            try:
                if plan.fixed is not None:
                    landing.land(plan.fixed, slots, values, None)
                else:
                    plan.land(landing, slots, values, rags)
            except Exception:
                self.land_again(plan, slots, values, rags)
            arrays = arena.hand_over(slots, cancel)
        except BaseException:
            arena.give_back(loan)
            raise
        del loan  # It has nothing left; were it to outlive its holder, it would be queued as a return.
        if with_sizes:
            return plan.batch_of(arrays), plan.sizes_of(arrays)
        return arrays[0] if plan.lone else plan.batch_of(arrays)

    def step(self, strict: bool = False, max_compiles: int | None = None) -> Step:
        """Begins a scope around a training step: whatever is drawn in it goes back when it ends.

        Args:
            strict: Whether the arrays that it drew are deleted when it ends, rather than by the next landing in their
                slots, so that one that is used too late raises ``Array has been deleted`` each time, and not just
                where the slot was taken again meanwhile. It is done in place and without a wait, by a donation of each
                array; costs a few microseconds an array, and one small program a size class. What `Step.keep` took is
                left alone. A NumPy view that is alive keeps its data, and makes of the donation a copy, which is
                counted.
            max_compiles: The most programs that may be compiled inside it, in this thread; the step that has compiled
                more raises `NotSteady` at its end, with their names. None is without limit.

        Returns:
            A `Step`, to be used as ``with pool.step() as step:``.

        Example:
            >>> import arenax, numpy as np
            >>> with arenax.BufferPool() as pool:
            ...     with pool.step(strict=True) as step:
            ...         batch = step.put(np.ones(3, np.float32))
            ...     try:
            ...         print(batch.sum())
            ...     except RuntimeError as e:
            ...         print(e)
            Array has been deleted with shape=float32[3].
        """
        if max_compiles is not None:
            if isinstance(max_compiles, bool) or not isinstance(max_compiles, int):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"max_compiles must be an integer or None, got {max_compiles!r}")
            if max_compiles < 0:
                raise ValueError(f"max_compiles must be at least 0, got {max_compiles}")
        return Step(self, strict, max_compiles)

    def warm_up(self, fn: Callable[..., Any], spec: Any, with_sizes: bool = False) -> int:
        """Calls a function with zeros of every shape that its batch can have, so that the run itself compiles nothing.

        Each call is a step of its own; it also creates slots and compiles their landings. Its results are waited for
        and dropped: where it has effects, or donates its state, give a function of the batch that spares them. Axes
        with equal size classes vary together, as those of tokens and their labels do. With rich installed there is a
        progress bar, on a terminal.

        Args:
            fn: A function ``(batch)``, or ``(batch, sizes)`` with `with_sizes`.
            spec: A batch, or a pytree of `ArraySpec` or `jax.ShapeDtypeStruct`.
            with_sizes: Whether `fn` takes the sizes.

        Returns:
            How many programs were compiled.

        Example:
            >>> import arenax, jax, numpy as np
            >>> lengths = arenax.SizeClasses.explicit([4, 8])
            >>> total = jax.jit(lambda batch: batch["x"].sum())
            >>> with arenax.BufferPool(ragged=arenax.Ragged(1, lengths)) as pool:
            ...     count = pool.warm_up(total, {"x": arenax.ArraySpec((2, lengths), "float32")})
            ...     with pool.steady():
            ...         for n in (3, 4, 8):
            ...             with pool.step() as step:
            ...                 print(total(step.put({"x": np.ones((2, n), np.float32)})))
            6.0
            8.0
            16.0
        """
        if not callable(fn):
            raise TypeError(f"fn must be a function of a batch, got {type(fn).__name__}")
        return warm_up(self, fn, spec, with_sizes)

    @property
    def compiles(self) -> tuple[Compile, ...]:
        """The programs that were compiled inside steps, by function, shapes drawn and call site.

        Example:
            >>> import arenax, jax, numpy as np
            >>> double = jax.jit(lambda x: 2 * x)
            >>> with arenax.BufferPool() as pool:
            ...     for n in (3, 4, 3):
            ...         with pool.step() as step:
            ...             y = double(step.put(np.ones(n, np.float32)))
            ...     print([c.shapes for c in pool.compiles if "lambda" in c.function])
            [('float32[3]',), ('float32[4]',)]
        """
        return self.guard.compiles()

    def lease(self, shape: Any, dtype: Any = "float32", *, fill: Any = 0) -> Lease:
        """Checks out one slot of exactly this shape, until it is released: by its ``with``, or `Lease.release`.

        Args:
            shape: Shape of the slot.
            dtype: Its dtype.
            fill: A scalar that every element is set to, or None for undefined contents.

        Returns:
            A `Lease`, which is a context manager.

        Raises:
            PoolExhausted: As `on_exhausted` says.
            PoolClosed: After `close`.
        """
        try:
            shelf = self._shelves.get((shape, dtype))
        except TypeError:  # A list, say.
            shelf = None
        if shelf is None:
            shelf = self._shelf(shape, dtype)
        if fill is not None:
            scalar_of(fill, shelf.size_class.dtype)
        return Lease(self.arena, self.landing, shelf, fill)

    def _shelf(self, shape: Any, dtype: Any) -> Shelf:
        """The shelf for a shape and a dtype as the caller writes them, remembered for the next time."""
        shelf = self.arena.shelf(SizeClass(exact_shape(shape), canonical_dtype(dtype)))
        # What a 64-bit dtype means depends on `jax_enable_x64`.
        if isinstance(shape, tuple) and np.dtype(dtype).itemsize < 8:
            if len(self._shelves) >= Planner.MAX_PLANS:
                self._shelves.clear()
            try:
                self._shelves[shape, dtype] = shelf
            except TypeError:
                pass
        return shelf

    @contextlib.contextmanager
    def steady(self) -> Generator[None]:
        """A scope in which the pool may not allocate, copy or compile.

        Raises:
            NotSteady: Naming the cause and the call site. Creation, spill, conversion and copy raise at once, in
                whichever thread; compiles of this thread or of the pool raise at the end.

        Example:
            >>> import arenax, numpy as np
            >>> batch = np.ones((4,), np.float32)
            >>> with arenax.BufferPool() as pool:
            ...     pool.reserve(batch, slots=1)
            ...     del_me = pool.put(batch)  # Warms up: compiles the landing.
            ...     del del_me
            ...     with pool.steady():
            ...         for _ in range(100):
            ...             x = pool.put(batch)
            ...             del x
        """
        here, before = CompileCounter(), self.compile_counter.count
        scope = self.arena.begin_steady()
        try:
            with here.watch():
                yield
        finally:
            scope.over = True
        counter = here if here.count else self.compile_counter
        count = here.count or self.compile_counter.count - before
        if count:
            names = [*counter.names][-min(count, 4) :]
            what = f"{count} programs, the last of them {', '.join(names)}"
            raise unsteady(self.arena, "compile", what)

    def stats(self) -> Stats:
        """Returns a frozen snapshot of the pool's figures; ``str()`` of it is a table."""
        return self._meter.of_life()

    def measure(self) -> Measure:
        """A scope whose own peaks and counts are kept.

        Returns:
            A `Measure`, to be used as ``with pool.measure() as m:``. ``m.stats`` is a `Stats` of the scope: what was
            counted in it, and the peaks that there were, up to its end, or to now while it lasts.

        Example:
            >>> import arenax, numpy as np
            >>> with arenax.BufferPool() as pool:
            ...     for epoch in range(2):
            ...         with pool.measure() as m:
            ...             for n in range(10):
            ...                 with pool.step() as step:
            ...                     x = step.put(np.full(256, n, np.float32))
            ...         print(m.stats.creation_count, m.stats.hit_count, m.stats.peak_leased_bytes)
            1 9 1024
            0 10 1024
        """
        return Measure(self._meter)

    @contextlib.contextmanager
    def record(self, path: str | os.PathLike[str] | None = None) -> Generator[Trace]:
        """A scope in which every loan and return is recorded; what is on loan when it begins comes first.

        It is written as it goes, in the columns of RMM's logs, and costs a put less than a microsecond. The environment
        variable ``ARENAX_RECORD=FILE`` records the whole life of every pool, the first in that file and others beside
        it.

        Args:
            path: The file, which stays; None is a temporary one, which goes with the trace.

        Returns:
            A `Trace`; one looked at before the end of the scope holds what was written until then.

        Raises:
            OSError: Where the file cannot be written.

        Example:
            >>> import arenax, numpy as np
            >>> with arenax.BufferPool(ragged=arenax.Ragged(0, arenax.SizeClasses.pow2(4, 64))) as pool:
            ...     with pool.record() as trace:
            ...         for n in (5, 7, 12):
            ...             with pool.step() as step:
            ...                 x = step.put(np.ones(n, np.float32))
            ...     print([event[:3] for event in trace][:3], trace.requests[0].shape)
            [('allocate', 0, 20), ('free', 0, 20), ('allocate', 1, 28)] (5,)
        """
        recorder = Recorder.to(path)
        try:
            self.arena.begin_recording(recorder)
            yield Trace.of(recorder, self.name)
        finally:
            recorder.over = True
            self.arena.end_recording(recorder)

    def trim(self, to_bytes: int = 0) -> int:
        """Frees idle slots, those that are of least use first, until no more than `to_bytes` are reserved.

        What is on loan stays; slots that were reserved are no exception. Which go first is decided as for a conversion,
        by how long they lie idle and what they would cost to make again for each byte.

        Args:
            to_bytes: The bytes that may stay reserved; 0 gives back all that is idle.

        Returns:
            The bytes given back.

        Example:
            >>> import arenax
            >>> with arenax.BufferPool() as pool:
            ...     pool.reserve(arenax.ArraySpec((256,), "float32"), slots=4)
            ...     print(pool.trim(to_bytes=2500), pool.stats().reserved_bytes)
            2048 2048
        """
        if isinstance(to_bytes, bool) or not isinstance(to_bytes, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"to_bytes must be an integer, got {to_bytes!r}")
        if to_bytes < 0:
            raise ValueError(f"to_bytes must be at least 0, got {to_bytes}")
        return self.arena.trim(to_bytes)

    def check(self) -> None:
        """Verifies every invariant of the pool, and takes back what was lost by an interrupt.

        Raises:
            AssertionError: Naming the invariant that is broken.
        """
        self.arena.check()

    def close(self) -> None:
        """Frees every idle slot and refuses every waiter; arrays on loan stay valid until dropped. Idempotent."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            self.arena.end_recording(recorder)
        self.arena.close()

    def land_again(
        self, plan: BatchPlan, slots: Sequence[Slot], values: Sequence[Any], rags: Sequence[Rag | None]
    ) -> None:
        """Lands a batch once more, its landing having failed with the exception in flight.

        Where a slot was broken before (its array donated away by its last borrower, or the result of a computation that
        failed) that was the reason, and it gets a new buffer. Otherwise the exception goes on.
        """
        broken = [slot for slot in slots if not self.landing.is_whole(slot)]
        if not broken:
            raise
        renew = self.arena.revive if isinstance(sys.exception(), SlotLost) else self.arena.replace
        for slot in broken:
            renew(slot)
        plan.land(self.landing, slots, values, rags)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        s = self.stats()
        if self.arena.closed:
            return f"<BufferPool {self.name!r} on {self.landing.name}: closed>"
        limit = "" if s.budget_bytes is None else f" of {human_bytes(s.budget_bytes)}"
        return (
            f"<BufferPool {self.name!r} on {self.landing.name}: {s.slot_count} slots in {len(s.by_class)} classes, "
            f"{s.leased_count} leased, {human_bytes(s.reserved_bytes)}{limit} reserved>"
        )

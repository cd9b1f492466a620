"""The pool: what the user holds."""

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any, Self

from . import _fork
from ._arena import MODES, Arena
from ._batch import Planner, count_classes
from ._budget import budget_bytes
from ._compiles import CompileCounter
from ._debug import DebugArena, is_debugging
from ._guard import Compile, CompileGuard
from ._home import Home, land_again
from ._lease import Lease
from ._placement import placement_for
from ._plan import Plan
from ._request import Ragged, scalar_of
from ._slot import Holder
from ._step import Step
from ._upkeep import Upkeep
from ._waiters import CancelToken
from ._warm_up import warm_up

_numbers = itertools.count(1)


class BufferPool(Upkeep):
    """Preallocated device buffers of fixed size classes, lent out and recycled. A context manager that closes itself.

    Any thread may call anything.

    Args:
        placement: The device. None is JAX's default device, with uncommitted arrays as `jax.device_put` gives; a
            `jax.Device` gives committed ones, and a `jax.sharding.SingleDeviceSharding` in pinned host memory arrays
            there. A sequence of devices has an arena for each. A `jax.sharding.NamedSharding`, or a pytree prefix of
            them where leaves lie differently, gives global arrays. An `arenax.testing.FakeDevice` has no bytes.
        ragged: Which axes vary: None, a `Ragged`, or a pytree prefix of the batch, with None at leaves that are not
            ragged.
        budget: The most bytes that slots may take: None for no limit, bytes, a text such as ``"2GiB"``, or a fraction
            of the device's ``bytes_limit`` as a float. With a sequence of devices it is that of each; with a sharding
            that of this process's devices together.
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
        name = name or f"pool-{next(_numbers)}"
        counter = CompileCounter()
        places = placement_for(placement, landing, counter)
        kind = DebugArena if is_debugging(debug) else Arena
        homes: list[Home] = []
        for place in places.landings:
            limit = budget_bytes(budget, place.bytes_limit, place.name)
            arena = kind(place, name=name, mode=on_exhausted, budget=limit, timeout=timeout)
            place.moved = arena.moved
            homes.append(Home(place, arena, ragged, places.shardings, counter))
        super().__init__(name, homes, counter)
        self.placement = placement
        self.guard = CompileGuard(name)
        _fork.register(self)

    @classmethod
    def from_plan(cls, plan: Plan, **arguments: Any) -> Self:
        """Returns a pool with the slots of a plan, all reserved; its budget is what they take, if none is given.

        With a sequence of devices they are reserved on each; with a sharding they lie as it says.

        Args:
            plan: A `Plan`.
            **arguments: As the constructor's. `ragged` must be given where the plan was fitted to ragged batches:
                ``Ragged(axis, plan.size_classes)`` at the leaves that vary, with the pad value of each. A plan of mere
                bytes needs none, and serves arrays of uint8 with one axis.

        Raises:
            TypeError: Where it is no plan.
            ValueError: Where `ragged` is missing, and for a pytree of shardings: a plan does not know which is whose.

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
        pool = cls(**arguments)
        try:
            wanted = [
                (h.arena, Counter({h.exact(c.size_class.shape, c.size_class.dtype): c.slots for c in plan.classes}))
                for h in pool.homes
            ]
            if "budget" not in arguments:
                for arena, classes in wanted:
                    arena.budget = sum(size_class.nbytes * slots for size_class, slots in classes.items())
            (arena, classes), *others = wanted
            arena.reserve(classes, others)
        except BaseException:
            pool.close()
            raise
        return pool

    def reserve(self, example: Any, slots: int = 3, *, device: Any = None) -> None:
        """Preallocates slots, now and in full, or raises and leaves nothing half done.

        Each leaf gets slots of its own; a ragged leaf gets them in every size class, and as many int32 scalars for its
        sizes. Calls add up.

        Args:
            example: A batch, or a pytree of `ArraySpec` or `jax.ShapeDtypeStruct`.
            slots: Batches that will be alive at once.
            device: One of the pool's devices, where it has several; None is each of them. Or a sharding, as for `put`.

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
        if device is not None:
            homes = (self.home(device),)
        else:
            homes = self.homes
        wanted = [(h.arena, count_classes(h.planner_on(device).spec_classes(example), slots)) for h in homes]
        (arena, classes), *others = wanted
        arena.reserve(classes, others)

    def planner_for(self, ragged: Any) -> Planner:
        """Returns what `put` takes as `planner`: ragged axes of one kind of batch, in place of the pool's own.

        Args:
            ragged: As the constructor's.
        """
        return self.homes[0].planner_for(ragged)

    def put(
        self,
        batch: Any,
        with_sizes: bool = False,
        *,
        device: Any = None,
        local: bool = False,
        extent: int | None = None,
        cancel: CancelToken | None = None,
        planner: Planner | None = None,
    ) -> Any:
        """Lands a batch in recycled slots; each slot goes back when its array object dies.

        The caller's arrays are never aliased: he may overwrite them as soon as this returns. A second array object on
        the same buffer, such as `jax.device_put(x, device)` makes, does not prolong the loan.

        Args:
            batch: A pytree of arrays: NumPy arrays of any layout, scalars, `jax.Array`.
            with_sizes: Whether to return ``(batch, sizes)``.
            device: Where it is to lie: one of the pool's devices, where it has several, and None is the first; in a
                pool of shardings a `jax.sharding.NamedSharding` for all leaves in place of the pool's own.
            local: Whether the batch is just this process's part of the global one, as
                `jax.make_array_from_process_local_data` takes it; then each process lands its own. Ragged axes get the
                class of the longest of all processes, whose length the sizes are: to find it they exchange a few bytes,
                so that each must put in the same order.
            extent: With `local`, the length of ragged axes that all processes know, which spares them that.
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
        if device is None:
            home, planner = self.homes[0], planner or self.planner
        else:
            home = self.home(device)
            planner = planner or home.planner_on(device)
        arena, landing = home.arena, home.landing
        if local:
            plan, values, requested, rags = home.local_planner_on(device).plan_part(batch, with_sizes, extent)
        else:
            plan, values, requested, rags = planner.plan(batch, with_sizes)
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
                land_again(home, plan, slots, values, rags)
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

    def lease(self, shape: Any, dtype: Any = "float32", *, fill: Any = 0, device: Any = None) -> Lease:
        """Checks out one slot of exactly this shape, until it is released: by its ``with``, or `Lease.release`.

        Args:
            shape: Shape of the slot.
            dtype: Its dtype.
            fill: A scalar that every element is set to, or None for undefined contents.
            device: Where it is to lie, as for `put`.

        Returns:
            A `Lease`, which is a context manager.

        Raises:
            PoolExhausted: As `on_exhausted` says.
            PoolClosed: After `close`.
        """
        home = self.homes[0] if device is None else self.home(device)
        shelf = home.shelf(shape, dtype, device)
        if fill is not None:
            scalar_of(fill, shelf.size_class.dtype)
        return Lease(home.arena, home.landing, shelf, fill)

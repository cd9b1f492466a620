"""One arena of a pool with its landing and planners: what a device, or the devices of a sharding, have of it."""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from ._arena import Arena
from ._batch import BatchPlan, Planner
from ._compiles import CompileCounter
from ._landing import Landing, Rag, SlotLost
from ._local import LocalPlanner
from ._measure import Meter
from ._mesh import placed
from ._request import SizeClass, canonical_dtype, exact_shape
from ._sharded import ShardedLanding
from ._slot import Shelf, Slot


class Home:
    """An arena and what lands in it.

    Args:
        landing: The landing.
        arena: The arena.
        ragged: The pool's ragged axes.
        shardings: The pool's shardings, None for a single device.
        counter: Counts the pool's compiles.

    Attributes:
        landing: As given.
        arena: As given.
        planner: Plans batches, padding what is ragged.
        exact_planner: Plans arrays of exact shapes.
        meter: Keeps the figures.
    """

    def __init__(self, landing: Landing, arena: Arena, ragged: Any, shardings: Any, counter: CompileCounter) -> None:
        self.landing = landing
        self.arena = arena
        self.planner = Planner(ragged, landing, arena.shelf, shardings)
        self.exact_planner = Planner(None, landing, arena.shelf, shardings)
        self.meter = Meter(arena, landing, counter)
        self._ragged = ragged
        self._shardings = shardings
        self._planners: dict[tuple[NamedSharding, bool], Planner] = {}
        self._local_planners: dict[NamedSharding | None, LocalPlanner] = {}
        self._shelves: dict[Any, Shelf] = {}

    def has(self, device: Any) -> bool:
        """Whether its arrays lie on this device, or may lie so."""
        if isinstance(device, NamedSharding):
            return self._shardings is not None and device.addressable_devices <= {*self.landing.devices}
        return self._shardings is None and self.landing.device == device

    def planners(self) -> list[Planner]:
        """All its planners."""
        return [self.planner, self.exact_planner, *self._planners.values(), *self._local_planners.values()]

    def planner_for(self, ragged: Any) -> Planner:
        """A planner of batches with ragged axes of their own."""
        return Planner(ragged, self.landing, self.arena.shelf, self._shardings)

    def planner_on(self, device: Any, exact: bool = False) -> Planner:
        """The planner of batches that lie so; None and a device are as the pool says."""
        if not isinstance(device, NamedSharding):
            return self.exact_planner if exact else self.planner
        found = self._planners.get((device, exact))
        if found is None:
            ragged = None if exact else self._ragged
            found = self._planners[device, exact] = Planner(ragged, self.landing, self.arena.shelf, device)
        return found

    def local_planner_on(self, device: Any) -> LocalPlanner:
        """The planner of batches of which each process has its own part.

        Raises:
            ValueError: Where the pool has no shardings.
        """
        shardings = device if isinstance(device, NamedSharding) else self._shardings
        if shardings is None or not isinstance(self.landing, ShardedLanding):
            raise ValueError("local=True is for a pool with a sharding over the devices of several processes")
        key = device if isinstance(device, NamedSharding) else None
        found = self._local_planners.get(key)
        if found is None:
            found = self._local_planners[key] = LocalPlanner(self._ragged, self.landing, self.arena.shelf, shardings)
        return found

    def shelf(self, shape: Any, dtype: Any, device: Any = None) -> Shelf:
        """The shelf for a shape and a dtype as the caller writes them, remembered for the next time."""
        try:
            found = self._shelves.get((shape, dtype, device))
        except TypeError:  # A list, say.
            found = None
        return found or self._new_shelf(shape, dtype, device)

    def _new_shelf(self, shape: Any, dtype: Any, device: Any) -> Shelf:
        shelf = self.arena.shelf(self.exact(shape, dtype, device))
        # What a 64-bit dtype means depends on `jax_enable_x64`.
        if isinstance(shape, tuple) and np.dtype(dtype).itemsize < 8:
            if len(self._shelves) >= Planner.MAX_PLANS:
                self._shelves.clear()
            try:
                self._shelves[shape, dtype, device] = shelf
            except TypeError:
                pass
        return shelf

    def exact(self, shape: Any, dtype: Any, device: Any = None) -> SizeClass:
        """The class of exactly this shape.

        Raises:
            ValueError: Where the pool has several shardings and none is named, and where it does not suit the shape.
        """
        size_class = SizeClass(exact_shape(shape), canonical_dtype(dtype))
        if self._shardings is None:
            return size_class
        sharding = device if isinstance(device, NamedSharding) else self._shardings
        if not isinstance(sharding, NamedSharding):
            raise ValueError(
                "the pool has a sharding for each leaf of a batch: say with device=NamedSharding(mesh, spec) how an "
                "array of its own is to lie"
            )
        return placed(size_class, sharding, f"the array {size_class}")


def land_again(
    home: Home, plan: BatchPlan, slots: Sequence[Slot], values: Sequence[Any], rags: Sequence[Rag | None]
) -> None:
    """Lands a batch once more, its landing having failed with the exception in flight.

    Where a slot was broken before (its array donated away by its last borrower, or the result of a computation that
    failed) that was the reason, and it gets a new buffer. Otherwise the exception goes on.
    """
    broken = [slot for slot in slots if not home.landing.is_whole(slot)]
    if not broken:
        raise
    renew = home.arena.revive if isinstance(sys.exception(), SlotLost) else home.arena.replace
    for slot in broken:
        renew(slot)
    plan.land(home.landing, slots, values, rags)

"""The landing of a loader's batches: arrays of whatever tree into the pool, the rest passed through."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from arenax import BufferPool, CancelToken, Ragged
from arenax._request import canonical_dtype

from ._tree import leaves_of, map_tree
from ._writer import ALIGN
from .shared import Packed, Padded, Segment

LANDINGS = ("copy", "adopt")
_HELD = 3
_ADOPTED_BYTES = 1 << 16  # What is smaller is copied faster than it is handed over.
_ARRAYS = (np.ndarray, np.generic, jax.Array, Padded)


class Lander:
    """Brings batches into a pool.

    Args:
        pool: Where they land.
        ragged: None for the pool's own ragged axes, or those of these batches; then they come with their sizes.
        landing: ``"copy"``, or ``"adopt"``: arrays in a worker's shared slot become JAX's where they are, on CPU.

    Attributes:
        adopted_count: Arrays that were adopted.
        overflow_count: Batches that found no free shared slot and came as ordinary arrays.
        held: Batches of a worker whose shared slots the consumer and his computations may still have.

    Raises:
        TypeError: Where `pool` is no `BufferPool`.
        ValueError: For another `landing`, or ``"adopt"`` on another device than a CPU.
    """

    def __init__(self, pool: BufferPool, ragged: Any, landing: str) -> None:
        if not isinstance(pool, BufferPool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"pool must be an arenax.BufferPool, got {type(pool).__name__}")
        if landing not in LANDINGS:
            raise ValueError(f"landing must be one of {', '.join(LANDINGS)}, got {landing!r}")
        is_one_cpu = getattr(pool.landing.device, "platform", None) == "cpu" and len(pool.landing.devices) == 1
        if landing == "adopt" and not is_one_cpu:
            raise ValueError(f'landing="adopt" is for one CPU device alone; the pool is on {pool.landing.name}')
        self.pool = pool
        self.adopted_count = self.overflow_count = 0
        self.held = _HELD if landing == "adopt" else 0
        self.adopts = landing == "adopt"
        self._device, self._committed = pool.landing.device, pool.placement is not None
        self._with_sizes = ragged is not None
        self._planner = pool.planner_for(ragged) if ragged is not None else None

    def land(self, batch: Any, segment: Segment | None, cancel: CancelToken | None = None) -> Any:
        """Lands a batch as it comes from a loader, and frees its shared slot if it has one.

        Args:
            batch: A `Packed` from a worker, or the batch's tree.
            segment: What it was packed in.
            cancel: Lets another thread end a wait for a slot.

        Returns:
            As a call of this.
        """
        if not isinstance(batch, Packed):
            return self(batch, cancel)
        if batch.overflowed:
            self.overflow_count += 1
            if segment is not None:
                segment.overflowed()
        shared = self.adopts and not batch.overflowed
        try:
            return self(batch.tree, cancel, shared)
        finally:
            if not shared:
                batch.release()

    def __call__(self, tree: Any, cancel: CancelToken | None = None, shared: bool = False) -> Any:
        """Lands a batch.

        Args:
            tree: Its tree: NumPy arrays, and `Padded` ones, land; texts, numbers and other objects stay.
            cancel: Lets another thread end a wait for a slot.
            shared: Whether its arrays lie in a shared slot, for ``"adopt"``.

        Returns:
            The tree with a `jax.Array` for each array; with `ragged`, ``(tree, sizes)``.
        """
        leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_unsorted)
        if any(isinstance(x, Mapping | tuple | list) for x in leaves):
            return self._land_foreign(leaves, treedef, cancel, shared)
        adopted = self._adopt(tree, leaves, treedef) if shared else {}
        arrays = {i for i, x in enumerate(leaves) if _lands(x)} - adopted.keys()
        # A leaf that stays is none at all to the pool, but keeps its place.
        hosts = [(x.valid() if isinstance(x, Padded) else x) if i in arrays else None for i, x in enumerate(leaves)]
        landed = self.pool.put(treedef.unflatten(hosts), self._with_sizes, cancel=cancel, planner=self._planner)
        if len(arrays) == len(leaves):
            return landed
        sizes: Any = None
        if self._with_sizes:
            landed, sizes = landed
            sizes = treedef.flatten_up_to(sizes)
            for i in adopted:
                if isinstance(x := leaves[i], Padded):
                    sizes[i] = self.pool.put(np.int32(x.extent), cancel=cancel, planner=self.pool.exact_planner)
        found = treedef.flatten_up_to(landed)
        batch = treedef.unflatten([found[i] if i in arrays else adopted.get(i, x) for i, x in enumerate(leaves)])
        return (batch, treedef.unflatten(sizes)) if self._with_sizes else batch

    def _land_foreign(self, leaves: list[Any], treedef: Any, cancel: CancelToken | None, shared: bool) -> Any:
        """Lands a batch with containers that are none to JAX, such as a `UserDict`, as lists, and puts them back."""
        lists = [list(leaves_of(x)) if isinstance(x, Mapping | tuple | list) else x for x in leaves]
        landed = self(treedef.unflatten(lists), cancel, shared)
        trees = landed if self._with_sizes else (landed,)
        restored: list[Any] = []
        for tree in trees:
            parts = treedef.flatten_up_to(tree)
            for i, x in enumerate(leaves):
                if isinstance(x, Mapping | tuple | list):
                    values = iter(parts[i])
                    parts[i] = map_tree(lambda _, values=values: next(values), x)
            restored.append(treedef.unflatten(parts))
        return tuple(restored) if self._with_sizes else restored[0]

    def _adopt(self, tree: Any, leaves: list[Any], treedef: Any) -> dict[int, jax.Array]:
        """JAX's own arrays on the memory of those leaves that it can take as they are; they keep it."""
        specs = (self._planner or self.pool.planner).specs_of(tree, treedef)
        adopted: dict[int, jax.Array] = {}
        for i, (leaf, ragged) in enumerate(zip(leaves, specs, strict=True)):
            array = leaf.array if isinstance(leaf, Padded) else leaf
            if not isinstance(array, np.ndarray) or array.nbytes < _ADOPTED_BYTES or not array.flags.c_contiguous:
                continue
            if ragged is not None and not _is_padded(leaf, ragged):
                continue
            address = array.__array_interface__["data"][0]
            if address % ALIGN or canonical_dtype(array.dtype) != array.dtype:
                continue
            with jax.default_device(self._device):
                x = jax.device_put(array, self._device if self._committed else None)
            if x.unsafe_buffer_pointer() == address:
                adopted[i] = x
                self.adopted_count += 1
        return adopted


def _is_padded(leaf: Any, ragged: Ragged) -> bool:
    """Whether a worker has padded it to its size class."""
    if not isinstance(leaf, Padded) or leaf.axis is None or leaf.extent > ragged.size_classes.boundaries[-1]:
        return False
    return leaf.array.shape[leaf.axis] == ragged.size_classes.class_of(leaf.extent)


def _is_unsorted(node: Any) -> bool:
    """Whether it is a dict whose keys JAX could not sort."""
    if not isinstance(node, dict):
        return False
    try:
        sorted(node)  # pyright: ignore[reportUnknownArgumentType, reportCallIssue, reportArgumentType]
    except TypeError:
        return True
    return False


def _lands(leaf: Any) -> bool:
    return isinstance(leaf, _ARRAYS) and not (isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "OSU")


def each_ragged(ragged: Any, make: Callable[[Ragged], Any]) -> Any:
    """The tree of `ragged` with what `make` makes of each `Ragged` in it."""
    return jax.tree.map(lambda r: None if r is None else make(r), ragged, is_leaf=lambda r: r is None)

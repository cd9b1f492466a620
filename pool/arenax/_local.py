"""Batches of which each process has its own part, as `jax.make_array_from_process_local_data` takes them."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.tree_util import tree_flatten, tree_flatten_with_path

from ._batch import Planned, Planner, label
from ._landing import Rag
from ._mesh import global_shape
from ._request import SizeClass
from ._sharded import Prepared, ShardedLanding


class LocalPlanner(Planner):
    """Plans global arrays from a process's own part of the batch.

    Along an axis that is cut between processes a process has its share, along any other all of it. A ragged axis must
    be whole in each process; its class is one that all of them agree on.

    Args:
        ragged: As for `Planner`.
        landing: A sharded one.
        shelf: Gives the shelf of a size class.
        shardings: As for `Planner`.
    """

    def __init__(self, ragged: Any, landing: ShardedLanding, shelf: Any, shardings: Any) -> None:
        super().__init__(ragged, landing, shelf, shardings)
        self._landing: Any = _Local(landing)

    def plan_part(self, batch: Any, with_sizes: bool, extent: int | None) -> Planned:
        """As `Planner.plan`, for a process's own part.

        Args:
            batch: The part.
            with_sizes: Whether the sizes are wanted; they are those agreed on.
            extent: The length of ragged axes that all processes have agreed on already; None asks them, which is a
                collective: each must put at the same time.

        Raises:
            ValueError: For a part that its sharding does not suit, a ragged axis that is cut between processes, and an
                extent that the part exceeds.
        """
        named = [(label(path), _on_host(leaf)) for path, leaf in tree_flatten_with_path(batch)[0]]
        treedef = tree_flatten(batch)[1]
        batch = treedef.unflatten([leaf for _, leaf in named])
        leaves = self._as_arrays(batch)
        specs = self.specs_of(batch, treedef)
        shardings = self._shardings_of(batch, treedef)
        shapes = [
            global_shape(x.shape, sharding, name)
            for (name, _), x, sharding in zip(named, leaves, shardings, strict=True)
        ]
        ragged = [i for i, spec in enumerate(specs) if spec is not None]
        for i in ragged:
            axis = specs[i].axis_of(len(shapes[i]), named[i][0])  # type: ignore[union-attr]
            if shapes[i][axis] != leaves[i].shape[axis]:
                raise ValueError(
                    f"axis {axis} of {named[i][0]} is ragged and cut between processes: its padding would lie in the "
                    "middle of the global array. Shard another axis, or put the global batch"
                )
        extents = self._agreed([leaves[i].shape[_axis(specs[i], shapes[i])] for i in ragged], extent, named, ragged)
        sizes: list[int] = []
        for i, n in zip(ragged, extents, strict=True):
            axis = _axis(specs[i], shapes[i])
            shape = (*shapes[i][:axis], n, *shapes[i][axis + 1 :])
            shapes[i] = self._padded(shape, specs[i], sizes, batch, i)  # type: ignore[arg-type]
        config: Any = jax.config
        key = (treedef, with_sizes, config.jax_enable_x64, *shapes, *[x.dtype for x in leaves])
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._prepare(batch, leaves, treedef, shapes, with_sizes)
        rags: list[Rag | None] = []
        requested = list(plan.requested)
        mine = {i: leaves[i].shape[_axis(specs[i], shapes[i])] for i in ragged}
        for i, known in enumerate(plan.ragged):
            rags.append(None if known is None else Rag(known[0], mine[i], known[1]))
            if known is not None:
                requested[i] *= mine[i]
        if with_sizes:
            leaves = [*leaves, *sizes]
            rags.extend([None] * len(sizes))
        return plan, leaves, requested, rags

    def _agreed(self, mine: list[int], extent: int | None, named: list[Any], ragged: list[int]) -> list[int]:
        """The length of each ragged leaf, the same in every process: no two may choose different classes."""
        if extent is not None:
            for n, i in zip(mine, ragged, strict=True):
                if n > extent:
                    raise ValueError(f"{named[i][0]} has {n} steps along its ragged axis, above the extent {extent}")
            return [extent] * len(mine)
        if not mine or jax.process_count() == 1:
            return mine
        found = multihost_utils.process_allgather(np.array(mine, np.int32))
        return np.asarray(found).reshape(-1, len(mine)).max(axis=0).tolist()


class _Local:
    """A sharded landing, as seen by plans of parts."""

    def __init__(self, landing: ShardedLanding) -> None:
        self._landing = landing

    def prepare(self, classes: Sequence[SizeClass]) -> Prepared:
        return self._landing.prepare(classes, local=True)


def _axis(spec: Any, shape: tuple[int, ...]) -> int:
    return spec.axis % len(shape)


def _on_host(leaf: Any) -> Any:
    """A device array on the host: a part of a batch has no place on the mesh yet."""
    if not isinstance(leaf, jax.Array):
        return leaf
    with jax.transfer_guard("allow"):
        return np.array(leaf)

"""From a batch, a pytree of arrays, to a prepared plan: which class each leaf takes, and how the leaves land."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import attrs
import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.tree_util import keystr, tree_flatten, tree_flatten_with_path

from ._guard import Variety
from ._landing import Landing, Rag
from ._mesh import check_boundaries, placed, size_of
from ._request import ArraySpec, Ragged, SizeClass, as_array, canonical_dtype, exact_shape
from ._size_classes import SizeClasses
from ._slot import Shelf, Slot

Treedef = Any
LONE = jax.tree.structure(0)  # The tree of a batch that is one array.


@attrs.frozen(eq=False)
class Group:
    """Leaves that land in one go.

    Attributes:
        prepared: What the landing prepared for them, or None for a single `jax.Array`.
        indices: Their places among the leaves.
    """

    prepared: Any
    indices: tuple[int, ...]


@attrs.frozen(eq=False)
class BatchPlan:
    """All that can be known of a batch from its structure, shapes and dtypes, made once.

    The sizes of ragged leaves, where they are wanted, are leaves of their own at the end: int32 scalars that land
    together with the fixed leaves.

    Attributes:
        treedef: The batch's tree.
        shelves: The shelf of each leaf, then of each size.
        requested: Bytes that each asks for; of a ragged leaf, bytes for one step along its axis.
        ragged: For each leaf, ``(axis, pad)`` or None.
        groups: How they land.
        fixed: What the landing prepared where all leaves are fixed host values, and so land in one go; else None.
        leaf_count: Leaves of the batch, the sizes left out.
        lone: Whether it is one array, without a tree around it and without its size.
        no_rags: None for each leaf: the extents of a batch without ragged leaves.
        modeless: Whether every dtype means the same with `jax_enable_x64` on and off.
    """

    treedef: Treedef
    shelves: tuple[Shelf, ...]
    requested: tuple[int, ...]
    ragged: tuple[tuple[int, np.generic] | None, ...]
    groups: tuple[Group, ...]
    fixed: Any
    leaf_count: int
    lone: bool
    no_rags: tuple[None, ...]
    modeless: bool

    def batch_of(self, arrays: Sequence[Any]) -> Any:
        """The batch's tree of the arrays."""
        return self.treedef.unflatten(arrays[: self.leaf_count])

    def sizes_of(self, arrays: Sequence[Any]) -> Any:
        """The batch's tree of the sizes, None where a leaf is not ragged."""
        sizes = iter(arrays[self.leaf_count :])
        return self.treedef.unflatten([None if r is None else next(sizes) for r in self.ragged])

    def land(
        self,
        landing: Landing,
        slots: Sequence[Slot],
        values: Sequence[Any],
        rags: Sequence[Rag | None],
    ) -> None:
        """Lands every leaf in its slot; may be called again after a failure."""
        for group in self.groups:
            indices = group.indices
            picked, picked_values = [slots[i] for i in indices], [values[i] for i in indices]
            rag = rags[indices[0]]
            if group.prepared is not None:
                landing.land(group.prepared, picked, picked_values, rag)
            else:
                landing.land_array(picked[0], picked_values[0], rag)


# A plan, and for each leaf (and size) its value, the bytes it asks for, and its ragged extent.
Planned = tuple[BatchPlan, Sequence[Any], Sequence[int], Sequence[Rag | None]]


class Planner:
    """Keeps one plan for each batch structure it has seen.

    Args:
        ragged: None, a `Ragged`, or a pytree prefix of them with None at the leaves that are not ragged.
        landing: Prepares programs.
        shelf: Gives the shelf of a size class.
        shardings: None, a `jax.sharding.NamedSharding`, or a pytree prefix of them.
    """

    # Structures are few in any sane loop; a caller who makes a new one each time must not grow this for ever.
    MAX_PLANS = 4096
    MAX_VARIETIES = 64

    def __init__(
        self, ragged: Any, landing: Landing, shelf: Callable[[SizeClass], Shelf], shardings: Any = None
    ) -> None:
        for leaf in jax.tree.leaves(ragged, is_leaf=_is_none):
            if leaf is not None and not isinstance(leaf, Ragged):
                raise TypeError(f"ragged must be None, a Ragged or a pytree of them, got {leaf!r}")
        self._ragged = ragged
        self._any_ragged = bool(jax.tree.leaves(ragged))
        self._landing = landing
        self._shelf = shelf
        self._shardings = shardings
        if isinstance(shardings, NamedSharding):
            for leaf in jax.tree.leaves(ragged):
                check_boundaries(leaf, shardings)
        self._array_types: set[type] = set()
        self._specs: dict[Treedef, list[Ragged | None]] = {}
        self._plans: dict[Any, BatchPlan] = {}
        self._lone_types: set[type] = set()
        self._lone_plans: dict[Any, BatchPlan] = {}
        self._varieties: dict[Any, tuple[Treedef, list[Variety]]] = {}

    def plan(self, batch: Any, with_sizes: bool) -> Planned:
        """Returns the plan, and for each leaf (and size) its value, the bytes it asks for, and its ragged extent.

        Raises:
            TypeError: For a leaf that is no array and cannot become one, or a dtype that JAX cannot hold.
            ValueError: Where `ragged` does not match the batch.
            NoSizeClass: Where a size is above its largest class.
        """
        kind = type(batch)
        if kind in self._lone_types:  # One array, and no axis to round up: no tree to flatten.
            plan = self._lone_plans.get((kind, batch.shape, batch.dtype))
            if plan is not None:
                return plan, (batch,), plan.requested, plan.no_rags
        leaves, treedef = tree_flatten(batch)
        types = [*map(type, leaves)]
        if not self._array_types.issuperset(types):
            leaves = self._as_arrays(batch)
            types = [*map(type, leaves)]
        shapes: list[Any] = [x.shape for x in leaves]
        sizes: list[int] = []
        if self._any_ragged:
            specs = self._specs.get(treedef) or self._match(batch, treedef)
            for i, spec in enumerate(specs):
                if spec is not None:
                    shapes[i] = self._padded(shapes[i], spec, sizes, batch, i)
        # Lookups of one key, nothing computed a leaf: dtypes are made canonical, once, in `_prepare`.
        x64 = cast(Any, jax.config).jax_enable_x64
        key = (treedef, with_sizes, x64, *types, *shapes, *[x.dtype for x in leaves])
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= self.MAX_PLANS:
                self._plans.clear()
                self._lone_plans.clear()
            plan = self._plans[key] = self._prepare(batch, leaves, treedef, shapes, with_sizes)
        if not sizes:
            if treedef == LONE and plan.modeless and kind in self._array_types:
                self._lone_types.add(kind)
                self._lone_plans[kind, batch.shape, batch.dtype] = plan
            return plan, leaves, plan.requested, plan.no_rags
        remaining = iter(sizes)
        rags = [None if ragged is None else Rag(ragged[0], next(remaining), ragged[1]) for ragged in plan.ragged]
        requested = list(plan.requested)
        for i, rag in enumerate(rags):
            if rag is not None:
                requested[i] *= rag.size
        if with_sizes:
            leaves = [*leaves, *sizes]
            rags.extend([None] * len(sizes))
        return plan, leaves, requested, rags

    def spec_classes(self, tree: Any) -> Iterator[tuple[str, list[SizeClass]]]:
        """Yields, for each leaf of an example or specification, its name and all the size classes it may take.

        A ragged leaf takes every class of its axis, and its size is a leaf of its own.
        """
        leaves, treedef = tree_flatten_with_path(tree)
        specs = self.specs_of(tree, treedef)
        for (path, leaf), ragged, sharding in zip(leaves, specs, self._shardings_of(tree, treedef), strict=True):
            name = label(path)
            leaf = as_spec(leaf, name)
            if ragged is None:
                yield name, [placed(c, sharding, name) for c in leaf.classes()]
                continue
            axis = ragged.axis_of(len(leaf.shape), name)
            ragged.pad(leaf.dtype, name)
            if not isinstance(size := leaf.shape[axis], SizeClasses):
                ragged.capacity(size, axis, name)
                shape = (*leaf.shape[:axis], ragged.size_classes, *leaf.shape[axis + 1 :])
                leaf = ArraySpec(shape, leaf.dtype)
            yield name, [placed(c, sharding, name) for c in leaf.classes()]
            yield f"the size of {name}", [size_of(sharding)]

    def specs_of(self, tree: Any, treedef: Treedef) -> list[Ragged | None]:
        """The ragged specification of each leaf of a batch, or of a specification of one."""
        if not self._any_ragged:
            return [None] * treedef.num_leaves
        return self._specs.get(treedef) or self._match(tree, treedef)

    def _shardings_of(self, batch: Any, treedef: Treedef) -> list[NamedSharding | None]:
        """The sharding of each leaf, the prefix broadcast."""
        if self._shardings is None:
            return [None] * treedef.num_leaves
        return _broadcast(self._shardings, batch, treedef, "placement")

    def varieties(self) -> list[tuple[Treedef, list[Variety]]]:
        """For each batch structure seen, the sizes that its leaves came with."""
        return [*self._varieties.values()]

    def _note(self, batch: Any, leaves: Sequence[Any], treedef: Treedef, specs: Sequence[Ragged | None]) -> None:
        """Notes the shapes of a batch that has no plan yet."""
        key = (treedef, *[len(x.shape) for x in leaves])
        found = self._varieties.get(key)
        if found is None:
            if len(self._varieties) >= self.MAX_VARIETIES:
                return
            names = [label(path) for path, _ in tree_flatten_with_path(batch)[0]]
            varieties = [Variety(name, len(x.shape), spec) for name, x, spec in zip(names, leaves, specs, strict=True)]
            found = self._varieties[key] = (treedef, varieties)
        for variety, x in zip(found[1], leaves, strict=True):
            variety.add(x.shape)

    def _as_arrays(self, batch: Any) -> list[Any]:
        """The leaves, each an array; notes the types that are arrays already."""
        leaves: list[Any] = []
        for path, leaf in tree_flatten_with_path(batch)[0]:
            leaves.append(as_array(leaf, label(path)))
            if leaves[-1] is leaf:
                self._array_types.add(type(leaf))
        return leaves

    def _match(self, batch: Any, treedef: Treedef) -> list[Ragged | None]:
        """The ragged specification of each leaf of the batch, the prefix broadcast."""
        specs: list[Ragged | None] = _broadcast(self._ragged, batch, treedef, "ragged")
        if len(self._specs) >= self.MAX_PLANS:
            self._specs.clear()
        self._specs[treedef] = specs
        return specs

    def _padded(self, shape: Any, spec: Ragged, sizes: list[int], batch: Any, i: int) -> Any:
        """The shape with its ragged axis raised to a class; notes the size."""
        axis = spec.axis
        if not -len(shape) <= axis < len(shape):
            spec.axis_of(len(shape), _name(batch, i))
        size = shape[axis]
        try:
            capacity = spec.size_classes.class_of(size)
        except ValueError:
            capacity = spec.capacity(size, axis, _name(batch, i))
        sizes.append(size)
        axis %= len(shape)
        return (*shape[:axis], capacity, *shape[axis + 1 :])

    def _prepare(
        self, batch: Any, leaves: Sequence[Any], treedef: Treedef, shapes: Sequence[Any], with_sizes: bool
    ) -> BatchPlan:
        """Checks every leaf and prepares all programs, before any slot is taken."""
        specs = self._specs[treedef] if self._any_ragged else [None] * len(leaves)
        self._note(batch, leaves, treedef, specs)
        shelves: list[Shelf] = []
        requested: list[int] = []
        ragged: list[tuple[int, np.generic] | None] = []
        fixed: list[int] = []
        groups: list[Group] = []
        shardings = self._shardings_of(batch, treedef)
        for i, (leaf, shape, spec) in enumerate(zip(leaves, shapes, specs, strict=True)):
            dtype = _checked_dtype(leaf, _name(batch, i))
            size_class = SizeClass(tuple(shape), dtype)
            if shardings[i] is not None:
                size_class = placed(size_class, shardings[i], _name(batch, i))
            shelves.append(self._shelf(size_class))
            if spec is None:
                ragged.append(None)
                requested.append(size_class.nbytes)
            else:
                axis = shelves[-1].ragged_axis = spec.axis % len(shape)
                ragged.append((axis, spec.pad(dtype, _name(batch, i))))
                requested.append(size_class.nbytes // shape[axis])
            if isinstance(leaf, jax.Array):
                groups.append(Group(None, (i,)))
            elif spec is None:
                fixed.append(i)
            else:
                groups.append(Group(self._landing.prepare([size_class]), (i,)))
        if with_sizes:
            for _, sharding in filter(lambda pair: pair[0], zip(ragged, shardings, strict=True)):
                fixed.append(len(shelves))
                shelves.append(self._shelf(size_of(sharding)))
                requested.append(shelves[-1].nbytes)
        if fixed:
            prepared = self._landing.prepare([shelves[i].size_class for i in fixed])
            groups.append(Group(prepared, tuple(fixed)))
        return BatchPlan(
            treedef,
            tuple(shelves),
            tuple(requested),
            tuple(ragged),
            tuple(groups),
            fixed=groups[0].prepared if len(fixed) == len(shelves) > 0 else None,
            leaf_count=len(leaves),
            lone=treedef == LONE and len(shelves) == 1,
            no_rags=(None,) * len(leaves),
            modeless=all(leaf.dtype.itemsize < 8 for leaf in leaves),
        )


def count_classes(leaves: Iterator[tuple[str, list[SizeClass]]], slots: int) -> Counter[SizeClass]:
    """How many slots of each class `slots` batches alive at once need."""
    wanted = Counter[SizeClass]()
    for _, classes in leaves:
        for size_class in dict.fromkeys(classes):
            wanted[size_class] += slots
    return wanted


def as_spec(leaf: Any, name: str) -> ArraySpec:
    """The specification of an example's leaf, or of a leaf that is one already."""
    if isinstance(leaf, ArraySpec):
        return leaf
    shape = getattr(leaf, "shape", None)
    leaf = as_array(leaf, name) if shape is None or not hasattr(leaf, "dtype") else leaf
    return ArraySpec(tuple(leaf.shape), _checked_dtype(leaf, name))


def _broadcast(prefix: Any, batch: Any, treedef: Treedef, name: str) -> list[Any]:
    """What a pytree prefix of a batch says of each of its leaves."""
    found: list[Any] = []
    try:
        jax.tree.map(lambda x, sub: found.extend([x] * len(jax.tree.leaves(sub))), prefix, batch, is_leaf=_is_none)
    except (ValueError, TypeError) as e:
        raise ValueError(
            f"{name} does not match the batch: it must be a pytree prefix of it, as vmap's in_axes is. {name} has the "
            f"structure {jax.tree.structure(prefix)}, the batch {treedef}"
        ) from e
    return found


def _is_none(x: Any) -> bool:
    return x is None


def _name(batch: Any, i: int) -> str:
    return label(tree_flatten_with_path(batch)[0][i][0])


def label(path: Any) -> str:
    """How messages name the leaf at a path."""
    return f"leaf {keystr(path)}" if path else "the batch"


def _checked_dtype(leaf: Any, name: str) -> np.dtype[Any]:
    if isinstance(leaf, Tracer):
        raise TypeError(
            f"{name} is a tracer: call put outside of jit, grad and vmap, on arrays, and pass the result in"
        )
    exact_shape(leaf.shape)
    try:
        return canonical_dtype(leaf.dtype)
    except TypeError as e:
        raise TypeError(f"{name}: {e}") from None

"""Shapes on a mesh: which a sharding can have, the classes that it allows, and what a process has of them."""

import functools
import math

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ._request import INT32, Ragged, SizeClass

_SIZE = SizeClass((), INT32)


def placed(size_class: SizeClass, sharding: NamedSharding | None, name: str) -> SizeClass:
    """Returns the class as it lies on a mesh.

    Args:
        size_class: A class without a sharding.
        sharding: How it is to lie; None for a pool of one device.
        name: What messages call the array.

    Raises:
        ValueError: Where the sharding has more axes than the array, or does not divide one of them.
    """
    if sharding is None:
        return size_class
    shape, spec = size_class.shape, sharding.spec
    if len(spec) > len(shape):
        raise ValueError(
            f"{name} has rank {len(shape)}, and its sharding {spec} is for at least {len(spec)} axes: give it a "
            "sharding of its own, with a pytree of placements or device=NamedSharding(mesh, PartitionSpec(...))"
        )
    for axis, n in enumerate(shape):
        shards = shards_along(sharding, axis)
        if n % shards:
            raise ValueError(
                f"axis {axis} of {name} has size {n}, which its sharding {spec} cannot divide into {shards} shards: "
                f"pad it to {-(-n // shards) * shards}, or leave the axis out of the sharding"
            )
    return SizeClass(shape, size_class.dtype, sharding)


def shards_along(sharding: NamedSharding, axis: int) -> int:
    """How many shards a sharding cuts an axis into."""
    names = sharding.spec[axis] if axis < len(sharding.spec) else None
    if names is None or names is PartitionSpec.UNCONSTRAINED:
        return 1
    return math.prod(sharding.mesh.shape[n] for n in (names if isinstance(names, tuple) else (names,)))


def check_boundaries(ragged: Ragged, sharding: NamedSharding) -> None:
    """Verifies that each class of a ragged axis can be cut into its shards.

    Raises:
        ValueError: Naming the first boundary that cannot.
    """
    if ragged.axis < 0:  # Which it is shows when a batch comes; `placed` looks then.
        return
    shards = shards_along(sharding, ragged.axis)
    for boundary in ragged.size_classes.boundaries:
        if boundary % shards:
            raise ValueError(
                f"axis {ragged.axis} is ragged and sharded {shards} ways by {sharding.spec}, and its class {boundary} "
                f"does not divide by {shards}: take boundaries that do: SizeClasses.fit(..., multiple_of={shards})"
            )


def size_of(sharding: NamedSharding | None) -> SizeClass:
    """The class of the extent of a ragged leaf: a scalar that each device of the leaf's mesh has."""
    return _SIZE if sharding is None else SizeClass((), INT32, replicated(sharding))


def replicated(sharding: NamedSharding) -> NamedSharding:
    """The sharding of the same mesh that gives each device all of an array."""
    return NamedSharding(sharding.mesh, PartitionSpec())


def global_shape(shape: tuple[int, ...], sharding: NamedSharding | None, name: str) -> tuple[int, ...]:
    """The shape of the global array of which a process has a part of `shape`.

    Raises:
        ValueError: Where the sharding does not suit it.
    """
    if sharding is None:
        return shape
    if len(sharding.spec) > len(shape):
        raise ValueError(
            f"{name} has rank {len(shape)}, and its sharding {sharding.spec} is for at least {len(sharding.spec)} axes"
        )
    found: list[int] = []
    for axis, n in enumerate(shape):
        shards = shards_along(sharding, axis)
        mine = len(_starts(sharding, len(shape), axis))
        if n % mine:
            raise ValueError(
                f"axis {axis} of {name} has size {n} in process {jax.process_index()}, which has {mine} of the "
                f"{shards} shards of {sharding.spec} and so must have a multiple of {mine}"
            )
        found.append(n * shards // mine)
    return tuple(found)


def local_index(index: tuple[slice, ...], sharding: NamedSharding) -> tuple[slice, ...]:
    """Where a part of a global array is in its process's share of it, in which the parts lie in their order."""
    found: list[slice] = []
    for axis, part in enumerate(index):
        extent = part.stop - part.start
        place = _starts(sharding, len(index), axis).index(part.start // extent) if extent else 0
        found.append(slice(place * extent, (place + 1) * extent))
    return tuple(found)


@functools.cache
def _starts(sharding: NamedSharding, rank: int, axis: int) -> list[int]:
    """The numbers of this process's shards along an axis."""
    counts = tuple([shards_along(sharding, i) for i in range(rank)])
    indices = sharding.addressable_devices_indices_map(counts).values()
    return sorted({index[axis].indices(counts[axis])[0] for index in indices if index})

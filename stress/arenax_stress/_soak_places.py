"""Where the pools of a soak lie: on one device, on a sequence of them, or on all of them as a mesh."""

import contextlib
import math
import os
from collections.abc import Iterator
from random import Random
from typing import Any

import attrs
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import arenax

from ._soak_values import BOUNDARIES, RAGGED

Array = np.ndarray[Any, Any]
_FORCED = "xla_force_host_platform_device_count"


@attrs.frozen
class Place:
    """Where the pool of a phase lies.

    Attributes:
        name: What it is called; an empty text for one device.
        placement: As `arenax.BufferPool` takes it.
        devices: Those of a sequence, for each draw to choose from.
        shardings: How the leaves of each group lie on a mesh; None elsewhere.
    """

    name: str = ""
    placement: Any = None
    devices: tuple[Any, ...] = ()
    shardings: dict[str, NamedSharding] | None = None

    def draw(self, rng: Random, group: str | None) -> dict[str, Any]:
        """Where to draw an array of a group, or with None a batch, as arguments of `put` and its like."""
        if self.devices:
            return {"device": rng.choice(self.devices)}
        if self.shardings is not None and group is not None:
            return {"device": self.shardings[group]}
        return {}

    def size_class(self, shape: tuple[int, ...], dtype: np.dtype[Any], group: str) -> arenax.SizeClass:
        """The size class of an array of a group."""
        return arenax.SizeClass(shape, dtype, None if self.shardings is None else self.shardings[group])

    def class_of(self, array: jax.Array) -> arenax.SizeClass:
        """The size class of the slot that an array fills."""
        sharding = array.sharding if self.shardings is not None else None
        assert sharding is None or isinstance(sharding, NamedSharding)
        return arenax.SizeClass(array.shape, array.dtype, sharding)

    def reserve(self, pool: arenax.BufferPool, size_class: arenax.SizeClass, slots: int) -> int:
        """Reserves so many slots on each device of a sequence, or on all of the mesh; returns how many these are."""
        spec = arenax.ArraySpec(size_class.shape, size_class.dtype)
        pool.reserve({**{group: [] for group in RAGGED}, "fixed": [spec]}, slots=slots, device=size_class.sharding)
        return slots * max(len(self.devices), 1)


def make_places(count: int | None) -> list[Place]:
    """Returns the one place of a run on one device, or with `count` those on so many.

    Raises:
        ValueError: Where there are fewer devices.
    """
    if count is None:
        return [Place()]
    if f"--{_FORCED}" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # JAX has looked at its devices before: there are those that there are.
            jax.config.update("jax_num_cpu_devices", count)
    devices = jax.local_devices()
    if len(devices) < count:
        raise ValueError(
            f"{count} devices were asked for, and this process has {len(devices)}: ask for fewer, or on CPU set "
            f"XLA_FLAGS=--{_FORCED}={count}"
        )
    devices = devices[:count]
    # Axes are cut in as many parts as every boundary can be, and there are copies of each part for the other devices.
    cut = math.gcd(count, *BOUNDARIES)
    mesh = jax.sharding.Mesh(np.array(devices).reshape(cut, -1), ("cut", "copies"))
    cut_up, copied = NamedSharding(mesh, PartitionSpec("cut")), NamedSharding(mesh, PartitionSpec())
    shardings = {group: copied if ragged is None else cut_up for group, ragged in RAGGED.items()}
    return [Place("sequence", devices, tuple(devices)), Place("mesh", shardings, (), shardings)]


def address_of(array: Any) -> tuple[int, ...]:
    """The address of a NumPy view, or of each part of a `jax.Array`."""
    if isinstance(array, np.ndarray):
        return (array.ctypes.data,)
    return tuple(shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards)


def parts_of(array: jax.Array) -> Iterator[tuple[tuple[Any, ...], Array]]:
    """Where each part of an array lies in it, and a copy of its values.

    Through other handles: `np.asarray(array)` would leave a view of the memory in the array, and with it every later
    donation would be a copy.
    """
    if len(array.sharding.device_set) == 1:
        yield (...,), np.array(array.addressable_data(0))
        return
    for shard in array.addressable_shards:
        yield (*shard.index, ...), np.array(shard.data)


def values_of(array: jax.Array) -> Array:
    """A copy of the values of an array, as its first copies have them."""
    result = np.empty(array.shape, array.dtype)
    for where, values in reversed([*parts_of(array)]):
        result[where] = values
    return result

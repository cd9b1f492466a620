"""From a pool's `placement` and `landing` arguments to the landings that serve them."""

from collections.abc import Sequence
from typing import Any, cast

import attrs
import jax
import numpy as np

from ._compiles import CompileCounter
from ._donation import DonatedLanding
from ._host_write import HostWrite
from ._landing import Landing
from ._ring import PinnedRing
from ._sharded import ShardedLanding

KINDS: dict[str, type[DonatedLanding]] = {"host": HostWrite, "ring": PinnedRing}
PINNED = "pinned_host"


@attrs.frozen(eq=False)
class Placement:
    """Where a pool lies.

    Attributes:
        landings: One for each arena.
        shardings: A `jax.sharding.NamedSharding` or a pytree prefix of them; None in a pool of single devices.
    """

    landings: tuple[Landing, ...]
    shardings: Any = None


def placement_for(placement: Any, kind: str | None, counter: CompileCounter) -> Placement:
    """Returns the landings for a placement: of the given kind, or of the kind that suits each device.

    Raises:
        TypeError: Where `placement` is not one.
        ValueError: For a device of another process, devices of several platforms, and a kind that there is not or that
            the device cannot have.
    """
    if kind is not None and kind not in KINDS:
        raise ValueError(f"landing must be None or one of {', '.join(KINDS)}, got {kind!r}")
    shardings = jax.tree.leaves(placement) if placement is not None else []
    if shardings and all(isinstance(s, jax.sharding.NamedSharding) for s in shardings):
        return Placement((_sharded(placement, shardings, kind, counter),), placement)
    if isinstance(placement, Sequence) and not isinstance(placement, str):
        places = [*cast(Sequence[Any], placement)]
        if not places:
            raise ValueError("placement must have at least one device, got none")
        landings = [_single(place, kind, counter) for place in places]
        if len({landing.name for landing in landings}) < len(landings):
            raise ValueError(f"placement must have each device once, got {places}")
        _one_platform({getattr(landing.device, "platform", "fake") for landing in landings}, placement)
        return Placement(tuple(landings))
    landing = _single(placement, kind, counter)
    return Placement((landing,), landing.placement if isinstance(landing, ShardedLanding) else None)


def _single(placement: Any, kind: str | None, counter: CompileCounter) -> Landing:
    """The landing of one device."""
    if isinstance(placement, Landing):
        if kind is not None:
            raise ValueError(f"landing must be None with {placement!r}, which is a landing itself, got {kind!r}")
        return placement
    committed, memory_kind = placement is not None, None
    if placement is None:
        # The default device as JAX itself resolves it, also inside `with jax.default_device(...)`.
        (placement,) = jax.device_put(np.int32(0)).devices()
    elif isinstance(placement, jax.sharding.SingleDeviceSharding):
        memory_kind = placement.memory_kind
        (placement,) = placement.device_set
        if memory_kind == placement.default_memory().kind:
            memory_kind = None
    if not isinstance(placement, jax.Device):
        raise TypeError(
            "placement must be None, a jax.Device, a sequence of them, a jax.sharding.NamedSharding or a pytree prefix "
            f"of those, got {placement!r}"
        )
    if placement.process_index != jax.process_index():
        raise ValueError(
            f"placement {placement} belongs to process {placement.process_index}, this is {jax.process_index()}: give "
            "a device of jax.local_devices(), or a NamedSharding over all devices"
        )
    return _make(placement, committed, memory_kind, kind, counter)


def _make(
    device: Any, committed: bool, memory_kind: str | None, kind: str | None, counter: CompileCounter
) -> DonatedLanding:
    if memory_kind not in (None, PINNED):
        raise ValueError(f"the memory of a placement must be the device's own or {PINNED!r}, got {memory_kind!r}")
    # Pinned memory is the host's on every platform.
    is_host = device.platform == "cpu" or memory_kind == PINNED
    if kind == "host" and not is_host:
        raise ValueError(f'landing="host" writes into host memory, which {device} is not: use None or "ring"')
    if memory_kind is not None:
        return HostWrite(device, committed, counter, memory_kind)
    return KINDS[kind or ("host" if is_host else "ring")](device, committed, counter)


def _sharded(placement: Any, shardings: Sequence[Any], kind: str | None, counter: CompileCounter) -> Landing:
    for sharding in shardings:
        if not sharding.addressable_devices:
            raise ValueError(f"placement {sharding} has no device of this process, {jax.process_index()}")
    _one_platform({d.platform for s in shardings for d in s.device_set}, shardings)
    return ShardedLanding(
        placement, lambda device, memory_kind: _make(device, True, memory_kind, kind, counter), counter
    )


def _one_platform(platforms: set[str], placement: Any) -> None:
    if len(platforms) > 1:
        raise ValueError(
            f"placement must be of one platform, got {', '.join(sorted(platforms))}: make a pool for each; {placement}"
        )

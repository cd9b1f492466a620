"""From a pool's `placement` and `landing` arguments to the landing that serves them."""

from typing import Any

import jax
import numpy as np

from ._compiles import CompileCounter
from ._donation import DonatedLanding
from ._host_write import HostWrite
from ._landing import Landing
from ._ring import PinnedRing

KINDS: dict[str, type[DonatedLanding]] = {"host": HostWrite, "ring": PinnedRing}


def landing_for(placement: Any, kind: str | None, counter: CompileCounter) -> Landing:
    """Returns the landing for a placement: of the given kind, or of the kind that suits the device.

    Raises:
        TypeError: Where `placement` is not one.
        ValueError: For a device of another process, and a kind that there is not or that the device cannot have.
    """
    if kind is not None and kind not in KINDS:
        raise ValueError(f"landing must be None or one of {', '.join(KINDS)}, got {kind!r}")
    if isinstance(placement, Landing):
        if kind is not None:
            raise ValueError(f"landing must be None with {placement!r}, which is a landing itself, got {kind!r}")
        return placement
    committed = placement is not None
    if placement is None:
        # The default device as JAX itself resolves it, also inside `with jax.default_device(...)`.
        (placement,) = jax.device_put(np.int32(0)).devices()
    elif isinstance(placement, jax.sharding.SingleDeviceSharding):
        (placement,) = placement.device_set
    if not isinstance(placement, jax.Device):
        raise TypeError(f"placement must be None or one jax.Device, got {placement!r}")
    if placement.process_index != jax.process_index():
        raise ValueError(
            f"placement {placement} belongs to process {placement.process_index}, this is {jax.process_index()}"
        )
    on_cpu = placement.platform == "cpu"
    if kind == "host" and not on_cpu:
        raise ValueError(f'landing="host" writes into host memory, which {placement} is not: use None or "ring"')
    return KINDS[kind or ("host" if on_cpu else "ring")](placement, committed, counter)

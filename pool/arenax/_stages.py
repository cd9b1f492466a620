"""Stages: small pinned host buffers of XLA's own, through which host values reach a device, and rings of them.

A stage is written only behind its fence: the result of the program that read it last has been awaited. What an
exception finds in use is dropped, never given back, and made anew; XLA keeps its memory while a program reads it.
"""

import ctypes
import threading
from collections import OrderedDict, deque
from typing import Any, cast

import attrs
import jax
import numpy as np

from ._programs import undisturbed, within
from ._request import SizeClass


@attrs.frozen(cache_hash=True)
class StageKind:
    """What the programs of one kind read from a stage, and what they carry from one to the next.

    Attributes:
        inputs: The pinned buffers.
        carried: The device buffers that are donated to the program that reads the stage, which returns them: its fence.
    """

    inputs: tuple[SizeClass, ...]
    carried: tuple[SizeClass, ...]


class Stage:
    """Pinned buffers, the host's views of them, and the fence.

    Attributes:
        inputs: The pinned buffers.
        views: Writable NumPy views of their memory.
        carried: What the program that read the stage last returned with its result.
    """

    __slots__ = ("carried", "inputs", "views")

    def __init__(self, inputs: tuple[jax.Array, ...], carried: tuple[Any, ...]) -> None:
        self.inputs = inputs
        self.views = [_view(x) for x in inputs]
        self.carried = carried


class Ring:
    """The stages of one landing, used in turn; one thread's at a time."""

    __slots__ = ("_count", "_depth", "_kind", "_maker", "_stages")

    def __init__(self, kind: StageKind, depth: int, maker: "Stages") -> None:
        self._kind = kind
        self._depth = depth
        self._maker = maker
        self._count = 0
        self._stages: deque[Stage] = deque()

    def next(self) -> Stage:
        """Takes out the stage that was used longest ago, once its fence is passed; makes one rather than wait."""
        stages = self._stages
        busy = not stages or not all(x.is_ready() for x in stages[0].carried)
        if busy and self._count < self._depth:
            self._count += 1
            return self._maker.make(self._kind)
        stage = stages.popleft()
        try:
            for x in stage.carried:
                x.block_until_ready()
        except Exception:  # The last landing failed, which was told then; this one is innocent.
            return self._maker.make(self._kind)
        return stage

    def back(self, stage: Stage) -> None:
        """Takes back a stage that a program reads."""
        self._stages.append(stage)


class Stages:
    """The rings that no landing is using, one device's.

    Each landing takes a ring for itself, so that threads that land at once never wait for each other's device.

    Args:
        device: The device.
        depth: Stages in a ring.

    Raises:
        ValueError: Where the device has no pinned host memory, and for a depth out of range.
    """

    # The kinds used last keep their idle rings, for a caller whose batches come in ever new structures.
    MAX_KINDS = 64

    def __init__(self, device: Any, depth: int) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        kinds = sorted(memory.kind for memory in device.addressable_memories())
        if "pinned_host" not in kinds:
            raise ValueError(
                f'landing="ring" needs memory of the kind "pinned_host", and {device} has {", ".join(kinds)}: '
                "place the pool on another device, or update jaxlib"
            )
        self.pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        self._home = jax.sharding.SingleDeviceSharding(device)
        self._device = device
        self._depth = depth
        self._lock = threading.RLock()  # A signal handler may land too.
        self._idle: OrderedDict[StageKind, list[Ring]] = OrderedDict()

    def take(self, kind: StageKind) -> Ring:
        """Returns an idle ring, or a new one."""
        with self._lock:
            idle = self._idle.get(kind)
            if idle:
                return idle.pop()
        return Ring(kind, self._depth, self)

    def give(self, ring: Ring, kind: StageKind) -> None:
        """Takes back a ring; its stages may still be read by the device, and say so by their fences."""
        with self._lock:
            self._idle.setdefault(kind, []).append(ring)
            self._idle.move_to_end(kind)
            while len(self._idle) > self.MAX_KINDS:
                self._idle.popitem(last=False)

    def make(self, kind: StageKind) -> Stage:
        """Makes a stage.

        Raises:
            MemoryError: Where there is no pinned host memory left.
        """
        try:
            inputs = tuple(self.fresh(c, pinned=True) for c in kind.inputs)
        except Exception as e:
            nbytes = sum(c.nbytes for c in kind.inputs)
            raise MemoryError(
                f"no pinned host memory for a stage of {nbytes} bytes on {self._device}: on CUDA it comes from XLA's "
                "pinned_host pool, whose cap is 64 GB by default. Raise it with the environment variable "
                "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB, or free what else lies in pinned_host memory (offloaded arrays)"
            ) from e
        return Stage(inputs, tuple(self.fresh(c, pinned=False) for c in kind.carried))

    def fresh(self, size_class: SizeClass, pinned: bool) -> jax.Array:
        """Returns zeros that XLA owns, in pinned host memory or on the device, without a program.

        A program for each shape would double the compiles, and replacing a lost stage would be one more. XLA may alias
        the NumPy zeros in the first memory that they are put into, so they go on from there to the other one: between
        two kinds of memory it has to copy.
        """
        hops = (self._home, self.pinned) if pinned else (self.pinned, self._home)

        def travel() -> jax.Array:
            x: Any = np.zeros(size_class.shape, size_class.dtype)
            for hop in hops:
                x = jax.device_put(x, hop)
            return x.block_until_ready()

        # For real, also inside a trace; explicitly, also under a guard; and as wide as it is.
        guards = (jax.ensure_compile_time_eval(), jax.transfer_guard("allow"), jax.enable_x64(True))
        return within((*undisturbed(), *guards), travel)


def _view(array: jax.Array) -> np.ndarray[Any, Any]:
    # A zero-size buffer may have no address.
    if not array.nbytes:
        return np.empty(array.shape, array.dtype)
    raw = (ctypes.c_char * array.nbytes).from_address(array.unsafe_buffer_pointer())
    return np.ndarray(array.shape, array.dtype, buffer=cast(Any, raw))

"""For tests: a fake device, on which the real pool runs without bytes or compiles, and failures on purpose."""

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np

from ._faults import PHASES as PHASES
from ._faults import Fault as Fault
from ._faults import fail as fail
from ._interrupts import Interrupt as Interrupt
from ._interrupts import interrupt as interrupt
from ._landing import Landing, Rag, SlotLost
from ._request import SizeClass
from ._slot import Slot

_addresses = itertools.count(1 << 20, 1 << 12)


@attrs.define(eq=False)
class _Buffer:
    """Memory of the fake device. Zeros and fills are broadcast scalars: only what is landed takes bytes.

    Attributes:
        address: Never used twice.
        nbytes: Its size.
        values: The contents.
        generation: Raised by each donation; an array of an older one is deleted. Negative once the buffer is lost.
        exports: Views that are alive, and keep a donation from being in place.
    """

    address: int
    nbytes: int
    values: np.ndarray[Any, Any]
    generation: int = 0
    exports: "weakref.WeakSet[Export]" = attrs.field(factory=weakref.WeakSet)


class Export:
    """A view of a `FakeArray`, as `numpy.asarray` of a `jax.Array` on CPU is one: while it lives, donation copies."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.values = values


class FakeArray:
    """What a `FakeDevice` lends in place of a `jax.Array`: identity, deletion and donation, but no computation.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
    """

    __slots__ = ("__weakref__", "_buffer", "_generation", "dtype", "shape")

    def __init__(self, buffer: _Buffer, size_class: SizeClass) -> None:
        self._buffer = buffer
        self._generation = buffer.generation
        self.shape = size_class.shape
        self.dtype = size_class.dtype

    def is_deleted(self) -> bool:
        """Whether its buffer was donated since."""
        return self._generation != self._buffer.generation

    def block_until_ready(self) -> "FakeArray":
        """Returns itself; a fake array is always ready."""
        self._alive()
        return self

    def unsafe_buffer_pointer(self) -> int:
        """The fake address."""
        return self._buffer.address

    def another(self) -> "FakeArray":
        """Returns another array object on the same buffer, as `jax.Array.addressable_data` does."""
        self._alive()
        return FakeArray(self._buffer, SizeClass(self.shape, self.dtype))

    def donate(self) -> None:
        """Deletes every handle on the buffer, as passing it to a jitted function with ``donate_argnums`` does."""
        self._alive()
        self._buffer.generation = -1

    def export(self) -> Export:
        """Returns a view; while it is alive, donation of the buffer is a copy."""
        self._alive()
        view = Export(self._buffer.values)
        self._buffer.exports.add(view)
        return view

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        self._alive()
        return np.array(self._buffer.values, dtype)

    def __repr__(self) -> str:
        return f"FakeArray({self.dtype.name}{list(self.shape)}{', deleted' if self.is_deleted() else ''})"

    def _alive(self) -> None:
        if self.is_deleted():
            raise RuntimeError(f"Array has been deleted with shape={self.dtype.name}{list(self.shape)}.")


class FakeDevice(Landing):
    """A device for tests and simulations: give it to `BufferPool(placement=...)`.

    Args:
        name: Its name in statistics and messages.
        bytes_limit: Bytes that all buffers together may take; None for no limit. A fraction as a budget refers to it.

    Attributes:
        create_count: Buffers made.
        land_count: Leaves landed.

    Example:
        >>> import arenax
        >>> from arenax.testing import FakeDevice
        >>> with arenax.BufferPool(FakeDevice(bytes_limit=1 << 40), budget=0.5) as pool:
        ...     pool.reserve(arenax.ArraySpec((1 << 30,), "uint8"), slots=100)
        ...     print(pool)
        <BufferPool 'pool-...' on fake:0: 100 slots in 1 classes, 0 leased, 100.0 GiB of 512.0 GiB reserved>
    """

    def __init__(self, name: str = "fake:0", bytes_limit: int | None = None) -> None:
        self.name = name
        self.kind = "fake"
        self.device = self
        self.bytes_limit = bytes_limit
        self.create_count = 0
        self.land_count = 0
        self._buffers: weakref.WeakSet[_Buffer] = weakref.WeakSet()
        self._lock = threading.RLock()

    @property
    def bytes_in_use(self) -> int:
        """Bytes of the buffers alive."""
        # Summed up each time: an interrupt cannot make it wrong.
        return sum(buffer.nbytes for buffer in list(self._buffers))

    def create(self, slot: Slot) -> None:
        size_class = slot.size_class
        nbytes = size_class.nbytes
        with self._lock:
            if self.bytes_limit is not None and self.bytes_in_use + nbytes > self.bytes_limit:
                raise RuntimeError(
                    f"RESOURCE_EXHAUSTED: out of memory while trying to allocate {nbytes} bytes on {self.name}"
                )
            self.create_count += 1
        buffer = _Buffer(next(_addresses), nbytes, _zeros(size_class))
        self._buffers.add(buffer)
        slot.array, slot.address = FakeArray(buffer, size_class), buffer.address
        slot.handle = _another
        slot.contents = (0, 0, np.zeros((), size_class.dtype).tobytes())

    def retype(self, slot: Slot, donor: Slot) -> None:
        if not self.is_whole(donor):
            raise SlotLost(f"the array of a slot of {donor.size_class} was donated away")
        size_class, old = slot.size_class, donor.array._buffer
        if old.exports:
            self.create(slot)
            return
        old.generation += 1
        flat = old.values.reshape(-1) if old.values.flags.c_contiguous else None  # Else it is a broadcast scalar.
        old.values = _zeros(size_class) if flat is None else flat.view(size_class.dtype).reshape(size_class.shape)
        slot.array, slot.address, slot.handle = FakeArray(old, size_class), old.address, _another
        slot.contents, donor.array = None, None

    def prepare(self, classes: Sequence[SizeClass]) -> Any:
        return tuple(classes)

    def land(self, prepared: Any, slots: Sequence[Slot], values: Sequence[Any], rag: Rag | None) -> None:
        assert prepared == tuple(slot.size_class for slot in slots)
        for slot in slots:
            self._donate(slot)
        for slot, value in zip(slots, values, strict=True):
            values_now = _zeros(slot.size_class).copy() if rag is None else np.full(slot.size_class.shape, rag.pad)
            values_now[tuple(slice(n) for n in np.shape(value))] = value
            self._set(slot, values_now)
            slot.contents = None if rag is None else (rag.axis, rag.size, rag.pad.tobytes())
            self.land_count += 1

    def land_array(self, slot: Slot, value: Any, rag: Rag | None) -> None:
        self.land((slot.size_class,), (slot,), (np.asarray(value),), rag)

    def fill(self, slot: Slot, value: Any) -> None:
        self._donate(slot)
        scalar = np.asarray(value, slot.size_class.dtype)
        self._set(slot, np.broadcast_to(scalar, slot.size_class.shape))
        slot.contents = (0, 0, scalar.tobytes())

    def write(self, slot: Slot, value: Any, at: tuple[int, ...]) -> None:
        self._donate(slot)
        values = slot.array._buffer.values.copy()
        values[tuple(slice(i, i + n) for i, n in zip(at, value.shape, strict=True))] = np.asarray(value)
        self._set(slot, values)
        slot.contents = None

    def update(self, slot: Slot, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        result = np.asarray(function(np.asarray(slot.array), *args))
        if (result.shape, result.dtype) != (slot.size_class.shape, slot.size_class.dtype):
            got = f"{result.dtype}{list(result.shape)}"
            raise TypeError(f"an update must return an array like its slot, {slot.size_class}, got {got}")
        self._donate(slot)
        self._set(slot, result)
        slot.contents = None

    def revoke(self, slots: Sequence[Slot]) -> None:
        errors: list[Exception] = []
        for slot in slots:
            if self.is_whole(slot):
                lent, contents = slot.array, slot.contents
                try:
                    self._donate(slot)
                except Exception as e:
                    errors.append(e)
                slot.contents = contents
                if lent is not slot.array and not lent.is_deleted():  # A view is alive, and keeps its values.
                    lent.donate()
        if errors:
            raise errors[0]

    def is_whole(self, slot: Slot) -> bool:
        return slot.array is not None and not slot.array.is_deleted()

    def _donate(self, slot: Slot) -> None:
        """A new array object on the same buffer, the old ones deleted; on a new buffer where a view is alive."""
        old: FakeArray = slot.array
        if not self.is_whole(slot):
            raise SlotLost(f"the array of a slot of {slot.size_class} was donated away")
        buffer = old._buffer  # pyright: ignore[reportPrivateUsage]
        if buffer.exports:
            values = buffer.values
            self.create(slot)
            self._set(slot, values)
            self.moved(slot, "a view of its last array is alive")
        else:
            buffer.generation += 1
            slot.array = FakeArray(buffer, slot.size_class)

    def _set(self, slot: Slot, values: np.ndarray[Any, Any]) -> None:
        slot.array._buffer.values = values


def _another(arrays: list[FakeArray]) -> FakeArray:
    return arrays[0].another()


def _zeros(size_class: SizeClass) -> np.ndarray[Any, Any]:
    return np.broadcast_to(np.zeros((), size_class.dtype), size_class.shape)

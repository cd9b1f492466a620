"""What the pool needs of a device: the interface of every landing."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ._request import SizeClass
from ._slot import Slot


class SlotLost(RuntimeError):
    """A landing finds, before it does anything, that the last borrower donated the slot away or failed to fill it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device says so: XLA has no class of its own for it, but the word in its message."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


class Landing(ABC):
    """What the pool needs of a device. `arenax.testing.FakeDevice` is one without bytes.

    A slot given to any method is on loan to the caller. A method that raises may have lost the slot's buffer:
    `is_whole` tells, and `Arena.replace` mends it.

    Attributes:
        device: What the arrays say they lie on, or the first of the devices that they lie on.
        name: The device's name, such as ``"cpu:0"``.
        bytes_limit: Bytes that the device reports it has, or None.
        kind: How values land, as the statistics show it.
        moved: Called, with the slot and the cause, when a landing finds its slot elsewhere.
    """

    name: str
    device: Any
    bytes_limit: int | None = None
    kind: str
    moved: Callable[[Slot, str], None]

    @property
    def devices(self) -> tuple[Any, ...]:
        """The devices of this process that slots lie on."""
        return (self.device,)

    @property
    def device_names(self) -> tuple[str, ...]:
        """Their names."""
        return (self.name,)

    @abstractmethod
    def create(self, slot: Slot) -> None:
        """Gives an empty slot a buffer of zeros: sets `array`, `address` and `handle`."""

    @abstractmethod
    def retype(self, slot: Slot, donor: Slot) -> None:
        """Gives an empty slot the buffer of another, of the same `Shelf.form`, where it lies.

        Its contents are undefined. The other slot is used no further, whatever comes of it.
        """

    @abstractmethod
    def prepare(self, classes: Sequence[SizeClass]) -> Any:
        """Returns whatever `land` needs for slots of these classes; compiles it where it is new."""

    @abstractmethod
    def land(self, prepared: Any, slots: Sequence[Slot], values: Sequence[Any], rag: "Rag | None") -> None:
        """Writes host values into slots; with `rag` there is one slot, and its padding is made good."""

    @abstractmethod
    def land_array(self, slot: Slot, value: jax.Array, rag: "Rag | None") -> None:
        """Writes a `jax.Array` into a slot without passing through the host."""

    @abstractmethod
    def fill(self, slot: Slot, value: Any) -> None:
        """Sets every element."""

    @abstractmethod
    def write(self, slot: Slot, value: Any, at: tuple[int, ...]) -> None:
        """Writes a part of the slot; the bounds have been checked."""

    @abstractmethod
    def update(self, slot: Slot, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Replaces the contents by ``function(contents, *args)``."""

    @abstractmethod
    def revoke(self, slots: Sequence[Slot]) -> None:
        """Deletes the arrays that were lent of these slots; the contents stay, in new arrays on the same memory.

        A slot whose array was donated away or failed to be computed is left as it is. All are tried before the first
        error goes on.
        """

    @abstractmethod
    def is_whole(self, slot: Slot) -> bool:
        """Whether the slot's buffer is alive and free of a failed computation."""


class Rag:
    """The ragged axis of one leaf at one length.

    Attributes:
        axis: The axis, from the front.
        size: The valid extent.
        pad: The pad value, as a scalar of the slot's dtype.
    """

    __slots__ = ("axis", "pad", "size")

    def __init__(self, axis: int, size: int, pad: np.generic) -> None:
        self.axis = axis
        self.size = size
        self.pad = pad

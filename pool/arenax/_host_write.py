"""The landing on CPU: host values go straight into the slot's memory, which is the host's own."""

import ctypes
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from ._donation import DonatedLanding, struct, take
from ._landing import Rag
from ._programs import Program, run
from ._request import SizeClass
from ._slot import Slot


class HostWrite(DonatedLanding):
    """Writes host values straight into the slot's memory, which on CPU is the host's own."""

    def prepare(self, classes: Sequence[SizeClass]) -> Program:
        return self._programs.own(("take", *classes), take, [struct(c) for c in classes], range(len(classes)))

    def land(self, prepared: Program, slots: Sequence[Slot], values: Sequence[Any], rag: Rag | None) -> None:
        olds = [slot.array for slot in slots]
        for old in olds:
            if old is None or old.is_deleted():  # XLA would refuse it too, with a line in the log each time.
                raise RuntimeError("a slot's array was donated away")
        self._replace_all(slots, run(prepared, *olds))
        for slot, value in zip(slots, values, strict=True):
            slot.array.block_until_ready()  # Exclusive from here on: every earlier reader has finished.
            self._copy(slot, value, rag)

    def _copy(self, slot: Slot, value: Any, rag: Rag | None) -> None:
        view = slot.view
        if view is None:
            view = slot.view = memory_of(slot)
        contents, slot.contents = slot.contents, None
        if rag is None:
            np.copyto(view, value, casting="same_kind")
            return
        axis, size, pad = rag.axis, rag.size, rag.pad.tobytes()
        before = (slice(None),) * axis
        np.copyto(view[(*before, slice(size))], value, casting="same_kind")
        # Rewrite the padding only where it is dirty.
        known = contents is not None and contents[2] == pad and (contents[0] == axis or contents[1] == 0)
        end = contents[1] if known and contents is not None else slot.size_class.shape[axis]
        if end > size:
            view[(*before, slice(size, end))] = rag.pad
        slot.contents = (axis, size, pad)


def memory_of(slot: Slot) -> np.ndarray[Any, Any]:
    """A writable NumPy view of a slot's memory, where that is the host's. Slots hold dtypes of whole bytes alone."""
    size_class = slot.size_class
    raw = (ctypes.c_char * size_class.nbytes).from_address(slot.address)
    return np.ndarray(size_class.shape, size_class.dtype, buffer=cast(Any, raw))

"""The landing on CPU: host values go straight into the slot's memory, which is the host's own."""

import ctypes
from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np

from ._copying import PARALLEL_BYTES, await_writers, copy
from ._donation import DonatedLanding, is_filled, struct, take, take_one
from ._landing import Rag
from ._programs import Program, run
from ._request import SizeClass
from ._slot import Slot


class HostWrite(DonatedLanding):
    """Writes host values straight into the slot's memory, which on CPU is the host's own."""

    def prepare(self, classes: Sequence[SizeClass]) -> Program:
        function = take_one if len(classes) == 1 else take
        return self._programs.own(("take", *classes), function, [struct(c) for c in classes], range(len(classes)))

    def land(self, prepared: Program, slots: Sequence[Slot], values: Sequence[Any], rag: Rag | None) -> None:
        self._own(prepared, slots)
        for slot, value in zip(slots, values, strict=True):
            if rag is not None:
                self._copy_ragged(slot, value, rag)
                continue
            slot.contents = None
            if slot.shelf.nbytes < PARALLEL_BYTES:
                slot.view[...] = value
            else:
                copy(slot.view, value, slot.array, slot.writers)

    def fill(self, slot: Slot, value: Any) -> None:
        scalar = np.asarray(value, slot.size_class.dtype)
        contents = (0, 0, scalar.tobytes())
        if is_filled(slot, contents):
            return
        self._own(self.prepare((slot.size_class,)), (slot,))
        slot.contents = None
        copy(slot.view, np.broadcast_to(scalar, slot.size_class.shape), slot.array, slot.writers)
        slot.contents = contents

    def write(self, slot: Slot, value: Any, at: tuple[int, ...]) -> None:
        if isinstance(value, jax.Array):
            super().write(slot, value, at)
        elif value.size:
            self._own(self.prepare((slot.size_class,)), (slot,))
            slot.contents = None
            part = [slice(i, i + n) for i, n in zip(at, value.shape, strict=True)]
            copy(slot.view[(*part, ...)], value, slot.array, slot.writers)

    def _own(self, program: Program, slots: Sequence[Slot]) -> None:
        """Donates the slots' arrays to themselves and waits: every earlier reader has finished, and none can come."""
        olds = [slot.array for slot in slots]
        for slot, old in zip(slots, olds, strict=True):
            if old is None or old.is_deleted():  # XLA would refuse it too, with a line in the log each time.
                raise RuntimeError("a slot's array was donated away")
            if slot.writers:
                await_writers(slot.writers)
        results = run(program, *olds)
        self._replace_all(slots, (results,) if len(slots) == 1 else results)
        for slot in slots:
            slot.array.block_until_ready()
            if slot.view is None:
                slot.view = memory_of(slot)

    def _copy_ragged(self, slot: Slot, value: Any, rag: Rag) -> None:
        view = slot.view
        contents, slot.contents = slot.contents, None
        axis, size, pad = rag.axis, rag.size, rag.pad.tobytes()
        before = (slice(None),) * axis
        copy(view[(*before, slice(size))], value, slot.array, slot.writers)
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

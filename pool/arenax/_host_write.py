"""The landing on CPU: host values go straight into the slot's memory, which is the host's own."""

import ctypes
from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np

from ._copying import PARALLEL_BYTES, copy, copy_each
from ._donation import DonatedLanding, is_filled, take, take_one
from ._landing import Rag, SlotLost
from ._programs import Program, run
from ._request import SizeClass
from ._slot import Slot

_LOST = "a slot's array was donated away, or failed to be computed"


class HostWrite(DonatedLanding):
    """Writes host values straight into the slot's memory, which on CPU is the host's own."""

    kind = "host write"

    def prepare(self, classes: Sequence[SizeClass]) -> Program:
        function = take_one if len(classes) == 1 else take
        return self._programs.own(("take", *classes), function, [self._struct(c) for c in classes], range(len(classes)))

    def land(
        self,
        prepared: Program,
        slots: Sequence[Slot],
        values: Sequence[Any],
        rag: Rag | None,
        part: tuple[slice, ...] = (),
    ) -> None:
        # Few calls and flat loops: around a small array each call of a function of Python's shows in the time.
        if len(slots) > 1:
            self._land_all(prepared, slots, values)
            return
        slot, value = slots[0], values[0]
        old = slot.array
        if old is None or old.is_deleted():  # XLA would refuse it too, with a line in the log each time.
            raise SlotLost(_LOST)
        # A failed array is found here, before the donation: its error would become that of all that land with it.
        if (slot.unproven or slot.writers) and not self.is_whole(slot):
            raise SlotLost(_LOST)
        array = slot.array = run(prepared, old)
        if array is old or array.unsafe_buffer_pointer() != slot.address:
            self._find_moved(slots, (old,))
        array.block_until_ready()  # Exclusive from here on: every earlier reader has finished.
        if rag is None and not part and slot.view is not None and slot.shelf.nbytes < PARALLEL_BYTES:
            slot.contents, slot.view[...] = None, value
        else:
            self._copy(slot, value, rag, part)

    @staticmethod
    def land_parts(
        landings: Sequence["HostWrite"], programs: Sequence[Program], slots: Sequence[Slot], values: Sequence[Any]
    ) -> None:
        """As `land` of one value on each of several devices: all are donated before the first is waited for."""
        olds: list[Any] = []
        for landing, slot in zip(landings, slots, strict=True):
            old = slot.array
            if old is None or old.is_deleted() or ((slot.unproven or slot.writers) and not landing.is_whole(slot)):
                raise SlotLost(_LOST)
            olds.append(old)
        for program, slot, old in zip(programs, slots, olds, strict=True):
            slot.array = run(program, old)
        for landing, slot, old in zip(landings, slots, olds, strict=True):
            array = slot.array
            if array is old or array.unsafe_buffer_pointer() != slot.address:
                landing._find_moved((slot,), (old,))
            array.block_until_ready()
        if slots[0].shelf.nbytes >= PARALLEL_BYTES:  # All parts are alike, and these occupy all threads one by one.
            for landing, slot, value in zip(landings, slots, values, strict=True):
                landing._copy(slot, value, None)
            return
        for slot in slots:
            slot.contents = None
            if slot.view is None:
                slot.view = memory_of(slot)
        views, owners = [slot.view for slot in slots], [slot.array for slot in slots]
        copy_each(cast("list[np.ndarray[Any, Any]]", views), values, owners, [slot.writers for slot in slots])

    def _land_all(self, program: Program, slots: Sequence[Slot], values: Sequence[Any]) -> None:
        olds: list[Any] = []
        for slot in slots:
            old = slot.array
            if old is None or old.is_deleted():
                raise SlotLost(_LOST)
            if (slot.unproven or slot.writers) and not self.is_whole(slot):
                raise SlotLost(_LOST)
            olds.append(old)
        results = run(program, *olds)
        for slot, array in zip(slots, results, strict=True):
            slot.array = array
        jax.block_until_ready(results)
        for slot, old, array, value in zip(slots, olds, results, values, strict=True):
            if array is old or array.unsafe_buffer_pointer() != slot.address:
                self._find_moved(slots, olds)
            if slot.view is not None and slot.shelf.nbytes < PARALLEL_BYTES:
                slot.contents, slot.view[...] = None, value
            else:
                self._copy(slot, value, None)

    def _copy(self, slot: Slot, value: Any, rag: Rag | None, part: tuple[slice, ...] = ()) -> None:
        view = slot.view
        if view is None:
            view = slot.view = memory_of(slot)
        contents, slot.contents = slot.contents, None
        if rag is None:
            if part or slot.shelf.nbytes >= PARALLEL_BYTES:
                copy(view[(*part, ...)], value, slot.array, slot.writers)
            else:
                view[...] = value
            return
        axis, size, pad = rag.axis, rag.size, rag.pad.tobytes()
        before = (slice(None),) * axis
        copy(view[(*before, slice(size))], value, slot.array, slot.writers)
        # Rewrite the padding only where it is dirty.
        known = contents is not None and contents[2] == pad and (contents[0] == axis or contents[1] == 0)
        end = contents[1] if known and contents is not None else slot.size_class.shape[axis]
        if end > size:
            view[(*before, slice(size, end))] = rag.pad
        slot.contents = (axis, size, pad)

    def fill(self, slot: Slot, value: Any) -> None:
        size_class = slot.size_class
        scalar = np.asarray(value, size_class.dtype)
        contents = (0, 0, scalar.tobytes())
        if not is_filled(slot, contents):
            self.land(self.prepare((size_class,)), (slot,), (np.broadcast_to(scalar, size_class.shape),), None)
            slot.contents = contents

    def write(self, slot: Slot, value: Any, at: tuple[int, ...]) -> None:
        if isinstance(value, jax.Array):
            super().write(slot, value, at)
        elif value.size:
            part = tuple(slice(i, i + n) for i, n in zip(at, value.shape, strict=True))
            self.land(self.prepare((slot.size_class,)), (slot,), (value,), None, part)


def memory_of(slot: Slot) -> np.ndarray[Any, Any]:
    """A writable NumPy view of a slot's memory, where that is the host's. Slots hold dtypes of whole bytes alone."""
    size_class = slot.size_class
    raw = (ctypes.c_char * size_class.nbytes).from_address(slot.address)
    return np.ndarray(size_class.shape, size_class.dtype, buffer=cast(Any, raw))

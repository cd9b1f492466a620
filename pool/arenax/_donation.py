"""What every landing on a real device shares: slots made, filled, written and lent by donated programs.

A landing donates the slot's array to a program compiled ahead of time, and so gets, in a new array object, exclusive
ownership of the same memory once every earlier reader has finished. Donation can quietly become a copy (a NumPy view
or a DLPack export of the old array is alive), so after each one the address is compared with the recorded one, and the
result with the old object.

jax 0.12 has an undocumented ``Array.unsafe_raw_buffer()`` (jax-ml/jax#40038), PJRT's raw copy into an existing buffer:
the primitive that this module emulates, not to be built on yet.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._compiles import CompileCounter
from ._copying import await_writers
from ._errors import NotSteady
from ._landing import Landing, Rag, SlotLost
from ._private import second_handle
from ._programs import WIDE, Programs, run, run_with_host, undisturbed, within
from ._request import SizeClass, bits_of
from ._slot import Slot


def struct(size_class: SizeClass) -> jax.ShapeDtypeStruct:
    """The abstract value of a slot."""
    return jax.ShapeDtypeStruct(size_class.shape, size_class.dtype)


def take_one(slot: jax.Array) -> jax.Array:
    """`take` of one slot, without the tuple, which costs as much as the rest of the call's result."""
    return slot


def take(*slots: jax.Array) -> tuple[jax.Array, ...]:
    """Donated identity: the same memory in new objects, ready once every earlier reader has finished."""
    return slots


def is_filled(slot: Slot, contents: tuple[int, int, bytes]) -> bool:
    """Whether every element is known to hold the pad of `contents` already."""
    return slot.contents is not None and slot.contents[1:] == contents[1:] and not slot.array.is_deleted()


def _as_bits(x: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


class DonatedLanding(Landing):
    """All but the landing of host values, which depends on the device: by donated programs, the same on every one."""

    def __init__(self, device: Any, committed: bool, counter: CompileCounter, memory_kind: str | None = None) -> None:
        self.device = device
        self.name = f"{device.platform}:{device.id}" + (f" {memory_kind}" if memory_kind else "")
        stats = device.memory_stats() if memory_kind is None else None
        self.bytes_limit = stats.get("bytes_limit") if stats else None
        home = jax.sharding.SingleDeviceSharding(device, memory_kind=memory_kind)
        self._argument = home if memory_kind else None
        self._programs = Programs(device, home if committed else None, counter)

    def _struct(self, size_class: SizeClass) -> jax.ShapeDtypeStruct:
        """The abstract value of a slot."""
        return jax.ShapeDtypeStruct(size_class.shape, size_class.dtype, sharding=self._argument)

    def create(self, slot: Slot) -> None:
        size_class = slot.size_class

        def arenax_create() -> jax.Array:
            return jnp.zeros(size_class.shape, size_class.dtype)

        # By a program, never by device_put of NumPy memory, which XLA would alias and refuse to donate.
        array = run(self._programs.own(("create", size_class), arenax_create, (), (), size_class.dtype.name in WIDE))
        slot.contents = (0, 0, np.zeros((), size_class.dtype).tobytes())
        self._adopt(slot, array)

    def retype(self, slot: Slot, donor: Slot) -> None:
        self._refuse_broken(donor)
        old, new = donor.size_class, slot.size_class
        bits = bits_of(old.dtype)
        flat = SizeClass((math.prod(old.shape),), bits)

        # By way of a flat form that both have in common, so that a class costs two programs and not one for each other.
        def arenax_flatten(slot: jax.Array) -> jax.Array:
            return _as_bits(slot, bits).reshape(flat.shape)

        def arenax_shape(flat: jax.Array) -> jax.Array:
            return _as_bits(flat, new.dtype).reshape(new.shape)

        flatten = self._programs.own(("flatten", old), arenax_flatten, (self._struct(old),), (0,))
        shape = self._programs.own(("shape", new), arenax_shape, (self._struct(flat),), (0,))
        array, donor.array = donor.array, None
        slot.contents = None
        self._adopt(slot, run(shape, run(flatten, array)))

    def is_whole(self, slot: Slot) -> bool:
        if slot.writers:
            await_writers(slot.writers)
        if slot.array is None or slot.array.is_deleted():
            return False
        if slot.unproven:
            try:
                slot.array.block_until_ready()
            except Exception:
                return False
            slot.unproven = False
        return True

    def fill(self, slot: Slot, value: Any) -> None:
        size_class = slot.size_class
        scalar = np.asarray(value, size_class.dtype)
        contents = (0, 0, scalar.tobytes())
        if is_filled(slot, contents):
            return

        def arenax_fill(slot: jax.Array, value: jax.Array) -> jax.Array:
            return jnp.broadcast_to(value, slot.shape)

        args = (self._struct(size_class), jax.ShapeDtypeStruct((), size_class.dtype))
        program = self._programs.own(("fill", size_class), arenax_fill, args, (0,))
        slot.contents = None
        self.take_over(slot, run_with_host(program, slot.array, scalar))
        slot.contents = contents

    def write(self, slot: Slot, value: Any, at: tuple[int, ...]) -> None:
        size_class = slot.size_class
        if not value.size:
            return
        value = self._source(slot, value)

        def arenax_write(slot: jax.Array, value: jax.Array, *start: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice(slot, value.astype(slot.dtype), start)

        start = tuple(np.int32(i) for i in at)
        key = ("write", size_class, value.shape, value.dtype)
        args = (self._struct(size_class), jax.ShapeDtypeStruct(value.shape, value.dtype), *start)
        program = self._programs.callers(key, arenax_write, args)
        slot.contents = None
        self.take_over(slot, run_with_host(program, slot.array, value, *start))
        if isinstance(value, np.ndarray):
            # XLA may read the caller's memory itself: he gets it back when the write that consumed it has finished.
            slot.array.block_until_ready()

    def land_array(self, slot: Slot, value: jax.Array, rag: Rag | None) -> None:
        self._refuse_broken(slot)
        size_class = slot.size_class
        value = self._source(slot, value)
        pad = np.zeros((), size_class.dtype)[()] if rag is None else rag.pad
        whole = value.shape == size_class.shape

        def arenax_land(slot: jax.Array, value: jax.Array, pad: jax.Array) -> jax.Array:
            value = value.astype(slot.dtype)
            if whole:
                return value
            return lax.dynamic_update_slice(jnp.broadcast_to(pad, slot.shape), value, (0,) * slot.ndim)

        key = ("land", size_class, value.shape, value.dtype)
        args = (self._struct(size_class), jax.ShapeDtypeStruct(value.shape, value.dtype), pad)
        program = self._programs.callers(key, arenax_land, args)
        slot.contents = None
        self.take_over(slot, run_with_host(program, slot.array, value, pad))
        slot.contents = None if rag is None else (rag.axis, rag.size, rag.pad.tobytes())

    def update(self, slot: Slot, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        size_class = slot.size_class
        leaves, treedef = jax.tree.flatten(args)
        leaves = [self._source(slot, x) for x in leaves]
        config: Any = jax.config
        kinds = (config.jax_enable_x64, *[jax.typeof(x) for x in leaves])

        def arenax_update(slot: jax.Array, *leaves: jax.Array) -> jax.Array:
            result = function(slot, *jax.tree.unflatten(treedef, leaves))
            if not hasattr(result, "dtype") or (result.shape, result.dtype) != (slot.shape, slot.dtype):
                got = f"{result.dtype}{list(result.shape)}" if hasattr(result, "dtype") else type(result).__name__
                raise TypeError(f"an update must return an array like its slot, {size_class}, got {got}")
            return result

        program = self._programs.callers(
            ("update", size_class, function, treedef, kinds), arenax_update, (self._struct(size_class), *leaves)
        )
        slot.contents = None
        call = run_with_host if size_class.dtype.name in WIDE else run
        self.take_over(slot, call(program, slot.array, *leaves))
        if any(isinstance(x, np.ndarray) for x in leaves):
            slot.array.block_until_ready()

    def revoke(self, slots: Sequence[Slot]) -> None:
        errors: list[Exception] = []
        for slot in slots:
            lent = slot.array
            if lent is None or lent.is_deleted():
                continue
            try:
                # One by one, as one that failed would spoil all that are donated with it; and by the programs that a
                # lone value lands with, so that no more are compiled than there are classes.
                program = self._programs.own(
                    ("take", slot.size_class), take_one, (self._struct(slot.size_class),), (0,)
                )
                self.take_over(slot, run(program, lent))
            except Exception as e:
                errors.append(e)
            if lent is not slot.array and not lent.is_deleted():
                lent.delete()  # Donation became a copy. The view that is the cause keeps its memory.
        if errors:
            raise errors[0]

    def _refuse_broken(self, slot: Slot) -> None:
        """Raises where the last borrower donated the array away or failed to compute it, whose error would spread."""
        if not self.is_whole(slot):
            raise SlotLost(f"the buffer of a slot of {slot.size_class} is lost")

    def _source(self, slot: Slot, value: Any) -> Any:
        """A `jax.Array` brought to the slot's device, apart from the slot's own buffer; anything else as it is."""
        if not isinstance(value, jax.Array):
            return value
        home = slot.array.sharding
        elsewhere = value.devices() != {self.device} or value.sharding.memory_kind != home.memory_kind
        if not elsewhere and value is not slot.array and value.unsafe_buffer_pointer() != slot.address:
            return value
        contexts = (*undisturbed(), jax.ensure_compile_time_eval())  # For real, also inside a trace.
        # Donating a buffer that is also an operand is refused, so a copy of the slot's own.
        bring = (lambda: jax.device_put(value, home)) if elsewhere else lambda: jnp.array(value, copy=True)
        return within(contexts, bring)

    def take_over(self, slot: Slot, result: Any) -> None:
        """Records the result of a program that the slot's array was donated to."""
        slot.unproven = True
        old, slot.array = slot.array, result
        self._find_moved((slot,), (old,))

    def _find_moved(self, slots: Sequence[Slot], olds: Sequence[Any]) -> None:
        """Adopts and reports those slots whose new array is not where the donated one was; all are recorded before."""
        errors: list[Exception] = []
        for slot, old in zip(slots, olds, strict=True):
            if slot.array is old:  # Nothing was donated, and this is the last borrower's own object: not ours to write.
                slot.array = None
                errors.append(RuntimeError("a program returned the very array that was donated to it"))
                continue
            if slot.array.unsafe_buffer_pointer() == slot.address or not slot.shelf.nbytes:
                continue
            self._adopt(slot, slot.array)
            held = not old.is_deleted()
            cause = "a NumPy view or DLPack export of its last array is alive" if held else "donation became a copy"
            try:
                self.moved(slot, cause)
            except NotSteady as e:
                errors.append(e)
        if errors:
            raise errors[0]

    def _adopt(self, slot: Slot, array: Any) -> None:
        # In this order, and with no call between the stores of the end: an interrupt must not leave the address of one
        # buffer with the view of another, into which the next landing would write.
        slot.view, slot.unproven = None, True
        address, handle = array.unsafe_buffer_pointer(), second_handle(array)
        slot.array, slot.address, slot.handle = array, address, handle

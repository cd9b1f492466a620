"""The landing on a mesh: a slot is a global array of which each device of this process holds a part.

Each part is a slot of that device's own landing, which writes, donates and checks it as it does any other; the global
array is put together anew after each landing, on the same buffers. So no shard moves and none is copied, and the
sharding is the same object each time.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Self

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from ._compiles import CompileCounter
from ._donation import DonatedLanding
from ._host_write import HostWrite
from ._landing import Landing, Rag
from ._mesh import local_index
from ._private import assembler
from ._programs import WIDE, Programs, run, run_with_host, undisturbed, within
from ._request import SizeClass
from ._slot import Shelf, Slot

Index = tuple[slice, ...]
MakeLanding = Callable[[Any, str | None], DonatedLanding]


@attrs.frozen(eq=False)
class Part:
    """What one device holds of a class.

    Attributes:
        landing: The device's landing.
        shelf: A shelf of its own shape, which gives the part's slots their class; it keeps none.
        index: Which part of the global array it is.
        local: Which part of what this process has of it.
    """

    landing: DonatedLanding
    shelf: Shelf
    index: Index
    local: Index


@attrs.frozen(eq=False)
class Batch:
    """Leaves of a batch on one device, which land together.

    Attributes:
        landing: The device's landing.
        prepared: What it prepared for them.
        number: The place of the device among the parts of each slot.
        leaves: The place of each leaf in the batch, which part of it the device holds, and where that is in the value.
    """

    landing: DonatedLanding
    prepared: Any
    number: int
    leaves: tuple[tuple[int, Index, Index], ...]


@attrs.frozen(eq=False)
class Prepared:
    """Leaves of a batch on all devices.

    Attributes:
        batches: Those of each device.
        hosts: Where it is one leaf that is written straight into the memory of each device, the landings; else empty.
        programs: Their programs.
        sources: Where each one's part is in the value.
    """

    batches: tuple[Batch, ...]
    hosts: tuple[HostWrite, ...] = ()
    programs: tuple[Any, ...] = ()
    sources: tuple[Index, ...] = ()

    @classmethod
    def of(cls, batches: Sequence[Batch], leaf_count: int) -> Self:
        """Returns the batches, and what is known of them ahead."""
        hosts = [batch.landing for batch in batches if isinstance(batch.landing, HostWrite)]
        if leaf_count != 1 or len(hosts) < len(batches):
            return cls(tuple(batches))
        programs, sources = [b.prepared for b in batches], [b.leaves[0][2] for b in batches]
        return cls(tuple(batches), tuple(hosts), tuple(programs), tuple(sources))


class _Moves(threading.local):
    """What the landings of a thread have found moved, by where the part now is, for the slot whose part it is."""

    def __init__(self) -> None:
        self.causes: list[tuple[int, str]] = []


class ShardedLanding(Landing):
    """Lands global arrays part by part.

    Args:
        placement: The pool's: a sharding or a pytree prefix of them, all of them on devices of one platform.
        make: Makes the landing of a device and a kind of memory.
        counter: Counts the compiles.
    """

    def __init__(self, placement: Any, make: MakeLanding, counter: CompileCounter) -> None:
        self.placement = placement
        shardings: list[jax.sharding.NamedSharding] = jax.tree.leaves(placement)
        devices = sorted({d for s in shardings for d in s.addressable_devices}, key=lambda d: d.id)
        self._devices = tuple(devices)
        self.device = devices[0]
        self.name = f"{devices[0].platform}:{','.join(str(d.id) for d in devices)}"
        self._make = make
        self._counter = counter
        self._landings: dict[tuple[Any, str | None], DonatedLanding] = {}
        self._programs: dict[jax.sharding.NamedSharding, Programs] = {}
        self._layouts: dict[SizeClass, tuple[Part, ...]] = {}
        self._makers: dict[SizeClass, Callable[[Sequence[Any]], jax.Array]] = {}
        self._lock = threading.RLock()
        self._moves = _Moves()
        limits = [self._landing(d, None).bytes_limit for d in devices]
        self.bytes_limit = None if None in limits else sum(n for n in limits if n is not None)

    @property
    def devices(self) -> tuple[Any, ...]:
        """The devices of this process that slots lie on."""
        return self._devices

    @property
    def device_names(self) -> tuple[str, ...]:
        """Their names."""
        return tuple([f"{d.platform}:{d.id}" for d in self._devices])

    @property
    def kind(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """How the parts land."""
        return next(iter(self._landings.values())).kind

    def create(self, slot: Slot) -> None:
        slot.handle = None
        parts: list[Slot] = []
        for part in self._layout(slot.size_class):
            piece = Slot(part.shelf)
            part.landing.create(piece)
            parts.append(piece)
        slot.parts = tuple(parts)
        slot.contents = slot.parts[0].contents
        self._put_together(slot)

    def retype(self, slot: Slot, donor: Slot) -> None:
        parts: list[Slot] = []
        for part, old in zip(self._layout(slot.size_class), _parts(donor), strict=True):
            piece = Slot(part.shelf)
            part.landing.retype(piece, old)
            parts.append(piece)
        slot.parts, slot.contents, slot.handle = tuple(parts), None, None
        donor.drop_buffer()
        self._put_together(slot)

    def prepare(self, classes: Sequence[SizeClass], local: bool = False) -> Prepared:
        """As `Landing.prepare`; with `local` for values that are this process's part of the whole."""
        groups: dict[tuple[DonatedLanding, int], list[tuple[int, Part]]] = {}
        for leaf, size_class in enumerate(classes):
            for number, part in enumerate(self._layout(size_class)):
                groups.setdefault((part.landing, number), []).append((leaf, part))
        batches = [
            Batch(
                landing,
                landing.prepare([part.shelf.size_class for _, part in members]),
                number,
                tuple([(leaf, part.index, part.local if local else part.index) for leaf, part in members]),
            )
            for (landing, number), members in groups.items()
        ]
        return Prepared.of(batches, len(classes))

    def land(self, prepared: Prepared, slots: Sequence[Slot], values: Sequence[Any], rag: Rag | None) -> None:
        if prepared.hosts and rag is None:
            slot, value = slots[0], values[0]
            pieces = [value[index] if index else value for index in prepared.sources]
            HostWrite.land_parts(prepared.hosts, prepared.programs, _parts(slot), pieces)
            slot.contents = None
            self._put_together(slot)
            if self._moves.causes:
                self._tell(slot)
            return
        self._land_each(prepared.batches, slots, values, rag)
        for slot in slots:
            slot.contents = None if rag is None else (rag.axis, rag.size, rag.pad.tobytes())
            self._put_together(slot)
        self._tell(*slots)

    def _land_each(
        self, prepared: Sequence[Batch], slots: Sequence[Slot], values: Sequence[Any], rag: Rag | None
    ) -> None:
        for batch in prepared:
            pieces = [_parts(slots[leaf])[batch.number] for leaf, _, _ in batch.leaves]
            mine = [_piece(values[leaf], source) for leaf, _, source in batch.leaves]
            part_rag = None if rag is None else _rag_of(rag, batch.leaves[0][1])
            batch.landing.land(batch.prepared, pieces, mine, part_rag)

    def land_array(self, slot: Slot, value: jax.Array, rag: Rag | None) -> None:
        sharding = slot.size_class.sharding
        assert sharding is not None
        if not value.is_fully_addressable:
            raise ValueError(f"a source on devices of other processes cannot land: got {value.sharding}")
        pieces: dict[Any, jax.Array] = {}
        host: Any = None
        if value.shape == slot.size_class.shape and value.sharding.is_equivalent_to(sharding, value.ndim):
            pieces = {shard.device: shard.data for shard in value.addressable_shards}
        else:
            host = _on_host(value)
        for part, piece in zip(self._layout(slot.size_class), _parts(slot), strict=True):
            part_rag = None if rag is None else _rag_of(rag, part.index)
            if pieces:
                part.landing.land_array(piece, pieces[part.landing.device], part_rag)
            else:
                prepared = part.landing.prepare((part.shelf.size_class,))
                part.landing.land(prepared, (piece,), (_piece(host, part.index),), part_rag)
        slot.contents = None if rag is None else (rag.axis, rag.size, rag.pad.tobytes())
        self._put_together(slot)
        self._tell(slot)

    def fill(self, slot: Slot, value: Any) -> None:
        for part, piece in zip(self._layout(slot.size_class), _parts(slot), strict=True):
            part.landing.fill(piece, value)
        slot.contents = (0, 0, np.asarray(value, slot.size_class.dtype).tobytes())
        self._put_together(slot)
        self._tell(slot)

    def write(self, slot: Slot, value: Any, at: tuple[int, ...]) -> None:
        if isinstance(value, jax.Array):
            value = _on_host(value)
        slot.contents = None
        for part, piece in zip(self._layout(slot.size_class), _parts(slot), strict=True):
            bounds = [
                (max(start, i.start), min(start + n, i.stop))
                for start, n, i in zip(at, value.shape, part.index, strict=True)
            ]
            if all(low < high for low, high in bounds):
                source = tuple(slice(low - start, high - start) for (low, high), start in zip(bounds, at, strict=True))
                local = tuple(low - i.start for (low, _), i in zip(bounds, part.index, strict=True))
                part.landing.write(piece, value[source], local)
        self._put_together(slot)
        self._tell(slot)

    def update(self, slot: Slot, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        size_class = slot.size_class
        sharding = size_class.sharding
        assert sharding is not None
        leaves, treedef = jax.tree.flatten(args)
        leaves = [_apart(slot, x) for x in leaves]
        config: Any = jax.config
        kinds = (config.jax_enable_x64, *[(jax.typeof(x), getattr(x, "sharding", None)) for x in leaves])

        def arenax_update(slot: jax.Array, *leaves: jax.Array) -> jax.Array:
            result = function(slot, *jax.tree.unflatten(treedef, leaves))
            if not hasattr(result, "dtype") or (result.shape, result.dtype) != (slot.shape, slot.dtype):
                got = f"{result.dtype}{list(result.shape)}" if hasattr(result, "dtype") else type(result).__name__
                raise TypeError(f"an update must return an array like its slot, {size_class}, got {got}")
            return result

        abstract = jax.ShapeDtypeStruct(size_class.shape, size_class.dtype, sharding=sharding)
        program = self._programs_over(sharding).callers(
            ("update", size_class, function, treedef, kinds), arenax_update, (abstract, *leaves)
        )
        slot.contents = None
        for piece in _parts(slot):
            piece.contents, piece.unproven = None, True
        call = run_with_host if size_class.dtype.name in WIDE else run
        result = call(program, slot.array, *leaves)
        shards = {shard.device: shard.data for shard in result.addressable_shards}
        for part, piece in zip(self._layout(size_class), _parts(slot), strict=True):
            part.landing.take_over(piece, shards[part.landing.device])
        self._put_together(slot)
        if any(isinstance(x, np.ndarray) for x in leaves):
            slot.array.block_until_ready()
        self._tell(slot)

    def revoke(self, slots: Sequence[Slot]) -> None:
        errors: list[Exception] = []
        for slot in slots:
            if slot.array is None or slot.parts is None:
                continue
            try:
                for part, piece in zip(self._layout(slot.size_class), slot.parts, strict=True):
                    part.landing.revoke((piece,))
                lent, contents = slot.array, slot.contents
                if self.is_whole(slot):
                    self._put_together(slot)
                    slot.contents = contents
                if not lent.is_deleted():  # Of a view that keeps its memory, say.
                    lent.delete()
                self._tell(slot)
            except Exception as e:
                errors.append(e)
        if errors:
            raise errors[0]

    def is_whole(self, slot: Slot) -> bool:
        if slot.array is None or slot.parts is None:
            return False
        # The global array says that it is deleted only when all its shards are: each is asked.
        for part, piece in zip(self._layout(slot.size_class), slot.parts, strict=True):
            if not part.landing.is_whole(piece):
                return False
        if slot.array.is_deleted():  # An exception has struck between a part's landing and the end of the whole.
            self._put_together(slot)
        return True

    def _landing(self, device: Any, memory_kind: str | None) -> DonatedLanding:
        key = (device, memory_kind)
        found = self._landings.get(key)
        if found is None:
            with self._lock:
                found = self._landings.get(key)
                if found is None:
                    found = self._make(device, memory_kind)
                    found.moved = lambda piece, cause: self._moves.causes.append(
                        (piece.address, f"{cause}, on {device}")
                    )
                    self._landings[key] = found
        return found

    def _layout(self, size_class: SizeClass) -> tuple[Part, ...]:
        """The parts of a class on this process's devices, in the order of their numbers."""
        found = self._layouts.get(size_class)
        if found is None:
            sharding = size_class.sharding
            assert sharding is not None
            shape = size_class.shape
            shelf = Shelf(SizeClass(sharding.shard_shape(shape), size_class.dtype))
            kind = sharding.memory_kind
            indices = sharding.addressable_devices_indices_map(shape)
            parts: list[Part] = []
            for device in sorted(indices, key=lambda d: d.id):
                bounds = tuple([slice(*i.indices(n)[:2]) for i, n in zip(indices[device] or (), shape, strict=True)])
                memory_kind = None if kind in (None, device.default_memory().kind) else kind
                local = local_index(bounds, sharding)
                parts.append(Part(self._landing(device, memory_kind), shelf, bounds, local))
            found = self._layouts[size_class] = tuple(parts)
        return found

    def _put_together(self, slot: Slot) -> None:
        """Makes the global array of the parts; last, so that what strikes before leaves the old, deleted one."""
        if slot.handle is None:
            make, parts = self._maker(slot), _parts(slot)
            slot.handle = lambda _: make([piece.array for piece in parts])
        # Of each part it is known only when it is asked.
        slot.array, slot.unproven = slot.handle(None), True

    def _maker(self, slot: Slot) -> Callable[[Sequence[Any]], jax.Array]:
        size_class = slot.size_class
        make = self._makers.get(size_class)
        if make is None:
            arrays = [piece.array for piece in _parts(slot)]
            contexts = (*undisturbed(), jax.ensure_compile_time_eval())
            join = jax.make_array_from_single_device_arrays
            make = assembler(within(contexts, join, size_class.shape, size_class.sharding, arrays))
            self._makers[size_class] = make
        return make

    def _programs_over(self, sharding: jax.sharding.NamedSharding) -> Programs:
        with self._lock:
            found = self._programs.get(sharding)
            if found is None:
                found = self._programs[sharding] = Programs(self.device, sharding, self._counter)
        return found

    def _tell(self, *slots: Slot) -> None:
        """Has the arena know what the parts' landings have found moved; what an exception left behind is of others."""
        causes, self._moves.causes = self._moves.causes, []
        for address, cause in causes:
            for slot in slots:
                if any(piece.address == address for piece in _parts(slot)):
                    self.moved(slot, cause)


def _parts(slot: Slot) -> tuple[Slot, ...]:
    if slot.parts is None:
        raise RuntimeError(f"a slot of {slot.size_class} has no buffer")
    return slot.parts


def _piece(value: Any, index: Index) -> Any:
    """The part of a host value; what it has not, of a ragged axis, is empty."""
    return value[index] if index else value


def _rag_of(rag: Rag, index: Index) -> Rag:
    """The ragged axis of one part."""
    along = index[rag.axis]
    return Rag(rag.axis, min(max(rag.size - along.start, 0), along.stop - along.start), rag.pad)


def _apart(slot: Slot, value: Any) -> Any:
    """A copy of what shares memory with a slot: to donate what is also an operand crashes on several CPU devices."""
    if not isinstance(value, jax.Array):
        return value
    mine = {piece.address for piece in _parts(slot) if piece.shelf.nbytes}
    if not any(shard.data.unsafe_buffer_pointer() in mine for shard in value.addressable_shards):
        return value
    contexts = (*undisturbed(), jax.ensure_compile_time_eval())
    return within(contexts, lambda: jnp.array(value, copy=True))


def _on_host(value: jax.Array) -> np.ndarray[Any, Any]:
    with jax.transfer_guard("allow"):
        return np.array(value)

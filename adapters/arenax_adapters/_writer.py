"""The worker's end of shared slots: takes a free one, makes a batch's arrays in it and packs them for the parent."""

import contextlib
import dataclasses
import os
import threading
import weakref
from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from ._mapping import PAGE, Mapping, SharedFile
from ._packed import FREE, REGISTERED, SENT, Extent, Packed, Padded, Place
from ._tree import leaves_of, map_tree
from ._worker import prepare_worker

ALIGN = 64  # XLA takes memory as its own without a copy from such addresses on.
STATES = 4096  # Bytes of states a worker: whether it is there, then its slots; those that were outgrown count on.
_REGION = 1 << 40  # Of the file, one a worker; it has memory only where some was reserved.

Empty = Callable[[tuple[int, ...], Any], np.ndarray[Any, Any]]
_here = threading.local()  # .slot: what this thread fills.
_of_process: "Writer | None" = None  # The one that came to this process last: a worker has one.


class Slot:
    """A slot in a worker's hands: arrays are made in it one behind the other. Made by `Writer.take`."""

    __slots__ = ("__weakref__", "_mapping", "address", "extent", "nbytes", "number", "used")

    def __init__(self, mapping: Mapping | None, extent: Extent, number: int) -> None:
        self._mapping, self.extent, self.number = mapping, extent, number
        self.nbytes = extent.slot_bytes
        self.address = mapping.address + number * extent.slot_bytes if mapping is not None else 0
        self.used = 0

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
        """Returns an array of undefined contents in the slot, or an ordinary one where there is no room for it."""
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if self.used + nbytes > self.nbytes or dtype.hasobject:
            return np.empty(shape, dtype)
        start = self.used
        self.used += _aligned(nbytes)
        return np.asarray(self)[start : start + nbytes].view(dtype).reshape(shape)

    def place_of(self, array: np.ndarray[Any, Any]) -> Place | None:
        """Where an array lies in the slot, or None where it lies elsewhere or not in one piece."""
        start = array.__array_interface__["data"][0] - self.address
        if not array.flags.c_contiguous or not 0 <= start <= self.used - array.nbytes or not array.nbytes:
            return None
        return Place(start, array.shape, _dtype_text(array.dtype)) if start % ALIGN == 0 else None


class Writer:
    """A worker's end: takes free slots, and packs what was made in them. Made by `Segment.writer`.

    It pickles, and each process that has a copy fills slots of its own, from the first that it takes on.
    """

    def __init__(self, token: tuple[int, int], file: SharedFile | None, regions: int, slots: int) -> None:
        self._token, self._file, self._regions, self._slots = token, file, regions, slots
        self._lock = threading.Lock()
        self._begin(None)
        self._pid = 0  # No process is in yet.

    def _begin(self, region: int | None) -> None:
        self._pid = os.getpid()
        self._region = region
        self._extent: Extent | None = None
        self._mapping: Mapping | None = None
        self._states: Any = None
        self._taken: list[Any] = []
        self._outgrown: list[tuple[Extent, list[Any]]] = []

    def __getstate__(self) -> tuple[Any, ...]:
        return self._token, self._file, self._regions, self._slots

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        global _of_process
        self.__init__(*state)
        if os.getpid() != self._token[0]:  # A copy that its parent made is no reason to fill slots there.
            _of_process = self

    def take(self) -> Slot:
        """Returns a free slot; one without room, where there is none.

        A slot is free where the parent has released it and nothing in this process refers to its last tenant: a
        `collate_fn` that keeps arrays of an earlier batch keeps their slot.
        """
        with self._lock:
            return self._take()

    def _enter(self) -> None:
        global _of_process
        if self._pid != os.getpid():  # Or its parent's, in a forked worker.
            self._begin(self._join())
            if os.getpid() != self._token[0]:
                _of_process = self

    def _take(self) -> Slot:
        self._enter()
        if self._outgrown:
            self._free_outgrown()
        extent = self._extent
        if extent is not None:
            for number, last in enumerate(self._taken):
                if self._states[extent.first_state + number] == FREE and (last is None or last() is None):
                    slot = Slot(self._mapping, extent, number)
                    self._taken[number] = weakref.ref(slot)
                    return slot
        return Slot(None, Extent(0, 0, 0, 0), 0)

    def pack(self, tree: Any, note: Any = None) -> Packed:
        """Packs a batch: arrays that lie in a slot taken for it are referred to, all others are copied there.

        Args:
            tree: The batch; what is no NumPy array, or has texts or Python objects in it, is pickled.
            note: What else to tell the parent.

        Returns:
            What is to be sent, once; it says nothing to a process other than the segment's own.

        Raises:
            MemoryError: Where the first batch, or a larger one, needs more shared memory than there is.
        """
        arrays = [x.array if isinstance(x, Padded) else x for x in leaves_of(tree)]
        arrays = [x for x in arrays if _is_array(x)]
        total = sum(_aligned(x.nbytes) for x in arrays)
        if not total:
            return Packed(tree, (), note)  # It needs no slot.
        with self._lock:
            self._enter()
            slot = self._slot_of(arrays) or self._take()
            missing = sum(_aligned(x.nbytes) for x in arrays if slot.place_of(x) is None)
            if missing > slot.nbytes - slot.used:
                # It may be full of arrays that were replaced since: another will do, or slots that hold those too.
                need = slot.used + missing
                slot = self._take()
                if total > slot.nbytes:
                    held = self._extent is not None and need <= self._extent.slot_bytes
                    if held or self._file is None or self._region is None:
                        return Packed(map_tree(_own, tree), None, note)  # All of its slots are held.
                    self._grow(need)
                    slot = self._take()
            places: dict[int, Place] = {}
            for x in arrays:
                place = slot.place_of(x)
                if place is None:
                    copy = slot.empty(x.shape, x.dtype)
                    copy[...] = x
                    place = Place(copy.__array_interface__["data"][0] - slot.address, x.shape, _dtype_text(x.dtype))
                places[id(x)] = place
            packed = map_tree(lambda x: _placed(x, places), tree)
            self._states[slot.extent.first_state + slot.number] = SENT
        return Packed(packed, (self._token, self._region, slot.extent, slot.number), note)

    def _slot_of(self, arrays: list[np.ndarray[Any, Any]]) -> Slot | None:
        """The slot, taken and not yet sent, that the largest of the arrays lies in; else the one being filled."""
        extent = self._extent
        if extent is None:
            return None
        largest = max(arrays, key=lambda x: x.nbytes)
        filled: Slot | None = None
        for number, last in enumerate(self._taken):
            slot = None if last is None else last()
            if slot is not None and self._states[extent.first_state + number] == FREE:
                if slot.place_of(largest):
                    return slot
                filled = slot if slot is getattr(_here, "slot", None) else filled
        return filled

    def _join(self) -> int | None:
        """Makes this process a worker: it gets a region of the file that no other has had, None where there is none.

        A region is never given twice, since the parent may still read what a worker that died has sent.
        """
        if self._file is None:
            return None
        import fcntl  # Windows has none, and no memfd.

        fd = self._file.fd()
        if os.getpid() != self._token[0]:
            prepare_worker()
        header = Mapping(fd, 0, header_bytes(self._regions)).bytes()
        fcntl.lockf(fd, fcntl.LOCK_EX, 1)
        try:
            for region in range(self._regions):
                if not header[region * STATES]:
                    header[region * STATES] = 1
                    return region
            return None
        finally:
            fcntl.lockf(fd, fcntl.LOCK_UN, 1)

    def _grow(self, nbytes: int) -> None:
        """Reserves slots that hold a batch of `nbytes`, in place of those that do not; these go once they are free."""
        file, old, region = self._file, self._extent, self._region
        assert file is not None
        assert region is not None
        if old is None:
            size, state, offset = nbytes, 1, (region + 1) * _REGION
            header = Mapping(file.fd(), 0, header_bytes(self._regions))
            self._states = header.bytes()[region * STATES :][:STATES]
        else:  # By half at least, so that a slow rise costs few copies.
            size, state = max(nbytes, old.slot_bytes * 3 // 2), old.first_state + old.count
            offset = old.offset + old.nbytes
            if state + self._slots > STATES:
                raise MemoryError("the batches of a worker grew too often for its shared slots")
        extent = Extent(offset, -(-size // PAGE) * PAGE, state, self._slots)
        file.reserve(offset, extent.nbytes, f"{self._slots} shared slots of a worker for batches of {nbytes} bytes")
        mapping = Mapping(file.fd(), offset, extent.nbytes)
        if old is not None:
            self._outgrown.append((old, self._taken))
        self._mapping, self._extent, self._taken = mapping, extent, [None] * self._slots
        self._free_outgrown()

    def _free_outgrown(self) -> None:
        assert self._file is not None
        kept: list[tuple[Extent, list[Any]]] = []
        for extent, taken in self._outgrown:
            states = self._states[extent.first_state :][: extent.count]
            if states.any() or any(last is not None and last() is not None for last in taken):
                kept.append((extent, taken))
            else:
                self._file.free(extent.offset, extent.nbytes)
        self._outgrown = kept


def header_bytes(regions: int) -> int:
    """Bytes of the states of all regions' slots, with which the file begins."""
    return -(-regions * STATES // PAGE) * PAGE


@contextlib.contextmanager
def filling(writer: Writer | None = None) -> Generator[Empty]:
    """A scope in which one batch is made, in a shared slot where there is one.

    For a `collate_fn` or a `batch_fn` of your own: what is made in the slot need not be copied there.

    Args:
        writer: Whose slot; by default the one that is being filled, or else the one of this worker.

    Returns:
        A function ``empty(shape, dtype)`` that gives arrays of undefined contents: ordinary ones where this process is
        no worker, or the slot has no room.

    Example:
        >>> import numpy as np
        >>> from arenax_adapters.shared import filling
        >>> def batch_rows(rows):
        ...     with filling() as empty:
        ...         out = empty((len(rows), 4), np.int32)
        ...         for i, row in enumerate(rows):
        ...             out[i, : len(row)], out[i, len(row) :] = row, 0
        ...         return out
        >>> print(batch_rows([[1, 2], [3, 4, 5]]))
        [[1 2 0 0]
         [3 4 5 0]]
    """
    outer: Slot | None = getattr(_here, "slot", None)
    if outer is not None and writer is None:
        yield outer.empty
        return
    writer = writer or _of_process
    if writer is None:
        yield np.empty
        return
    _here.slot = slot = writer.take()
    try:
        yield slot.empty
    finally:
        _here.slot = outer


def _placed(leaf: Any, places: dict[int, Place]) -> Any:
    if isinstance(leaf, Padded):
        return dataclasses.replace(leaf, array=places.get(id(leaf.array), leaf.array))
    return places.get(id(leaf), leaf)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def _is_array(leaf: Any) -> bool:
    # A masked one is more than its bytes.
    if not isinstance(leaf, np.ndarray) or isinstance(leaf, np.ma.MaskedArray):
        return False
    dtype: np.dtype[Any] = leaf.dtype
    return not dtype.hasobject and dtype.kind not in "SU" and not issubclass(dtype.type, np.void)


def _dtype_text(dtype: np.dtype[Any]) -> str:
    return dtype.name if dtype.isbuiltin == REGISTERED else dtype.str


def _own(leaf: Any) -> Any:
    """An array that owes nothing to a slot."""
    if isinstance(leaf, Padded):
        return dataclasses.replace(leaf, array=_own(leaf.array))
    return np.array(leaf) if _is_array(leaf) else leaf

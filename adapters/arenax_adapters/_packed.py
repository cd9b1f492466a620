"""What crosses from a worker to its parent in place of a batch, and what keeps its slot until it is released."""

import dataclasses
import os
import weakref
from typing import Any, Protocol, Self

import numpy as np

from ._mapping import Mapping
from ._tree import map_tree

FREE, SENT = 0, 1  # What the byte of a slot says: a worker writes 1 there, its parent 0.
REGISTERED = 2  # `isbuiltin` of a dtype that NumPy knows by its name alone, such as those of ml_dtypes.


@dataclasses.dataclass(frozen=True, slots=True)
class Padded:
    """A leaf with more to it than its array says.

    Attributes:
        array: The bytes, padding and all.
        dtype: The name of a dtype that they are to be taken for, such as ``"bfloat16"``; None for the array's own.
        axis: The axis that is padded, or None.
        extent: How far along it the array is valid.
    """

    array: Any
    dtype: str | None = None
    axis: int | None = None
    extent: int = 0

    def valid(self) -> Any:
        """The array without its padding."""
        array = self.array if self.dtype is None else self.array.view(np.dtype(self.dtype))
        return array if self.axis is None else array[(slice(None),) * self.axis + (slice(self.extent),)]


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where an array lies in its slot: what stands for it in a tree that is sent."""

    offset: int
    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True, slots=True)
class Extent:
    """The slots of one worker that were reserved together: equal in size, one behind the other."""

    offset: int
    slot_bytes: int
    first_state: int
    count: int

    @property
    def nbytes(self) -> int:
        return self.slot_bytes * self.count


class Receiver(Protocol):
    """The segment in the parent, which what is received asks for its slot."""

    def claim(self, region: int, extent: Extent, number: int) -> "Claim":
        """Takes a sent slot in charge."""
        ...


# By token, in the process that made them: what is received finds its segment here.
segments: "weakref.WeakValueDictionary[Any, Receiver]" = weakref.WeakValueDictionary()


class Claim:
    """A slot that was sent and not yet released; its arrays keep it.

    Args:
        header: The states of all slots.
        state: Where in it this one's is.
        mapping: The extent.
        base: Where in it the slot begins.
    """

    __slots__ = ("__weakref__", "_base", "_header", "_mapping", "_pid", "_state")

    def __init__(self, header: Mapping, state: int, mapping: Mapping, base: int) -> None:
        self._state = state
        self._mapping, self._base = mapping, base
        self._pid = os.getpid()
        self._header: Mapping | None = header  # Last: what is interrupted before has nothing to release with.

    def array(self, place: Place) -> np.ndarray[Any, Any]:
        dtype = np.dtype(place.dtype)
        typestr = f"|V{dtype.itemsize}" if dtype.isbuiltin == REGISTERED else dtype.str
        array = np.asarray(_View(self, place, typestr))
        return array if array.dtype == dtype else array.view(dtype)

    @property
    def address(self) -> int:
        return self._mapping.address + self._base

    def release(self) -> None:
        # Once: what refers to the claim still may die when the slot has been sent again.
        header, self._header = self._header, None
        # Between the last read and this write is the interpreter's lock at least, whose release orders them also where
        # the processor would not. A forked child must not free what its parent reads.
        if header is not None and os.getpid() == self._pid:
            header.bytes()[self._state] = FREE

    def __del__(self) -> None:
        if hasattr(self, "_header"):
            self.release()


class _View:
    """What NumPy makes an array of whose base is a claim."""

    __slots__ = ("__array_interface__", "_claim")

    def __init__(self, claim: Claim, place: Place, typestr: str) -> None:
        self._claim = claim
        self.__array_interface__ = {
            "shape": place.shape,
            "typestr": typestr,
            "data": (claim.address + place.offset, False),
            "version": 3,
        }


class Packed:
    """A batch under way: sent by a worker, and received by the parent.

    Attributes:
        tree: The batch: its arrays lie in the slot (or are ordinary ones, where it overflowed), its other leaves are
            what they were.
        note: What the worker said beside it.
        overflowed: Whether it came as ordinary arrays, for want of a slot.
    """

    __slots__ = ("_claim", "_route", "note", "overflowed", "tree")

    def __init__(self, tree: Any, route: tuple[Any, ...] | None, note: Any) -> None:
        self.tree: Any = tree
        self.note = note
        self.overflowed = route is None
        self._route = route
        self._claim: Claim | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (self.tree, self._route, self.note)

    def release(self) -> None:
        """Frees the slot: its worker may write there from now on. Idempotent."""
        self.tree = None
        claim, self._claim = self._claim, None
        if claim is not None:
            claim.release()

    def received(self, claim: Claim) -> Self:
        self._claim = claim
        self.tree = map_tree(lambda x: _restored(x, claim), self.tree)
        return self


def _restored(leaf: Any, claim: Claim | None) -> Any:
    """What a leaf of a tree was before it was sent; a `Padded` one with its dtype."""
    if isinstance(leaf, Padded):
        array = _restored(leaf.array, claim)
        array = array if leaf.dtype is None else array.view(np.dtype(leaf.dtype))
        return array if leaf.axis is None else Padded(array, None, leaf.axis, leaf.extent)
    return claim.array(leaf) if isinstance(leaf, Place) and claim is not None else leaf


def _receive(tree: Any, route: tuple[Any, ...] | None, note: Any) -> Packed:
    packed = Packed(tree, route, note)
    if not route:
        packed.tree = map_tree(lambda x: _restored(x, None), tree)
        return packed
    token, region, extent, number = route
    segment = segments.get(token)
    # Its iterator may be closed, and nobody will look.
    return packed if segment is None else packed.received(segment.claim(region, extent, number))

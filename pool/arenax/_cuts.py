"""How a size class is cut into blocks that fit a stage, and how a block is filled on the host. No arrays of JAX's."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np

from ._landing import Rag
from ._request import SizeClass
from ._slot import Slot

Start = tuple[int, ...]


@attrs.frozen
class Cut:
    """A size class and the shape of its blocks, in which each axis before `axis` is 1 and each one behind it whole.

    A block keeps the rank of the class. A flat view would be simpler, but XLA puts a copy between a reshaped donated
    operand and the update-slice, which only some backends find to be a copy onto itself.

    Attributes:
        size_class: The class.
        axis: The axis that is cut; None where one block holds the whole class.
        block: The shape and dtype of a block.
    """

    size_class: SizeClass
    axis: int | None
    block: SizeClass

    @classmethod
    def of(cls, size_class: SizeClass, chunk_bytes: int) -> "Cut":
        """Cuts a class into blocks of at most `chunk_bytes`, which must hold one element, and of about equal size."""
        if size_class.nbytes <= chunk_bytes:
            return cls(size_class, None, size_class)
        shape, inner = size_class.shape, size_class.nbytes
        for axis, count in enumerate(shape):
            inner //= count
            if inner <= chunk_bytes:
                blocks = math.ceil(count / (chunk_bytes // inner))
                # The last block is shifted back to end where the axis ends: equal ones overlap least.
                block = (*(1,) * axis, math.ceil(count / blocks), *shape[axis + 1 :])
                return cls(size_class, axis, SizeClass(block, size_class.dtype))
        raise ValueError(f"chunk_bytes must be at least one element of {size_class}, got {chunk_bytes}")

    def starts(self, rag: Rag | None, end: int) -> Iterator[Start]:
        """Yields where the blocks begin; with `rag` those that reach below `end` along its axis, but at least one."""
        shape = self.size_class.shape
        if self.axis is None:
            yield (0,) * len(shape)
            return
        counts = list(shape)
        if rag is not None:
            counts[rag.axis] = max(end, 1)
        count = self.block.shape[self.axis]
        last = shape[self.axis] - count
        behind = (0,) * (len(shape) - self.axis - 1)
        for before in itertools.product(*map(range, counts[: self.axis])):
            for i in range(0, counts[self.axis], count):
                yield (*before, min(i, last), *behind)  # XLA would clamp it too, silently.

    def fill(self, view: np.ndarray[Any, Any], value: Any, start: Start, rag: Rag | None) -> None:
        """Writes into a block's memory what belongs there: of any layout and dtype that may be cast, in one pass."""
        if rag is None:
            part = value if self.axis is None else np.asarray(value)[tuple(self._slices(start))]
            np.copyto(view, part, casting="same_kind")
            return
        axis = rag.axis
        valid = min(max(rag.size - start[axis], 0), self.block.shape[axis])
        slices = self._slices(start)
        slices[axis] = slice(start[axis], start[axis] + valid)
        before = (slice(None),) * axis
        np.copyto(view[(*before, slice(valid))], np.asarray(value)[tuple(slices)], casting="same_kind")
        if valid < self.block.shape[axis]:
            view[(*before, slice(valid, None))] = rag.pad

    def _slices(self, start: Start) -> list[slice]:
        return [slice(i, i + n) for i, n in zip(start, self.block.shape, strict=True)]


def dirty_end(slot: Slot, rag: Rag) -> int:
    """How far along the ragged axis a slot must be written: over the new values, and over what is not the pad yet."""
    contents = slot.contents
    if contents is None or contents[2] != rag.pad.tobytes() or (contents[0] != rag.axis and contents[1]):
        return slot.size_class.shape[rag.axis]
    return max(rag.size, contents[1])

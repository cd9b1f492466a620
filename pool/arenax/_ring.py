"""The landing through pinned host memory: a host value passes block by block through a small ring of pinned stages.

The host fills a stage, and a program moves it to the device and places it in the donated slot, while helpers fill the
next ones. So a landing needs no device memory of its own, whatever the size of the value, and compiles by class alone.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np

from ._compiles import CompileCounter
from ._copying import THREADS, in_advance
from ._cuts import Cut, Start, dirty_end
from ._donation import DonatedLanding, struct, take, take_one
from ._landing import Rag
from ._placing import Mover, Placer
from ._programs import Program, run
from ._request import SizeClass
from ._slot import Slot
from ._stages import Stage, Stages

# Of 256 KiB to 4 MiB. A block has to repay its call: 64 MiB in blocks of 1 MiB took 5 to 20% longer than in ones of 2.
# Little more is gained with 4, and every size class of that size or more would pin twice the memory.
CHUNK_BYTES = 2 << 20
# One that the device reads, and one for each thread that fills; with one helper 64 MiB took a quarter less.
DEPTH = 1 + THREADS


@attrs.frozen(eq=False)
class Job:
    """Leaves that land together: any number that pass in one block each, or one that passes block by block.

    Attributes:
        indices: Their places among the leaves that were prepared together.
        cuts: The cut of each.
        mover: Moves a stage into their slots.
        last: The program that has the last word, or None.
    """

    indices: tuple[int, ...]
    cuts: tuple[Cut, ...]
    mover: Mover
    last: Program | None


class PinnedRing(DonatedLanding):
    """Moves host values through stages in pinned host memory.

    Args:
        device: The device.
        committed: Whether the arrays are committed to it.
        counter: Counts the compiles.
        chunk_bytes: Bytes of a stage, at least 16, so that an element of any dtype fits.
        depth: Stages in a ring, at least 1; from 3 on helpers fill all but two of them in advance.
        form: How a block is placed, ``"fused"`` or ``"split"``, see `Placer`; None finds out what the device can do,
            when the first leaf comes that is larger than a stage.

    Raises:
        ValueError: Where the device has no pinned host memory, and for arguments out of range.
    """

    def __init__(
        self,
        device: Any,
        committed: bool,
        counter: CompileCounter,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        depth: int = DEPTH,
        form: str | None = None,
    ) -> None:
        if chunk_bytes < 16:
            raise ValueError(f"chunk_bytes must be at least 16, got {chunk_bytes}")
        super().__init__(device, committed, counter)
        self._committed = committed
        self._chunk_bytes = chunk_bytes
        self._ahead = max(min(THREADS - 1, depth - 2), 0)
        self._stages = Stages(device, depth)
        self._placer = Placer(self._programs, self._stages, form)
        # To place a block of 8-bit floats XLA's CPU compiler rewrites the whole buffer by way of float32, and up to
        # jax 0.10 to place one of bfloat16: there such a class passes in one block, which needs no placing.
        self._widens = device.platform == "cpu"

    @property
    def form(self) -> str | None:
        """How blocks are placed, ``"fused"`` or ``"split"``; None until the first leaf larger than a stage has come."""
        return self._placer.form

    @property
    def kind(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """``"pinned ring"``, and the form once it is known."""
        return "pinned ring" if self.form is None else f"pinned ring, {self.form}"

    def create(self, slot: Slot) -> None:
        size_class = slot.size_class
        if self._committed or size_class.nbytes > self._chunk_bytes:
            super().create(slot)
            return
        # By the program that a landing ends with, so that a class costs two compiles, as a committed one does.
        array = run(self._last([size_class]), self._stages.fresh(size_class, pinned=False))
        slot.contents = (0, 0, np.zeros((), size_class.dtype).tobytes())
        self._adopt(slot, array)

    def prepare(self, classes: Sequence[SizeClass]) -> list[Job]:
        return [self._job(indices, [classes[i] for i in indices]) for indices in self._together(classes)]

    def land(self, prepared: list[Job], slots: Sequence[Slot], values: Sequence[Any], rag: Rag | None) -> None:
        for slot in slots:
            self._refuse_broken(slot)
        for job in prepared:
            picked = [slots[i] for i in job.indices]
            end = 0 if rag is None else dirty_end(picked[0], rag)
            for slot in picked:
                slot.contents = None
                slot.unproven = True
            self._move(job, picked, [values[i] for i in job.indices], rag, end)
            if job.last is not None:
                results = run(job.last, *[slot.array for slot in picked])
                self._record(picked, (results,) if len(picked) == 1 else results)
            if rag is not None:
                picked[0].contents = (rag.axis, rag.size, rag.pad.tobytes())

    def _move(self, job: Job, slots: Sequence[Slot], values: Sequence[Any], rag: Rag | None, end: int) -> None:
        # A ring of its own for every landing: threads that land at once need not wait for each other. Whatever strikes
        # before the ring is given back drops it, with stages that may be half written.
        ring = self._stages.take(job.mover.kind)
        starts = [*job.cuts[0].starts(rag, end)]

        def fill(block: tuple[Stage, Start]) -> None:
            stage, start = block
            for cut, view, value in zip(job.cuts, stage.views, values, strict=False):
                cut.fill(view, value, start, rag)

        blocks = ((ring.next(), start) for start in starts)
        for stage, start in in_advance(fill, blocks, min(self._ahead, len(starts) - 1)):
            # At once, so that an exception between two blocks leaves the slots whole.
            self._record(slots, job.mover(stage, start, [slot.array for slot in slots]))
            ring.back(stage)
        self._stages.give(ring, job.mover.kind)

    def _record(self, slots: Sequence[Slot], results: Sequence[Any]) -> None:
        olds = [slot.array for slot in slots]
        for slot, result in zip(slots, results, strict=True):
            slot.array = result
        self._find_moved(slots, olds)

    def _job(self, indices: tuple[int, ...], classes: list[SizeClass]) -> Job:
        cuts = tuple([self._cut(c) for c in classes])
        mover = self._placer.whole(classes) if cuts[0].axis is None else self._placer.block(cuts[0])
        # A program that moves between kinds of memory commits its result to the device, whatever it was given.
        return Job(indices, cuts, mover, self._last(classes) if mover.commits and not self._committed else None)

    def _cut(self, size_class: SizeClass) -> Cut:
        in_one = self._widens and not issubclass(size_class.dtype.type, np.number | np.bool_)
        return Cut.of(size_class, size_class.nbytes if in_one else self._chunk_bytes)

    def _last(self, classes: Sequence[SizeClass]) -> Program:
        function = take_one if len(classes) == 1 else take
        return self._programs.own(("take", *classes), function, [struct(c) for c in classes], range(len(classes)))

    def _together(self, classes: Sequence[SizeClass]) -> Iterator[tuple[int, ...]]:
        """Yields which of the classes land together: one larger than a stage alone, the others by the stage."""
        group: list[int] = []
        nbytes = 0
        for i, size_class in enumerate(classes):
            if size_class.nbytes > self._chunk_bytes:
                yield (i,)
                continue
            nbytes += size_class.nbytes
            if nbytes > self._chunk_bytes:
                yield tuple(group)
                group, nbytes = [], size_class.nbytes
            group.append(i)
        if group:
            yield tuple(group)

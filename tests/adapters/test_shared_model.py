"""The model-based test of shared slots: a worker and its parent in one process, in any order that there may be."""
# pyright: reportPrivateUsage=false

import pickle
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from arenax_adapters.shared import Packed, Segment, Slot, filling
from tests.adapters.test_shared_slots import memory

SIZES = st.sampled_from([1, 63, 64, 4096, 5000, 20_000, 60_000])


class Slots(RuleBasedStateMachine):
    """Knows what each batch must hold, and who may still refer to which slot."""

    batches = Bundle("batches")  # Made by the worker, not yet packed.
    under_way = Bundle("under_way")  # Pickled, not yet received.
    received = Bundle("received")
    stale = Bundle("stale")  # Arrays of released batches, which nobody reads.

    def __init__(self) -> None:
        super().__init__()
        self.value = 0
        self.expected: dict[int, tuple[Any, Any]] = {}  # Arrays of either side that must not change, and their copies.
        self.alive = 0  # Batches in any of the bundles, or arrays of them.

    @initialize(slots=st.integers(1, 4))
    def begin(self, slots: int) -> None:
        self.segment = Segment(1, slots)
        self.slots = slots
        self.writer = self.segment.writer()

    def data(self, nbytes: int) -> np.ndarray:
        self.value = (self.value + 1) % 251
        return (np.arange(nbytes) * 7 + self.value).astype(np.uint8)

    def watch(self, arrays: list[Any], data: list[Any]) -> int:
        self.value += 1
        key = max(self.expected, default=0) + 1
        self.expected[key] = (arrays, [d.copy() for d in data])
        return key

    @rule(target=batches, sizes=st.lists(SIZES, min_size=1, max_size=3), inside=st.lists(st.booleans(), min_size=3))
    def make(self, sizes: list[int], inside: list[bool]) -> Any:
        """Makes each array in a slot, or elsewhere."""
        data = [self.data(n) for n in sizes]
        arrays: list[Any] = []
        with filling(self.writer) as empty:
            for array, there in zip(data, inside, strict=False):
                arrays.append(empty(array.shape, array.dtype) if there else np.empty_like(array))
                arrays[-1][:] = array
        self.alive += 1
        return self.watch(arrays, data)

    @rule(target=under_way, key=consumes(batches), reverse=st.booleans())
    def pack(self, key: int, reverse: bool) -> Any:
        """Sends a batch, and drops the worker's own arrays."""
        arrays, data = self.expected.pop(key)
        others = self.alive - 1
        order = slice(None, None, -1 if reverse else 1)
        packed = self.writer.pack({"x": arrays[order]}, data[order])
        if packed.overflowed:
            assert others + 1 >= self.slots
        return pickle.dumps(packed)

    @rule(target=under_way, key=batches)
    def pack_and_keep(self, key: int) -> Any:
        """Sends a batch that the worker keeps, and may send again."""
        arrays, data = self.expected[key]
        self.alive += 1
        return pickle.dumps(self.writer.pack({"x": arrays}, data))

    @rule(key=consumes(batches))
    def abandon(self, key: int) -> None:
        del self.expected[key]
        self.alive -= 1

    @rule(target=received, sent=consumes(under_way))
    def receive(self, sent: bytes) -> Any:
        packed = pickle.loads(sent)
        return packed, self.watch(packed.tree["x"], packed.note)

    @rule(item=consumes(received))
    def release(self, item: tuple[Packed, int]) -> None:
        packed, key = item
        del self.expected[key]
        packed.release()
        self.alive -= 1

    @rule(target=stale, item=consumes(received))
    def release_too_early(self, item: tuple[Packed, int]) -> Any:
        """Keeps the arrays, whose later drop must free nothing."""
        packed, key = item
        arrays, _ = self.expected.pop(key)
        packed.release()
        self.alive -= 1
        return arrays

    @rule(arrays=consumes(stale))
    def drop_late(self, arrays: list[Any]) -> None:
        arrays.clear()

    @rule(target=received, item=consumes(received), at=st.integers(0, 2))
    def drop_all_but_a_view(self, item: tuple[Packed, int], at: int) -> Any:
        """One array goes on, or a part of one; the batch, and the others, are dropped."""
        packed, key = item
        arrays, data = self.expected.pop(key)
        if packed.tree is None or at >= len(arrays):
            at = 0
        view, copy = [arrays[at][::2]], [data[at][::2]]
        return Packed(None, (), None), self.watch(view, copy)

    @rule()
    def nothing_refers_to_anything(self) -> None:
        """With no batch anywhere, every slot is free and one extent's memory is all that there is."""
        if self.alive:
            return
        taken = [self.writer.take() for _ in range(self.slots)]
        extent = self.writer._extent
        if extent is not None:
            assert all(isinstance(s, Slot) and s.nbytes for s in taken)
            assert memory(self.segment) <= extent.nbytes + self.writer._regions * 4096

    @invariant()
    def no_byte_has_changed(self) -> None:
        for arrays, data in self.expected.values():
            assert all(np.array_equal(a, d) for a, d in zip(arrays, data, strict=True))

    def teardown(self) -> None:
        self.segment.close()
        self.no_byte_has_changed()


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=40)

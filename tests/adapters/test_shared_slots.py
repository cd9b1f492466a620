"""`Segment`, `Writer` and `Packed` in one process: what is sent arrives, slots are taken, kept, released and reused."""
# pyright: reportPrivateUsage=false

import gc
import os
import pickle
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from arenax_adapters import _mapping
from arenax_adapters.shared import Packed, Segment, Writer, filling

MakeSegment = Callable[..., tuple[Segment, Writer]]
BIG = 1 << 16


@pytest.fixture
def make() -> Iterator[MakeSegment]:
    """Makes segments of one worker. The collector is off, so that what only a collection would free counts as held."""
    segments: list[Segment] = []

    def segment(slots: int = 3, workers: int = 1) -> tuple[Segment, Writer]:
        segments.append(Segment(workers, slots))
        return segments[-1], segments[-1].writer()

    gc.collect()
    gc.disable()
    try:
        yield segment
    finally:
        gc.enable()
    for s in segments:
        s.close()


def sent(packed: Packed) -> Packed:
    return pickle.loads(pickle.dumps(packed))


def array_of(value: int, nbytes: int = BIG) -> np.ndarray:
    return np.full(nbytes, value, np.uint8)


def memory(segment: Segment) -> int:
    """Bytes of the segment's file that have memory."""
    assert segment._file is not None
    return os.fstat(segment._file.fd()).st_blocks * 512


def descriptors() -> list[str]:
    names = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")]
    return [n for n in names if os.path.islink(n) and "memfd:arenax" in os.readlink(n)]


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("arguments", [(0, 1), (1, 0), (1, 65), (-1, 3)])
def test_bad_arguments(arguments: tuple[int, int]):
    with pytest.raises(ValueError, match="must be"):
        Segment(*arguments)


def test_a_batch_made_in_its_slot_is_not_copied(make: MakeSegment):
    _, writer = make()
    sent(writer.pack({"x": array_of(0)})).release()
    with filling(writer) as empty:
        x = empty((2, BIG // 8), np.float32)
        x[:] = 3
    packed = writer.pack({"x": x})
    received = sent(packed)
    assert len(pickle.dumps(packed)) < 1000
    assert received.tree["x"].dtype == np.float32
    x[0, 0] = 4  # The worker's view is on the same memory.
    assert received.tree["x"][0, 0] == 4
    assert not received.overflowed
    assert received.tree["x"].flags.writeable
    assert address(received.tree["x"]) % 64 == 0


def test_slots_are_reused_once_released(make: MakeSegment):
    segment, writer = make(slots=2)
    seen = set()
    for i in range(20):
        received = sent(writer.pack(array_of(i)))
        assert not received.overflowed
        assert set(received.tree) == {i}
        seen.add(address(received.tree))
        received.release()
        received.release()
        assert received.tree is None
    assert len(seen) <= 2
    assert segment.overflow_count == 0


def test_a_slot_is_kept_by_any_view_of_an_array(make: MakeSegment):
    _, writer = make(slots=1)
    received = sent(writer.pack({"x": array_of(7), "y": np.arange(3)}))
    view = received.tree["x"][5:9].reshape(2, 2).T
    del received
    assert sent(writer.pack(array_of(8))).overflowed
    assert set(view.ravel()) == {7}
    del view
    assert not sent(writer.pack(array_of(9))).overflowed


def test_a_late_drop_frees_no_slot_that_was_sent_again(make: MakeSegment):
    _, writer = make(slots=1)
    first = sent(writer.pack(array_of(1)))
    late = first.tree
    first.release()
    second = sent(writer.pack(array_of(2)))
    del late, first
    assert sent(writer.pack(array_of(3))).overflowed
    assert set(second.tree) == {2}


def test_what_never_arrived_keeps_its_slot(make: MakeSegment):
    _, writer = make(slots=2)
    lost = writer.pack(array_of(1))
    del lost
    assert not writer.pack(array_of(2)).overflowed
    assert writer.pack(array_of(3)).overflowed


def test_a_slot_that_the_worker_holds_is_not_reused(make: MakeSegment):
    _, writer = make(slots=2)
    sent(writer.pack(array_of(0))).release()
    with filling(writer) as empty:
        mine = empty((BIG,), np.uint8)
        mine[:] = 5
    sent(writer.pack(mine)).release()
    others = [sent(writer.pack(array_of(6))) for _ in range(3)]
    assert [o.overflowed for o in others] == [False, True, True]
    assert set(mine) == {5}
    again = sent(writer.pack(mine))  # It is still good, and may be sent again.
    assert address(again.tree) not in {address(o.tree) for o in others}
    assert set(again.tree) == {5}


def test_an_abandoned_filling_frees_its_slot(make: MakeSegment):
    _, writer = make(slots=1)
    sent(writer.pack(array_of(0))).release()
    for _ in range(3):
        try:
            with filling(writer) as empty:
                empty((BIG,), np.uint8)[:] = 9
                empty = None
                raise KeyError
        except KeyError:
            pass
    assert not sent(writer.pack(array_of(1))).overflowed


def test_overflow_warns_once_and_is_counted(make: MakeSegment):
    segment, writer = make(slots=1)
    held = [sent(writer.pack({"x": array_of(i), "s": "text"})) for i in range(4)]
    assert [set(h.tree["x"]) for h in held] == [{0}, {1}, {2}, {3}]
    assert [h.overflowed for h in held] == [False, True, True, True]
    with pytest.warns(RuntimeWarning, match="1 shared slots"):
        segment.overflowed()
    with warnings.catch_warnings(action="error"):
        segment.overflowed()
    assert segment.overflow_count == 2


def test_an_overflowed_batch_owes_nothing_to_a_slot(make: MakeSegment):
    _, writer = make(slots=1)
    sent(writer.pack(array_of(0))).release()
    with filling(writer) as empty:
        x = empty((BIG // 2,), np.uint8)
        x[:] = 1
    packed = writer.pack([x, array_of(2)])  # Too large for the one slot, whose successor is free.
    assert not packed.overflowed
    more = writer.pack([x, array_of(3)])
    assert more.overflowed
    x[:] = 77  # Queues pickle later.
    assert set(sent(more).tree[0]) == {1}


def test_a_replaced_array_costs_no_overflow(make: MakeSegment):
    """A `map` after the batching replaces what fills the slot: there is another slot, large enough."""
    _, writer = make(slots=2)
    sent(writer.pack([array_of(0), array_of(0)])).release()
    for i in range(4):
        with filling(writer) as empty:
            x, y = empty((BIG,), np.uint8), empty((BIG,), np.uint8)
            x[:] = y[:] = i
        received = sent(writer.pack([x, y + 1]))
        assert not received.overflowed
        assert (set(received.tree[0]), set(received.tree[1])) == ({i}, {i + 1})
        del x, y, received, empty


def test_what_is_made_elsewhere_goes_to_the_slot_that_is_being_filled(make: MakeSegment):
    """A `collate_fn` that does not use the slot taken for it needs no second one."""
    _, writer = make(slots=1)
    sent(writer.pack(array_of(0))).release()
    with filling(writer):
        assert not sent(writer.pack(array_of(1))).overflowed


def test_filling_nests(make: MakeSegment):
    _, writer = make(slots=1)
    sent(writer.pack(array_of(0))).release()
    with filling(writer) as outer:
        x = outer((BIG // 2,), np.uint8)
        with filling() as inner:
            y = inner((BIG // 2,), np.uint8)
            assert address(y) - address(x) == BIG // 2
            assert inner((1, 2), np.float32).shape == (1, 2)  # Full: an ordinary one.
            assert inner((2,), object).tolist() == [None, None]
    assert not writer.pack([x, y]).overflowed


def test_filling_in_no_worker_gives_ordinary_arrays(make: MakeSegment):
    segment, writer = make()
    copy = pickle.loads(pickle.dumps(writer))  # Made by the parent, it makes no worker of it.
    segment.close()
    with filling() as empty:
        assert empty((2, 3), np.int16).shape == (2, 3)
    del copy


def test_slots_grow_with_the_batches_and_old_memory_goes(make: MakeSegment):
    segment, writer = make(slots=2)
    for nbytes in (1, 5000, 100_000, 1_000_000, 1_000_001, 3_000_000, 17):
        received = sent(writer.pack(array_of(3, nbytes)))
        assert not received.overflowed
        assert received.tree.tobytes() == b"\3" * nbytes
        received.release()
    assert 2 * 3_000_000 <= memory(segment) < 2 * 3_000_000 + 100_000


def test_outgrown_slots_stay_while_they_are_held(make: MakeSegment):
    segment, writer = make(slots=2)
    held = sent(writer.pack(array_of(1, 1_000_000)))
    with filling(writer) as empty:
        mine = empty((1_000_000,), np.uint8)
        mine[:] = 2
    sent(writer.pack(array_of(3, 4_000_000))).release()
    assert memory(segment) >= 10_000_000
    assert set(held.tree) == {1}
    held.release()
    sent(writer.pack(array_of(3))).release()
    assert memory(segment) >= 10_000_000
    assert set(mine) == {2}
    del mine, empty
    sent(writer.pack(array_of(3))).release()
    assert memory(segment) < 8_100_000


def test_too_little_memory(make: MakeSegment, monkeypatch: pytest.MonkeyPatch):
    """The error says how much; the slots that were there go on, with their memory."""
    segment, writer = make(slots=2)
    sent(writer.pack(array_of(1))).release()
    before = memory(segment)
    monkeypatch.setattr(_mapping, "available_bytes", lambda: 1000)
    for _ in range(3):
        with pytest.raises(MemoryError, match=rf"{2 * 10 * BIG} bytes of shared memory.*1000 bytes are available"):
            writer.pack(array_of(2, 10 * BIG))
        received = sent(writer.pack(array_of(3)))
        assert not received.overflowed
        assert memory(segment) == before
        received.release()
    monkeypatch.undo()
    assert not sent(writer.pack(array_of(2, 10 * BIG))).overflowed


def test_too_little_memory_for_the_first_batch(make: MakeSegment, monkeypatch: pytest.MonkeyPatch):
    _, writer = make(slots=2)
    monkeypatch.setattr(_mapping, "available_bytes", lambda: 100_000)
    with pytest.raises(MemoryError, match=f"{2 * BIG} bytes"):
        writer.pack(array_of(1))
    monkeypatch.undo()
    assert set(sent(writer.pack(array_of(1))).tree) == {1}

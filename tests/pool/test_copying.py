"""Copies by several threads: every layout lands right, nothing hangs, and nobody is written behind his back."""

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import arenax
import arenax._copying as copying

MIB = 1 << 20


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads on any machine, and pieces of 1 KiB."""
    monkeypatch.setattr(copying, "THREADS", 2)
    monkeypatch.setattr(copying, "PIECE_BYTES", 1 << 10)
    monkeypatch.setattr(copying, "PARALLEL_BYTES", 4 << 10)


@pytest.fixture
def helpers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A helper thread of the test's own."""
    with ThreadPoolExecutor(1) as executor:
        monkeypatch.setattr(copying, "_helpers", executor)
        yield executor


_values = np.arange(64 * 96, dtype=np.float32).reshape(64, 96)


@pytest.mark.parametrize(
    "source",
    [
        _values,
        np.asfortranarray(_values),
        np.repeat(_values, 2, axis=1)[:, ::2],
        _values[::-1, ::-1],
        _values.astype(np.float64),
        _values.astype(">f4"),
        np.broadcast_to(np.float32(3), (64, 96)),
        _values.tolist(),
    ],
    ids=["plain", "fortran", "strided", "backwards", "wide", "swapped", "broadcast", "list"],
)
@pytest.mark.parametrize("shape", [(64, 96), (1, 64, 96), (64 * 96,), (96, 1, 64)])
def test_every_layout_is_copied(source: Any, shape: tuple[int, ...]) -> None:
    source = np.asarray(source).reshape(shape) if shape != (64, 96) else source
    target, writers = np.empty(shape, np.float32), list[Future[None]]()
    copying.copy(target, source, target, writers)
    np.testing.assert_array_equal(target, np.asarray(source))
    assert not writers


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 13, 1000])
def test_the_pieces_cover_everything_once(rows: int) -> None:
    target = np.zeros((rows, 7, 11), np.int32)
    pieces = [*copying._pieces(target)]
    assert len(pieces) > 1 or target.nbytes <= copying.PIECE_BYTES
    for index in pieces:
        piece = target[index]
        assert 0 < piece.nbytes <= copying.PIECE_BYTES
        piece += 1
    assert (target == 1).all()


def test_a_piece_that_cannot_be_cut_is_copied_whole() -> None:
    assert len([*copying._pieces(np.zeros((1, 1)))]) == 1


def test_a_helper_that_never_begins_is_not_waited_for(helpers: ThreadPoolExecutor) -> None:
    gate = threading.Event()
    helpers.submit(gate.wait)
    target = np.zeros(4096, np.float32)
    copying.copy(target, np.ones(4096), target, [])
    assert (target == 1).all()
    gate.set()


def test_without_helpers_the_caller_copies_alone(helpers: ThreadPoolExecutor) -> None:
    """As at the interpreter's end."""
    helpers.shutdown()
    target = np.zeros(4096, np.float32)
    copying.copy(target, np.ones(4096), target, [])
    assert (target == 1).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_no_helpers_and_does_not_wait_for_them() -> None:
    target = np.zeros(4096, np.float32)
    copying.copy(target, np.ones(4096), target, [])
    child = os.fork()
    if not child:
        copying.copy(target, np.full(4096, 2), target, [])
        os._exit(0 if (target == 2).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_error_of_a_helper_is_the_callers(helpers: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    real, begun = copying._work, threading.Event()

    def work(pieces: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            begun.wait()
            return real(pieces)
        begun.set()
        raise MemoryError("a helper's")

    monkeypatch.setattr(copying, "_work", work)
    writers: list[Future[None]] = []
    with pytest.raises(MemoryError, match="a helper's"):
        copying.copy(np.zeros(4096), np.ones(4096), None, writers)
    assert not writers


@pytest.mark.parametrize("count", [1, 3, 40])
def test_several_are_copied_together(helpers: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """What is large together is shared among threads, a piece each; what is small is not."""
    real, taken = copying._work, list[int]()
    monkeypatch.setattr(copying, "_work", lambda pieces: (taken.append(len(pieces)), real(pieces))[1])
    targets = [np.zeros(100, np.float32) for _ in range(count)]
    writers: list[list[Future[None]]] = [[] for _ in targets]
    copying.copy_each(targets, [np.full(100, i) for i in range(count)], targets, writers)
    assert [target.tolist() for target in targets] == [[i] * 100 for i in range(count)]
    assert max(taken, default=0) == (count if count * 400 >= copying.PARALLEL_BYTES else 0)
    assert not any(writers)


@pytest.mark.parametrize("begins", [True, False])
def test_nothing_is_held_on_to_after_a_copy(helpers: ThreadPoolExecutor, begins: bool) -> None:
    """A helper's call, done or cancelled, is kept by its executor for a while."""
    gate = threading.Event()
    if not begins:
        helpers.submit(gate.wait)
    for _ in range(50):
        owner = arenax.CancelToken()
        alive = weakref.ref(owner)
        copying.copy(np.zeros(4096, np.float32), np.ones(4096), owner, [])
        del owner
        assert alive() is None
    gate.set()


@pytest.mark.parametrize("count", [0, 1, 2, 10])
def test_what_is_done_in_advance_comes_in_order_and_no_further_ahead_than_told(
    helpers: ThreadPoolExecutor, count: int
) -> None:
    begun, done = list[int](), set[int]()

    def items() -> Iterator[int]:
        for i in range(1, 8):
            begun.append(i)
            yield i

    for i, item in enumerate(copying.in_advance(done.add, items(), count), 1):
        assert item == i
        assert item in done
        assert len(begun) <= i + count
    assert done == set(range(1, 8))


def test_helpers_work_in_advance(helpers: ThreadPoolExecutor) -> None:
    by = dict[int, threading.Thread]()

    def work(i: int) -> None:
        by[i] = threading.current_thread()

    for i in copying.in_advance(work, range(4), 1):
        while i < 3 and i + 1 not in by:  # Its caller is busy with the last one.
            time.sleep(0.001)
    assert by[0] is threading.current_thread()
    assert {by[i] for i in (1, 2, 3)}.isdisjoint({threading.current_thread()})


def test_what_no_helper_begins_is_done_by_the_caller(helpers: ThreadPoolExecutor) -> None:
    gate = threading.Event()
    helpers.submit(gate.wait)
    by: list[threading.Thread] = []
    assert [*copying.in_advance(lambda _: by.append(threading.current_thread()), range(5), 2)] == [*range(5)]
    gate.set()
    helpers.shutdown()
    assert [*copying.in_advance(lambda _: by.append(threading.current_thread()), range(5), 2)] == [*range(5)]
    assert by == [threading.current_thread()] * 10


def test_an_error_in_advance_is_told_when_its_turn_comes(helpers: ThreadPoolExecutor) -> None:
    def work(i: int) -> None:
        if i == 2:
            raise MemoryError("the third")

    seen: list[int] = []
    with pytest.raises(MemoryError, match="the third"):
        for i in copying.in_advance(work, range(5), 2):
            seen.append(i)  # noqa: PERF402
    assert seen == [0, 1]


# --------------------------------------------------------------------------------------------------- under the pool


def interrupted(pool: arenax.BufferPool, monkeypatch: pytest.MonkeyPatch, source: Any) -> Callable[[], None]:
    """Has a put of `source` interrupted while a helper still writes; returns what lets the helper write on."""
    begun, gate = threading.Event(), threading.Event()

    def work(pieces: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            begun.wait()
            raise KeyboardInterrupt
        target, source, index = pieces.popleft()
        begun.set()
        gate.wait()
        target[index] = source[index]

    with monkeypatch.context() as patch:
        patch.setattr(copying, "_work", work)
        with pytest.raises(KeyboardInterrupt):
            pool.put(source)
    return gate.set


@pytest.mark.parametrize("next_use", ["put", "lease", "zeros", "write"])
def test_the_next_tenant_waits_for_the_helpers_of_an_interrupted_landing(
    helpers: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, next_use: str
) -> None:
    shape = (8 * MIB // 4,)
    with arenax.BufferPool() as pool:
        pool.reserve(arenax.ArraySpec(shape, "float32"), slots=1)
        address = pool.put(np.zeros(shape, np.float32)).unsafe_buffer_pointer()
        let_go = interrupted(pool, monkeypatch, np.full(shape, 7, np.float32))
        timer = threading.Timer(0.3, let_go)  # Well after a landing that does not wait
        timer.start()
        if next_use == "put":
            array = pool.put(np.zeros(shape, np.float32))
        elif next_use == "lease":
            lease = pool.lease(shape, "float32", fill=0)
            array = lease.array
        elif next_use == "write":
            lease = pool.lease(shape, "float32", fill=None)
            lease.write(np.zeros(shape, np.float32))
            array = lease.array
        else:
            with pool.step() as step:
                array = step.keep(step.zeros(shape))
        timer.join()
        assert not np.asarray(array).any()
        assert array.unsafe_buffer_pointer() == address
        pool.check()
        assert pool.stats().spill_count == 0


def test_an_interrupt_in_the_call_for_a_helper_leaves_none_that_nobody_knows_of(
    helpers: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is queued by then, and begins when it can."""
    gate, real = threading.Event(), helpers.submit
    helpers.submit(gate.wait)

    def submit(*args: Any) -> Any:
        real(*args)
        raise KeyboardInterrupt

    target, writers = np.zeros(4096), list[Future[None]]()
    with monkeypatch.context() as patch:
        patch.setattr(helpers, "submit", submit)
        with pytest.raises(KeyboardInterrupt):
            copying.copy(target, np.ones(4096), target, writers)
    assert len(writers) == 1
    gate.set()
    copying.await_writers(writers)
    helpers.submit(int).result()
    assert not target.any()


@pytest.mark.parametrize("threads", [1, 2])
def test_large_copies_release_the_gil(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """With a switch interval of a minute another thread runs on only where the copying one lets go by itself."""
    monkeypatch.setattr(copying, "THREADS", threads)
    monkeypatch.setattr(copying, "PIECE_BYTES", 16 * MIB)
    source = np.ones(256 * MIB // 4, np.float32)
    target, copied, half_done = np.zeros_like(source), threading.Event(), []

    def put() -> None:
        copying.copy(target, source, target, [])
        copied.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        thread = threading.Thread(target=put)
        thread.start()
        while not copied.wait(0.0001):
            half_done.append(target[0] != target[-1])
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert any(half_done)
    assert (target[:: 1 << 16] == 1).all()


def test_on_a_mesh_the_next_tenant_waits_for_the_helpers_too(
    helpers: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No part is large by itself: a helper that was left writing to one of them keeps the whole slot waiting."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("all",))
    with arenax.BufferPool(NamedSharding(mesh, PartitionSpec("all")), on_exhausted="raise") as pool:
        pool.reserve(arenax.ArraySpec((8, 256), "float32"), slots=1)
        first = pool.put(np.zeros((8, 256), np.float32))
        addresses = [shard.data.unsafe_buffer_pointer() for shard in first.addressable_shards]
        del first
        let_go = interrupted(pool, monkeypatch, np.full((8, 256), 7, np.float32))
        timer = threading.Timer(0.3, let_go)
        timer.start()
        array = pool.put(np.full((8, 256), 9, np.float32))
        timer.join()
        time.sleep(0.05)
        assert (np.array(array) == 9).all()
        assert [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards] == addresses
        del array
        pool.check()

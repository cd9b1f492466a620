"""Workers in processes of their own: every way to start one, and every way for one, or for the parent, to end."""
# pyright: reportPrivateUsage=false

import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import pytest

from arenax_adapters.shared import Packed, Segment, Writer
from tests.adapters import worker_samples
from tests.adapters.test_shared_slots import descriptors, memory, sent
from tests.adapters.worker_samples import SECONDS, bytes_of

METHODS = ["fork", "spawn", "forkserver"]


def started(method: str, target: Any, *arguments: Any) -> Any:
    context: Any = multiprocessing.get_context(method)
    worker = context.Process(target=target, args=arguments, daemon=True)
    worker.start()
    return worker


def ended(worker: Any) -> int:
    worker.join(SECONDS)
    assert not worker.is_alive()
    code = worker.exitcode
    worker.close()
    return code


def named() -> set[str]:
    """Shared memory that this process has mapped and that still has a name."""
    with open("/proc/self/maps") as lines:
        return {
            line for line in lines if "/dev/shm/" in line and "/sem." not in line and not line.endswith("(deleted)\n")
        }


def test_only_numpy_and_the_standard_library():
    program = "import sys, arenax_adapters.shared; print(*sorted({n.partition('.')[0] for n in sys.modules}))"
    names = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=SECONDS
    ).stdout.split()
    assert {"numpy", "arenax_adapters"} <= set(names)
    assert not {"jax", "jaxlib", "arenax", "torch", "grain", "ml_dtypes"} & set(names)


@pytest.mark.parametrize("method", METHODS)
def test_a_worker(method: str):
    """Sends batches, from a few descriptors; nothing has a name, and all memory goes with the segment."""
    open_before = len(descriptors())
    segment = Segment(2, 2)
    context = multiprocessing.get_context(method)
    queue: Any = context.Queue()
    trees = [{"x": np.full(n, n, np.int32), "t": "text"} for n in (3, 1000, 100_000, 7)]
    worker = started(method, worker_samples.send, segment.writer(), queue, trees)
    for tree in trees:
        received = queue.get(timeout=SECONDS)
        assert isinstance(received, Packed), received
        assert np.array_equal(received.tree["x"], tree["x"])
        assert received.tree["t"] == "text"
        pid, with_jax = received.note
        assert pid != os.getpid()
        assert with_jax == (method == "fork")
        assert named() == set()
        received.release()
    assert queue.get(timeout=SECONDS) is None
    assert ended(worker) == 0
    assert len(descriptors()) == open_before + 1
    assert memory(segment) >= 2 * 400_000
    segment.close()
    assert len(descriptors()) == open_before


def test_a_killed_worker_and_the_one_in_its_place():
    """What the first one sent stays good; the second has slots of its own."""
    segment, held, nbytes = Segment(1, 2), [], 100_000
    for i in range(3):
        here, there = multiprocessing.Pipe()
        worker = started("fork", worker_samples.send_until_killed, segment.writer(), there, nbytes)
        assert here.poll(SECONDS)
        held.append(here.recv())
        assert ended(worker) == -signal.SIGKILL
        assert not held[-1].overflowed
        assert len({h._claim._state for h in held}) == i + 1
    # The fourth and last that a segment has room for, and one more.
    last = [segment.writer() for _ in range(2)]
    packed = [sent(w.pack(np.full(nbytes, 9, np.uint8))) for w in last for _ in range(2)]
    assert [p.overflowed for p in packed] == [False, False, True, True]
    assert all(set(h.tree) == {1} for h in held)
    assert all(set(p.tree) == {9} for p in packed)
    segment.close()


def test_a_worker_without_a_region_asks_once(monkeypatch: pytest.MonkeyPatch):
    joined: list[Any] = []
    join = Writer._join

    def joining(self: Writer) -> int | None:
        joined.append(join(self))
        return joined[-1]

    monkeypatch.setattr(Writer, "_join", joining)
    segment = Segment(1, 1)
    writers = [segment.writer() for _ in range(5)]
    for _ in range(3):
        for writer in writers:
            sent(writer.pack(np.zeros(9)))
    assert joined == [0, 1, 2, 3, None]
    segment.close()


@pytest.mark.parametrize("method", METHODS)
def test_workers_end_with_a_killed_parent(method: str):
    parent = subprocess.Popen(
        [sys.executable, "-c", worker_samples.PARENT, method], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        handles = [handle for pid in pids if (handle := opened(pid)) is not None]
        assert parent.wait(SECONDS) == -signal.SIGKILL
        for handle in handles:
            assert wait([handle], SECONDS)
            os.close(handle)
        out, errors = parent.communicate(timeout=SECONDS)  # Whoever holds the pipes is gone too.
        assert (len(pids), out) == (2, ""), errors
    finally:
        parent.kill()
        parent.wait(SECONDS)


def opened(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def test_too_little_memory_in_a_worker():
    segment = Segment(1, 2)
    here, there = multiprocessing.Pipe()
    worker = started("fork", worker_samples.limited, segment.writer(), there, 100_000)
    assert here.poll(SECONDS)
    said = here.recv()
    assert ended(worker) == 0
    assert "204800 bytes of shared memory" in said
    segment.close()


def test_a_worker_whose_segment_is_closed():
    segment = Segment(1, 2)
    context = multiprocessing.get_context("fork")
    queue: Any = context.Queue()
    writer = segment.writer()
    segment.close()
    worker = started("fork", worker_samples.send, writer, queue, [np.zeros(9)])
    assert "RuntimeError" in queue.get(timeout=SECONDS)
    assert ended(worker) == 0


def test_a_forked_child_frees_nothing_of_its_parents():
    segment = Segment(1, 1)
    writer = segment.writer()
    held = sent(writer.pack(np.arange(1000)))
    pid = os.fork()
    if not pid:
        array, done = held.tree, 1
        try:
            segment.close()
            held.release()
            del segment, held, writer
            done = int(array.sum() != 499_500)
            del array
        finally:
            os._exit(done)
    assert os.waitpid(pid, 0)[1] == 0
    assert sent(writer.pack(np.zeros(1000, np.int64))).overflowed
    assert held.tree.sum() == 499_500
    held.release()
    assert not sent(writer.pack(np.zeros(1000, np.int64))).overflowed
    segment.close()


def test_arrays_at_exit():
    program = subprocess.run(
        [sys.executable, "-X", "dev", "-c", worker_samples.LEAVING],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert (program.returncode, program.stdout, program.stderr) == (0, "4950\n", "")


def test_soak():
    """No byte of a batch changes while it is held, whatever the worker does; and all batches come, in order."""
    count, biggest = 400, 40_000
    segment = Segment(2, 3)
    context = multiprocessing.get_context("fork")
    queues: list[Any] = [context.Queue(4) for _ in range(2)]
    workers = [
        started("fork", worker_samples.soak, segment.writer(), queue, i, count, biggest)
        for i, queue in enumerate(queues)
    ]
    rng = np.random.default_rng(0)
    held: list[tuple[Any, np.ndarray]] = []
    overflows = 0
    for i in range(2 * count):
        received = queues[i % 2].get(timeout=SECONDS)
        assert received.note == i // 2
        overflows += received.overflowed
        x, (half, text) = received.tree["x"], received.tree["rest"]
        expected = bytes_of(int(received.tree["seed"]), len(x))
        assert np.array_equal(x, expected)
        assert np.array_equal(half, expected[: len(x) // 2])
        assert text == "text"
        if rng.random() < 0.5:
            held.append((received if rng.random() < 0.5 else x[::-1][::-1], expected))
        else:
            received.release()
        del x, half, received
        rng.shuffle(held)  # pyright: ignore[reportArgumentType]
        while len(held) > rng.integers(0, 6):
            check(*held.pop())
    for item in held:
        check(*item)
    assert [queue.get(timeout=SECONDS) for queue in queues] == [None, None]
    assert [ended(worker) for worker in workers] == [0, 0]
    assert 0 < overflows < 2 * count
    segment.close()


def check(held: Any, expected: np.ndarray) -> None:
    assert np.array_equal(held.tree["x"] if isinstance(held, Packed) else held, expected)
    if isinstance(held, Packed):
        held.release()

"""How epochs of torch's loader end: bad samples, killed workers, interrupts, drops; nothing stays, the next works."""

# pyright: reportPossiblyUnboundVariable=false, reportPrivateUsage=false

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter  # noqa: E402

from arenax_adapters.torch import DataLoader, _Source  # noqa: E402
from tests.adapters.conftest import MakePool, assert_nothing_left, prefetch_threads  # noqa: E402
from tests.adapters.torch_samples import (  # noqa: E402
    FORK,
    SECONDS,
    Gate,
    Samples,
    Strikes,
    descriptors,
    filled,
    number,
    shared_mappings,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    # An interrupt may strike in a landing.
    pytest.mark.filterwarnings("ignore:an array of .* was donated away:RuntimeWarning"),
]

COUNT = 12
WHOLE = list(range(COUNT))
persistent_too = pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
ahead_too = pytest.mark.parametrize("ahead", [0, 2])


def loader_of(dataset: Any, make_pool: MakePool, workers: int = 1, **options: Any) -> DataLoader:
    return DataLoader(dataset, num_workers=workers, multiprocessing_context=FORK, pool=make_pool(), **options)


def epoch(loader: Any) -> list[int]:
    return [number(batch) for batch in loader]


def workers() -> list[Any]:
    return [p for p in multiprocessing.active_children() if p.daemon and not p.name.startswith("SyncManager")]


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """No worker, no descriptor, no mapping and no name in /dev/shm of what the test made, and all that at once."""
    multiprocessing.get_context(FORK).Event()  # Starts what multiprocessing keeps for itself.
    before = left()
    yield
    assert left() == before


def join_threads() -> None:
    """A drop waits for its thread for a moment only, which ends the workers."""
    for thread in prefetch_threads():
        thread.join(SECONDS)


def left() -> tuple[Any, ...]:
    join_threads()
    for thread in threading.enumerate():  # Of multiprocessing, which closes a queue's pipe.
        if thread.name == "QueueFeederThread" and not workers():
            thread.join(SECONDS)
    return workers(), descriptors(), shared_mappings(), named()


def named() -> list[str]:
    mine = [str(pid) for pid in [os.getpid(), *(p.pid for p in multiprocessing.active_children())]]
    return [name for name in os.listdir("/dev/shm") if any(pid in name for pid in mine)]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch looks after its workers every 5 seconds."""
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))


@ahead_too
@persistent_too
def test_an_early_break(make_pool: MakePool, persistent: bool, ahead: int):
    loader = loader_of(Samples(filled, COUNT), make_pool, 2, persistent_workers=persistent, prefetch=ahead)
    for _ in range(4):
        for n, batch in enumerate(loader):  # noqa: B007
            if n == 2:
                break
    del batch
    assert len(workers()) == 2 * persistent
    assert_nothing_left(loader.pool)
    assert epoch(loader) == WHOLE
    assert loader.overflow_count == 0


@ahead_too
def test_an_error_in_the_loop(make_pool: MakePool, ahead: int):
    loader = loader_of(Samples(filled, COUNT), make_pool, prefetch=ahead)

    def loop() -> None:
        for batch in loader:
            assert number(batch) < 3, "an error"

    with pytest.raises(AssertionError, match="an error"):
        loop()
    join_threads()
    assert workers() == []
    assert_nothing_left(loader.pool)


@ahead_too
@persistent_too
def test_a_bad_sample_ends_the_loop(make_pool: MakePool, persistent: bool, ahead: int):
    """torch's traceback of it is a cycle, which would keep the workers until the collector comes by."""

    def make(i: int) -> np.ndarray:
        if i == 3:
            raise ValueError("a bad sample")
        return filled(i)

    loader = loader_of(Samples(make, COUNT), make_pool, persistent_workers=persistent, prefetch=ahead)
    for _ in range(2):
        found: list[int] = []
        try:
            for batch in loader:
                found.append(number(batch))
        except ValueError as e:
            assert "a bad sample" in str(e)  # noqa: PT017
        join_threads()
        assert found == [0, 1, 2]
        del batch
        assert len(workers()) == persistent
        assert_nothing_left(loader.pool)


@pytest.mark.usefixtures("soon")
@ahead_too
@persistent_too
@pytest.mark.parametrize("times", [3])
def test_a_killed_worker(make_pool: MakePool, persistent: bool, ahead: int, times: int):
    dataset = Strikes(5, signal.SIGKILL, parent=False)
    loader = loader_of(dataset, make_pool, 2, persistent_workers=persistent, prefetch=ahead)
    taken: list[int] = []
    for _ in range(times):
        dataset.done.clear()
        with pytest.raises(RuntimeError, match="worker"):
            epoch(loader)
        assert epoch(loader) == WHOLE
        taken.append(shared_mappings())
    assert len(set(taken)) == 1
    assert loader.overflow_count == 0
    assert_nothing_left(loader.pool)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("code", [0, 3])
@persistent_too
def test_a_worker_that_exits(make_pool: MakePool, persistent: bool, code: int):
    alive = multiprocessing.get_context(FORK).Event()

    def make(i: int) -> np.ndarray:
        if i == 5 and not alive.is_set():
            alive.set()
            os._exit(code)
        return filled(i)

    loader = loader_of(Samples(make, COUNT), make_pool, persistent_workers=persistent)
    with pytest.raises(RuntimeError, match="worker"):
        epoch(loader)
    assert epoch(loader) == WHOLE


@pytest.mark.usefixtures("soon")
def test_a_persistent_worker_that_is_killed_between_epochs(make_pool: MakePool):
    loader = loader_of(Samples(filled, COUNT), make_pool, persistent_workers=True)
    assert epoch(loader) == WHOLE
    (worker,) = workers()
    try:
        os.kill(worker.pid, signal.SIGKILL)
        worker.join(SECONDS)
    except RuntimeError:  # torch's handler of SIGCHLD strikes anywhere.
        worker.join(SECONDS)
    assert epoch(loader) == WHOLE
    assert len(workers()) == 1


@ahead_too
@persistent_too
def test_an_interrupt_in_next(make_pool: MakePool, persistent: bool, ahead: int):
    dataset = Strikes(5, signal.SIGINT, parent=True)
    loader = loader_of(dataset, make_pool, persistent_workers=persistent, prefetch=ahead)
    for _ in range(2):
        dataset.done.clear()
        with pytest.raises(KeyboardInterrupt):
            epoch(loader)
        assert_nothing_left(loader.pool)
        assert epoch(loader) == WHOLE


def test_an_interrupt_without_workers(make_pool: MakePool):
    struck: list[int] = []

    def make(i: int) -> np.ndarray:
        if i == 5 and not struck:
            struck.append(i)
            signal.raise_signal(signal.SIGINT)
        return filled(i)

    loader = DataLoader(Samples(make, COUNT), pool=make_pool())
    with pytest.raises(KeyboardInterrupt):
        epoch(loader)
    assert epoch(loader) == WHOLE


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, OSError])
def test_an_interrupt_while_persistent_workers_begin_anew(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
):
    loader = loader_of(Samples(filled, COUNT), make_pool, persistent_workers=True)
    assert number(next(iter(loader))) == 0

    def interrupted(self: Any) -> Any:
        monkeypatch.undo()
        raise error

    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "_get_data", interrupted)
    try:
        assert epoch(loader) == WHOLE  # It takes other workers after a RuntimeError, which torch raises for a dead one.
    except error:
        assert error is not RuntimeError
    assert epoch(loader) == WHOLE
    assert epoch(loader) == WHOLE


# Ahead, with workers that persist. ------------------------------------------------------------------------------------


def test_a_second_epoch_ends_the_first(make_pool: MakePool):
    """Whose thread must not take the second's batches."""
    loader = loader_of(Samples(filled, COUNT), make_pool, persistent_workers=True, prefetch=2)
    for taken in range(5):
        first = iter(loader)
        assert [number(next(first)) for _ in range(taken)] == WHOLE[:taken]
        second = iter(loader)
        assert epoch(second) == WHOLE
        assert epoch(first) == WHOLE[taken:][:2] or epoch(first) == []
    del first, second
    assert_nothing_left(loader.pool)


@pytest.mark.usefixtures("no_grace")
def test_a_second_epoch_while_the_first_ones_thread_waits(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch):
    dataset = Gate(4)
    loader = loader_of(dataset, make_pool, persistent_workers=True, prefetch=2)
    again: Callable[..., bool] = _Source.again

    def opened(*args: Any) -> bool:
        dataset.go.set()
        return again(*args)

    monkeypatch.setattr(_Source, "again", opened)
    batches = iter(loader)
    assert [number(next(batches)) for _ in range(2)] == [0, 1]
    assert dataset.reached.wait(SECONDS)
    assert [number(next(batches)) for _ in range(2)] == [2, 3]  # Its thread can only wait for the next one.
    del batches
    assert epoch(loader) == WHOLE
    for thread in prefetch_threads():
        thread.join(SECONDS)


@ahead_too
def test_workers_end_with_their_loader(make_pool: MakePool, ahead: int):
    loader = loader_of(Samples(filled, COUNT), make_pool, persistent_workers=True, prefetch=ahead)
    assert epoch(loader) == WHOLE
    (worker,) = workers()
    del loader
    deadline = time.monotonic() + SECONDS
    while worker.is_alive() and time.monotonic() < deadline:
        worker.join(1)
    assert worker.exitcode == 0

"""Loaders under way, timed in turn: each goes on from round to round, so that its workers are started once."""

import contextlib
import os
import time
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import attrs
import jax
import numpy as np

from ._bench_clock import MIN_ROUNDS, Clock
from ._bench_loader_cost import (
    SharedFiles,
    Usage,
    children,
    descriptors,
    give_back_memory,
    own_usage,
    resident_bytes,
    settle,
    usage_of,
)
from ._bench_loader_forms import Batch, Case, Loader, opened

# Before each turn, of which every byte is verified.
VERIFIED = 4
# Then, for each worker: more than a loader has made ahead while it had to wait. grain's parent has threads that do too.
DRAINED = {"torch": 4, "grain": 8}


@attrs.frozen
class Turn:
    """What one loader took in one round.

    Attributes:
        seconds: Of a batch.
        parent: Usage of this process.
        workers: That of the loader's workers, None where the system does not tell.
        shared_files: Files created in shared memory, None where the system does not tell.
    """

    seconds: float
    parent: Usage
    workers: Usage | None
    shared_files: int | None


@attrs.frozen
class Plan:
    """How much is measured of each loader.

    Attributes:
        rounds: Turns of each.
        batches: Batches in a turn that are timed.
        workers: Workers of each.
        library: Whose loaders.
    """

    rounds: int
    batches: int
    workers: int
    library: str

    @property
    def untimed(self) -> int:
        """Batches before those of a turn that are timed."""
        return VERIFIED + DRAINED[self.library] * self.workers

    @property
    def batch_count(self) -> int:
        """Batches that a dataset must have, with those that workers make ahead in the last turn."""
        return (1 + self.rounds) * (self.untimed + self.batches)


class Runner:
    """One loader under way.

    Args:
        batches: What it gives.
        case: What it loads.
        plan: How much of it.
        files: Counts shared-memory files.

    Attributes:
        sums: A checksum of each batch so far: of every byte of some, of the samples' numbers in the others.
        turns: What was measured.
        workers: Its processes.
        resident_bytes: By how much this process grew while its first batches came, at most.
        workers_resident_bytes: Of its processes together, after the last turn.
        descriptors: How many files more than before this process had open meanwhile, at most.
    """

    def __init__(self, batches: Iterator[Batch], case: Case, plan: Plan, files: SharedFiles) -> None:
        self._batches, self._case, self._plan, self._files = batches, case, plan, files
        self._held: Batch | None = None  # As the variable of a loop holds a batch while the next one comes.
        self.sums: list[int] = []
        self.turns: list[Turn] = []
        self.workers: set[int] = set()
        self.resident_bytes: int | None = None
        self.workers_resident_bytes: int | None = None
        self.descriptors: int | None = None

    def start(self) -> None:
        """Starts the workers and takes the first batches."""
        others = children()
        settle()
        give_back_memory()
        memory, files = resident_bytes([os.getpid()]), descriptors()
        for n in range(self._plan.untimed):
            self._take(verify=n < VERIFIED)
            self.resident_bytes = _most(self.resident_bytes, resident_bytes([os.getpid()]), memory)
            self.descriptors = _most(self.descriptors, descriptors(), files)
        self.workers = children() - others

    def turn(self) -> None:
        """Takes a turn: batches that are verified, those that were made ahead, and those that are timed."""
        for n in range(self._plan.untimed):
            self._take(verify=n < VERIFIED)
        if self._case.step_seconds:
            settle()  # A step leaves the workers the time to fill their queues.
        self._files.count()
        parent, workers, start = own_usage(), usage_of(self.workers), time.perf_counter()
        for _ in range(self._plan.batches):
            self._take()
            if self._case.step_seconds:
                time.sleep(self._case.step_seconds)
        seconds, parent_after, workers_after = time.perf_counter() - start, own_usage(), usage_of(self.workers)
        self.turns.append(
            Turn(
                seconds / self._plan.batches,
                parent_after - parent,
                None if workers is None or workers_after is None else workers_after - workers,
                self._files.count(),
            )
        )
        self.workers_resident_bytes = resident_bytes(self.workers)

    def stop(self) -> None:
        """Lets go of the last batch."""
        self._held = None

    def _take(self, verify: bool = False) -> None:
        self._held = batch = jax.block_until_ready(next(self._batches))
        self.sums.append(checksum(batch if verify else {"index": batch["index"]}))


def _most(known: int | None, now: int | None, before: int | None) -> int | None:
    return known if now is None or before is None else max(known or 0, now - before)


def checksum(batch: Batch) -> int:
    """A checksum of the names, shapes, dtypes and bytes of a batch."""
    found = 0
    for key in sorted(batch):
        value: Any = np.asarray(batch[key])
        found = zlib.crc32(f"{key} {value.dtype} {value.shape}".encode(), found)
        found = zlib.crc32(np.ascontiguousarray(value).data, found)
    return found


@contextlib.contextmanager
def running(
    loaders: Mapping[str, Loader], case: Case, plan: Plan, tell: Callable[[int], None]
) -> Generator[dict[str, Runner]]:
    """Each loader under way, started one after the other; all of them end with the scope.

    Args:
        loaders: The loaders.
        case: What they load.
        plan: How much of it.
        tell: Called with the number of those that are started.
    """
    with contextlib.ExitStack() as stack:
        files = stack.enter_context(contextlib.closing(SharedFiles()))
        runners: dict[str, Runner] = {}
        for name, loader in loaders.items():
            batches = stack.enter_context(opened(loader, case, plan.batch_count, plan.workers))
            runners[name] = runner = Runner(batches, case, plan, files)
            stack.callback(runner.stop)
            runner.start()
            tell(len(runners))
        yield runners


def measure_turns(clock: Clock, loaders: Mapping[str, Loader], case: Case, plan: Plan) -> dict[str, Runner]:
    """Times the loaders in turn, round after round; every second round goes through them backwards.

    Args:
        clock: Keeps to its budget, but not below three rounds.
        loaders: What to time, by name.
        case: What they load.
        plan: How much of it.

    Returns:
        Each loader, with its turns, after its workers' end.
    """
    with running(loaders, case, plan, lambda n: clock.progress(f"start {case.name}", n, len(loaders))) as runners:
        order = list(runners.values())
        for i in range(plan.rounds):
            if i >= MIN_ROUNDS and clock.over:
                break
            for runner in order if i % 2 == 0 else reversed(order):
                runner.turn()
            clock.progress(case.name, i + 1, plan.rounds)
    return runners

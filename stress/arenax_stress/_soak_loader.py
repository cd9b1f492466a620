"""A data loader whose workers are killed now and then: it must be replaced, and no slot may be lost."""

import gc
import importlib
import importlib.util
import multiprocessing
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np

import arenax

from ._bench_loader_samples import Samples
from ._soak_report import Failure

WORKERS, ROWS, BATCHES, COLUMNS = 2, 8, 500, 4096
# On average, between two kills. A new loader takes some seconds of these.
KILL_SECONDS = 20.0
# torch looks every 5 seconds whether a worker is alive; a thread that is silent for so long is in a deadlock.
HANG_SECONDS = 60.0


class KilledLoader:
    """A loader in a thread, with a pool of its own: the modes of the soak's pools are not for it.

    Args:
        seed: Of the moments at which workers are killed.
        kill_seconds: Seconds between two kills, on average.

    Attributes:
        kind: ``"torch"`` or ``"grain"``, or None where neither is installed, and nothing runs.
        pool: Where the batches land.
        batch_count: Batches that came, each of them right.
        kill_count: Workers that were killed.
        restart_count: Loaders that were begun after one that broke.
        failure: What went wrong.
    """

    def __init__(self, seed: int, kill_seconds: float = KILL_SECONDS) -> None:
        self.kind = next((name for name in ("torch", "grain") if importlib.util.find_spec(name)), None)
        self.pool = arenax.BufferPool(name="soak-loader")
        self.batch_count = self.kill_count = self.restart_count = 0
        self.failure: Failure | None = None
        self._samples = Samples(ROWS * BATCHES, COLUMNS)
        self._rng = Random(f"{seed}/loader")
        self._kill_seconds = kill_seconds
        self._next_kill = self._moment()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soak-loader", daemon=True)

    def start(self) -> None:
        """Begins, where there is a loader."""
        if self.kind is not None:
            self._thread.start()

    def finish(self) -> None:
        """Ends it, and verifies that all came back; what went wrong is in `failure`."""
        if self.kind is None:
            return
        self._stop.set()
        self._thread.join(HANG_SECONDS)
        if self._thread.is_alive():
            self._fail(f"the thread is still at it {HANG_SECONDS:.0f} s after it should have stopped")
        elif self.failure is None:
            self._verify()
            self.pool.close()

    def __str__(self) -> str:
        if self.kind is None:
            return "no loader: neither torch nor grain is installed"
        told = f"{self.kind}: {self.batch_count:,} batches, {self.kill_count:,} workers killed"
        return told if self.failure is None else f"{told}, FAILED"

    def _run(self) -> None:
        make = _torch if self.kind == "torch" else _grain
        broke = False
        try:
            while not self._stop.is_set() and self.failure is None:
                self.restart_count += broke
                broke = self._epoch(make)
                self._verify()
        except Exception as e:
            self._fail(f"{type(e).__name__}: {e}", traceback.format_exc(limit=-6))

    def _epoch(self, make: Callable[[Samples, arenax.BufferPool], Iterator[Any]]) -> bool:
        """Loads until the end, the stop, or the death of a worker; returns whether one died."""
        strangers = {process.pid for process in multiprocessing.active_children()}
        kills = self.kill_count
        try:
            for batch in make(self._samples, self.pool):
                self._compare(batch)
                if self._stop.is_set():
                    break
                if time.monotonic() >= self._next_kill:
                    self._kill(strangers)
        except RuntimeError:
            # torch and grain say so of a worker that has died.
            if self.kill_count == kills:
                raise
            return True
        return False

    def _kill(self, strangers: set[int | None]) -> None:
        workers = [p for p in multiprocessing.active_children() if p.pid not in strangers]
        if workers:
            self._rng.choice(workers).kill()
            self.kill_count += 1
        self._next_kill = self._moment()

    def _moment(self) -> float:
        return time.monotonic() + self._rng.expovariate(1 / self._kill_seconds)

    def _compare(self, batch: Any) -> None:
        for number, row in zip(np.array(batch["index"]).tolist(), np.array(batch["x0"]), strict=True):
            if (row != self._samples[number]["x0"]).any():
                self._fail(f"sample {number} is wrong")
        self.batch_count += 1

    def _verify(self) -> None:
        gc.collect()
        leased = self.pool.stats().leased_count  # Before check(), which would sweep up what was lost.
        if leased:
            self._fail(f"{leased} slots are still leased though the loader and its batches are gone")
        self.pool.check()

    def _fail(self, what: str, details: str = "") -> None:
        if self.failure is None:
            self.failure = Failure("grow", -1, -1, "the loader", what, details)


def _torch(samples: Samples, pool: arenax.BufferPool) -> Iterator[Any]:
    loader: Any = importlib.import_module("arenax_adapters.torch")
    # A forked worker would have this process's locks, as its threads hold them at that moment.
    return iter(
        loader.DataLoader(
            samples, batch_size=ROWS, shuffle=True, num_workers=WORKERS, multiprocessing_context="spawn", pool=pool
        )
    )


def _grain(samples: Samples, pool: arenax.BufferPool) -> Iterator[Any]:
    grain: Any = importlib.import_module("grain")
    flags: Any = importlib.import_module("absl.flags").FLAGS
    if not flags.is_parsed():
        flags.mark_as_parsed()  # grain starts no worker before.
    adapter: Any = importlib.import_module("arenax_adapters.grain")
    options = grain.MultiprocessingOptions(num_workers=WORKERS)
    return iter(adapter.batch_and_put(grain.MapDataset.source(samples), ROWS, pool=pool, options=options))

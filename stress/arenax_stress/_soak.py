"""A random soak of the real pool, in which every byte that is read back is verified."""

import contextlib
import gc
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from random import Random

import attrs
import numpy as np

import arenax

from ._soak_faults import Faults
from ._soak_leases import add
from ._soak_ledger import Ledger
from ._soak_places import Place, make_places
from ._soak_report import Failure, Report
from ._soak_values import RAGGED, Kind, make_batches, make_kinds, pattern
from ._soak_worker import Worker

MODES = ("grow", "spill", "wait", "raise")
# An operation takes milliseconds, a compile less than a second: a thread that is silent for so long is in a deadlock.
HANG_SECONDS = 60.0
Progress = Callable[[str, float, int], None]
Observe = Callable[[arenax.BufferPool], contextlib.AbstractContextManager[object]]


def soak(
    *,
    seconds: float = 10.0,
    seed: int = 0,
    threads: int = 2,
    classes: int = 6,
    budget: str | int | None = None,
    modes: Sequence[str] = MODES,
    omit: Collection[str] = (),
    operations: int | None = None,
    faults: bool = False,
    progress: Progress | None = None,
    observe: Observe | None = None,
    devices: int | None = None,
) -> Report:
    """Uses pools at random from several threads, one pool for each mode, and verifies all that is read back.

    Which operation comes as number n of a thread, and with what values, depends on the seed, the thread and n alone.
    Ctrl-C ends the soak early.

    Args:
        seconds: How long, in all.
        seed: The seed.
        threads: Threads.
        classes: Kinds of array in play.
        budget: The pools' budget; None for none, and a tight one in the mode ``"grow"``.
        modes: Values of `on_exhausted`, each for an equal share of the time.
        omit: Operations to leave out.
        operations: Operations of each thread in each mode; None for as many as there is time for.
        faults: Whether random phases of random operations fail.
        progress: Called now and then with the mode, the seconds since the start and the operations done.
        observe: Called with the pool of each mode, for a scope that lasts as long as the threads use it.
        devices: So many devices, for every other mode as a sequence and for the others as a mesh, which depends on the
            seed; None for the default device.

    Returns:
        The report; ``exit_status`` says how it went.

    Raises:
        ValueError: Where there are fewer devices.

    Example:
        >>> from arenax_stress._soak import soak
        >>> soak(seconds=60, operations=20, threads=1, modes=["grow"]).exit_status
        0
    """
    kinds = make_kinds(seed, classes)
    limit = None if budget is None else str(budget)
    report = Report(seed, threads, classes, limit, faults, devices, kinds=[str(k) for k in kinds])
    places = make_places(devices)
    start = time.monotonic()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "pool .* has no free slot", RuntimeWarning)
        warnings.filterwarnings("ignore", "an array .* was donated away", RuntimeWarning)
        warnings.filterwarnings("ignore", "a lease of .* was dropped", ResourceWarning)
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        for i, mode in enumerate(modes):
            if report.failures or report.interrupted:
                break
            deadline = start + seconds * (i + 1) / len(modes)
            phase = _Phase(
                report, mode, places[(seed + i) % len(places)], kinds, budget, deadline, operations, omit, observe
            )
            try:
                phase.run(lambda mode, done: progress(mode, time.monotonic() - start, done) if progress else None)
            except KeyboardInterrupt:  # Before its threads began, or after their end.
                report.interrupted = True
    report.seconds = time.monotonic() - start
    return report


@attrs.define
class _Phase:
    """One pool of one mode, from its first slot to its end."""

    report: Report
    on_exhausted: str
    place: Place
    kinds: list[Kind]
    budget: str | int | None
    deadline: float
    operations: int | None
    omit: Collection[str]
    observe: Observe | None = None

    @property
    def mode(self) -> str:
        """What the report calls it."""
        return f"{self.on_exhausted}, {self.place.name}" if self.place.name else self.on_exhausted

    def run(self, progress: Callable[[str, int], None]) -> None:
        """Runs the phase, and adds what it did to the report."""
        report = self.report
        pool, expected = self._make_pool()
        stop = threading.Event()
        try:
            tally = pool.lease((7,), "int32", **self.place.draw(Random(report.seed), "fixed"))
            tally.update(add, np.int32(0))
        except arenax.PoolExhausted:
            tally = None
        ledger = Ledger(pool, self.kinds, make_batches(report.seed, self.kinds), tally, stop, place=self.place)
        if report.faults:
            ledger.faults = Faults(pool)
        omit = {*self.omit}
        if self.place.shardings is not None:
            omit |= {"view", "peek"}  # A NumPy view of an array on a mesh is a copy.
        if Random(f"{report.seed}/{self.mode}/check").random() < 0.5:
            omit.add("check")  # It sweeps up what was lost, and so hides it from the count at the end.
        workers = [Worker(ledger, report.seed, self.mode, i, omit) for i in range(report.threads)]
        threads = [threading.Thread(target=w.work, args=(self.operations,), daemon=True) for w in workers]
        for thread in threads:
            thread.start()
        with contextlib.nullcontext() if self.observe is None else self.observe(pool):
            self._watch(threads, workers, stop, progress)
        hung = any(thread.is_alive() for thread in threads)
        for worker in workers:
            if not hung:  # Else this thread might wait for a lock of theirs.
                worker.finish()
            report.done_count += worker.done_count
            report.refused_count += worker.refused_count
            report.struck_count += worker.struck_count
            report.verified_bytes += worker.verified_bytes
            report.verified_count += worker.verified_count
            if worker.failure is not None:
                report.failures.append(worker.failure)
        report.address_count += sum(len(addresses) for addresses in ledger.seen.values())
        report.move_count += ledger.moves.total()
        if report.failures:
            # What a failed operation still held is not let go in order, and would be one more failure.
            if not hung:
                report.stats[self.mode] = pool.stats()
            return
        try:
            self._end(pool, ledger, expected)
        except Exception as e:
            details = "" if isinstance(e, AssertionError) else traceback.format_exc(limit=-6)
            self._fail("the end", f"{type(e).__name__}: {e}", details)

    def _make_pool(self) -> tuple[arenax.BufferPool, Counter[arenax.SizeClass]]:
        """Returns a pool and the slots that it has for good, for each class; none where it grows."""
        rng = Random(f"{self.report.seed}/{self.mode}/pool")
        spare = rng.randint(1, 2 + 2 * self.report.threads)
        budget = self.budget
        if budget is None and self.on_exhausted == "grow" and rng.random() < 0.8:
            budget = int(sum(c.nbytes for c in {*self._classes()}) * (1 + rng.random() * self.report.threads)) + 4096
        timeout = 0.02 if self.on_exhausted == "wait" else None
        pool = arenax.BufferPool(
            self.place.placement,
            ragged=RAGGED,
            budget=budget,
            on_exhausted=self.on_exhausted,
            timeout=timeout,
            name=f"soak-{self.on_exhausted}",
        )
        reserved = Counter[arenax.SizeClass]()
        if self.on_exhausted != "grow":
            scalar, tally = (self.place.size_class(shape, np.dtype(np.int32), "fixed") for shape in ((), (7,)))
            for size_class in [tally, *self._classes(), *[scalar] * 4]:
                # Beyond the user's budget: the class is refused always.
                with contextlib.suppress(arenax.PoolExhausted):
                    reserved[size_class] += self.place.reserve(pool, size_class, 1 if size_class is tally else spare)
        return pool, reserved

    def _classes(self) -> list[arenax.SizeClass]:
        """Every size class of every kind."""
        return [self.place.size_class(c.shape, c.dtype, kind.group) for kind in self.kinds for c in kind.classes()]

    def _watch(
        self,
        threads: Sequence[threading.Thread],
        workers: Sequence[Worker],
        stop: threading.Event,
        progress: Callable[[str, int], None],
    ) -> None:
        """Waits for the end of the phase; Ctrl-C comes here, in the main thread."""
        try:
            while any(t.is_alive() for t in threads) and time.monotonic() < self.deadline:
                if stop.wait(0.05):
                    break
                progress(self.mode, sum(w.operation for w in workers) + self.report.done_count.total())
        except KeyboardInterrupt:
            self.report.interrupted = True
        stop.set()
        limit = time.monotonic() + HANG_SECONDS
        for i, (thread, worker) in enumerate(zip(threads, workers, strict=True)):
            thread.join(max(limit - time.monotonic(), 0))
            if thread.is_alive():
                frame = sys._current_frames().get(thread.ident or 0)  # pyright: ignore[reportPrivateUsage]
                stack = "".join(traceback.format_stack(frame)[-8:])
                what = f"still in it {HANG_SECONDS:.0f} s after it should have stopped"
                self.report.failures.append(Failure(self.mode, i, worker.operation, worker.name, what, stack))

    def _end(self, pool: arenax.BufferPool, ledger: Ledger, expected: Counter[arenax.SizeClass]) -> None:
        """All has been dropped: verifies that all came back."""
        if (tally := ledger.tally) is not None:
            got = np.array(tally.array)
            if (got != ledger.added).any():
                self._fail("the end", f"{ledger.added} additions by all threads to one lease came to {got}")
            tally.release()
        gc.collect()
        # Before check(), which would sweep up what was lost.
        stats = self.report.stats[self.mode] = pool.stats()
        for size_class, of_class in stats.by_class.items():
            if of_class.leased_count or of_class.leased_bytes or of_class.requested_bytes:
                lost = (
                    f"{of_class.leased_count} slots of {size_class}, {of_class.leased_bytes:,} bytes, are still leased"
                )
                self._fail("the end", f"{lost} though all was dropped")
            # Slots are replaced when they are kept, detached or donated, and leave only by conversion.
            due = expected[size_class] if self.on_exhausted != "grow" else of_class.peak_slot_count
            # And where a new buffer for one could not be made.
            lost = 0 if ledger.faults is None else ledger.faults.struck_count["create"]
            if not due - lost <= of_class.slot_count <= due and not stats.conversion_count:
                self._fail("the end", f"{of_class.slot_count} slots of {size_class} are left of {due}")
        if stats.leased_count or stats.reserved_bytes != stats.idle_bytes:
            self._fail("the end", f"{stats.leased_count} slots are still leased though all was dropped")
        pool.check()
        self._close(pool)

    def _close(self, pool: arenax.BufferPool) -> None:
        """What is on loan when the pool closes stays valid."""
        rng = Random(f"{self.report.seed}/{self.mode}/close")
        value = pattern(np.dtype(np.float32), (64,), rng)
        held = []
        with contextlib.suppress(arenax.PoolExhausted):
            held = [pool.put({**{group: [] for group in RAGGED}, "fixed": [value]})["fixed"][0]]
        pool.close()
        if any(np.array(x).tobytes() != value.tobytes() for x in held):
            self._fail("close", "an array on loan changed when the pool was closed")

    def _fail(self, name: str, what: str, details: str = "") -> None:
        self.report.failures.append(Failure(self.mode, -1, -1, name, what, details))

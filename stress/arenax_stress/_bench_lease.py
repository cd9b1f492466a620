"""`arenax bench lease`: what a checkout costs with few slots and with very many, alone and among threads."""

import contextlib
import threading
from collections.abc import Sequence

import attrs

import arenax
from arenax.testing import FakeDevice

from ._bench_clock import Clock
from ._bench_table import NOISE, Column, Plot, Row, Table, ratio

SHAPE = (1024,)
# Operations of all threads together in one sample.
OPERATIONS = 4000


def checkout(pool: arenax.BufferPool) -> None:
    """Takes a slot and gives it back."""
    pool.lease(SHAPE, "float32", fill=None).release()


def measure_checkouts(clock: Clock, slots: Sequence[int], rounds: int) -> Table:
    """Times ``lease`` and ``release`` with few and with many slots, first all free, then all but one on loan.

    Args:
        clock: Takes the times.
        slots: Numbers of slots; the first is what the others are compared with. They lie on a fake device, and the
            first also on the default device.
        rounds: Rounds of 200 calls.

    Returns:
        The table.
    """
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        pools: dict[str, tuple[int, arenax.BufferPool]] = {}
        for number, placement in [*((n, FakeDevice()) for n in slots), (slots[0], None)]:
            pool = stack.enter_context(arenax.BufferPool(placement, on_exhausted="raise"))
            clock.progress(f"reserving {number:,} slots", 0, 1)
            pool.reserve(arenax.ArraySpec(SHAPE, "float32"), slots=number)
            pools[f"{number} on {pool.landing.name}"] = number, pool
        forms = {name: lambda pool=pool: checkout(pool) for name, (_, pool) in pools.items()}
        for full in (False, True):
            held = [
                [pool.lease(SHAPE, "float32", fill=None) for _ in range(number - 1 if full else 0)]
                for number, pool in pools.values()
            ]
            what = "all but one on loan" if full else "all free"
            timings = clock.measure(forms, rounds=rounds, calls=200, what=what)
            first = next(iter(timings.values())).seconds
            for (name, (number, pool)), on_loan in zip(pools.items(), held, strict=True):
                rows.append(
                    {
                        "device": pool.landing.name,
                        "slot_count": number,
                        "held_count": len(on_loan),
                        "lease_seconds": timings[name].seconds,
                        "lease_over_few_slots": ratio(timings[name].seconds, first),
                        "rounds": timings[name].rounds,
                    }
                )
            for lease in (lease for on_loan in held for lease in on_loan):
                lease.release()
        wrong = [
            f"{stats.creation_count - number} slots were made beyond the {number} on {pool.landing.name}"
            for number, pool in pools.values()
            if (stats := pool.stats()).creation_count != number or stats.leased_count
        ]
    columns = (
        Column("device", "device", "text"),
        Column("slot_count", "slots", "count"),
        Column("held_count", "on loan", "count"),
        Column("lease_seconds", "lease + release", "seconds"),
        Column("lease_over_few_slots", "/ first row", "ratio"),
    )
    notes = [
        "The fake device has no bytes: what is timed is the pool itself.",
        "Rows with all slots free, and rows with all but one on loan, are each compared with their own first row.",
    ]
    title = "One checkout and its return, medians"
    return Table("checkout", title, columns, rows, _checkout_conclusion(rows), notes, None, wrong)


def _checkout_conclusion(rows: Sequence[Row]) -> str:
    fake = [row for row in rows if row["device"].startswith("fake")]
    few, many = min(r["slot_count"] for r in fake), max(r["slot_count"] for r in fake)
    ratios = [r["lease_over_few_slots"] for r in fake if r["slot_count"] == many]
    said = f"With {many:,} slots a checkout takes {min(ratios):.3g} to {max(ratios):.3g}× as long as with {few:,}"
    return f"{said}{'.' if max(ratios) <= NOISE else ': it DEPENDS on the number of slots.'}"


@attrs.define
class Crew:
    """Threads that are there already when the clock starts, and share out `OPERATIONS` checkouts of one class."""

    count: int
    pool: arenax.BufferPool
    errors: list[BaseException] = attrs.field(factory=list)
    barrier: threading.Barrier = attrs.field(init=False)
    threads: list[threading.Thread] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.barrier = threading.Barrier(self.count + 1)
        self.threads = [threading.Thread(target=self._work, daemon=True) for _ in range(self.count)]
        for thread in self.threads:
            thread.start()

    @property
    def operations(self) -> int:
        """Checkouts of one turn."""
        return OPERATIONS // self.count * self.count

    def turn(self) -> None:
        """Lets the threads do their share once, and waits for the last of them."""
        self.barrier.wait()
        self.barrier.wait()
        if self.errors:
            raise self.errors[0]

    def stop(self) -> None:
        """Ends the threads, also after a turn that was interrupted."""
        self.barrier.abort()
        for thread in self.threads:
            thread.join()

    def _work(self) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            while True:
                self.barrier.wait()
                try:
                    for _ in range(OPERATIONS // self.count):
                        checkout(self.pool)
                except BaseException as e:
                    self.errors.append(e)
                self.barrier.wait()


def measure_threads(clock: Clock, counts: Sequence[int], rounds: int) -> Table:
    """Times checkouts of one class by several threads at once.

    Args:
        clock: Takes the times.
        counts: Numbers of threads; the first is what the others are compared with.
        rounds: Rounds of some thousand checkouts.

    Returns:
        The table.
    """
    rows: list[Row] = []
    with arenax.BufferPool(FakeDevice(), on_exhausted="raise") as pool:
        pool.reserve(arenax.ArraySpec(SHAPE, "float32"), slots=max(counts))
        crews = {str(count): Crew(count, pool) for count in counts}
        try:
            timings = clock.measure({n: crew.turn for n, crew in crews.items()}, rounds=rounds, what="threads")
        finally:
            for crew in crews.values():
                crew.stop()
        leased = pool.stats().leased_count
    for name, crew in crews.items():
        seconds = timings[name].seconds / crew.operations
        rows.append(
            {
                "thread_count": crew.count,
                "operation_seconds": seconds,
                "operations_per_second": 1 / seconds,
                "rounds": timings[name].rounds,
            }
        )
    for row in rows:
        row["throughput_over_first"] = ratio(row["operations_per_second"], rows[0]["operations_per_second"])
    columns = (
        Column("thread_count", "threads", "count"),
        Column("operation_seconds", "lease + release", "seconds"),
        Column("operations_per_second", "a second", "count"),
        Column("throughput_over_first", f"/ {counts[0]} thread{'s'[: counts[0] != 1]}", "ratio"),
    )
    last = rows[-1]
    conclusion = (
        f"{last['thread_count']} threads together do {last['throughput_over_first']:.3g}× the checkouts of {counts[0]}."
    )
    plot = Plot(
        "thread_count", "threads", "count", {"operation_seconds": "lease + release"}, "time of all, over checkouts"
    )
    wrong = [f"{leased} slots are still leased after the threads"] if leased else []
    title = "Checkouts of one class by several threads, medians"
    return Table("threads", title, columns, rows, conclusion, (), plot, wrong)

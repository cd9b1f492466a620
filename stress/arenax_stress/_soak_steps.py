"""A long run of small puts and steps, which may not make the process grow."""

import resource
import sys
import time
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

import attrs
import numpy as np

import arenax

from ._soak_places import make_places, parts_of
from ._soak_report import Failure

GROWTH_BYTES = 8 << 20
# Every so often a batch is read back and compared; more often, and the reading would be most of the work.
VERIFY_EVERY = 61
ALIVE = 3
LENGTHS = arenax.SizeClasses.explicit([8, 16, 32])
WIDTH = 16
# The values of one batch; each exact in float32.
TAGS = 100_003
Progress = Callable[[str, float, int], None]


@attrs.define
class Endurance:
    """What a long run did, and how much memory the process had.

    Attributes:
        seed: The seed.
        steps: Puts and steps asked for.
        done_count: Puts and steps done.
        seconds: Seconds that they took.
        verified_count: Arrays read back and compared.
        start_bytes: Resident memory before the first.
        warm_bytes: Resident memory after the warm-up.
        end_bytes: Resident memory at the end.
        stats: The pool's own figures at the end.
        failures: What went wrong.
        interrupted: Whether it was stopped by Ctrl-C.
    """

    seed: int
    steps: int
    done_count: int = 0
    seconds: float = 0.0
    verified_count: int = 0
    start_bytes: int = 0
    warm_bytes: int = 0
    end_bytes: int = 0
    stats: arenax.Stats | None = None
    failures: list[Failure] = attrs.field(factory=list)
    interrupted: bool = False

    @property
    def growth_bytes(self) -> int:
        """What the process grew by in the steady part."""
        return self.end_bytes - self.warm_bytes

    @property
    def exit_status(self) -> int:
        """1 on a failure, 130 where it was interrupted, else 0."""
        return 1 if self.failures else 130 if self.interrupted else 0

    def as_dict(self) -> dict[str, Any]:
        """Returns what `json.dump` takes."""
        result = attrs.asdict(self, filter=attrs.filters.exclude("stats"))
        return result | {"growth_bytes": self.growth_bytes, "exit_status": self.exit_status}

    def show(self, console: Any) -> None:
        """Prints the figures and failures to a `rich` console."""
        from rich.table import Table
        from rich.text import Text

        table = Table("resident memory", title=f"seed {self.seed}, {self.done_count:,} steps, {self.seconds:.1f} s")
        table.add_column("KiB", justify="right")
        for name, nbytes in (
            ("at the start", self.start_bytes),
            ("after the warm-up", self.warm_bytes),
            ("at the end", self.end_bytes),
            ("growth since the warm-up", self.growth_bytes),
        ):
            table.add_row(name, f"{nbytes // 1024:,}")
        console.print(table)
        if self.stats is not None:
            console.print(Text(str(self.stats)))
        console.print(Text(f"{self.verified_count:,} arrays read back and compared, one batch in {VERIFY_EVERY}"))
        for failure in self.failures:
            console.print(Text(f"FAILED: seed {self.seed}, {failure}", style="bold red"))
        if self.interrupted:
            console.print(Text("Interrupted: this is what was done until then.", style="yellow"))
        if not self.failures:
            console.print(Text("No wrong byte, no lost slot, no growth.", style="green"))


def endure(steps: int, seed: int = 0, progress: Progress | None = None, devices: int | None = None) -> Endurance:
    """Lands small batches again and again, half of them in steps, one in four with a ragged leaf.

    The last few batches stay alive. The first tenth of the steps, at most 50,000, may allocate; after it the process
    may grow by 8 MiB. Nothing that is kept grows with the steps: the host arrays and what they hold are made before.

    Args:
        steps: Puts and steps in all.
        seed: The seed.
        progress: Called now and then with a text, the seconds since the start and the steps done.
        devices: Devices of a mesh over which the batches are cut; None for the default device alone.

    Returns:
        The report; ``exit_status`` says how it went.

    Raises:
        ValueError: Where there are fewer devices.

    Example:
        >>> from arenax_stress._soak_steps import endure
        >>> endure(200).exit_status
        0
    """
    report = Endurance(seed, steps)
    rng = Random(f"{seed}/steps")
    ragged = {"rows": arenax.Ragged(0, LENGTHS, -1), "fixed": None}
    shardings = make_places(devices)[-1].shardings
    placement = None if shardings is None else {group: shardings[group] for group in ragged}
    pool = arenax.BufferPool(placement, ragged=ragged, name="soak-steps")
    report.start_bytes = report.warm_bytes = report.end_bytes = resident_bytes()
    rows, fixed = np.zeros((LENGTHS.boundaries[-1], WIDTH), np.int32), np.zeros(WIDTH, np.float32)
    # A prime number of them, so that each comes in steps and out of them, and is verified at some time.
    lengths = [rng.randint(1, LENGTHS.boundaries[-1]) if rng.random() < 0.25 else None for _ in range(97)]
    batches = [{"rows": [] if n is None else [rows[:n]], "fixed": [fixed]} for n in lengths]
    alive: deque[tuple[int, Any]] = deque()
    warm, start = min(max(steps // 10, 1), 50_000), time.monotonic()
    try:
        for n in range(steps):
            kind = n % len(batches)
            rows[...] = fixed[...] = n % TAGS
            if n % 2:
                with pool.step() as step:
                    arrays = step.put(batches[kind])
                    if n % VERIFY_EVERY == 0:
                        _verify(report, n, lengths[kind], arrays)
            else:
                alive.append((n, pool.put(batches[kind])))
                if len(alive) > ALIVE:
                    born, arrays = alive.popleft()
                    if born % VERIFY_EVERY == 0:
                        _verify(report, born, lengths[born % len(batches)], arrays)
            arrays = None
            report.done_count += 1
            if n + 1 == warm:
                report.warm_bytes = resident_bytes()
            if n % 1024 == 0 and progress:
                progress("steps", time.monotonic() - start, n)
            if report.failures:
                break
        alive.clear()
        report.end_bytes = resident_bytes()
        pool.check()
        report.stats = pool.stats()
    except KeyboardInterrupt:
        report.interrupted, report.end_bytes = True, resident_bytes()
    except Exception as e:
        report.failures.append(Failure("grow", 0, report.done_count, "step", f"{type(e).__name__}: {e}"))
    report.seconds = time.monotonic() - start
    if report.stats is not None and report.stats.leased_count:
        what = f"{report.stats.leased_count} slots are still leased though all was dropped"
        report.failures.append(Failure("grow", -1, -1, "the end", what))
    if report.growth_bytes > GROWTH_BYTES and not report.failures:
        what = f"the process grew by {report.growth_bytes // 1024:,} KiB in {steps - warm:,} steps"
        report.failures.append(Failure("grow", -1, -1, "the end", what))
    return report


def _verify(report: Endurance, n: int, length: int | None, arrays: Any) -> None:
    expected = n % TAGS
    for array in (*arrays["rows"], *arrays["fixed"]):
        due = np.full(array.shape, expected)
        if due.ndim == 2:
            due[length:] = -1
        report.verified_count += 1
        for where, got in parts_of(array):
            if (got == due[where]).all():
                continue
            report.failures.append(Failure("grow", 0, n, "step", f"{got} does not hold what was put, {expected}"))


def resident_bytes() -> int:
    """Resident memory of this process; the most that it ever was where the system does not tell what it is now."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

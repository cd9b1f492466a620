"""Times rival forms in turn in one run, so that whatever disturbs one of them disturbs them all."""

import contextlib
import resource
import statistics
import time
from collections.abc import Callable, Generator, Mapping

import attrs

# A call shorter than the clock's own noise is timed in blocks of so many.
BLOCK = 20
BLOCK_BYTES = 64 * 2**10
LARGE_BYTES = 8 * 2**20

WARM_UP = 2
MIN_ROUNDS = 3

Forms = Mapping[str, Callable[[], object]]


def minor_faults() -> int:
    """Minor page faults of this process so far: pages of memory that it touched for the first time."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def silent(what: str, done: int, total: int) -> None:
    """The progress that nobody watches."""


@attrs.frozen
class Timing:
    """What one form took.

    Attributes:
        seconds: Median seconds of a call.
        faults: Mean minor page faults of a call.
        rounds: Samples that were taken.
        calls: Calls in each sample.
    """

    seconds: float
    faults: float
    rounds: int
    calls: int


def calls_for(nbytes: int) -> int:
    """Calls in a block, for a form that brings so many bytes."""
    return BLOCK if nbytes <= BLOCK_BYTES else 1


def rounds_for(nbytes: int, rounds: int | None, quick: bool = False) -> int:
    """Rounds for forms that bring so many bytes: those that were asked for, or fewer where each takes long."""
    if rounds is not None:
        return rounds
    many, few = (10, 3) if quick else (60, 11)
    return many if nbytes <= LARGE_BYTES else few


@attrs.define
class Clock:
    """Takes the times, and keeps to a budget of seconds.

    Attributes:
        deadline: When to stop taking samples, in seconds of `timer`; None for never.
        timer: The clock.
        faults: The counter of page faults.
        progress: Called after each round with what is measured, the rounds done and those planned.
    """

    deadline: float | None = None
    timer: Callable[[], float] = time.perf_counter
    faults: Callable[[], int] = minor_faults
    progress: Callable[[str, int, int], None] = silent

    @property
    def over(self) -> bool:
        """Whether the budget is spent."""
        return self.deadline is not None and self.timer() >= self.deadline

    @contextlib.contextmanager
    def share(self, fraction: float) -> Generator[None]:
        """A scope that may use this fraction of what is left of the budget."""
        whole = self.deadline
        if whole is not None:
            now = self.timer()
            self.deadline = now + max(whole - now, 0) * fraction
        try:
            yield
        finally:
            self.deadline = whole

    def measure(
        self, forms: Forms, *, rounds: int, calls: int | Mapping[str, int] = 1, what: str = ""
    ) -> dict[str, Timing]:
        """Times the forms in turn, round after round, after a few rounds that do not count.

        Every second round goes through them backwards, so that none always comes after the same other.

        Args:
            forms: What to time, by name.
            rounds: Samples of each form; fewer where the budget is spent, but not below three.
            calls: Calls in a sample: a number, or one for each form.
            what: What the progress says is measured.

        Returns:
            The timing of each form, in the order of `forms`.

        Example:
            >>> from arenax_stress._bench_clock import Clock
            >>> Clock().measure({"nothing": lambda: None}, rounds=5, calls=10)["nothing"].rounds
            5
        """
        block = {name: calls if isinstance(calls, int) else calls[name] for name in forms}
        took: dict[str, list[float]] = {name: [] for name in forms}
        faults = dict.fromkeys(forms, 0)
        order = list(forms)
        for i in range(WARM_UP + rounds):
            if i >= WARM_UP + MIN_ROUNDS and self.over:
                break
            for name in order if i % 2 == 0 else reversed(order):
                form, n = forms[name], range(block[name])
                faults_before, start = self.faults(), self.timer()
                for _ in n:
                    form()
                seconds, new_faults = self.timer() - start, self.faults() - faults_before
                if i >= WARM_UP:
                    took[name].append(seconds / block[name])
                    faults[name] += new_faults
            self.progress(what, max(i + 1 - WARM_UP, 0), rounds)
        return {
            name: Timing(
                statistics.median(samples), faults[name] / block[name] / len(samples), len(samples), block[name]
            )
            for name, samples in took.items()
        }

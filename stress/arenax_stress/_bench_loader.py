"""`arenax bench loader`: torch's DataLoader and grain as they are used today, and pooled, on the same samples."""

from collections.abc import Mapping, Sequence

import attrs
import jax
import numpy as np

from ._bench_clock import Clock
from ._bench_forms import default_device
from ._bench_loader_forms import Case, described, loaders_of
from ._bench_loader_tables import cost_rows, cost_table, rate_row, rate_tables
from ._bench_loader_turns import Plan, Runner, measure_turns
from ._bench_table import Row, Table


@attrs.frozen
class Options:
    """What `arenax bench loader` is asked for.

    Attributes:
        cases: What to load.
        libraries: Whose loaders.
        absent: Lines about those that are not installed.
        rounds: Turns of each loader.
        batches: Timed batches in a turn, of a few MiB.
        workers: Workers of each loader.
        quick: Whether to leave out what a first look needs least: ``landing="adopt"``, and the step of one library.
    """

    cases: Sequence[Case]
    libraries: Sequence[str]
    absent: Sequence[str]
    rounds: int
    batches: int
    workers: int
    quick: bool = False


def measure_loader(clock: Clock, options: Options) -> list[Table]:
    """Times every loader with every case, and compares what they gave, batch by batch.

    Args:
        clock: Keeps to its budget.
        options: What to do.

    Returns:
        The tables of samples a second of each library, and one of all other figures.
    """
    adopt = not options.quick and default_device().platform == "cpu"
    loaders = {library: loaders_of(library, adopt) for library in options.libraries}
    notes = [*(described(library, options.workers) for library in loaders), *options.absent]
    jax.block_until_ready(jax.device_put(np.zeros(1)))  # What JAX needs for its first array is no loader's.
    rates: dict[str, list[Row]] = {library: [] for library in loaders}
    costs: list[Row] = []
    wrong: list[str] = []
    left_out: list[str] = []
    turns = [
        (case, library)
        for case in options.cases
        for library in (options.libraries[:1] if options.quick and case.step_seconds else options.libraries)
    ]
    for done, (case, library) in enumerate(turns):
        where = f"{case.name}, {library}"
        if costs and clock.over:
            left_out.append(where)
            continue
        plan = Plan(options.rounds, max(round(options.batches * case.scale), 1), options.workers, library)
        with clock.share(1 / (len(turns) - done)):
            runners = measure_turns(clock, loaders[library], case, plan)
        wrong += differences(runners, where)
        found = cost_rows(case, library, plan, runners)
        costs += found
        rates[library].append(rate_row(case, loaders[library], runners, found))
    if left_out:
        notes.append(f"Out of time before {'; '.join(left_out)}.")
    tables = [table for library, rows in rates.items() for table in rate_tables(library, loaders[library], rows)]
    return [*tables, cost_table(costs, notes, wrong)]


def differences(runners: Mapping[str, Runner], where: str) -> list[str]:
    """A line for each loader whose batches are not today's, in today's order.

    Args:
        runners: The loaders, by name; the first is today's.
        where: Names the case and the library.
    """
    today, *others = runners.items()
    return [
        f"{name} gave other batches than {today[0]} at {where}"
        for name, runner in others
        if runner.sums != today[1].sums
    ]

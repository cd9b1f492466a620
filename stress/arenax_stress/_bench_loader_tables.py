"""The rows and tables of `arenax bench loader`: what is worked out of the turns, and what is said of it."""

import statistics
from collections.abc import Mapping, Sequence

from ._bench_loader_cost import SHARED_MEMORY
from ._bench_loader_forms import ROWS, Case, Loader
from ._bench_loader_turns import Plan, Runner
from ._bench_report import LOOKS
from ._bench_table import Column, Plot, Row, Table, factor_text, time_text, verdict

LOOKS.update({"today": LOOKS["device_put"], "numpy_collate": LOOKS["jnp.array"], "adopt": LOOKS["step.put"]})

COSTS = (
    Column("name", "", "text"),
    Column("samples_per_second", "samples\n/s", "count"),
    Column("over_default", "over\ndefault", "ratio"),
    Column("parent_faults", "faults,\nparent", "count"),
    Column("workers_faults", "faults,\nworkers", "count"),
    Column("parent_cpu_seconds", "CPU,\nparent", "seconds"),
    Column("workers_cpu_seconds", "CPU,\nworkers", "seconds"),
    Column("parent_resident_bytes", "memory,\nparent", "bytes"),
    Column("workers_resident_bytes", "memory,\nworkers", "bytes"),
    Column("descriptor_count", "descrip-\ntors", "count"),
    Column("shared_files", "shared\nfiles", "count"),
)


def cost_rows(case: Case, library: str, plan: Plan, runners: Mapping[str, Runner]) -> list[Row]:
    """A row of every figure for each loader of a case.

    Args:
        case: What was loaded.
        library: Whose loaders.
        plan: How much.
        runners: The loaders, by name; the first is today's.
    """
    today = next(iter(runners.values()))
    return [
        {
            "name": f"{case.name}, {library} {name}",
            "case": case.name,
            "library": library,
            "loader": name,
            "batch_bytes": case.batch_bytes,
            "batch_samples": ROWS,
            "step_seconds": case.step_seconds,
            "rounds": len(runner.turns),
            "batches": plan.batches,
            "samples_per_second": ROWS / statistics.median(turn.seconds for turn in runner.turns),
            "over_default": gain(runner, today),
            **_costs(runner, plan.batches),
            "parent_resident_bytes": runner.resident_bytes,
            "workers_resident_bytes": runner.workers_resident_bytes,
            "descriptor_count": runner.descriptors,
            "checksums": len(runner.sums),
        }
        for name, runner in runners.items()
    ]


def _costs(runner: Runner, batches: int) -> Row:
    """What a batch took, on average over the turns; None where a turn does not tell."""

    def a_batch(figures: Sequence[float | None]) -> float | None:
        known = [x for x in figures if x is not None]
        return sum(known) / len(known) / batches if len(known) == len(figures) else None

    parents = [turn.parent for turn in runner.turns]
    workers = [turn.workers for turn in runner.turns]
    return {
        "parent_faults": a_batch([usage.faults for usage in parents]),
        "workers_faults": a_batch([usage and usage.faults for usage in workers]),
        "parent_cpu_seconds": a_batch([usage.cpu_seconds for usage in parents]),
        "workers_cpu_seconds": a_batch([usage and usage.cpu_seconds for usage in workers]),
        "shared_files": a_batch([turn.shared_files for turn in runner.turns]),
    }


def gain(runner: Runner, rival: Runner) -> float:
    """The rival's time over this one's: the median of the rounds' own ratios, since what disturbs one disturbs both."""
    return statistics.median(old.seconds / new.seconds for new, old in zip(runner.turns, rival.turns, strict=True))


def rate_row(case: Case, loaders: Mapping[str, Loader], runners: Mapping[str, Runner], costs: Sequence[Row]) -> Row:
    """A row of the samples a second of all loaders, and of what the pooled ones gain over each of today's.

    Args:
        case: What was loaded.
        loaders: The loaders, by name.
        runners: The same, with their turns.
        costs: What `cost_rows` returned.
    """
    row: Row = {
        "case": case.name,
        "plain": case.plain,
        "batch_bytes": case.batch_bytes,
        "batch_samples": ROWS,
        "step_seconds": case.step_seconds,
    }
    for name, cost in zip(loaders, costs, strict=True):
        row["rounds"] = cost["rounds"]
        row[f"{name}_samples_per_second"] = cost["samples_per_second"]
        row[f"{name}_seconds"] = ROWS / cost["samples_per_second"]
        if loaders[name].pooled:
            for rival in (rival for rival, loader in loaders.items() if not loader.pooled):
                row[f"{name}_over_{rival}"] = gain(runners[name], runners[rival])
    return row


def rate_tables(library: str, loaders: Mapping[str, Loader], rows: Sequence[Row]) -> list[Table]:
    """The tables of a library's samples a second: batches that differ in their size alone, and other kinds.

    Args:
        library: Whose loaders.
        loaders: The loaders, by name.
        rows: What `rate_row` returned for each case.
    """
    plot = Plot(
        "batch_bytes",
        "size of the batch",
        "bytes",
        {f"{name}_seconds": loader.label for name, loader in loaders.items()},
        "time of a batch",
    )
    plain = [row for row in rows if row["plain"]]
    others = [row for row in rows if not row["plain"]]
    tables = [
        _rate_table(library, f"{library}: batches of one array, by their size", loaders, plain, plot),
        _rate_table(f"{library}_kinds", f"{library}: other batches", loaders, others, None),
    ]
    return [table for table in tables if table.rows]


def _rate_table(name: str, title: str, loaders: Mapping[str, Loader], rows: Sequence[Row], plot: Plot | None) -> Table:
    today = {key: loader.label for key, loader in loaders.items() if not loader.pooled}
    pooled = {key: loader.label for key, loader in loaders.items() if loader.pooled}
    columns = [
        Column("case", "batch", "text"),
        *(Column(f"{key}_samples_per_second", f"{x.label},\nsamples/s", "count") for key, x in loaders.items()),
        *(
            Column(f"{key}_over_{rival}", f"{label}/\n{over}", "ratio")
            for key, label in pooled.items()
            for rival, over in today.items()
        ),
    ]
    said = [
        verdict(label, over, rows, f"{key}_over_{rival}", lambda row: row["case"])
        for key, label in pooled.items()
        for rival, over in today.items()
    ]
    said += [
        f"Where the consumer is busy for {time_text(row['step_seconds'])} with each batch, the pool is worth "
        f"{factor_text(row['arenax_over_default'])}×: a step hides what the loader does in the meantime."
        for row in rows
        if row["step_seconds"]
    ]
    return Table(name, title, columns, rows, "\n".join(said), (), plot)


def cost_table(rows: Sequence[Row], notes: Sequence[str], wrong: Sequence[str]) -> Table:
    """The table of all other figures.

    Args:
        rows: What `cost_rows` returned for each case and library.
        notes: What a reader must know to judge all tables.
        wrong: What was found not to be right.
    """
    explained = [
        "Rates are medians, and ratios are paired by round.",
        "Faults, CPU and shared files: a batch's share of what the timed batches took.",
        "Memory, parent: by how much it grew at most while the loader's first batches came. Descriptors: likewise.",
        "Memory, workers: all that is resident, shared pages counted in each.",
        f"Shared files: created in {SHARED_MEMORY}, by any process, as inotify tells.",
        "A dash: the system does not tell.",
    ]
    checked = sum(row["checksums"] for row in rows)
    said = "DIFFERENT from today's." if wrong else "each loader's are today's, in today's order."
    title = "What a batch costs beside time"
    return Table(
        "costs", title, COSTS, rows, f"Checksums of {checked:,} batches: {said}", [*explained, *notes], None, wrong
    )

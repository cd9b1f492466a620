"""The outcome of a soak, and how it is shown."""

from collections import Counter
from typing import Any

import attrs

import arenax


@attrs.frozen
class Failure:
    """One thing that must not happen, and where, so that it can be replayed.

    Attributes:
        mode: The pool's `on_exhausted`.
        thread: Number of the thread, or -1 for the end of the phase.
        operation: Number of the operation in its thread, or -1.
        name: What the operation was.
        what: What was wrong.
        details: A traceback, or an empty text.
    """

    mode: str
    thread: int
    operation: int
    name: str
    what: str
    details: str = ""

    def __str__(self) -> str:
        where = f"thread {self.thread}, operation {self.operation} ({self.name})" if self.thread >= 0 else self.name
        return f'on_exhausted="{self.mode}", {where}: {self.what}'


@attrs.define
class Report:
    """What a soak did and found.

    Attributes:
        seed: The seed.
        threads: Threads that worked.
        classes: Kinds of array in play.
        budget: The budget asked for.
        faults: Whether operations failed on purpose.
        devices: Devices that the pools lay on, as a sequence and as a mesh; None for the default device.
        seconds: Seconds that it took.
        kinds: Texts of the kinds of array.
        done_count: Operations by name.
        refused_count: Operations that the pool refused by design, by name.
        struck_count: Operations that failed on purpose, by name.
        verified_bytes: Bytes read back and compared.
        verified_count: Arrays read back and compared.
        address_count: Distinct addresses of slots seen.
        move_count: Slots seen to have moved, each covered by a copy that the pool counted.
        stats: The pool's own figures at the end of each phase, by mode.
        failures: What went wrong.
        interrupted: Whether it was stopped by Ctrl-C.
    """

    seed: int
    threads: int
    classes: int
    budget: str | None = None
    faults: bool = False
    devices: int | None = None
    seconds: float = 0.0
    kinds: list[str] = attrs.field(factory=list)
    done_count: Counter[str] = attrs.field(factory=Counter)
    refused_count: Counter[str] = attrs.field(factory=Counter)
    struck_count: Counter[str] = attrs.field(factory=Counter)
    verified_bytes: int = 0
    verified_count: int = 0
    address_count: int = 0
    move_count: int = 0
    stats: dict[str, arenax.Stats] = attrs.field(factory=dict)
    failures: list[Failure] = attrs.field(factory=list)
    interrupted: bool = False

    @property
    def exit_status(self) -> int:
        """1 on a failure, 130 where it was interrupted, else 0."""
        return 1 if self.failures else 130 if self.interrupted else 0

    @property
    def replay(self) -> str:
        """The command that runs the same operations again."""
        budget = f" --budget {self.budget!r}" if self.budget else ""
        faults = " --faults" if self.faults else ""
        devices = f" --devices {self.devices}" if self.devices else ""
        what = f"--seed {self.seed} --threads {self.threads} --classes {self.classes}"
        return f"arenax stress {what}{budget}{faults}{devices}"

    def as_dict(self) -> dict[str, Any]:
        """Returns what `json.dump` takes."""
        result = attrs.asdict(self, recurse=False) | {"exit_status": self.exit_status, "replay": self.replay}
        result["failures"] = [attrs.asdict(failure) for failure in self.failures]
        result["stats"] = {mode: _figures(stats) for mode, stats in self.stats.items()}
        return result

    def show(self, console: Any) -> None:
        """Prints tables and failures to a `rich` console."""
        from rich.table import Table
        from rich.text import Text

        table = Table("operation", title=f"seed {self.seed}, {self.threads} threads, {self.seconds:.1f} s")
        table.add_column("done", justify="right")
        table.add_column("refused", justify="right")
        columns = [self.done_count, self.refused_count]
        if self.faults:
            table.add_column("failed on purpose", justify="right")
            columns.append(self.struck_count)
        for name in sorted({name for column in columns for name in column}):
            table.add_row(name, *(f"{column[name]:,}" for column in columns))
        table.add_section()
        table.add_row("all", *(f"{column.total():,}" for column in columns))
        console.print(table)
        table = Table("pool", title="the pool's own figures, by on_exhausted")
        for mode in self.stats:
            table.add_column(mode, justify="right")
        figures = [_figures(stats) for stats in self.stats.values()]
        for name in figures[0] if figures else ():
            table.add_row(name, *("none" if f[name] is None else f"{f[name]:,}" for f in figures))
        console.print(table)
        console.print(
            Text(
                f"{self.verified_count:,} arrays with {self.verified_bytes:,} bytes read back and compared; "
                f"{self.address_count:,} addresses seen, {self.move_count:,} moves, each a copy that the pool counted"
            )
        )
        for failure in self.failures:
            console.print(Text(f"FAILED: seed {self.seed}, {failure}", style="bold red"))
            if failure.details:
                console.print(Text(failure.details.rstrip(), style="dim"))
        if self.interrupted:
            console.print(Text("Interrupted: this is what was done until then.", style="yellow"))
        if self.failures:
            console.print(Text(f"To run the same operations again: {self.replay}"))
        else:
            console.print(Text("No wrong byte, no lost slot, no moved address.", style="green"))


def _figures(stats: arenax.Stats) -> dict[str, int | None]:
    """The plain integers of a pool's statistics, and the budget."""
    values = attrs.asdict(stats, recurse=False)
    return {name: value for name, value in values.items() if isinstance(value, int) or name == "budget_bytes"}

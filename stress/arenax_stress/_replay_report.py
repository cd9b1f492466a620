"""How `arenax replay` shows what it found: a column for each allocator."""

import statistics
from typing import Any

import rich.box
import rich.console
import rich.table

from ._bench_report import heading
from ._bench_table import factor_text, size_text, time_text
from ._live_replay import Replayed

# Each real allocator, and the simulator whose prediction stands beside it.
SIMULATORS = {"jax": "bfc", "pool": "pool"}
SHOWN_STATS = ("bytes_limit", "peak_bytes_in_use", "peak_pool_bytes", "largest_free_block_bytes")
SHOWN_FAILURES = 3


def show(where: rich.console.Console, name: str, buffers: int, runs: list[Replayed], found: dict[str, Any]) -> None:
    """Prints the figures.

    Args:
        where: Where to print.
        name: The trace's.
        buffers: How many it has.
        runs: What each allocator did.
        found: The environment.
    """
    where.print(heading(found), markup=False)
    where.print(f"{name!r}: {buffers:,} buffers, as real arrays\n", markup=False)
    where.print(_table(runs))
    for note in _notes(runs):
        where.print(note, style="dim", markup=False, soft_wrap=True)
    for r in runs:
        for f in r.failures[:SHOWN_FAILURES]:
            what = f"{r.allocator}: event {f.event:,}, buffer {f.buffer:,} of {f.size:,} bytes: {f.reason}"
            where.print(what, markup=False, soft_wrap=True)


def _table(runs: list[Replayed]) -> rich.table.Table:
    grid = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=(0, 2, 0, 0), show_edge=False)
    grid.add_column("")
    for r in runs:
        grid.add_column(r.allocator, justify="right")
    rows = [_rows(r) for r in runs]
    for key in {key: None for row in rows for key in row}:
        if any(row.get(key) is not None for row in rows):
            grid.add_row(key, *("–" if row.get(key) is None else row[key] for row in rows))
    return grid


def _rows(r: Replayed) -> dict[str, str | None]:
    seconds = sum(r.pass_seconds)
    later = r.pass_seconds[1:]
    found = {
        "events": f"{r.event_count:,}",
        "first pass": time_text(r.pass_seconds[0]) if r.pass_seconds else None,
        "later passes, median": time_text(statistics.median(later)) if later else None,
        "events a second": f"{r.event_count / seconds:,.0f}" if seconds else None,
        "minor page faults, first pass": f"{r.pass_faults[0]:,}" if r.pass_faults else None,
        "minor page faults, later passes": f"{sum(r.pass_faults[1:]) / len(later):,.0f} each" if later else None,
        "peak of live bytes": size_text(r.peak_bytes),
        "resident memory, start": _size(r.resident_start_bytes),
        "resident memory, peak": _size(r.resident_peak_bytes),
        "  its growth": _size(r.growth_bytes),
        "  over the peak of live bytes": _ratio(r.growth_bytes, r.peak_bytes),
        "reserved at most": _size(r.reserved_bytes),
        "  simulated": f"{size_text(r.simulated_bytes)} ({SIMULATORS[r.allocator]})",
        "compiled before the clock": f"{r.setup_compiles:,}",
        "compiled in the run": f"{r.compiles:,}",
        "failures": f"{len(r.failures):,}",
        "slots made": _count(r.creations),
        "conversions": _count(r.conversions),
        "spills": _count(r.spills),
    }
    for key in SHOWN_STATS:
        for when, stats in (("before", r.device_before), ("after", r.device_after)):
            if stats and key in stats:
                found[f"device's {key}, {when}"] = size_text(stats[key])
    return found


def _notes(runs: list[Replayed]) -> list[str]:
    notes = ["Each buffer is brought by device_put of its bytes, or a write of its whole slot: all of it is resident."]
    if any(r.resident_start_bytes is None for r in runs):
        notes.append("Resident memory is not told on this system.")
    if any(r.device_after is None for r in runs):
        notes.append(
            "This device has no memory_stats, and XLA's BFC is not what places its arrays (on CPU that is malloc): the "
            "simulated figure of jax is what a GPU or TPU would need."
        )
    return notes


def _size(nbytes: int | None) -> str | None:
    return None if nbytes is None else size_text(nbytes)


def _count(n: int | None) -> str | None:
    return None if n is None else f"{n:,}"


def _ratio(over: int | None, under: int) -> str | None:
    return None if over is None or not under else f"{factor_text(over / under)}×"

"""How `arenax bench` shows what it found: tables on the terminal, a file for programs, and a chart."""

import contextlib
import importlib.metadata
import json
import os
import platform
import textwrap
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import jax
import matplotlib.figure
import matplotlib.ticker
import rich.box
import rich.console
import rich.progress
import rich.table

from ._bench_forms import default_device
from ._bench_table import FORMATS, Column, Table

# Okabe and Ito's palette, which the colour-blind tell apart; the markers tell the lines apart without colour. What the
# pool does is blue or green in every chart, and its nearest rival vermilion.
LOOKS = {
    "memcpy": ("#999999", "o"),
    "device_put": ("#D55E00", "s"),
    "not donated": ("#D55E00", "s"),
    "pageable": ("#D55E00", "s"),
    "jnp.array": ("#E69F00", "v"),
    "new_ref": ("#CC79A7", "^"),
    "step.put": ("#009E73", "x"),
    "put, ring": ("#56B4E9", "+"),
}
LOOK = ("#0072B2", "D")

# Where the output goes to a file there is no terminal to be too wide for.
FILE_WIDTH = 130
# Between two columns: one space that the box draws, and one of padding.
GAP = 2


def console() -> rich.console.Console:
    """Where the benchmark prints."""
    where = rich.console.Console(highlight=False)
    if not where.is_terminal and "COLUMNS" not in os.environ:
        where.width = FILE_WIDTH
    return where


@contextlib.contextmanager
def progress(where: rich.console.Console) -> Generator[Callable[[str, int, int], None] | None]:
    """A bar for what is being measured, on a terminal only."""
    if not where.is_terminal:
        yield None
        return
    columns = (
        rich.progress.TextColumn("{task.description:<24}"),
        rich.progress.BarColumn(),
        rich.progress.TextColumn("{task.completed:>5.0f} of {task.total:.0f}"),
        rich.progress.TimeElapsedColumn(),
    )
    # A thread that redraws would take its time from what is being measured: between rounds nothing is.
    with rich.progress.Progress(*columns, console=where, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("", total=1)
        drawn = 0.0

        def update(what: str, done: int, total: int) -> None:
            nonlocal drawn
            if (now := time.monotonic()) > drawn + 0.2:
                drawn = now
                bar.update(task, description=what, completed=done, total=total)
                bar.refresh()

        yield update


def environment() -> dict[str, Any]:
    """What the figures depend on: versions, the device and the host."""
    device = default_device()
    return {
        **{name: importlib.metadata.version(name) for name in ("arenax", "jax", "jaxlib", "numpy")},
        "python": platform.python_version(),
        "platform": device.platform,
        "device": str(device),
        "device_kind": device.device_kind,
        "device_count": jax.local_device_count(),
        "system": platform.platform(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cpu_count": os.cpu_count(),
        "page_bytes": os.sysconf("SC_PAGE_SIZE"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def show(where: rich.console.Console, table: Table) -> None:
    """Prints one table, its notes and its conclusion."""
    where.print(f"\n{table.title}", style="bold", markup=False)
    for columns in fitting(table, where.width):
        grid = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
        for column in columns:
            grid.add_column(column.heading, justify="left" if column.kind == "text" else "right", overflow="fold")
        for row in table.rows:
            grid.add_row(*(column.cell(row) for column in columns))
        where.print(grid)
    for note in table.notes:
        where.print(note, style="dim", markup=False)
    where.print(table.conclusion, markup=False)


def fitting(table: Table, width: int) -> list[list[Column]]:
    """Splits the columns where they are too many for the width; the first, which names the row, comes in each part."""
    if not table.rows:
        return []

    def wide(column: Column) -> int:
        texts = [*column.heading.split("\n"), *(column.cell(row) for row in table.rows)]
        return GAP + max(map(len, texts))

    first, *others = table.columns
    parts = [[first]]
    left = width - wide(first)
    for column in others:
        if (left := left - wide(column)) < 0 and len(parts[-1]) > 1:
            parts.append([first])
            left = width - wide(first) - wide(column)
        parts[-1].append(column)
    return parts


def heading(found: dict[str, Any]) -> str:
    """One line on what the figures were taken with."""
    return (
        f"jax {found['jax']} on {found['device_kind']} ({found['platform']}, {found['device_count']} of it), Python "
        f"{found['python']}, {found['cpu_count']} CPUs{', ' + found['processor'] if found['processor'] else ''}"
    )


def write_json(path: Path, command: str, settings: dict[str, Any], tables: Sequence[Table], seconds: float) -> None:
    """Writes everything that was measured, with what it depends on."""
    everything = {
        "command": command,
        "environment": environment(),
        "settings": settings,
        "tables": {table.name: table.as_dict() for table in tables},
        "seconds": seconds,
    }
    path.write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")


def draw(tables: Sequence[Table], path: Path, subtitle: str) -> None:
    """Draws each table that says how, and writes the picture.

    Args:
        tables: The tables; those without rows or a plot are left out.
        path: The file; its suffix chooses the format.
        subtitle: What the figures were taken with.
    """
    shown = [table for table in tables if table.plot is not None and table.rows]
    figure = matplotlib.figure.Figure(figsize=(9, 1.0 + 4.8 * max(len(shown), 1)), layout="constrained")
    figure.suptitle(subtitle, fontsize="small", color="#555555", x=0.01, ha="left")
    every_axes = figure.subplots(max(len(shown), 1), squeeze=False)[:, 0]
    for axes, table in zip(every_axes, shown, strict=False):
        assert table.plot is not None
        _draw_one(axes, table)
    if not shown:
        every_axes[0].set_axis_off()
        every_axes[0].text(0.5, 0.5, "nothing of this is over a size", ha="center")
    figure.savefig(path, dpi=120)


def _draw_one(axes: Any, table: Table) -> None:
    plot = table.plot
    assert plot is not None
    for key, label in plot.lines.items():
        points = [(row[plot.x], row[key]) for row in table.rows if row.get(key)]
        if points:
            colour, marker = LOOKS.get(label, LOOK)
            axes.plot(*zip(*points, strict=True), marker=marker, color=colour, label=label, markersize=5)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_title("\n".join(textwrap.wrap(table.title, 80)), loc="left", fontsize="medium")
    axes.set_xlabel(f"{plot.x_label} (log scale)")
    axes.set_ylabel(f"{plot.y_label} (log scale)")
    values = sorted({row[plot.x] for row in table.rows})
    axes.xaxis.set_major_locator(matplotlib.ticker.FixedLocator(values))
    axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.xaxis.set_major_formatter(_formatter(plot.x_kind))
    axes.yaxis.set_major_formatter(_formatter(plot.y_kind))
    low, high = axes.get_ylim()
    if high < 10 * low:  # Never less than a decade, or noise would fill the picture.
        middle = (low * high) ** 0.5
        low, high = middle / 10**0.5, middle * 10**0.5
        axes.set_ylim(low, high)
    axes.yaxis.set_minor_locator(matplotlib.ticker.LogLocator(subs=(2.0, 5.0)))
    few = high < 100 * low
    axes.yaxis.set_minor_formatter(_formatter(plot.y_kind) if few else matplotlib.ticker.NullFormatter())
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))


def _formatter(kind: str) -> matplotlib.ticker.FuncFormatter:
    return matplotlib.ticker.FuncFormatter(lambda x, _: FORMATS[kind](x))

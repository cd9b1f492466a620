"""What the demo shows: the progress bar, the table, the words that the figures bear out, and the picture."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib.figure
import matplotlib.ticker
import numpy as np
import rich.console
import rich.progress
import rich.table

from arenax import SizeClasses

from ._demo_run import Run

TITLES = {"exact": "exact shapes", "padded": "padded by hand", "pooled": "pooled"}

# Okabe and Ito's palette, which the colour-blind tell apart; the shapes tell the runs apart without colour.
COLOURS = {"exact": "#D55E00", "padded": "#0072B2", "pooled": "#009E73"}
MARKERS = {"exact": "o", "padded": "s", "pooled": "x"}
# The padded and the pooled run compile the same: the one is drawn wide and light, the other dashed upon it.
LINES: dict[str, dict[str, Any]] = {
    "exact": {"linewidth": 2},
    "padded": {"linewidth": 8, "alpha": 0.4},
    "pooled": {"linewidth": 2, "linestyle": "--"},
}

Row = tuple[str, ...]


def console() -> rich.console.Console:
    """Where the demo prints."""
    return rich.console.Console(highlight=False)


def progress(where: rich.console.Console) -> rich.progress.Progress:
    """A bar for each run."""
    return rich.progress.Progress(
        rich.progress.TextColumn("{task.description:<14}"),
        rich.progress.BarColumn(),
        rich.progress.TextColumn("{task.completed:>5.0f} of {task.total:.0f} steps"),
        rich.progress.TimeElapsedColumn(),
        console=where,
    )


def choice(classes: SizeClasses, lengths: Sequence[int], rows: int) -> str:
    """Says which size classes were fitted to the lengths, and what powers of two would cost in their place.

    Args:
        classes: The fitted ones.
        lengths: The length of each batch.
        rows: Rows of a batch, of a byte a token.
    """
    others = SizeClasses.pow2(64, max(lengths))
    (ours, ours_bytes), (theirs, their_bytes) = (
        (f"{c.padding_overhead(lengths):.1%}", binary(rows * sum(c.boundaries))) for c in (classes, others)
    )
    fitted, count = ", ".join(map(str, classes.boundaries)), len(others.boundaries)
    return (
        f"Size classes, fitted to these lengths: {fitted}. They pad {ours}, and a slot of each takes {ours_bytes}; "
        f"{count} powers of two would pad {theirs} and take {their_bytes}."
    )


def rows(runs: Sequence[Run]) -> list[Row]:
    """The lines of the table: a name, then a cell for each run."""

    def row(name: str, cells: list[str]) -> Row:
        return (name, *cells)

    return [
        row("train steps compiled", [str(sum(r.compiles)) for r in runs]),
        row("other programs compiled", [str(r.setup_compiles + sum(r.other_compiles)) for r in runs]),
        row("seconds", [f"{r.loop_seconds:.1f}" for r in runs]),
        row("  of these, compiling", [f"{r.compile_seconds:.1f}" for r in runs]),
        row("step time, median", [milliseconds(np.median(r.step_seconds)) for r in runs]),
        row("step time, 99th percentile", [milliseconds(np.percentile(r.step_seconds, 99)) for r in runs]),
        row("  bringing the batch, median", [milliseconds(np.median(r.landing_seconds)) for r in runs]),
        row("page faults a step, mean", [mean(r.step_faults) for r in runs]),
        row("  in steps without a compile", [mean(r.steady(r.step_faults)) for r in runs]),
        row("  of these, bringing the batch", [mean(r.steady(r.landing_faults)) for r in runs]),
        row("peak resident memory", [binary(r.peak_bytes) for r in runs]),
        row("fresh device arrays a step", [mean(r.fresh_arrays) for r in runs]),
        row("buffers that batches came in", [str(r.addresses) for r in runs]),
        row("padding", [f"{r.padding:.1%}" for r in runs]),
        row("last loss, nats a byte", [f"{r.losses[-1]:.4f}" for r in runs]),
    ]


def words(runs: Sequence[Run]) -> str:
    """Says what the figures mean, and only what they bear out.

    Args:
        runs: The exact, the padded and the pooled run.
    """
    return " ".join((*_against_exact_shapes(*runs), *_against_padding_by_hand(*runs[1:])))


def _against_exact_shapes(exact: Run, padded: Run, pooled: Run) -> Iterator[str]:
    slow, fast = exact.loop_seconds, pooled.loop_seconds
    yield (
        f"Exact shapes compiled {sum(exact.compiles)} train steps in {len(exact.losses)} steps, the pool "
        f"{sum(pooled.compiles)}: one for each size class that came."
    )
    yield (
        f"So the pooled run was {slow / fast:.1f} times as fast,"
        if slow > fast
        else "Yet the pooled run was no faster,"
    )
    yield (
        f"although {pooled.padding:.0%} of its elements were padding, and {exact.padding:.0%} of the exact run's. The "
        "more often each shape came back, the less the compiler would weigh; with few shapes, exact ones would win."
    )
    if sum(padded.compiles) == sum(pooled.compiles):
        yield (
            "Padding by hand to the same classes saves the same compiles: it took "
            f"{padded.loop_seconds:.1f} s, and pooled {pooled.loop_seconds:.1f} s; the pool promises no speed over it."
        )


def _against_padding_by_hand(padded: Run, pooled: Run) -> Iterator[str]:
    hand, pool, step = (
        float(np.median(seconds)) for seconds in (padded.landing_seconds, pooled.landing_seconds, pooled.step_seconds)
    )
    yield (
        f"Bringing a batch to the device took {milliseconds(hand)} by hand and {milliseconds(pool)} with the pool, of "
        f"a step of {milliseconds(step)} (medians):"
    )
    if abs(hand - pool) < 0.05 * step:
        yield "with batches as small as these, the pool gains no time that one would notice over padding by hand."
    else:
        yield f"the pool {'saves' if pool < hand else 'costs'} {abs(hand - pool) / step:.0%} of a step."
    fresh = sum(pooled.fresh_arrays)
    yield (
        f"What it gives over padding by hand: {fresh or 'no'} device arrays made after the reservation, where by hand "
        f"there were {sum(padded.fresh_arrays)}; batches in {pooled.addresses} buffers known from the start, by hand "
        f"in {padded.addresses} places; and no padding code to write."
    )
    if steady := pooled.steady(pooled.step_faults):
        yield (
            f"Once nothing was compiled, a step cost {mean(steady)} page faults on average; "
            f"{mean(pooled.steady(pooled.landing_faults))} of them came with the batch, "
            f"{mean(padded.steady(padded.landing_faults))} by hand. The others are the train step's own, and no pool "
            "of batches changes them."
        )
    more = pooled.peak_bytes - padded.peak_bytes
    yield (
        f"Nor does the pool promise less memory: the pooled run's peak lay {binary(abs(more))} "
        f"{'above' if more > 0 else 'below'} the hand-padded one's, where all slots together take "
        f"{binary(pooled.pool['peak_reserved_bytes'])}."
    )
    if padded.losses == pooled.losses:
        yield "The losses of these two runs are the same, bit for bit, in every step."


def show(where: rich.console.Console, table_rows: Sequence[Row], pool: str, text: str) -> None:
    """Prints the table, the pool's statistics and the words."""
    table = rich.table.Table(title="The same training, three ways to bring the batches", title_justify="left")
    table.add_column("")
    for title in TITLES.values():
        table.add_column(title, justify="right")
    for cells in table_rows:
        table.add_row(*cells)
    where.print()
    where.print(table)
    where.print("\nThe pool's own statistics, after the last step", style="italic")
    where.print(pool, soft_wrap=True, markup=False)
    where.print()
    where.print(text, markup=False)


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draws step times and cumulative compiles over the steps, and writes the picture.

    Args:
        runs: The exact, the padded and the pooled run.
        path: The PNG to write.
    """
    figure = matplotlib.figure.Figure(figsize=(10, 8), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True)
    steps = np.arange(1, len(runs[0].losses) + 1)
    for run in runs:
        look: dict[str, Any] = {"color": COLOURS[run.kind], "label": TITLES[run.kind]}
        upper.plot(steps, np.array(run.step_seconds) * 1e3, MARKERS[run.kind], markersize=5, alpha=0.75, **look)
        lower.plot(steps, np.cumsum(run.compiles), **LINES[run.kind], **look)
    exact, _, pooled = runs
    medians = [milliseconds(np.median(r.step_seconds)) for r in (exact, pooled)]
    upper.set_title(f"A step takes {medians[0]} with exact shapes and {medians[1]} with the pool (medians)", loc="left")
    upper.set_ylabel("step time, ms (log scale)")
    upper.set_yscale("log")
    upper.yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,g}"))
    compiles = [sum(r.compiles) for r in (exact, pooled)]
    lower.set_title(f"Exact shapes compile {compiles[0]} train steps, size classes {compiles[1]}", loc="left")
    lower.set_ylabel("train steps compiled so far")
    lower.set_xlabel("step")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=120)


def mean(figures: Sequence[float]) -> str:
    """Returns the mean of counts, to a hundredth where it is small; a dash where there are none."""
    if not figures:
        return "–"
    value = sum(figures) / len(figures)
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def milliseconds(seconds: float | np.floating) -> str:
    """Returns a time in milliseconds to three digits."""
    return f"{float(f'{seconds * 1e3:.3g}'):,g} ms"


def binary(n: float) -> str:
    """Returns a number of bytes in MiB, or in KiB below one of them."""
    return f"{n / 2**20:,.0f} MiB" if n >= 2**20 else f"{n / 2**10:,.0f} KiB"

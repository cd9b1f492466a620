"""`arenax bench fit`: how long the exact size classes of many lengths take, and what other choices pad."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from arenax import SizeClasses

from ._bench_clock import Clock
from ._bench_table import Column, Plot, Row, Table
from ._fit import rivals

Lengths = np.ndarray[Any, np.dtype[np.int64]]
# Distinct lengths of which every split is tried, to compare with.
TRIED = 300
COLUMNS = (
    Column("lengths", "lengths", "text"),
    Column("distinct", "distinct", "count"),
    Column("unique_seconds", "np.unique", "seconds"),
    Column("fit_seconds", "fit", "seconds"),
    Column("fitted_padding", "padding,\nfitted", "share"),
    Column("quantiles_padding", "\nquantiles", "share"),
    Column("powers_of_two_padding", "powers\nof two", "share"),
)
PLOT = Plot("distinct", "distinct lengths", "count", {"fit_seconds": "fit", "unique_seconds": "np.unique"})


def _tokens(rng: np.random.Generator, count: int) -> Lengths:
    lengths = np.minimum(rng.lognormal(5.5, 0.9, count).astype(np.int64) + 1, 16_640)
    lengths[0] = 16_640
    return lengths


DRAWS: dict[str, Callable[[np.random.Generator, int], Lengths]] = {
    "images, up to 317": lambda rng, count: rng.integers(32, 318, count),
    "tokens, lognormal": _tokens,
    "uniform up to 65,536": lambda rng, count: rng.integers(1, 65_537, count),
}


def measure_fit(clock: Clock, count: int, classes: int, rounds: int) -> Table:
    """Times the fit of so many lengths from each distribution, and compares it with the plain program.

    Args:
        clock: Takes the times.
        count: How many lengths.
        classes: The most size classes.
        rounds: Samples of each.

    Returns:
        The table.
    """
    rows: list[Row] = []
    wrong: list[str] = []
    for name, draw in DRAWS.items():
        lengths = draw(np.random.default_rng(0), count)
        forms = {
            "unique": lambda lengths=lengths: np.unique(lengths, return_counts=True),
            "fit": lambda lengths=lengths: SizeClasses.fit(lengths, classes),
        }
        timings = clock.measure(forms, rounds=rounds, what=name)
        values, counts = np.unique(lengths, return_counts=True)
        histogram = dict(zip(values.tolist(), counts.tolist(), strict=True))
        row: Row = {"lengths": name, "count": count, "distinct": len(values), "rounds": timings["fit"].rounds}
        row |= {f"{form}_seconds": timing.seconds for form, timing in timings.items()}
        for choice, found in rivals(SizeClasses.fit(histogram, classes), histogram, 1):
            row[f"{choice.replace(' ', '_')}_padding"] = found.padding_overhead(histogram)
        rows.append(row)
        few = values[:: -(-len(values) // TRIED)]
        if padded(SizeClasses.fit(few, classes), few) != least(few, classes):
            wrong.append(f"{name}: the fit of {len(few)} lengths is not the optimum")
    slowest = max(row["fit_seconds"] for row in rows)
    said = (
        f"The fit of {count:,} lengths to {classes} classes takes {slowest:.2g} s at most; each is the exact optimum."
    )
    notes = [f"Of every distribution {TRIED} distinct lengths at most were fitted once more by trying every split."]
    return Table("fit", f"{count:,} lengths, {classes} classes", COLUMNS, rows, said, notes, PLOT, wrong)


def padded(classes: SizeClasses, values: Sequence[int] | Lengths) -> int:
    """What the classes give to these lengths, one of each, in sum."""
    return int(np.array(classes.boundaries)[np.searchsorted(classes.boundaries, values)].sum())


def least(values: Lengths, classes: int) -> int:
    """The least that any so many classes give, by the plain program over all splits."""
    ends = np.arange(len(values) + 1)
    best: Any = np.concatenate(([0], values * ends[1:]))
    for _ in range(classes - 1):
        tried = best[None, :] + np.concatenate(([0], values))[:, None] * (ends[:, None] - ends[None, :])
        best = np.where(ends[None, :] < ends[:, None], tried, np.iinfo(np.int64).max).min(axis=1)
        best[0] = 0
    return int(best[-1])

"""What a benchmark found: tables of plain figures that a reader, a program and a chart can all use."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

Row = dict[str, Any]

# Medians this close are called equal: run after run on a shared machine differs by as much.
SAME = 1.05
# Costs that differ by less are called independent of the size.
NOISE = 1.5


def time_text(seconds: float) -> str:
    """Returns a time to three digits, in the unit that suits it.

    Example:
        >>> from arenax_stress._bench_table import time_text
        >>> time_text(0.00001234), time_text(0.9), time_text(4.2e-7)
        ('12.3 µs', '900 ms', '420 ns')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)):
        if seconds >= scale or unit == "ns":
            return f"{float(f'{seconds / scale:.3g}'):,g} {unit}"
    raise AssertionError


def size_text(n: float) -> str:
    """Returns a number of bytes in the unit that suits it.

    Example:
        >>> from arenax_stress._bench_table import size_text
        >>> size_text(4096), size_text(3 * 2**19), size_text(12)
        ('4 KiB', '1.5 MiB', '12 B')
    """
    sign, n = "-" if n < 0 else "", abs(n)
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= scale:
            return f"{sign}{float(f'{n / scale:.4g}'):g} {unit}"
    return f"{sign}{n:g} B"


def factor_text(x: float) -> str:
    """Returns a ratio to three digits, and to a whole number where that is more."""
    return f"{x:.3g}" if x < 100 else f"{x:,.0f}"


def share_text(x: float) -> str:
    """Returns a fraction in whole percent."""
    return f"{round(x, 2) + 0.0:.0%}"  # Plus 0.0, which makes a negative zero positive.


def _count_text(n: float) -> str:
    return f"{n:,.0f}" if n >= 10 or n == int(n) else f"{n:.2g}"


FORMATS: dict[str, Callable[[Any], str]] = {
    "bytes": size_text,
    "seconds": time_text,
    "ratio": lambda x: f"{factor_text(x)}×",
    "count": _count_text,
    "share": share_text,
    "rate": lambda x: f"{size_text(x)}/s",
    "text": str,
}


@attrs.frozen
class Column:
    """One column of the printed table.

    Attributes:
        key: The rows' key for it.
        heading: What the reader sees.
        kind: A key of `FORMATS`.
    """

    key: str
    heading: str
    kind: str

    def cell(self, row: Row) -> str:
        """The text of this column's cell; a dash where there is no figure."""
        value = row.get(self.key)
        return "–" if value is None else FORMATS[self.kind](value)


@attrs.frozen
class Plot:
    """How to draw a table: lines over one of its keys, both axes logarithmic.

    Attributes:
        x: The rows' key along the horizontal axis.
        x_label: What that is.
        x_kind: A key of `FORMATS`.
        lines: The rows' keys that are drawn, each with its label.
        y_label: What they are.
        y_kind: A key of `FORMATS`.
    """

    x: str
    x_label: str
    x_kind: str
    lines: Mapping[str, str]
    y_label: str = "time of a call"
    y_kind: str = "seconds"


@attrs.frozen
class Table:
    """The rows of one question, and what they answer.

    Attributes:
        name: Its key in the JSON.
        title: What was measured.
        columns: What is printed of the rows.
        rows: Plain figures, with their units in the keys; None where there is none, and a note says why.
        conclusion: One sentence that these rows bear out.
        notes: What a reader must know to judge them.
        plot: How to draw them, or None.
        wrong: What was found not to be right: values that differ, an address that moved.
    """

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    conclusion: str
    notes: Sequence[str] = ()
    plot: Plot | None = None
    wrong: Sequence[str] = ()

    def as_dict(self) -> dict[str, Any]:
        """The table for JSON."""
        return {
            "title": self.title,
            "rows": list(self.rows),
            "conclusion": self.conclusion,
            "notes": list(self.notes),
            "wrong": list(self.wrong),
        }


def ratio(over: float | None, under: float | None) -> float | None:
    """The quotient of two figures, None where one is missing or nothing can be divided by."""
    return None if over is None or not under or not math.isfinite(over) else over / under


def verdict(subject: str, rival: str, rows: Sequence[Row], key: str, where: Callable[[Row], str]) -> str:
    """Says at how many rows the subject is faster than its rival, and where it is slower.

    Args:
        subject: The name of the one.
        rival: The name of the other.
        rows: The rows.
        key: Key of the rival's time over the subject's.
        where: Names a row.
    """
    known = [row for row in rows if row.get(key) is not None]
    if not known:
        return f"Nothing was measured of {subject} against {rival}."
    faster = [row for row in known if row[key] > SAME]
    slower = [row for row in known if row[key] < 1 / SAME]
    same = [row for row in known if 1 / SAME <= row[key] <= SAME]
    parts: list[str] = []
    if faster:
        gains = _span([row[key] for row in faster])
        parts.append(f"faster than {rival} at {_places(faster, known, where)} ({gains})")
    if same:
        parts.append(f"about equal{'' if faster else f' to {rival}'} at {_places(same, known, where)}")
    if slower:
        costs = _span([1 / row[key] for row in slower])
        than = "" if faster or same else f" than {rival}"
        parts.append(f"SLOWER{than} at {_places(slower, known, where)} (takes {costs} as long)")
    return f"{subject} is {'; '.join(parts)}."


def _span(ratios: Sequence[float]) -> str:
    least, most = factor_text(min(ratios)), factor_text(max(ratios))
    return f"{least}×" if least == most else f"{least} to {most}×"


def _places(rows: Sequence[Row], known: Sequence[Row], where: Callable[[Row], str]) -> str:
    if len(rows) == len(known):
        return "all of them" if len(rows) > 1 else where(rows[0])
    if len(rows) > 3:
        return f"{len(rows)} of {len(known)}"
    return ", ".join(map(where, rows))

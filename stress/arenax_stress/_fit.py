"""The command `arenax fit`: the size classes that suit a list of lengths, and what other choices would cost."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib.figure
import matplotlib.ticker
import numpy as np
import rich.box
import rich.table

from arenax import SizeClasses
from arenax._fit import COSTS, histogram, padding_of

from ._arguments import at_least, new_file
from ._bench_report import console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the subcommand."""
    parser.add_argument("file", metavar="FILE", help="lengths, between spaces, commas or lines; - reads standard input")
    parser.add_argument("--max-classes", type=at_least(1), default=8, metavar="K", help="the most classes (8)")
    parser.add_argument(
        "--multiple-of", type=at_least(1), default=1, metavar="M", help="what each is a multiple of (1)"
    )
    parser.add_argument(
        "--cost", choices=COSTS, default="linear", help="what is least: padding, or that of the squares"
    )
    parser.add_argument("--slots", type=at_least(1), default=3, metavar="N", help="slots a class: batches alive (3)")
    parser.add_argument(
        "--memory-weight", type=_weight, default=0.0, metavar="W", help="padding that a reserved unit is worth (0)"
    )
    parser.add_argument(
        "--min-gain", type=_share, default=0.0, metavar="G", help="share of all that one more class must save (0)"
    )
    parser.add_argument("--json", type=new_file(".json"), metavar="FILE", help="write the figures here")
    parser.add_argument("--plot", type=new_file(".png", ".svg", ".pdf"), metavar="FILE", help="draw a chart here")


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand and returns its exit status."""
    where = console()
    try:
        values, counts = histogram(_words(sys.stdin.read()) if args.file == "-" else Path(args.file))
        lengths = dict(zip(values.tolist(), counts.tolist(), strict=True))
        options = {name: getattr(args, name) for name in ("multiple_of", "cost", "slots", "memory_weight")}
        fitted = SizeClasses.fit(lengths, args.max_classes, min_gain=args.min_gain, **options)
        curve = SizeClasses.fit_curve(lengths, args.max_classes, **options)
    except (OSError, ValueError, OverflowError) as e:
        print(f"arenax fit: {e}", file=sys.stderr)
        return 1
    classes = _by_class(fitted, lengths, args.slots)
    choices = [_choice(name, c, lengths, args.slots) for name, c in rivals(fitted, lengths, args.multiple_of)]
    steps = [_choice(str(len(c.boundaries)), c, lengths, args.slots) for c in curve]
    where.print(f"{counts.sum():,} lengths, {len(values):,} of them distinct, the longest {values[-1]:,}\n")
    where.print(_table("class", classes))
    where.print(f"\nBeside other choices ({args.slots} slots a class)\n")
    where.print(_table("classes", choices))
    where.print(f"\narenax.SizeClasses.explicit({list(fitted.boundaries)})", markup=False)
    if args.json:
        found = {"boundaries": list(fitted.boundaries), "classes": classes, "choices": choices, "curve": steps}
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        draw(steps, args.plot)
    return 0


def rivals(fitted: SizeClasses, lengths: dict[int, int], multiple_of: int) -> list[tuple[str, SizeClasses]]:
    """The fitted classes, and what is usually taken in their place."""
    count, longest = len(fitted.boundaries), max(1, *lengths)
    values, counts = histogram(lengths)
    ends = np.cumsum(counts)
    quantiles = values[np.searchsorted(ends, np.ceil(np.arange(1, count + 1) * ends[-1] / count))]
    rounded = np.maximum(-(-quantiles // multiple_of), 1) * multiple_of
    return [
        ("fitted", fitted),
        ("quantiles", SizeClasses.explicit({*rounded.tolist(), fitted.maximum})),
        ("powers of two", SizeClasses.pow2(1, longest)),
        ("multiples of 128", SizeClasses.multiples(128, longest)),
        ("one", SizeClasses.explicit([longest])),
    ]


def _by_class(fitted: SizeClasses, lengths: dict[int, int], slots: int) -> list[dict[str, Any]]:
    served, asked, given = padding_of(fitted.boundaries, lengths)
    return [
        {
            "class": boundary,
            "share": int(s) / int(served.sum()),
            "padding": 1 - int(a) / int(g) if g else 0.0,
            "reserved": slots * boundary,
        }
        for boundary, s, a, g in zip(fitted.boundaries, served, asked, given, strict=True)
    ]


def _choice(name: str, classes: SizeClasses, lengths: dict[int, int], slots: int) -> dict[str, Any]:
    served, _, _ = padding_of(classes.boundaries, lengths)
    used = [b for b, s in zip(classes.boundaries, served, strict=True) if s]
    return {
        "classes": name,
        "programs": len(used),
        "padding": classes.padding_overhead(lengths),
        "reserved": slots * sum(used),
        "of the longest": sum(used) * slots / classes.maximum,
    }


def _table(name: str, rows: list[dict[str, Any]]) -> rich.table.Table:
    formats = {"share": "{:.1%}", "padding": "{:.1%}", "reserved": "{:,}", "of the longest": "{:.1f}x", "class": "{:,}"}
    grid = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for key in rows[0]:
        grid.add_column(key, justify="left" if key == name == "classes" else "right")
    for row in rows:
        grid.add_row(*(formats.get(key, "{}").format(value) for key, value in row.items()))
    return grid


def draw(steps: list[dict[str, Any]], path: Path) -> None:
    """Draws padding and reserved memory against the number of classes.

    Args:
        steps: The choices with 1, 2, ... classes.
        path: The file; its suffix chooses the format.
    """
    figure = matplotlib.figure.Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    right = axes.twinx()
    count = range(1, len(steps) + 1)
    axes.plot(count, [s["padding"] for s in steps], marker="o", color="#D55E00")
    right.plot(count, [s["of the longest"] for s in steps], marker="s", color="#0072B2")
    axes.set_xlabel("size classes, one program each")
    axes.set_ylabel("padding, share of what is given", color="#D55E00")
    right.set_ylabel("memory reserved, in longest batches", color="#0072B2")
    axes.set_title("What one more size class gains, and what it reserves", loc="left", fontsize="medium")
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0, decimals=0))
    axes.set_ylim(bottom=0)
    right.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _words(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError as e:
        raise ValueError(f"standard input must hold integers, between spaces, commas or lines: {e}") from None


def _weight(text: str) -> float:
    return _number(text, float("inf"), "a number, at least 0 and finite")


def _share(text: str) -> float:
    return _number(text, 1.0, "a share, at least 0 and below 1")


def _number(text: str, below: float, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < below:
        raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}")
    return value

"""`arenax stress`: its arguments, its progress, and its end."""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Generator
from typing import Any

import arenax
from arenax.testing import FakeDevice

from ._arguments import at_least, new_file, seconds
from ._soak import MODES, Progress, soak
from ._soak_hours import soak_for_hours
from ._soak_places import make_places
from ._soak_report import Report
from ._soak_steps import Endurance, endure
from ._soak_worker import WEIGHTS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``arenax stress``."""
    lasts = parser.add_mutually_exclusive_group()
    lasts.add_argument("--seconds", type=seconds, default=10.0, help="how long (default 10)")
    lasts.add_argument(
        "--hours",
        type=seconds,
        help="for so long, with --faults and a loader whose workers are killed; a line a minute, and a page at its end",
    )
    parser.add_argument("--seed", type=int, default=None, help="repeats a run (default: a new one)")
    parser.add_argument("--threads", type=at_least(1), default=2, help="threads that use the pool at once (default 2)")
    parser.add_argument("--classes", type=at_least(1), default=6, help="kinds of array in play (default 6)")
    parser.add_argument(
        "--budget",
        type=_budget,
        help='bytes of the pool, such as "8MiB" (default: none, and a tight one while it grows)',
    )
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=MODES, help="values of on_exhausted (default: all)"
    )
    parser.add_argument(
        "--omit",
        nargs="+",
        metavar="OPERATION",
        choices=sorted(WEIGHTS),
        default=(),
        help="operations to leave out, to narrow down",
    )
    parser.add_argument(
        "--devices",
        type=at_least(1),
        help="instead of the default device, so many, as a sequence and as a mesh in turn; on CPU they are made",
    )
    parser.add_argument("--operations", type=at_least(1), help="stop each thread after so many, in each mode")
    parser.add_argument("--faults", action="store_true", help="let random phases of random operations fail")
    parser.add_argument(
        "--steps",
        type=at_least(1),
        help="instead, so many small puts and steps in one thread, after which the process may not have grown",
    )
    parser.add_argument(
        "--page", metavar="DIR", default="arenax-lab", help="where the page of --hours goes (default arenax-lab)"
    )
    parser.add_argument("--json", type=new_file(".json"), metavar="FILE", help="write the report to this file as well")


def _budget(text: str) -> str:
    try:
        arenax.BufferPool(FakeDevice(), budget=text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None
    return text


def run(args: argparse.Namespace) -> int:
    """Runs ``arenax stress``.

    Returns:
        0 where all was well, 1 on a failure, 2 for bad arguments, 130 after Ctrl-C.
    """
    from rich.console import Console

    console = Console()
    seed = int(time.time_ns() // 1000 % 1_000_000) if args.seed is None else args.seed
    try:
        make_places(args.devices)  # Before any pool is made, and before JAX looks at its devices.
    except ValueError as e:
        print(f"arenax stress: {e}", file=sys.stderr)
        return 2
    names = ("threads", "classes", "budget", "modes", "omit", "devices")
    common: dict[str, Any] = {"seed": seed} | {name: getattr(args, name) for name in names}
    if args.hours is not None:
        if args.steps is not None or args.operations is not None:
            print("arenax stress: --hours goes without --steps and --operations", file=sys.stderr)
            return 2
        report = soak_for_hours(
            args.hours,
            page=args.page,
            say=lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True),
            **common,
        )
        return _finish(args, console, report)
    with _bar(console, args.seconds if args.steps is None else None) as progress:
        report = (
            endure(args.steps, seed, progress, args.devices)
            if args.steps is not None
            else soak(
                seconds=args.seconds,
                operations=args.operations,
                faults=args.faults,
                progress=progress,
                **common,
            )
        )
    return _finish(args, console, report)


def _finish(args: argparse.Namespace, console: Any, report: Report | Endurance) -> int:
    report.show(console)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(report.as_dict(), file, indent=2)
            file.write("\n")
    return report.exit_status


@contextlib.contextmanager
def _bar(console: "object", seconds: float | None) -> Generator[Progress | None, None, None]:
    """A progress bar, on a terminal only."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    if not isinstance(console, Console) or not console.is_terminal:
        yield None
        return
    columns = [
        TextColumn("{task.description:>6}"),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[done]:,} operations"),
    ]
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=seconds, done=0)

        def update(mode: str, elapsed: float, done: int) -> None:
            bar.update(task, description=mode, completed=min(elapsed, seconds or 0), done=done)

        yield update

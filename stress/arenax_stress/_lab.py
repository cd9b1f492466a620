"""The command `arenax lab`: where a workload loses memory under each allocator, and whether a pool would help it."""

import argparse
import inspect
import sys
from collections.abc import Callable
from pathlib import Path

import rich.box
import rich.console
import rich.progress
import rich.table
import rich.text

from ._arguments import at_least
from ._bench_report import console
from ._bench_table import size_text
from ._lab_findings import NAMES, Findings
from ._lab_page import HEADINGS, cells
from ._lab_report import PAGE, write
from ._lab_runs import DEFAULT, Laboratory
from ._lab_verdict import Verdict
from ._scenarios import SCENARIOS
from ._sim_pool import MAX_CLASSES
from ._traces import Trace
from ._workloads import WORKLOADS

GENERATORS: dict[str, Callable[..., Trace]] = {**SCENARIOS, **WORKLOADS}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the subcommand."""
    parser.add_argument(
        "what", metavar="SCENARIO|TRACE", nargs="?", help="a name that --list prints, or the file of a trace"
    )
    parser.add_argument("--list", action="store_true", help="print the scenarios and workloads there are")
    parser.add_argument(
        "--allocators",
        type=_allocators,
        default=DEFAULT,
        metavar="A,B",
        help=f"of {','.join(NAMES)}; plan is the pool with a plan ({','.join(DEFAULT)})",
    )
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="of a scenario (0)")
    parser.add_argument("--events", type=at_least(1), metavar="N", help="allocations and frees of a scenario (20000)")
    parser.add_argument(
        "--max-classes",
        type=at_least(1),
        default=MAX_CLASSES,
        metavar="K",
        help=f"the most size classes ({MAX_CLASSES})",
    )
    parser.add_argument(
        "--repeat",
        type=at_least(1),
        metavar="N",
        help="passes of the long run (2 to 200, to make 100,000 events)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("arenax-lab"), metavar="DIR", help="where the report goes (arenax-lab)"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand and returns its exit status."""
    where = console()
    if args.list:
        where.print(_names())
        return 0
    if args.what is None:
        print("arenax lab: name a scenario or the file of a trace; --list prints the scenarios", file=sys.stderr)
        return 2
    try:
        args.out.mkdir(parents=True, exist_ok=True)  # Before anything runs that it would be too late for.
        trace, story = load(args.what, args.seed, args.events)
        lab = Laboratory(
            trace,
            args.allocators,
            max_classes=args.max_classes,
            passes=args.repeat,
            story=story,
        )
    except (OSError, ValueError) as e:
        print(f"arenax lab: {e}", file=sys.stderr)
        return 1
    facts = lab.findings.facts
    if story:
        where.print(story + "\n", style="italic", markup=False)
    where.print(
        f"{facts.name}: {facts.buffers:,} buffers in {facts.distinct_sizes:,} sizes, at most "
        f"{size_text(facts.peak_bytes)} alive",
        markup=False,
    )
    interrupted = False
    try:
        _run(lab, where)
    except KeyboardInterrupt:
        interrupted = True
    try:
        said = write(lab, args.out, _command(args))
    except OSError as e:
        print(f"arenax lab: {e}", file=sys.stderr)
        return 1
    show(where, lab.findings, said)
    where.print(f"\nThe report is {args.out / PAGE}", markup=False, soft_wrap=True)
    if interrupted:
        print(f"arenax lab: interrupted; missing: {'; '.join(lab.findings.missing) or 'nothing'}", file=sys.stderr)
    return 130 if interrupted else 0


def load(what: str, seed: int, events: int | None) -> tuple[Trace, str]:
    """Returns the trace of a name or a file, and what there is to say about it.

    Args:
        what: A name of `GENERATORS`, or a file.
        seed: Of the random numbers; for names only.
        events: The most allocations and frees, or None for the default; for names only.

    Raises:
        ValueError: For a file that is no trace, or a name that is neither.
        OSError: Where the file cannot be read.
    """
    if what in GENERATORS:
        make = GENERATORS[what]
        return make(seed) if events is None else make(seed, events=events), description(make)
    if not Path(what).is_file():
        raise ValueError(f"{what!r} is neither a scenario nor a file; --list prints the scenarios")
    if events is not None:
        raise ValueError("--events is for scenarios; a file is taken as it is")
    return Trace.from_file(what), ""


def description(make: Callable[..., Trace]) -> str:
    """What the docstring of a workload says, without its arguments."""
    text = inspect.getdoc(make) or ""
    return " ".join(text.partition("\n\nArgs:")[0].split())


def show(where: rich.console.Console, findings: Findings, said: Verdict) -> None:
    """Prints the table and the verdict."""
    grid = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for heading in HEADINGS:
        grid.add_column(heading, justify="left" if heading == HEADINGS[0] else "right")
    for name, found in findings.by_allocator.items():
        grid.add_row(*cells(name, found, findings.facts.peak_bytes))
    where.print()
    where.print(grid)
    where.print()
    where.print(rich.text.Text(said.headline, style="bold"))
    for answer in said.answers:
        where.print()
        where.print(rich.text.Text.assemble((answer.question, "italic"), "\n", " ".join(answer.sentences)))


def _run(lab: Laboratory, where: rich.console.Console) -> None:
    columns = (
        rich.progress.TextColumn("{task.description:<28}"),
        rich.progress.BarColumn(),
        rich.progress.TaskProgressColumn(),
        rich.progress.TimeElapsedColumn(),
    )
    with rich.progress.Progress(*columns, console=where, transient=True, disable=not where.is_terminal) as bar:
        task = bar.add_task("", total=1.0)
        lab.run(lambda what, done: bar.update(task, description=what, completed=done))


def _names() -> rich.table.Table:
    grid = rich.table.Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, make in GENERATORS.items():
        grid.add_row(rich.text.Text(name, style="bold"), rich.text.Text(first_sentence(make)))
    return grid


def first_sentence(make: Callable[..., Trace]) -> str:
    """The first line of a workload's docstring.

    Example:
        >>> from arenax_stress._lab import first_sentence
        >>> from arenax_stress._workloads import WORKLOADS
        >>> first_sentence(WORKLOADS["phases"])
        'Phases with larger buffers each, of which some survive.'
    """
    return (inspect.getdoc(make) or "").split("\n\n")[0].replace("\n", " ")


def _command(args: argparse.Namespace) -> str:
    parts = ["arenax lab", args.what]
    if args.what in GENERATORS:
        parts.append(f"--seed {args.seed}")
    for name, default in (("events", None), ("max_classes", MAX_CLASSES), ("repeat", None)):
        value = getattr(args, name)
        if value != default:
            parts.append(f"--{name.replace('_', '-')} {value}")
    if tuple(args.allocators) != DEFAULT:
        parts.append(f"--allocators {','.join(args.allocators)}")
    return " ".join(parts)


def _allocators(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise argparse.ArgumentTypeError(f"must be of {', '.join(NAMES)}, got {unknown[0]!r}")
    return names

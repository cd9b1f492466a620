"""The command `arenax plan`: the classes and slots that a trace needs, what else would do, and a check for CI."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import rich.box
import rich.console
import rich.markup
import rich.table

from arenax import Plan, Trace
from arenax._plan import Family

from ._arguments import at_least, new_file, size
from ._bench_report import console
from ._bench_table import size_text
from ._plan_choices import Row, by_class, choices, load_plan
from ._traces import Trace as TraceFile

# Where the plan is saved if nobody says where.
FILE = "plan.json"
FORMATS = {
    "slots": "{:,}",
    "classes": "{:,}",
    "bytes": "{:,}",
    "share": "{:.1%}",
    "padding": "{:.1%}",
    "of the peak": "{:.3f}",
}
# What `BufferPool.put(with_sizes=True)` and `reserve` draw beside the batch.
SIZES = Family("int32", ())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the subcommand."""
    parser.add_argument(
        "file",
        metavar="FILE",
        type=Path,
        help="a recording of a pool, a log of RMM, intervals (id,lower,upper,size), or a PyTorch snapshot (.pickle)",
    )
    parser.add_argument(
        "--max-classes",
        type=at_least(1),
        default=16,
        metavar="K",
        help="the most classes for requests that can share them (16)",
    )
    parser.add_argument(
        "--budget", type=size(1, 1), metavar="SIZE", help="of the plans within it, the one that pads least (no limit)"
    )
    parser.add_argument("--json", type=new_file(".json"), metavar="FILE", help="write the figures here")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--save", type=new_file(".json"), metavar="PLAN.json", help="write the plan here")
    either.add_argument(
        "--check",
        type=Path,
        metavar="PLAN.json",
        help="fit nothing, and exit with 1 where this plan no longer serves what FILE has: for CI",
    )
    parser.set_defaults(refuse=parser.error)


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand and returns its exit status."""
    where = console()
    if args.check is not None and args.budget is not None:
        args.refuse("argument --budget: not allowed with argument --check, whose plan has its own")
    try:
        trace = TraceFile.from_file(args.file)
        if args.check is not None:
            return check(where, trace, args.file, args.check, args.json)
        plan = Plan.fit(trace, args.max_classes, args.budget)
        if args.save is not None:
            plan.save(args.save)
        found: dict[str, Any] = {
            "trace": trace.name,
            "buffers": len(trace),
            "peak_bytes": trace.peak_bytes,
            "required_bytes": plan.required_bytes,
            "classes": by_class(trace, plan),
            "choices": choices(trace, plan, args.max_classes),
        }
        if args.json is not None:
            _write(args.json, found)
    except (OSError, ValueError) as e:
        print(f"arenax plan: {e}", file=sys.stderr)
        return 1
    where.print(
        f"{trace.name!r}: {len(trace):,} buffers, {size_text(trace.peak_bytes)} alive at its peak\n", markup=False
    )
    where.print(_table(found["classes"]))
    slots = sum(c.slots for c in plan.classes)
    where.print(f"\nThe plan needs {plan.required_bytes:,} bytes in {slots:,} slots{_of_peak(plan)}.", markup=False)
    where.print("\nWhat others need for the same traffic\n")
    where.print(_table(found["choices"]))
    where.print(
        "\nThe plan is the one of least bytes, unless --budget lets it spend more to pad less. Powers of two and least "
        "padding have a\nslot for each buffer ever alive at once in its class. XLA's allocator and best fit are "
        "simulated, and place the arrays as they\nwere asked for, without padding.\n",
        style="dim",
    )
    where.print("\n".join(code(plan, str(args.save or FILE))), markup=False, soft_wrap=True)
    if args.save is None:
        where.print(f"\n--save {FILE} writes the plan.", markup=False)
    return 0


def check(where: rich.console.Console, trace: Trace, file: Path, path: Path, to: Path | None) -> int:
    """Says whether a plan still serves a trace.

    Args:
        where: Where to print.
        trace: The traffic of today.
        file: Where it came from.
        path: The plan.
        to: Where to write the verdict as JSON, or None.

    Returns:
        0 where it does, 1 where it does not.
    """
    plan = load_plan(path)
    faults = plan.misfits(trace)
    if to is not None:
        _write(to, {"trace": trace.name, "plan": str(path), "misfits": list(faults)})
    if not faults:
        where.print(
            f"{path} serves {trace.name!r}: {len(trace):,} buffers in {size_text(plan.required_bytes)} of slots",
            markup=False,
            soft_wrap=True,
        )
        return 0
    where.print(f"{path} does not serve {trace.name!r}:", markup=False, soft_wrap=True)
    for fault in faults:
        where.print(f"  {fault}", markup=False, soft_wrap=True)
    if trace.requests is None and not plan.is_of_bytes:
        remedy = (
            f"{file} knows bytes alone, and the plan is for arrays with shapes: check it with a recording of a pool"
        )
    else:
        remedy = f"fit it anew, and look at what has changed: arenax plan {file} --save {path}"
    where.print(remedy[0].upper() + remedy[1:], markup=False, soft_wrap=True)
    return 1


def code(plan: Plan, path: str) -> list[str]:
    r"""The lines of Python that make a pool of a saved plan.

    Example:
        >>> from arenax import Trace
        >>> plan = Plan.fit(Trace.from_events([("allocate", 0, 100)]))
        >>> print(*code(plan, "plan.json"), sep="\n")
        plan = arenax.Plan.load("plan.json")
        pool = arenax.BufferPool.from_plan(plan)
    """
    lines = [f"plan = arenax.Plan.load({json.dumps(path)})"]
    families = {c.family: c.axis for c in plan.classes}
    varying = {family: axis for family, axis in families.items() if axis is not None}
    if plan.is_of_bytes or not varying:
        return [*lines, "pool = arenax.BufferPool.from_plan(plan)"]
    is_one = len({c.boundaries for c in plan.ragged.values()}) == len({*varying.values()}) == 1
    if is_one and {*families} - {*varying} <= {SIZES}:
        (axis,) = {*varying.values()}
        return [*lines, f"pool = arenax.BufferPool.from_plan(plan, ragged=arenax.Ragged({axis}, plan.size_classes))"]
    lines.append("pool = arenax.BufferPool.from_plan(plan, ragged=...)  # the batch's tree, with these at its leaves:")
    for family, axis in families.items():
        of = "plan.size_classes" if is_one else f"plan.ragged[{json.dumps(str(family))}]"
        what = "None" if axis is None else f"arenax.Ragged({axis}, {of})"
        note = " (or the sizes, which the pool draws itself)" if family == SIZES else ""
        lines.append(f"#   {family}: {what}{note}")
    return lines


def _of_peak(plan: Plan) -> str:
    return f", {plan.required_bytes / plan.peak_bytes:.3f} times the peak of live bytes" if plan.peak_bytes else ""


def _write(path: Path, found: dict[str, Any]) -> None:
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _table(rows: list[Row]) -> rich.table.Table:
    grid = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for key in rows[0]:
        grid.add_column(key, justify="left" if key in ("class", "choice") else "right", overflow="fold")
    for row in rows:
        cells = {key: "–" if value is None else FORMATS.get(key, "{}").format(value) for key, value in row.items()}
        grid.add_row(*(rich.markup.escape(cell) for cell in cells.values()))
    return grid

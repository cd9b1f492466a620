"""The command `arenax replay`: a trace as real arrays, timed, with and without the pool, beside the simulators."""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import rich.console

from arenax import Plan, Trace
from arenax._trace import MAX_BYTES
from arenax_adapters._mapping import available_bytes

from ._arguments import at_least, new_file, size
from ._bench_forms import default_device
from ._bench_report import console, environment
from ._bench_table import size_text
from ._live_replay import Replayed, replay_live
from ._plan_choices import load_plan
from ._replay_report import SIMULATORS, show
from ._simulate import simulate
from ._traces import Trace as TraceFile

BOTH = "both"
# Share of the available memory that a run may take unless it is told.
SHARE = 0.7
INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the subcommand."""
    parser.add_argument(
        "trace",
        metavar="TRACE",
        type=Path,
        help="a recording of a pool, a log of RMM, intervals (id,lower,upper,size), or a PyTorch snapshot (.pickle)",
    )
    parser.add_argument(
        "--allocator",
        choices=[*SIMULATORS, BOTH],
        default=BOTH,
        help="fresh arrays of jax, leases of the pool, or each in a process of its own (both)",
    )
    parser.add_argument(
        "--plan", type=Path, metavar="PLAN.json", help="the pool's slots (default: it grows, with fitted classes)"
    )
    parser.add_argument("--budget", type=size(1, 1), metavar="SIZE", help="the pool's budget (what the plan requires)")
    parser.add_argument(
        "--limit-bytes",
        type=size(1, 1),
        metavar="SIZE",
        help=f"refuse a trace that needs more memory ({SHARE:.0%}% of what is available)",
    )
    parser.add_argument(
        "--scale", type=_scale, default=1.0, metavar="F", help="multiply every size, to at least 1 byte (1)"
    )
    parser.add_argument("--repeat", type=at_least(1), default=1, metavar="N", help="how often it is run (1)")
    parser.add_argument("--json", type=new_file(".json"), metavar="FILE", help="write the figures here")
    parser.set_defaults(refuse=parser.error)


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand and returns its exit status."""
    if args.allocator == "jax" and (args.plan is not None or args.budget is not None):
        args.refuse("arguments --plan and --budget are the pool's, and not allowed with --allocator jax")
    if args.plan is not None and args.scale != 1:
        args.refuse("argument --plan: not allowed with argument --scale, which does not scale its slots")
    where = console()
    if args.allocator == BOTH:
        return _run_both(args, where)
    try:
        trace = scaled(TraceFile.from_file(args.trace), args.scale)
        plan = None if args.plan is None else load_plan(args.plan)
        predicted = _prepare(trace, args, plan)
    except (OSError, ValueError) as e:
        print(f"arenax replay: {e}", file=sys.stderr)
        return 1
    found = replay_live(trace, args.allocator, args.repeat, plan, args.budget)
    found.simulated_bytes = predicted
    _finish(args, where, trace.name, len(trace), [found], environment())
    if not found.interrupted:
        return 0
    done = f"{found.event_count:,} of {found.planned_count:,} events of {args.allocator}"
    print(f"arenax replay: interrupted after {done}", file=sys.stderr)
    return INTERRUPTED


def scaled(trace: Trace, factor: float) -> Trace:
    """Returns the trace with every size multiplied, to at least a byte; what had none keeps none.

    Shapes go: what is left of a recording are bytes.

    Raises:
        ValueError: Where more bytes would be alive than a trace may have.

    Example:
        >>> scaled(Trace.from_events([("allocate", i, i) for i in (0, 1, 1000)]), 0.01).sizes
        array([ 0,  1, 10])
    """
    if factor == 1:
        return trace
    if trace.peak_bytes * factor > MAX_BYTES:
        raise ValueError(f"--scale {factor:g} makes more than {MAX_BYTES} bytes alive of {trace.name!r}")
    sizes = np.where(trace.sizes > 0, np.maximum(trace.sizes * factor, 1), 0).astype(np.int64)
    return type(trace)(trace.steps, sizes, times=trace.times, threads=trace.threads, name=trace.name)


def _prepare(trace: Trace, args: argparse.Namespace, plan: Plan | None) -> int:
    """Predicts the peak of reserved bytes, and refuses what would not fit.

    Raises:
        ValueError: Where it does not fit, or the budget is below the plan.
    """
    if not len(trace):
        raise ValueError(f"{trace.name!r} has no buffers to replay")
    if plan is not None and args.budget is not None and args.budget < plan.required_bytes:
        raise ValueError(
            f"--budget must be at least the {plan.required_bytes:,} that {args.plan} requires, got {args.budget:,}"
        )
    if plan is not None and trace.requests is None and not plan.is_of_bytes:
        raise ValueError(f"{args.plan} is for arrays with shapes, and {args.trace} knows bytes alone")
    simulator = SIMULATORS[args.allocator]
    predicted = simulate(trace.repeat(args.repeat), simulator, plan=plan, limit_bytes=args.budget).peak_reserved_bytes
    needed = max(trace.peak_bytes, predicted if simulator == "pool" else 0)
    available = _available()
    limit = args.limit_bytes
    allowed = f"--limit-bytes allows {size_text(limit)}" if limit is not None else ""
    if limit is None and available is not None:
        limit = int(SHARE * available)
        allowed = f"{SHARE:.0%} of the {size_text(available)} that are available are {size_text(limit)}"
    if limit is not None and needed > limit:
        # Rounded down to two digits, so that it fits.
        factor = args.scale * limit / needed
        digits = 1 - math.floor(math.log10(factor)) if factor > 0 else 0
        factor = math.floor(factor * 10**digits) / 10**digits
        reserved = f", and the pool reserves {size_text(needed)}" if needed > trace.peak_bytes else ""
        raise ValueError(
            f"{trace.name!r} has {size_text(trace.peak_bytes)} alive at its peak{reserved}, and {allowed}: run it with "
            f"--scale {factor:g}, which multiplies every size, or set --limit-bytes"
        )
    return predicted


def _available() -> int | None:
    """Memory that can still be had: of the device where it tells, or else of the machine."""
    stats = default_device().memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    return available_bytes()


def _run_both(args: argparse.Namespace, where: rich.console.Console) -> int:
    """Runs each allocator in a process of its own, whose resident memory is that of one run."""
    runs: dict[str, Replayed] = {}
    found: dict[str, Any] = {}
    status = 0
    # The pool first: where there is memory enough for it, there is for the other.
    for allocator in reversed(SIMULATORS):
        with tempfile.TemporaryDirectory(prefix="arenax-replay-") as folder:
            to = Path(folder, "replay.json")
            status = _spawn(args, allocator, to)
            if to.exists():
                found = json.loads(to.read_text(encoding="utf-8"))
                runs[allocator] = Replayed.of(found["runs"][allocator])
        if status:
            break
    if runs:
        in_order = [runs[name] for name in SIMULATORS if name in runs]
        _finish(args, where, found["trace"], found["buffers"], in_order, found["environment"])
    return status


def _spawn(args: argparse.Namespace, allocator: str, to: Path) -> int:
    command = [sys.executable, "-m", "arenax_stress", "replay", str(args.trace), "--allocator", allocator]
    command += ["--json", str(to), "--repeat", str(args.repeat), "--scale", repr(args.scale)]
    given = {"--limit-bytes": args.limit_bytes}
    if allocator == "pool":
        given |= {"--plan": args.plan, "--budget": args.budget}
    for option, value in given.items():
        command += [] if value is None else [option, str(value)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as child:
        try:
            return child.wait()
        except KeyboardInterrupt:  # The terminal has sent it to the child as well, which writes what it has and ends.
            return child.wait()


def _finish(
    args: argparse.Namespace,
    where: rich.console.Console,
    name: str,
    buffers: int,
    runs: list[Replayed],
    found: dict[str, Any],
) -> None:
    """Writes and prints the figures."""
    if args.json is not None:
        everything = {
            "trace": name,
            "buffers": buffers,
            "scale": args.scale,
            "repeat": args.repeat,
            "environment": found,
            "runs": {r.allocator: attrs.asdict(r) for r in runs},
        }
        args.json.write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
    show(where, name, buffers, runs, found)


def _scale(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value

"""`arenax bench`: times the pool against its rivals, in turn in one run, and says where it is slower."""

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ._arguments import at_least, new_file, seconds, size

if TYPE_CHECKING:
    from ._bench_clock import Clock
    from ._bench_table import Table

KIB, MIB = 2**10, 2**20
SIZES = [4 * KIB * 4**i for i in range(9)]
QUICK_MAX = 4 * MIB
# What `arenax bench loader` loads, and by what; each library has an extra of its name.
LOADED, LIBRARIES = ["plain", "step", "ragged", "leaves"], ["torch", "grain"]
# Of the benchmarks that would otherwise take long.
SECONDS = {"device": 240.0, "loader": 180.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``arenax bench``."""
    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")
    for name, (summary, declare, _) in BENCHES.items():
        bench = benches.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        bench.add_argument("--json", type=new_file(".json"), metavar="FILE", help="also write every figure here")
        bench.add_argument(
            "--plot",
            type=new_file(".png", ".svg", ".pdf"),
            metavar="FILE",
            help="also draw a chart: .png, .svg or .pdf",
        )
        bench.add_argument("--rounds", type=at_least(1), help="samples of each form (default: by how long it takes)")
        bench.add_argument(
            "--seconds",
            type=seconds,
            default=SECONDS.get(name),
            help="take no more samples than are needed after so long "
            f"(default: {f'{SECONDS[name]:.0f}' if name in SECONDS else 'no limit'})",
        )
        bench.add_argument("--quick", action="store_true", help="few rounds and small sizes, for a first look")
        bench.set_defaults(refuse=bench.error)
        declare(bench)


def _put_arguments(bench: argparse.ArgumentParser) -> None:
    _sizes(bench, SIZES, "sizes of the leaf")
    bench.add_argument("--max", type=size(4), metavar="SIZE", help="leave out larger sizes, such as 64MiB")


def _lease_arguments(bench: argparse.ArgumentParser) -> None:
    _sizes(bench, [256 * KIB, 16 * MIB, 256 * MIB], "sizes of the slots that are written into", 4 * KIB, 16 * MIB)
    bench.add_argument("--slots", type=at_least(10), help="how many slots are many (default: 100000)")
    bench.add_argument(
        "--threads", nargs="+", type=at_least(1), default=[1, 2, 4, 8], help="numbers of threads (default: 1 2 4 8)"
    )


def _tree_arguments(bench: argparse.ArgumentParser) -> None:
    bench.add_argument(
        "--leaves", nargs="+", type=at_least(1), default=[1, 4, 12, 50], help="leaves of a batch (default: 1 4 12 50)"
    )
    bench.add_argument("--leaf", type=size(4), default=4 * KIB, metavar="SIZE", help="size of each (default: 4KiB)")


def _device_arguments(bench: argparse.ArgumentParser) -> None:
    _sizes(bench, SIZES, "sizes of the leaf")
    bench.add_argument("--max", type=size(4), metavar="SIZE", help="leave out larger sizes, such as 64MiB")
    bench.add_argument(
        "--chunks",
        nargs="+",
        type=size(16),
        default=[256 * KIB, MIB, 4 * MIB, 16 * MIB],
        metavar="SIZE",
        help="chunks of the ring (default: 256KiB 1MiB 4MiB 16MiB)",
    )
    bench.add_argument(
        "--ring", type=size(4), metavar="SIZE", help="the leaf that goes through these rings (default: 64MiB)"
    )
    bench.add_argument("--steps", type=at_least(1), help="steps in which addresses are watched (default: 10000)")


def _sharded_arguments(bench: argparse.ArgumentParser) -> None:
    _sizes(bench, [8 * KIB, 64 * KIB, MIB, 16 * MIB], "sizes on each device", quick=MIB)


def _fit_arguments(bench: argparse.ArgumentParser) -> None:
    bench.add_argument("--lengths", type=at_least(1), help="how many lengths (default: 1000000)")
    bench.add_argument("--classes", type=at_least(1), default=16, help="the most size classes (default: 16)")


def _loader_arguments(bench: argparse.ArgumentParser) -> None:
    _sizes(bench, [8 * KIB, 8 * MIB, 16 * MIB], "sizes of the plain batches", 128, 8 * MIB, 128)
    quick = "plain and step with --quick"
    bench.add_argument("--cases", nargs="+", choices=LOADED, help=f"what to load (default: all, {quick})")
    bench.add_argument(
        "--libraries", nargs="+", choices=LIBRARIES, help="whose loaders (default: of those that are there)"
    )
    bench.add_argument(
        "--batches", type=at_least(1), help="batches of a few MiB that are timed in a round (default: 32)"
    )
    bench.add_argument("--workers", type=at_least(1), default=2, help="workers of each loader (default: 2)")
    bench.set_defaults(lacking=_lacking_libraries)


def _lacking_libraries(args: argparse.Namespace) -> str | None:
    """Chooses among the libraries that are there; a line where none of those asked for is."""
    wanted: list[str] = args.libraries or LIBRARIES
    extras = {name: f'pip install "arenax[{name}]"' for name in wanted if importlib.util.find_spec(name) is None}
    args.libraries = [name for name in wanted if name not in extras]
    args.absent = [f"{name} is not installed and left out: {install}" for name, install in extras.items()]
    return None if args.libraries else f"needs {' or '.join(extras)}: {' or '.join(extras.values())}"


def run(args: argparse.Namespace) -> int:
    """Runs ``arenax bench``.

    Args:
        args: What `add_arguments` declared.

    Returns:
        0, or 1 where a value that was brought is wrong, a buffer moved, or a library is missing.
    """
    if "lacking" in args and (line := args.lacking(args)):
        print(f"arenax bench {args.bench} {line}", file=sys.stderr)
        return 1
    sizes = _chosen_sizes(args)
    # Here, so that `--help` and bad arguments need not wait for JAX.
    from . import _bench_report
    from ._bench_clock import Clock, silent

    began = time.perf_counter()
    console = _bench_report.console()
    found = _bench_report.environment()
    console.print(_bench_report.heading(found), markup=False)
    with _bench_report.progress(console) as progress:
        clock = Clock(None if args.seconds is None else began + args.seconds, progress=progress or silent)
        tables: list[Table] = BENCHES[args.bench][2](args, clock, sizes)
    for table in tables:
        _bench_report.show(console, table)
    seconds = time.perf_counter() - began
    console.print(f"\n{seconds:.0f} seconds in all. What counts is the ratios: they were measured in turn in one run.")
    if args.json is not None:
        hidden = {"command", "bench", "run", "refuse", "default_sizes", "quick_max", "lacking", "json", "plot"}
        settings = {key: value for key, value in vars(args).items() if key not in hidden}
        settings |= {"sizes": sizes} if sizes else {}
        _bench_report.write_json(args.json, args.bench, settings, tables, seconds)
    if args.plot is not None:
        _bench_report.draw(tables, args.plot, _bench_report.heading(found))
        console.print(f"Chart: {args.plot}.", markup=False)
    wrong = [line for table in tables for line in table.wrong]
    for line in wrong:
        print(f"arenax bench {args.bench}: {line}", file=sys.stderr)
    return 1 if wrong else 0


def _put(args: argparse.Namespace, clock: "Clock", sizes: list[int]) -> "list[Table]":
    from ._bench_put import measure_put
    from ._bench_record import measure_recording

    turns = args.rounds or (40 if args.quick else 400)
    return [measure_put(clock, sizes, args.rounds, args.quick), measure_recording(clock, turns)]


def _lease(args: argparse.Namespace, clock: "Clock", sizes: list[int]) -> "list[Table]":
    from ._bench_lease import measure_checkouts, measure_threads
    from ._bench_write import measure_writes

    rounds = args.rounds or (5 if args.quick else 15)
    slots = args.slots or (1000 if args.quick else 100_000)
    return [
        measure_checkouts(clock, [10, slots], rounds),
        measure_threads(clock, args.threads, rounds),
        measure_writes(clock, sizes, rounds),
    ]


def _tree(args: argparse.Namespace, clock: "Clock", _: list[int]) -> "list[Table]":
    from ._bench_tree import measure_tree

    return [measure_tree(clock, args.leaves, args.leaf, args.rounds, args.quick)]


def _device(args: argparse.Namespace, clock: "Clock", sizes: list[int]) -> "list[Table]":
    from ._bench_device import Plan, measure_device

    ring = args.ring or (QUICK_MAX if args.quick else 64 * MIB)
    steps = args.steps or (1000 if args.quick else 10_000)
    return measure_device(clock, Plan(sizes, args.chunks, ring, steps, args.rounds, args.quick))


def _sharded(args: argparse.Namespace, clock: "Clock", sizes: list[int]) -> "list[Table]":
    from ._bench_sharded import measure_sharded

    return [measure_sharded(clock, sizes, args.rounds, args.quick)]


def _fit(args: argparse.Namespace, clock: "Clock", _: list[int]) -> "list[Table]":
    from ._bench_fit import measure_fit

    lengths = args.lengths or (100_000 if args.quick else 1_000_000)
    return [measure_fit(clock, lengths, args.classes, args.rounds or (3 if args.quick else 11))]


def _loader(args: argparse.Namespace, clock: "Clock", sizes: list[int]) -> "list[Table]":
    from ._bench_loader import Options, measure_loader
    from ._bench_loader_forms import cases_of

    kinds = args.cases or (["plain", "step"] if args.quick else LOADED)
    rounds, batches = args.rounds or (3 if args.quick else 5), args.batches or (16 if args.quick else 32)
    options = Options(cases_of(kinds, sizes), args.libraries, args.absent, rounds, batches, args.workers, args.quick)
    return measure_loader(clock, options)


# Of each benchmark: what it is, what declares its options, and what runs it.
BENCHES: dict[
    str,
    tuple[
        str,
        Callable[[argparse.ArgumentParser], None],
        "Callable[[argparse.Namespace, Clock, list[int]], list[Table]]",
    ],
] = {
    "put": (
        "one leaf from 4 KiB to 256 MiB: memcpy, device_put, jnp.array, new_ref, the pool, a step, the ring, recorded",
        _put_arguments,
        _put,
    ),
    "fit": ("the exact size classes of a million lengths, and what other choices pad", _fit_arguments, _fit),
    "lease": (
        "checkout and return with 10 and 100,000 slots and among threads; small writes into large slots",
        _lease_arguments,
        _lease,
    ),
    "tree": ("batches of 1 to 50 small leaves", _tree_arguments, _tree),
    "sharded": (
        "one leaf over all devices of this process, from 8 KiB to 16 MiB on each: device_put, the pool, a step",
        _sharded_arguments,
        _sharded,
    ),
    "device": (
        "what only an accelerator can tell: ring, pinned memory, overlap, addresses, memory; runs on CPU too",
        _device_arguments,
        _device,
    ),
    "loader": (
        "torch's DataLoader and grain as they are used today, and with the pool, on the same samples",
        _loader_arguments,
        _loader,
    ),
}


def _chosen_sizes(args: argparse.Namespace) -> list[int]:
    """The sizes that were asked for, or the default ones as far as `--quick` lets them; empty where it has no sizes."""
    if not hasattr(args, "sizes"):
        return []
    sizes: list[int] = args.sizes or args.default_sizes
    most: int | None = getattr(args, "max", None)
    if most is None and args.quick and not args.sizes:
        most = args.quick_max
    chosen = [size for size in sizes if most is None or size <= most]
    if not chosen:
        args.refuse(f"argument --max: leaves none of the sizes, the least of which is {min(sizes)} bytes")
    return sorted(set(chosen))


def _sizes(
    bench: argparse.ArgumentParser,
    default: list[int],
    what: str,
    least: int = 4,
    quick: int = QUICK_MAX,
    multiple: int = 4,
) -> None:
    from_, to = (f"{n // KIB}KiB" if n < MIB else f"{n // MIB}MiB" for n in (default[0], default[-1]))
    bench.add_argument(
        "--sizes",
        nargs="+",
        type=size(least, multiple),
        metavar="SIZE",
        help=f"{what}, such as 4KiB 1MiB (default: {from_} to {to})",
    )
    bench.set_defaults(default_sizes=default, quick_max=quick)

"""The frame of the `arenax` command: which subcommands there are, and what they need installed."""

import argparse
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Sequence

# The module of each subcommand has `add_arguments(parser)` and `run(args) -> int`.
COMMANDS = {
    "bench": ("_bench", "time the pool against its rivals, and say where it is slower"),
    "demo": ("_demo", "train a small language model on ragged text with and without the pool, and compare"),
    "fit": ("_fit", "choose the size classes that pad a list of lengths least"),
    "lab": ("_lab", "find out where a workload loses memory, and whether a pool would help it"),
    "plan": ("_plan_command", "choose the slots that a recorded program needs, or check a plan in CI"),
    "replay": ("_replay_command", "run a recorded program's allocations as real arrays, with and without the pool"),
    "stress": ("_stress_command", "torture the pool and verify its invariants"),
}
EXTRAS = ("rich", "matplotlib", "sortedcontainers")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the `arenax` command.

    Args:
        argv: The arguments; None takes those of the process.

    Returns:
        The exit status: 0 for success, 1 for failure or where an extra is missing. Bad arguments exit with 2.

    Raises:
        SystemExit: After ``--help``, ``--version`` and bad arguments, as `argparse` does.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    # Only the module of the subcommand asked for is imported: none may make another slow, or break it.
    name = arguments[0] if arguments and arguments[0] in COMMANDS else None
    missing = [extra for extra in EXTRAS if importlib.util.find_spec(extra) is None]
    if name and missing and not {"-h", "--help"} & set(arguments):
        print(f'arenax {name} needs {" and ".join(missing)}: pip install "arenax[tools]"', file=sys.stderr)
        return 1
    parser = argparse.ArgumentParser(prog="arenax", description="Shows, measures and stresses the arenax buffer pool.")
    parser.add_argument("--version", action="version", version=f"arenax {importlib.metadata.version('arenax')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command, (_, summary) in COMMANDS.items():
        subparser = commands.add_parser(command, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if command == name:
            module = importlib.import_module(f".{COMMANDS[command][0]}", __package__)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    args = parser.parse_args(arguments)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print(f"arenax {name}: interrupted", file=sys.stderr)
        return 130

"""`arenax demo`: the same training run three ways, each in a process of its own, and what came of it."""

import argparse
import contextlib
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._arguments import at_least, new_file

if TYPE_CHECKING:
    from ._demo_run import Run

BATCH_SIZE = 8

# Another shape adds the same numbers in another order, and training carries the difference on.
TOLERANCE = 1e-3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``arenax demo``."""
    parser.add_argument("--steps", type=at_least(1), default=150, help="training steps of each run (default: 150)")
    parser.add_argument("--seed", type=at_least(0), default=0, help="of the text and the parameters (default: 0)")
    parser.add_argument(
        "--png", type=new_file(".png"), default=Path("arenax-demo.png"), help="the picture (default: arenax-demo.png)"
    )
    parser.add_argument("--json", type=new_file(".json"), help="also write everything that was measured here")


def run(args: argparse.Namespace) -> int:
    """Runs ``arenax demo``.

    Args:
        args: What `add_arguments` declared.

    Returns:
        0, or 1 where a run failed or the runs' losses do not agree.
    """
    # Here, so that `--help` and bad arguments need not wait for JAX.
    from . import _corpus, _demo_report
    from ._demo_run import KINDS, Run, longest, save, size_classes

    began = time.perf_counter()
    console = _demo_report.console()
    try:
        batches = _corpus.batches(args.steps, BATCH_SIZE, args.seed)
    except FileNotFoundError as e:
        return _fail(str(e))
    lengths = [longest(texts) for texts in batches]
    classes = size_classes(batches)
    console.print(
        f"{args.steps} batches of {BATCH_SIZE} functions of Python's standard library, each as long as its longest "
        f"(at most {_corpus.MAX_LENGTH:,} bytes).\n{_demo_report.choice(classes, lengths, BATCH_SIZE)}"
    )
    runs: dict[str, Run] = {}
    with tempfile.TemporaryDirectory(prefix="arenax-demo-") as folder, _demo_report.progress(console) as progress:
        texts = Path(folder) / "texts.json"
        save(batches, texts)
        tasks = {kind: progress.add_task(_demo_report.TITLES[kind], start=False, total=args.steps) for kind in KINDS}
        for kind, task in tasks.items():
            progress.start_task(task)
            try:
                runs[kind] = measure(kind, texts, args.seed, lambda task=task: progress.advance(task))
            except subprocess.CalledProcessError as e:
                progress.stop()
                return _fail(f"the {kind} run ended with status {e.returncode}:\n{e.stderr.strip()}")
    ordered = [runs[kind] for kind in KINDS]
    rows = _demo_report.rows(ordered)
    words = _demo_report.words(ordered)
    wrong = disagreement(runs)
    seconds = time.perf_counter() - began
    if args.json is not None:
        everything = {
            "environment": environment(runs["pooled"]),
            "settings": {
                "steps": args.steps,
                "seed": args.seed,
                "batch_size": BATCH_SIZE,
                "size_classes": classes.boundaries,
                "lengths": lengths,
            },
            "runs": {kind: asdict(r) for kind, r in runs.items()},
            "table": [{"figure": name, **dict(zip(KINDS, cells, strict=True))} for name, *cells in rows],
            "words": words,
            "disagreement": wrong,
            "seconds": seconds,
        }
        args.json.write_text(json.dumps(everything, indent=1), encoding="utf-8")
    _demo_report.draw(ordered, args.png)
    _demo_report.show(console, rows, runs["pooled"].pool["text"], words)
    console.print(f"Picture: {args.png}. {seconds:.0f} seconds in all.")
    return _fail(wrong) if wrong else 0


def measure(kind: str, texts: Path, seed: int, on_step: Callable[[], object]) -> "Run":
    """Does one run in a process of its own.

    Args:
        kind: One of `KINDS`.
        texts: The file of the batches.
        seed: Of the parameters.
        on_step: Called as each step ends.

    Returns:
        The run.

    Raises:
        subprocess.CalledProcessError: Where the process failed; with what it wrote to its standard error.
    """
    from ._demo_run import Run

    # A cache on disk would make the runs depend on each other, and on the demo before this one.
    variables = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, "-m", "arenax_stress._demo_run", kind, str(texts), str(seed)]
    result = ""
    # A file takes any amount of warnings; a pipe that nobody reads would block the process.
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            encoding="utf-8",
        ) as process,
        contextlib.ExitStack() as on_error,
    ):
        on_error.callback(process.kill)  # An interrupt must not leave it behind.
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                result = line
            else:
                on_step()
        on_error.pop_all()
        if status := process.wait():
            errors.seek(0)
            raise subprocess.CalledProcessError(status, command, stderr=errors.read())
    return Run(**json.loads(result))


def disagreement(runs: dict[str, "Run"]) -> str:
    """Says where the losses of the runs differ more than they may; empty where they do not.

    Hand-padded and pooled runs compute the same on the same values, so that every bit must be the same. Exact shapes
    add up in another order.

    Args:
        runs: The three runs by kind.
    """
    for step, (hand, pool) in enumerate(zip(runs["padded"].losses, runs["pooled"].losses, strict=True), 1):
        if hand != pool:
            return f"the losses of the padded and the pooled run differ from step {step} on: {hand!r} and {pool!r}"
    for step, (own, hand) in enumerate(zip(runs["exact"].losses, runs["padded"].losses, strict=True), 1):
        if not math.isclose(own, hand, rel_tol=TOLERANCE):
            return f"the losses of the exact and the padded run differ too much in step {step}: {own} and {hand}"
    return ""


def environment(measured: "Run") -> dict[str, Any]:
    """What the figures depend on: versions and the machine."""
    return {
        **measured.environment,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu_count": os.cpu_count(),
    }


def _fail(message: str) -> int:
    print(f"arenax demo: {message}", file=sys.stderr)
    return 1

"""Writes the report of a trace: a page, its charts as pictures, and its figures for a program."""

import importlib.metadata
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from arenax import Trace

from ._lab_charts import charts, class_legend
from ._lab_findings import Findings
from ._lab_page import Page, render
from ._lab_runs import DEFAULT, Laboratory, Progress
from ._lab_verdict import Verdict, verdict
from ._sim_pool import MAX_CLASSES

PAGE, FIGURES = "report.html", "report.json"


def write_report(
    trace: Trace,
    path: str | os.PathLike[str],
    *,
    allocators: Sequence[str] = DEFAULT,
    max_classes: int = MAX_CLASSES,
    passes: int | None = None,
    story: str = "",
    progress: Progress | None = None,
) -> Verdict:
    """Tries a trace on simulated allocators and writes what that says about it; returns the verdict.

    A trace that was recorded from a pool (`BufferPool.record`) is served by the size classes of that pool, and its plan
    has the shapes that were asked for.

    Args:
        trace: What was asked for, and when it was given back.
        path: A folder, made where there is none: the page is its `report.html`, with `report.json` and a picture of
            each chart beside it. Or the page itself, with a name that ends in ``.html``.
        allocators: Of ``"bfc"``, ``"bfc_growing"``, ``"pytorch"``, ``"cupy"``, ``"rmm"``, ``"best_fit"``,
            ``"first_fit"``, ``"pool"`` and ``"plan"``, the pool with a plan.
        max_classes: The most size classes.
        passes: How often the trace runs in the long run; None is as often as 100,000 events take, from 2 to 200 times.
        story: What the trace is, in words.
        progress: Called with what is being done, and how much of all is done.

    Returns:
        The verdict.

    Raises:
        ValueError: For a trace of nothing, and an allocator that is not known.
        OSError: Where the files cannot be written.
        KeyboardInterrupt: After what there is was written; the page says what is missing.

    Example:
        >>> import pathlib, tempfile
        >>> from arenax_stress._lab_report import write_report
        >>> trace = Trace.from_events([("allocate", i, 1 << 20) for i in range(3)])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     found = write_report(trace, folder, allocators=["bfc", "plan"], passes=2)
        ...     sorted(file.name for file in pathlib.Path(folder).iterdir())
        ['fragmentation.png', 'map-bfc.png', 'map-plan.png', 'over-time.png', 'report.html', 'report.json',
         'waterfall.png']
        >>> print(found.headline)
        You do not need a pool to save memory. XLA's allocator serves this as it is, in 1.00× the peak (3 MiB); the
        planned pool takes as much.
    """
    lab = Laboratory(trace, allocators, max_classes=max_classes, passes=passes, story=story)
    try:
        lab.run(progress)
    finally:
        found = write(lab, path)
    return found


def write(lab: Laboratory, path: str | os.PathLike[str], command: str = "") -> Verdict:
    """Writes what a laboratory has found so far; see `write_report`.

    Args:
        lab: The laboratory.
        path: A folder, or the page itself.
        command: What makes the page again.
    """
    page = page_of(path)
    page.parent.mkdir(parents=True, exist_ok=True)
    said, drawn, version = verdict(lab.findings), charts(lab), importlib.metadata.version("arenax")
    text = render(Page(lab.findings, said, drawn, class_legend(lab), command, version))
    page.write_text(text, encoding="utf-8")
    for chart in drawn:
        (page.parent / f"{chart.name}.png").write_bytes(chart.png)
    found = figures(lab.findings, said) | {"arenax": version, "command": command}
    (page.parent / FIGURES).write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return said


def page_of(path: str | os.PathLike[str]) -> Path:
    """Returns where `write_report` puts the page: `path` itself where its name is that of one, or in that folder.

    Example:
        >>> from arenax_stress._lab_report import page_of
        >>> page_of("run.html").as_posix(), page_of("lab").as_posix()
        ('run.html', 'lab/report.html')
    """
    page = Path(path)
    return page if page.suffix.lower() in (".html", ".htm") else page / PAGE


def figures(findings: Findings, said: Verdict) -> dict[str, Any]:
    """Returns the figures and the verdict as `json.dump` takes them; sizes are in bytes."""
    return {
        "trace": attrs.asdict(findings.facts),
        "verdict": attrs.asdict(said),
        "missing": list(findings.missing),
        "allocators": {name: attrs.asdict(found) for name, found in findings.by_allocator.items()},
        "plan_bytes": {str(count): needed for count, needed in findings.plan_bytes.items()},
    }

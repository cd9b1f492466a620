"""The charts of the laboratory: where the bytes go, who lies where, and what changes over time."""

from typing import Any

import matplotlib.figure
import matplotlib.patches
import matplotlib.ticker
import numpy as np

from ._bench_table import size_text
from ._lab_draw import COLOURS, INK, PARTS, POINTS, Chart, binned, drawn, legend, means, over_events, plain, unit_of
from ._lab_findings import PLAN, Findings
from ._lab_map import Colours
from ._lab_runs import MAPPED, Laboratory
from ._lab_verdict import TITLES
from ._simulate import POOL

_LINES = {POOL: (0, (5, 1)), PLAN: (0, (2, 1)), "pytorch": (0, (4, 1, 1, 1)), "cupy": (0, (1, 1)), "rmm": (0, (6, 2))}
# From small classes to large ones, none of them too dark or too light for either background.
_RAMP = ("#5b6fd6", "#2fa4c4", "#35a66b", "#b4a227", "#e07b39", "#c9457b")


def charts(lab: Laboratory) -> list[Chart]:
    """Returns all charts that the findings suffice for, in the order of the page."""
    findings = lab.findings
    found: list[Chart] = []
    if any(f.waste for f in findings.by_allocator.values()):
        found.append(waterfall(findings))
    found += [occupancy(lab, name) for name in MAPPED if name in findings.maps]
    if findings.curves:
        found.append(over_time(findings))
    if findings.tight_curves.keys() - {POOL, PLAN}:
        found.append(fragmentation(findings))
    if len(findings.plan_bytes) > 1:
        found.append(classes(findings))
    return found


def waterfall(findings: Findings) -> Chart:
    """From what is alive to what a device must have, by allocator."""
    peak = findings.facts.peak_bytes
    rows = [(name, found) for name, found in findings.by_allocator.items() if found.waste is not None]
    totals = {name: f.waste.total_bytes / peak for name, f in rows if f.waste}
    reach = _reach(totals)
    cut = max(totals.values()) > reach

    def draw(figure: matplotlib.figure.Figure) -> None:
        axes = figure.subplots()
        for y, (name, found) in enumerate(rows):
            assert found.waste is not None
            w = found.waste
            left = 0.0
            for part, size in zip(PARTS, (w.live_bytes, w.rounding_bytes, w.unused_bytes, w.hole_bytes), strict=True):
                colour, label = PARTS[part]
                axes.barh(y, size / peak, left=left, height=0.45, color=colour, label=label if not y else None)
                left += size / peak
            axes.plot([1, 1], [y - 0.28, y + 0.28], color=INK, linewidth=0.9)
            axes.text(0, y - 0.32, TITLES[name], va="bottom", color=INK)
            told = f"{left:.2f}×"
            if found.least is not None and found.least.bytes is not None:
                axes.plot(
                    min(found.least.bytes / peak, reach * 1.02), y, marker="d", color=INK, markersize=6, clip_on=False
                )
                told += f", ♦ {found.least.bytes / peak:.2f}×"
            axes.text(1.0, y - 0.32, told, va="bottom", ha="right", color=INK, transform=axes.get_yaxis_transform())
        axes.set_ylim(len(rows) - 0.6, -0.85)
        axes.set_yticks([])
        axes.set_xlim(0, reach * 1.02)
        axes.set_xlabel("bytes, as a multiple of the peak of live bytes")
        plain(axes, left=False)
        # A part that is nothing in the first row is one in another.
        handles = [
            matplotlib.patches.Patch(color=colour, label=label)
            for part, (colour, label) in PARTS.items()
            if part != "holes" or any(f.waste.hole_bytes > peak // 200 for _, f in rows if f.waste)
        ]
        legend(figure, 2, handles)

    told = "; ".join(
        f"{TITLES[n]} {f.waste.total_bytes / peak:.2f} times the peak" for n, f in rows if f.waste is not None
    )
    return drawn(
        "waterfall",
        "From live bytes to device bytes",
        f"Bars of what each allocator takes of unlimited memory: {told}.",
        "What each allocator takes of unlimited memory, in parts; the line is the peak of live bytes, below which "
        "nothing can go. ♦ is the least device on which it serves the whole trace."
        + (" What is more than twice the others is cut off." if cut else ""),
        draw,
        0.95 + 0.52 * len(rows),
    )


def occupancy(lab: Laboratory, name: str) -> Chart:
    """Who was where, and when, in unlimited memory."""
    observer, trace = lab.findings.maps[name], lab.trace
    live = lab.findings.facts.peak_bytes
    heights = {n: m.height for n, m in lab.findings.maps.items()}
    # One scale for all, so that a taller map is more memory; but for one that would be out of all proportion.
    height = heights[name]
    inches = 2.1 * min(max(height / min(heights.values()), 1.0), 2.5)
    image = observer.image(trace, lab.class_of, _class_colours(lab), height)
    unit, unit_name = unit_of(height)

    def draw(figure: matplotlib.figure.Figure) -> None:
        axes = figure.subplots()
        extent = (0, len(trace.steps), 0, height / unit)
        axes.imshow(image, extent=extent, aspect="auto", interpolation="none")
        axes.axhline(live / unit, color=INK, linewidth=0.9, linestyle=(0, (3, 2)))
        axes.set_xlabel("event")
        axes.set_ylabel(f"address, {unit_name}")
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(4, integer=True))
        axes.xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.0f}"))
        axes.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(5))
        plain(axes, grid=False)

    curve = lab.findings.curves[name]
    alive = float(curve.requested_bytes.mean()) / max(float(curve.reserved_bytes.mean()), 1.0)
    title = TITLES[name]
    return drawn(
        f"map-{name}",
        f"{title[0].upper()}{title[1:]}",
        f"Addresses over time with {title}, coloured by size class, up to {size_text(height)} where at most "
        f"{size_text(live)} are alive.",
        f"{size_text(height)} at its highest. On the average {alive:.0%} of what it holds is alive.",
        draw,
        inches + 0.6,
    )


def over_time(findings: Findings) -> Chart:
    """What each allocator holds over time, of unlimited memory."""
    some = next(iter(findings.curves.values()))
    top = _reach({n: float(c.reserved_bytes.max(initial=0)) for n, c in findings.curves.items()})
    unit, unit_name = unit_of(top)

    def draw(figure: matplotlib.figure.Figure) -> None:
        axes = figure.subplots()
        events = some.events + 1
        at, live = binned(events, some.requested_bytes / unit, np.maximum.reduceat)
        axes.fill_between(at, live, color=PARTS["live"][0], alpha=0.5, linewidth=0, label="alive")
        for name, curve in findings.curves.items():
            at, held = binned(curve.events + 1, curve.reserved_bytes / unit, np.maximum.reduceat)
            axes.plot(at, held, **_look(name))
        over_events(axes, f"{unit_name} held")
        axes.set_ylim(top=top / unit * 1.05)
        legend(figure, 2)

    held = "; ".join(
        f"{TITLES[n]} {size_text(int(c.reserved_bytes[-1]))}" for n, c in findings.curves.items() if len(c.events)
    )
    return drawn(
        "over-time",
        "What is held over time",
        f"Bytes that each allocator holds of unlimited memory, above those alive. At the end: {held}.",
        "With unlimited memory. What rises in steps is memory kept in sizes that nobody asks for any more; of a "
        "region that is never given back, such as XLA's, the line is all below its free end.",
        draw,
        3.2,
    )


def fragmentation(findings: Findings) -> Chart:
    """How broken up the free memory is, over the long run in a tight device."""
    shown = {n: c for n, c in findings.tight_curves.items() if n not in (POOL, PLAN)}
    passes = max((f.long.passes for f in findings.by_allocator.values() if f.long is not None), default=1)
    # So many passes are seen one by one no more: a point for each.
    points = passes if passes > 12 else POINTS

    def draw(figure: matplotlib.figure.Figure) -> None:
        axes = figure.subplots()
        for name, curve in shown.items():
            at, broken = binned(curve.events + 1, curve.fragmentation, means, points)
            axes.plot(at, broken, **_look(name))
        over_events(axes, "fragmentation")
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0, decimals=0))
        legend(figure, 2)

    told = "; ".join(f"{TITLES[n]} {float(c.fragmentation.mean()):.0%}" for n, c in shown.items())
    return drawn(
        "fragmentation",
        "Fragmentation over time",
        f"Share of the free memory outside its largest piece, in a device of 105 % of the peak. On average: {told}.",
        "The long run, in a device of 105 % of the peak: the share of what is free that is not in its largest piece. A "
        "pool is not in it: its slots are of fixed sizes, and what it loses are idle slots, which its map shows.",
        draw,
        3.2,
    )


def classes(findings: Findings) -> Chart:
    """What a plan takes with fewer or more size classes."""
    peak = findings.facts.peak_bytes
    counts = list(findings.plan_bytes)
    bfc = findings.need("bfc")

    def draw(figure: matplotlib.figure.Figure) -> None:
        axes = figure.subplots()
        taken = [findings.plan_bytes[count] / peak for count in counts]
        axes.plot(counts, taken, marker="o", markersize=4, **_look(PLAN))
        if bfc is not None:
            axes.axhline(bfc, **_look("bfc"))
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
        axes.set_xlabel("size classes at most")
        axes.set_ylabel("bytes ÷ peak")
        axes.set_ylim(bottom=min(1.0, *taken) - 0.02)
        plain(axes)
        legend(figure, 2)

    told = ", ".join(f"{count} classes {size / peak:.2f}" for count, size in findings.plan_bytes.items())
    return drawn(
        "classes",
        "What more size classes would change",
        f"What a plan takes, as a multiple of the peak, by the number of its size classes: {told}.",
        "What the slots of a plan take with so many size classes, and the least device for XLA's allocator beside it.",
        draw,
        2.6,
    )


def class_legend(lab: Laboratory) -> list[tuple[str, str]]:
    """The colour and the name of each size class, from the smallest up."""
    colours = _class_colours(lab)
    order = sorted(range(len(colours)), key=lambda n: lab.plan.classes[n].size_class.nbytes)
    names = [
        f"≤ {size_text(c.size_class.nbytes)}" if lab.plan.is_of_bytes else str(c.size_class) for c in lab.plan.classes
    ]
    return [("#{:02x}{:02x}{:02x}".format(*colours[n]), names[n]) for n in order]


def _class_colours(lab: Laboratory) -> Colours:
    ramp = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in _RAMP])
    sizes = np.array([c.size_class.nbytes for c in lab.plan.classes])
    ranks = np.argsort(np.argsort(sizes, kind="stable"), kind="stable")
    at = ranks / max(len(sizes) - 1, 1) * (len(ramp) - 1)
    columns = [np.interp(at, np.arange(len(ramp)), ramp[:, i]).round().astype(int) for i in range(3)]
    return [(int(r), int(g), int(b)) for r, g, b in zip(*columns, strict=True)]


def _look(name: str) -> dict[str, Any]:
    width = 2.0 if name in ("bfc", POOL, PLAN) else 1.3
    return {"color": COLOURS[name], "linestyle": _LINES.get(name, "-"), "linewidth": width, "label": TITLES[name]}


def _reach(needs: dict[str, float]) -> float:
    """How far an axis goes: to the most that is needed, but for a cache that would make all others small."""
    known = [need for name, need in needs.items() if name in (*MAPPED, "best_fit")] or list(needs.values())
    return min(max(needs.values()), 2 * max(known))

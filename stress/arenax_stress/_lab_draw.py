"""How the charts of the laboratory are drawn: narrow, so that a phone shows them, and in colours that the page sets."""

import io
import re
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import attrs
import matplotlib as mpl
import matplotlib.figure
import matplotlib.ticker
import numpy as np

from ._lab_findings import PLAN
from ._simulate import POOL

# In inches of 72 units, which a phone of 360 pixels shows about as they are.
WIDTH = 4.6
# Ink is a black that is told from matplotlib's own, which the SVG leaves out.
INK, FAINT = "#000001", "#88888a"
# Okabe and Ito's palette, which the colour-blind tell apart; the page has lighter ones for a dark background.
COLOURS = {
    "bfc": "#d55e00",
    "bfc_growing": "#a0522d",
    "pytorch": "#e69f00",
    "cupy": "#cc79a7",
    "rmm": "#56b4e9",
    "best_fit": "#7f7f80",
    "first_fit": "#5f5f60",
    POOL: "#0072b2",
    PLAN: "#009e73",
}
PARTS = {
    "live": ("#b4b4b6", "alive"),
    "rounding": ("#f0b429", "rounding, padding"),
    "unused": ("#c2477f", "holes, cached, idle"),
    "holes": ("#6b4fa0", "alignment of slots"),
}
# The most points of a line.
POINTS = 120


@attrs.frozen
class Chart:
    """A chart, as it stands in the page and as a file.

    Attributes:
        name: Of its file, and of its identifiers in the page.
        title: What it is.
        alt: What it shows, for those who do not see it.
        caption: How to read it.
        svg: The drawing.
        png: The same as a picture, in light colours.
    """

    name: str
    title: str
    alt: str
    caption: str
    svg: str
    png: bytes


def binned(at: Any, values: Any, reduce: Callable[[Any, Any], Any], points: int = POINTS) -> tuple[Any, Any]:
    """At most so many points of a curve, each that of the samples which it stands for."""
    if len(values) <= points:
        return at, values
    starts = np.arange(points) * len(values) // points
    ends = np.append(starts[1:], len(values)) - 1
    return at[ends], reduce(values, starts)


def means(values: Any, starts: Any) -> Any:
    """The mean of each run of values; in the form of `numpy.maximum.reduceat`."""
    return np.add.reduceat(values, starts) / np.diff(np.append(starts, len(values)))


def unit_of(top: float) -> tuple[int, str]:
    """The unit, and its name, in which an axis up to `top` bytes is labelled."""
    for name, unit in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if top >= 2 * unit:
            return unit, name
    return 1, "bytes"


def over_events(axes: Any, label: str) -> None:
    """Makes the horizontal axis one of events, and names the vertical one."""
    axes.set_xlabel("event")
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(4, integer=True))
    axes.xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.0f}"))
    plain(axes)


def plain(axes: Any, left: bool = True, grid: bool = True) -> None:
    """Takes away what an axis does not need."""
    axes.spines[["top", "right"] if left else ["top", "right", "left"]].set_visible(False)
    if grid:
        axes.grid(axis="both" if left else "x", color=FAINT, alpha=0.3, linewidth=0.6)
    axes.set_axisbelow(True)


def legend(figure: matplotlib.figure.Figure, columns: int, handles: Sequence[Any] | None = None) -> None:
    """Puts the legend below, where it takes nothing of the width."""
    if handles is None:
        handles = figure.axes[0].get_legend_handles_labels()[0]
    figure.legend(handles=list(handles), loc="outside lower left", ncols=columns, frameon=False, labelcolor=INK)


def drawn(
    name: str,
    title: str,
    alt: str,
    caption: str,
    draw: Callable[[matplotlib.figure.Figure], None],
    height: float,
) -> Chart:
    """Returns a chart.

    Args:
        name: Of its file.
        title: What it is.
        alt: What it shows.
        caption: How to read it.
        draw: Draws it in a figure.
        height: Inches.
    """
    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.size": 11,
        "legend.fontsize": 10,
        "xtick.labelsize": 10,
        "ytick.labelsize": 10,
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    }
    with mpl.rc_context(settings):
        figure = matplotlib.figure.Figure(figsize=(WIDTH, height), layout="constrained")
        draw(figure)
        svg, png = io.StringIO(), io.BytesIO()
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
        figure.set_layout_engine("none")  # The layout is the same for both, and takes most of the time.
        figure.savefig(png, format="png", dpi=160, metadata={"Software": None})
    return Chart(name, title, alt, caption, themed(svg.getvalue(), name, alt), png.getvalue())


def themed(svg: str, name: str, alt: str) -> str:
    """Makes a drawing part of a page: no header, identifiers of its own, no fixed size, colours that the page sets."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    head, rest = svg.split(">", 1)
    head = re.sub(r'\s(?:width|height|version)="[^"]*"', "", head)
    svg = f'{head} role="img" aria-label="{escape(alt)}">{rest}'
    for colour, variable in _variables().items():
        svg = svg.replace(colour, variable)
    return svg


def _variables() -> dict[str, str]:
    found = {INK: "currentColor", FAINT: "var(--faint)"}
    found |= {colour: f"var(--{name.replace('_', '-')})" for name, colour in COLOURS.items()}
    return found | {colour: f"var(--{part})" for part, (colour, _) in PARTS.items()}

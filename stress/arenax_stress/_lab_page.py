"""The report as one page: it needs no network and no script, reads on a phone, and has light and dark colours."""

import re
from collections.abc import Iterable, Sequence
from html import escape

import attrs

from ._bench_table import size_text
from ._lab_draw import COLOURS, PARTS, Chart
from ._lab_findings import PLAN, TIGHT, Findings, Found
from ._lab_verdict import SHORT, Verdict
from ._simulate import POOL

# For a dark background, where Okabe and Ito's darker colours would sink.
_DARK = {"bfc": "#ff8438", POOL: "#58b4f0", PLAN: "#2fd1a0", "best_fit": "#a5a5a8", "first_fit": "#8c8c90"}
_DARK_PARTS = {"live": "#77777c", "rounding": "#f3c14f", "unused": "#e0699f", "holes": "#9a83d6"}

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1d21; --soft: #5b5d66; --paper: #ffffff; --panel: #f4f4f6; --line: #d9d9df;
  --faint: #88888a; --accent: #0072b2; --warn: #8a4b00; LIGHT }
@media (prefers-color-scheme: dark) { :root { --ink: #e9e9ed; --soft: #a9abb5; --paper: #15161a; --panel: #1f2026;
  --line: #35363e; --faint: #77777c; --accent: #58b4f0; --warn: #f3c14f; DARK } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); overflow-wrap: break-word;
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
header, main, footer { max-width: 68rem; margin: 0 auto; padding: 0 1rem; }
header { padding-top: 1.5rem; }
.kicker { margin: 0; color: var(--soft); font-size: .875rem; }
h1 { margin: .1rem 0 .75rem; font-size: 1.6rem; line-height: 1.2; }
h2 { margin: 2.25rem 0 .5rem; font-size: 1.2rem; }
h3 { margin: 1.25rem 0 .25rem; font-size: 1rem; }
p, ul { max-width: 44rem; }
ul { padding-left: 1.1rem; margin: .25rem 0; }
li { margin: .3rem 0; }
.verdict { margin: 0; padding: .9rem 1rem; max-width: 48rem; background: var(--panel);
  border-left: .3rem solid var(--accent); border-radius: .25rem; font-size: 1.125rem; }
.missing { color: var(--warn); font-weight: 600; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(6.5rem, 1fr)); gap: .5rem 1.25rem;
  margin: 1rem 0 0; max-width: 48rem; }
.facts dt { color: var(--soft); font-size: .8125rem; }
.facts dd { margin: 0; font-size: 1.125rem; font-variant-numeric: tabular-nums; }
.answers { display: grid; gap: 0 2.5rem; }
.charts { display: grid; gap: 1.75rem 2.5rem; align-items: start; }
figure { margin: 0; max-width: 33rem; min-width: 0; }
figure h3 { margin-top: 0; }
figure svg { display: block; width: 100%; height: auto; color: var(--ink); overflow: visible; }
figure svg text { font-family: inherit !important; }
figcaption { color: var(--soft); font-size: .875rem; line-height: 1.45; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem .9rem; list-style: none; padding: 0; margin: .75rem 0 1.25rem;
  font-size: .8125rem; max-width: none; }
.legend li { margin: 0; white-space: nowrap; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; border-radius: .15em; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: .25rem; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .4rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
thead th { vertical-align: bottom; white-space: normal; font-weight: 600; min-width: 4.5rem; background: var(--panel); }
tbody tr:last-child > * { border-bottom: 0; }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--panel); font-weight: 600; }
caption { caption-side: bottom; text-align: left; padding: .5rem .6rem; color: var(--soft); }
code { font-size: .9em; }
footer { color: var(--soft); font-size: .875rem; padding-top: 2rem; padding-bottom: 2.5rem; }
@media (min-width: 60rem) { .answers, .charts { grid-template-columns: 1fr 1fr; } h1 { font-size: 2rem; } }
@media print { .scroll { overflow: visible; } figure { break-inside: avoid; } }
"""


MAPS = (
    "With unlimited memory: each buffer from its allocation to its free, and paler where its chunk is larger than "
    "what was asked for. The dashed line is the peak of live bytes. Grey are slots that lie idle; what is empty below "
    "what is taken are holes. A taller map is more memory, at the same scale."
)


@attrs.frozen
class Page:
    """What a page is made of.

    Attributes:
        findings: The figures.
        verdict: What they mean.
        charts: The drawings.
        legend: Colour and name of each size class.
        command: What makes the page again, or an empty text.
        version: That of arenax.
    """

    findings: Findings
    verdict: Verdict
    charts: Sequence[Chart]
    legend: Sequence[tuple[str, str]]
    command: str
    version: str


def render(page: Page) -> str:
    """Returns the page; whatever comes from a trace is escaped."""
    facts, maps = page.findings.facts, [c for c in page.charts if c.name.startswith("map-")]
    name = escape(facts.name)
    body = [
        f'<header><p class="kicker">arenax lab: where memory is lost</p>\n<h1>{name}</h1>',
        f'<p class="verdict">{_text(page.verdict.headline)}</p>',
        *(_missing(page.findings)),
        _facts(page.findings),
        f"<p>{_text(facts.story)}</p>" if facts.story else "",
        "</header>\n<main>",
        '<div class="answers">',
        *(
            f"<section><h2>{escape(a.question)}</h2>\n<ul>{''.join(f'<li>{_text(s)}</li>' for s in a.sentences)}</ul>"
            "</section>"
            for a in page.verdict.answers
        ),
        "</div>",
        '<section><h2>Where the bytes go</h2>\n<div class="charts">',
        *(_figure(c) for c in page.charts if c not in maps),
        "</div></section>",
    ]
    if maps:
        body += [
            "<section><h2>Who lies where</h2>",
            f"<p>{MAPS} {_classes_text(page)}</p>",
            f'<ul class="legend" aria-label="size classes">{"".join(_swatches(page.legend))}</ul>',
            '<div class="charts">',
            *map(_figure, maps),
            "</div></section>",
        ]
    body += [_table(page.findings), _notes(page), "</main>"]
    made = f"Made by arenax {escape(page.version)}" + (
        f" with <code>{escape(page.command)}</code>" if page.command else ""
    )
    body.append(f"<footer>{made}. The figures are in <code>report.json</code>, the charts beside it.</footer>")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>arenax lab: {name}</title>\n'
        f"<style>{_style()}</style>\n</head>\n<body>\n" + "\n".join(filter(None, body)) + "\n</body>\n</html>\n"
    )


def _style() -> str:
    light = COLOURS | {part: colour for part, (colour, _) in PARTS.items()}
    return _STYLE.replace("LIGHT", _variables(light)).replace("DARK", _variables(_DARK | _DARK_PARTS))


def _variables(colours: dict[str, str]) -> str:
    return " ".join(f"--{name.replace('_', '-')}: {colour};" for name, colour in colours.items())


def _missing(findings: Findings) -> Iterable[str]:
    if findings.missing:
        yield f'<p class="missing">It was interrupted. Missing: {escape("; ".join(findings.missing))}.</p>'


def _facts(findings: Findings) -> str:
    facts = findings.facts
    told = [
        ("peak of live bytes", size_text(facts.peak_bytes)),
        ("buffers", f"{facts.buffers:,}"),
        ("distinct sizes", f"{facts.distinct_sizes:,}"),
        ("largest", size_text(facts.largest_bytes)),
        ("size classes", f"{facts.classes:,}"),
    ]
    if facts.families:
        told.append(("kinds of array", f"{facts.families:,}"))
    return f'<dl class="facts">{"".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in told)}</dl>'


def _figure(chart: Chart) -> str:
    return (
        f'<figure id="{chart.name}"><h3>{escape(chart.title)}</h3>\n{chart.svg}\n'
        f"<figcaption>{escape(chart.caption)}</figcaption></figure>"
    )


def _classes_text(page: Page) -> str:
    if page.findings.facts.families:
        return "The colours are the size classes that a plan has for what was recorded:"
    return "The colours are the size classes of the plan, by the bytes that they hold:"


def _swatches(legend: Sequence[tuple[str, str]], most: int = 32) -> Iterable[str]:
    for colour, name in legend[:most]:
        yield f'<li><i style="background:{colour}"></i>{escape(name)}</li>'
    if len(legend) > most:
        yield f"<li>and {len(legend) - most} more</li>"


HEADINGS = (
    "allocator",
    "unlimited memory",
    "rounding, padding",
    "unused",
    "least device",
    f"failed at {TIGHT:.0%}",
    "first, at event",
    "creations per 1,000",
    "conversions per 1,000",
    "fragmented at its end",
)


def cells(name: str, found: Found, peak: int) -> tuple[str, ...]:
    """The row of an allocator, under `HEADINGS`; a dash where there is no figure."""
    row = [SHORT[name]]
    w, least, run = found.waste, found.least, found.long
    if w is None:
        row += ["–"] * 3
    else:
        unused = w.unused_bytes + w.hole_bytes
        row += [f"{w.total_bytes / peak:.2f}×", _share(w.rounding_bytes / peak), _share(unused / peak)]
    if least is None:
        row.append("–")
    else:
        row.append("none found" if least.bytes is None else f"{least.bytes / peak:.2f}×{'*' if least.islands else ''}")
    if run is None:
        row += ["–"] * 5
    elif run.needs_bytes:
        row += ["cannot begin", *["–"] * 4]
    else:
        creations, conversions = run.per_thousand
        pooled = name in (POOL, PLAN)
        row += [
            f"{run.failed:,} of {run.requests:,}",
            "–" if run.first is None else f"{run.first.event:,}",
            f"{creations:.1f}",
            f"{conversions:.1f}" if pooled else "–",
            "–" if pooled else f"{run.fragmentation:.0%}",
        ]
    return tuple(row)


def _table(findings: Findings) -> str:
    peak = findings.facts.peak_bytes
    head = "".join(f'<th scope="col">{heading}</th>' for heading in HEADINGS)
    rows: list[str] = []
    for name, found in findings.by_allocator.items():
        first, *rest = map(escape, cells(name, found, peak))
        rows.append(f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>')
    starred = any(f.least is not None and f.least.islands for f in findings.by_allocator.values())
    star = " * It survives in some smaller devices too, and fails in between." if starred else ""
    return (
        "<section><h2>All figures</h2>\n"
        '<div class="scroll" role="region" aria-label="all figures" tabindex="0"><table>'
        f"<caption>Bytes are multiples of the peak of live bytes, {size_text(peak)}.{star}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _notes(page: Page) -> str:
    findings = page.findings
    runs = [f.long for f in findings.by_allocator.values() if f.long is not None]
    steps = [f.least.resolution_bytes for f in findings.by_allocator.values() if f.least is not None]
    finest = f", in the end by at most {max(steps) / findings.facts.peak_bytes:.1%} of the peak" if steps else ""
    long = f"The trace {runs[0].passes} times over, in {size_text(runs[0].limit_bytes)}." if runs else "Not run."
    terms = {
        "Simulated": "Nothing ran on a device. Each allocator is a model of the real one, in bytes and addresses; "
        "XLA's has its default options, in one region that is reserved at the start.",
        "Unlimited memory": "As much as the allocator asks for. Rounding is what chunks take on top of what was "
        "asked for, a chunk that is given whole among it; unused is what the allocator holds on top of its chunks: "
        "holes in a region, blocks that a cache keeps, slots of the pool that lie idle.",
        "Least device": f"Sizes are tried from above, for survival need not be monotone{finest}; counted is the least "
        "with which it and every larger one that was tried served the trace, twice over where an allocator keeps "
        "anything. The pool is held to both: its budget, and a place in one piece for each slot. What asks for a lot "
        "may be content with little: a cache gives back what it has kept, a pool converts idle slots. And the last "
        "bytes of a device are the worst used, since XLA's allocator gives a chunk whole where less than half of it "
        "would be left.",
        f"At {TIGHT:.0%}": f"{long} A failed request is left out, and the rest goes on; a program would have ended.",
        "PyTorch, CuPy and RMM": "They take their segments from a device that finds a place for each as long as it has "
        "the bytes. They are here to compare with; JAX does not offer them.",
    }
    told = "".join(f"<h3>{escape(term)}</h3>\n<p>{escape(text)}</p>\n" for term, text in terms.items())
    return f"<section><h2>How it was measured</h2>\n{told}</section>"


def _text(text: str) -> str:
    """Escaped, with what stands between backquotes as code."""
    return re.sub(r"(`+)(.+?)\1", r"<code>\2</code>", escape(text))


def _share(share: float) -> str:
    return f"{share:.1%}" if share < 1 else f"{share:.0%}"

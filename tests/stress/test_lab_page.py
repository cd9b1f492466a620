"""The report is one page that needs nothing else, and a browser draws it: on a phone, on a desk, and in the dark."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arenax
from arenax_stress import Trace
from arenax_stress._lab_charts import charts, class_legend
from arenax_stress._lab_draw import COLOURS, themed
from arenax_stress._lab_findings import Found
from arenax_stress._lab_map import COLUMNS, IDLE, ROUNDED, ROWS, Occupancy
from arenax_stress._lab_page import HEADINGS, cells
from arenax_stress._lab_report import write, write_report
from arenax_stress._lab_runs import Laboratory
from arenax_stress._scenarios import SCENARIOS

EVIL = "<script>alert('x')</script> & \"net\""
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
# What a browser drew, written into the page by a script that only the test adds.
MEASURE = """<script>
const boxes = [...document.querySelectorAll("figure svg")].map(svg => {
  const box = svg.getBoundingClientRect(), texts = [...svg.querySelectorAll("text")];
  return {id: svg.parentNode.id, width: box.width, height: box.height, texts: texts.length,
    least: Math.min(...texts.map(t => t.getBoundingClientRect().height)), ink: getComputedStyle(texts[0]).fill,
    colours: [...svg.querySelectorAll("path")].map(p => getComputedStyle(p).stroke).filter(s => s != "none").length,
    images: svg.querySelectorAll("image").length};
});
parent.postMessage(JSON.stringify({boxes, width: innerWidth,
  page: document.documentElement.scrollWidth, paper: getComputedStyle(document.body).backgroundColor,
  dark: matchMedia("(prefers-color-scheme: dark)").matches}), "*");
</script>"""
# A window cannot be as narrow as a phone, but a frame can.
FRAME = """<!doctype html><meta charset="utf-8"><meta name="color-scheme" content="light dark"><pre id="measured"></pre>
<script>
onmessage = e => { document.getElementById("measured").textContent = e.data; console.log("measured"); };
</script>
<iframe src="measured.html" width="WIDTH" height="2000" style="border: 0"></iframe>"""


@pytest.fixture(scope="module")
def lab() -> Laboratory:
    trace = SCENARIOS["kept_results"](events=1500)
    trace.name = EVIL
    made = Laboratory(trace, passes=2, story=f"About {EVIL} and `code`.")
    made.run()
    return made


@pytest.fixture(scope="module")
def report(lab: Laboratory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lab")
    write(lab, folder, command=f"arenax lab {EVIL}")
    return folder / "report.html"


class Parser(HTMLParser):
    """All tags with their attributes, and which are not closed in their order."""

    VOID = frozenset({"meta", "link", "br", "img"})

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(text: str) -> Parser:
    parser = Parser()
    parser.feed(text)
    parser.close()
    assert not parser.open
    return parser


def test_it_is_one_page_without_network_or_script(report: Path) -> None:
    text = report.read_text(encoding="utf-8")
    tags = parsed(text).tags
    assert len(text) < 2 * 2**20
    assert not [tag for tag, _ in tags if tag in ("script", "iframe", "object")]
    for tag, found in tags:
        for name in ("src", "href", "xlink:href"):
            value = found.get(name)
            assert value is None or value.startswith(("data:", "#")), (tag, value)
        assert not [name for name in found if name.startswith("on")]
    assert "@import" not in text
    assert "url(http" not in text


def test_names_are_escaped(report: Path) -> None:
    text = report.read_text(encoding="utf-8")
    assert "<script" not in text
    assert text.count("&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt; &amp; &quot;net&quot;") == 4
    assert "<code>code</code>" in text


def test_it_is_semantic(report: Path, lab: Laboratory) -> None:
    text = report.read_text(encoding="utf-8")
    tags = parsed(text).tags
    names = [tag for tag, _ in tags]
    assert names.count("h1") == names.count("main") == names.count("table") == 1
    assert {"header", "footer", "section", "figcaption", "caption", "dl"} <= set(names)
    assert names.count("figure") == names.count("svg") == 7
    ids = [found["id"] for _, found in tags if "id" in found]
    assert len(ids) == len(set(ids))
    for tag, found in tags:
        if tag == "svg":
            assert found["role"] == "img"
            assert len(found["aria-label"] or "") > 40
            assert found["viewbox"]
            assert "width" not in found
            assert "height" not in found
    # Each reference inside a drawing finds what it names.
    assert set(re.findall(r'(?:url\(|href=")#([^)"]+)', text)) <= set(ids)
    assert text.count('<th scope="col">') == len(HEADINGS)
    assert text.count('<th scope="row">') == len(lab.findings.by_allocator)


def test_the_colours_are_the_pages(report: Path) -> None:
    text = report.read_text(encoding="utf-8")
    drawings = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert not {colour for colour in COLOURS.values() if colour in drawings}
    used = set(re.findall(r"var\(--([a-z-]+)\)", text))
    defined = set(re.findall(r"--([a-z-]+): #", text))
    assert used <= defined
    assert "prefers-color-scheme: dark" in text
    # Black that no theme changes would not be seen in the dark.
    assert not re.search(r"(fill|stroke): ?#000", drawings)


def test_pictures_and_figures_lie_beside_it(report: Path, lab: Laboratory) -> None:
    pictures = sorted(path.stem for path in report.parent.glob("*.png"))
    assert pictures == sorted(chart.name for chart in charts(lab))
    assert pictures == [
        "classes", "fragmentation", "map-bfc", "map-plan", "map-pool", "over-time", "waterfall",
    ]  # fmt: skip
    found = json.loads((report.parent / "report.json").read_text(encoding="utf-8"))
    assert found["trace"]["name"] == EVIL
    assert found["trace"]["peak_bytes"] == lab.trace.peak_bytes
    assert found["missing"] == []
    bfc = found["allocators"]["bfc"]
    assert bfc["waste"]["live_bytes"] == lab.trace.peak_bytes
    assert bfc["least"]["bytes"] >= lab.trace.peak_bytes
    assert found["verdict"]["headline"]


def test_the_page_itself_may_be_named(tmp_path: Path) -> None:
    trace = Trace.from_events([("allocate", i, 4096) for i in range(5)])
    write_report(trace, tmp_path / "new" / "mine.html", allocators=["bfc"], passes=1)
    assert (tmp_path / "new" / "mine.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert (tmp_path / "new" / "report.json").exists()


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    lab = Laboratory(SCENARIOS["kept_results"](events=300), ("bfc", "pool"))
    write(lab, tmp_path / "nothing")
    text = (tmp_path / "nothing" / "report.html").read_text(encoding="utf-8")
    parsed(text)
    assert "It was interrupted. Missing: without bounds of bfc, pool; the least device of bfc, pool; the long" in text
    assert "there is no verdict" in text
    assert cells("bfc", Found(), 1) == ("XLA (bfc)", *["–"] * (len(HEADINGS) - 1))


def test_a_recorded_pools_classes_have_their_shapes(tmp_path: Path) -> None:
    with arenax.BufferPool(ragged=arenax.Ragged(0, arenax.SizeClasses.pow2(64, 512))) as pool, pool.record() as trace:
        for n in (70, 200, 500, 70):
            with pool.step() as step:
                step.put({"x": np.ones((n, 4), np.float32)})
                step.zeros((3, 3), "float32")
    lab = Laboratory(trace, passes=2)
    lab.run()
    assert {name for _, name in class_legend(lab)} >= {"float32[3,3]"}
    assert all(re.fullmatch(r"#[0-9a-f]{6}", colour) for colour, _ in class_legend(lab))
    assert lab.findings.facts.families == 2
    # The pool has the four classes that the recording names: three lengths, and the zeros.
    recorded = {(request.size_class, request.axis) for request in trace.requests or ()}
    assert len(recorded) == 4
    assert lab.findings.maps["pool"].height >= sum(c.nbytes for c, _ in recorded)
    write(lab, tmp_path)
    assert "float32[3,3]" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_map_shows_padding_idle_slots_and_the_least_buffer() -> None:
    trace = Trace.from_events(
        [("allocate", "a", 256), ("free", "a", 0), ("allocate", "b", 1), ("allocate", "c", 512), ("free", "c", 0)]
    )
    seen = Occupancy(keeps_slots=True)
    for placed in ((0, 0, 512, 0), (1, 0, 512, None), (2, 1, 512, 512), (3, 2, 512, 0), (4, 2, 512, None)):
        seen(*placed)
    assert seen.height == 1024
    colours = [(10, 0, 0), (0, 20, 0)]
    image = seen.image(trace, [0, 1, 0], colours, 1024)
    assert image.shape == (ROWS, COLUMNS, 4)

    def at(event: float, address: int) -> list[int]:
        return image[ROWS - 1 - address * ROWS // 1024, int(event * COLUMNS / 5)].tolist()

    assert at(0.5, 100) == [10, 0, 0, 255]
    assert at(0.5, 400) == [10, 0, 0, ROUNDED]
    assert at(1.5, 100)[3] == at(4.5, 100)[3] == IDLE
    assert at(3.5, 500) == [10, 0, 0, 255]
    # One byte is a line of its own colour, not nothing; its slot was not there before.
    assert at(2.5, 512) == [0, 20, 0, 255]
    assert at(2.5, 900) == [0, 20, 0, ROUNDED]
    assert at(1.5, 900) == [0, 0, 0, 0]
    seen.reserves_ahead = True
    image = seen.image(trace, [0, 1, 0], colours, 1024)
    assert at(1.5, 900)[3] == IDLE


def test_a_drawing_becomes_part_of_a_page() -> None:
    drawn = (
        '<?xml version="1.0"?><svg width="9pt" height="9pt" viewBox="0 0 9 9" version="1.1"><metadata>x</metadata>'
        '<g id="a" style="fill: #000001; stroke: #0072b2"/><use xlink:href="#a" clip-path="url(#b)"/></svg>'
    )
    assert themed(drawn, "n", '<"') == (
        '<svg viewBox="0 0 9 9" role="img" aria-label="&lt;&quot;"><g id="n-a" style="fill: currentColor; stroke: '
        'var(--pool)"/><use xlink:href="#n-a" clip-path="url(#n-b)"/></svg>'
    )


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [360, 1200])
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_draws_it(report: Path, width: int, dark: bool, tmp_path: Path) -> None:
    (tmp_path / "measured.html").write_text(
        report.read_text(encoding="utf-8").replace("</body>", f"{MEASURE}</body>"), encoding="utf-8"
    )
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.replace("WIDTH", str(width)), encoding="utf-8")
    done = subprocess.run(
        [
            str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
            "--window-size=1300,2000", f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            "--virtual-time-budget=5000", "--enable-logging=stderr", "--dump-dom", frame.as_uri(),
        ],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert len(said) == 1, said
    assert "measured" in said[0]
    text = re.search(r'<pre id="measured">(.*?)</pre>', done.stdout)
    assert text
    found: dict[str, Any] = json.loads(text[1])
    assert found["width"] == width
    assert found["page"] <= width
    assert found["dark"] is dark
    assert found["paper"] == ("rgb(21, 22, 26)" if dark else "rgb(255, 255, 255)")
    assert len(found["boxes"]) == 7
    for box in found["boxes"]:
        assert box["width"] > 0.4 * min(width, 700), box
        assert box["height"] > 100
        assert box["texts"] >= 5
        assert box["least"] >= 9
        assert box["ink"] == ("rgb(233, 233, 237)" if dark else "rgb(28, 29, 33)")
        assert box["images"] == box["id"].startswith("map-")

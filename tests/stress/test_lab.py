"""`arenax lab` finds what each allocator needs, says whether a pool would help, and keeps what it has when stopped."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from arenax import Plan
from arenax_stress import Trace, _lab_report, cli, simulate
from arenax_stress._lab_findings import NAMES, TIGHT
from arenax_stress._lab_least import CLOSE, least
from arenax_stress._lab_pool import DevicePool
from arenax_stress._lab_report import write_report
from arenax_stress._lab_runs import DEFAULT, Laboratory
from arenax_stress._lab_verdict import verdict
from arenax_stress._replay import replay
from arenax_stress._scenarios import SCENARIOS
from arenax_stress._workloads import WORKLOADS
from tests.stress.allocations import MIB, SHARED, public

FEW = ["--events", "1500", "--repeat", "2"]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture(scope="module")
def phases() -> Laboratory:
    lab = Laboratory(WORKLOADS["phases"](events=1500), NAMES, passes=2)
    lab.run()
    return lab


def test_a_scenario_from_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lab", "kept_results", *FEW, "--seed", "3", "--out", str(tmp_path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Small results that are kept alive between large transients" in printed
    assert "kept_results: " in printed
    assert all(name in printed for name in ("XLA (bfc)", "PyTorch", "CuPy", "RMM", "best fit", "planned pool"))
    found = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert found["verdict"]["headline"] in printed
    assert found["command"] == "arenax lab kept_results --seed 3 --events 1500 --repeat 2"
    assert list(found["allocators"]) == list(DEFAULT)
    assert (tmp_path / "report.html").exists()
    assert f"The report is {tmp_path / 'report.html'}".replace(" ", "") in printed.replace(" ", "")


def test_the_same_seed_gives_the_same_report(tmp_path: Path) -> None:
    texts: list[bytes] = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        arguments = ["lab", "uniform", "--events", "200", "--repeat", "1", "--allocators", "bfc,plan"]
        assert cli.main([*arguments, "--out", str(folder)]) == 0
        texts.append(b"".join((folder / name).read_bytes() for name in ("report.json", "report.html", "map-bfc.png")))
    assert texts[0] == texts[1]


def test_the_list_has_every_name_and_its_first_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lab", "--list"]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()] == [*SCENARIOS, *WORKLOADS]
    assert "Phases with larger buffers each, of which some survive." in printed


def test_a_trace_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "net.csv"
    path.write_text("id,lower,upper,size\n" + "".join(f"{i},{i},{i + 3},{MIB * (1 + i % 3)}\n" for i in range(60)))
    assert cli.main(["lab", str(path), "--allocators", "bfc,plan", "--out", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert found["trace"] | {"name": "net", "buffers": 60, "story": ""} == found["trace"]
    assert any("Temporaries inside one jitted program" in s for s in found["verdict"]["answers"][-1]["sentences"])


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 2, "name a scenario or the file of a trace; --list prints the scenarios"),
        (["nowhere"], 1, "'nowhere' is neither a scenario nor a file"),
        (["{file}"], 1, "must be an RMM log"),
        (["{file}", "--events", "7"], 1, "--events is for scenarios"),
        (["uniform", "--events", "1", "--out", "{file}"], 1, "File exists"),
    ],
)
def test_what_it_cannot_run(
    arguments: list[str], status: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("nothing\n")
    given = [argument.format(file=file) for argument in arguments]
    out = [] if "--out" in given else ["--out", str(tmp_path / "out")]
    assert cli.main(["lab", *given, *out]) == status
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--allocators", "bfc,malloc"], "must be of bfc, bfc_growing"),
        (["--max-classes", "0"], "--max-classes: must be at least 1, got 0"),
        (["--seed", "-1"], "--seed: must be at least 0, got -1"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["lab", "uniform", *arguments])
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("part", ["_without_bounds", "_other_plans", "_long_run", "_least_device"])
def test_an_interrupt_keeps_what_there_is(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real: Callable[[Laboratory, str], None] = getattr(Laboratory, part)
    calls: list[str] = []

    def strike(self: Laboratory, name: str) -> None:
        calls.append(name)
        if len(calls) == 2 or not name:
            raise KeyboardInterrupt
        real(self, name)

    monkeypatch.setattr(Laboratory, part, strike)
    monkeypatch.setattr(_lab_report, "charts", lambda lab: [])  # They are drawn of what there is, elsewhere.
    arguments = ["lab", "uniform", "--events", "300", "--repeat", "1", "--allocators", "bfc,best_fit"]
    assert cli.main([*arguments, "--out", str(tmp_path)]) == 130
    said = capsys.readouterr()
    assert "arenax lab: interrupted; missing: " in said.err
    found = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    parts = {"_without_bounds": "waste", "_long_run": "long", "_least_device": "least"}
    if part in parts:
        assert found["allocators"]["bfc"][parts[part]] is not None
        assert found["allocators"]["best_fit"][parts[part]] is None
    assert found["missing"]
    assert all(missing in said.err for missing in found["missing"])
    assert "It was interrupted. Missing: " in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_an_interrupted_report_is_written_by_the_library_too(tmp_path: Path) -> None:
    def stop(what: str, done: float) -> None:
        if done > 0.2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_report(WORKLOADS["uniform"](events=300), tmp_path, passes=1, progress=stop)
    assert "It was interrupted" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_progress_is_told_in_order() -> None:
    told: list[tuple[str, float]] = []
    lab = Laboratory(WORKLOADS["uniform"](events=200), ("bfc", "plan"), passes=1)
    lab.run(lambda what, done: told.append((what, done)))
    assert [what for what, _ in told] == [
        "without bounds bfc", "without bounds plan", "plans", "long run bfc", "long run plan", "least device bfc",
        "least device plan", "done",
    ]  # fmt: skip
    assert [done for _, done in told] == sorted(done for _, done in told)
    assert (told[0][1], told[-1][1]) == (0, 1)


def test_waste_adds_up_to_what_simulate_says(phases: Laboratory) -> None:
    trace, found = phases.trace, phases.findings.by_allocator
    for name in NAMES:
        plan = {"plan": phases.plan} if name == "plan" else {"max_classes": 16} if name == "pool" else {}
        result = simulate(trace, "pool" if name == "plan" else name, **plan)
        waste = found[name].waste
        assert waste is not None
        assert waste.live_bytes == trace.peak_bytes
        assert waste.live_bytes + waste.rounding_bytes == result.peak_allocated_bytes
        assert waste.total_bytes - waste.hole_bytes == result.peak_reserved_bytes
        assert min(waste.rounding_bytes, waste.unused_bytes, waste.hole_bytes) >= 0
    plan = found["plan"].waste
    assert plan is not None
    assert plan.total_bytes - plan.hole_bytes == phases.plan.required_bytes


def test_the_least_device_serves_and_a_little_less_does_not(phases: Laboratory) -> None:
    trace, twice = phases.trace, phases.trace.repeat(2)
    for name, found in phases.findings.by_allocator.items():
        scan = found.least
        assert scan is not None
        assert scan.bytes is not None
        assert scan.bytes >= trace.peak_bytes
        assert scan.resolution_bytes <= 0.006 * scan.bytes
        if name in ("plan", "pool"):
            continue
        assert not simulate(trace, name, limit_bytes=scan.bytes).failures
        if scan.fails_bytes is not None and scan.fails_bytes != found.long and name in ("bfc", "best_fit"):
            assert simulate(trace, name, limit_bytes=scan.fails_bytes).failures
    pool = phases.findings.by_allocator["pool"].least
    assert pool is not None
    assert pool.bytes is not None
    assert not replay(twice, DevicePool(twice, 16, pool.bytes), "pool").failures
    plan = phases.findings.by_allocator["plan"].least
    assert plan is not None
    assert plan.bytes is not None
    assert plan.bytes >= phases.plan.required_bytes


def test_no_device_is_enough_in_which_the_long_run_fails(phases: Laboratory) -> None:
    for found in phases.findings.by_allocator.values():
        assert found.long is not None
        assert found.least is not None
        if found.long.failed:
            assert found.least.bytes is not None
            assert found.least.bytes > found.long.limit_bytes >= TIGHT * phases.trace.peak_bytes - 1


def test_the_long_run_is_the_trace_again_and_again(phases: Laboratory) -> None:
    limit = phases.findings.by_allocator["bfc"].long
    assert limit is not None
    long = phases.trace.repeat(2)
    for name in ("bfc", "pytorch"):
        run = phases.findings.by_allocator[name].long
        assert run is not None
        result = simulate(long, name, limit_bytes=run.limit_bytes)
        assert (run.requests, run.failed) == (len(long), len(result.failures))
        assert run.first == (result.failures[0] if result.failures else None)
        assert run.creations == result.creations
    plan = phases.findings.by_allocator["plan"].long
    assert plan is not None
    assert plan.needs_bytes >= phases.plan.required_bytes > plan.limit_bytes


def test_a_plan_that_fits_makes_nothing_in_the_long_run() -> None:
    trace = WORKLOADS["llm_server_paged"](events=1500)
    lab = Laboratory(trace, ("plan", "pool"), passes=3)
    lab.run()
    run = lab.findings.by_allocator["plan"].long
    assert run is not None
    assert (run.failed, run.creations, run.conversions, run.needs_bytes) == (0, 0, 0, 0)
    assert run.requests == 3 * len(trace)


def test_more_classes_never_take_more(phases: Laboratory) -> None:
    counts = phases.findings.plan_bytes
    assert list(counts) == sorted(counts)
    assert list(counts.values()) == sorted(counts.values(), reverse=True)
    assert counts[16] == phases.plan.required_bytes
    assert counts[4] == Plan.fit(phases.trace, 4).required_bytes


def test_a_pool_on_a_device_with_an_end_gives_way() -> None:
    trace = Trace.from_events(
        [("allocate", i, 512) for i in range(4)]
        + [("free", i, 0) for i in (0, 2)]
        + [("allocate", 4, 1024), ("free", 1, 0), ("allocate", 5, 1024)]
    )
    pool = DevicePool(trace, None, 2048)
    result = replay(trace, pool, "pool")
    # Half of the device lies idle in two places when 1,024 bytes are asked for; later there is one place.
    assert [failure.buffer for failure in result.failures] == [4]
    assert pool.conversion_count >= 1
    assert sorted(pool.chunks) == [3, 5]
    assert pool.device.allocated_bytes == 2048  # Of the hole of 1,536 bytes less than half would be left.


def test_what_is_no_laboratory() -> None:
    trace = WORKLOADS["uniform"](events=10)
    with pytest.raises(ValueError, match=r"an allocator must be one of bfc, .*, got 'malloc'"):
        Laboratory(trace, ["malloc"])
    with pytest.raises(ValueError, match="trace 'nothing' allocates nothing"):
        Laboratory(Trace.from_events([], "nothing"))
    with pytest.raises(ValueError, match="allocates nothing"):
        Laboratory(Trace.from_events([("allocate", 0, 0)]))


@hypothesis.given(st.sets(st.integers(4, 80)), st.integers(20, 80), st.integers(20, 90), st.integers(4, 40))
def test_a_scan_finds_the_edge_of_whatever_it_tried(lucky: set[int], edge: int, start: int, tries: int) -> None:
    asked: dict[int, bool] = {}

    def serves(size: int) -> bool:
        assert size not in asked
        asked[size] = size >= edge * 4096 or size // 4096 in lucky
        return asked[size]

    found = least(serves, 4096 * 4, 4096 * start, tries)
    assert found.tried == len(asked) <= tries + 8
    if found.bytes is None:
        assert not any(asked.values())
        return
    assert all(fine for size, fine in asked.items() if size >= found.bytes)
    below = {size: fine for size, fine in asked.items() if size < found.bytes}
    assert found.fails_bytes == max(below, default=None)
    assert found.fails_bytes is None or not below[found.fails_bytes]
    assert list(found.islands) == sorted((size for size, fine in below.items() if fine), reverse=True)
    if found.tried < tries and found.fails_bytes is not None:
        assert found.bytes <= CLOSE * found.fails_bytes + 256


def test_a_scan_knows_what_it_is_told() -> None:
    assert least(lambda size: True, 10_240, 20_480, seen={15_360: False}).fails_bytes == 15_360
    told: list[int] = []
    found = least(lambda size: told.append(size) or False, 10_240, 20_480)
    assert found.bytes is None
    assert told == sorted(told)


@pytest.mark.skipif(not SHARED.is_dir(), reason="no public traces here")
def test_temporaries_of_a_network_need_no_pool() -> None:
    trace: Any = public("somas_tensors_resnet50")
    lab = Laboratory(trace, ("bfc", "plan"), passes=2)
    lab.run()
    need = lab.findings.need("bfc")
    assert need is not None
    assert 1.01 < need < 1.03
    assert verdict(lab.findings).helps is False

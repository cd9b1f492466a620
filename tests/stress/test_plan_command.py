"""`arenax plan` prints the slots that a trace needs beside other choices, and checks a plan for CI."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arenax
from arenax import Plan, SizeClass
from arenax._plan import PlannedClass
from arenax_stress import Trace, _plan_choices, _plan_command, cli, simulate
from arenax_stress._workloads import WORKLOADS

LENGTHS = (9, 30, 17, 64, 33, 12, 50)


def traffic(pool: arenax.BufferPool, lengths: tuple[int, ...] = LENGTHS, held: int = 2, **more: Any) -> None:
    """Ragged batches, of which `held` are alive at once."""
    alive: list[Any] = []
    for n in lengths:
        alive = [*alive[-(held - 1) :], pool.put({"tokens": np.ones((2, n), np.int32), **more}, with_sizes=True)]


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "ragged.csv"
    with arenax.BufferPool(ragged=arenax.Ragged(1, arenax.SizeClasses.pow2(8, 64))) as pool, pool.record(path):
        traffic(pool)
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "phases.csv"
    WORKLOADS["phases"](0, events=400).to_rmm_csv(path)
    return path


def plan(path: Path, *options: object) -> int:
    return cli.main(["plan", str(path), *map(str, options)])


def test_what_it_prints_makes_a_pool_that_serves_the_traffic(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "plan.json"
    assert plan(recording, "--save", saved, "--max-classes", 3) == 0
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if line.startswith(("plan = ", "pool = "))]
    assert lines == _plan_command.code(Plan.load(saved), str(saved))
    session: dict[str, Any] = {"arenax": arenax}
    exec("\n".join(lines), session)
    with session["pool"] as pool:
        needed = Plan.fit(Trace.from_file(recording), 3).required_bytes
        assert pool.stats().reserved_bytes == needed
        assert f"{needed:,} bytes in {pool.stats().slot_count} slots" in printed
        before = pool.stats().creation_count
        traffic(pool)
        stats = pool.stats()
        assert (stats.creation_count, stats.conversion_count, stats.spill_count) == (before, 0, 0)


def test_json_has_every_figure(log: Path, tmp_path: Path) -> None:
    to = tmp_path / "found.json"
    assert plan(log, "--json", to, "--max-classes", 5) == 0
    found = json.loads(to.read_text())
    trace = Trace.from_file(log)
    fitted = Plan.fit(trace, 5)
    assert (found["trace"], found["buffers"]) == ("phases", len(trace))
    assert (found["peak_bytes"], found["required_bytes"]) == (trace.peak_bytes, fitted.required_bytes)
    assert [(c["class"], c["slots"]) for c in found["classes"]] == [
        (str(c.size_class), c.slots) for c in fitted.classes
    ]
    assert sum(c["bytes"] for c in found["classes"]) == fitted.required_bytes
    assert sum(c["share"] for c in found["classes"]) == pytest.approx(1)
    assert all(0 <= c["padding"] < 1 for c in found["classes"])
    by_name = {c["choice"]: c for c in found["choices"]}
    assert list(by_name) == ["this plan", "powers of two", "least padding", "XLA's allocator", "best fit"]
    assert by_name["this plan"]["bytes"] == fitted.required_bytes <= by_name["least padding"]["bytes"]
    assert by_name["least padding"]["padding"] <= by_name["this plan"]["padding"]
    assert by_name["XLA's allocator"]["bytes"] == simulate(trace, "bfc").peak_reserved_bytes
    assert by_name["best fit"]["bytes"] == simulate(trace, "best_fit").peak_reserved_bytes
    for choice in by_name.values():
        assert choice["of the peak"] == choice["bytes"] / trace.peak_bytes


def test_a_budget_is_spent_on_padding_less(log: Path, tmp_path: Path) -> None:
    to, more = tmp_path / "least.json", tmp_path / "more.json"
    assert plan(log, "--save", to) == 0
    assert plan(log, "--save", more, "--budget", Plan.load(to).required_bytes * 2) == 0
    trace = Trace.from_file(log)

    def padding(path: Path) -> float:
        return _plan_choices.choices(trace, Plan.load(path), 16)[0]["padding"]

    assert padding(more) < padding(to)
    assert Plan.load(to).required_bytes < Plan.load(more).required_bytes <= 2 * Plan.load(to).required_bytes


def test_other_choices_of_classes_serve_the_trace_with_no_slot_to_spare(log: Path) -> None:
    trace = Trace.from_file(log)
    rival = _plan_choices.with_slots(trace, lambda extents: arenax.SizeClasses.pow2(1, int(extents.max())))
    result = simulate(trace, "pool", plan=rival)
    assert (len(result.failures), result.conversions) == (0, 0)
    assert result.creations == sum(c.slots for c in rival.classes)
    for number, c in enumerate(rival.classes):
        fewer = [PlannedClass(x.size_class, x.axis, x.slots - (n == number)) for n, x in enumerate(rival.classes)]
        assert Plan(tuple(fewer)).misfits(trace) == (
            f"{c.size_class} has {c.slots - 1:,} slots, and {c.slots:,} were on loan at once",
        )


def test_code_names_the_leaves_where_one_entry_does_not_serve_all(tmp_path: Path) -> None:
    def ragged(shape: tuple[int, ...], dtype: str, axis: int | None) -> PlannedClass:
        return PlannedClass(SizeClass(shape, np.dtype(dtype)), axis, 1)

    tokens, other, label = ragged((2, 64), "int32", 1), ragged((32, 4), "float32", 0), ragged((2,), "float32", None)
    sizes = ragged((), "int32", None)
    one = "pool = arenax.BufferPool.from_plan(plan, ragged=arenax.Ragged(1, plan.size_classes))"
    assert _plan_command.code(Plan((tokens, sizes)), "p.json")[1:] == [one]
    assert _plan_command.code(Plan((label,)), "p.json")[1:] == ["pool = arenax.BufferPool.from_plan(plan)"]
    assert _plan_command.code(Plan((tokens, label, sizes)), "p.json")[2:] == [
        "#   int32[2,*]: arenax.Ragged(1, plan.size_classes)",
        "#   float32[2]: None",
        "#   int32[]: None (or the sizes, which the pool draws itself)",
    ]
    assert _plan_command.code(Plan((tokens, other)), "p.json")[2:] == [
        '#   int32[2,*]: arenax.Ragged(1, plan.ragged["int32[2,*]"])',
        '#   float32[*,4]: arenax.Ragged(0, plan.ragged["float32[*,4]"])',
    ]


# -------------------------------------------------------------------------------------------------------------- --check


def test_a_plan_that_still_serves_is_one_line(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, to = tmp_path / "plan.json", tmp_path / "check.json"
    assert plan(recording, "--save", saved) == 0
    capsys.readouterr()
    assert plan(recording, "--check", saved, "--json", to) == 0
    out, err = capsys.readouterr()
    assert err == ""
    (line,) = out.splitlines()
    assert line.startswith(f"{saved} serves 'ragged': {len(Trace.from_file(recording))} buffers in ")
    assert json.loads(to.read_text())["misfits"] == []


def test_traffic_that_has_grown_is_told_line_by_line(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, grown, to = tmp_path / "plan.json", tmp_path / "grown.csv", tmp_path / "check.json"
    assert plan(recording, "--save", saved, "--max-classes", 1) == 0
    with arenax.BufferPool(ragged=arenax.Ragged(1, arenax.SizeClasses.pow2(8, 128))) as pool, pool.record(grown):
        traffic(pool, (*LENGTHS, 100), held=3)
    capsys.readouterr()
    assert plan(grown, "--check", saved, "--json", to) == 1
    out, err = capsys.readouterr()
    assert err == ""
    faults = Plan.load(saved).misfits(Trace.from_file(grown))
    assert len(faults) == 3  # One does not fit, and two classes have too few slots: tokens and their sizes.
    assert out.splitlines() == [
        f"{saved} does not serve 'grown':",
        *(f"  {fault}" for fault in faults),
        f"Fit it anew, and look at what has changed: arenax plan {grown} --save {saved}",
    ]
    assert json.loads(to.read_text()) == {"trace": "grown", "plan": str(saved), "misfits": list(faults)}


def test_a_plan_of_shapes_is_not_checked_with_bytes(
    recording: Path, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "plan.json"
    assert plan(recording, "--save", saved) == 0
    capsys.readouterr()
    assert plan(log, "--check", saved) == 1
    assert "knows bytes alone, and the plan is for arrays with shapes" in capsys.readouterr().out
    assert plan(log, "--save", saved) == 0
    assert plan(recording, "--check", saved) == 0  # The other way round it is: bytes are all that is asked.


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (None, [], "No such file"),
        ("Bytes\n1\n", [], "trace.csv, line 1: must be an RMM log"),
        ("id,lower,upper,size\n0,5,5,1\n", [], "trace.csv, line 2: upper must lie above lower"),
        ("id,lower,upper,size\n", [], "trace 'trace' has no buffers to plan for"),
        ("id,lower,upper,size\n0,0,5,100\n", ["--budget", "99"], "no plan of at most 16 classes fits 99 bytes"),
        ("id,lower,upper,size\n0,0,5,100\n", ["--check", "nothing.json"], "No such file"),
        ("id,lower,upper,size\n0,0,5,100\n", ["--check", "trace.csv"], "trace.csv is no plan of arenax"),
    ],
)
def test_errors_are_one_line(
    text: str | None,
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("trace.csv").write_text(text)
    assert plan(Path("trace.csv"), *options) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("arenax plan: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-classes", "0"], "--max-classes: must be at least 1, got 0"),
        (["--budget", "much"], "--budget: must be a size such as"),
        (["--check", "a.json", "--save", "b.json"], "not allowed with argument"),
        (["--check", "a.json", "--budget", "1MiB"], "--budget: not allowed with argument --check"),
        (["--save", "plan.txt"], "--save: must end with .json, got 'plan.txt'"),
    ],
)
def test_bad_arguments(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        plan(Path("trace.csv"), *options)
    assert message in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["plan", "--help"])
    said = capsys.readouterr().out
    assert all(option in said for option in ("--max-classes", "--budget", "--save", "--json", "--check", "for CI"))

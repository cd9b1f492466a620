"""`arenax demo`, end to end with few steps, and what it says when the runs disagree or one fails."""

import copy
import json
import math
import os
import subprocess
from types import SimpleNamespace

import pytest

from arenax_stress import _demo, _demo_run, cli

STEPS = 4


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """One real demo: its exit status, what it printed, its JSON and its folder."""
    folder = tmp_path_factory.mktemp("demo")
    command = [_demo.sys.executable, "-m", "arenax_stress", "demo", "--steps", str(STEPS), "--json", "demo.json"]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "COLUMNS": "120"}, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(out=done.stdout, found=json.loads((folder / "demo.json").read_text()), folder=folder)


def test_losses_of_padded_and_pooled_are_the_same_bits(demo):
    runs = demo.found["runs"]
    assert len(runs["pooled"]["losses"]) == STEPS
    assert runs["padded"]["losses"] == runs["pooled"]["losses"]
    assert all(map(math.isfinite, runs["pooled"]["losses"]))
    assert runs["exact"]["losses"] == pytest.approx(runs["pooled"]["losses"], rel=_demo.TOLERANCE)
    assert demo.found["disagreement"] == ""


def test_compiles_are_one_a_shape_and_one_a_size_class(demo):
    runs, settings = demo.found["runs"], demo.found["settings"]
    lengths = settings["lengths"]
    classes = {next(c for c in settings["size_classes"] if c >= n) for n in lengths}
    assert sum(runs["exact"]["compiles"]) == len(set(lengths))
    assert sum(runs["padded"]["compiles"]) == sum(runs["pooled"]["compiles"]) == len(classes)


def test_the_pool_makes_no_array_after_its_reservation(demo):
    runs = demo.found["runs"]
    assert runs["pooled"]["fresh_arrays"] == [0] * STEPS
    assert runs["padded"]["fresh_arrays"] == runs["exact"]["fresh_arrays"] == [2] * STEPS
    pool = runs["pooled"]["pool"]
    assert pool["hit_count"] == 2 * STEPS
    assert pool["spill_count"] == pool["copy_count"] == pool["conversion_count"] == 0
    assert runs["pooled"]["addresses"] <= pool["slot_count"]


def test_every_figure_is_there(demo):
    for run in demo.found["runs"].values():
        for name in ("step_seconds", "landing_seconds", "step_faults", "landing_faults", "compiles"):
            assert len(run[name]) == STEPS, name
            assert min(run[name]) >= 0
        assert all(a < b for a, b in zip(run["landing_seconds"], run["step_seconds"], strict=True))
        assert run["peak_bytes"] > 50 * 2**20
        assert 0 <= run["padding"] < 0.5
    assert {"jax", "python", "device", "cpu_count"} <= set(demo.found["environment"])
    assert all(set(row) == {"figure", *_demo_run.KINDS} for row in demo.found["table"])


def test_it_prints_size_classes_table_statistics_and_words(demo):
    for expected in (
        "train steps compiled",
        "99th percentile",
        demo.found["runs"]["pooled"]["pool"]["text"],
        "arenax-demo.png",
    ):
        assert expected in demo.out
    said = " ".join(demo.out.split())
    assert ", ".join(map(str, demo.found["settings"]["size_classes"])) in said
    assert "powers of two would pad" in said
    assert demo.found["words"] in " ".join(demo.out.split())


def test_picture(demo):
    image = (demo.folder / "arenax-demo.png").read_bytes()
    assert image.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(image) > 10_000


@pytest.fixture
def again(demo, monkeypatch, tmp_path):
    """Runs the demo on the runs that were measured above, changed by the test."""
    runs = {kind: _demo_run.Run(**copy.deepcopy(run)) for kind, run in demo.found["runs"].items()}
    monkeypatch.setattr(_demo, "measure", lambda kind, texts, seed, on_step: runs[kind])
    return runs, lambda: cli.main(["demo", "--steps", str(STEPS), "--png", str(tmp_path / "x.png")])


def test_unchanged_runs_agree(again):
    _, demo_again = again
    assert demo_again() == 0


def test_one_bit_of_difference_fails(again, capsys):
    runs, demo_again = again
    runs["pooled"].losses[2] = math.nextafter(runs["pooled"].losses[2], math.inf)
    assert demo_again() == 1
    assert "the losses of the padded and the pooled run differ from step 3 on" in capsys.readouterr().err


def test_exact_run_may_differ_by_rounding_alone(again, capsys):
    runs, demo_again = again
    runs["exact"].losses[2] *= 1 + 3 * _demo.TOLERANCE
    assert demo_again() == 1
    assert "the losses of the exact and the padded run differ" in capsys.readouterr().err


def test_losses_that_are_not_numbers_fail(again, capsys):
    runs, demo_again = again
    for run in runs.values():
        run.losses[2] = math.nan
    assert demo_again() == 1


def test_a_run_that_fails_is_named_with_what_it_said(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(_demo, "BATCH_SIZE", 1)
    monkeypatch.setenv("JAX_PLATFORMS", "no_such_platform")
    assert cli.main(["demo", "--steps", "1", "--png", str(tmp_path / "x.png")]) == 1
    said = capsys.readouterr().err
    assert "arenax demo: the exact run ended with status 1:" in said
    assert "no_such_platform" in said


def test_peak_memory_and_page_faults_are_of_this_process():
    before = _demo_run.page_faults()
    touched = bytearray(32 * 2**20)
    assert _demo_run.page_faults() > before
    assert _demo_run.peak_resident_bytes() > len(touched)

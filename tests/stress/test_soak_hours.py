"""The soak for hours, in seconds: its diary, its page, and the loader that must survive the death of its workers."""

import argparse
import importlib.util
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arenax
from arenax_stress import _lab_runs, _soak, _soak_hours, _soak_loader, _stress_command
from arenax_stress._bench_loader_samples import Samples
from arenax_stress._soak_hours import soak_for_hours
from arenax_stress._soak_loader import KilledLoader
from arenax_stress.cli import main

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def a_short_long_run(monkeypatch: Patch) -> None:
    monkeypatch.setattr(_lab_runs, "LONG_EVENTS", 100)


def without_loaders(monkeypatch: Patch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("torch", "grain") else real(name))


def in_process(samples: Samples, pool: arenax.BufferPool) -> Iterator[Any]:
    """A loader without workers: three batches."""
    for n in range(3):
        rows = [samples[2 * n + i] for i in range(2)]
        yield pool.put({key: np.stack([row[key] for row in rows]) for key in rows[0]})


def run_of(monkeypatch: Patch, make: Any, turns: int = 1) -> KilledLoader:
    """A loader that `make` makes, so many times."""
    monkeypatch.setattr(_soak_loader, "_torch", make)
    loader = KilledLoader(0)
    loader.kind = "torch"
    verify = loader._verify
    left = iter(range(1, turns))

    def verified() -> None:
        verify()
        if next(left, None) is None:
            loader._stop.set()

    monkeypatch.setattr(loader, "_verify", verified)
    loader.start()
    loader._thread.join(60)
    loader.finish()
    return loader


# ---------------------------------------------------------------------------------------------------------- the loader


@pytest.fixture
def _no_handler() -> Iterator[None]:
    """Without what torch leaves behind when a loader is made in the main thread: it raises there when a worker dies."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.timeout(200)
@pytest.mark.usefixtures("_no_handler")
@pytest.mark.parametrize("kind", ["torch", "grain"])
def test_a_killed_worker_costs_a_loader_and_no_slot(kind: str) -> None:
    pytest.importorskip(kind)
    loader = KilledLoader(1, kill_seconds=0.01)
    loader.kind = kind
    loader.start()
    limit = time.monotonic() + 120
    while not (loader.restart_count and loader.kill_count) and loader.failure is None and time.monotonic() < limit:
        time.sleep(0.05)
    loader.finish()
    assert loader.failure is None
    assert loader.restart_count > 0
    assert loader.kill_count > 0
    assert loader.batch_count > 0
    assert loader.pool.stats().leased_count == 0


def test_epochs_follow_each_other(monkeypatch: Patch) -> None:
    loader = run_of(monkeypatch, in_process, turns=3)
    assert loader.failure is None
    assert (loader.batch_count, loader.kill_count, loader.restart_count) == (9, 0, 0)
    assert str(loader) == "torch: 9 batches, 0 workers killed"


def test_a_lost_slot_is_found(monkeypatch: Patch) -> None:
    lost: list[Any] = []

    def make(samples: Samples, pool: arenax.BufferPool) -> Iterator[Any]:
        for batch in in_process(samples, pool):
            lost.append(batch["x0"])
            yield batch

    loader = run_of(monkeypatch, make)
    assert "3 slots are still leased" in str(loader.failure)
    assert str(loader).endswith("FAILED")


def test_a_wrong_value_is_found(monkeypatch: Patch) -> None:
    def make(samples: Samples, pool: arenax.BufferPool) -> Iterator[Any]:
        for batch in in_process(samples, pool):
            yield batch | {"x0": np.array(batch["x0"]) + 1}

    assert "sample 0 is wrong" in str(run_of(monkeypatch, make).failure)


def test_a_loader_that_breaks_by_itself_is_a_failure(monkeypatch: Patch) -> None:
    def make(samples: Samples, pool: arenax.BufferPool) -> Iterator[Any]:
        yield from in_process(samples, pool)
        raise RuntimeError("DataLoader worker exited unexpectedly")

    failure = run_of(monkeypatch, make).failure
    assert "RuntimeError: DataLoader worker exited unexpectedly" in str(failure)
    assert failure is not None
    assert "in make" in failure.details


def test_without_torch_and_grain_it_says_so(monkeypatch: Patch) -> None:
    without_loaders(monkeypatch)
    loader = KilledLoader(0)
    loader.start()
    loader.finish()
    assert str(loader) == "no loader: neither torch nor grain is installed"
    assert loader.failure is None


# ----------------------------------------------------------------------------------------------------------- the hours


def test_it_writes_a_diary_and_a_page(tmp_path: Path, monkeypatch: Patch) -> None:
    without_loaders(monkeypatch)
    monkeypatch.setattr(_soak_hours, "STRETCH_EVENTS", 100)
    lines: list[str] = []
    report = soak_for_hours(
        6 / 3600, seed=3, threads=2, classes=2, modes=["grow"], page=tmp_path, say=lines.append, line_seconds=1
    )
    assert report.failures == []
    assert report.faults
    assert report.struck_count.total() > 0
    assert lines[0].startswith("00:00:01  grow ")
    for word in ("events", "spills", "conversions", "resident", "leased", "reserved", "no loader"):
        assert word in lines[0]
    assert "events of the last stretch" in lines[-2]
    assert int(lines[-2].split()[0]) <= 100
    assert lines[-1] == f"The page is {tmp_path / 'report.html'}"
    assert "soak-grow, last stretch" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_what_the_loader_finds_is_a_failure_of_the_soak(tmp_path: Path, monkeypatch: Patch) -> None:
    def make(samples: Samples, pool: arenax.BufferPool) -> Iterator[Any]:
        raise RuntimeError("broken")

    monkeypatch.setattr(_soak_loader, "_torch", make)
    monkeypatch.setattr(_soak_hours, "write_report", lambda *args, **options: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "torch")
    report = soak_for_hours(
        1 / 3600, seed=3, threads=1, classes=2, modes=["grow"], page=tmp_path, say=lambda line: None
    )
    assert ["RuntimeError: broken" in str(failure) for failure in report.failures] == [True]
    assert report.exit_status == 1


def test_the_command_takes_fractions(monkeypatch: Patch) -> None:
    asked: list[tuple[float, dict[str, Any]]] = []

    def fake(hours: float, **options: Any) -> _soak.Report:
        asked.append((hours, options))
        options["say"]("[a line]")
        return _soak.Report(options["seed"], options["threads"], options["classes"])

    monkeypatch.setattr(_stress_command, "soak_for_hours", fake)
    assert main(["stress", "--hours", "0.01", "--threads", "4", "--seed", "7", "--page", "here"]) == 0
    ((hours, options),) = asked
    assert (hours, options["threads"], options["seed"], options["page"]) == (0.01, 4, 7, "here")


@pytest.mark.parametrize("further", [["--steps", "5"], ["--operations", "5"]])
def test_hours_go_without(further: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stress", "--hours", "1", *further]) == 2
    assert "--hours goes without" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--hours", "0"], ["--hours", "x"], ["--hours", "1", "--seconds", "5"]])
def test_bad_hours(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    _stress_command.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(arguments)

"""`BufferPool.report`: the laboratory's page of what a pool has recorded so far."""

import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import arenax
from arenax import _record
from arenax_stress import _lab_report, _lab_runs


@pytest.fixture(autouse=True)
def a_short_long_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds less in each test."""
    monkeypatch.setattr(_lab_runs, "LONG_EVENTS", 100)


def draw(pool: arenax.BufferPool, *lengths: int) -> None:
    for n in lengths:
        with pool.step() as step:
            step.put(np.ones(n, np.float32))


def facts(page: Path) -> dict[str, int | str]:
    return json.loads((page.parent / "report.json").read_text(encoding="utf-8"))["trace"]


def test_it_has_what_was_recorded_so_far_and_the_recording_goes_on(tmp_path: Path) -> None:
    with arenax.BufferPool(name="<train>") as pool:
        with pool.record() as trace:
            draw(pool, 5, 7, 12)
            page = pool.report(tmp_path / "lab")
            assert page == tmp_path / "lab" / "report.html"
            assert "&lt;train&gt;" in page.read_text(encoding="utf-8")
            found = facts(page)
            assert (found["name"], found["buffers"], found["events"]) == ("<train>", 3, 6)
            assert found["families"] == 3  # The requests came with it.
            draw(pool, 9)
        assert len(trace) == 4
        assert not list(pool.arena.recorders)
        pool.check()


def test_a_dropped_array_counts_as_returned(tmp_path: Path) -> None:
    with arenax.BufferPool() as pool, pool.record():
        x = pool.put(jnp.ones(64))
        y = pool.put(jnp.ones(64))
        del x  # Its finalizer has but enqueued it.
        found = facts(pool.report(tmp_path))
        assert (found["events"], found["left_bytes"]) == (3, 256)
        del y


def test_the_path_may_be_the_page_itself(tmp_path: Path) -> None:
    with arenax.BufferPool() as pool, pool.record():
        draw(pool, 8)
        assert pool.report(str(tmp_path / "run.html")) == tmp_path / "run.html"
    assert (tmp_path / "run.html").is_file()


def test_of_two_recordings_it_has_the_one_that_began_last(tmp_path: Path) -> None:
    with arenax.BufferPool() as pool, pool.record():
        draw(pool, 5, 7)
        with pool.record():
            draw(pool, 9)
            assert facts(pool.report(tmp_path / "inner"))["buffers"] == 1
        assert facts(pool.report(tmp_path / "outer"))["buffers"] == 3


def test_the_environment_s_recording_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_record.VARIABLE, str(tmp_path / "run.csv"))
    with arenax.BufferPool() as pool:
        draw(pool, 5, 7)
        assert facts(pool.report(tmp_path))["buffers"] == 2
        draw(pool, 9)
    assert len(arenax.Trace.from_rmm_csv(tmp_path / "run.csv")) == 3


def test_the_trace_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[arenax.Trace] = []
    monkeypatch.setattr(_lab_report, "write_report", lambda trace, path: seen.append(trace))
    with arenax.BufferPool() as pool, pool.record() as live:
        draw(pool, 5)
        assert pool.report(tmp_path) == tmp_path / "report.html"
        draw(pool, 5)
        assert len(seen[0]) == 1
        assert seen[0].steps is seen[0].steps
        pool.report(tmp_path)
        assert len(seen[1]) == len(live) == 2


@pytest.mark.parametrize("when", ["never", "before", "closed"])
def test_without_a_recording_it_says_how_to_get_one(tmp_path: Path, when: str) -> None:
    with arenax.BufferPool(name="train") as pool:
        if when != "never":
            with pool.record():
                draw(pool, 5)
        if when == "closed":
            pool.close()
        with pytest.raises(RuntimeError, match=r"pool 'train' .* inside `with pool.record\(\):`, or set ARENAX_RECORD"):
            pool.report(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_recording_of_nothing(tmp_path: Path) -> None:
    with arenax.BufferPool(name="train") as pool, pool.record():
        with pytest.raises(ValueError, match="'train' allocates nothing"):
            pool.report(tmp_path)
        draw(pool, 5)


@pytest.mark.parametrize("missing", ["matplotlib", "sortedcontainers"])
def test_without_the_extra_it_is_named(tmp_path: Path, missing: str) -> None:
    program = f"""
import sys
sys.modules[{missing!r}] = None
import arenax, numpy as np
with arenax.BufferPool() as pool, pool.record():
    pool.put(np.ones(4, np.float32))
    try:
        pool.report({str(tmp_path)!r})
    except ImportError as e:
        print(e)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    assert 'pip install "arenax[tools]"' in done.stdout
    assert missing in done.stdout
    assert not list(tmp_path.iterdir())


def test_the_pool_does_not_import_the_stress_package_before() -> None:
    check = (
        "import sys, arenax; arenax.BufferPool(); assert not any(m.startswith('arenax_stress') for m in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True, timeout=100)

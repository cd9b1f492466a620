"""`arenax replay` runs a trace as real arrays: what it counts, what it refuses, what it keeps of an interrupted run."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import jax
import numpy as np
import pytest

import arenax
from arenax import Plan, SizeClass
from arenax._trace import Request
from arenax_stress import Trace, _live_allocators, _live_replay, _replay_command, cli, simulate
from arenax_stress._live_replay import Replayed, replay_live
from arenax_stress._workloads import WORKLOADS
from tests.stress.allocations import made

MIB = 1 << 20
Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Some hundred buffers of a few KiB, of which some outlive the trace."""
    whole = _replay_command.scaled(WORKLOADS["lognormal"](0, events=300), 1e-3)
    return Trace(whole.steps[:250], whole.sizes[: int((whole.steps[:250] >= 0).sum())], name="lognormal")


@pytest.fixture
def log(trace: Trace, tmp_path: Path) -> Path:
    path = tmp_path / "log.csv"
    trace.to_rmm_csv(path)
    return path


@pytest.fixture
def replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def replay(path: Path, allocator: str, *options: object, status: int = 0) -> dict[str, Any]:
        to = tmp_path / f"{allocator}.json"
        arguments = ["replay", path, "--allocator", allocator, "--json", to, *options]
        assert cli.main([*map(str, arguments)]) == status
        out, err = capsys.readouterr()
        return json.loads(to.read_text()) | {"out": out, "err": err}

    return replay


# --------------------------------------------------------------------------------------------------------------- counts


def test_fresh_arrays(log: Path, trace: Trace, replay: Run) -> None:
    before = len(jax.live_arrays())
    done = replay(log, "jax", "--repeat", 3)
    assert len(jax.live_arrays()) == before
    found = Replayed.of(done["runs"]["jax"])
    survivors = int((trace.lifetimes[1] == len(trace.steps)).sum())
    assert survivors
    assert found.event_count == found.planned_count == 3 * len(trace.steps) + 2 * survivors
    assert (len(found.pass_seconds), len(found.pass_faults), found.interrupted) == (3, 3, False)
    assert found.peak_bytes == trace.peak_bytes
    assert (found.setup_compiles, found.compiles, found.failures) == (0, 0, [])
    assert found.simulated_bytes == simulate(trace.repeat(3), "bfc").peak_reserved_bytes
    assert (found.reserved_bytes, found.creations) == (None, None)
    assert (done["trace"], done["buffers"], done["repeat"]) == ("log", len(trace), 3)
    assert found.resident_peak_bytes >= found.resident_start_bytes
    assert found.growth_bytes == found.resident_peak_bytes - found.resident_start_bytes
    assert "XLA's BFC is not what places its arrays" in done["out"]


@pytest.mark.parametrize("limit", [None, 0.7])
def test_the_pool_does_what_its_simulation_does(trace: Trace, limit: float | None) -> None:
    budget = None if limit is None else int(limit * trace.peak_bytes)
    found = replay_live(trace, "pool", 2, budget=budget)
    expected = simulate(trace.repeat(2), "pool", limit_bytes=budget)
    assert found.reserved_bytes == expected.peak_reserved_bytes
    assert (found.creations, found.conversions) == (expected.creations, expected.conversions)
    assert found.spills == len(expected.failures)
    assert bool(found.spills) == bool(found.conversions) == (limit is not None)
    assert found.compiles == 0
    assert found.setup_compiles > 0


def test_a_plan_is_all_that_the_pool_needs(log: Path, trace: Trace, tmp_path: Path, replay: Run) -> None:
    plan = Plan.fit(trace, 6)
    plan.save(tmp_path / "plan.json")
    done = replay(log, "pool", "--plan", tmp_path / "plan.json", "--repeat", 2)
    found = Replayed.of(done["runs"]["pool"])
    assert found.reserved_bytes == plan.required_bytes == found.simulated_bytes
    assert found.creations == sum(c.slots for c in plan.classes)
    assert (found.conversions, found.spills, found.compiles, found.failures) == (0, 0, 0, [])


def test_buffers_of_no_class_are_failures(trace: Trace, log: Path, tmp_path: Path, replay: Run) -> None:
    small = [("allocate", 0, int(np.median(trace.sizes)))]
    Plan.fit(Trace.from_events(small)).save(tmp_path / "plan.json")
    found = replay(log, "pool", "--plan", tmp_path / "plan.json")["runs"]["pool"]
    unserved = [f for f in found["failures"] if f["reason"] == "no size class serves it"]
    assert len(unserved) == int((trace.sizes > small[0][2]).sum())


def test_a_recording_has_its_own_classes_also_of_64_bits(tmp_path: Path, replay: Run) -> None:
    wide = Request((3,), np.dtype("float64"), 0, SizeClass((4,), np.dtype("float64")))
    flag = Request((), np.dtype("bool"), None, SizeClass((), np.dtype("bool")))
    trace = Trace([0, 1, ~0, 2], [24, 1, 24], requests=(wide, flag, wide), name="wide")
    trace.to_rmm_csv(tmp_path / "wide.csv")
    found = replay(tmp_path / "wide.csv", "pool")["runs"]["pool"]
    assert (found["reserved_bytes"], found["creations"], found["simulated_bytes"]) == (33, 2, 33)
    Plan.fit(trace).save(tmp_path / "plan.json")
    found = replay(tmp_path / "wide.csv", "pool", "--plan", tmp_path / "plan.json")["runs"]["pool"]
    assert (found["reserved_bytes"], found["creations"], found["spills"]) == (25, 2, 0)


def test_every_byte_is_resident_and_later_passes_of_the_pool_touch_none_anew() -> None:
    """Page faults are counted, not seconds; arrays of this size are mapped anew by malloc each time."""
    trace = made(("a", 0, 64 * MIB), ("a", 1, 64 * MIB), ("f", 0), ("f", 1), ("a", 2, 64 * MIB), ("f", 2))
    fresh, pooled = (
        replay_live(trace, name, 2, Plan.fit(trace) if name == "pool" else None) for name in ("jax", "pool")
    )
    assert fresh.growth_bytes is not None
    assert pooled.growth_bytes is not None
    assert fresh.growth_bytes > 120 * MIB
    assert pooled.growth_bytes > 120 * MIB
    assert pooled.pass_faults[1] < 64 * MIB / 4096 / 10


def test_a_buffer_of_no_bytes_gets_no_array(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x: sizes.append(x.nbytes) or put(x))
    found = replay_live(made(("a", 0, 0), ("a", 1, 5), ("f", 0), ("f", 1)), "jax")
    assert (found.event_count, found.peak_bytes, found.failures) == (4, 5, [])
    assert sizes == [1, 5]  # The first is the warm-up.


def test_jax_does_not_alias_what_is_put() -> None:
    for n in (1, 100, 4096, 300_000):
        source = _live_allocators.ones(n)
        assert (source.nbytes, source.ctypes.data % 64) == (n, 16)
        assert jax.device_put(source).unsafe_buffer_pointer() != source.ctypes.data


# ------------------------------------------------------------------------------------------------- failures, interrupts


def failing(monkeypatch: pytest.MonkeyPatch, above: int, error: Exception) -> None:
    put = jax.device_put

    def device_put(x: np.ndarray) -> jax.Array:
        if x.nbytes > above:
            raise error
        return put(x)

    monkeypatch.setattr(jax, "device_put", device_put)


def test_out_of_memory_is_noted_and_the_run_goes_on(
    log: Path, trace: Trace, replay: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = int(np.sort(trace.sizes)[-3])
    failing(monkeypatch, largest, RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating this.\nMore."))
    done = replay(log, "jax")
    found = Replayed.of(done["runs"]["jax"])
    buffers = np.flatnonzero(trace.sizes > largest)
    assert [(f.event, f.buffer, f.size) for f in found.failures] == [
        (trace.lifetimes[0][b], b, trace.sizes[b]) for b in buffers
    ]
    assert {f.reason for f in found.failures} == {"RESOURCE_EXHAUSTED: Out of memory allocating this."}
    assert found.event_count == len(trace.steps)
    assert f"jax: event {found.failures[0].event:,}, buffer {buffers[0]} of" in done["out"]


def test_any_other_error_is_no_figure(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, 1, RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["replay", str(log), "--allocator", "jax"])


def interrupted_at(monkeypatch: pytest.MonkeyPatch, kind: type, call: int) -> None:
    allocate, calls = kind.allocate, itertools.count(1)

    def struck(self: Any, buffer: int) -> None:
        if next(calls) == call:
            raise KeyboardInterrupt
        allocate(self, buffer)

    monkeypatch.setattr(kind, "allocate", struck)


@pytest.mark.parametrize(("name", "kind"), [("jax", _live_allocators.Fresh), ("pool", _live_allocators.Pooled)])
def test_an_interrupt_keeps_what_there_is(
    name: str, kind: type, log: Path, trace: Trace, replay: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted_at(monkeypatch, kind, 50)
    before = len(jax.live_arrays())
    done = replay(log, name, status=130)
    assert len(jax.live_arrays()) == before
    found = Replayed.of(done["runs"][name])
    event = int(np.flatnonzero(trace.steps >= 0)[49])
    assert (found.event_count, found.interrupted, len(found.pass_seconds)) == (event, True, 1)
    assert found.peak_bytes == trace.live_bytes[:event].max()
    assert done["err"] == f"arenax replay: interrupted after {event} of {len(trace.steps)} events of {name}\n"


# ----------------------------------------------------------------------------------------------------------------- both


def test_both_run_in_processes_of_their_own(log: Path, trace: Trace, tmp_path: Path, replay: Run) -> None:
    Plan.fit(trace).save(tmp_path / "plan.json")
    done = replay(log, "both", "--plan", tmp_path / "plan.json")
    assert list(done["runs"]) == ["jax", "pool"]
    for run in done["runs"].values():
        assert (run["event_count"], run["peak_bytes"]) == (len(trace.steps), trace.peak_bytes)
    assert done["runs"]["pool"]["reserved_bytes"] == Plan.fit(trace).required_bytes
    assert all(text in done["out"] for text in ("jax", "pool", "(bfc)", "(pool)", "minor page faults"))


def test_what_a_process_refuses_is_said_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", str(tmp_path / "nothing.csv")]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("arenax replay: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(("kind", "asked"), [("Pooled", ["pool"]), ("Fresh", ["pool", "jax"])])
def test_an_interrupt_of_one_process_ends_both(
    kind: str, asked: list[str], log: Path, replay: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawned: list[str] = []

    def spawn(args: Any, allocator: str, to: Path) -> int:
        spawned.append(allocator)
        return cli.main(["replay", str(log), "--allocator", allocator, "--json", str(to)])

    monkeypatch.setattr(_replay_command, "_spawn", spawn)
    interrupted_at(monkeypatch, getattr(_live_allocators, kind), 3)
    done = replay(log, "both", status=130)
    assert spawned == asked
    assert list(done["runs"]) == asked[::-1]
    assert done["err"].count("interrupted after ") == 1
    assert [run["interrupted"] for run in done["runs"].values()] == [True, False][: len(asked)]


# -------------------------------------------------------------------------------------------------- memory and refusals


def test_a_trace_that_needs_too_much_is_refused_with_a_scale_that_fits(
    log: Path, trace: Trace, replay: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    available = trace.peak_bytes // 10
    monkeypatch.setattr(_replay_command, "available_bytes", lambda: available)
    monkeypatch.setattr(_replay_command, "replay_live", lambda *a: pytest.fail("it started"))
    assert cli.main(["replay", str(log), "--allocator", "jax"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"arenax replay: 'log' has {_replay_command.size_text(trace.peak_bytes)} alive at its peak")
    assert f"70% of the {_replay_command.size_text(available)} that are available" in err
    (factor,) = [word for word in err.replace(",", "").split() if word.startswith("0.")]
    assert factor == "0.069"
    monkeypatch.setattr(_replay_command, "replay_live", replay_live)
    found = replay(log, "jax", "--scale", factor)["runs"]["jax"]
    assert 0.6 * available < found["peak_bytes"] <= 0.7 * available
    assert replay(log, "jax", "--limit-bytes", "1GiB")["runs"]["jax"]["peak_bytes"] == trace.peak_bytes


def test_the_pool_is_refused_by_what_it_would_reserve(
    log: Path, trace: Trace, capsys: pytest.CaptureFixture[str]
) -> None:
    reserved = simulate(trace, "pool").peak_reserved_bytes
    assert reserved > trace.peak_bytes
    arguments = ["replay", str(log), "--limit-bytes", str(reserved - 1), "--allocator"]
    assert cli.main([*arguments, "pool"]) == 1
    assert f"and the pool reserves {_replay_command.size_text(reserved)}" in capsys.readouterr().err
    assert cli.main([*arguments, "jax"]) == 0


def test_a_device_that_tells_its_memory_is_asked(
    log: Path, replay: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stats = {"bytes_limit": 10_000, "bytes_in_use": 4_000, "peak_bytes_in_use": 5_000}

    @attrs.frozen
    class Device:
        platform: str = "gpu"

        def memory_stats(self) -> dict[str, int]:
            return stats

    monkeypatch.setattr(_replay_command, "default_device", Device)
    monkeypatch.setattr(_live_replay, "default_device", Device)
    assert cli.main(["replay", str(log), "--allocator", "jax"]) == 1
    assert "70% of the 5.859 KiB that are available" in capsys.readouterr().err
    done = replay(log, "jax", "--limit-bytes", "1GiB")
    assert done["runs"]["jax"]["device_before"] == done["runs"]["jax"]["device_after"] == stats
    assert "device's peak_bytes_in_use, after" in done["out"]
    assert "BFC is not what places" not in done["out"]


def test_a_system_that_does_not_tell_is_said_not_to(log: Path, replay: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_live_replay, "resident_bytes", lambda pids: None)
    monkeypatch.setattr(_replay_command, "available_bytes", lambda: None)
    done = replay(log, "jax")
    assert done["runs"]["jax"]["resident_peak_bytes"] is None
    assert "Resident memory is not told on this system." in done["out"]


def test_scaling_keeps_every_buffer_and_its_order(trace: Trace) -> None:
    tiny = _replay_command.scaled(trace, 1e-9)
    assert np.array_equal(tiny.steps, trace.steps)
    assert {*tiny.sizes.tolist()} == {1}
    assert np.array_equal(_replay_command.scaled(trace, 3).sizes, 3 * trace.sizes)
    with pytest.raises(ValueError, match="--scale 1e\\+18 makes more than"):
        _replay_command.scaled(trace, 1e18)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (None, [], "No such file"),
        ("Bytes\n1\n", [], "trace.csv, line 1: must be an RMM log"),
        ("id,lower,upper,size\n", [], "'trace' has no buffers to replay"),
        ("id,lower,upper,size\n0,0,5,100\n", ["--plan", "nothing.json"], "No such file"),
        ("id,lower,upper,size\n0,0,5,100\n", ["--plan", "trace.csv"], "trace.csv is no plan of arenax"),
        (
            "id,lower,upper,size\n0,0,5,100\n",
            ["--plan", "bytes.json", "--budget", "9"],
            "--budget must be at least the",
        ),
        ("id,lower,upper,size\n0,0,5,100\n", ["--plan", "shaped.json"], "is for arrays with shapes"),
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
    Plan.fit(made(("a", 0, 10))).save("bytes.json")
    request = Request((3,), np.dtype("float32"), None, SizeClass((3,), np.dtype("float32")))
    Plan.fit(arenax.Trace([0], [12], requests=(request,))).save("shaped.json")
    assert cli.main(["replay", "trace.csv", "--allocator", "pool", *options]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("arenax replay: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--allocator", "numpy"], "argument --allocator: invalid choice: 'numpy'"),
        (["--allocator", "jax", "--plan", "p.json"], "not allowed with --allocator jax"),
        (["--allocator", "jax", "--budget", "1MiB"], "not allowed with --allocator jax"),
        (["--plan", "p.json", "--scale", "0.5"], "--plan: not allowed with argument --scale"),
        (["--scale", "0"], "--scale: must be a number above 0, got '0'"),
        (["--scale", "inf"], "--scale: must be a number above 0, got 'inf'"),
        (["--repeat", "0"], "--repeat: must be at least 1, got 0"),
        (["--limit-bytes", "half"], "--limit-bytes: must be a size such as"),
    ],
)
def test_bad_arguments(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["replay", "trace.csv", *options])
    assert message in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["replay", "--help"])
    said = capsys.readouterr().out
    assert all(
        option in said for option in ("--allocator", "--plan", "--budget", "--limit-bytes", "--scale", "--repeat")
    )

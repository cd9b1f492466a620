"""A trace becomes a memory snapshot of PyTorch's, which our reader and PyTorch's own take, and comes back the same."""

import pickle
import pickletools
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import arenax
from arenax_stress import Trace
from arenax_stress._scenarios import SCENARIOS
from arenax_stress._snapshot_writer import BASE, dumps, snapshot

# What the viewer's unpickler knows (torch/utils/viz/MemoryViz.js).
VIEWER = {
    "PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_TUPLE",
    "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "NONE", "NEWTRUE", "NEWFALSE",
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINPUT", "LONG_BINPUT",
}  # fmt: skip


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Any order of allocations and frees, with sizes down to nothing, and buffers that stay."""
    steps: list[int] = []
    sizes: list[int] = []
    alive: list[int] = []
    for choice in draw(st.lists(st.integers(0, 2**24), min_size=1, max_size=60)):
        if alive and choice % 3 == 0:
            steps.append(~alive.pop(choice % len(alive)))
        else:
            steps.append(len(sizes))
            alive.append(len(sizes))
            sizes.append(draw(st.sampled_from([0, 1, 255, 256, 700, 2**20, choice])))
    times = draw(st.none() | st.just(np.arange(len(steps)) / 8))
    return Trace(steps, sizes, times=times)


def same(found: arenax.Trace, trace: arenax.Trace) -> None:
    assert found.steps.tolist() == trace.steps.tolist()
    assert found.sizes.tolist() == trace.sizes.tolist()
    if trace.times is None:
        assert found.times is None
    else:
        assert found.times is not None
        np.testing.assert_allclose(found.times, trace.times - trace.times[0], atol=1e-6)


@hypothesis.given(traces())
def test_the_events_come_back(tmp_path_factory: Any, trace: Trace) -> None:
    path = tmp_path_factory.mktemp("snapshot") / "run.pickle"
    trace.to_pytorch_snapshot(path)
    same(Trace.from_pytorch_snapshot(path), trace)


@hypothesis.given(traces())
def test_the_segment_is_whole_and_no_two_buffers_overlap(trace: Trace) -> None:
    found = snapshot(trace)
    (segment,) = found["segments"]
    at = segment["address"]
    for block in segment["blocks"]:
        assert block["address"] == at
        assert block["size"] > 0
        at += block["size"]
    assert at - segment["address"] == segment["total_size"]
    active = [block for block in segment["blocks"] if block["state"] == "active_allocated"]
    assert sum(block["size"] for block in active) == segment["allocated_size"] == segment["active_size"]
    assert sum(block["requested_size"] for block in active) == segment["requested_size"] == int(trace.live_bytes[-1])
    alive: dict[int, int] = {}
    for entry in found["device_traces"][0]:
        if entry["action"] == "alloc":
            start, end = entry["addr"], entry["addr"] + entry["size"]
            assert segment["address"] <= start <= end <= segment["address"] + segment["total_size"]
            assert not any(start < other + size and other < end for other, size in alive.items())
            alive[start] = entry["size"]
        elif entry["action"] == "free_completed":
            assert alive.pop(entry["addr"]) == entry["size"]
    assert alive == {block["address"]: block["requested_size"] for block in active}


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_scenarios_come_back(tmp_path: Path, name: str) -> None:
    trace = SCENARIOS[name](events=600)
    trace.to_pytorch_snapshot(tmp_path / "run.pickle")
    same(Trace.from_file(tmp_path / "run.pickle"), trace)


def recorded() -> arenax.Trace:
    with arenax.BufferPool(name="train", ragged=arenax.Ragged(0, arenax.SizeClasses.pow2(8, 32))) as pool:
        with pool.record() as live:
            for n in (5, 7, 12):
                with pool.step() as step:
                    step.put(np.ones(n, np.float32))
        return live


def test_a_recording_has_its_classes_as_functions(tmp_path: Path) -> None:
    trace = recorded()
    found = snapshot(trace)
    names = [entry["frames"][0]["name"] for entry in found["device_traces"][0] if entry["action"] == "alloc"]
    assert names == ["float32[8]", "float32[8]", "float32[16]"]
    path = tmp_path / "run.pickle"
    path.write_bytes(dumps(trace))
    same(Trace.from_file(path), trace)


def test_times_that_are_no_seconds_fit() -> None:
    trace = Trace([0, ~0], [8], times=[0, 2**53])
    assert [entry["time_us"] for entry in snapshot(trace)["device_traces"][0]] == [0, 0, 2**53, 2**53]


def test_a_trace_of_nothing_is_one_of_nothing() -> None:
    assert snapshot(Trace([], [])) == {"segments": [], "device_traces": [[]], "allocator_settings": {}}


def test_the_viewer_s_own_unpickler_knows_every_operation() -> None:
    trace = recorded()
    data = dumps(trace)
    used = {operation.name for operation, *_ in pickletools.genops(data)}
    assert used <= VIEWER, used - VIEWER
    assert data[:2] == b"\x80\x04"
    assert BASE < 2**53
    assert pickle.loads(data) == snapshot(trace)


def test_pytorch_s_own_reader_takes_it(tmp_path: Path) -> None:
    viz = pytest.importorskip("torch.cuda._memory_viz")
    trace = SCENARIOS["kept_results"](events=400)
    trace.to_pytorch_snapshot(tmp_path / "run.pickle")
    found = pickle.loads((tmp_path / "run.pickle").read_bytes())
    summary = viz.segsum(found)  # It asserts that the blocks add up.
    assert "segments: 1" in summary
    assert f"total_allocated: {viz.Bytes(int(trace.live_bytes[-1]))}" in summary
    lines = viz.trace(found).splitlines()
    assert lines[0] == "Device 0 ----------------"
    assert "cudaMalloc" in lines[2]
    assert sum(line.startswith("del ") for line in lines) == int((trace.steps < 0).sum())
    assert not any("MEM[" in line for line in lines)  # Each buffer lies in the segment.
    assert "snapshot.pickle" in viz.trace_plot(found)

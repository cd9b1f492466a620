"""Every reader agrees with a naive model; a file that lies is refused by name and line, and runs nothing."""

import os
import pickle
import pickletools
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import arenax
import arenax_stress
from arenax import BadTrace
from arenax_stress import Trace
from arenax_stress._plain_pickle import loads

HEADER = "id,lower,upper,size\n"
PUBLIC = Path(__file__).parents[2].parent / "shared" / "traces"


@pytest.fixture
def public() -> Path:
    if not PUBLIC.is_dir():
        pytest.skip("the public traces are not there: shared/traces beside the checkout")
    return PUBLIC


def events_of(trace: arenax.Trace) -> list[tuple[str, int, int]]:
    return [(e.action, e.buffer, e.size) for e in trace]


def refused(read: Any, path: Path, where: str | None, fault: str, **options: Any) -> BadTrace:
    with pytest.raises(BadTrace, match=fault) as caught:
        read(path, **options)
    assert caught.value.path == str(path)
    assert caught.value.where == where
    assert str(path) in str(caught.value)
    return caught.value


def test_the_package_gives_it_without_importing_jax_first() -> None:
    check = "import sys, arenax_stress; assert 'jax' not in sys.modules; from arenax_stress import Trace"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=100)
    with pytest.raises(AttributeError, match="has no attribute 'Traces'"):
        arenax_stress.Traces  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


# ----------------------------------------------------------------------------------------------------------- intervals

INTERVALS = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6), st.integers(0, 2**40)), max_size=20).map(
    lambda rows: [(lower, lower + length, size) for lower, length, size in rows]
)


def naive(rows: list[tuple[int, int, int]]) -> list[tuple[str, int, int, float]]:
    """Moment by moment: first what ends, then what begins, in the order of the rows."""
    found: list[tuple[str, int, int, float]] = []
    numbers: dict[int, int] = {}
    for now in range(max((upper for _, upper, _ in rows), default=0) + 1):
        found += [("free", numbers[i], size, now) for i, (_, upper, size) in enumerate(rows) if upper == now]
        for i, (lower, _, size) in enumerate(rows):
            if lower == now:
                numbers[i] = len(numbers)
                found.append(("allocate", numbers[i], size, now))
    return found


@hypothesis.given(INTERVALS)
def test_intervals_agree_with_the_naive_model(tmp_path_factory: Any, rows: list[tuple[int, int, int]]) -> None:
    path = tmp_path_factory.mktemp("intervals") / "net.csv"
    path.write_text(HEADER + "".join(f"b{i},{a},{b},{s}\n" for i, (a, b, s) in enumerate(rows)))
    trace = Trace.from_intervals_csv(path)
    assert type(trace) is Trace
    assert trace.name == "net"
    assert len(trace) == len(rows)
    assert [(e.action, e.buffer, e.size, e.time) for e in trace] == naive(rows)


def test_what_spreadsheets_do_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "net.csv"
    path.write_bytes(b'\xef\xbb\xbfid, lower, upper, size, offset\r\n"0",0, 2,512,0\r\n\r\n1,2,3,256,0\r\n')
    assert events_of(Trace.from_file(path)) == [
        ("allocate", 0, 512), ("free", 0, 512), ("allocate", 1, 256), ("free", 1, 256)
    ]  # fmt: skip


def test_a_file_of_no_intervals(tmp_path: Path) -> None:
    path = tmp_path / "net.csv"
    path.write_text(HEADER)
    assert len(Trace.from_file(path)) == 0


@pytest.mark.parametrize(
    ("text", "line", "fault"),
    [
        ("", 1, "must begin with the columns id,lower,upper,size, got ''"),
        ("id,start,end,size\n0,0,1,8\n", 1, "must begin with the columns"),
        (HEADER + "0,0,1,8\n1,0,1\n", 3, "must have 4 columns, got 3"),
        (HEADER + "0,0,1,8\n1,0,", 3, "must have 4 columns, got 3"),
        (HEADER + "0,0,1,8\n\n1,0,1,", 4, "must be integers, got '0,1,'"),
        (HEADER + "0,0,1.5,8\n", 2, "must be integers, got '0,1.5,8'"),
        (HEADER + "0,7,7,8\n", 2, "upper must lie above lower, got the interval from 7 to 7"),
        (HEADER + "0,7,6,8\n", 2, "upper must lie above lower, got the interval from 7 to 6"),
        (HEADER + "0,-1,6,8\n", 2, "lower and upper must be at least 0"),
        (HEADER + f"0,0,{2**53 + 1},8\n", 2, r"at most 2\*\*53"),
        (HEADER + "0,0,1,-8\n", 2, "a size must be at least 0"),
        (HEADER + f"0,0,1,{2**63}\n", 2, r"below 2\*\*63"),
        (HEADER + f"0,0,1,{'9' * 5000}\n", 2, "must be integers"),
        (HEADER + "0,0,1,8\n1,0,1,8\n0,2,3,8\n", 4, "has the id '0' of line 2"),
        (HEADER + f"0,0,1,{'8' * 200_000}\n", 2, "no text in columns"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, text: str, line: int, fault: str) -> None:
    path = tmp_path / "net.csv"
    path.write_text(text)
    refused(Trace.from_intervals_csv, path, f"line {line}", fault)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "net.csv"
    path.write_bytes(HEADER.encode() + b"0,0,1,8\n1,0,1,\xff\xfe\n")
    refused(Trace.from_intervals_csv, path, "line 3", "must be integers")


@pytest.mark.parametrize(
    ("name", "buffers"), [("minimalloc_A", 154), ("somas_tensors_resnet50", 1042), ("iopddl_Y_1", 62_185)]
)
def test_the_public_traces(public: Path, name: str, buffers: int) -> None:
    trace = Trace.from_file(public / f"{name}.csv")
    assert (len(trace), trace.name, trace.live_bytes[-1]) == (buffers, name, 0)
    table = np.loadtxt(public / f"{name}.csv", np.int64, delimiter=",", skiprows=1)
    changes = np.zeros(table[:, 2].max() + 1, np.int64)
    np.add.at(changes, table[:, 1], table[:, 3])
    np.add.at(changes, table[:, 2], -table[:, 3])
    assert trace.peak_bytes == np.cumsum(changes).max()
    assert sorted(trace.sizes.tolist()) == sorted(table[:, 3].tolist())


# ----------------------------------------------------------------------------------------------------------- snapshots


def event(action: str, addr: int = 0, size: int = 0, **further: Any) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0, "frames": [], **further}


def dumped(path: Path, events: Any, segments: Any = (), protocol: int | None = None) -> Path:
    snapshot = {"segments": list(segments), "device_traces": [events], "allocator_settings": {"x": None}}
    path.write_bytes(pickle.dumps(snapshot, protocol))
    return path


def of(*events: Any, segments: Any = ()) -> dict[str, Any]:
    """A snapshot of one device."""
    return {"device_traces": [list(events)], "segments": list(segments)}


def segment(address: int, *blocks: tuple[int, int, str], device: int = 0) -> dict[str, Any]:
    return {
        "device": device, "address": address, "total_size": sum(b[0] for b in blocks), "stream": 0,
        "blocks": [{"size": size, "requested_size": asked, "state": state} for size, asked, state in blocks],
    }  # fmt: skip


class Device:
    """The naive model: an allocator that never uses an address twice at once, and writes down what it does."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.held: dict[int, int] = {}

    def allocate(self, address: int, size: int) -> None:
        self.held[address] = size
        self.events.append(event("alloc", address, size, time_us=1000 + len(self.events)))

    def free(self, address: int) -> None:
        size = self.held.pop(address)
        for action in ("free_requested", "segment_free", "free_completed"):
            self.events.append(event(action, address, size, time_us=1000 + len(self.events)))

    def segments(self) -> list[dict[str, Any]]:
        blocks = [(1 << 20, self.held.get(a, 0), "active_allocated" if a in self.held else "inactive") for a in SPOTS]
        return [segment(0x7F << 40, *blocks)]


SPOTS = [(0x7F << 40) + (i << 20) for i in range(6)]


@hypothesis.given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 1 << 20)), max_size=30), st.data())
def test_a_recording_that_begins_at_any_time(
    tmp_path_factory: Any, moves: list[tuple[int, int]], data: st.DataObject
) -> None:
    device, starts = Device(), [0]
    alive = [dict(device.held)]
    for spot, size in moves:
        if SPOTS[spot] in device.held:
            device.free(SPOTS[spot])
        else:
            device.allocate(SPOTS[spot], size)
        starts.append(len(device.events))
        alive.append(dict(device.held))
    begin = data.draw(st.integers(0, len(moves)))
    events = device.events[starts[begin] :]
    path = tmp_path_factory.mktemp("snapshot") / "run.pickle"
    dumped(path, events, device.segments(), data.draw(st.sampled_from([2, 3, 4, 5])))
    if not events:
        refused(Trace.from_file, path, None, "has no events of device 0")
        return
    trace = Trace.from_file(path)
    # What was alive comes first; then live bytes go as the device's did.
    before = alive[begin]
    assert trace.sizes[: len(before)].tolist() == [before[a] for a in sorted(before)]
    live = trace.live_bytes.tolist()
    assert live[len(before) :] == [sum(held.values()) for held in alive[begin + 1 :]]
    assert trace.times is not None
    assert (np.diff(trace.times) >= 0).all()


def test_a_buffer_ends_where_its_free_is_completed(tmp_path: Path) -> None:
    events = [
        event("alloc", 16, 8),
        event("free_requested", 16, 8),
        event("alloc", 32, 4),
        event("free_completed", 16, 8),
    ]
    trace = Trace.from_pytorch_snapshot(dumped(tmp_path / "a.pickle", events))
    assert events_of(trace) == [("allocate", 0, 8), ("allocate", 1, 4), ("free", 0, 8)]
    assert trace.times is None
    without = [e for e in events if e["action"] != "free_completed"]
    trace = Trace.from_pytorch_snapshot(dumped(tmp_path / "b.pickle", without))
    assert events_of(trace) == [("allocate", 0, 8), ("free", 0, 8), ("allocate", 1, 4)]


def test_the_allocators_own_affairs_are_left_out(tmp_path: Path) -> None:
    others = ["segment_alloc", "segment_map", "segment_unmap", "segment_free", "snapshot", "something_new"]
    events = [*(event(a, 16, 2**21) for a in others), {"action": "oom", "size": 2**40, "device_free": 1}]
    events.insert(3, event("alloc", 16, 8, time_us=5_000_000))
    events.append(event("free_completed", 16, 8, time_us=5_500_000))
    trace = Trace.from_pytorch_snapshot(dumped(tmp_path / "a.pickle", events))
    assert [tuple(e)[:4] for e in trace] == [("allocate", 0, 8, 0.0), ("free", 0, 8, 0.5)]


def test_what_was_alive_throughout_comes_from_the_segments_of_that_device(tmp_path: Path) -> None:
    segments = [
        segment(0x2000, (512, 100, "inactive"), (1024, 700, "active_allocated"), (512, 5, "active_pending_free")),
        segment(0x9000, (512, 500, "active_allocated"), device=1),
        {"device": 0, "address": None, "blocks": []},
        segment(0x1000, (512, 300, "active_awaiting_free")),
        segment(0x5000, (512, 300, "active_allocated")),  # from after the recording: its free is there
    ]
    events = [event("alloc", 0x5000, 8), event("free_completed", 0x5000, 8)]
    trace = Trace.from_pytorch_snapshot(dumped(tmp_path / "a.pickle", events, segments))
    assert trace.sizes.tolist() == [300, 700, 5, 8]
    old = segment(0x1000, (512, 0, "active_allocated"))
    del old["blocks"][0]["requested_size"], old["device"]
    trace = Trace.from_pytorch_snapshot(dumped(tmp_path / "b.pickle", events, [old]))
    assert trace.sizes.tolist() == [512, 8]


def test_the_device_is_chosen(tmp_path: Path) -> None:
    path = tmp_path / "two.pkl"
    traces = [[], [event("alloc", 16, 8)]]
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": traces}))
    assert Trace.from_file(path, device=1).sizes.tolist() == [8]
    refused(Trace.from_file, path, None, "has no events of device 0; devices with events: 1")
    refused(Trace.from_file, path, None, "has traces of 2 devices, and none of device 2", device=2)
    refused(Trace.from_file, path, None, "none of device -1", device=-1)
    with pytest.raises(TypeError, match="device must be an integer, got 'cuda:0'"):
        Trace.from_pytorch_snapshot(path, device="cuda:0")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("snapshot", "where", "fault"),
    [
        ([], None, "holds no device_traces"),
        ({"segments": []}, None, "holds no device_traces"),
        ({"device_traces": 7, "segments": []}, None, "holds no device_traces"),
        ({"device_traces": [7], "segments": []}, None, "the trace of device 0 must be a list, got int"),
        ({"device_traces": [[event("alloc", 1, 8)]]}, None, "must have a list of segments"),
        (of(), None, "was torch.cuda.memory._record_memory_history on"),
        (of(event("alloc", 1, 8), segments=[7]), None, "a segment must be a dict"),
        (of(event("alloc", 1, 8), segments=[{"blocks": [7], "address": 1}]), None, "a block must be a dict, got int"),
        (
            of(event("alloc", 1, 8), segments=[{"blocks": [{}]}]),
            "a segment",
            "address must be an integer, got NoneType",
        ),
        (of(event("snapshot"), 7), "event 1", "must be a dict with an action"),
        (of({}), "event 0", "must be a dict with an action"),
        (of({"action": "alloc"}), "event 0", "addr must be an integer, got NoneType"),
        (of(event("alloc", 1, True)), "event 0", "size must be an integer, got bool"),
        (of(event("alloc", 1, -8)), "event 0", "size must be at least 0"),
        (of(event("alloc", 1, 2**63)), "event 0", r"below 2\*\*63"),
        (of(event("alloc", 1, 8, time_us="now")), "event 0", "time_us must be"),
        (
            of(event("alloc", 16, 8), event("snapshot"), event("alloc", 16, 8)),
            "event 2 of device 0",
            "allocates '0x10', which is alive",
        ),
        (
            of(event("alloc", 16, 8), *[event("free_completed", 16, 8)] * 2),
            "event 2 of device 0",
            "frees '0x10', which is not alive",
        ),
    ],
)
def test_a_snapshot_that_is_none(tmp_path: Path, snapshot: Any, where: str | None, fault: str) -> None:
    path = tmp_path / "run.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    refused(Trace.from_file, path, where, fault)


# ------------------------------------------------------------------------------------------------------------- pickles


class Evil:
    """Runs a command when an ordinary unpickler reads it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_that_would_run_a_command_is_refused_and_not_run(tmp_path: Path, protocol: int) -> None:
    victim = tmp_path / "ran"
    path = tmp_path / "evil.pickle"
    events = [event("alloc", 1, 8, frames=Evil(victim))]
    path.write_bytes(pickle.dumps({"device_traces": [events], "segments": []}, protocol))
    refused(Trace.from_file, path, None, f"holds more than plain data: {os.name}.system")
    assert not victim.exists()
    pickle.loads(path.read_bytes())
    assert victim.exists()  # It would have run.


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "no pickle of protocol 2"),
        (b"(lp0\n.", "no pickle of protocol 2"),
        (b"\x80", "ends after 1 bytes"),
        (b"\x80\x04", "ends after 2 bytes"),
        (b"\x80\x04}", "ends after 3 bytes"),
        (b"\x80\x04X\xff\xff\xff\x7fabc", "ends after"),
        (b"\x80\x04G\0\0", "ends after"),
        (b"\x80\x04.N", "takes what is not there"),
        (b"\x80\x04\x85.", "takes what is not there"),
        (b"\x80\x04h\x07.", "is no pickle: byte 3: KeyError"),
        (b"\x80\x04]]K\x01s.", "sets an item of list"),
        (b"\x80\x04}K\x01a.", "appends to dict"),
        (b"\x80\x04}(K\x01u.", "is no pickle: byte 7: ValueError"),
        (b"\x80\x04\x8c\x01\xff.", "UnicodeDecodeError"),
        (b"\x80\x04\xff.", "holds more than plain data: operation 0xff"),
        (b"\x80\x04cposix\nsystem\n.", "holds more than plain data: posix.system"),
        (b"\x80\x04(iposix\nsystem\n.", "holds more than plain data: posix.system"),
        (b"\x80\x04\x8c\x05posix\x8c\x06system\x93.", "holds more than plain data: posix.system"),
        (b"\x80\x04\x93.", "holds more than plain data: STACK_GLOBAL"),
        (b"\x80\x04]]\x93.", "holds more than plain data: list.list"),
        (b"\x80\x02K\x01Q.", "holds more than plain data: BINPERSID"),
        (b"\x80\x02Pname\n.", "holds more than plain data: PERSID"),
        (b"\x80\x02\x82\x01.", "holds more than plain data: EXT1"),
        (b"\x80\x02))R.", "holds more than plain data: REDUCE"),
        (b"\x80\x02))\x81.", "holds more than plain data: NEWOBJ"),
        (b"\x80\x02}}b.", "holds more than plain data: BUILD"),
        (b"\x80\x04\x8f.", "holds more than plain data: EMPTY_SET"),
        (b"\x80\x05\x97.", "holds more than plain data: NEXT_BUFFER"),
        (b"\x80\x04}" + b")" + b"\x85" * 1_000_000 + b"K\x01s.", "a key of type tuple"),
        (b"\x80\x04}]K\x01s.", "a key of type list"),
    ],
)  # fmt: skip
def test_what_is_no_plain_pickle(tmp_path: Path, data: bytes, fault: str) -> None:
    path = tmp_path / "run.pickle"
    path.write_bytes(data)
    refused(Trace.from_file, path, None, fault)


def test_a_nest_of_any_depth_is_no_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "run.pickle"
    path.write_bytes(b"\x80\x04" + b"]" * 1_000_000 + b"a" * 999_999 + b".")
    refused(Trace.from_file, path, None, "holds no device_traces")
    # 2**64 tuples, if somebody should follow them all.
    path.write_bytes(
        b"\x80\x04" + b")" + b"\x94h\x00\x86" + b"".join(b"\x94h" + bytes([i]) + b"\x86" for i in range(1, 64)) + b"."
    )
    refused(Trace.from_file, path, None, "holds no device_traces")


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False)
    | st.text(st.characters(), max_size=300)
    | st.binary(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers() | st.booleans() | st.none(), inner, max_size=5)
    ),
    max_leaves=30,
)


@hypothesis.given(PLAIN, st.integers(3, 5), st.booleans())
def test_plain_data_comes_back_as_from_python(value: Any, protocol: int, shorter: bool) -> None:
    data = pickle.dumps([value, value], protocol)
    if shorter:
        data = pickletools.optimize(data)
    found = loads(data)
    assert found == [value, value]
    assert repr(found) == repr([value, value])


@hypothesis.given(PLAIN, st.data())
def test_a_truncated_pickle_is_refused(value: Any, data: st.DataObject) -> None:
    whole = pickle.dumps(value)
    with pytest.raises(pickle.UnpicklingError, match=r"ends after|no pickle"):
        loads(whole[: data.draw(st.integers(0, len(whole) - 1))])


@hypothesis.given(PLAIN, st.binary(min_size=1, max_size=4), st.data())
def test_a_damaged_pickle_is_refused_or_plain(value: Any, damage: bytes, data: st.DataObject) -> None:
    whole = pickle.dumps(value)
    at = data.draw(st.integers(0, len(whole)))
    try:
        loads(whole[:at] + damage + whole[at + len(damage) :])
    except pickle.UnpicklingError:
        pass


# ---------------------------------------------------------------------------------------------------------------- any


def test_a_log_of_rmm_is_known_by_its_first_line(tmp_path: Path) -> None:
    path = tmp_path / "rmm.csv"
    Trace.from_events([("allocate", 1, 8), ("allocate", 2, 16), ("free", 1, 8)]).to_rmm_csv(path)
    trace = Trace.from_file(path)
    assert type(trace) is Trace
    assert events_of(trace) == [("allocate", 0, 8), ("allocate", 1, 16), ("free", 0, 8)]


def test_a_pickle_is_known_without_its_suffix(tmp_path: Path) -> None:
    assert len(Trace.from_file(dumped(tmp_path / "snapshot", [event("alloc", 16, 8)]))) == 1


@pytest.mark.parametrize("content", [b"", b"1 2 3\n", b"\xff\xfe\0", b"id;lower;upper;size\n", b"x" * 10_000])
def test_a_file_of_another_kind(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "some.csv"
    path.write_bytes(content)
    refused(Trace.from_file, path, "line 1", "must be an RMM log .* intervals .* or a snapshot of PyTorch")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for read in (Trace.from_file, Trace.from_intervals_csv, Trace.from_pytorch_snapshot):
        with pytest.raises(FileNotFoundError):
            read(tmp_path / "none.csv")

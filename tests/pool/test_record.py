"""Recordings: every loan and return of a pool, as a trace that can be replayed, read by others, and trusted."""

import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import arenax
from arenax import _record
from arenax._trace_csv import HEADER
from arenax.testing import FakeDevice

from .conftest import MakePool, copies, pool_on

RAGGED = arenax.Ragged(1, arenax.SizeClasses.explicit([4, 8]))
X = np.ones((2, 3), np.float32)


def story(trace: arenax.Trace) -> list[tuple[str, int, int]]:
    return [(e.action[0], e.buffer, e.size) for e in trace]


def test_each_way_to_draw_is_recorded(make_pool: MakePool) -> None:
    pool = make_pool()
    with pool.record() as trace:
        x = pool.put(X)
        del x
        with pool.step() as step:
            step.put({"a": X, "b": np.ones(5, np.int8)})
            step.zeros((7,))
        lease = pool.lease((3,), "int32")
        lease.release()
        with pool.lease((2,), "int32") as lease:
            kept = lease.detach()
    assert kept.shape == (2,)
    found = [(a, b, n // copies(pool)) for a, b, n in story(trace)]
    assert found[:2] == [("a", 0, 24), ("f", 0, 24)]
    assert sorted(found[2:8]) == sorted(
        [("a", 1, 24), ("a", 2, 5), ("a", 3, 28), ("f", 1, 24), ("f", 2, 5), ("f", 3, 28)]
    )
    assert found[8:] == [("a", 4, 12), ("f", 4, 12), ("a", 5, 8), ("f", 5, 8)]
    assert trace.name == pool.name
    assert trace.requests is not None
    assert [str(r.size_class) for r in trace.requests] == [
        "float32[2,3]",
        "float32[2,3]",
        "int8[5]",
        "float32[7]",
        "int32[3]",
        "int32[2]",
    ]


def test_shapes_are_those_that_were_asked_for(make_pool: MakePool) -> None:
    pool = make_pool(ragged={"x": RAGGED, "y": None})
    with pool.record() as trace:
        for n in (3, 8, 0):
            with pool.step() as step:
                step.put({"x": np.ones((2, n), np.float32), "y": np.ones((), np.float32)})
    assert trace.requests is not None
    assert {(r.shape, r.axis, str(r.size_class)) for r in trace.requests if r.shape} == {
        ((2, 3), 1, "float32[2,4]"),
        ((2, 8), 1, "float32[2,8]"),
        ((2, 0), 1, "float32[2,4]"),
    }
    assert [r.axis for r in trace.requests if not r.shape] == [None] * 3


def test_what_is_on_loan_when_it_begins_comes_first(make_fake: MakePool) -> None:
    pool = make_fake()
    held, gone = pool.put(X), pool.put(X)
    del gone
    with pool.record() as trace:
        pool.lease((1,)).release()
        del held
        pool.stats()
    assert story(trace) == [("a", 0, 24), ("a", 1, 4), ("f", 1, 4), ("f", 0, 24)]


def test_what_outlives_it_has_no_end(make_fake: MakePool) -> None:
    pool = make_fake()
    with pool.record() as trace:
        held = pool.put(X)
    assert story(trace) == [("a", 0, 24)]
    del held


def test_spilled_arrays_are_recorded_until_they_die(make_pool: MakePool) -> None:
    pool = make_pool(on_exhausted="spill")
    with pool.record() as trace:
        with pytest.warns(RuntimeWarning, match="fresh array"):
            x = pool.put(X)
        with pool.step() as step:
            step.zeros((2,))
        pool.lease((1,)).release()
        del x
        last = pool.put(X)  # No other comes after it, whose slot could end it by taking its place.
        del last
        pool.check()
    found = story(trace)
    assert not trace.live_bytes[-1]
    n = 24 * copies(pool)
    assert [f for f in found if f[1] == 0] == [("a", 0, n), ("f", 0, n)]
    assert Counter(f[0] for f in found) == {"a": 4, "f": 4}
    assert not pool.arena.recorders


def test_one_pass_on_is_a_return_and_a_loan(make_pool: MakePool) -> None:
    pool = make_pool()
    with pool.record() as trace:
        for _ in range(5):
            x = pool.put(X)
            del x
        for _ in range(5):
            batch = pool.put((X, X))
            del batch
    ends = np.flatnonzero(trace.steps < 0)
    assert len(trace) == 15
    assert len(ends) == 15
    assert trace.live_bytes.max() == 48 * copies(pool)


def test_a_slot_passed_on_has_the_bytes_of_each_request(make_fake: MakePool) -> None:
    """They are written long after, when the slot has been asked for by others."""
    sizes = [3, 3, 3, 5, 5, 3, 3, 8]
    pool = make_fake(ragged=arenax.Ragged(0, arenax.SizeClasses.explicit([8])))
    with pool.record() as trace:
        for n in sizes:
            x = pool.put(np.ones(n, np.int8))
            del x
    assert [e.size for e in trace if e.action == "allocate"] == sizes


@given(st.lists(st.tuples(st.sampled_from("pld"), st.integers(0, 4)), max_size=60))
def test_a_recording_adds_up_to_what_the_pool_says(script: list[tuple[str, int]]) -> None:
    with arenax.BufferPool(FakeDevice()) as pool, pool.record() as trace, pool.measure() as m:
        held: list[Any] = []
        for action, n in script:
            if action == "p":
                held.append(pool.put(np.ones(n, np.int8)))
            elif action == "l":
                held.append(pool.lease((n,), "int16"))
            elif held:
                one = held.pop(n % len(held))
                if isinstance(one, arenax.Lease):
                    one.release()
                del one
        held.clear()
        pool.check()
    assert (trace.live_bytes[-1:] == 0).all()
    assert trace.peak_bytes == m.stats.peak_requested_bytes
    assert len(trace) == m.stats.hit_count + m.stats.creation_count


def test_two_recordings_at_once_see_the_same(make_fake: MakePool) -> None:
    pool = make_fake()
    with pool.record() as outer:
        pool.put(X)
        with pool.record() as inner:
            pool.put(X)
            pool.put(X)
    assert story(outer)[2:] == [(a, b + 1, n) for a, b, n in story(inner)]


@pytest.mark.parametrize("others", [0, 1])
def test_a_long_one_is_written_as_it_goes(make_fake: MakePool, tmp_path: Path, others: int) -> None:
    pool = make_fake()
    path = tmp_path / "long.csv"
    with pool.record(path) as trace, contextlib.ExitStack() as stack:
        for _ in range(others):
            stack.enter_context(pool.record())
        for _ in range(3 * _record.CHUNK):
            x = pool.put(X)
            del x
        for recorder in pool.arena.recorders:  # A chunk, and what came until the next mark.
            assert len(recorder._events) < 2 * _record.CHUNK
        assert path.stat().st_size > 40 * _record.CHUNK
        assert len(trace) >= _record.CHUNK  # As far as it was written.
    assert len(trace) == 3 * _record.CHUNK
    assert story(arenax.Trace.from_rmm_csv(path)) == story(trace)


def test_threads_are_told_apart(make_fake: MakePool) -> None:
    pool = make_fake()

    def work() -> None:
        for _ in range(100):
            with pool.step() as step:
                step.put(X)

    with pool.record() as trace:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert trace.threads is not None
    assert len(trace) == 300
    assert 1 <= len(set(trace.threads.tolist())) <= 4
    assert not trace.live_bytes[-1]


def test_times_are_seconds_since_the_epoch_and_never_fall(make_fake: MakePool) -> None:
    pool = make_fake()
    with pool.record() as trace:
        for _ in range(3):
            pool.put(X)
    assert trace.times is not None
    assert (np.diff(trace.times) >= 0).all()
    assert trace.times[0] > 1.7e9


# ------------------------------------------------------------------------------------------------------------- the file


def test_the_file_is_what_rmm_logs_with_columns_more(make_fake: MakePool, tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    pool = make_fake(ragged=RAGGED)
    with pool.record(path), pool.step() as step:
        step.put(np.ones((2, 3), np.float32))
    header, allocate, free = path.read_text().splitlines()
    assert header + "\n" == HEADER
    assert header.startswith("Thread,Time,Action,Pointer,Size,Stream")
    thread, time, action, pointer, *rest = allocate.split(",")
    assert thread == str(threading.get_ident())
    assert float(time) > 1.7e9
    assert action == "allocate"
    assert int(pointer, 16)
    assert rest == ["24", "0", "float32[2x4]", "2x3", "1"]
    assert free.split(",")[2:] == ["free", pointer, *rest]


def test_a_trace_that_is_written_reads_back(make_fake: MakePool, tmp_path: Path) -> None:
    pool = make_fake(ragged=RAGGED)
    with pool.record() as trace:
        held = [pool.put(np.ones((2, n), np.float32)) for n in (1, 5, 8)]
        del held[1]
        pool.check()
    trace.to_rmm_csv(tmp_path / "again.csv")
    again = arenax.Trace.from_rmm_csv(tmp_path / "again.csv")
    assert story(again) == story(trace)
    assert again.requests == trace.requests
    assert again.name == "again"
    np.testing.assert_allclose(again.times, trace.times, atol=1e-3)
    plain = arenax.Trace.from_events([("allocate", 0, 5), ("allocate", 1, 0), ("free", 0, 5)])
    plain.to_rmm_csv(tmp_path / "plain.csv")
    assert story(arenax.Trace.from_rmm_csv(tmp_path / "plain.csv")) == story(plain)
    assert (tmp_path / "plain.csv").read_text().startswith("Thread,Time,Action,Pointer,Size,Stream\n")


def test_a_log_of_rmm_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rmm.csv"
    path.write_text(
        "Thread,Time,Action,Pointer,Size,Stream\n"
        "7,23:59:59.900000,allocate,0x7f00,1024,0x0\n"
        "7,23:59:59.950000,allocate failure,0x0,99999,0x0\n"
        "8,00:00:00.100000,allocate,0x0,0,0x0\n"
        "8,00:00:00.100000,free,0x0,0,0x0\n"
        "8,00:00:00.200000,free,0x7f00,1024,0x0\n"
        "8,00:00:00.300000,allocate,0x7f00,10,0x0\n"
    )
    trace = arenax.Trace.from_rmm_csv(path)
    assert story(trace) == [("a", 0, 1024), ("f", 0, 1024), ("a", 1, 10)]
    assert trace.threads is not None
    assert trace.threads.tolist() == [7, 8, 8]
    assert trace.times is not None
    np.testing.assert_allclose(np.diff(trace.times), [0.3, 0.1])
    assert trace.requests is None


ROW = "1,2.0,allocate,0x10,8,0"
FULL = "1,2.0,allocate,0x10,8,0,float32[4x8],4x8,"
BAD = {
    "empty": ("", "line 1: must begin with the columns"),
    "foreign": ("a,b,c\n1,2,3\n", "line 1: must begin with the columns"),
    "truncated": (f"Thread,Time,Action,Pointer,Size,Stream\n{ROW}\n1,2.0,fr", "line 3: must have 6 columns, got 3"),
    "size": ("Thread,Time,Action,Pointer,Size,Stream\n1,2.0,allocate,0x10,-8,0\n", "line 2: a size must be at least 0"),
    "no size": ("Thread,Time,Action,Pointer,Size,Stream\n1,2.0,allocate,0x10,x,0\n", "line 2: Size must be an integer"),
    "pointer": ("Thread,Time,Action,Pointer,Size,Stream\n1,2.0,allocate,zz,8,0\n", "line 2: Pointer must be"),
    "time": ("Thread,Time,Action,Pointer,Size,Stream\n1,noon,allocate,0x10,8,0\n", "line 2: Time must be"),
    "negative time": ("Thread,Time,Action,Pointer,Size,Stream\n1,-2,allocate,0x10,8,0\n", "line 2: a time must be"),
    "action": ("Thread,Time,Action,Pointer,Size,Stream\n1,2.0,grab,0x10,8,0\n", "line 2: the action must be"),
    "twice": (f"Thread,Time,Action,Pointer,Size,Stream\n{ROW}\n{ROW}\n", "line 3: allocates 16, which is alive"),
    "not alive": ("Thread,Time,Action,Pointer,Size,Stream\n1,2.0,free,0x10,8,0\n", "line 2: frees 16, which is not"),
    "class": (HEADER + FULL.replace("float32[4x8]", "float32") + "\n", "line 2: Class, Shape and Axis must be"),
    "dtype": (HEADER + FULL.replace("float32", "float33") + "\n", "line 2: Class, Shape and Axis must be"),
    "shape": (HEADER + FULL.replace(",4x8,", ",5x8,") + "\n", "line 2: .* is not one that float32.* serves"),
    "axis": (HEADER + FULL + "7\n", "line 2: .* do not belong"),
    "bytes": ("\x00\x01\x02", "line 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_with_its_name_line_and_fault(tmp_path: Path, name: str) -> None:
    text, match = BAD[name]
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(arenax.BadTrace, match=match) as e:
        arenax.Trace.from_rmm_csv(path)
    assert str(e.value).startswith(f"{path}, line ")
    assert e.value.path == str(path)
    assert isinstance(e.value, ValueError)


def test_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(b"Thread,Time,Action,Pointer,Size,Stream\n\xff\xfe\n")
    with pytest.raises(arenax.BadTrace, match="line 2: is no text"):
        arenax.Trace.from_rmm_csv(path)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_ends_the_recording_and_nothing_else(make_fake: MakePool) -> None:
    pool = make_fake()

    def run() -> None:
        with pool.record("/dev/full"):
            x = pool.put(X)
            np.testing.assert_array_equal(np.array(x), X)

    with pytest.warns(RuntimeWarning, match=r"recording of pool .* ends before its time"):
        run()
    assert not pool.arena.recorders


def test_a_file_that_cannot_be_written_is_refused_at_once(make_fake: MakePool, tmp_path: Path) -> None:
    pool = make_fake()
    with pytest.raises(FileNotFoundError):
        with pool.record(tmp_path / "no" / "such.csv"):
            pass
    assert not pool.arena.recorders


# -------------------------------------------------------------------------------------------------- its ends, all kinds


def test_an_error_in_its_body_ends_it(make_fake: MakePool) -> None:
    pool = make_fake()
    with pytest.raises(ZeroDivisionError):
        with pool.record() as trace:
            pool.put(X)
            raise ZeroDivisionError
    assert not pool.arena.recorders
    assert len(trace) == 1


def test_a_pool_that_is_closed_in_it_ends_quietly() -> None:
    pool = arenax.BufferPool(FakeDevice())
    with pool.record() as trace:
        held = pool.put(X)
        pool.close()
        del held
    assert story(trace) == [("a", 0, 24)]


def test_a_pool_that_records_costs_no_memory_when_it_is_done(make_fake: MakePool) -> None:
    pool = make_fake()
    with pool.record() as trace:
        pool.put(X)
    assert len(trace) == 1
    gc.collect()
    assert not [o for o in gc.get_objects() if type(o) is _record.Recorder]


SCRIPT = """
import os
import numpy as np, arenax
from arenax.testing import FakeDevice
a, b = arenax.BufferPool(FakeDevice(), name="a"), arenax.BufferPool(FakeDevice(), name="b")
for n in (3, 4):
    x = a.put(np.ones(n, np.int8))
y = b.put(np.ones(9, np.int8))
if {fork}:
    if os.fork() == 0:
        os._exit(0)
    os.wait()
{end}
"""


@pytest.mark.parametrize(
    ("end", "fork"), [("a.close()", False), ("del a, b", False), ("", False), ("raise SystemExit(0)", True)]
)
def test_the_environment_records_every_pool_of_a_process(tmp_path: Path, end: str, fork: bool) -> None:
    path = tmp_path / "all.csv"
    env = {**os.environ, _record.VARIABLE: str(path), "PYTHONWARNINGS": "ignore"}
    subprocess.run([sys.executable, "-c", SCRIPT.format(end=end, fork=fork)], check=True, env=env, timeout=100)
    first, second = arenax.Trace.from_rmm_csv(path), arenax.Trace.from_rmm_csv(tmp_path / "all.b.csv")
    assert [e[:3] for e in first if e.action == "allocate"] == [("allocate", 0, 3), ("allocate", 1, 4)]
    assert next(e[:3] for e in second) == ("allocate", 0, 9)


def test_what_was_read_once_is_kept(make_pool: MakePool) -> None:
    pool = make_pool()
    with pool.record() as trace:
        pool.put(X)
    assert trace.steps is trace.steps
    with pytest.raises(AttributeError, match="no attribute 'bytes'"):
        trace.bytes  # noqa: B018
    assert len(trace.repeat(3)) == 3


def test_the_debug_mode_records_the_same() -> None:
    with pool_on("fake", debug=True) as pool, pool.record() as trace:
        for _ in range(3):
            x = pool.put(X)
            del x
            pool.check()
    assert story(trace) == [("a", 0, 24), ("f", 0, 24), ("a", 1, 24), ("f", 1, 24), ("a", 2, 24), ("f", 2, 24)]


def test_a_loan_that_was_asked_for_long_ago_begins_when_it_gets_its_slot(make_fake: MakePool) -> None:
    """It waited meanwhile; its time is that of what came just before it, and its thread its own."""
    pool = make_fake()
    with pool.record() as trace:
        (recorder,) = pool.arena.recorders
        first, second = (pool.lease((n,), "int8") for n in (3, 4))
        now = time.monotonic()
        recorder.note(first._slot, now + 2)
        other = threading.Thread(target=recorder.note, args=(second._slot, now + 1))
        other.start()
        other.join()
        recorder.note(first._slot, now + 2)
        recorder.note(first._slot, now + 3)
    assert trace.times is not None
    assert trace.threads is not None
    np.testing.assert_allclose(np.diff(trace.times[2::2]), [0, 0, 1], atol=2e-3)
    me = threading.get_ident()
    assert (trace.threads[2::2] == me).tolist() == [True, False, True, True]


def test_times_are_those_of_a_millisecond_or_of_four_in_a_dense_loop(make_fake: MakePool) -> None:
    pool = make_fake()
    lease = pool.lease((1,), "int8")
    with pool.record() as trace:
        (recorder,) = pool.arena.recorders
        begin = time.monotonic() + 1
        for i in range(100):
            recorder.note(lease._slot, begin + i * 1e-4)
        for i in range(1000):
            recorder.note(lease._slot, begin + 1 + i * 1e-5)
    lease.release()
    assert trace.times is not None
    first, second = np.split(trace.times[1:], [200])
    assert 9 <= len(np.unique(first)) <= 11
    assert 3 <= len(np.unique(second)) <= 5

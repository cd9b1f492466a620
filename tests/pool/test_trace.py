"""A trace is what its events say, and what cannot be is refused by the number of its event."""

import copy
import pickle
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import arenax
from arenax import BadTrace, Trace
from arenax._trace import Event, Request, TraceBuilder

Events = list[tuple[str, Any, int]]


@st.composite
def histories(draw: st.DrawFn) -> Events:
    """Events that can be; ids come again once they are free."""
    alive: dict[str, int] = {}
    events: Events = []
    for _ in range(draw(st.integers(0, 30))):
        free = sorted(set("abcdef") - set(alive))
        if free and (not alive or draw(st.booleans())):
            key, size = draw(st.sampled_from(free)), draw(st.integers(0, 2**40))
            alive[key] = size
            events.append(("allocate", key, size))
        else:
            key = draw(st.sampled_from(sorted(alive)))
            events.append(("free", key, alive.pop(key)))
    return events


def replayed(events: Events) -> tuple[list[int], list[tuple[int, int]]]:
    """The naive model: bytes alive after each event, and begin and end of each buffer."""
    alive: dict[Any, tuple[int, int]] = {}
    live, spans = [], []
    for i, (action, key, size) in enumerate(events):
        if action == "allocate":
            alive[key] = (len(spans), size)
            spans.append((i, len(events)))
        else:
            buffer, _ = alive.pop(key)
            spans[buffer] = (spans[buffer][0], i)
        live.append(sum(s for _, s in alive.values()))
    return live, spans


@hypothesis.given(histories())
def test_a_trace_agrees_with_the_naive_model(events: Events) -> None:
    trace = Trace.from_events(events, name="drawn")
    live, spans = replayed(events)
    assert trace.live_bytes.tolist() == live
    assert trace.peak_bytes == max(live, default=0)
    assert list(zip(*(x.tolist() for x in trace.lifetimes), strict=True)) == spans
    assert len(trace) == len(spans) == len(trace.sizes)
    assert [(e.action, e.size) for e in trace] == [(action, size) for action, _, size in events]
    assert [e.time for e in trace] == list(range(len(events)))
    assert {e.thread for e in trace} <= {0}
    assert f"{len(spans):,} buffers" in repr(trace)


@hypothesis.given(histories())
def test_events_make_the_same_trace_again(events: Events) -> None:
    trace = Trace.from_events(events)
    again = Trace.from_events([(e.action, e.buffer, e.size) for e in trace])
    assert again.steps.tolist() == trace.steps.tolist()
    assert again.sizes.tolist() == trace.sizes.tolist()


@hypothesis.given(histories(), st.integers(1, 4))
def test_repeat_agrees_with_the_naive_model(events: Events, n: int) -> None:
    trace = Trace.from_events(events, name="drawn")
    survivors = sorted(_alive_after(events).items(), key=lambda item: item[1][0])
    ends = [("free", key, size) for key, (_, size) in survivors]
    expected = Trace.from_events([*(events + ends) * (n - 1), *events])
    repeated = trace.repeat(n)
    assert list(repeated) == list(expected)
    assert len(repeated) == n * len(trace)
    assert repeated.peak_bytes == trace.peak_bytes
    assert repeated.name == ("drawn" if n == 1 else f"drawn x {n}")


def _alive_after(events: Events) -> dict[Any, tuple[int, int]]:
    alive: dict[Any, tuple[int, int]] = {}
    for i, (action, key, size) in enumerate(events):
        if action == "allocate":
            alive[key] = (i, size)
        else:
            del alive[key]
    return alive


def test_a_repeated_trace_goes_on_in_time_and_keeps_its_threads() -> None:
    trace = Trace([0, 1, ~0], [8, 4], times=[1.0, 2.0, 4.0], threads=[5, 6, 7], name="x")
    twice = trace.repeat(2)
    assert twice.steps.tolist() == [0, 1, ~0, ~1, 2, 3, ~2]
    assert twice.times.tolist() == [1, 2, 4, 4, 4, 5, 7]
    assert twice.threads.tolist() == [5, 6, 7, 6, 5, 6, 7]
    assert twice.sizes.tolist() == [8, 4, 8, 4]
    assert trace.repeat(1).times.tolist() == [1, 2, 4]


def test_a_repeated_trace_repeats_its_requests() -> None:
    with arenax.BufferPool() as pool, pool.lease((4,), "float32") as lease:
        request = Request((3,), lease.dtype, 0, lease.size_class)
    trace = Trace([0], [12], requests=(request,))
    assert trace.repeat(3).requests == (request,) * 3


@pytest.mark.parametrize(("n", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), (1.0, TypeError)])
def test_repeat_refuses_what_is_no_count(n: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="n must be"):
        Trace.from_events([]).repeat(n)


def test_an_empty_trace() -> None:
    trace = Trace.from_events(iter([]))
    assert (len(trace), trace.peak_bytes, list(trace), trace.live_bytes.tolist()) == (0, 0, [], [])
    assert [x.tolist() for x in trace.lifetimes] == [[], []]
    assert len(trace.repeat(3)) == 0


def test_events_have_their_times_and_threads() -> None:
    trace = Trace([0, ~0], [16], times=[0.5, 0.75], threads=[1, 2])
    assert list(trace) == [Event("allocate", 0, 16, 0.5, 1), Event("free", 0, 16, 0.75, 2)]


def test_the_arrays_are_the_traces_own_and_cannot_be_written() -> None:
    steps, sizes = np.array([0, ~0]), np.array([16])
    trace = Trace(steps, sizes, times=[0.0, 1.0], threads=[0, 0])
    steps[:], sizes[:] = 7, 7
    assert trace.steps.tolist() == [0, -1]
    assert trace.sizes.tolist() == [16]
    for array in (trace.steps, trace.sizes, trace.times, trace.threads):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


class Further(Trace):
    pass


def test_a_subclass_stays_what_it_is() -> None:
    trace = Further.from_events([("allocate", 1, 8)])
    assert type(trace) is type(trace.repeat(2)) is Further
    assert repr(trace).startswith("<Further 'trace'")


ALLOCATED = ("allocate", "a", 8)


@pytest.mark.parametrize(
    ("events", "where", "fault"),
    [
        ([ALLOCATED, ALLOCATED], "event 1", "allocates 'a', which is alive"),
        ([("free", "a", 8)], "event 0", "frees 'a', which is not alive"),
        ([ALLOCATED, ("free", "a", 8), ("free", "a", 8)], "event 2", "frees 'a', which is not alive"),
        ([("allocate", "a", -1)], "event 0", "at least 0, got -1"),
        ([("allocate", "a", 1.0)], "event 0", "a size must be an integer, got 1.0"),
        ([("allocate", "a", True)], "event 0", "a size must be an integer, got True"),
        ([("allocate", "a", "8")], "event 0", "a size must be an integer, got '8'"),
        ([("alloc", "a", 8)], "event 0", "the action must be one of allocate, free, got 'alloc'"),
        ([("allocate", "a")], "event 0", r"must be \(action, id, size\), got"),
        ([ALLOCATED, None], "event 1", r"must be \(action, id, size\), got None"),
    ],
)
def test_what_cannot_be_is_refused(events: Any, where: str, fault: str) -> None:
    with pytest.raises(BadTrace, match=f"^{where}: .*{fault}") as caught:
        Trace.from_events(events)
    assert isinstance(caught.value, ValueError)
    assert (caught.value.path, caught.value.where) == (None, where)


@hypothesis.given(histories(), st.data())
def test_one_event_out_of_place_is_named(events: Events, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(events)))
    alive = _alive_after(events[:at])
    wrong = data.draw(st.sampled_from([("free", "g", 0), *(("allocate", key, 1) for key in sorted(alive))]))
    with pytest.raises(BadTrace, match="alive") as caught:
        Trace.from_events([*events[:at], wrong, *events[at:]])
    assert caught.value.where == f"event {at}"


@pytest.mark.parametrize("time", [-1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(time: float) -> None:
    with pytest.raises(BadTrace, match=r"^log\.csv, line 2: a time must be at least 0 and finite"):
        TraceBuilder("log.csv").allocate("a", 8, "line 2", time=time)


def test_an_integer_of_numpy_is_a_size() -> None:
    assert Trace.from_events([("allocate", 0, np.uint32(7))]).peak_bytes == 7


def test_the_error_pickles_with_its_fields() -> None:
    with pytest.raises(BadTrace) as caught:
        TraceBuilder("log.csv").refuse("is empty", "line 1")
    for error in (pickle.loads(pickle.dumps(caught.value)), copy.copy(caught.value)):
        assert type(error) is BadTrace
        assert str(error) == "log.csv, line 1: is empty"
        assert (error.path, error.where, error.fault) == ("log.csv", "line 1", "is empty")


def test_a_fault_of_the_whole_has_no_place() -> None:
    with pytest.raises(BadTrace, match=r"^is empty$"):
        TraceBuilder().refuse("is empty")


def test_what_is_no_number_of_bytes_is_refused() -> None:
    for size in (2**63, 2**64):
        with pytest.raises(arenax.BadTrace, match="a size must be at most"):
            arenax.Trace.from_events([("allocate", 0, size)])
    with pytest.raises(arenax.BadTrace, match=r"event 1: has more than \d+ bytes alive"):
        arenax.Trace.from_events([("allocate", i, 2**62) for i in range(2)])
    twice = [("allocate", 0, 2**62), ("free", 0, 0)] * 2
    assert arenax.Trace.from_events(twice).peak_bytes == 2**62


def test_an_id_that_cannot_be_one_is_refused() -> None:
    for action in ("allocate", "free"):
        with pytest.raises(arenax.BadTrace, match="an id must be hashable"):
            arenax.Trace.from_events([(action, [1], 2)])  # type: ignore[list-item]


def test_a_copy_cannot_be_written_to_either() -> None:
    trace = arenax.Trace.from_events([("allocate", 0, 5)], name="mine")
    for again in (copy.deepcopy(trace), pickle.loads(pickle.dumps(trace))):
        assert again.name == "mine"
        assert [*again] == [*trace]
        with pytest.raises(ValueError, match="read-only"):
            again.sizes[0] = 1


def test_what_is_known_of_some_events_only_is_left_out() -> None:
    builder = TraceBuilder()
    builder.allocate(0, 5, "event 0", time=1.0, thread=3)
    builder.free(0, "event 1")
    trace = builder.build(arenax.Trace, "half")
    assert trace.times is None
    assert trace.threads is None
    assert len([*trace]) == 2

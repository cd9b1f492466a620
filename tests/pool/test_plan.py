"""Plans: the slots that serve a trace, as few bytes as there can be, and a file that says so."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import arenax
from arenax import Plan, Trace
from arenax.testing import FakeDevice

from .conftest import MakePool

RAGGED = arenax.Ragged(1, arenax.SizeClasses.multiples(8, 64))


@st.composite
def traces(draw: st.DrawFn, most: int = 12) -> Trace:
    """Small traces of few sizes, in which buffers live for any time, some for ever."""
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=most))
    events: list[tuple[str, int, int]] = []
    alive: list[int] = []
    for i, size in enumerate(sizes):
        while alive and draw(st.booleans()):
            events.append(("free", alive.pop(draw(st.integers(0, len(alive) - 1))), 0))
        events.append(("allocate", i, size))
        alive.append(i)
    return Trace.from_events(events)


def peak(trace: Trace, low: int, high: int) -> int:
    """By hand: the most alive at once of the sizes above `low` up to `high`."""
    count = most = 0
    for event in trace:
        if low < event.size <= high:
            count += 1 if event.action == "allocate" else -1
            most = max(most, count)
    return most


def choices(trace: Trace, k: int) -> list[tuple[int, int]]:
    """By hand: bytes and padding of every choice of at most k boundaries."""
    sizes = sorted(set(trace.sizes.tolist()))
    found: list[tuple[int, int]] = []
    for n in range(min(k, len(sizes))):
        for inner in itertools.combinations(sizes[:-1], n):
            bounds = [0, *inner, sizes[-1]]
            pairs = list(itertools.pairwise(bounds))
            needed = sum(b * peak(trace, a, b) for a, b in pairs)
            padding = sum(b - s for a, b in pairs for s in trace.sizes.tolist() if a < s <= b)
            found.append((needed, padding))
    return found


def padding_of(plan: Plan, trace: Trace) -> int:
    given = np.array([c.size_class.nbytes for c in plan.classes])[plan.assign(trace)]
    return int((given - trace.sizes).sum())


@given(traces(), st.integers(1, 5))
def test_it_needs_the_fewest_bytes_and_pads_least_among_those(trace: Trace, k: int) -> None:
    plan = Plan.fit(trace, max_classes=k)
    best = min(choices(trace, k))
    assert (plan.required_bytes, padding_of(plan, trace)) == best
    assert len(plan.classes) <= k


@given(traces(), st.integers(1, 5), st.integers(1, 500))
def test_a_budget_is_kept_and_pads_no_more_than_the_least_memory(trace: Trace, k: int, budget: int) -> None:
    every = choices(trace, k)
    least = min(every)
    if least[0] > budget:
        with pytest.raises(ValueError, match=f"the least needs {least[0]}"):
            Plan.fit(trace, k, budget)
        return
    plan = Plan.fit(trace, k, budget)
    assert plan.required_bytes <= budget
    padding = padding_of(plan, trace)
    assert min(p for n, p in every if n <= budget) <= padding <= least[1]
    if budget >= max(n for n, _ in every):
        assert padding == min(p for _, p in every)


@given(traces(), st.integers(1, 5))
def test_it_serves_its_trace_without_a_conversion_or_a_spill(trace: Trace, k: int) -> None:
    plan = Plan.fit(trace, max_classes=k)
    assert plan.misfits(trace) == ()
    with BufferFor(plan) as pool:
        before = pool.stats()
        assert before.reserved_bytes == plan.required_bytes
        held: dict[int, Any] = {}
        for event in trace:
            if event.action == "allocate":
                held[event.buffer] = pool.put(np.zeros(event.size, np.uint8))
            else:
                del held[event.buffer]
        stats = pool.stats()
        assert (stats.conversion_count, stats.spill_count) == (0, 0)
        assert stats.creation_count == before.creation_count
        assert stats.peak_reserved_bytes == plan.required_bytes
        held.clear()


def BufferFor(plan: Plan, **options: Any) -> arenax.BufferPool:
    return arenax.BufferPool.from_plan(plan, placement=FakeDevice(), **options)


def test_more_sizes_than_are_considered_are_thinned_and_still_served() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 1 << 20, 3000)
    events: list[tuple[str, int, int]] = []
    for i, size in enumerate(sizes.tolist()):
        events.append(("allocate", i, size))
        if i >= 50:
            events.append(("free", i - 50, 0))
    trace = Trace.from_events(events)
    plan = Plan.fit(trace)
    assert plan.misfits(trace) == ()
    assert plan.classes[-1].capacity == sizes.max()
    assert 1 < plan.required_bytes / trace.peak_bytes < 2


def test_a_long_trace_is_looked_at_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    from arenax import _fit_plan

    rng = np.random.default_rng(1)
    events = [(("allocate", i, int(n)), ("free", i - 7, 0)) for i, n in enumerate(rng.integers(1, 30, 500))]
    flat = [e for pair in events for e in pair if e[0] == "allocate" or e[1] >= 0]
    whole = Plan.fit(Trace.from_events(flat))
    monkeypatch.setattr(_fit_plan, "_BLOCK", 13)
    assert Plan.fit(Trace.from_events(flat)) == whole


# ----------------------------------------------------------------------------------------------------- recorded batches


def recorded(make: MakePool, lengths: tuple[int, ...] = (3, 9, 17, 33, 64, 9)) -> Trace:
    pool = make(ragged={"x": RAGGED, "mask": RAGGED, "y": None})
    with pool.record() as trace:
        for n in lengths:
            with pool.step() as step:
                batch = {"x": np.ones((4, n), np.int32), "mask": np.ones((4, n), bool), "y": np.ones(5, np.float32)}
                step.put(batch, with_sizes=True)
                step.zeros((7, 7))
    return trace


def test_a_recording_gives_classes_of_its_own_shapes(make_fake: MakePool) -> None:
    plan = Plan.fit(recorded(make_fake), max_classes=3)
    found = {}
    for c in plan.classes:
        found.setdefault(str(c.family), []).append((str(c.size_class), c.slots))
    assert {f: len(c) for f, c in found.items()} == {
        "int32[4,*]": 1,
        "bool[4,*]": 1,
        "float32[5]": 1,
        "int32[]": 1,
        "float32[7,7]": 1,
    }
    assert ("int32[]", 2) in found["int32[]"]
    assert plan.size_classes.boundaries == (64,)


def test_a_plan_from_a_recording_serves_the_next_run(make_fake: MakePool) -> None:
    trace = recorded(make_fake)
    budget = 4 * 5 * sum([9, 17, 64]) + 400
    plan = Plan.fit(trace, max_classes=3, budget=budget)
    assert plan.required_bytes <= budget
    assert 1 < len(plan.size_classes.boundaries) <= 3
    ragged = arenax.Ragged(1, plan.size_classes)
    with BufferFor(plan, ragged={"x": ragged, "mask": ragged, "y": None}) as pool, pool.steady():
        for n in (3, 9, 17, 33, 64, 9):
            with pool.step() as step:
                batch = {"x": np.ones((4, n), np.int32), "mask": np.ones((4, n), bool), "y": np.ones(5, np.float32)}
                step.put(batch, with_sizes=True)
                step.zeros((7, 7))


def test_ragged_classes_must_be_placed_by_the_user(make_fake: MakePool) -> None:
    plan = Plan.fit(recorded(make_fake))
    with pytest.raises(ValueError, match=r"say which leaves they are for.*plan\.size_classes"):
        arenax.BufferPool.from_plan(plan, placement=FakeDevice())


def test_families_of_other_lengths_have_classes_of_their_own(make_fake: MakePool) -> None:
    pool = make_fake(ragged=arenax.Ragged(0, arenax.SizeClasses.pow2(1, 64)))
    with pool.record() as trace, pool.step() as step:
        step.put((np.ones(5, np.int8), np.ones((30, 2), np.int8)))
    plan = Plan.fit(trace)
    assert {f: c.boundaries for f, c in plan.ragged.items()} == {"int8[*]": (5,), "int8[*,2]": (30,)}
    with pytest.raises(ValueError, match=r"differ: take each from plan\.ragged"):
        plan.size_classes  # noqa: B018
    plain = Plan.fit(Trace.from_events([("allocate", 0, 3)]))
    assert plain.size_classes.boundaries == (3,)


def test_misfits_name_what_no_longer_fits(make_fake: MakePool) -> None:
    plan = Plan.fit(recorded(make_fake))
    assert plan.misfits(recorded(make_fake, (64, 3))) == ()
    pool = make_fake(ragged={"x": RAGGED, "y": None})
    with pool.record() as trace:
        held = [pool.put({"x": np.ones((4, 40), np.int32), "y": np.ones(6, np.float64)}) for _ in range(2)]
    faults = plan.misfits(trace)
    assert faults[0] == "2 requests fit no class, the largest of them float32[6], 24 bytes"
    assert faults[1] == "int32[4,64] has 1 slots, and 2 were on loan at once"
    assert len(faults) == 2
    del held
    assert len(plan.misfits(Trace.from_events([("allocate", 0, 3)]))) == 1


def test_a_plan_of_bytes_takes_any_trace_by_its_bytes(make_fake: MakePool) -> None:
    plan = Plan.fit(Trace.from_events([("allocate", 0, 5000)]))
    assert plan.misfits(recorded(make_fake))
    small = Trace.from_events([("allocate", 0, 4999)])
    assert plan.misfits(small) == ()
    assert plan.assign(small).tolist() == [0]


def test_buffers_of_no_bytes_take_the_smallest_class() -> None:
    plan = Plan.fit(Trace.from_events([("allocate", 0, 0), ("allocate", 1, 0), ("free", 0, 0)]))
    assert [(str(c.size_class), c.slots) for c in plan.classes] == [("uint8[1]", 2)]


# ---------------------------------------------------------------------------------------------------- file and refusals


@given(traces(), st.integers(1, 5))
def test_what_is_saved_loads_again(tmp_path_factory: pytest.TempPathFactory, trace: Trace, k: int) -> None:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    plan = Plan.fit(trace, max_classes=k)
    plan.save(path)
    assert Plan.load(path) == plan


def test_a_file_has_a_line_for_each_class(make_fake: MakePool, tmp_path: Path) -> None:
    plan = Plan.fit(recorded(make_fake))
    plan.save(tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    assert '    {"dtype": "int32", "shape": [4, 64], "axis": 1, "slots": 1}' in text
    assert text.count("\n") == len(plan.classes) + 8
    assert json.loads(text)["required_bytes"] == plan.required_bytes
    assert Plan.load(tmp_path / "plan.json") == plan


GOOD = {
    "arenax_plan": 1,
    "trace": "t",
    "peak_bytes": 5,
    "required_bytes": 10,
    "classes": [{"dtype": "uint8", "shape": [5], "axis": 0, "slots": 2}],
}
CLASS = GOOD["classes"][0]  # type: ignore[index]
BAD: dict[str, tuple[Any, str]] = {
    "text": ("no json", "Expecting value"),
    "list": ([], "it must be an object"),
    "version": (GOOD | {"arenax_plan": 2}, '"arenax_plan": 1'),
    "no classes": ({k: v for k, v in GOOD.items() if k != "classes"}, "it lacks 'classes'"),
    "sum": (GOOD | {"required_bytes": 11}, "required_bytes must be 10"),
    "slots": (GOOD | {"classes": [CLASS | {"slots": 0}]}, "slots must be an integer of at least 1"),
    "slots text": (GOOD | {"classes": [CLASS | {"slots": "2"}]}, "slots must be"),
    "axis": (GOOD | {"classes": [CLASS | {"axis": 1}]}, "axis must be"),
    "dtype": (GOOD | {"classes": [CLASS | {"dtype": "object"}]}, "cannot live in a slot"),
    "shape": (GOOD | {"classes": [CLASS | {"shape": [-5]}]}, "shape must not be negative"),
    "twice": (GOOD | {"classes": [CLASS, CLASS], "required_bytes": 20}, "a class is there twice"),
    "peak": (GOOD | {"peak_bytes": 1.5}, "peak_bytes must be"),
}


def test_the_file_that_the_bad_ones_are_made_of_is_good(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(GOOD))
    assert Plan.load(path).required_bytes == 10


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    content, match = BAD[name]
    path = tmp_path / "plan.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=match) as e:
        Plan.load(path)
    assert str(path) in str(e.value)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"max_classes": 0}, ValueError, "max_classes must be at least 1"),
        ({"max_classes": 2.0}, TypeError, "max_classes must be an integer"),
        ({"budget": -1}, ValueError, "budget must be at least 1"),
        ({"budget": "1GiB"}, TypeError, "budget must be an integer"),
        ({"budget": 4}, ValueError, "no plan of at most 16 classes fits 4 bytes, the least needs 5"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        Plan.fit(Trace.from_events([("allocate", 0, 5)]), **options)


def test_an_empty_trace_has_no_plan() -> None:
    with pytest.raises(ValueError, match="has no buffers to plan for"):
        Plan.fit(Trace.from_events([]))


def test_a_pool_from_a_plan_takes_the_pools_own_arguments() -> None:
    plan = Plan.fit(Trace.from_events([("allocate", 0, 5)]))
    with BufferFor(plan, name="mine", on_exhausted="raise") as pool:
        assert (pool.name, pool.stats().budget_bytes, pool.stats().reserved_bytes) == ("mine", 5, 5)
        with pool.steady(), pool.step() as step:
            step.put(np.ones(4, np.uint8))
    with BufferFor(plan, budget=100) as pool:
        assert pool.stats().budget_bytes == 100
    with pytest.raises(arenax.PoolExhausted):
        BufferFor(plan, budget=4)
    with pytest.raises(TypeError, match=r"plan must be an arenax\.Plan"):
        arenax.BufferPool.from_plan("plan.json")  # type: ignore[arg-type]

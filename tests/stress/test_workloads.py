"""Each workload is a trace that can be, the same for a seed, as long as was asked for, with the trait of its name."""

import inspect
from bisect import insort
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import arenax
from arenax_stress import Trace
from arenax_stress._workload_robson import bound, plan, robson
from arenax_stress._workload_script import Script
from arenax_stress._workload_server import TOKEN_BYTES
from arenax_stress._workloads import WORKLOADS

MIB = 2**20
NAMES = [
    "uniform", "lognormal", "pareto", "bimodal", "sawtooth", "training_with_growing_eval", "two_tenants",
    "producer_consumer", "phases", "llm_server", "llm_server_paged", "robson",
]  # fmt: skip


def made(name: str, events: int = 3000, seed: int = 0, **options: Any) -> Trace:
    return WORKLOADS[name](seed, events=events, **options)


def same(a: Trace, b: Trace) -> bool:
    return list(a) == list(b)


def test_they_are_found_by_name() -> None:
    assert list(WORKLOADS) == NAMES
    for name, workload in WORKLOADS.items():
        assert workload.__name__ == name
        assert workload.__doc__
        assert "\n\n" in workload.__doc__
        parameters = inspect.signature(workload).parameters
        assert parameters["seed"].default == 0
        assert parameters["events"].default == 20_000


@pytest.mark.parametrize("name", NAMES)
def test_it_can_be_and_has_a_length(name: str) -> None:
    for events in (1, 2, 7, 300, 3001):
        trace = made(name, events)
        assert type(trace) is Trace
        assert trace.name == name
        assert 0.7 * events - 4 <= len(trace.steps) <= events
        # The builder refuses what cannot be, and is the naive model of what can.
        again = arenax.Trace.from_events([(e.action, e.buffer, e.size) for e in trace])
        assert again.steps.tolist() == trace.steps.tolist()
        assert again.sizes.tolist() == trace.sizes.tolist()
        assert trace.sizes.min() >= 1


@pytest.mark.parametrize("name", NAMES)
def test_the_default_is_short_enough_for_a_table(name: str) -> None:
    assert 16_000 <= len(WORKLOADS[name]().steps) <= 20_000


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_makes_it_again(name: str) -> None:
    assert same(made(name), made(name))
    assert not same(made(name), made(name, seed=1))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("events", "error"), [(0, ValueError), (True, TypeError), (10.0, TypeError)])
def test_no_count_of_events(name: str, events: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="events must be"):
        made(name, events)


@pytest.mark.parametrize("name", ["uniform", "lognormal", "pareto", "bimodal"])
def test_random_sizes_keep_the_rules_of_rmm(name: str) -> None:
    trace = made(name, 4000)
    assert len(trace) == 2000
    assert trace.live_bytes[-1] == 0
    assert trace.peak_bytes < 16_000 * MIB
    # Until the limit is reached, 73 of 100 operations allocate.
    assert 0.68 < (trace.steps[:400] >= 0).mean() < 0.8


def test_the_sizes_are_distributed_as_their_names_say() -> None:
    uniform = made("uniform", max_size=1000).sizes
    assert uniform.min() < 20
    assert 980 < uniform.max() <= 1000
    logarithms = np.log(made("lognormal", median=MIB, sigma=0.5).sizes)
    assert abs(logarithms.mean() - np.log(MIB)) < 0.05
    assert abs(logarithms.std() - 0.5) < 0.05
    pareto = np.sort(made("pareto").sizes)
    assert pareto[0] >= 64 * 2**10
    assert pareto[-len(pareto) // 10 :].sum() > 0.4 * pareto.sum()
    bimodal = made("bimodal", share=0.2).sizes
    assert not ((bimodal > 64 * 2**10) & (bimodal < 16 * MIB)).any()
    assert 0.15 < (bimodal >= 16 * MIB).mean() < 0.25


def test_a_sawtooth_is_a_stack() -> None:
    stack: list[int] = []
    heights: list[int] = []
    for event in made("sawtooth"):
        if event.action == "allocate":
            stack.append(event.buffer)
        else:
            heights.append(len(stack))
            assert stack.pop() == event.buffer
    assert max(heights) == 72


def test_every_evaluation_needs_a_larger_buffer_than_any_before() -> None:
    trace = made("training_with_growing_eval", 10_000)
    gathered = trace.sizes[trace.sizes > 30 * MIB]
    assert len(gathered) > 10
    assert (np.diff(gathered) >= 0).all()
    assert gathered[-1] > 1.4 * gathered[0]


def test_two_tenants_have_no_size_in_common_and_never_run_together() -> None:
    trace = made("two_tenants", 20_000)
    begins, ends = trace.lifetimes
    lives = ends < len(trace.steps)
    small, large = (lives & (trace.sizes < 2 * MIB)), (lives & (trace.sizes >= 4 * MIB))
    assert (small | large == lives).all()
    owner = np.zeros(len(trace.steps), np.int64)
    for mask, tenant in ((small, 1), (large, 2)):
        for b, e in zip(begins[mask], ends[mask], strict=True):
            owner[b : e + 1] |= tenant
    assert set(owner.tolist()) == {0, 1, 2}
    switches = np.flatnonzero(np.diff(owner[owner > 0]))
    assert len(switches) > 2


def test_who_produces_does_not_consume() -> None:
    trace = made("producer_consumer", depth=3)
    assert trace.threads is not None
    assert trace.times is not None
    assert (trace.threads[trace.steps < 0] == 0).all()
    assert set(trace.threads[trace.steps >= 0].tolist()) == {1, 2, 3, 4}
    assert (np.diff(trace.times) >= 0).all()
    waiting = np.cumsum(np.where(trace.steps < 0, -1, 1))
    assert waiting.min() == 0
    assert waiting.max() == 3 + 4  # Each producer can wait with one more.
    freed = ~trace.steps[trace.steps < 0]
    assert (np.diff(freed) > 0).mean() > 0.9  # First in, first out, but for who waits.


def test_survivors_of_a_phase_outlive_the_next() -> None:
    trace = made("phases", 8000)
    begins, ends = trace.lifetimes
    born = np.arange(len(trace)) // 200
    died = np.array([np.searchsorted(begins, end) // 200 for end in ends])
    complete = born < born[-1] - 4
    ages = np.bincount((died - born)[complete])
    assert ages[0] + ages[1] > 0.6 * complete.sum()
    assert ages[4] > 0.2 * complete.sum()
    assert ages[2] == ages[3] == 0


@pytest.mark.parametrize("name", ["llm_server", "llm_server_paged"])
def test_a_server_serves_in_time(name: str) -> None:
    trace = made(name, 20_000)
    assert trace.times is not None
    assert (np.diff(trace.times) >= 0).all()
    assert trace.sizes.max() <= 4096 * TOKEN_BYTES
    if name == "llm_server":
        assert np.cumsum(np.where(trace.steps < 0, -1, 1)).max() <= 64
        assert abs(trace.sizes.mean() / TOKEN_BYTES - 161 - 338) < 50
    else:
        assert set(trace.sizes.tolist()) == {16 * TOKEN_BYTES}


def test_a_server_full_of_requests_lets_them_wait() -> None:
    trace = made("llm_server", requests_per_second=100.0, running=4)
    assert np.cumsum(np.where(trace.steps < 0, -1, 1)).max() == 4
    assert trace.times is not None
    assert (np.diff(trace.times) >= 0).all()


# -------------------------------------------------------------------------------------------------------------- robson


def highest(trace: Trace, key: Callable[[tuple[int, int]], Any]) -> int:
    """The highest address ever used, in one unbounded region: the holes are listed, and the least by `key` is taken."""
    held: list[tuple[int, int]] = []
    places: dict[int, tuple[int, int]] = {}
    top = 0
    for event in trace:
        if event.action == "free":
            held.remove(places.pop(event.buffer))
            continue
        end, holes = 0, []
        for start, length in held:
            if start - end >= event.size:
                holes.append((end, start - end))
            end = start + length
        at = min(holes, key=key)[0] if holes else end
        places[event.buffer] = (at, event.size)
        insort(held, places[event.buffer])
        top = max(top, at + event.size)
    return top


@pytest.mark.parametrize("against", ["first fit", "best fit"])
@pytest.mark.parametrize("events", [1, 40, 200, 1000])
def test_robsons_program_needs_what_he_proved(against: Any, events: int) -> None:
    most, rounds = plan(events)
    key = (lambda hole: hole[0]) if against == "first fit" else (lambda hole: (hole[1], hole[0]))
    trace = robson(3, events=events, against=against, unit=4)
    assert trace.peak_bytes == 4 * most
    assert set(trace.sizes.tolist()) == {4 * 2**i for i in range(rounds + 1)}
    assert highest(trace, key) == 4 * bound(most, rounds)


def test_the_bound_of_the_default_is_what_the_docstring_says() -> None:
    most, rounds = plan(20_000)
    assert (most, 2**rounds) == (6144, 512)
    assert round(bound(most, rounds) / most, 1) == 5.4


def test_robson_plays_against_two_allocators_only() -> None:
    with pytest.raises(ValueError, match="against must be 'first fit' or 'best fit', got 'worst fit'"):
        robson(against="worst fit")  # pyright: ignore[reportArgumentType]


# -------------------------------------------------------------------------------------------------------------- script


def test_times_are_kept_where_every_event_has_one() -> None:
    script = Script("x", 10)
    script.allocate(0.5, time=0.0, thread=1)
    assert script.trace().sizes.tolist() == [1]
    assert script.trace().times is not None
    script.allocate(1, thread=1)
    assert script.trace().times is None
    assert script.trace().threads is not None

"""Each scenario is a trace that can be, the same for a seed, with the trait that its docstring tells of."""

import inspect
import itertools
from typing import Any

import numpy as np
import pytest

import arenax
from arenax_stress import Trace, simulate
from arenax_stress._scenarios import SCENARIOS
from arenax_stress._workloads import WORKLOADS

NAMES = [
    "evaluation_between_training", "restored_checkpoint", "length_curriculum", "kept_results", "actor_and_learner",
]  # fmt: skip
KIB, MIB = 2**10, 2**20


def made(name: str, events: int = 6000, seed: int = 0, **options: Any) -> Trace:
    return SCENARIOS[name](seed, events=events, **options)


def test_they_are_found_by_name() -> None:
    assert list(SCENARIOS) == NAMES
    assert not SCENARIOS.keys() & WORKLOADS.keys()
    for name, scenario in SCENARIOS.items():
        assert scenario.__name__ == name
        assert scenario.__doc__
        assert "\n\n" in scenario.__doc__
        parameters = inspect.signature(scenario).parameters
        assert parameters["seed"].default == 0
        assert parameters["events"].default == 20_000


@pytest.mark.parametrize("name", NAMES)
def test_it_can_be_and_has_a_length(name: str) -> None:
    for events in (1, 2, 7, 300, 3001):
        trace = made(name, events)
        assert trace.name == name
        assert len(trace.steps) == events
        again = arenax.Trace.from_events([(e.action, e.buffer, e.size) for e in trace])
        assert again.steps.tolist() == trace.steps.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_makes_it_again(name: str) -> None:
    assert list(made(name)) == list(made(name))
    assert list(made(name)) != list(made(name, seed=1))


def test_evaluation_and_training_share_no_size() -> None:
    trace = made("evaluation_between_training", 20_000)
    sizes = trace.sizes[72:]  # After the model's own.
    large = sizes[sizes >= 16 * MIB]
    assert len(large)
    assert sizes[sizes < 16 * MIB].max() < 8 * MIB
    # What keeps memory by its size holds both.
    bfc, pool = simulate(trace, "bfc").ratio, simulate(trace, "pool").ratio
    assert bfc < 1.1 < 1.8 < pool


def test_a_restored_checkpoint_is_two_states_at_its_peak() -> None:
    trace = made("restored_checkpoint")
    state = int(trace.sizes[:60].sum())
    assert 2 * state < trace.peak_bytes < 2.6 * state
    # The transient that comes next finds enough that is free, and no piece that is long enough.
    failure = simulate(trace, "best_fit", limit_bytes=int(1.05 * trace.peak_bytes)).failures[0]
    assert failure.free_bytes > 4 * failure.size > 4 * failure.largest_free_bytes


def test_a_curriculum_doubles_its_lengths() -> None:
    trace = made("length_curriculum", 20_000)
    stages = np.array_split(trace.sizes[12:], 5)
    longest = [int(stage.max()) for stage in stages]
    assert all(1.6 < b / a < 2.4 for a, b in itertools.pairwise(longest))
    plan = arenax.Plan.fit(trace)
    assert plan.required_bytes < 1.2 * trace.peak_bytes
    assert simulate(trace, "pool").ratio > 2
    assert simulate(trace, "bfc").ratio < 1.01


def test_kept_results_break_memory_up() -> None:
    trace = made("kept_results", 10_000)
    small = trace.sizes <= 32 * KIB
    starts, ends = trace.lifetimes
    assert 0 < trace.sizes[small].sum() < 0.001 * trace.sizes.sum()
    assert np.median((ends - starts)[small]) > 50 * np.median((ends - starts)[~small])
    failure = simulate(trace, "bfc", limit_bytes=int(1.04 * trace.peak_bytes)).failures[0]
    assert failure.free_bytes > failure.size > failure.largest_free_bytes
    without = arenax.Trace.from_events(
        [(e.action, e.buffer, e.size) for e in trace if e.size > 32 * KIB], "without the results"
    )
    assert simulate(without, "bfc").ratio < simulate(trace, "bfc").ratio - 0.03


def test_rollouts_live_across_the_turns() -> None:
    trace = made("actor_and_learner", rollouts=8)
    starts, ends = trace.lifetimes
    alive_in_turn = [int(((starts < at) & (ends > at)).sum()) for at in range(200, 1200, 7)]
    assert min(alive_in_turn) >= 16  # The two models.
    assert max(alive_in_turn) >= 16 + 8
    assert simulate(trace, "pool").ratio > 1.5 * simulate(trace, "bfc").ratio

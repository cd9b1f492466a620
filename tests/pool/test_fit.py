"""Fitted size classes are the exact optimum: brute force agrees, and so does every way of giving the lengths."""

import itertools
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import arenax
from arenax import SizeClasses

LENGTHS = st.lists(st.integers(0, 24), min_size=1, max_size=14)


def cost_of(boundaries: tuple[int, ...], lengths: list[int], power: int, memory: float) -> float:
    classes = SizeClasses.explicit(boundaries)
    return sum(classes.class_of(n) ** power - n**power for n in lengths) + memory * sum(boundaries)


def least(lengths: list[int], k: int, multiple_of: int, power: int, memory: float) -> float:
    candidates = sorted({max(1, -(-n // multiple_of)) * multiple_of for n in lengths})
    subsets = itertools.chain.from_iterable(itertools.combinations(candidates, n) for n in range(1, k + 1))
    return min(cost_of(s, lengths, power, memory) for s in subsets if s[-1] == candidates[-1])


@hypothesis.given(
    LENGTHS,
    st.integers(1, 4),
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from(["linear", "quadratic"]),
    st.sampled_from([0, 0.25, 1, 3.5]),
)
def test_fit_is_as_good_as_brute_force(lengths: list[int], k: int, multiple_of: int, cost: str, weight: float) -> None:
    fitted = SizeClasses.fit(lengths, k, multiple_of, cost, slots=2, memory_weight=weight)
    power = 1 if cost == "linear" else 2
    assert 1 <= len(fitted.boundaries) <= k
    assert all(b % multiple_of == 0 for b in fitted.boundaries)
    assert fitted.maximum == max(1, -(-max(lengths) // multiple_of)) * multiple_of
    expected = least(lengths, k, multiple_of, power, 2 * weight)
    assert cost_of(fitted.boundaries, lengths, power, 2 * weight) == pytest.approx(expected)


@hypothesis.given(LENGTHS, st.sampled_from([1, 3]))
def test_the_curve_is_the_best_of_each_number_and_convex(lengths: list[int], multiple_of: int) -> None:
    curve = SizeClasses.fit_curve(lengths, 6, multiple_of)
    costs = [cost_of(c.boundaries, lengths, 1, 0) for c in curve]
    for n, (classes, cost) in enumerate(zip(curve, costs, strict=True), 1):
        assert len(classes.boundaries) == n
        assert cost == least(lengths, n, multiple_of, 1, 0)
        assert classes == SizeClasses.fit(lengths, n, multiple_of)
    gains = [a - b for a, b in itertools.pairwise(costs)]
    assert all(gain > 0 for gain in gains)
    assert gains == sorted(gains, reverse=True)


@pytest.mark.parametrize("maximum", [317, 16_640])
def test_the_last_class_is_the_longest_length(maximum: int) -> None:
    lengths = np.random.default_rng(0).integers(1, maximum + 1, 5000)
    lengths[7] = maximum
    for k in (1, 2, 8):
        assert SizeClasses.fit(lengths, k).maximum == maximum
    assert SizeClasses.fit(lengths, 8, multiple_of=128).maximum == -(-maximum // 128) * 128


def test_many_distinct_lengths_against_the_plain_program() -> None:
    """One level of dynamic programming after the other, every split tried."""
    rng = np.random.default_rng(1)
    values = np.unique(rng.integers(1, 3000, 600))
    counts = rng.integers(1, 50, len(values))
    served = np.concatenate(([0], np.cumsum(counts)))
    best = np.concatenate(([0], values * served[1:]))
    for k in range(2, 9):
        best = np.array([0, *[min(best[i] + values[j] * (served[j + 1] - served[i]) for i in range(j + 1))
                              for j in range(len(values))]])  # fmt: skip
        fitted = SizeClasses.fit(dict(zip(values.tolist(), counts.tolist(), strict=True)), k)
        at = np.searchsorted(fitted.boundaries, values)
        assert int((np.array(fitted.boundaries)[at] * counts).sum()) == best[-1]


def test_lengths_come_as_an_iterable_an_array_a_histogram_or_a_file(tmp_path: Path) -> None:
    lengths = [5, 1, 9, 9, 200, 3, 3, 3]
    path = tmp_path / "lengths.txt"
    path.write_text("5 1 9\n9, 200\n3 3 3\n")
    histogram = {n: lengths.count(n) for n in lengths} | {1000: 0}
    shapes: list[Any] = [lengths, iter(lengths), np.array(lengths, np.uint16), np.array([lengths]), histogram]
    fits = [SizeClasses.fit(x, 3) for x in [*shapes, path, str(path)]]
    assert {f.boundaries for f in fits} == {fits[0].boundaries}
    assert fits[0].padding_overhead(path) == fits[0].padding_overhead(lengths)


def test_min_gain_leaves_classes_out_that_save_little() -> None:
    lengths = [10] * 1000 + [100] * 1000 + [99]
    assert SizeClasses.fit(lengths, 3).boundaries == (10, 99, 100)
    assert SizeClasses.fit(lengths, 3, min_gain=0.01).boundaries == (10, 100)
    assert SizeClasses.fit(lengths, 3, min_gain=0.9).boundaries == (100,)


def test_memory_is_weighed_against_padding() -> None:
    lengths = np.random.default_rng(2).lognormal(5, 0.8, 2000).astype(np.int64) + 1
    counts = [len(SizeClasses.fit(lengths, 16, slots=3, memory_weight=w).boundaries) for w in (0, 1, 30, 1e6)]
    assert counts[0] == 16
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 1


def test_a_cost_that_does_not_fit_64_bits() -> None:
    with pytest.raises(OverflowError, match="quadratic cost of 2 lengths up to 4000000000 does not fit 64 bits"):
        SizeClasses.fit([1, 4_000_000_000], cost="quadratic")
    assert SizeClasses.fit([1, 4_000_000_000]).boundaries == (1, 4_000_000_000)


def test_zero_is_held_by_the_smallest_class() -> None:
    assert SizeClasses.fit([0]).boundaries == (1,)
    assert SizeClasses.fit([0, 0, 7], multiple_of=4).boundaries == (4, 8)
    assert SizeClasses.explicit([8]).padding_overhead([0, 8]) == 0.5


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"lengths": []}, ValueError, "no lengths"),
        ({"lengths": [-1]}, ValueError, "at least 0, got -1"),
        ({"lengths": [1.5]}, TypeError, "integer"),
        ({"lengths": np.array([1.5])}, TypeError, "array of float64"),
        ({"lengths": {1: -2}}, ValueError, "count of lengths"),
        ({"lengths": [1], "k": 0}, ValueError, "k must be at least 1"),
        ({"lengths": [1], "multiple_of": 0}, ValueError, "multiple_of must be at least 1"),
        ({"lengths": [1], "cost": "cubic"}, ValueError, "cost must be one of linear, quadratic"),
        ({"lengths": [1], "memory_weight": 1}, ValueError, "memory_weight needs slots"),
        ({"lengths": [1], "memory_weight": -1}, ValueError, "memory_weight must be at least 0"),
        ({"lengths": [1], "min_gain": 1}, ValueError, "min_gain must be a share"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SizeClasses.fit(**arguments)


def test_a_file_of_words(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("12 twelve")
    with pytest.raises(ValueError, match="must hold integers"):
        SizeClasses.fit(path)


def test_what_is_longer_than_the_largest_class() -> None:
    with pytest.raises(ValueError, match="a length of 9 is above the largest size class, 8"):
        SizeClasses.explicit([8]).padding_overhead([9])
    with pytest.raises(arenax.NoSizeClass):
        SizeClasses.fit([1, 8]).class_of(9)

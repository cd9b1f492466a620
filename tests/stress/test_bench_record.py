"""`arenax bench put`, its second table: what a recording adds, in turns of two pools that change their roles."""

import pytest

import arenax
from arenax_stress import _bench_record
from arenax_stress._bench_clock import WARM_UP, Clock


def test_the_figures_of_both_forms() -> None:
    table = _bench_record.measure_recording(Clock(), 4)
    assert [row["form"] for row in table.rows] == ["pool.put", "step.put"]
    for row in table.rows:
        assert (row["turns"], row["calls"]) == (4, _bench_record.CALLS)
        assert row["added_seconds"] == row["noted_seconds"] + row["written_seconds"]
        assert min(row["plain_seconds"], row["recorded_seconds"], row["written_seconds"]) > 0
    assert table.conclusion.startswith("A recording adds ")


def test_each_pool_records_in_one_half_and_turns_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    with arenax.BufferPool(name="a") as a, arenax.BufferPool(name="b") as b:
        seen: list[tuple[str, bool]] = []

        def block(clock: Clock, form: arenax.BufferPool, calls: int) -> float:
            is_recorded = bool(form.arena.recorders)
            seen.append((form.name, is_recorded))
            return calls * (3e-6 if is_recorded else 1e-6)

        monkeypatch.setattr(_bench_record, "_block", block)
        row = _bench_record._row(Clock(), [a, b], [a, b], 6)  # type: ignore[list-item]
    turns = 2 * (WARM_UP + 3)
    assert len(seen) == 2 * turns
    assert seen[:4] == [("a", True), ("b", False), ("b", False), ("a", True)]
    assert seen[turns : turns + 2] == [("b", True), ("a", False)]
    assert row["turns"] == 6
    assert row["noted_seconds"] == pytest.approx(2e-6)


def test_the_conclusion_says_whether_it_is_what_is_claimed() -> None:
    def said(seconds: float) -> str:
        return _bench_record._conclusion([{"form": "pool.put", "added_seconds": seconds}])

    assert said(0.8e-6) == "A recording adds 800 ns to a pool.put, within the microsecond that it may cost."
    assert said(3.5e-6) == "A recording adds 3.5 µs to a pool.put, MORE THAN the microsecond that it may cost."

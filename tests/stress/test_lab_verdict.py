"""The verdict says what the figures bear out, with the figures, and nothing of what was not run."""

import re
from typing import Any

import attrs
import pytest

from arenax_stress._lab_findings import Facts, Findings, Found, LongRun, Waste
from arenax_stress._lab_least import Least
from arenax_stress._lab_verdict import SHORT, TITLES, Verdict, verdict
from arenax_stress._result import Failure
from arenax_stress._simulate import ALLOCATORS

MIB = 2**20
PEAK = 1000 * MIB


def found(
    least: float | None = 1.0,
    *,
    rounding: float = 0.0,
    unused: float = 0.0,
    holes: float = 0.0,
    failed: int = 0,
    size: float = 0.1,
    free: float = 0.2,
    piece: float = 0.05,
    event: int = 7,
    **long: Any,
) -> Found:
    """An allocator's figures, as multiples of the peak."""
    waste = Waste(PEAK, *(round(x * PEAK) for x in (rounding, unused, holes)))
    first = Failure(event, 3, *(round(x * PEAK) for x in (size, free, piece))) if failed else None
    run = LongRun(round(1.05 * PEAK), 5, requests=1000, failed=failed, first=first, **long)
    bytes_ = None if least is None else round(least * PEAK)
    return Found(waste, Least(bytes_, None if bytes_ is None else bytes_ - PEAK // 200, (), 20), run)


def findings(distinct: int = 500, classes: int = 16, facts: dict[str, Any] | None = None, **by: Found) -> Findings:
    return Findings(
        Facts(
            "net", 5000, 10_000, **{"peak_bytes": PEAK, "distinct_sizes": distinct, "classes": classes} | (facts or {})
        ),
        by,
    )


def answer(said: Verdict, question: str) -> str:
    return next((" ".join(a.sentences) for a in said.answers if question in a.question), "")


def test_good_enough_without_a_pool() -> None:
    said = verdict(findings(bfc=found(1.02, rounding=0.02), plan=found(1.3, rounding=0.2, unused=0.1), pool=found(1.4)))
    assert said.helps is False
    assert said.headline == (
        "You do not need a pool to save memory. XLA's allocator serves this as it is, in 1.02× the peak (1020 MiB); "
        "the planned pool takes 1.30×, 280 MiB more."
    )
    # It says what a pool is good for nevertheless.
    assert "500 sizes are as many compilations, and the size classes of a pool are 16" in answer(said, "change")


def test_few_sizes_compile_nothing_again() -> None:
    said = verdict(findings(12, 12, bfc=found(1.02), plan=found(1.02)))
    assert "the planned pool takes as much" in said.headline
    assert "only 12 sizes" in answer(said, "change")
    assert "compilations" not in str(said)
    assert "There is only one size" in str(verdict(findings(1, 1, bfc=found(1.0), plan=found(1.0))))


def test_it_serves_in_little_but_breaks_in_the_long_run() -> None:
    said = verdict(findings(bfc=found(1.04, failed=3), plan=found(1.3)))
    assert said.helps is False
    assert said.headline.startswith("A pool would not help: XLA's allocator needs 1.04×")


def test_a_pool_that_saves_memory() -> None:
    said = verdict(findings(bfc=found(1.4, unused=0.38, failed=40), plan=found(1.1, rounding=0.1), pool=found(1.2)))
    assert said.helps is True
    assert said.headline == (
        "A pool would help: XLA's allocator needs 1.40× the peak (1.367 GiB), the planned pool 300 MiB less, 1.10× the "
        "peak (1.074 GiB), known before the first step."
    )
    assert "400 MiB more than the peak is enough for XLA's allocator" in answer(said, "change")
    assert "allocate first what stays" in answer(said, "change")
    assert "it loses 38% to holes that are too short" in answer(said, "lost")
    assert "the planned pool takes 1.10×: it loses 10% to padding to its classes" in answer(said, "lost")


def test_a_pool_that_saves_memory_by_conversions() -> None:
    said = verdict(findings(bfc=found(1.4, failed=1), plan=found(1.3), pool=found(1.1)))
    assert said.helps is True
    assert said.headline.endswith("the pool 300 MiB less, 1.10× the peak (1.074 GiB), at the price of conversions.")


def test_a_pool_that_needs_as_much_gives_certainty() -> None:
    said = verdict(findings(bfc=found(1.2, failed=1), plan=found(1.21)))
    assert said.helps is None
    assert "no memory, but certainty" in said.headline
    assert "reserved before the first step" in said.headline


def test_a_program_that_breaks_up_whatever_it_gets() -> None:
    said = verdict(
        findings(bfc=found(5.4, unused=4.4, failed=9), best_fit=found(5.4), plan=found(5.5), cupy=found(1.0))
    )
    assert said.helps is False
    assert "A pool does not cure this" in said.headline
    assert "It is the program" in said.headline


def test_hardly_anything_is_alive() -> None:
    said = verdict(findings(facts={"peak_bytes": 1000}, bfc=found(1.4, failed=1), plan=found(1.1)))
    assert said.helps is False
    assert "no allocator matters" in said.headline


def test_what_breaks_first_and_why() -> None:
    by = {
        "bfc": found(1.2, failed=4, event=900),
        "pytorch": found(1.3, failed=5, event=100, size=0.1, free=0.05, piece=0.05),
        "cupy": found(1.1),
        "pool": found(1.3, failed=2, event=500, creations=30, conversions=20),
        "plan": found(1.5, needs_bytes=round(1.5 * PEAK)),
    }
    text = answer(verdict(findings(**by)), "breaks")
    assert "1.025 GiB, 105% of the peak, and 5 times over, CuPy's allocator serves every request" in text
    assert (
        "The first to fail is PyTorch's allocator, at event 100: 100 MiB are asked for with 50 MiB left: it is" in text
    )
    assert "Then the pool, at event 500: 100 MiB are asked for with 200 MiB free or idle" in text
    assert (
        "Then XLA's allocator, at event 900: 100 MiB are asked for with 200 MiB free, in pieces of at most 50" in text
    )
    assert text.index("PyTorch") < text.index("the pool") < text.index("XLA")
    assert "The planned pool cannot begin there, since it takes 1.465 GiB" in text


def test_stranding_says_how_often_it_converts() -> None:
    by = {"bfc": found(1.01), "pool": found(1.6, unused=0.46, conversions=13, creations=33)}
    text = answer(verdict(findings(**by)), "change")
    assert "lie idle while others are short (stranding) cost the pool 46%" in text
    assert "converts them, 13 times in 1,000 requests with 33 new buffers, and serves everything" in text
    assert "`pool.trim`" in text
    by["pool"] = found(1.6, unused=0.46, conversions=13, failed=2)
    assert "and still fails" in answer(verdict(findings(**by)), "change")


def test_more_classes_help_or_do_not() -> None:
    made = findings(bfc=found(1.01), plan=found(1.3, rounding=0.3))
    made.plan_bytes = {8: round(1.5 * PEAK), 16: round(1.3 * PEAK), 32: round(1.1 * PEAK), 64: round(1.09 * PEAK)}
    assert "With 32 size classes instead of 16 a plan takes 1.09× instead of 1.30×" in str(verdict(made))
    made.plan_bytes = {8: round(1.31 * PEAK), 16: round(1.3 * PEAK), 64: round(1.3 * PEAK)}
    assert "8 size classes do as well as 64, with 1.31×" in str(verdict(made))


def test_a_pool_that_needs_more_classes() -> None:
    made = findings(bfc=found(1.1, failed=1), plan=found(1.3, rounding=0.3))
    made.plan_bytes = {16: round(1.3 * PEAK), 64: round(1.05 * PEAK)}
    said = verdict(made)
    assert said.helps is None
    assert said.headline.startswith("With 16 size classes a pool would not help: XLA's allocator needs 1.10×")
    assert said.headline.endswith("With up to 64 a plan takes 1.05× (`--max-classes 64`).")


def test_luck_in_smaller_devices_is_told() -> None:
    bfc = found(1.2)
    bfc.least = Least(round(1.2 * PEAK), round(1.18 * PEAK), (round(1.1 * PEAK),), 30)
    text = answer(verdict(findings(bfc=bfc, plan=found(1.2))), "small")
    assert "XLA's allocator happens to survive with 1.10× as well, and fails in between" in text
    assert "at most 2.0% of the peak" in text
    assert "The plan is fitted to this very trace." in text


def test_no_size_is_enough() -> None:
    text = answer(verdict(findings(bfc=found(1.2), cupy=found(None), plan=found(1.2))), "small")
    assert "No size that was tried is enough for CuPy's allocator" in text


def test_temporaries_are_not_what_a_pool_is_for() -> None:
    by = {"bfc": found(1.3, failed=1), "plan": found(1.1)}
    assert "Temporaries inside one jitted program are XLA's" in str(verdict(findings(**by)))
    # A recorded pool has lent no temporary.
    known = findings(facts={"families": 3}, **by)
    assert "Temporaries" not in str(verdict(known))
    assert "Temporaries" not in str(verdict(findings(facts={"story": "A workload."}, **by)))


def test_a_recording_is_served_by_its_own_classes() -> None:
    made = findings(facts={"families": 2}, bfc=found(1.1), pool=found(1.2))
    assert "those that were recorded" in str(verdict(made))


def test_nothing_is_said_of_what_was_not_run() -> None:
    nothing = findings(bfc=Found(), pool=Found(), plan=Found())
    said = verdict(nothing)
    assert said.headline == "Nothing was run to the end, so there is no verdict."
    assert said.helps is None
    assert len(nothing.missing) == 3
    assert nothing.missing[0] == "without bounds of bfc, pool, plan"
    half = findings(bfc=attrs.evolve(found(1.3), long=None), pool=attrs.evolve(found(1.2, unused=0.2), long=None))
    assert verdict(half).helps is True
    assert not answer(verdict(half), "breaks")
    assert half.missing == ("the long run of bfc, pool",)
    waste_only = findings(bfc=Found(found(rounding=0.3).waste), plan=Found(found(rounding=0.1).waste))
    assert verdict(waste_only).helps is True
    assert not answer(verdict(waste_only), "small")


def test_without_a_pool_or_without_xla() -> None:
    said = verdict(findings(bfc=found(1.2, failed=1), cupy=found(1.1)))
    assert said.helps is None
    assert said.headline == "Of those tried, CuPy's allocator needs least: 1.10× the peak (1.074 GiB)."
    assert "the pool" not in said.headline


@pytest.mark.parametrize("bfc", [1.0, 1.04, 1.06, 1.3, 2.0])
@pytest.mark.parametrize("pool", [1.0, 1.05, 1.2, 1.31, 6.0])
@pytest.mark.parametrize("failed", [0, 5])
def test_it_never_calls_the_dearer_one_a_help(bfc: float, pool: float, failed: int) -> None:
    said = verdict(findings(bfc=found(bfc, failed=failed), plan=found(pool), pool=found(pool)))
    assert (said.helps is True) <= (pool < bfc)
    assert not re.search(r"nan|inf|None|-\d", str(said))


def test_every_allocator_has_a_title() -> None:
    assert TITLES.keys() == SHORT.keys() == {*ALLOCATORS, "pool", "plan"}
    assert SHORT["pytorch"] == "PyTorch"
    assert SHORT["plan"] == "planned pool"

"""Best fit is the textbook's, whatever the trace: a linear search finds the same addresses."""

import hypothesis
from hypothesis import strategies as st

from arenax import Trace
from arenax_stress import simulate
from arenax_stress._sim_best_fit import BestFit
from tests.stress.allocations import Naive, agree, made, traces


@hypothesis.given(traces(st.integers(1, 3000)), st.none() | st.integers(1, 20_000))
def test_it_is_the_linear_search(trace: Trace, limit: int | None) -> None:
    naive = Naive(lambda size, address: (size, address), lambda available, size: True, limit and limit // 256 * 256)
    agree(BestFit(limit), naive, trace)


def test_the_smallest_hole_is_taken_then_the_lowest() -> None:
    allocator = BestFit()
    for buffer, size in enumerate((1024, 256, 512, 256, 512, 256)):
        allocator.allocate(buffer, size)
    for buffer in (0, 2, 4):
        allocator.free(buffer)
    assert [allocator.allocate(buffer, 512) for buffer in (6, 7, 8)] == [1280, 2048, 0]


def test_a_hole_at_the_end_of_an_unbounded_region_is_none() -> None:
    result = simulate(made(("a", 1, 512), ("a", 2, 512), ("f", 2), ("a", 3, 1024)), "best_fit")
    assert result.curve.reserved_bytes.tolist() == [512, 1024, 512, 1536]
    assert result.curve.fragmentation.tolist() == [0, 0, 0, 0]


def test_a_limit_is_one_region() -> None:
    result = simulate(made(("a", 1, 512), ("a", 2, 512), ("f", 1), ("a", 3, 768)), "best_fit", limit_bytes=1791)
    assert result.peak_reserved_bytes == 1536
    (failure,) = result.failures
    assert (failure.event, failure.size, failure.free_bytes, failure.largest_free_bytes) == (3, 768, 1024, 512)
    assert result.curve.fragmentation[-1] == 0.5

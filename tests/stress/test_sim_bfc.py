"""XLA's allocator: when it splits, how it grows, and how little memory it survives in."""

import hypothesis
import pytest
from hypothesis import strategies as st

from arenax import Trace
from arenax_stress import simulate
from arenax_stress._sim_bfc import Bfc, BfcGrowing, is_split
from tests.stress.allocations import KIB, MIB, Naive, agree, made, public, traces


@hypothesis.given(traces(st.integers(1, 3000)), st.none() | st.integers(1, 20_000))
def test_it_is_the_linear_search(trace: Trace, limit: int | None) -> None:
    agree(Bfc(limit), Naive(lambda size, address: (size, address), is_split, limit and limit // 256 * 256), trace)


def test_sizes_are_rounded_up_to_256() -> None:
    result = simulate(made(*(("a", i, i) for i in range(1, 1024))), "bfc")
    assert result.peak_allocated_bytes == result.peak_reserved_bytes == result.allocated_bytes == 654_336
    assert result.creations == result.created_bytes == 0


@pytest.mark.parametrize(
    ("hole", "size", "taken"),
    [
        (300 * MIB, 200 * MIB, 300 * MIB),
        (512 * KIB, 256 * KIB, 256 * KIB),  # twice
        (512 * KIB, 256 * KIB + 1, 512 * KIB),
        (512 * KIB, 256 * KIB - 1, 256 * KIB),
        (428 * MIB, 300 * MIB, 300 * MIB),  # an excess of 128 MiB
        (428 * MIB, 300 * MIB + 1, 428 * MIB),
        (428 * MIB, 428 * MIB, 428 * MIB),
    ],
)
def test_a_chunk_is_split_at_twice_the_size_or_128_mib_of_excess(hole: int, size: int, taken: int) -> None:
    result = simulate(made(("a", 1, hole), ("a", 2, 256), ("f", 1), ("a", 3, size)), "bfc")
    assert result.allocated_bytes == taken + 256


def test_the_tail_of_an_unbounded_region_is_split_always_the_end_of_a_bounded_one_by_the_rule() -> None:
    trace = made(("a", 1, 768))
    assert simulate(trace, "bfc").allocated_bytes == 768
    assert simulate(trace, "bfc", limit_bytes=1300).allocated_bytes == 1280
    assert simulate(trace, "bfc", limit_bytes=1536).allocated_bytes == 768


def test_a_bounded_region_is_reserved_from_the_start() -> None:
    result = simulate(made(("a", 1, 256), ("f", 1)), "bfc", limit_bytes=MIB + 255)
    assert result.curve.reserved_bytes.tolist() == [MIB, MIB]
    assert result.curve.largest_free_bytes.tolist() == [MIB - 256, MIB]
    assert result.ratio == 4096


@pytest.mark.parametrize(
    ("name", "survives", "dies"),
    [("somas_tensors_resnet50", 1.025, 1.024), ("iopddl_G_1", 1.053, 1.049), ("iopddl_Y_1", 1.045, 1.041)],
)
def test_the_least_region_that_a_program_survives_in(name: str, survives: float, dies: float) -> None:
    trace = public(name)
    assert not simulate(trace, "bfc", limit_bytes=int(survives * trace.peak_bytes)).failures
    assert simulate(trace, "bfc", limit_bytes=int(dies * trace.peak_bytes)).failures


def test_regions_begin_at_2_mib_and_double() -> None:
    allocator = BfcGrowing()
    reserved = []
    for buffer in range(8):
        allocator.allocate(buffer, 2 * MIB)
        reserved.append(allocator.reserved_bytes // MIB)
    assert reserved == [2, 6, 6, 14, 14, 14, 14, 30]
    assert (allocator.creations, allocator.created_bytes) == (4, 30 * MIB)


def test_a_region_for_a_large_request_doubles_until_it_suffices_and_the_next_is_no_larger() -> None:
    allocator = BfcGrowing()
    allocator.allocate(0, 17 * MIB)
    assert allocator.reserved_bytes == 32 * MIB
    allocator.allocate(1, 20 * MIB)
    assert allocator.reserved_bytes == 64 * MIB
    allocator.allocate(2, 64 * MIB)
    assert allocator.reserved_bytes == 128 * MIB


def test_a_region_is_cut_to_what_the_limit_leaves() -> None:
    allocator = BfcGrowing(5 * MIB + 100)
    assert allocator.allocate(0, MIB) == 0
    assert allocator.allocate(1, 3 * MIB + 1) is None
    assert allocator.reserved_bytes == 2 * MIB
    assert allocator.allocate(2, 3 * MIB) == 2 * MIB
    assert allocator.reserved_bytes == 5 * MIB
    assert BfcGrowing(MIB).allocate(0, MIB) == 0
    assert BfcGrowing(MIB).allocate(0, MIB + 1) is None


def test_regions_never_join_nor_go_back() -> None:
    trace = made(("a", 1, 2 * MIB), ("a", 2, 4 * MIB), ("f", 1), ("f", 2), ("a", 3, 6 * MIB))
    result = simulate(trace, "bfc_growing")
    assert result.curve.reserved_bytes.tolist() == [2 * MIB, 6 * MIB, 6 * MIB, 6 * MIB, 14 * MIB]
    assert result.curve.largest_free_bytes.tolist() == [0, 0, 2 * MIB, 4 * MIB, 4 * MIB]
    (failure,) = simulate(trace, "bfc_growing", limit_bytes=8 * MIB).failures
    assert (failure.buffer, failure.free_bytes, failure.largest_free_bytes) == (2, 8 * MIB, 4 * MIB)

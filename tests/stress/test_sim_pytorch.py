"""PyTorch's caching allocator: its two pools, its segments, and what it gives back before it gives up."""

import pytest

from arenax_stress import simulate
from arenax_stress._sim_pytorch import PyTorch, segment_size
from tests.stress.allocations import KIB, MIB, made


def sixteen_and_thirty_two(
    first: tuple[int, int], second: tuple[int, int]
) -> list[tuple[str, int, int] | tuple[str, int]]:
    count, size = first
    steps = [*(("a", i, size * MIB) for i in range(count)), *(("f", i) for i in range(count))]
    return steps + [("a", 10 + i, second[1] * MIB) for i in range(second[0])]


def test_segments_do_not_join_but_are_split() -> None:
    trace = made(*sixteen_and_thirty_two((8, 16), (4, 32)))
    assert simulate(trace, "pytorch").peak_reserved_bytes == 256 * MIB
    trace = made(*sixteen_and_thirty_two((4, 32), (8, 16)))
    result = simulate(trace, "pytorch")
    assert result.peak_reserved_bytes == 128 * MIB
    assert (result.creations, result.created_bytes) == (4, 128 * MIB)


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, 2 * MIB),
        (1200, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (3 * MIB // 2, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB),  # rounded up to 512 first
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (21 * MIB, 22 * MIB),
    ],
)
def test_the_segment_of_a_request(size: int, segment: int) -> None:
    assert simulate(made(("a", 1, size)), "pytorch").peak_reserved_bytes == segment
    assert segment_size(-(-size // 512) * 512) == segment


@pytest.mark.parametrize(
    ("size", "taken"),
    [
        (1, 512),
        (MIB - 512, MIB - 512),
        (19 * MIB // 2, 19 * MIB // 2),
        (11 * MIB, 11 * MIB + MIB),  # a rest of 1 MiB stays with the chunk
        (11 * MIB - 512, 12 * MIB - MIB - 512),  # one of more does not
    ],
)
def test_small_chunks_are_split_always_large_ones_above_1_mib_of_rest(size: int, taken: int) -> None:
    assert simulate(made(("a", 1, size)), "pytorch").allocated_bytes == taken


def test_small_and_large_keep_apart() -> None:
    trace = made(("a", 1, 2 * MIB), ("a", 2, 512), ("f", 1), ("a", 3, MIB), ("a", 4, MIB + 1))
    result = simulate(trace, "pytorch")
    assert result.curve.reserved_bytes.tolist() == [20 * MIB, 22 * MIB, 22 * MIB, 22 * MIB, 22 * MIB]
    full = made(*(("a", i, MIB) for i in range(3)))
    assert simulate(full, "pytorch", limit_bytes=3 * MIB).failures[0].largest_free_bytes == MIB


def test_the_best_fit_of_a_pool_is_taken() -> None:
    allocator = PyTorch()
    for buffer, size in enumerate((512, 512, 2048, 512, 1024, 512)):
        allocator.allocate(buffer, size)
    allocator.free(2)
    allocator.free(4)
    assert allocator.allocate(6, 800) == 512 + 512 + 2048 + 512
    assert allocator.allocate(7, 800) == 512 + 512


def test_idle_segments_go_back_before_it_gives_up() -> None:
    steps = [("a", 1, 20 * MIB), ("a", 2, 512), ("f", 1), ("f", 2), ("a", 3, 30 * MIB)]
    result = simulate(made(*steps), "pytorch", limit_bytes=30 * MIB)
    assert result.curve.reserved_bytes.tolist() == [20 * MIB, 22 * MIB, 22 * MIB, 22 * MIB, 30 * MIB]
    assert (result.creations, result.created_bytes, result.failures) == (3, 52 * MIB, ())


def test_a_segment_in_use_stays() -> None:
    steps = [("a", 1, 4 * MIB), ("a", 2, 4 * MIB), ("f", 1), ("a", 3, 30 * MIB), ("f", 2), ("a", 4, 30 * MIB)]
    result = simulate(made(*steps), "pytorch", limit_bytes=40 * MIB)
    (failure,) = result.failures
    assert (failure.buffer, failure.free_bytes, failure.largest_free_bytes) == (2, 36 * MIB, 20 * MIB)
    assert result.curve.reserved_bytes[-1] == 30 * MIB


def test_idle_memory_goes_back_also_for_what_can_never_fit() -> None:
    result = simulate(made(("a", 1, 512), ("f", 1), ("a", 2, 64 * MIB)), "pytorch", limit_bytes=8 * MIB)
    assert result.curve.reserved_bytes.tolist() == [2 * MIB, 2 * MIB, 0]
    assert result.failures[0].free_bytes == 8 * MIB


def test_a_gap_of_released_addresses_is_used_again() -> None:
    allocator = PyTorch(64 * MIB)
    allocator.allocate(0, 32 * MIB)
    allocator.allocate(1, 600 * KIB)
    allocator.free(0)
    assert allocator.allocate(2, 60 * MIB) == 34 * MIB
    allocator.free(2)
    assert allocator.allocate(3, 62 * MIB) == 34 * MIB
    assert allocator.chunks[1] == (32 * MIB, 600 * KIB)

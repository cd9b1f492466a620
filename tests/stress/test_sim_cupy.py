"""CuPy's memory pool: chunks of the size asked for, split at every occasion, given back when idle."""

from arenax_stress import simulate
from arenax_stress._sim_cupy import CuPy
from tests.stress.allocations import MIB, made


def test_the_device_is_asked_for_the_rounded_size() -> None:
    result = simulate(made(("a", 1, 1), ("a", 2, 513), ("a", 3, MIB)), "cupy")
    assert result.curve.reserved_bytes.tolist() == [512, 1536, MIB + 1536]
    assert (result.creations, result.created_bytes) == (3, MIB + 1536)
    assert result.peak_allocated_bytes == result.peak_reserved_bytes


def test_a_chunk_is_always_split_and_joined_again_but_not_with_another() -> None:
    steps = [("a", 1, 2048), ("a", 2, 1024), ("f", 1), ("f", 2), ("a", 3, 512), ("a", 4, 512), ("f", 3), ("f", 4)]
    result = simulate(made(*steps, ("a", 5, 3072)), "cupy")
    assert result.curve.allocated_bytes.tolist() == [2048, 3072, 1024, 0, 512, 1024, 512, 0, 3072]
    assert result.curve.largest_free_bytes.tolist() == [0, 0, 2048, 2048, 2048, 2048, 2048, 2048, 2048]
    assert result.peak_reserved_bytes == 6144


def test_idle_chunks_go_back_before_it_gives_up() -> None:
    steps = [("a", 1, 2048), ("a", 2, 2048), ("f", 1), ("f", 2), ("a", 3, 512), ("a", 4, 3072)]
    result = simulate(made(*steps), "cupy", limit_bytes=5120)
    assert result.curve.reserved_bytes.tolist() == [2048, 4096, 4096, 4096, 4096, 5120]
    assert not result.failures
    # The one that was split is not idle.
    (failure,) = simulate(made(*steps), "cupy", limit_bytes=4608).failures
    assert (failure.buffer, failure.free_bytes, failure.largest_free_bytes) == (3, 4096, 2560)


def test_nothing_goes_back_for_what_can_never_fit() -> None:
    result = simulate(made(("a", 1, 1024), ("f", 1), ("a", 2, 9999)), "cupy", limit_bytes=4096)
    assert result.curve.reserved_bytes.tolist() == [1024, 1024, 1024]
    assert result.failures[0].free_bytes == 4096


def test_of_equal_chunks_the_lowest_is_taken() -> None:
    allocator = CuPy()
    for buffer in range(3):
        allocator.allocate(buffer, 512)
    for buffer in (2, 0, 1):
        allocator.free(buffer)
    assert [allocator.allocate(buffer, 512) for buffer in range(3)] == [0, 512, 1024]

"""RMM's pool: how it grows with and without a maximum, and what it gives back at it."""

import pytest

from arenax_stress import simulate
from arenax_stress._sim_rmm import Rmm
from tests.stress.allocations import MIB, made


def test_without_a_maximum_it_doubles() -> None:
    trace = made(*(("a", i, 1000) for i in range(5)), ("a", 5, 1 << 20))
    result = simulate(trace, "rmm")
    assert result.curve.reserved_bytes.tolist() == [1024, 2048, 4096, 4096, 8192, 8192 + MIB]
    assert (result.creations, result.created_bytes) == (5, 8192 + MIB)


def test_below_a_maximum_it_takes_half_of_the_rest() -> None:
    trace = made(("a", 1, 256), ("a", 2, 5 * MIB), ("a", 3, 2 * MIB), ("a", 4, MIB))
    result = simulate(trace, "rmm", limit_bytes=16 * MIB + 200)
    assert result.curve.reserved_bytes.tolist() == [8 * MIB, 8 * MIB, 8 * MIB, 12 * MIB]
    assert result.failures == ()
    assert simulate(made(("a", 1, 9 * MIB)), "rmm", limit_bytes=16 * MIB).peak_reserved_bytes == 9 * MIB


def test_the_best_fit_is_split_always() -> None:
    allocator = Rmm(initial_bytes=16 * MIB)
    assert [allocator.allocate(buffer, 300) for buffer in range(4)] == [0, 512, 1024, 1536]
    allocator.free(1)
    assert allocator.allocate(4, 256) == 512
    assert allocator.allocated_bytes == 3 * 512 + 256
    assert allocator.reserved_bytes == 16 * MIB


def test_blocks_of_two_growths_do_not_join() -> None:
    trace = made(("a", 1, 1024), ("a", 2, 1024), ("f", 1), ("f", 2), ("a", 3, 2048))
    assert simulate(trace, "rmm").curve.reserved_bytes.tolist() == [1024, 2048, 2048, 2048, 4096]


def test_at_its_maximum_it_gives_idle_blocks_back_until_there_is_room() -> None:
    """rapidsai/rmm, `reclaim_free_blocks`: the lowest first, and no more than it takes."""
    allocator = Rmm(16 * MIB)
    for buffer, size in enumerate((8, 4, 2)):  # a half of what is left each time
        allocator.allocate(buffer, size * MIB)
    assert allocator.reserved_bytes == 14 * MIB
    for buffer in range(3):
        allocator.free(buffer)
    assert allocator.allocate(3, 9 * MIB) == 14 * MIB
    assert allocator.reserved_bytes == (4 + 2 + 9) * MIB
    allocator.free(3)
    assert allocator.allocate(4, 17 * MIB) is None
    assert allocator.reserved_bytes == 15 * MIB  # what can never fit takes nothing with it
    allocator.allocate(5, MIB)
    assert allocator.allocate(6, 15 * MIB) is None
    assert allocator.room_bytes == 14 * MIB  # all that was idle went back in vain


def test_what_it_begins_with() -> None:
    assert Rmm(limit_bytes=8 * MIB, initial_bytes=5 * MIB + 7).reserved_bytes == 5 * MIB
    with pytest.raises(ValueError, match="initial_bytes must be at most limit_bytes, 1024, got 2048"):
        Rmm(limit_bytes=1024, initial_bytes=2048)

"""First fit is the textbook's, and its tree over the addresses is a search in their order."""

import hypothesis
from hypothesis import strategies as st

from arenax import Trace
from arenax_stress._sim_first_fit import ByAddress, FirstFit
from tests.stress.allocations import Naive, agree, traces


@hypothesis.given(traces(st.integers(1, 3000)), st.none() | st.integers(1, 20_000))
def test_it_is_the_linear_search(trace: Trace, limit: int | None) -> None:
    naive = Naive(lambda size, address: address, lambda available, size: True, limit and limit // 256 * 256)
    agree(FirstFit(limit), naive, trace)


@hypothesis.given(st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(1, 9)), max_size=40), st.data())
def test_the_tree_finds_the_lowest_that_suffices(chunks: list[tuple[int, int]], data: st.DataObject) -> None:
    index = ByAddress(unit=8)
    known: dict[int, int] = {}
    for at, size in chunks:
        if known and data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(known)))
            index.remove(gone, known.pop(gone))
        if 8 * at not in known:
            known[8 * at] = size
            index.add(8 * at, size)
        wanted = data.draw(st.integers(1, 10))
        expected = next(((a, s) for a, s in sorted(known.items()) if s >= wanted), None)
        assert index.find(wanted) == expected
        assert index.largest == max(known.values(), default=0)


def test_the_lowest_hole_is_taken_though_another_fits_better() -> None:
    allocator = FirstFit()
    for buffer, size in enumerate((1024, 256, 512, 256)):
        allocator.allocate(buffer, size)
    allocator.free(0)
    allocator.free(2)
    assert [allocator.allocate(buffer, 512) for buffer in (4, 5, 6)] == [0, 512, 1280]

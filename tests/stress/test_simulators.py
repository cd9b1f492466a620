"""What every simulated allocator keeps to, and what `simulate` makes of it."""

import itertools
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import arenax_stress
from arenax import Trace
from arenax_stress import _replay, simulate
from arenax_stress._replay import replay
from arenax_stress._result import Failure
from arenax_stress._simulate import ALLOCATORS
from tests.stress.allocations import KIB, MIB, check, free_chunks, made, public, traces

SIZES = st.one_of(
    st.integers(1, 5 * KIB),
    st.integers(1, 64).map(lambda n: n * MIB // 2),
    st.sampled_from([1, 255, 256, 257, 512, 513, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 128 * MIB, 300 * MIB]),
)
LIMITS = st.none() | st.sampled_from([1, 300, 4 * KIB, 3 * MIB + 77, 20 * MIB, 64 * MIB, 700 * MIB])
every_allocator = pytest.mark.parametrize("name", ALLOCATORS)
# Bytes needed ÷ peak of live bytes, by an independent simulation.
TABLE = {
    "somas_tensors_resnet50": {"bfc": 1.026, "best_fit": 1.003, "pytorch": 1.114, "cupy": 1.090},
    "iopddl_G_1": {"bfc": 1.009, "best_fit": 1.003, "pytorch": 1.023, "cupy": 1.013},
    "iopddl_Y_1": {"bfc": 1.037, "best_fit": 1.022, "pytorch": 1.034, "cupy": 1.079},
}


@every_allocator
@hypothesis.given(trace=traces(SIZES), limit=LIMITS)
def test_chunks_never_overlap_and_bytes_are_conserved(name: str, trace: Trace, limit: int | None) -> None:
    allocator = ALLOCATORS[name](limit)
    check(allocator)
    for step in trace.steps.tolist():
        if step >= 0:
            size = int(trace.sizes[step])
            address = allocator.allocate(step, size)
            assert address is not None or limit is not None
            if address is not None:
                assert allocator.chunks[step][0] == address
                assert allocator.chunks[step][1] >= size
        elif ~step in allocator.chunks:
            allocator.free(~step)
        check(allocator)


@every_allocator
@hypothesis.given(trace=traces(SIZES), limit=LIMITS)
def test_all_is_joined_again_when_all_is_freed(name: str, trace: Trace, limit: int | None) -> None:
    allocator: Any = ALLOCATORS[name](limit)
    replay(trace, allocator, name)
    for buffer in list(allocator.chunks):
        allocator.free(buffer)
    assert allocator.allocated_bytes == 0
    if hasattr(allocator, "_region"):
        assert free_chunks(allocator) == ([(0, allocator.reserved_bytes)] if allocator.reserved_bytes else [])
        assert limit is not None or allocator.reserved_bytes == 0
    else:
        segments = [segment for pool in allocator._pools for segment in pool._segments.items()]
        assert free_chunks(allocator) == sorted(segments)
        assert sum(len(pool.idle) for pool in allocator._pools) == len(segments)


@every_allocator
@hypothesis.given(trace=traces(st.just(0) | SIZES), limit=LIMITS)
def test_the_result_is_that_of_the_allocator(name: str, trace: Trace, limit: int | None) -> None:
    result = simulate(trace, name, limit_bytes=limit)
    curve = result.curve
    assert (result.allocator, result.trace, result.device_ratio) == (name, "trace", None)
    assert result.peak_requested_bytes == trace.peak_bytes
    assert curve.events.tolist() == list(range(len(trace.steps)))
    assert result.peak_allocated_bytes == curve.allocated_bytes.max(initial=0)
    assert result.peak_reserved_bytes >= curve.reserved_bytes.max(initial=0)
    assert limit is None or result.peak_reserved_bytes <= limit
    assert all(curve.requested_bytes <= curve.allocated_bytes)
    assert all(curve.allocated_bytes <= curve.reserved_bytes)
    assert all(curve.largest_free_bytes <= curve.free_bytes)
    assert all((curve.fragmentation >= 0) & (curve.fragmentation < 1))
    failed = [f.buffer for f in result.failures]
    assert limit is not None or not failed
    for f in result.failures:
        assert trace.steps[f.event] == f.buffer
        assert trace.sizes[f.buffer] == f.size
        assert f.largest_free_bytes <= f.free_bytes <= (limit or 0)
        # PyTorch asks for a whole segment, the others for what they need.
        assert name == "pytorch" or f.size > f.largest_free_bytes // 512 * 512 - 512
    # Without what failed, the rest is served in the same way.
    served = [step for step in trace.steps.tolist() if max(step, ~step) not in failed]
    if name in ("bfc", "best_fit", "first_fit", "bfc_growing"):  # the others have given idle memory back
        again = simulate(Trace(served, trace.sizes, name="trace"), name, limit_bytes=limit)
        assert not again.failures
        assert again.peak_reserved_bytes == result.peak_reserved_bytes
        assert again.allocated_bytes == result.allocated_bytes


@every_allocator
def test_what_fails_is_left_out_and_its_free_ignored(name: str) -> None:
    trace = made(("a", 1, 4 * MIB), ("a", 2, 8 * MIB), ("f", 2), ("a", 3, 4 * MIB - 1), ("f", 1), ("f", 3))
    result = simulate(trace, name, limit_bytes=20 * MIB if name == "pytorch" else 8 * MIB)
    if name == "pytorch":  # its segment of 20 MiB holds all three
        assert not result.failures
    else:
        assert result.failures == (Failure(1, 1, 8 * MIB, 4 * MIB, 4 * MIB),)
        assert result.curve.requested_bytes.tolist() == [4 * MIB, 4 * MIB, 4 * MIB, 8 * MIB - 1, 4 * MIB - 1, 0]
    assert result.allocated_bytes == 0


@every_allocator
def test_no_bytes_take_no_memory(name: str) -> None:
    result = simulate(made(("a", 1, 0), ("a", 2, 0), ("f", 1)), name)
    assert result.peak_reserved_bytes == result.peak_allocated_bytes == result.creations == 0
    assert np.isnan(result.ratio)
    assert not result.failures
    empty = simulate(made(), name, limit_bytes=4 * MIB)
    assert empty.curve.events.size == empty.curve.fragmentation.size == empty.peak_allocated_bytes == 0


@every_allocator
def test_an_observer_sees_where_everything_lies(name: str) -> None:
    """Enough to draw memory over time: what is seen is what is there."""
    trace = made(
        *(("a", i, 700 * (i + 1)) for i in range(20)), *(("f", i) for i in range(0, 20, 2)), ("a", 20, 1 << 20)
    )
    allocator = ALLOCATORS[name](None)
    alive: dict[int, tuple[int, int]] = {}

    def observe(event: int, buffer: int, size: int, address: int | None) -> None:
        assert trace.steps[event] == (~buffer if address is None else buffer)
        if address is None:
            assert alive.pop(buffer)[1] == size
        else:
            alive[buffer] = address, size
        assert alive == allocator.chunks

    replay(trace, allocator, name, observe)
    assert sorted(alive) == [*range(1, 20, 2), 20]
    assert allocator.highest >= max(map(sum, alive.values()))


@every_allocator
def test_curves_are_an_even_sample_and_peaks_are_of_all_events(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = made(*itertools.chain.from_iterable((("a", i, 1000 * i), ("f", i)) for i in range(1, 51)))
    whole = simulate(trace, name)
    monkeypatch.setattr(_replay, "SAMPLES", 9)
    result = simulate(trace, name)
    assert len(result.curve.events) == 9
    assert result.curve.events[-1] == 99
    assert set(np.diff(result.curve.events).tolist()) == {11, 12}
    assert result.curve.reserved_bytes.tolist() == whole.curve.reserved_bytes[result.curve.events].tolist()
    assert result.peak_allocated_bytes == whole.peak_allocated_bytes >= 50_000


@pytest.mark.parametrize(("name", "allocator"), [(name, a) for name, row in TABLE.items() for a in row])
def test_real_programs_need_what_an_independent_simulation_found(name: str, allocator: str) -> None:
    result = simulate(public(name), allocator)
    assert result.ratio == pytest.approx(TABLE[name][allocator], rel=0.002)
    assert result.trace == name
    assert not result.failures


@pytest.mark.parametrize(
    ("allocator", "options", "error", "message"),
    [
        (
            "xla",
            {},
            ValueError,
            "allocator must be one of pool, bfc, bfc_growing, pytorch, cupy, rmm, best_fit, first_f",
        ),
        (None, {}, ValueError, "got None"),
        ("bfc", {"limit_bytes": 0}, ValueError, "limit_bytes must be at least 1, or None for no limit, got 0"),
        ("pool", {"limit_bytes": -5}, ValueError, "got -5"),
        ("bfc", {"limit_bytes": 1.5}, TypeError, "limit_bytes must be an integer, or None for no limit, got 1.5"),
        ("bfc", {"limit_bytes": True}, TypeError, "got True"),
        ("bfc", {"limit_bytes": "2GiB"}, TypeError, "got '2GiB'"),
        ("cupy", {"plan": object()}, ValueError, """plan is for the allocator "pool" only, got it for 'cupy'"""),
        ("rmm", {"max_classes": 16}, ValueError, """max_classes is for the allocator "pool" only, got it for 'rmm'"""),
    ],
)
def test_bad_arguments(allocator: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        simulate(made(("a", 1, 1)), allocator, **options)


def test_a_limit_may_be_of_numpy() -> None:
    assert simulate(made(("a", 1, 512)), "cupy", limit_bytes=np.int64(512)).failures == ()  # pyright: ignore[reportArgumentType]


def test_the_package_exports_them() -> None:
    assert arenax_stress.simulate is simulate
    assert isinstance(simulate(made(), "bfc"), arenax_stress.Result)

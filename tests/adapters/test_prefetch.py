"""What `prefetch` gives: values, order, sizes and errors, and what each mode of the pool makes of too few slots."""

import traceback
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

import arenax
from arenax_adapters.prefetch import prefetch
from tests.adapters.conftest import MakePool, assert_nothing_left

SHAPE = (4, 8)
SPEC = {"x": arenax.ArraySpec(SHAPE, "float32"), "y": arenax.ArraySpec((), "int32")}


def batch_of(i: int) -> dict[str, Any]:
    return {"x": np.full(SHAPE, i, np.float32), "y": np.int32(i)}


def batches(count: int) -> Iterator[dict[str, Any]]:
    for i in range(count):
        yield batch_of(i)


def number(batch: Any) -> int:
    """Which batch this is, all of it."""
    assert set(batch) == {"x", "y"}
    assert isinstance(batch["x"], jax.Array)
    assert batch["x"].shape == SHAPE
    (value,) = set(np.array(batch["x"]).ravel())
    assert value == int(batch["y"])
    return int(value)


@pytest.mark.parametrize("size", [1, 2, 7])
def test_batches_come_in_order(make_pool: MakePool, size: int):
    pool = make_pool()
    assert [number(batch) for batch in prefetch(batches(25), pool, size=size)] == list(range(25))
    assert_nothing_left(pool)


def test_any_iterable(make_pool: MakePool):
    class OldStyle:
        def __getitem__(self, i: int) -> np.ndarray:
            if i == 3:
                raise IndexError
            return np.full((2,), i, np.float32)

    pool = make_pool()
    for iterable in ([np.zeros(2), np.ones(2)], (), iter([np.ones(3)]), map(np.ones, [1, 2]), OldStyle()):
        expected = [1.0 * x for x in iterable] if not isinstance(iterable, Iterator) else None
        got = [np.array(x) for x in prefetch(iterable, pool)]
        if expected is not None:
            assert len(got) == len(expected)
            assert all(np.array_equal(a, b) for a, b in zip(got, expected, strict=True))
        else:
            assert got
    assert_nothing_left(pool)


def test_the_caller_may_reuse_his_buffer(make_pool: MakePool):
    def reusing() -> Iterator[np.ndarray]:
        buffer = np.zeros(SHAPE, np.float32)
        for i in range(20):
            buffer[:] = i
            yield buffer

    for i, x in enumerate(prefetch(reusing(), make_pool())):
        assert np.array(x).ravel().tolist() == [i] * x.size


def test_ragged_batches_come_with_their_sizes(make_pool: MakePool):
    pool = make_pool(ragged={"x": arenax.Ragged(0, arenax.SizeClasses.pow2(4, 16), pad_value=-1), "y": None})
    lengths = [3, 16, 1, 5, 8, 9]
    source = [{"x": np.arange(n, dtype=np.int32), "y": np.int32(n)} for n in lengths]
    for n, (batch, sizes) in zip(lengths, prefetch(source, pool, with_sizes=True), strict=True):
        x = np.array(batch["x"])
        assert x.shape == (max(4, 1 << (n - 1).bit_length()),)
        assert x[:n].tolist() == list(range(n))
        assert set(x[n:]) <= {-1}
        assert (int(sizes["x"]), sizes["y"]) == (n, None)
        assert sizes["x"].dtype == np.int32
    del batch, sizes
    assert_nothing_left(pool)


def test_dtypes_are_those_of_the_consumers_thread(make_pool: MakePool):
    # `with jax.enable_x64()` is thread-local.
    pool = make_pool()
    with jax.enable_x64(True):
        assert [x.dtype for x in prefetch([np.ones(3)], pool)] == [np.float64]
    assert [x.dtype for x in prefetch([np.ones(3)], pool)] == [np.float32]


def test_steady_after_warm_up(make_pool: MakePool):
    pool = make_pool(on_exhausted="wait")
    pool.reserve(SPEC, slots=4)
    next(prefetch(batches(1), pool))  # Compiles the landing.
    created = pool.stats().creation_count
    with pool.steady():
        assert [number(b) for b in prefetch(batches(200), pool, size=2)] == list(range(200))
    assert pool.stats().creation_count == created
    assert_nothing_left(pool)


def test_not_steady_reaches_the_consumer(make_pool: MakePool):
    pool = make_pool()
    with pytest.raises(arenax.NotSteady) as caught, pool.steady():
        next(prefetch(batches(1), pool))
    assert caught.value.cause == "creation"


# Errors. --------------------------------------------------------------------------------------------------------------


class BrokenData(Exception):
    pass


def failing_after(count: int) -> Iterator[dict[str, Any]]:
    yield from batches(count)
    raise BrokenData("record 3")


def test_an_error_of_the_iterable_comes_after_the_batches_before_it(make_pool: MakePool):
    pool = make_pool()
    ahead = prefetch(failing_after(3), pool, size=5)
    assert [number(next(ahead)) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(BrokenData, match="record 3") as caught:
        next(ahead)
    frames = [f.name for f in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[0] == "test_an_error_of_the_iterable_comes_after_the_batches_before_it"
    assert frames[-1] == "failing_after"
    assert "_land_ahead" not in frames  # The thread's own frame would keep alive what it holds.
    assert_nothing_left(pool)
    for _ in range(3):
        assert list(ahead) == []


def test_an_error_of_iter_itself(make_pool: MakePool):
    class Unopened:
        def __iter__(self) -> Iterator[Any]:
            raise FileNotFoundError("data.bin")

    ahead = prefetch(Unopened(), make_pool())
    with pytest.raises(FileNotFoundError, match=r"data\.bin"):
        next(ahead)
    assert list(ahead) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_error_that_is_no_exception(make_pool: MakePool, error: type[BaseException]):
    def leaving() -> Iterator[Any]:
        yield batch_of(0)
        raise error

    ahead = prefetch(leaving(), make_pool())
    assert number(next(ahead)) == 0
    with pytest.raises(error):
        next(ahead)


def test_an_error_of_the_landing(make_pool: MakePool):
    closed: list[int] = []

    def objects() -> Iterator[Any]:
        try:
            yield batch_of(0)
            yield {"x": np.array([object()]), "y": np.int32(1)}
            yield batch_of(2)
        finally:
            closed.append(1)

    pool = make_pool()
    ahead = prefetch(objects(), pool)
    assert number(next(ahead)) == 0
    with pytest.raises(TypeError, match="'x'"):
        next(ahead)
    assert closed == [1]
    assert list(ahead) == []
    assert_nothing_left(pool)


def test_a_landing_that_raises_stop_iteration_is_no_end(make_pool: MakePool):
    class Tricky:
        def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
            raise StopIteration

    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        next(prefetch([{"x": Tricky()}], make_pool()))
    assert isinstance(caught.value.__cause__, StopIteration)


def test_an_error_of_closing_the_iterable_is_noted_on_the_first(make_pool: MakePool):
    def objects() -> Iterator[Any]:
        try:
            yield np.array([object()])
        finally:
            raise OSError("disk")

    with pytest.raises(TypeError) as caught:
        next(prefetch(objects(), make_pool()))
    assert "disk" in "".join(traceback.format_exception(caught.value))


def test_a_closed_pool_reaches_the_consumer(make_pool: MakePool):
    pool = make_pool()
    ahead = prefetch(batches(10), pool, size=1)
    assert number(next(ahead)) == 0
    pool.close()
    # At most the one that was landed ahead, and is valid still, comes before the error.
    with pytest.raises(arenax.PoolClosed):
        for i in range(1, 4):
            assert number(next(ahead)) == i
    assert list(ahead) == []


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"iterable": 3}, TypeError, "iterable must .* got int"),
        ({"iterable": None}, TypeError, "iterable must"),
        ({"pool": None}, TypeError, "pool must .* got NoneType"),
        ({"size": 0}, ValueError, "size must be at least 1, got 0"),
        ({"size": -1}, ValueError, "at least 1"),
        ({"size": 2.0}, TypeError, "size must be an integer, got 2.0"),
        ({"size": True}, TypeError, "size must be an integer"),
    ],
)
def test_bad_arguments_raise_at_once(
    make_pool: MakePool, arguments: dict[str, Any], error: type[Exception], match: str
):
    with pytest.raises(error, match=match):
        prefetch(**{"iterable": batches(1), "pool": make_pool(), **arguments})


# Slots. ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_plain_loop_needs_two_slots_more_than_size(make_pool: MakePool, size: int):
    pool = make_pool(on_exhausted="raise")
    pool.reserve(SPEC, slots=size + 2)
    seen: list[int] = []
    for batch in prefetch(batches(300), pool, size=size):
        seen.append(number(batch))
    assert seen == list(range(300))
    del batch
    assert_nothing_left(pool)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_loop_that_drops_its_batch_needs_one_slot_more_than_size(make_pool: MakePool, size: int):
    pool = make_pool(on_exhausted="raise")
    pool.reserve(SPEC, slots=size + 1)
    seen: list[int] = []
    for batch in prefetch(batches(300), pool, size=size):  # Not `enumerate`, which keeps the last one too.
        seen.append(number(batch))
        del batch
    assert seen == list(range(300))
    assert_nothing_left(pool)


def test_raise_where_the_consumer_holds_too_many(make_pool: MakePool):
    pool = make_pool(on_exhausted="raise")
    pool.reserve(SPEC, slots=3)
    ahead = prefetch(batches(9), pool, size=2)
    held: list[Any] = []
    with pytest.raises(arenax.PoolExhausted):
        for batch in ahead:
            held.append(batch)
            del batch
    assert [number(b) for b in held] == [0, 1, 2]
    held.clear()
    assert list(ahead) == []
    assert_nothing_left(pool)


def test_wait_raises_where_the_consumer_holds_every_slot(make_pool: MakePool):
    pool = make_pool(on_exhausted="wait")
    pool.reserve(SPEC, slots=3)
    ahead = prefetch(batches(9), pool, size=2)
    held = [next(ahead) for _ in range(3)]
    with pytest.raises(arenax.PoolExhausted) as caught:  # And not a deadlock.
        next(ahead)
    assert (caught.value.leased_count, caught.value.slot_count) == (6, 6)
    assert [number(b) for b in held] == [0, 1, 2]
    held.clear()
    assert list(ahead) == []
    assert_nothing_left(pool)


def test_wait_times_out_where_the_pool_has_a_timeout(make_pool: MakePool):
    pool = make_pool(on_exhausted="wait", timeout=0.01)
    pool.reserve(SPEC, slots=1)
    ahead = prefetch(batches(9), pool, size=1)
    held = next(ahead)
    with pytest.raises(TimeoutError):
        next(ahead)
    assert number(held) == 0


def test_wait_with_few_slots_lands_less_ahead(make_pool: MakePool):
    pool = make_pool(on_exhausted="wait")
    pool.reserve(SPEC, slots=2)
    assert [number(b) for b in prefetch(batches(300), pool, size=6)] == list(range(300))
    assert pool.stats().slot_count == 4
    assert_nothing_left(pool)


def test_wait_with_one_slot(make_pool: MakePool):
    pool = make_pool(on_exhausted="wait")
    pool.reserve(SPEC, slots=1)
    seen: list[int] = []
    for batch in prefetch(batches(300), pool, size=2):
        seen.append(number(batch))
        del batch
    assert seen == list(range(300))
    assert_nothing_left(pool)


def test_grow_makes_slots(make_pool: MakePool):
    pool = make_pool()
    held = list(prefetch(batches(6), pool, size=2))
    assert [number(b) for b in held] == list(range(6))
    assert pool.stats().slot_count == 12
    del held
    assert_nothing_left(pool)


def test_spill_gives_fresh_arrays(make_pool: MakePool):
    pool = make_pool(on_exhausted="spill")
    pool.reserve(SPEC, slots=2)
    with pytest.warns(RuntimeWarning, match="spill|outside"):
        held = list(prefetch(batches(6), pool, size=2))
    assert [number(b) for b in held] == list(range(6))
    assert pool.stats().spill_count == 8
    assert pool.stats().slot_count == 4
    del held
    assert_nothing_left(pool)

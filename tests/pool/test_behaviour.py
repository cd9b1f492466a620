"""What every pool does, on the fake device and on the real one: puts and steps."""

from typing import Any

import numpy as np
import pytest

import arenax

from .conftest import MakePool, address, arenas, copies, donate, view

CLASSES = arenax.SizeClasses.explicit([4, 8, 16])
# Each hints once at what donating costs.
DONATES = pytest.mark.filterwarnings("ignore:an array of .* was donated away:RuntimeWarning")
X = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_put_returns_the_batchs_tree_with_its_values(make_pool: MakePool) -> None:
    pool = make_pool()
    batch = {"x": X, "y": (np.arange(3, dtype=np.int32), [np.bool_(True), 2.5, 7])}
    got = pool.put(batch)
    assert set(got) == {"x", "y"}
    assert isinstance(got["y"], tuple)
    np.testing.assert_array_equal(got["x"], X)
    np.testing.assert_array_equal(got["y"][0], [0, 1, 2])
    kinds = [(np.asarray(x).dtype.name, np.asarray(x).item()) for x in got["y"][1]]
    assert kinds == [("bool", True), ("float32", 2.5), ("int32", 7)]


def test_an_empty_batch_takes_nothing(make_pool: MakePool) -> None:
    for mode in ("grow", "wait"):
        pool = make_pool(on_exhausted=mode)
        assert pool.put({}) == {}
        assert pool.put(None) is None
        assert pool.put((), with_sizes=True) == ((), ())
        assert pool.stats().slot_count == 0


def test_a_dropped_array_returns_its_slot_and_the_next_one_lies_there(make_pool: MakePool) -> None:
    pool = make_pool()
    pool.reserve(X, slots=1)
    seen = set()
    for i in range(20):
        x = pool.put(X + i)
        seen.add(address(x))
        np.testing.assert_array_equal(x, X + i)
        assert pool.stats().leased_count == 1
        del x
        assert pool.stats().leased_count == 0
    assert len(seen) == 1
    stats = pool.stats()
    assert (stats.hit_count, stats.creation_count, stats.copy_count, stats.write_count) == (20, arenas(pool), 0, 20)
    assert stats.written_bytes == 20 * X.nbytes * copies(pool)


def test_arrays_alive_at_once_lie_apart(make_pool: MakePool) -> None:
    pool = make_pool()
    held = [pool.put(X + i) for i in range(5)]
    assert len({address(x) for x in held}) == 5
    for i, x in enumerate(held):
        np.testing.assert_array_equal(x, X + i)
    assert pool.stats().creation_count == 5


def test_the_callers_array_is_free_when_put_returns(make_pool: MakePool) -> None:
    pool = make_pool()
    source = X.copy()
    x = pool.put(source)
    with pool.step() as step:
        y = step.put(source)
        source[...] = -1
        np.testing.assert_array_equal(x, X)
        np.testing.assert_array_equal(y, X)


def test_a_ragged_axis_is_padded_and_never_shows_the_last_tenant(make_pool: MakePool) -> None:
    pool = make_pool(ragged=arenax.Ragged(0, CLASSES, pad_value=7))
    for n in (8, 5, 6, 8, 7, 5, 16, 9, 10, 0, 3):
        x, size = pool.put(np.full((n, 2), np.nan, np.float32), with_sizes=True)
        del x, size
        x, size = pool.put(np.full((n, 2), n, np.float32), with_sizes=True)
        capacity = CLASSES.class_of(n)
        assert np.shape(x) == (capacity, 2)
        assert (int(np.asarray(size)), np.asarray(size).dtype) == (n, np.int32)
        assert (np.asarray(x)[:n] == n).all()
        assert (np.asarray(x)[n:] == 7).all()
        del x, size


def test_a_ragged_prefix_reaches_the_leaves_below_it(make_pool: MakePool) -> None:
    ragged = {"tokens": arenax.Ragged(-1, CLASSES), "label": None, "pair": arenax.Ragged(0, CLASSES)}
    pool = make_pool(ragged=ragged)
    batch = {"tokens": np.ones((2, 5), np.int32), "label": X, "pair": [np.ones(3, np.int8), np.ones(9, np.int8)]}
    got, sizes = pool.put(batch, with_sizes=True)
    assert [np.shape(x) for x in (got["tokens"], got["label"], *got["pair"])] == [(2, 8), (2, 3), (4,), (16,)]
    assert sizes["label"] is None
    assert [int(np.asarray(s)) for s in (sizes["tokens"], *sizes["pair"])] == [5, 3, 9]
    with pool.step() as step:
        _, again = step.put(batch, with_sizes=True)
        assert int(np.asarray(again["pair"][1])) == 9


def test_sizes_waste_counts_as_requested_bytes(make_pool: MakePool) -> None:
    pool = make_pool(ragged=arenax.Ragged(0, CLASSES))
    x = pool.put(np.ones((5, 2), np.float32))
    stats = pool.stats()
    assert (stats.leased_bytes, stats.requested_bytes) == (64 * copies(pool), 40 * copies(pool))
    assert stats.internal_waste == pytest.approx(1 - 40 / 64)
    del x
    assert pool.stats().requested_bytes == 0


@pytest.mark.parametrize(
    ("ragged", "batch", "error", "says"),
    [
        (arenax.Ragged(1, CLASSES), np.ones((2, 17), np.int32), arenax.NoSizeClass, "axis 1 .* size 17.* 16"),
        (arenax.Ragged(1, CLASSES), np.ones(3, np.int32), ValueError, "no axis 1"),
        ({"a": arenax.Ragged(0, CLASSES)}, {"b": np.ones(3)}, ValueError, "does not match the batch"),
        ([arenax.Ragged(0, CLASSES)], (np.ones(3),), ValueError, "does not match the batch"),
        (arenax.Ragged(0, CLASSES, pad_value=-1), np.ones(3, np.uint8), ValueError, "pad_value -1 does not fit"),
        (None, {"good": np.ones(3), "bad": np.array(["a"], object)}, TypeError, "bad.*object"),
        (None, {"good": np.ones(3), "bad": "text"}, TypeError, "bad"),
        (None, {"good": np.ones(3), "bad": object()}, TypeError, "bad"),
        (None, {"good": np.ones(3), "bad": np.array("2020-01-01", "datetime64[D]")}, TypeError, "bad"),
        (None, {"good": np.ones(3), "bad": 2**40}, OverflowError, "bad"),
    ],
)
def test_a_bad_leaf_is_refused_by_name_and_nothing_lands(
    make_pool: MakePool, ragged: object, batch: object, error: type[Exception], says: str
) -> None:
    pool = make_pool(ragged=ragged)
    for draw in (pool.put, lambda b: pool.step().__enter__().put(b)):
        with pytest.raises(error, match=says):
            draw(batch)
    stats = pool.stats()
    assert (stats.slot_count, stats.leased_count, stats.write_count) == (0, 0, 0)


def test_a_step_gives_everything_back_also_when_its_body_raises(make_pool: MakePool) -> None:
    pool = make_pool()
    for i in range(3):
        try:
            with pool.step() as step:
                step.put({"a": X, "b": X})
                step.zeros((4,))
                assert pool.stats().leased_count == 3
                if i == 1:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
        assert pool.stats().leased_count == 0
    assert pool.stats().creation_count == 3


def test_an_array_kept_past_its_step_is_its_own_data_or_deleted(make_pool: MakePool) -> None:
    pool = make_pool()
    with pool.step() as step:
        stale = step.put(X)
    np.testing.assert_array_equal(stale, X)
    with pool.step() as step:
        step.put(X * 0)
        with pytest.raises(RuntimeError, match="deleted"):
            np.asarray(stale)


def test_keep_takes_an_array_out_for_good(make_pool: MakePool) -> None:
    pool = make_pool()
    with pool.step() as step:
        kept, other = step.put({"a": X, "b": X + 1}).values()
        assert step.keep({"k": kept})["k"] is kept
        with pytest.raises(ValueError, match="this step drew"):
            step.keep([other, np.ones(3)])
    assert pool.stats().slot_count == 2
    assert pool.stats().creation_count == 3
    for _ in range(3):
        with pool.step() as step:
            step.put({"a": X * 0, "b": X * 0})
            np.testing.assert_array_equal(kept, X)


def test_factories_are_those_of_jax_numpy(make_pool: MakePool) -> None:
    import jax.numpy as jnp

    pool = make_pool(ragged=arenax.Ragged(0, CLASSES))
    for _ in range(2):
        with pool.step() as step:
            for mine, theirs in [
                (step.zeros((2, 3)), jnp.zeros((2, 3))),
                (step.zeros(5, "int32"), jnp.zeros(5, "int32")),
                (step.ones((3,), np.float16), jnp.ones((3,), np.float16)),
                (step.full((2,), 3), jnp.full((2,), 3)),
                (step.full((), 2.5, "bfloat16"), jnp.full((), 2.5, "bfloat16")),
                (step.arange(5), jnp.arange(5)),
                (step.arange(2, 9, 3), jnp.arange(2, 9, 3)),
                (step.arange(0, 1, 0.25), jnp.arange(0, 1, 0.25)),
                (step.arange(3, dtype="float32"), jnp.arange(3, dtype="float32")),
                (step.eye(3), jnp.eye(3)),
                (step.eye(2, 3, 1, "int8"), jnp.eye(2, 3, 1, "int8")),
                (step.array([[1, 2], [3, 4]]), jnp.array([[1, 2], [3, 4]])),
                (step.array([1.5], "int32"), jnp.array([1.5], "int32")),
            ]:
                assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
                np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))
            empty = step.empty((7, 2), "uint8")
            assert (empty.shape, empty.dtype) == ((7, 2), np.uint8)
    assert pool.stats().leased_count == 0


def test_a_step_is_used_once_and_inside_its_scope(make_pool: MakePool) -> None:
    pool = make_pool()
    step = pool.step()
    with pytest.raises(RuntimeError, match="new"):
        step.put(X)
    with step:
        with pytest.raises(RuntimeError, match="entered once"), step:
            pass
    for use in (lambda: step.put(X), lambda: step.zeros(3), lambda: step.keep(X)):
        with pytest.raises(RuntimeError, match="over"):
            use()


def test_bad_factory_arguments_take_no_slot(make_pool: MakePool) -> None:
    pool = make_pool()
    with pool.step() as step:
        for call, error in [
            (lambda: step.zeros((-1,)), ValueError),
            (lambda: step.zeros("ab"), TypeError),
            (lambda: step.zeros(3, "datetime64[s]"), TypeError),
            (lambda: step.full((2,), [1, 2]), ValueError),
            (lambda: step.full((2,), 300, "int8"), OverflowError),
        ]:
            with pytest.raises(error):
                call()
    assert pool.stats().slot_count == 0


@DONATES
def test_a_donated_array_is_replaced_and_counted(make_pool: MakePool) -> None:
    pool = make_pool()
    pool.reserve(X, slots=2)
    for i in range(3):
        with pool.step() as step:
            donate(step.put(X))
        x = pool.put(X)
        donate(x)
        del x
        with pool.step() as step:
            np.testing.assert_array_equal(step.put(X + i), X + i)
    stats = pool.stats()
    assert (stats.slot_count, stats.leased_count, stats.spill_count, stats.copy_count) == (2 * arenas(pool), 0, 0, 0)
    assert stats.creation_count > 2


@DONATES
@pytest.mark.parametrize("fill", [0, None])
def test_an_array_donated_away_by_the_last_borrower_is_not_handed_on(make_pool: MakePool, fill: int | None) -> None:
    pool = make_pool()
    for draw in (lambda step: step.zeros((4,)), lambda step: step.empty((4,)), lambda step: step.put(np.zeros(4))):
        with pool.step() as step:
            donate(draw(step))
        with pool.lease((4,), "float32", fill=fill) as lease:
            assert np.shape(np.asarray(lease.array)) == (4,)
        with pool.step() as step:
            donate(draw(step))
        with pool.step() as step:
            assert not step.zeros((4,)).is_deleted()
            assert not step.empty((4,)).is_deleted()
        assert pool.stats().leased_count == 0


@DONATES
def test_a_donated_array_is_named_under_steady(make_pool: MakePool) -> None:
    pool = make_pool()
    pool.reserve(X, slots=1)
    with pool.step() as step:
        donate(step.put(X))
    with pytest.raises(arenax.NotSteady, match="donated away") as error, pool.steady(), pool.step() as step:
        step.put(X)
    assert error.value.cause == "creation"
    assert "test_behaviour.py" in error.value.call_site
    assert pool.stats().leased_count == 0
    with pool.step() as step:
        np.testing.assert_array_equal(step.put(X), X)


def test_a_view_makes_donation_a_copy_which_is_adopted_and_counted(make_pool: MakePool) -> None:
    pool = make_pool()
    pool.reserve(X, slots=1)
    with pool.step() as step:
        x = step.put(X)
        held, before = view(x), address(x)
        del x
    with pool.step() as step:
        x = step.put(X + 1)
        assert address(x) != before
        np.testing.assert_array_equal(x, X + 1)
        del x
    np.testing.assert_array_equal(getattr(held, "values", held), X)
    assert pool.stats().copy_count == 1
    del held
    with pool.step() as step:
        step.put(X)
    assert pool.stats().copy_count == 1
    with pool.step() as step:
        held = view(step.put(X))
    with pytest.raises(arenax.NotSteady, match="view") as error, pool.steady(), pool.step() as step:
        step.put(X)
    assert error.value.cause == "copy"
    assert held is not None


def test_repr_and_table_tell_what_it_holds(make_pool: MakePool) -> None:
    pool = make_pool(budget="1KiB", name="train")
    x = pool.put({"a": X, "b": np.ones(3, np.int32)})
    assert "'train'" in repr(pool)
    budget = f"{arenas(pool)}.0 KiB"
    assert f"2 slots in 2 classes, 2 leased, {36 * copies(pool)} B of {budget} reserved" in repr(pool)
    table = str(pool.stats())
    for text in ("float32[2,3]", "int32[3]", "2 creations", budget):
        assert text in table
    del x


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"on_exhausted": "explode"}, ValueError, "grow, spill, wait, raise"),
        ({"on_exhausted": "wait", "timeout": -1}, ValueError, "timeout"),
        ({"on_exhausted": "wait", "timeout": float("nan")}, ValueError, "timeout"),
        ({"on_exhausted": "wait", "timeout": "1"}, TypeError, "timeout"),
        ({"timeout": 1}, ValueError, "wait"),
        ({"budget": 0.5}, ValueError, "bytes_limit"),
        ({"budget": -1}, ValueError, "budget"),
        ({"ragged": 3}, TypeError, "Ragged"),
        ({"ragged": {"x": "y"}}, TypeError, "Ragged"),
        ({"name": 3}, TypeError, "name"),
    ],
)
def test_bad_options_are_refused(
    make_pool: MakePool, options: dict[str, object], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        make_pool(**options)


def test_names_are_numbered() -> None:
    assert arenax.BufferPool().name != arenax.BufferPool().name


def test_a_bad_placement_is_refused() -> None:
    for bad in ("cpu", 0, [1]):
        with pytest.raises(TypeError, match="placement"):
            arenax.BufferPool(bad)


def test_a_failed_draw_is_not_of_its_step(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool()
    with pool.step() as step:
        with monkeypatch.context() as patch:

            def land(*args: Any) -> None:
                raise OSError("a broken landing")

            patch.setattr(pool.landing, "land", land)
            with pytest.raises(OSError, match="a broken landing"):
                step.put(np.ones(4, np.float32))
        lease = pool.lease((4,), "float32", fill=7)
        assert not step.drew(lease.array)
        with pytest.raises(ValueError, match="this step drew"):
            step.keep(lease.array)
        assert (np.asarray(lease.array) == 7).all()
        lease.release()
    assert pool.stats().write_count == 1  # Begun, and failed.


def test_a_stale_loan_never_passes_its_tenants_slot_on(make_pool: MakePool) -> None:
    pool = make_pool()
    first = pool.lease((4,), "float32")
    stale = first._slot.loan
    first.release()
    second = pool.lease((4,), "float32", fill=2)
    pool.arena.give_back(stale)
    third = pool.lease((4,), "float32", fill=3)
    assert (np.asarray(second.array) == 2).all()
    assert (np.asarray(third.array) == 3).all()
    assert pool.stats().leased_count == 2


@pytest.mark.parametrize("leaves", [1, 3])
def test_a_slot_that_goes_straight_out_again_is_counted_as_any_other(make_pool: MakePool, leaves: int) -> None:
    pool = make_pool()
    batch = np.ones(4, np.float32) if leaves == 1 else [np.ones(4, np.float32)] * leaves
    for _ in range(5):
        with pool.step() as step:
            step.put(batch)
            assert pool.stats().leased_count == leaves
    stats = pool.stats()
    nbytes = 16 * leaves * copies(pool)
    assert (stats.hit_count, stats.write_count, stats.written_bytes) == (4 * leaves, 5 * leaves, 5 * nbytes)
    assert (stats.peak_leased_bytes, stats.peak_idle_bytes, stats.leased_count) == (nbytes, nbytes, 0)

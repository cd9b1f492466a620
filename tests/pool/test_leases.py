"""What every lease does, on the fake device and on the real one."""

import numpy as np
import pytest

import arenax

from .conftest import MakePool, address, donate

# Each hints once at what donating costs.
DONATES = pytest.mark.filterwarnings("ignore:an array of .* was donated away:RuntimeWarning")


def test_lease_writes_a_part_and_refuses_what_would_leave_the_slot(make_pool: MakePool) -> None:
    pool = make_pool()
    with pool.lease((4, 3), "float32") as lease:
        where = address(lease.array)
        lease.write(np.ones((2, 2)), at=(2, 1))
        expected = np.zeros((4, 3), np.float32)
        expected[2:, 1:] = 1
        np.testing.assert_array_equal(lease.array, expected)
        for at in ((3, 0), (-1, 0), (0, 2), (4, 0)):
            with pytest.raises(arenax.OutOfBounds, match="would leave the slot") as error:
                lease.write(np.ones((2, 2), np.float32), at=at)
            assert (error.value.at, error.value.slot_shape) == (at, (4, 3))
        for value, error in [
            (np.ones(3), ValueError),
            (np.array([["a"]], object), TypeError),
            (np.ones((1, 1), np.complex64), TypeError),
        ]:
            with pytest.raises(error):
                lease.write(value)
        with pytest.raises(ValueError, match="one start for each"):
            lease.write(np.ones((1, 1)), at=(0,))
        for at in ((0.9, 0), 1):
            with pytest.raises(TypeError, match="at must be a tuple"):
                lease.write(np.ones((1, 1)), at=at)
        with pytest.raises(ValueError, match="scalar"):
            lease.fill(np.ones(2))
        lease.write(np.ones((0, 3), np.float32), at=(4, 0))
        np.testing.assert_array_equal(lease.array, expected)
        lease.write(True * np.ones((1, 1), bool))
        assert np.asarray(lease.array)[0, 0] == 1
        assert address(lease.array) == where
    assert pool.stats().copy_count == 0


def test_lease_append_keeps_a_cursor(make_pool: MakePool) -> None:
    pool = make_pool()
    with pool.lease((5, 2), "int32", fill=-1) as lease:
        lease.append([[1, 1]])
        lease.append(np.full((3, 2), 2))
        assert lease.cursor == 4
        with pytest.raises(arenax.OutOfBounds):
            lease.append(np.ones((2, 2), np.int32))
        assert lease.cursor == 4
        np.testing.assert_array_equal(lease.array, [[1, 1], [2, 2], [2, 2], [2, 2], [-1, -1]])
        lease.fill(9)
        assert lease.cursor == 0
        assert (np.asarray(lease.array) == 9).all()


def test_lease_update_runs_in_place_and_leaves_the_slot_on_a_bad_function(make_pool: MakePool) -> None:
    pool = make_pool()
    add = lambda slot, x: slot + x  # noqa: E731
    with pool.lease((3,), "float32") as lease:
        where = address(lease.array)
        for _ in range(3):
            lease.update(add, np.float32(2))
        np.testing.assert_array_equal(lease.array, [6, 6, 6])
        lease.update(add, lease.array)  # The slot's own array as another argument.
        lease.update(lambda slot: slot * 0 + 6)
        with pytest.raises(TypeError, match=r"float32\[3\]"):
            lease.update(lambda slot: slot[:2])
        with pytest.raises(ZeroDivisionError):
            lease.update(lambda slot: slot * (1 // 0))
        np.testing.assert_array_equal(lease.array, [6, 6, 6])
        assert address(lease.array) == where
    assert pool.stats().creation_count == 1


def test_a_lease_is_returned_once_and_refuses_use_after(make_pool: MakePool) -> None:
    pool = make_pool()
    lease = pool.lease((4,), "float32")
    assert (lease.shape, lease.dtype, str(lease.size_class)[:10]) == ((4,), np.float32, "float32[4]")
    assert lease.device is not None
    assert "leased" in repr(lease)
    lease.release()
    assert lease.released
    assert "released" in repr(lease)
    tenant = pool.lease((4,), "float32", fill=5)
    for use in (
        lease.release,
        lease.detach,
        lambda: lease.array,
        lambda: lease.write(np.ones(4)),
        lambda: lease.append(np.ones(4)),
        lambda: lease.fill(0),
        lambda: lease.update(lambda x: x),
    ):
        with pytest.raises(arenax.LeaseReleased, match=r"float32\[4\]"):
            use()
    assert pool.stats().leased_count == 1
    np.testing.assert_array_equal(tenant.array, [5, 5, 5, 5])
    tenant.release()


def test_a_stale_loan_cannot_return_the_next_tenants_slot(make_pool: MakePool) -> None:
    pool = make_pool()
    first = pool.lease((4,), "float32")
    stale = first._slot.loan
    first.release()
    second = pool.lease((4,), "float32")
    pool.arena.give_back(stale)
    pool.arena.give_back(stale)
    assert pool.stats().leased_count == 1
    second.release()
    assert pool.stats().leased_count == 0


def test_a_dropped_lease_comes_back(make_pool: MakePool) -> None:
    pool = make_pool()
    lease = pool.lease((4,), "float32")
    assert pool.stats().leased_count == 1
    del lease
    assert pool.stats().leased_count == 0


def test_detach_leaves_the_pool_and_its_slot_is_replaced(make_pool: MakePool) -> None:
    pool = make_pool()
    lease = pool.lease((4,), "float32", fill=3)
    array = lease.detach()
    assert lease.released
    stats = pool.stats()
    assert (stats.slot_count, stats.leased_count, stats.creation_count) == (1, 0, 2)
    for _ in range(3):
        pool.lease((4,), "float32", fill=0).release()
    np.testing.assert_array_equal(array, [3, 3, 3, 3])


@pytest.mark.parametrize("fill", [0, 1.5, None])
def test_a_lease_is_filled_unless_told_otherwise(make_pool: MakePool, fill: float | None) -> None:
    pool = make_pool()
    for _ in range(3):
        with pool.lease((4,), "float32", fill=fill) as lease:
            if fill is not None:
                assert (np.asarray(lease.array) == fill).all()
            lease.write(np.full(4, 8.0))
    for bad, error in (([1, 2], ValueError), ("x", ValueError)):
        with pytest.raises(error):
            pool.lease((4,), "float32", fill=bad)
    with pytest.raises(TypeError):
        pool.lease((4,), "object")
    assert pool.stats().leased_count == 0


@DONATES
def test_a_lease_whose_array_was_donated_away_says_so_and_goes_on(make_pool: MakePool) -> None:
    pool = make_pool()
    for operation in (
        lambda x: x.fill(0),
        lambda x: x.fill(1),
        lambda x: x.write(np.ones(4)),
        lambda x: x.append([1.0]),
    ):
        with pool.lease((4,), "float32") as lease:
            donate(lease.array)
            with pytest.raises((RuntimeError, ValueError), match=r"deleted|donated"):
                operation(lease)
            np.testing.assert_array_equal(lease.array, np.zeros(4))
    assert pool.stats().slot_count == 1

"""Pools over shardings: a landing writes each device's part in place, and the array is that of `device_put`."""

import gc
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import arenax

SPECS = [P("data"), P(None, "data"), P("data", "model"), P(("data", "model")), P(), P(None, "model")]
CLASSES = arenax.SizeClasses.explicit([8, 16, 32])


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("data", "model"))


def pointers(array: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def like(array: jax.Array, expected: jax.Array) -> None:
    """Bit for bit, and shard for shard."""
    assert array.sharding == expected.sharding
    assert array.committed == expected.committed
    np.testing.assert_array_equal(np.array(array), np.array(expected))
    for mine, other in zip(array.addressable_shards, expected.addressable_shards, strict=True):
        assert (mine.device, mine.index) == (other.device, other.index)
        np.testing.assert_array_equal(np.array(mine.data), np.array(other.data))


@pytest.mark.parametrize("landing", ["host", "ring"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_put_is_what_device_put_gives(mesh: Any, spec: P, landing: str) -> None:
    sharding = NamedSharding(mesh, spec)
    with arenax.BufferPool(sharding, landing=landing) as pool:
        seen: set[tuple[int, ...]] = set()
        for i in range(3):
            value = np.arange(128, dtype=np.float32).reshape(16, 8) + i
            got = pool.put(value)
            like(got, jax.device_put(value, sharding))
            seen.add(tuple(pointers(got)))
            del got
        assert len(seen) == 1
        stats = pool.stats()
        assert (stats.creation_count, stats.hit_count, stats.copy_count, stats.spill_count) == (1, 2, 0, 0)
        assert stats.reserved_bytes == sum(
            shard.data.nbytes for shard in jax.device_put(value, sharding).addressable_shards
        )
        pool.check()


@given(
    data=st.data(),
    spec=st.sampled_from([P("data"), P(None, "data"), P("model", "data")]),
    axis=st.sampled_from([0, 1]),
)
def test_ragged_axes_may_be_sharded(data: st.DataObject, spec: P, axis: int) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    sharding = NamedSharding(mesh, spec)
    key = (spec, axis)
    if key not in _pools:
        _pools[key] = arenax.BufferPool(sharding, arenax.Ragged(axis, CLASSES, pad_value=-1))
    pool = _pools[key]
    for _ in range(2):
        n = data.draw(st.integers(0, 32))
        shape = (n, 8) if axis == 0 else (8, n)
        value = np.random.default_rng(n).standard_normal(shape).astype(np.float32)
        got, size = pool.put(value, with_sizes=True)
        capacity = CLASSES.class_of(n)
        padded = np.full((capacity, 8) if axis == 0 else (8, capacity), -1, np.float32)
        padded[tuple(slice(k) for k in shape)] = value
        like(got, jax.device_put(padded, sharding))
        assert int(size) == n
        assert size.sharding == NamedSharding(mesh, P())
        del got, size
    pool.check()


_pools: dict[Any, arenax.BufferPool] = {}


def test_the_step_compiles_once_and_the_sharding_is_one_object(mesh: Any) -> None:
    sharding = NamedSharding(mesh, P("data"))
    compiled: list[tuple[int, ...]] = []

    @jax.jit
    def train_step(batch: Any) -> Any:
        compiled.append(batch["x"].shape)
        return batch["x"].sum() + batch["y"].sum()

    batch = {"x": np.ones((8, 6), np.float32), "y": np.arange(8, dtype=np.float32)}
    with arenax.BufferPool(sharding) as pool:
        with pool.step() as step:
            train_step(step.put(batch))
        seen: set[int] = set()
        with pool.steady():
            for i in range(20):
                with pool.step() as step:
                    drawn = step.put({"x": batch["x"] * i, "y": batch["y"]})
                    seen.add(id(drawn["x"].sharding))
                    assert float(train_step(drawn)) == 48 * i + 28
                x = pool.put(batch)
                del x
        assert len(seen) == 1
        assert len(compiled) == 1
        assert pool.stats().copy_count == 0


def test_leaves_may_lie_differently(mesh: Any) -> None:
    places = {"x": NamedSharding(mesh, P("data")), "rest": NamedSharding(mesh, P(None, "model"))}
    batch = {"x": np.ones((8, 3), np.float32), "rest": [np.ones((3, 4), np.int32), np.zeros((5, 2), np.int8)]}
    with arenax.BufferPool(places, on_exhausted="raise") as pool:
        pool.reserve(batch, slots=1)
        assert pool.stats().slot_count == 3
        got = pool.put(batch)
        jax.tree.map(lambda a, b: like(a, b), got, jax.device_put(batch, jax.tree.broadcast(places, batch)))
        with pytest.raises(arenax.PoolExhausted, match="float32"):
            pool.put(batch)
        with pytest.raises(ValueError, match="placement does not match the batch"):
            pool.put(np.ones(3, np.float32))
        with pytest.raises(ValueError, match=r"say with device=NamedSharding"):
            pool.lease((8,))
        del got


def test_part_of_the_mesh_may_hold_a_leaf(mesh: Any) -> None:
    half = jax.sharding.Mesh(mesh.devices[:2], mesh.axis_names)
    places = {"a": NamedSharding(mesh, P("data")), "b": NamedSharding(half, P("model"))}
    batch = {"a": np.arange(8, dtype=np.float32), "b": np.arange(4, dtype=np.float32)}
    with arenax.BufferPool(places) as pool:
        for _ in range(2):
            got = pool.put(batch)
            for name in batch:
                like(got[name], jax.device_put(batch[name], places[name]))
            del got
        assert pool.stats().creation_count == 2


def test_a_source_on_the_devices_lands_too(mesh: Any) -> None:
    sharding = NamedSharding(mesh, P("data"))
    value = np.arange(32, dtype=np.float32).reshape(8, 4)
    sources = [
        jax.device_put(value, sharding),
        jax.device_put(value, NamedSharding(mesh, P(None, "data"))),
        jax.device_put(value),
        jnp.asarray(value),
    ]
    with arenax.BufferPool(sharding) as pool:
        for source in sources:
            got = pool.put(source)
            like(got, jax.device_put(value, sharding))
            assert got is not source
            assert pointers(got) != pointers(source)
            del got
        pool.check()


def test_one_shard_that_is_donated_away_is_found(mesh: Any) -> None:
    sharding = NamedSharding(mesh, P("data", "model"))
    value = np.ones((4, 2), np.float32)
    eat = jax.jit(lambda x: x * 1, donate_argnums=0)
    with arenax.BufferPool(sharding) as pool:
        for draw in (pool.put, lambda v: pool.lease((4, 2)).array):
            got = draw(value)
            shard = got.addressable_shards[3].data
            eat(shard)
            assert not got.is_deleted()
            del got, shard
            gc.collect()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "an array of .* was donated away", RuntimeWarning)
                np.testing.assert_array_equal(np.array(pool.put(value)), value)
            with pool.lease((4, 2)) as lease:
                assert not np.array(lease.array).any()
        pool.check()
        assert pool.stats().leased_count == 0


def test_a_view_of_one_shard_is_a_copy_that_is_counted(mesh: Any) -> None:
    sharding = NamedSharding(mesh, P("data"))
    with arenax.BufferPool(sharding) as pool:
        with pool.step() as step:
            seen = np.asarray(step.put(np.ones(8, np.float32)).addressable_shards[2].data)
        with pool.step() as step:
            np.testing.assert_array_equal(np.array(step.put(np.zeros(8, np.float32))), np.zeros(8))
        assert (seen == 1).all()
        assert pool.stats().copy_count >= 1
        with pool.step() as step:
            seen = np.asarray(step.put(np.ones(8, np.float32)).addressable_shards[2].data)
        with pytest.raises(arenax.NotSteady, match=r"is alive, on .*:"), pool.steady(), pool.step() as step:
            step.put(np.zeros(8, np.float32))
        pool.check()


def test_leases_write_append_and_update_over_shards(mesh: Any) -> None:
    for spec in SPECS[2:5]:
        sharding = NamedSharding(mesh, spec)
        expected = np.zeros((16, 8), np.float32)
        with arenax.BufferPool(sharding) as pool, pool.lease((16, 8)) as lease:
            where = pointers(lease.array)
            patch = np.arange(15, dtype=np.float32).reshape(5, 3)
            lease.write(patch, at=(6, 2))
            expected[6:11, 2:5] = patch
            lease.append(np.full((3, 8), 7, np.float32))
            expected[:3] = 7
            lease.write(jnp.ones((2, 2)), at=(14, 6))
            expected[14:, 6:] = 1
            like(lease.array, jax.device_put(expected, sharding))
            lease.update(lambda x, y: x * 2 + y, jnp.float32(1))
            like(lease.array, jax.device_put(expected * 2 + 1, sharding))
            with pytest.raises(arenax.OutOfBounds):
                lease.write(patch, at=(12, 0))
            lease.fill(3)
            like(lease.array, jax.device_put(np.full((16, 8), 3, np.float32), sharding))
            assert pointers(lease.array) == where
            assert pool.stats().copy_count == 0


def test_steps_draw_and_keep(mesh: Any) -> None:
    sharding = NamedSharding(mesh, P("data"))
    everywhere = NamedSharding(mesh, P())
    with arenax.BufferPool(sharding) as pool:
        with pool.step() as step:
            kept = step.keep(step.put(np.arange(8, dtype=np.float32)))
            assert step.zeros((8, 2)).sharding == sharding
            assert step.ones((), device=everywhere).sharding == everywhere
            assert step.eye(3, device=everywhere).sharding == everywhere
            with pytest.raises(ValueError, match="rank 0, and its sharding"):
                step.zeros(())
        np.testing.assert_array_equal(np.array(kept), np.arange(8))
        with pool.step() as step:
            assert pointers(step.put(np.zeros(8, np.float32))) != pointers(kept)
        np.testing.assert_array_equal(np.array(kept), np.arange(8))
        with pool.step(strict=True) as step:
            late = step.put(np.ones(8, np.float32))
        with pytest.raises(RuntimeError, match="deleted"):
            np.array(late)
        pool.check()


def test_slots_are_converted_where_they_lie(mesh: Any) -> None:
    sharding = NamedSharding(mesh, P("data"))
    with arenax.BufferPool(sharding, budget=2 * 64) as pool:
        with pool.lease((16,), "float32") as lease:
            where = pointers(lease.array)
        x = pool.put(np.arange(16, dtype=np.int32))
        assert pointers(x) == where
        np.testing.assert_array_equal(np.array(x), np.arange(16))
        stats = pool.stats()
        assert (stats.conversion_count, stats.creation_count) == (1, 1)


def test_pinned_memory_of_the_host(mesh: Any) -> None:
    for placement in (
        NamedSharding(mesh, P("data"), memory_kind="pinned_host"),
        jax.sharding.SingleDeviceSharding(jax.devices()[1], memory_kind="pinned_host"),
    ):
        with arenax.BufferPool(placement) as pool:
            for i in range(3):
                value = np.arange(8, dtype=np.float32) + i
                got = pool.put(value)
                assert got.sharding.memory_kind == "pinned_host"
                np.testing.assert_array_equal(np.array(got), value)
                del got
            stats = pool.stats()
            assert (stats.creation_count, stats.copy_count) == (1, 0)
            with pool.lease((8,)) as lease:
                lease.write(np.ones(3), at=(2,))
                assert np.array(lease.array).tolist() == [0, 0, 1, 1, 1, 0, 0, 0]


def test_figures_by_device_add_up(mesh: Any) -> None:
    with arenax.BufferPool(NamedSharding(mesh, P("data")), budget="8KiB") as pool:
        x = pool.put(np.ones((8, 16), np.float32))
        stats = pool.stats()
        assert [*stats.by_device] == [f"cpu:{i}" for i in range(8)]
        assert sum(s.leased_bytes for s in stats.by_device.values()) == stats.leased_bytes == 2 * x.nbytes
        assert sum(s.budget_bytes or 0 for s in stats.by_device.values()) == stats.budget_bytes
        assert stats.skew == 1
        assert str(next(iter(stats.by_class))) == "float32[8,16] over P('data')"


@pytest.mark.parametrize(
    ("spec", "value", "match"),
    [
        (P("data"), np.ones((6, 2), np.float32), r"axis 0 of the batch has size 6, .* into 4 shards: pad it to 8"),
        (P("data", "model"), np.ones(4, np.float32), "has rank 1, and its sharding .* is for at least 2 axes"),
        (P(("data", "model")), np.ones(12, np.float32), "pad it to 16"),
    ],
)
def test_what_a_sharding_does_not_suit_is_refused_before_anything_happens(
    mesh: Any, spec: P, value: Any, match: str
) -> None:
    with arenax.BufferPool(NamedSharding(mesh, spec)) as pool:
        with pytest.raises(ValueError, match=match):
            pool.put(value)
        with pytest.raises(ValueError, match=r"axis 0 of|rank"):
            pool.lease(value.shape)
        assert pool.stats().slot_count == 0


def test_boundaries_that_do_not_divide_are_refused_when_the_pool_is_built(mesh: Any) -> None:
    sharding = NamedSharding(mesh, P(None, "data"))
    with pytest.raises(ValueError, match=r"axis 1 is ragged and sharded 4 ways .* class 10 does not divide by 4"):
        arenax.BufferPool(sharding, arenax.Ragged(1, arenax.SizeClasses.explicit([8, 10])))
    arenax.BufferPool(sharding, arenax.Ragged(0, arenax.SizeClasses.explicit([8, 10]))).close()


def test_placements_that_cannot_be_are_refused(mesh: Any) -> None:
    sharding = NamedSharding(mesh, P("data"))
    other = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    with pytest.raises(TypeError, match="placement must be"):
        arenax.BufferPool({"x": sharding, "y": jax.devices()[0]})
    with pytest.raises(TypeError, match="placement must be"):
        arenax.BufferPool("cpu")
    with pytest.raises(ValueError, match="must have at least one device"):
        arenax.BufferPool([])
    with pytest.raises(ValueError, match="each device once"):
        arenax.BufferPool([jax.devices()[0]] * 2)
    with arenax.BufferPool(NamedSharding(other, P("x"))) as pool:
        with pytest.raises(ValueError, match="device must be one of those of pool"):
            pool.put(np.ones(8, np.float32), device=sharding)
        with pytest.raises(ValueError, match="device must be one of those of pool"):
            pool.put(np.ones(8, np.float32), device=jax.devices()[0])


# ------------------------------------------------------------------------------------------------ a sequence of devices


def test_each_device_of_a_sequence_has_an_arena() -> None:
    first, second = jax.devices()[3:5]
    value = np.ones(8, np.float32)
    with arenax.BufferPool([first, second], budget=64, on_exhausted="raise") as pool:
        pool.reserve(value, slots=1)
        a, b = pool.put(value), pool.put(value + 1, device=second)
        assert (a.devices(), b.devices()) == ({first}, {second})
        assert a.committed
        assert b.committed
        with pytest.raises(arenax.PoolExhausted):
            pool.put(value, device=second)
        pool.reserve(value, slots=1, device=second)
        with pool.lease((8,), device=second) as lease, pytest.raises(arenax.PoolExhausted):
            assert lease.array.devices() == {second}
            pool.reserve(value, slots=1, device=second)
        stats = pool.stats()
        assert {n: s.slot_count for n, s in stats.by_device.items()} == {"cpu:3": 1, "cpu:4": 2}
        assert (stats.slot_count, stats.budget_bytes, stats.leased_bytes) == (3, 128, 64)
        assert stats.skew == pytest.approx(4 / 3)
        with pytest.raises(ValueError, match=r"device must be one of those of pool .*cpu:3, cpu:4"):
            pool.put(value, device=jax.devices()[0])
        with pool.measure() as m:
            del a, b
            gc.collect()
            pool.check()
        assert m.stats.leased_count == 0
        assert pool.trim(to_bytes=32) == 64
        assert pool.stats().reserved_bytes == 32


def test_a_reservation_on_a_sequence_is_made_on_all_devices_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = arenax.ArraySpec((20,), "float32")
    with arenax.BufferPool(jax.devices()[:2], budget=200) as pool:
        held = pool.put(np.ones(40, np.float32), device=jax.devices()[1])
        with pytest.raises(MemoryError, match="cannot reserve 80 bytes: 160 of its budget of 200"):
            pool.reserve(spec, slots=1)
        assert (pool.stats().slot_count, pool.stats().reserved_bytes) == (1, 160)
        del held
    with arenax.BufferPool(jax.devices()[:2]) as pool:
        create = pool.homes[1].landing.create

        def broken(slot: Any) -> None:
            create(slot)
            raise RuntimeError("RESOURCE_EXHAUSTED")

        with monkeypatch.context() as patch:
            patch.setattr(pool.homes[1].landing, "create", broken)
            with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
                pool.reserve(spec, slots=2)
        assert (pool.stats().slot_count, pool.stats().reserved_bytes) == (0, 0)
        pool.check()
        pool.reserve(spec, slots=2)
        assert [stats.slot_count for stats in pool.stats().by_device.values()] == [2, 2]


def test_a_plan_is_reserved_on_each_device_of_a_sequence_and_over_a_mesh() -> None:
    value, devices = np.ones((8, 4), np.float32), jax.devices()[:2]
    with arenax.BufferPool() as pool, pool.record() as trace:
        for _ in range(3):
            with pool.step() as step:
                step.put(value)
    plan = arenax.Plan.fit(trace)
    with arenax.BufferPool.from_plan(plan, placement=devices) as pool:
        assert [stats.slot_count for stats in pool.stats().by_device.values()] == [1, 1]
        assert pool.stats().budget_bytes == 256
    mesh = jax.make_mesh((2,), ("all",), devices=devices)
    for spec, nbytes in ((P("all"), 128), (P(), 256)):
        with arenax.BufferPool.from_plan(plan, placement=NamedSharding(mesh, spec), on_exhausted="raise") as pool:
            assert (pool.stats().budget_bytes, pool.stats().reserved_bytes) == (nbytes, nbytes)
            assert pool.put(value).sharding.spec == spec
    with pytest.raises(ValueError, match="a sharding for each leaf"):
        arenax.BufferPool.from_plan(plan, placement={"x": NamedSharding(mesh, P())})


def test_a_step_draws_on_each_device_of_a_sequence() -> None:
    first, second = jax.devices()[:2]
    with arenax.BufferPool([first, second]) as pool, pool.record() as trace:
        for strict in (False, True):
            with pool.step(strict=strict) as step:
                a, b = step.put(np.ones(4, np.float32)), step.put(np.ones(4, np.float32), device=second)
                c = step.zeros((4,), device=second)
                assert [x.devices() for x in (a, b, c)] == [{first}, {second}, {second}]
                kept = step.keep(b)
            assert kept.devices() == {second}
            assert a.is_deleted() == strict
        with pytest.raises(arenax.NotSteady), pool.steady():
            pool.put(np.ones(5, np.float32), device=second)
        pool.check()
    assert len(trace) == 6
    with pytest.raises(arenax.PoolClosed):
        pool.put(np.ones(4, np.float32), device=second)


def test_a_recording_has_what_every_device_of_a_sequence_did(tmp_path: Path) -> None:
    devices = jax.devices()[:3]
    with arenax.BufferPool(devices) as pool:
        with pool.record(tmp_path / "all.csv") as trace:
            for device in devices:
                x = pool.put(np.ones(4, np.float32), device=device)
                del x
    assert len(trace) == 3
    assert not trace.live_bytes[-1]

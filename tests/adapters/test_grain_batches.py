"""`arenax_adapters.grain` without workers: grain's own batches, in grain's order, from every way in."""

import collections
import dataclasses
import gc
import pickle
from typing import Any

import jax
import numpy as np
import pytest

import arenax
from arenax_adapters._land import Lander
from arenax_adapters.shared import Segment, filling
from tests.adapters.conftest import MakePool, assert_nothing_left
from tests.adapters.worker_samples import Attributed, Point, Rows, described, ragged_width, with_ragged

grain: Any = pytest.importorskip("grain")

from absl import flags  # noqa: E402

from arenax_adapters._grain_worker import Pack  # noqa: E402
from arenax_adapters.grain import batch_and_put, batch_fn, device_put, mp_put  # noqa: E402


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Node:
    a: Any
    b: Any


SAMPLES = {
    "dict": {"z": np.ones(2, np.float32), "a": 1},
    "nested": {"a": (1, [2.5, {"b": True}]), "c": 1j},
    "none": {"a": None, "b": 1},
    "ordered": collections.OrderedDict(b=1, a=np.ones(2)),
    "default": collections.defaultdict(int, a=np.ones(2)),
    "named tuple": Point(1, (np.int8(2), [np.zeros((2, 3))])),
    "registered": Node(np.ones(2), 2),
    "texts": {"a": "text", "b": b"bytes"},
    "number": 3,
    "zero-size": np.zeros((0, 2)),
    "0-d": np.array(3, np.uint8),
    "no leaves": ((), {}, 1),
    "object": {"a": object, "b": 1},
    "swapped": np.arange(3, dtype=">i4"),
    "structured": np.zeros(2, [("a", ">i4"), ("b", "f8")]),
    "bfloat16": jax.numpy.bfloat16(1.5),
    "array of jax": jax.numpy.ones(3),
    "time": np.datetime64("2020-01-01"),
}


@pytest.fixture(autouse=True)
def _flags() -> None:  # pyright: ignore[reportUnusedFunction]
    flags.FLAGS.mark_as_parsed()  # What grain reads, where nothing has run `absl.app`.


def source(count: int = 22) -> Any:
    return grain.MapDataset.source(Rows(count))


def plain(batch: Any) -> Any:
    """What tells batches apart."""
    return jax.tree.map(lambda x: np.asarray(x).tolist(), batch)


def plains(batches: Any) -> list[Any]:
    return [plain(batch) for batch in batches]


def landed(batch: Any) -> None:
    arrays = {key for key, value in batch.items() if isinstance(value, jax.Array)}
    assert arrays == {"x", "i"}


def assert_same(ours: Any, grains: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(grains)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(grains), strict=True):
        assert type(a) is type(b) is np.ndarray
        assert a.dtype == b.dtype.newbyteorder("=")  # A batch of one is not in native order in grain.
        assert np.array_equal(a, b)


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("count", [1, 3])
def test_batch_fn_does_as_grains_own(name: str, count: int):
    samples = [SAMPLES[name]] * count
    (expected,) = grain.MapDataset.source(samples).batch(count).to_iter_dataset()
    assert_same(batch_fn(samples), expected)


def test_batch_fn_promotes_as_grains_own():
    samples = [np.float32(1), np.float64(2)]
    (expected,) = grain.MapDataset.source(samples).batch(2).to_iter_dataset()
    assert_same(batch_fn(samples), expected)


def test_batch_fn_keeps_what_a_dict_is():
    batch = batch_fn([Attributed("kept", a=1), Attributed("other", a=2)])
    assert (type(batch), batch.note, batch["a"].tolist()) == (Attributed, "kept", [1, 2])


@pytest.mark.parametrize(
    "samples",
    [
        [],
        [{"a": 1}, {"b": 1}],
        [{"a": 1}, 1],
        [(1, 2), (1,)],
        [(1, 2), [1, 2]],
        [np.ones(2), np.ones(3)],
        [None, 1],
    ],
)
def test_batch_fn_refuses(samples: list[Any]):
    with pytest.raises(ValueError, match=r"samples|same structure"):
        batch_fn(samples)


@pytest.mark.parametrize("batches_first", [False, True])
def test_what_is_batched_in_a_slot_stays_there(batches_first: bool):
    """Through a `map` that replaces some of it, and changes some in place."""
    segment = Segment(1, 2)
    writer = segment.writer()
    pack = Pack(writer)
    pickle.loads(pickle.dumps(pack.map(batch_fn([Rows(9)[i] for i in range(4)])))).release()
    with filling(writer) as empty:
        batch = batch_fn([{"x": np.full(3000, i, np.float32), "i": i} for i in range(4)])
    slot = empty.__self__  # pyright: ignore[reportFunctionMemberAccess]
    assert all(np.shares_memory(leaf, slot) for leaf in batch.values())
    del empty, slot
    sent = pack.map(described(batch) if batches_first else batch)
    received = pickle.loads(pickle.dumps(sent))
    assert not received.overflowed
    assert received.tree["i"].tolist() == ([1000, 1001, 1002, 1003] if batches_first else [0, 1, 2, 3])
    assert received.tree["x"][:, 5].tolist() == ([0, 2, 4, 6] if batches_first else [0, 1, 2, 3])
    segment.close()


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("kind", ["map", "iter"])
def test_batches_are_grains_own(make_pool: MakePool, kind: str, drop: bool):
    pool = make_pool()
    ds = source() if kind == "map" else source().to_iter_dataset()
    expected = plains(source().to_iter_dataset().batch(4, drop_remainder=drop))
    assert len(expected) == (5 if drop else 6)
    put = batch_and_put(ds, 4, pool=pool, drop_remainder=drop)
    for _ in range(2):
        assert plains(put) == expected
    landed(next(iter(put)))
    assert pool.stats().hit_count > 0
    assert_nothing_left(pool)


def test_a_state_in_the_middle(make_pool: MakePool):
    pool = make_pool()
    put = batch_and_put(source(), 4, pool=pool)
    iterator = iter(put)
    for _ in range(2):
        next(iterator)
    state = iterator.get_state()
    rest = plains(iterator)
    assert len(rest) == 4
    iterator.set_state(state)
    assert plains(iterator) == rest
    other = iter(put)
    other.set_state(pickle.loads(pickle.dumps(state)))
    assert plains(other) == rest


def test_device_put(make_pool: MakePool):
    pool = make_pool()
    ds = device_put(source().to_iter_dataset().batch(4), pool, cpu_buffer_size=2, device_buffer_size=2)
    expected = plains(source().to_iter_dataset().batch(4))
    assert plains(ds) == expected
    iterator = iter(ds)
    assert plains([next(iterator), next(iterator)]) == expected[:2]
    state = iterator.get_state()
    assert plains(iterator) == expected[2:]
    iterator.set_state(state)
    assert plains(iterator) == expected[2:]
    del iterator
    for batch in ds:
        landed(batch)
        batch = None
        break
    gc.collect()  # grain's threads keep their last batch in the traceback of what ended them.
    assert_nothing_left(pool)


def test_ragged_batches_come_with_their_sizes(make_pool: MakePool):
    pool = make_pool()
    ragged = {"r": arenax.Ragged(1, arenax.SizeClasses.pow2(4, 16384), pad_value=-1), "x": None, "i": None}
    for n, (batch, sizes) in enumerate(mp_put(source(24).map(with_ragged).batch(8), pool=pool, ragged=ragged)):
        width = ragged_width(8 * n)
        assert (int(sizes["r"]), sizes["x"], sizes["i"]) == (width, None, None)
        assert batch["r"].shape == (8, [4, 4096, 8192][n])
        assert np.array(batch["r"][:, width:]).tolist() == [[-1] * (batch["r"].shape[1] - width)] * 8
        assert np.array(batch["r"][:, width - 1]).tolist() == np.array(batch["i"]).tolist()


def loader(workers: int = 0) -> Any:
    return grain.DataLoader(
        data_source=Rows(22),
        sampler=grain.samplers.IndexSampler(22, shuffle=True, seed=3, num_epochs=1),
        operations=[grain.transforms.Batch(4)],
        worker_count=workers,
        shard_options=grain.sharding.NoSharding(),
    )


def test_a_data_loader(make_pool: MakePool):
    pool = make_pool()
    expected = plains(loader())
    put = mp_put(loader(), pool=pool)
    iterator = iter(put)
    assert plains([next(iterator), next(iterator)]) == expected[:2]
    state = iterator.get_state()
    assert plains(iterator) == expected[2:]
    other = iter(put)
    other.set_state(state)
    assert plains(other) == expected[2:]
    other.close()
    with pytest.raises(ValueError, match="closed"):
        next(other)
    assert_nothing_left(pool)


def test_an_error_of_the_source(make_pool: MakePool):
    pool = make_pool()
    ds = grain.MapDataset.source(Rows(22, broken=9)).to_iter_dataset(grain.ReadOptions(num_threads=0))
    iterator = iter(batch_and_put(ds, 4, pool=pool))
    assert len([next(iterator), next(iterator)]) == 2
    with pytest.raises(ValueError, match="sample 9"):
        next(iterator)
    assert_nothing_left(pool)


def test_bad_arguments(make_pool: MakePool):
    pool = make_pool()
    with pytest.raises(TypeError, match=r"ds must be a grain\.IterDataset.* got list"):
        mp_put([1, 2], pool=pool)
    with pytest.raises(TypeError, match=r"pool must be .* got NoneType"):
        mp_put(source(), pool=None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="landing must be one of"):
        mp_put(source(), pool=pool, landing="fly")
    with pytest.raises(TypeError, match="own workers"):
        mp_put(loader(), pool=pool, options=grain.MultiprocessingOptions(num_workers=1))


def test_an_overflow_is_counted_at_the_landing(make_pool: MakePool):
    pool = make_pool()
    segment, lander = Segment(1, 1), Lander(pool, None, "copy")
    writer = segment.writer()
    first, second = (pickle.loads(pickle.dumps(writer.pack({"x": np.full(9, i, np.int32)}))) for i in range(2))
    with pytest.warns(RuntimeWarning, match="slow way"):
        batch = lander.land(second, segment)
    assert (lander.overflow_count, np.array(batch["x"]).tolist()) == (1, [1] * 9)
    del batch
    assert np.array(lander.land(first, segment)["x"]).tolist() == [0] * 9
    assert not writer.pack(np.zeros(9)).overflowed  # Landed, it is free.
    segment.close()
    assert_nothing_left(pool)

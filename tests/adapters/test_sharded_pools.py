"""The adapters with a pool over a mesh: each gives global arrays, as `pool.put` does."""

import importlib.util
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import arenax
from arenax_adapters.loop import pooled
from arenax_adapters.prefetch import prefetch

CLASSES = arenax.SizeClasses.explicit([8, 16])


@pytest.fixture
def sharding() -> NamedSharding:
    return NamedSharding(jax.make_mesh((4,), ("data",), devices=jax.devices()[:4]), P("data"))


@pytest.fixture
def pool(sharding: NamedSharding) -> Iterator[arenax.BufferPool]:
    with arenax.BufferPool(sharding) as pool:
        yield pool
        pool.check()


def batches(count: int = 5) -> Iterator[dict[str, Any]]:
    return ({"x": np.full((8, 3), i, np.float32), "y": np.arange(8, dtype=np.int32) + i} for i in range(count))


def test_prefetch(pool: arenax.BufferPool, sharding: NamedSharding) -> None:
    with prefetch(batches(), pool, size=2) as ahead:
        for batch, expected in zip(ahead, batches(), strict=True):
            for name, value in expected.items():
                assert batch[name].sharding == sharding
                np.testing.assert_array_equal(np.array(batch[name]), value)
        del batch
    assert pool.stats().creation_count <= 2 * 4


def test_a_pooled_training_step(pool: arenax.BufferPool) -> None:
    compiled: list[Any] = []

    @jax.jit
    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        compiled.append(batch["x"].shape)
        return state + batch["x"].sum(), batch["y"].max()

    step, state = pooled(train_step, pool), jax.numpy.zeros(())
    for i, batch in enumerate(batches()):
        state, most = step(state, batch)
        assert int(most) == 7 + i
    assert float(state) == 24 * 10
    assert len(compiled) <= 2  # The first state is on one device.


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_torchs_loader(pool: arenax.BufferPool, sharding: NamedSharding) -> None:
    from arenax_adapters.torch import DataLoader

    samples = [{"x": np.full(3, i, np.float32)} for i in range(16)]
    for i, batch in enumerate(DataLoader(samples, batch_size=8, pool=pool)):
        assert batch["x"].sharding == sharding
        np.testing.assert_array_equal(np.array(batch["x"])[:, 0], np.arange(8) + 8 * i)
    with pytest.raises(ValueError, match="for one CPU device alone"):
        DataLoader(samples, batch_size=8, pool=pool, landing="adopt")


@pytest.mark.skipif(importlib.util.find_spec("grain") is None, reason="needs grain")
def test_grains_batches(pool: arenax.BufferPool, sharding: NamedSharding) -> None:
    import grain

    from arenax_adapters.grain import batch_and_put

    source = grain.MapDataset.source([np.full(3, i, np.float32) for i in range(16)])
    for i, batch in enumerate(batch_and_put(source, 8, pool=pool)):
        assert batch.sharding == sharding
        np.testing.assert_array_equal(np.array(batch)[:, 0], np.arange(8) + 8 * i)


def test_ragged_batches_have_their_sizes_everywhere(sharding: NamedSharding) -> None:
    with arenax.BufferPool(sharding, arenax.Ragged(1, CLASSES)) as pool:
        ragged = ({"x": np.ones((8, n), np.float32)} for n in (3, 12))
        with prefetch(ragged, pool, size=1) as ahead:
            assert [batch["x"].shape for batch in ahead] == [(8, 8), (8, 16)]

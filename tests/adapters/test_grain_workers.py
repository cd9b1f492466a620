"""`arenax_adapters.grain` with workers: grain's own batches and order, state, errors, and what an end leaves behind."""

import gc
import multiprocessing
import os
import signal
from typing import Any

import jax
import numpy as np
import pytest

import arenax
from tests.adapters.conftest import MakePool, assert_nothing_left
from tests.adapters.test_shared_slots import descriptors
from tests.adapters.worker_samples import Rows, described, initialised, ragged_width, with_ragged

grain: Any = pytest.importorskip("grain")

from absl import flags  # noqa: E402

from arenax_adapters.grain import batch_and_put, batch_fn, mp_put  # noqa: E402


@pytest.fixture(autouse=True)
def _flags() -> None:  # pyright: ignore[reportUnusedFunction]
    flags.FLAGS.mark_as_parsed()  # What grain reads, where nothing has run `absl.app`.


def options(workers: int, buffer: int = 1) -> Any:
    return grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=buffer)


def source(rows: Rows) -> Any:
    return grain.MapDataset.source(rows).to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4))


def number(batch: Any) -> list[int]:
    """Which samples these are, every byte of them looked at."""
    i = np.array(batch["i"]).tolist()
    assert isinstance(batch["x"], jax.Array)
    assert batch["x"].shape == (len(i), 3000)
    assert [set(row) for row in np.array(batch["x"]).tolist()] == [{float(n)} for n in i]
    assert batch["text"].tolist() == [f"t{n}" for n in i]
    assert batch["none"] is None
    return i


def of_worker(index: int, workers: int, count: int, size: int) -> list[list[int]]:
    mine = list(range(count))[index::workers]
    return [mine[at : at + size] for at in range(0, len(mine), size)]


def in_turn(count: int, size: int, workers: int = 2) -> list[list[int]]:
    """What grain gives: a batch of each worker in turn, each with samples of its own."""
    shares = [of_worker(i, workers, count, size) for i in range(workers)]
    return [share[at] for at in range(len(shares[0])) for share in shares if at < len(share)]


def assert_ended(pool: arenax.BufferPool, before: int) -> None:
    """Neither a process of grain's, nor shared memory, nor a lease."""
    gc.collect()
    assert [p.name for p in multiprocessing.active_children() if p.name.startswith("grain")] == []
    assert len(descriptors()) <= before
    assert_nothing_left(pool)


def test_two_workers(make_pool: MakePool):
    """The batches, some twice from one state; nothing overflows though the loop holds some; all goes in the end."""
    pool, before = make_pool(), len(descriptors())
    iterator = iter(batch_and_put(source(Rows(44)), 4, pool=pool, options=options(2, 2)))
    expected = in_turn(44, 4)
    held = [next(iterator) for _ in range(3)]
    state = iterator.get_state()
    assert [number(next(iterator)) for _ in range(4)] == expected[3:7]
    iterator.set_state(state)
    last = previous = None
    for at in range(3, len(expected)):
        previous, last = last, next(iterator)
        assert number(last) == expected[at]
        assert previous is None or number(previous) == expected[at - 1]
    assert [number(b) for b in held] == expected[:3]
    assert iterator._segment.overflow_count == 0
    assert pool.stats().spill_count == 0
    iterator.close()
    iterator.close()
    assert number(last) == expected[-1]
    with pytest.raises(ValueError, match="closed"):
        next(iterator)
    del held, last, previous, iterator
    assert_ended(pool, before)


def test_a_map_after_the_batching_and_an_early_break(make_pool: MakePool):
    """Its batches are ordinary arrays; `worker_init_fn` ran before; no backend was started there."""
    pool, before = make_pool(), len(descriptors())
    ds = source(Rows(2000)).batch(4, batch_fn=batch_fn).map(described)
    put = mp_put(ds, pool=pool, options=options(1), worker_init_fn=initialised)
    for n, batch in enumerate(put):
        assert np.array(batch["i"]).tolist() == list(range(1000 + 4 * n, 1004 + 4 * n))
        assert np.array(batch["x"])[:, -1].tolist() == [2.0 * (i - 1000) for i in np.array(batch["i"]).tolist()]
        assert bytes(np.array(batch["worker"])) == b"0 of 1"
        assert batch["backends"] == 0
        batch = None
        if n == 9:
            break
    assert_ended(pool, before)


def test_an_error_of_the_source(make_pool: MakePool):
    pool, before = make_pool(), len(descriptors())
    iterator = iter(batch_and_put(source(Rows(44, broken=9)), 4, pool=pool, options=options(1)))
    expected = in_turn(8, 4, workers=1)
    assert number(next(iterator)) == expected[0]
    state = iterator.get_state()
    for _ in range(2):
        assert number(next(iterator)) == expected[1]
        with pytest.raises(ValueError, match="sample 9 is broken"):
            next(iterator)
        iterator.set_state(state)  # grain starts another worker, which has slots of its own.
    del iterator
    assert_ended(pool, before)


def test_a_killed_worker(make_pool: MakePool):
    """What came before it stays good, adopted where it lies; the error is grain's."""
    pool, before = make_pool(), len(descriptors())
    put = batch_and_put(source(Rows(8000)), 8, pool=pool, options=options(1), landing="adopt")
    iterator = iter(put)
    held = [next(iterator)]
    (worker,) = (p for p in multiprocessing.active_children() if p.name.startswith("grain"))
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="terminated unexpectedly with exit code -9"):
        while True:
            held.append(next(iterator))
    del iterator
    assert put._lander.adopted_count > 0
    assert [number(b) for b in held] == in_turn(8 * len(held), 8, workers=1)
    del held, worker
    assert_ended(pool, before)


@pytest.mark.filterwarnings("ignore:a batch found none of its worker's:RuntimeWarning")
def test_adopted_batches_never_change(make_pool: MakePool):
    """All are held: those that find no slot come another way, and no byte of the others is written again."""
    pool = make_pool()
    ragged = {"r": arenax.Ragged(1, arenax.SizeClasses.pow2(4, 16384)), "x": None, "i": None}
    ds = source(Rows(160)).map(with_ragged).batch(4, batch_fn=batch_fn)
    put = mp_put(ds, pool=pool, options=options(2), ragged=ragged, landing="adopt")
    iterator = iter(put)
    held = list(iterator)
    overflows = iterator._segment.overflow_count
    assert put._lander.overflow_count == overflows
    assert 0 < overflows == 40 - put._lander.adopted_count  # Of each batch, `x` alone can be adopted.
    assert [np.array(batch["i"]).tolist() for batch, _ in held] == in_turn(160, 4)
    for batch, sizes in held:
        x, r, i = (np.array(batch[key]) for key in "xri")
        width = int(sizes["r"])
        assert width == ragged_width(i[0])
        assert np.array_equal(x, np.repeat(i[:, None], 6000, axis=1))
        assert np.array_equal(r[:, :width], np.repeat(i[:, None], width, axis=1))
        assert not r[:, width:].any()
    del iterator


def test_a_data_loader(make_pool: MakePool):
    """Its state in the middle; `close` ends its workers, though it has none itself."""
    pool, before = make_pool(), len(descriptors())
    loader = grain.DataLoader(
        data_source=Rows(44),
        sampler=grain.samplers.SequentialSampler(44),
        operations=[grain.transforms.Batch(4)],
        worker_count=2,
        shard_options=grain.sharding.NoSharding(),
    )
    put, expected = mp_put(loader, pool=pool), in_turn(44, 4)
    iterator = iter(put)
    assert [number(next(iterator)) for _ in range(3)] == expected[:3]
    state = iterator.get_state()
    assert number(next(iterator)) == expected[3]
    iterator.set_state(state)
    assert [number(next(iterator)) for _ in expected[3:]] == expected[3:]
    assert iterator._segment.overflow_count == 0
    iterator.close()
    assert_ended(pool, before)

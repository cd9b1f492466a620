"""``landing="adopt"``: batches stay in the workers' memory, and nobody writes there while an array on it is in use."""

# pyright: reportPossiblyUnboundVariable=false

import gc
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import arenax  # noqa: E402
from arenax_adapters.torch import DataLoader  # noqa: E402
from tests.adapters.conftest import MakePool, assert_nothing_left  # noqa: E402
from tests.adapters.torch_samples import FORK, Samples, shared_mappings, value_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
held_too_many = pytest.mark.filterwarnings("ignore:a batch found none of its worker's .* shared slots free")

WIDTH = 1 << 15  # Of float32: what is much smaller is not adopted.
SLOTS = 6  # Of a worker: two ahead, one more that is asked for, three that the consumer may have.


def wide(i: int) -> np.ndarray:
    return np.full(WIDTH, i, np.float32)


def loader_of(make_pool: MakePool, count: int = 40, make: Any = wide, **options: Any) -> DataLoader:
    options = {"num_workers": 1, "multiprocessing_context": FORK, "landing": "adopt", "pool": make_pool(), **options}
    return DataLoader(Samples(make, count), **options)


def is_shared(x: Any) -> bool:
    address = x.unsafe_buffer_pointer()
    with open("/proc/self/maps") as maps:
        for line in maps:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if start <= address < end:
                return "memfd:arenax" in line
    return False


@pytest.mark.parametrize("ahead", [0, 1, 9])
@pytest.mark.parametrize("workers", [1, 2])
def test_no_copy(make_pool: MakePool, workers: int, ahead: int):
    loader = loader_of(make_pool, num_workers=workers, prefetch=ahead)
    for _ in range(2):
        found = 0
        for n, x in enumerate(loader):
            assert is_shared(x)
            assert value_of(x) == n
            found += 1
        assert found == 40
    assert (loader.adopted_count, loader.overflow_count) == (80, 0)
    assert loader.pool.stats().hit_count + loader.pool.stats().creation_count == 0
    del x
    assert_nothing_left(loader.pool)
    assert shared_mappings() == 0


def test_what_is_not_adopted_is_copied(make_pool: MakePool):
    """Small arrays, 64-bit ones, and those in no slot."""

    def make(i: int) -> dict[str, Any]:
        return {"x": wide(i), "small": np.int32(i), "double": wide(i).astype(np.float64), "text": str(i)}

    loader = loader_of(make_pool, make=make)
    kept: list[Any] = []
    for n, batch in enumerate(loader):
        assert [is_shared(batch[key]) for key in ("x", "small", "double")] == [True, False, False]
        assert batch["double"].dtype == np.float32
        kept.append((batch["small"], batch["double"], batch["text"], n))
    assert all((int(s[0]), value_of(d), t) == (n, n, [str(n)]) for s, d, t, n in kept)
    assert (loader.adopted_count, loader.overflow_count) == (40, 0)


@held_too_many
@pytest.mark.parametrize("as_views", [False, True])
def test_what_is_held_never_changes(make_pool: MakePool, as_views: bool):
    loader = loader_of(make_pool, 60)
    for _ in range(2):
        held: list[Any] = []
        for n, x in enumerate(loader):
            view = np.asarray(x)
            assert view.__array_interface__["data"][0] == x.unsafe_buffer_pointer()
            held.append((n, view if as_views else x))
            if n % 3 == 2:
                del held[n % 5 % len(held)]
            del x, view
            assert all(value_of(y) == m for m, y in held[-8:])
        assert all(value_of(y) == m for m, y in held)


def test_a_consumer_that_keeps_all_batches(make_pool: MakePool):
    """The slots end, not the batches."""
    loader = loader_of(make_pool)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches = list(loader)
    assert [value_of(x) for x in batches] == list(range(40))
    assert sum(map(is_shared, batches)) == SLOTS == loader.adopted_count
    assert loader.overflow_count == 40 - SLOTS
    ours = [w for w in caught if "shared slots" in str(w.message)]
    assert [w.category for w in ours] == [RuntimeWarning]
    copies = [np.array(x) for x in batches]
    assert all((np.array(x) == copy).all() for x, copy in zip(batches, copies, strict=True))


@held_too_many
def test_slots_in_a_cycle_are_free_when_the_collector_came(make_pool: MakePool):
    loader = loader_of(make_pool, 16, persistent_workers=True)
    cycle: list[Any] = list(loader)
    cycle.append(cycle)
    kept = loader.overflow_count
    assert kept == 16 - SLOTS
    assert [value_of(x) for x in loader] == list(range(16))
    assert loader.overflow_count > kept
    kept = loader.overflow_count
    del cycle
    gc.collect()
    # Batches of this epoch may have been asked for before.
    assert [value_of(x) for x in loader] == list(range(16))
    assert loader.overflow_count == kept


def test_a_slot_waits_for_computations_on_it(make_pool: MakePool):
    """The consumer drops each batch at once, while what he asked of it has not begun."""

    @jax.jit
    def slow(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        for _ in range(8):
            state = jnp.tanh(state @ state)
        return state, x[0, :16] + 0 * state[0, :16]

    loader = loader_of(make_pool, 60)
    state, found = jnp.eye(300), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # Where the computations are slower than the worker.
        for x in loader:
            state, y = slow(state, x)
            del x
            found.append(y)
    assert [value_of(y) for y in found] == list(range(60))
    assert loader.adopted_count + loader.overflow_count == 60


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable:UserWarning")
def test_donation_takes_no_slot_away(make_pool: MakePool):
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    loader = loader_of(make_pool)
    kept: list[Any] = []
    for n, x in enumerate(loader):
        view = np.asarray(x) if n == 2 else None
        y = step(x)
        assert not is_shared(y)
        assert value_of(y) == n + 1
        assert view is None or value_of(view) == n
        if n % 4 == 0:
            kept.append((n, y))
        del x, view
    assert all(value_of(y) == n + 1 for n, y in kept)
    assert (loader.adopted_count, loader.overflow_count) == (40, 0)


def test_arrays_outlive_their_loader(make_pool: MakePool):
    loader = loader_of(make_pool, 4)
    batches = list(loader)
    view = np.asarray(batches[3])
    pool = loader.pool
    del loader
    assert all(map(is_shared, batches))
    assert [value_of(x) for x in batches] == [0, 1, 2, 3]
    del batches
    assert value_of(view) == 3
    assert shared_mappings() > 0
    del view
    assert shared_mappings() == 0
    assert_nothing_left(pool)


def test_batches_that_grow(make_pool: MakePool):
    """The slots are replaced by larger ones, and arrays in the smaller keep them."""
    loader = loader_of(make_pool, 24, lambda i: np.full(WIDTH * (1 + i // 4), i, np.float32))
    held: list[Any] = []
    for n, x in enumerate(loader):
        assert x.shape == (1, WIDTH * (1 + n // 4))
        held.append((n, x))
        del held[:-2]
        assert all(value_of(y) == m for m, y in held)
        assert is_shared(x)
    assert (loader.adopted_count, loader.overflow_count) == (24, 0)


def test_ragged_rows(make_pool: MakePool):
    classes = arenax.SizeClasses.pow2(WIDTH, 4 * WIDTH)
    ragged = {"x": arenax.Ragged(1, classes, pad_value=-1), "y": None}
    lengths = [WIDTH - 5, WIDTH, WIDTH + 1, 3 * WIDTH] * 3

    def make(i: int) -> dict[str, Any]:
        return {"x": np.full(lengths[i], i, np.float32), "y": wide(i)}

    loader = loader_of(make_pool, 12, make, ragged=ragged, batch_size=2)
    for n, (batch, sizes) in enumerate(loader):
        of_batch = lengths[2 * n : 2 * n + 2]
        assert (int(sizes["x"]), sizes["y"]) == (max(of_batch), None)
        x = np.array(batch["x"])
        assert x.shape == (2, classes.class_of(max(of_batch)))
        for row, length, value in zip(x, of_batch, range(2 * n, 2 * n + 2), strict=True):
            assert set(row[:length]) == {value}
            assert set(row[length:]) <= {-1}
        assert is_shared(batch["x"])
        assert is_shared(batch["y"])
    assert loader.overflow_count == 0


@pytest.mark.parametrize("ragged", ["of the loader", "of the pool"])
def test_a_collate_of_ones_own_does_not_pad(make_pool: MakePool, ragged: str):
    """Where the worker has not padded them, rows land in the pool, which does."""
    spec = arenax.Ragged(1, arenax.SizeClasses.pow2(WIDTH, 2 * WIDTH), pad_value=-1)
    pool = make_pool(ragged=spec if ragged == "of the pool" else None)
    options: dict[str, Any] = {} if ragged == "of the pool" else {"ragged": spec}
    loader = loader_of(
        make_pool, 4, lambda i: np.full(WIDTH + 7, i, np.float32), pool=pool, collate_fn=np.stack, **options
    )
    for n, found in enumerate(loader):
        x = found[0] if options else found
        assert x.shape == (1, 2 * WIDTH)
        assert set(np.array(x)[0, : WIDTH + 7]) == {n}
        assert set(np.array(x)[0, WIDTH + 7 :]) == {-1}
        assert not options or int(found[1]) == WIDTH + 7


def test_arrays_are_committed_as_the_pools_are(make_pool: MakePool):
    for placement in (None, jax.devices()[3]):
        pool = make_pool(placement=placement)
        (adopted,) = loader_of(make_pool, 1, pool=pool)
        (copied,) = loader_of(make_pool, 1, pool=pool, landing="copy")
        assert (adopted.committed, adopted.devices()) == (copied.committed, copied.devices())

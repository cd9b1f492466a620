"""torch's loader and the pooled one side by side: the same values, order and containers, whatever the samples are."""

# pyright: reportPossiblyUnboundVariable=false

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import arenax  # noqa: E402
from arenax_adapters.torch import DataLoader  # noqa: E402
from tests.adapters.conftest import MakePool, assert_nothing_left  # noqa: E402
from tests.adapters.torch_samples import (  # noqa: E402
    FORK,
    Point,
    Samples,
    Shares,
    assert_like_torch,
    filled,
    with_jax,
)

TorchLoader: Any = torch.utils.data.DataLoader
# torch's own, where a machine has one processor.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

FLOATS = [getattr(torch, name) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")]
WIDE = [torch.float64, torch.int16, torch.bool, torch.complex64, torch.uint64]


def of_every_dtype(i: int) -> dict[str, Any]:
    return {str(dtype): torch.tensor([i, 2.0, 0.5]).to(dtype) for dtype in FLOATS + WIDE}


SAMPLES: dict[str, Callable[[int], Any]] = {
    "tensors": lambda i: torch.arange(6).reshape(2, 3) + i,
    "dtypes": of_every_dtype,
    "arrays": lambda i: np.full((2, 3), i, np.float64),
    "scalars": lambda i: {"f": i / 3, "i": i, "b": i % 2 == 0, "n": np.float32(i), "t": torch.tensor(i)},
    "tuples": lambda i: (filled(i), i),
    "named": lambda i: Point(filled(i), {"z": (i, float(i)), "a": [np.int16(i), filled(i)]}),
    "texts": lambda i: {"x": filled(i), "s": f"text {i}", "b": b"bytes", "p": (i, str(i))},
    "only texts": lambda i: f"text {i}",
    "empty": lambda i: {"none": np.zeros((0, 3), np.float32), "x": filled(i)},
    "only empty": lambda i: torch.zeros(2, 0),
    "views": lambda i: (torch.arange(12).reshape(3, 4).T[:, ::2] + i, filled(i)[::-1].copy()[::2]),
    "large": lambda i: np.full((64, 65), i, np.float32),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("make", SAMPLES.values(), ids=SAMPLES)
def test_values_and_containers_are_torchs(make_pool: MakePool, make: Callable[[int], Any], workers: int):
    pool = make_pool()
    samples = Samples(make, 7)
    context = FORK if workers else None
    loader = DataLoader(samples, 2, num_workers=workers, multiprocessing_context=context, pool=pool)
    assert isinstance(loader, TorchLoader)
    theirs = list(TorchLoader(samples, 2))
    assert len(loader) == len(theirs)
    ours = list(loader)
    for a, b in zip(ours, theirs, strict=True):
        assert_like_torch(a, b)
    assert loader.overflow_count == 0
    del ours, a
    assert_nothing_left(pool)


@pytest.fixture(scope="module")
def pool() -> Iterator[arenax.BufferPool]:
    with arenax.BufferPool() as pool:
        yield pool


def seeded(make: Callable[..., Any], epochs: int, options: dict[str, Any]) -> list[Any]:
    options = {name: option() if callable(option) else option for name, option in options.items()}
    init = options.pop("init", None)
    torch.manual_seed(3)
    np.random.seed(3)
    loader = make(worker_init_fn=init, **options)
    return [list(loader) for _ in range(epochs)]


def reseed() -> Callable[[int], None]:
    return lambda worker: np.random.seed(worker)


NOISE = Samples(lambda i: {"i": i, "t": torch.rand(3), "n": np.random.rand(2).astype(np.float32)}, 10)
WORKERS: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": FORK}
OPTIONS: dict[str, dict[str, Any]] = {
    "shuffle": {"batch_size": 3, "shuffle": True},
    "generator": {"batch_size": 3, "shuffle": True, "generator": lambda: torch.Generator().manual_seed(5), **WORKERS},
    "drop_last": {"batch_size": 4, "drop_last": True, **WORKERS},
    "sampler": {"batch_size": 2, "sampler": [7, 1, 1, 3, 9], **WORKERS},
    "batch_sampler": {"batch_sampler": [[0], [1, 2, 3], [9, 4]], **WORKERS},
    "no batches": {"batch_size": None, **WORKERS},
    "no batches here": {"batch_size": None, "shuffle": True},
    "prefetch_factor": {"batch_size": 1, "prefetch_factor": 5, **WORKERS},
    "persistent": {"batch_size": 3, "persistent_workers": True, "shuffle": True, **WORKERS},
    "init": {"batch_size": 3, "init": reseed, **WORKERS},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_order_and_seeds_are_torchs(pool: arenax.BufferPool, options: dict[str, Any]):
    ahead = 2 * (options.get("batch_size") == 3)
    theirs = seeded(lambda **o: TorchLoader(NOISE, **o), 2, options)
    ours = seeded(lambda **o: DataLoader(NOISE, pool=pool, prefetch=ahead, **o), 2, options)
    for a, b in zip(ours, theirs, strict=True):
        assert_like_torch(a, b)


# A worker that is left alone with the epoch's end fills more than its slots.
@pytest.mark.filterwarnings("ignore:a batch found none of its worker's .* shared slots free:RuntimeWarning")
@pytest.mark.parametrize(("uneven", "persistent"), [(False, True), (True, False), (True, True)])
def test_iterable_datasets(make_pool: MakePool, uneven: bool, persistent: bool):
    options: Any = {"batch_size": 2, "persistent_workers": persistent, "drop_last": True, **WORKERS}
    theirs, ours = (make(Shares(11, uneven), **options) for make in (TorchLoader, pooled(make_pool)))
    for _ in range(2):
        batches = [b for b in ours]  # noqa: C416  # `list` would ask for a length, which such a dataset has not.
        for a, b in zip(batches, [b for b in theirs], strict=True):  # noqa: C416
            assert_like_torch(a, b)


def pooled(make_pool: MakePool) -> Callable[..., Any]:
    return lambda *args, **options: DataLoader(*args, pool=make_pool(), **options)


def test_out_of_order_no_batch_is_lost(make_pool: MakePool):
    loader = DataLoader(Samples(filled, 12), 1, in_order=False, pool=make_pool(), **WORKERS)
    assert sorted(int(b[0, 0]) for b in loader) == list(range(12))
    assert loader.overflow_count == 0


@pytest.mark.parametrize("persistent", [False, True])
def test_two_live_iterators_are_like_torchs(make_pool: MakePool, persistent: bool):
    """Two streams; with persistent workers, as in torch, the second begins anew what the first one has."""
    found: list[list[int]] = []
    for make in (TorchLoader, pooled(make_pool)):
        loader = make(Samples(filled, 6), batch_size=1, persistent_workers=persistent, **WORKERS)
        first, order = iter(loader), []
        order += [int(next(first)[0, 0]) for _ in range(2)]
        second = iter(loader)
        for _ in range(3):
            order += [int(next(second)[0, 0]), int(next(first)[0, 0])]
        found.append(order)
        del first, second
    assert found[0] == found[1]


@pytest.mark.parametrize("options", [{}, {**WORKERS, "num_workers": 1}, {**WORKERS, "persistent_workers": True}])
def test_a_bad_sample_costs_its_batch(make_pool: MakePool, options: dict[str, Any]):
    def make(i: int) -> Any:
        if i in (3, 8):
            raise ValueError(f"sample {i} is bad")
        return filled(i)

    def outcome(loader: Any) -> list[Any]:
        batches, found = iter(loader), []
        while True:
            try:
                found.append([int(x) for x in next(batches)[:, 0]])
            except StopIteration:
                return found
            except ValueError as e:
                found.append(str(e).splitlines()[-1].removeprefix("ValueError: "))

    ours = DataLoader(Samples(make, 10), 2, pool=make_pool(), **options)
    expected = outcome(TorchLoader(Samples(make, 10), 2))  # In workers, each error would cost torch's 5 seconds.
    assert len(expected) == 5
    for _ in range(2):
        assert outcome(ours) == expected


def test_x64(make_pool: MakePool):
    loader = DataLoader(Samples(lambda i: {"i": i, "f": i / 3}, 4), 2, pool=make_pool(), **WORKERS)
    with jax.enable_x64(True):
        batch = next(iter(loader))
    assert (batch["i"].dtype, batch["f"].dtype) == (np.int64, np.float64)
    assert np.array(batch["f"]).tolist() == [0, 1 / 3]


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_workers_do_not_import_jax(make_pool: MakePool, context: str):
    loader = DataLoader(
        Samples(with_jax, 6),
        2,
        num_workers=1,
        multiprocessing_context=context,
        pool=make_pool(),
        persistent_workers=True,
    )
    for _ in range(2):
        for n, batch in enumerate(loader):
            assert np.array(batch["x"])[:, 0].tolist() == [2 * n, 2 * n + 1]
            assert not np.array(batch["jax"]).any()
        assert n == 2
    assert loader.overflow_count == 0


def test_pin_memory_is_noted_once(make_pool: MakePool):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = DataLoader(Samples(filled, 4), 2, pin_memory=True, pool=make_pool())
        assert [len(list(loader)) for _ in range(2)] == [2, 2]
    assert [str(w.message) for w in caught if "pin_memory" in str(w.message)] == [str(caught[0].message)]
    assert loader.pin_memory
    assert caught[0].filename == __file__


def test_options_are_checked():
    dataset = Samples(filled, 4)
    wrong: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"prefetch": -1}, ValueError),
        ({"prefetch": True}, TypeError),
        ({"pool": object()}, TypeError),
        ({"landing": "move"}, ValueError),
        ({"num_workers": -1}, ValueError),
        ({"sampler": [1], "shuffle": True}, ValueError),
        ({"nonsense": 1}, TypeError),
    ]
    for options, error in wrong:
        with pytest.raises(error):
            DataLoader(dataset, **options)

"""A user's own `collate_fn`, and rows of unequal length, in workers and without."""

# pyright: reportPossiblyUnboundVariable=false

import collections
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import arenax  # noqa: E402
from arenax_adapters.torch import DataLoader  # noqa: E402
from tests.adapters.conftest import MakePool, assert_nothing_left  # noqa: E402
from tests.adapters.torch_samples import FORK, Point, Samples, assert_like_torch, filled  # noqa: E402

TorchLoader: Any = torch.utils.data.DataLoader
default_collate: Any = torch.utils.data.default_collate
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

HERE: dict[str, Any] = {}
WORKER: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": FORK}
both = pytest.mark.parametrize("options", [HERE, WORKER], ids=["here", "worker"])
RAGGED = arenax.Ragged(1, arenax.SizeClasses.pow2(4, 16), pad_value=-1)


class Attributed(dict[str, Any]):
    pass


COLLATES: dict[str, Callable[[Any], Any]] = {
    "converts": lambda samples: default_collate(samples).double() / 255,
    "turns": lambda samples: default_collate(samples).T,
    "twice": lambda samples: dict.fromkeys("ab", default_collate(samples)),
    "parts": lambda samples: list(default_collate(samples).split(1)),
    "of numpy": lambda samples: {"x": np.stack(samples), "n": len(samples), "s": str(len(samples)), "none": None},
    "overlaps": lambda samples: (x := default_collate(samples), x[:, 1:], x[1:], x[0, 0]),
    "changes": lambda samples: default_collate(samples).add_(1),
    "objects": lambda samples: {"x": default_collate(samples), "o": range(3), "f": frozenset("ab"), "i": 1, "c": 1j},
    "sparse": lambda samples: {"x": default_collate(samples), "o": [torch.eye(3).to_sparse()]},
    "nothing": lambda samples: None,
    "broadcast": lambda samples: default_collate(samples)[:, :1].expand(-1, 5),
}


def expected_of(batch: Any) -> Any:
    """NumPy's arrays land as tensors do."""
    return {key: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for key, x in batch.items()}


@both
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
@pytest.mark.parametrize("collate", COLLATES.values(), ids=COLLATES)
def test_a_collate_of_ones_own(make_pool: MakePool, collate: Callable[[Any], Any], options: dict[str, Any]):
    pool = make_pool()
    loader = DataLoader(Samples(filled, 9), 2, collate_fn=collate, pool=pool, **options)
    theirs = list(TorchLoader(Samples(filled, 9), 2, collate_fn=collate))
    ours = list(loader)
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(b, dict) and isinstance(b.get("o"), list):
            assert a.pop("o")[0].to_dense().equal(b.pop("o")[0].to_dense())
        assert_like_torch(a, expected_of(b) if isinstance(b, dict) else b)
    del ours, a
    assert_nothing_left(pool)


@pytest.mark.parametrize("factor", [1, 4])
def test_what_a_collate_makes_of_the_slots_arrays_overflows_nothing(make_pool: MakePool, factor: int):
    loader = DataLoader(
        Samples(lambda i: torch.full((64, 64), i, dtype=torch.uint8), 40),
        collate_fn=lambda samples: default_collate(samples).float() + 1,
        pool=make_pool(),
        prefetch_factor=factor,
        **WORKER,
    )
    assert [int(batch[0, 63, 63]) for batch in loader] == list(range(1, 41))
    assert loader.overflow_count == 0


@pytest.mark.filterwarnings("ignore:a batch found none of its worker's .* shared slots free:RuntimeWarning")
@pytest.mark.parametrize("keep", [1, 8])
def test_batches_that_a_collate_keeps_are_not_overwritten(make_pool: MakePool, keep: int):
    kept: list[Any] = []

    def collate(samples: Any) -> dict[str, Any]:
        batch = default_collate(samples)
        kept.append((int(batch[0, 0]), batch))
        del kept[:-keep]
        good = all(bool((x == value).all()) for value, x in kept)
        return {"x": batch, "last": kept[0][1], "good": good}

    loader = DataLoader(Samples(filled, 30), collate_fn=collate, pool=make_pool(), **WORKER)
    for n, batch in enumerate(loader):
        assert batch["good"]
        assert set(np.array(batch["x"]).ravel()) == {n}
        assert set(np.array(batch["last"]).ravel()) == {max(0, n - keep + 1)}
    assert n == 29


@both
@pytest.mark.parametrize("kind", [Attributed, collections.UserDict, collections.OrderedDict])
def test_containers_that_jax_does_not_know(make_pool: MakePool, kind: Any, options: dict[str, Any]):
    """Tokenizers give such dicts. Whatever their arrays become, they are nobody else's when the slot is reused."""
    loader = DataLoader(Samples(lambda i: kind(x=filled(i), y=i), 12), pool=make_pool(), **options)
    batches = list(loader)
    for n, batch in enumerate(batches):
        assert isinstance(batch, Mapping)
        assert set(np.array(batch["x"]).ravel()) == {n}
        assert int(batch["y"][0]) == n


@both
def test_keys_that_cannot_be_sorted(make_pool: MakePool, options: dict[str, Any]):
    samples = Samples(lambda i: {"a": i, 0: filled(i)}, 4)
    theirs = list(TorchLoader(samples, 2))
    for a, b in zip(DataLoader(samples, 2, pool=make_pool(), **options), theirs, strict=True):
        assert_like_torch(a, b)


# Ragged. --------------------------------------------------------------------------------------------------------------


def rows(kind: Any, lengths: list[int]) -> Samples:
    return Samples(lambda i: kind(np.full(lengths[i], i, np.int32), i), len(lengths))


KINDS: dict[str, tuple[Callable[[Any, Any], Any], Any]] = {
    "dict": (lambda x, y: {"x": x, "y": y}, {"x": RAGGED, "y": None}),
    "tuple": (lambda x, y: (x, y), (RAGGED, None)),
    "named": (lambda x, y: Point((x, y), y), Point((RAGGED, None), None)),
    "nested": (lambda x, y: {"a": [{"b": torch.from_numpy(x)}], "y": y}, {"a": [{"b": RAGGED}], "y": None}),
    "text": (lambda x, y: (x, str(y)), (RAGGED, None)),
}


@both
@pytest.mark.parametrize(("make", "ragged"), KINDS.values(), ids=KINDS)
def test_rows_of_unequal_length(make_pool: MakePool, make: Any, ragged: Any, options: dict[str, Any]):
    lengths = [3, 1, 5, 16, 4, 4, 9]
    pool = make_pool()
    loader = DataLoader(rows(make, lengths), 2, ragged=ragged, pool=pool, **options)
    found = 0
    for n, (batch, sizes) in enumerate(loader):
        (x,) = [x for x in jax.tree.leaves(batch) if isinstance(x, jax.Array) and x.ndim == 2]
        (size,) = jax.tree.leaves(sizes)
        of_batch = lengths[2 * n : 2 * n + 2]
        assert int(size) == max(of_batch)
        assert x.shape == (len(of_batch), RAGGED.size_classes.class_of(max(of_batch)))
        for row, length, value in zip(np.array(x), of_batch, range(2 * n, 2 * n + 2), strict=False):
            assert set(row[:length]) == {value}
            assert set(row[length:]) <= {-1}
        found += 1
    assert found == 4
    del batch, sizes, x, size
    assert_nothing_left(pool)


@both
def test_the_number_of_samples_may_be_ragged(make_pool: MakePool, options: dict[str, Any]):
    ragged = arenax.Ragged(0, arenax.SizeClasses.explicit([4]), pad_value=7)
    loader = DataLoader(Samples(filled, 6), 4, ragged=ragged, pool=make_pool(), **options)
    (first, four), (last, two) = loader
    assert (int(four), int(two), first.shape, last.shape) == (4, 2, (4, 8), (4, 8))
    assert np.array(last)[:, 0].tolist() == [4, 5, 7, 7]


@both
def test_ragged_samples_without_batches(make_pool: MakePool, options: dict[str, Any]):
    ragged = (arenax.Ragged(0, arenax.SizeClasses.pow2(4, 16)), None)
    loader = DataLoader(rows(lambda x, y: (x, y), [3, 9]), batch_size=None, ragged=ragged, pool=make_pool(), **options)
    assert [(batch[0].shape, int(sizes[0])) for batch, sizes in loader] == [((4,), 3), ((16,), 9)]


@both
@pytest.mark.parametrize(
    ("dtype", "pad"),
    [(torch.bfloat16, -0.5), (torch.float32, float("nan")), (torch.float32, np.float32(2))],
    ids=["half", "nan", "scalar"],
)
def test_padding(make_pool: MakePool, dtype: Any, pad: Any, options: dict[str, Any]):
    ragged = arenax.Ragged(-1, arenax.SizeClasses.pow2(4, 16), pad_value=pad)
    loader = DataLoader([torch.ones(2, n, dtype=dtype) for n in (3, 5)], 2, ragged=ragged, pool=make_pool(), **options)
    ((batch, size),) = loader
    assert (batch.shape, int(size)) == ((2, 2, 8), 5)
    np.testing.assert_array_equal(np.array(batch[0, 0].astype(np.float32)), [1, 1, 1, *[pad] * 5])


@both
@pytest.mark.parametrize(
    "other",
    [torch.ones(4, 1), torch.ones(5), torch.full((3, 5), 0.5, dtype=torch.float64), torch.ones(1, 3, 5)],
    ids=["shape", "rank", "dtype", "higher"],
)
def test_samples_that_differ_elsewhere_are_bad(make_pool: MakePool, other: Any, options: dict[str, Any]):
    first = torch.ones(3, 5, dtype=torch.int32)
    samples = [first, other, first, first]
    with pytest.raises(RuntimeError, match=r"differ|equal size"):
        next(iter(TorchLoader(samples, 2, num_workers=0))) if other.dtype == first.dtype else None
        next(iter(DataLoader(samples, 2, ragged=RAGGED, pool=make_pool(), **options)))


@pytest.mark.parametrize("landing", ["copy", "adopt"])
@both
def test_above_the_largest_class(make_pool: MakePool, landing: str, options: dict[str, Any]):
    loader = DataLoader([torch.ones(17)] * 2, 2, ragged=RAGGED, landing=landing, pool=make_pool(), **options)
    with pytest.raises(arenax.NoSizeClass):
        next(iter(loader))

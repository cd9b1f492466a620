"""Datasets for torch's loader, which a worker can import without jax, and what a batch of torch's is compared with."""

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import pytest

torch = pytest.importorskip("torch")

FORK = "fork"
SECONDS = 60  # No wait of a test that passes comes near it.


class Point(NamedTuple):
    x: Any
    y: Any


class Samples:
    """Sample i is ``make(i)``."""

    def __init__(self, make: Callable[[int], Any], count: int) -> None:
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Any:
        return self.make(i)


def filled(i: int) -> np.ndarray:
    return np.full(8, i, np.float32)


def with_jax(i: int) -> dict[str, Any]:
    """Says whether the worker has jax, and who it is."""
    return {"x": filled(i), "jax": "jax" in sys.modules, "pid": os.getpid()}


class Shares(torch.utils.data.IterableDataset):  # pyright: ignore[reportUntypedBaseClass]
    """Each worker gives its share of the numbers; all those of a range if `uneven` are the first one's."""

    def __init__(self, count: int, uneven: bool = False) -> None:
        self.count, self.uneven = count, uneven

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        me, of = (0, 1) if info is None else (info.id, info.num_workers)
        if self.uneven:
            me, of = me * self.count, 1
        return ({"x": filled(i), "i": i} for i in range(me, self.count, of))


class Gate:
    """Sample `at` blocks its (forked) worker until `go` is set, and says so in `reached`."""

    def __init__(self, at: int, count: int = 12) -> None:
        fork = multiprocessing.get_context(FORK)
        self.at, self.count = at, count
        self.go, self.reached = fork.Event(), fork.Event()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> np.ndarray:
        if i == self.at and not self.go.is_set():
            self.reached.set()
            assert self.go.wait(SECONDS)
        return filled(i)


class Strikes:
    """Sample `at` sends `number` to the (forked) worker itself, or to its parent; only the first time."""

    def __init__(self, at: int, number: signal.Signals, parent: bool, count: int = 12) -> None:
        self.at, self.number, self.parent, self.count = at, number, parent, count
        self.done = multiprocessing.get_context(FORK).Event()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> np.ndarray:
        if i == self.at and not self.done.is_set():
            self.done.set()
            os.kill(os.getppid() if self.parent else os.getpid(), self.number)
        return filled(i)


def assert_like_torch(ours: Any, theirs: Any) -> None:
    """The same tree, with a `jax.Array` of the same bytes and of JAX's dtype for each tensor."""
    import jax

    if isinstance(theirs, torch.Tensor):
        assert isinstance(ours, jax.Array)
        assert ours.shape == tuple(theirs.shape)
        name = str(theirs.dtype).removeprefix("torch.")
        if theirs.dtype.is_floating_point and theirs.dtype.itemsize <= 2:  # NumPy may have no name for it.
            assert ours.dtype.name == name
            wide: Any = np.asarray(ours).astype(np.float32)
            np.testing.assert_array_equal(wide, theirs.float().numpy())
        else:
            expected = theirs.numpy()
            assert ours.dtype == jax.dtypes.canonicalize_dtype(expected.dtype)
            np.testing.assert_array_equal(np.asarray(ours), expected.astype(ours.dtype))
        return
    assert type(ours) is type(theirs)
    if isinstance(theirs, Mapping):
        mapping = cast(Mapping[Any, Any], theirs)
        assert set(ours) == set(mapping)
        for key in mapping:
            assert_like_torch(ours[key], mapping[key])
    elif isinstance(theirs, tuple | list):
        assert len(ours) == len(cast(list[Any], theirs))
        for a, b in zip(ours, cast(list[Any], theirs), strict=True):
            assert_like_torch(a, b)
    else:
        assert ours == theirs


def number(batch: Any) -> int:
    """Which sample a batch of one `filled` sample is, all of it."""
    assert batch.shape == (1, 8)
    return value_of(batch)


def value_of(batch: Any) -> int:
    """The value that is all of a batch."""
    x = np.array(batch)
    assert (x == x.flat[0]).all()
    return int(x.flat[0])


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def shared_mappings() -> int:
    """How many parts of the loaders' shared memory this process has mapped.

    JAX lets go of the host's arrays that it adopted at its next call, or with a collection.
    """
    gc.collect()
    with open("/proc/self/maps") as maps:
        return sum("memfd:arenax" in line for line in maps)

"""What `arenax bench loader` loads: datasets, and the functions that make batches of them. Imports NumPy, never jax.

Workers import this module, and a worker that imported jax would be slow to start, and would hold memory for nothing.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from arenax_adapters.shared import filling

ROWS = 32
DISTINCT = 64
# The capacities that rows of tokens are padded to, and for how many samples in a row one of them is enough.
CLASSES = (4096, 8192, 16384, 32768)
BUCKET = 2 * ROWS

Sample: TypeAlias = dict[str, Any]


class Samples:
    """Sample i: leaves of random float32, and `i`.

    They come from memory that the worker has already: what is timed is the loader, not a dataset.

    Args:
        count: How many samples.
        columns: Values in each leaf.
        leaves: Leaves of a sample beside its number.
    """

    def __init__(self, count: int, columns: int, leaves: int = 1) -> None:
        self.count, self.columns, self.leaves = count, columns, leaves
        self._values: Any = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: Any) -> Sample:
        if self._values is None:
            shape = (DISTINCT, self.leaves, self.columns)
            self._values = np.random.default_rng(0).random(shape, dtype=np.float32)
        leaves = self._values[int(i) % DISTINCT]
        return {**{f"x{n}": leaf for n, leaf in enumerate(leaves)}, "index": np.int32(i)}


class Tokens:
    """Sample i: a row of tokens, its length, and `i`. Neighbours are of similar length, as a bucketing sampler gives.

    Args:
        count: How many samples.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._values: Any = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: Any) -> Sample:
        if self._values is None:
            self._values = np.random.default_rng(0).integers(1, 50_000, (DISTINCT, CLASSES[-1]), dtype=np.int32)
        length = length_of(int(i))
        return {"tokens": self._values[int(i) % DISTINCT][:length], "length": np.int32(length), "index": np.int32(i)}


def length_of(i: int) -> int:
    """Returns the number of tokens of sample `i`: more than half of its bucket's capacity, and up to all of it.

    Example:
        >>> from arenax_stress._bench_loader_samples import length_of
        >>> length_of(0), length_of(1)
        (4096, 2321)
    """
    capacity = CLASSES[i // BUCKET % len(CLASSES)]
    return capacity - i * 7919 % (capacity // 2)


def numpy_collate(samples: Sequence[Sample]) -> Sample:
    """Stacks samples as NumPy arrays: what `collate_fn` is for those who train in JAX today.

    Example:
        >>> from arenax_stress._bench_loader_samples import Samples, numpy_collate
        >>> samples = Samples(2, columns=3)
        >>> print(numpy_collate([samples[0], samples[1]])["index"])
        [0 1]
    """
    return {key: np.stack([sample[key] for sample in samples]) for key in samples[0]}


def pad_numpy(samples: Sequence[Sample]) -> Sample:
    """Stacks rows of tokens, padded with 0 to the capacity that holds the longest: what is written by hand today."""
    return _padded(samples, np.empty)


def pad_tensors(samples: Sequence[Sample]) -> Sample:
    """As `pad_numpy`, in tensors."""
    import torch

    return {key: torch.from_numpy(value) for key, value in pad_numpy(samples).items()}


def pad_in_slot(samples: Sequence[Sample]) -> Sample:
    """As `pad_numpy`, in the shared slot that the worker fills."""
    with filling() as empty:
        return _padded(samples, empty)


def _padded(samples: Sequence[Sample], empty: Any) -> Sample:
    longest = max(len(sample["tokens"]) for sample in samples)
    tokens = empty((len(samples), CLASSES[bisect_left(CLASSES, longest)]), np.int32)
    for row, sample in zip(tokens, samples, strict=True):
        length = len(sample["tokens"])
        row[:length], row[length:] = sample["tokens"], 0
    numbers = numpy_collate([{"length": sample["length"], "index": sample["index"]} for sample in samples])
    return {"tokens": tokens, **numbers}

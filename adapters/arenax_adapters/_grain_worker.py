"""What runs in a worker of grain's: batches samples in a shared slot, and packs the batch last. No jax of ours."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import grain  # pyright: ignore[reportMissingTypeStubs]
import numpy as np

from ._packed import Packed
from ._tree import like
from ._writer import Empty, Writer, filling

_VALUES = (np.ndarray, np.generic, int, float, complex, str, bytes)


def batch_fn(samples: Sequence[Any]) -> Any:
    """Stacks samples, leaf by leaf, as grain's own ``batch`` does; in a worker, in a shared slot.

    The arrays are ordinary ones, which a ``map`` after it may change or replace: what still lies in the slot when the
    batch is packed, last in the worker, is not copied again.

    Args:
        samples: Trees of one structure: arrays of one shape, or numbers, in dicts, tuples and lists.

    Returns:
        The same tree, each leaf with an axis of the samples in front.

    Raises:
        ValueError: Where there are no samples, or they differ in structure or shape.

    Example:
        >>> from arenax_adapters.grain import batch_fn
        >>> batch = batch_fn([{"x": np.ones(2), "n": 1}, {"x": np.zeros(2), "n": 2}])
        >>> print(batch["x"].shape, batch["n"])
        (2, 2) [1 2]
    """
    if not samples:
        raise ValueError("there are no samples to batch")
    with filling() as empty:
        return _stack(samples, empty, "the sample")


def _stack(samples: Sequence[Any], empty: Empty, name: str) -> Any:
    first = samples[0]
    if isinstance(first, Mapping):
        keys = cast(Any, first).keys()
        if any(not isinstance(s, Mapping) or s.keys() != keys for s in samples):
            raise ValueError(f"the samples differ in the keys of {name}")
        return like(first, {key: _stack([s[key] for s in samples], empty, f"{name}[{key!r}]") for key in keys})
    if isinstance(first, tuple | list):
        if any(type(s) is not type(first) or len(s) != len(cast(Any, first)) for s in samples):
            raise ValueError(f"the samples differ in the length or type of {name}")
        parts = [_stack(part, empty, f"{name}[{i}]") for i, part in enumerate(zip(*samples, strict=True))]
        kind: Any = cast(Any, type(first))
        return kind(*parts) if hasattr(first, "_fields") else kind(parts)
    if not isinstance(first, _VALUES) and not hasattr(first, "__array__"):
        # None, a node that is registered with jax, or an object: grain's own, without padding, knows them.
        return grain.experimental.batch_and_pad(samples, batch_size=len(samples))
    arrays = [np.asanyarray(s) for s in samples]
    shape, dtype = arrays[0].shape, arrays[0].dtype
    if any(a.shape != shape for a in arrays):
        raise ValueError(f"the samples differ in the shape of {name}: {sorted({a.shape for a in arrays})}")
    if dtype.hasobject or dtype.kind in "SU" or any(a.dtype != dtype for a in arrays):
        return np.stack(arrays)
    return np.stack(arrays, out=empty((len(arrays), *shape), dtype.newbyteorder("=")))


class Pack(grain.transforms.Map):
    """The last step in a worker: packs the batch for its way to the parent."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def map(self, element: Any) -> Packed:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Packs a batch."""
        return self._writer.pack(element)

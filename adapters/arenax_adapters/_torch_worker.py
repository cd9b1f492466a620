"""What runs in a worker of torch's: collates each batch in a shared slot. Imports torch and NumPy, never jax.

torch's own functions do the collating, so that values, dtypes and containers are torch's; only where a stack of tensors
is written differs.
"""

import dataclasses
import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate_fn_map

from ._packed import Padded
from ._tree import like, map_tree
from ._writer import Empty, Writer, filling

# The dtypes that NumPy has from ml_dtypes alone, and one of the same size for each.
_BITS = {
    torch.bfloat16: torch.int16,
    torch.complex32: torch.int32,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
}
_here = threading.local()  # .empty: makes what stacks are written to; .rag: how they are padded.


@dataclasses.dataclass(frozen=True)
class Rag:
    """`arenax.Ragged` without jax: an axis of the batch, the capacities of that axis, and what the padding holds."""

    axis: int
    boundaries: tuple[int, ...]
    pad_value: Any

    def capacity(self, size: int) -> int:
        """The size class, or `size` itself where it is above the largest, which the parent's landing refuses."""
        at = bisect_left(self.boundaries, size)
        return self.boundaries[at] if at < len(self.boundaries) else size


class Begin:
    """A `worker_init_fn` that makes this process one of the writer's before its first sample, then calls the user's.

    From then on torch's `default_collate` stacks in the slot that is being filled, also inside a `collate_fn`.
    """

    def __init__(self, writer: Writer, user: Callable[[int], Any] | None) -> None:
        self._writer, self._user = writer, user

    def __call__(self, worker: int) -> None:
        self._writer.take()
        if default_collate_fn_map.get(torch.Tensor) is collate_tensor_fn:  # This process is a worker's own.
            default_collate_fn_map[torch.Tensor] = _collate_tensors
        if self._user is not None:
            self._user(worker)


class Collate:
    """A `collate_fn` that writes the batch to a slot and returns what is to be sent of it.

    Args:
        user: The loader's `collate_fn`, or torch's own.
        writer: Where batches are packed; None where they are not sent.
        ragged: None, a `Rag`, or a tree of them like a sample's.
    """

    def __init__(self, user: Callable[[Any], Any], writer: Writer | None, ragged: Any) -> None:
        self._user, self._writer, self._ragged = user, writer, ragged

    def __call__(self, samples: Any) -> Any:
        writer = self._writer
        if writer is None:
            return map_tree(as_numpy, self._collate(samples))
        with filling(writer) as empty:
            _here.empty = empty
            try:
                return writer.pack(map_tree(as_numpy, self._collate(samples)))
            finally:
                _here.empty = None

    def _collate(self, samples: Any) -> Any:
        if self._user is not default_collate or self._ragged is None:
            return self._user(samples)
        return _collate_ragged(samples, self._ragged, {**default_collate_fn_map, torch.Tensor: _collate_tensors})


def as_numpy(leaf: Any) -> Any:
    """A tensor as the array on its memory, a `Padded` one where NumPy lacks its dtype; anything else as it is."""
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or leaf.device.type != "cpu":
        return leaf
    pad = getattr(leaf, "arenax_padding", None)
    tensor = leaf.detach().resolve_conj().resolve_neg()
    dtype = None
    try:
        array = tensor.numpy()
    except (TypeError, RuntimeError):
        bits = _BITS.get(tensor.dtype)
        if bits is None:
            return leaf
        dtype = str(tensor.dtype).removeprefix("torch.")
        array = tensor.view(bits).numpy()
    if pad is not None:
        return Padded(array, dtype, *pad)
    return array if dtype is None else Padded(array, dtype)


def _collate_tensors(batch: Any, *, collate_fn_map: Any = None) -> Any:
    """Stacks tensors as torch does, in the slot of this batch, with the rows padded where the leaf is ragged."""
    first = batch[0]
    empty: Empty | None = getattr(_here, "empty", None)
    rag: Rag | None = getattr(_here, "rag", None)
    plain = first.is_nested or first.layout is not torch.strided or first.device.type != "cpu" or first.is_quantized
    if plain or (empty is None and rag is None):
        return collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
    rank = first.dim() + 1
    if rag is None or not -rank <= rag.axis < rank:
        return torch.stack(batch, 0, out=_empty(empty, (len(batch), *first.shape), first.dtype))
    axis = rag.axis % rank
    if axis == 0:
        extent, shape = len(batch), (rag.capacity(len(batch)), *first.shape)
        out = _empty(empty, shape, first.dtype)
        torch.stack(batch, 0, out=out[:extent])
        out[extent:].fill_(rag.pad_value)
    else:
        for x in batch:  # Copied to its row, it would be broadcast and cast.
            fits = x.dim() == first.dim() and all(
                a == b for i, (a, b) in enumerate(zip(x.shape, first.shape, strict=True), 1) if i != axis
            )
            if not fits or not torch.can_cast(x.dtype, first.dtype):
                raise RuntimeError(
                    f"samples differ elsewhere than along the ragged axis {axis} of their batch: {tuple(first.shape)} "
                    f"of {first.dtype} and {tuple(x.shape)} of {x.dtype}"
                )
        extent = max(x.shape[axis - 1] for x in batch)
        shape = (len(batch), *first.shape[: axis - 1], rag.capacity(extent), *first.shape[axis:])
        out = _empty(empty, shape, first.dtype)
        for row, x in zip(out, batch, strict=True):
            size = x.shape[axis - 1]
            row.narrow(axis - 1, 0, size).copy_(x)
            row.narrow(axis - 1, size, shape[axis] - size).fill_(rag.pad_value)
    padded: Any = out  # A tensor takes attributes, and `as_numpy` finds it again.
    padded.arenax_padding = (axis, extent)
    return out


def _empty(empty: Empty | None, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = int(np.prod(shape, dtype=np.int64))
    if empty is None or not count:
        return torch.empty(shape, dtype=dtype)
    # Of the slot's bytes, since NumPy may have no name for the dtype.
    return torch.from_numpy(empty((count * dtype.itemsize,), np.uint8)).view(dtype).view(shape)


def _collate_ragged(samples: Any, ragged: Any, functions: Any) -> Any:
    """Collates as torch does, each part of the samples under the `Rag` that `ragged` has for it."""
    if ragged is None or isinstance(ragged, Rag):
        _here.rag = ragged
        try:
            return collate(samples, collate_fn_map=functions)
        finally:
            _here.rag = None
    first = samples[0]
    if isinstance(first, Mapping):
        if set(first) != set(ragged):
            raise ValueError(f"ragged has the keys {sorted(map(str, ragged))}, the samples {sorted(map(str, first))}")
        return like(first, {k: _collate_ragged([s[k] for s in samples], ragged[k], functions) for k in first})
    if not isinstance(first, tuple | list):
        raise ValueError(f"ragged has a {type(ragged).__name__} where the samples have a {type(first).__name__}")
    if len(first) != len(ragged):
        raise ValueError(f"ragged has {len(ragged)} entries, the samples {len(first)}")
    parts = [_collate_ragged(part, r, functions) for part, r in zip(zip(*samples, strict=True), ragged, strict=True)]
    return type(first)(*parts) if hasattr(first, "_fields") else parts

"""Rows of tokens of unequal length, padded to a size class as they are batched: a `collate_fn` or `batch_fn`.

NumPy and the standard library only, so that a worker that runs it does not import jax.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from ._writer import filling


class PadTokens:
    """Batches tokenised samples: rows padded to the smallest size class that holds the longest, with lengths and mask.

    In a worker of `arenax_adapters.torch.DataLoader` or `arenax_adapters.grain.mp_put` each row is written once,
    straight into the shared slot. Whatever the lengths, a jitted step compiles once a size class.

    Args:
        size_classes: Capacities of a row: an `arenax.SizeClasses`, or integers.
        keys: Where samples are dicts: the entries that are rows of tokens. Those of one sample have one length.
        pad_id: What the padding holds: an integer, or one for each of `keys`, as ``{"labels": -100}``, with 0 for those
            that are not named.
        dtype: Dtype of the tokens.

    Raises:
        ValueError: Where there are no size classes, or such that are no integers of at least 1; no keys; or a `pad_id`
            for another key.

    Example:
        >>> import arenax
        >>> from arenax_adapters.text import PadTokens
        >>> collate = PadTokens(arenax.SizeClasses.pow2(4, 1024))
        >>> batch = collate([{"tokens": [5, 6, 7], "label": 0}, {"tokens": [8], "label": 1}])
        >>> for key, value in batch.items():
        ...     print(key, value.tolist())
        tokens [[5, 6, 7, 0], [8, 0, 0, 0]]
        label [0, 1]
        lengths [3, 1]
        mask [[True, True, True, False], [True, False, False, False]]
    """

    def __init__(
        self,
        size_classes: Any,
        *,
        keys: Sequence[str] = ("tokens",),
        pad_id: int | Mapping[str, int] = 0,
        dtype: Any = np.int32,
    ) -> None:
        # Plain integers travel to the workers: an `arenax.SizeClasses` would import jax there.
        self._boundaries = tuple(sorted(getattr(size_classes, "boundaries", size_classes)))
        if any(isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1 for n in self._boundaries):
            raise ValueError(f"size_classes must be integers of at least 1, got {self._boundaries}")
        self._keys = (keys,) if isinstance(keys, str) else tuple(keys)
        if not self._boundaries:
            raise ValueError("size_classes must have at least one capacity")
        if not self._keys:
            raise ValueError("keys must name at least one entry of the samples")
        if isinstance(pad_id, Mapping) and (odd := {*pad_id} - {*self._keys}):
            raise ValueError(f"pad_id names {sorted(odd)}, which are none of the keys {self._keys}")
        self._pads = {k: pad_id.get(k, 0) if isinstance(pad_id, Mapping) else pad_id for k in self._keys}
        self._dtype = np.dtype(dtype)

    def __call__(self, samples: Sequence[Any]) -> dict[str, Any]:
        """Makes a batch.

        Args:
            samples: Rows of integers, or dicts that have such rows at `keys`; what else is in the dicts is stacked.

        Returns:
            A dict: at each of `keys` an array ``(samples, capacity)``, ``lengths`` int32 ``(samples,)``, ``mask`` bool
            ``(samples, capacity)``, and the other entries. Rows that come alone are at the first of `keys`.

        Raises:
            ValueError: Where a row is longer than the largest size class, the rows of a sample differ in length, or
                the samples differ in their entries.
        """
        if not samples:
            raise ValueError("there are no samples to batch")
        dicts = [s if isinstance(s, Mapping) else {self._keys[0]: s} for s in samples]
        names = cast(Any, dicts[0]).keys()
        if any(d.keys() != names for d in dicts):
            raise ValueError(f"the samples differ in their entries: {sorted({str(sorted(d)) for d in dicts})}")
        if clash := {"lengths", "mask"} & {*names}:
            raise ValueError(f"the samples have entries {sorted(clash)}, which PadTokens makes itself: rename them")
        keys = [key for key in self._keys if key in names]
        if not keys:
            raise ValueError(f"the samples have none of the entries {self._keys}, but {sorted(names)}")
        lengths = [len(d[keys[0]]) for d in dicts]
        for key in keys[1:]:
            if [len(d[key]) for d in dicts] != lengths:
                raise ValueError(f"the rows of {key!r} and of {keys[0]!r} differ in length")
        capacity = self._capacity(max(lengths))
        with filling() as empty:
            batch: dict[str, Any] = {}
            for name in names:
                values = [d[name] for d in dicts]
                batch[name] = self._pad(name, values, lengths, capacity, empty) if name in keys else np.stack(values)
            batch["lengths"] = count = empty((len(dicts),), np.int32)
            count[:] = lengths
            batch["mask"] = mask = empty((len(dicts), capacity), np.bool_)
            np.less(np.arange(capacity), count[:, None], out=mask)
        return batch

    def _capacity(self, length: int) -> int:
        at = bisect_left(self._boundaries, length)
        if at == len(self._boundaries):
            raise ValueError(
                f"a row of {length} tokens is above the largest size class, {self._boundaries[-1]}: cut the rows or "
                "declare a larger class"
            )
        return self._boundaries[at]

    def _pad(self, name: str, rows: Sequence[Any], lengths: Sequence[int], capacity: int, empty: Any) -> Any:
        out = empty((len(rows), capacity), self._dtype)
        for line, row, length in zip(out, rows, lengths, strict=True):
            line[:length] = row
            line[length:] = self._pads[name]
        return out

"""grain's pipelines, with batches that are pooled `jax.Array`s: one changed call.

`batch_and_put` batches a dataset and lands it; `mp_put` takes the place of ``mp_prefetch`` in a pipeline of your own,
and `device_put` that of ``grain.experimental.device_put``. Where there are workers, batches come from them in shared
memory that was allocated once, instead of a new file for every array of every batch.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from arenax import BufferPool

from ._land import Lander
from ._writer import Writer
from .shared import Segment

try:
    import grain  # pyright: ignore[reportMissingTypeStubs]
except ImportError as e:
    raise ImportError('arenax_adapters.grain needs grain: pip install "arenax[grain]"') from e

from ._grain_worker import Pack
from ._grain_worker import batch_fn as batch_fn


def batch_and_put(
    ds: Any,
    batch_size: int,
    *,
    pool: BufferPool,
    options: Any = None,
    drop_remainder: bool = False,
    worker_init_fn: Callable[[int, int], None] | None = None,
    landing: str = "copy",
) -> Any:
    """Batches a dataset, in workers where there are any, and lands the batches in a pool.

    The same batches in the same order as ``ds.batch(batch_size).mp_prefetch(options)`` gives.

    Args:
        ds: A ``grain.MapDataset`` or ``grain.IterDataset`` of samples.
        batch_size: Samples a batch.
        pool: Where the batches land.
        options: A ``grain.MultiprocessingOptions``; None is without workers.
        drop_remainder: Whether a last batch of fewer samples is left out.
        worker_init_fn: Called in each worker, as ``mp_prefetch`` does.
        landing: As `mp_put`'s.

    Returns:
        A ``grain.IterDataset``.

    Example:
        >>> import arenax, grain, numpy as np
        >>> from arenax_adapters.grain import batch_and_put
        >>> ds = grain.MapDataset.source([np.full(3, i, np.float32) for i in range(4)])
        >>> with arenax.BufferPool() as pool:
        ...     for batch in batch_and_put(ds, 2, pool=pool):
        ...         print(type(batch).__name__, batch.shape, batch.sum())
        ArrayImpl (2, 3) 3.0
        ArrayImpl (2, 3) 15.0
    """
    # Batches of a map dataset would be made ahead by its reading threads, hundreds of them, more than there are slots.
    ds = ds.to_iter_dataset() if isinstance(ds, grain.MapDataset) else ds
    ds = ds.batch(batch_size, drop_remainder=drop_remainder, batch_fn=batch_fn)
    return mp_put(ds, pool=pool, options=options, worker_init_fn=worker_init_fn, landing=landing)


def mp_put(
    ds: Any,
    *,
    pool: BufferPool,
    options: Any = None,
    ragged: Any = None,
    worker_init_fn: Callable[[int, int], None] | None = None,
    landing: str = "copy",
) -> Any:
    """Lands the batches of a dataset in a pool, made in workers: in the place of ``ds.mp_prefetch(options)``.

    Batch with `batch_fn`, as in ``ds.batch(32, batch_fn=batch_fn)``, and they are made in shared memory; batches made
    elsewhere are copied there, once, in the worker.

    Args:
        ds: A ``grain.IterDataset`` of batches, or a ``grain.DataLoader``, whose own workers are used then.
        pool: Where they land.
        options: A ``grain.MultiprocessingOptions``; None is without workers.
        ragged: Axes that vary, in place of the pool's own; then the elements are ``(batch, sizes)``.
        worker_init_fn: Called in each worker, as ``mp_prefetch`` does.
        landing: ``"copy"``, or ``"adopt"`` as `arenax_adapters.torch.DataLoader` has it.

    Returns:
        A ``grain.IterDataset``; of a ``grain.DataLoader``, an object that is iterated as it is. The iterators have
        grain's ``get_state`` and ``set_state``.

    Raises:
        TypeError: For another kind of dataset, or a `pool` that is none.
        ValueError: For another `landing`.
    """
    lander = Lander(pool, ragged, landing)
    if isinstance(ds, grain.DataLoader):
        if options is not None or worker_init_fn is not None:
            raise TypeError("a grain.DataLoader has its own workers: give options and worker_init_fn to it, not here")
        return PutLoader(ds, lander)
    if isinstance(ds, grain.MapDataset):
        ds = ds.to_iter_dataset()
    if not isinstance(ds, grain.IterDataset):
        raise TypeError(f"ds must be a grain.IterDataset, MapDataset or DataLoader, got {type(ds).__name__}")
    return PutDataset(ds, lander, options or grain.MultiprocessingOptions(num_workers=0), worker_init_fn)


def device_put(ds: Any, pool: BufferPool, *, cpu_buffer_size: int = 4, device_buffer_size: int = 2) -> Any:
    """Lands batches in a pool, ahead of the loop: in the place of ``grain.experimental.device_put``.

    Args:
        ds: A ``grain.IterDataset`` or ``grain.MapDataset`` of batches.
        pool: Where they land.
        cpu_buffer_size: Batches to hold ready before they land.
        device_buffer_size: Batches to land ahead.

    Returns:
        A ``grain.IterDataset``.

    Raises:
        TypeError: For another kind of dataset, or a `pool` that is none.

    Example:
        >>> import arenax, grain, numpy as np
        >>> from arenax_adapters.grain import device_put
        >>> ds = grain.MapDataset.range(6).map(np.float32).batch(2).to_iter_dataset()
        >>> with arenax.BufferPool() as pool:
        ...     print([float(x.sum()) for x in device_put(ds, pool)])
        [1.0, 5.0, 9.0]
    """
    ds = ds.to_iter_dataset() if isinstance(ds, grain.MapDataset) else ds
    if not isinstance(ds, grain.IterDataset):
        raise TypeError(f"ds must be a grain.IterDataset or MapDataset, got {type(ds).__name__}")
    ahead = grain.experimental.ThreadPrefetchIterDataset
    return ahead(
        mp_put(ahead(ds, prefetch_buffer_size=cpu_buffer_size), pool=pool), prefetch_buffer_size=device_buffer_size
    )


class PutDataset(grain.IterDataset[Any]):
    """The dataset that `mp_put` returns."""

    def __init__(self, parent: Any, lander: Lander, options: Any, init: Callable[[int, int], None] | None) -> None:
        super().__init__(parent)
        self._batches = parent
        self._lander, self._options, self._init = lander, options, init

    def __iter__(self) -> Any:
        workers = self._options.num_workers
        if not workers:
            return PutIterator(iter(self._batches), None, self._lander)
        segment = _segment(workers, self._options.per_worker_buffer_size, self._lander)
        packed = self._batches.map(Pack(segment.writer()))
        return PutIterator(iter(packed.mp_prefetch(self._options, self._init)), segment, self._lander)

    def __str__(self) -> str:
        return f"PutDataset(pool={self._lander.pool.name})"


class PutLoader:
    """What `mp_put` returns for a ``grain.DataLoader``: the loader, with its batches landed."""

    def __init__(self, loader: Any, lander: Lander) -> None:
        self._loader, self._lander = loader, lander

    def __iter__(self) -> Any:
        options = self._loader.multiprocessing_options
        if not options.num_workers:
            return PutIterator(iter(self._loader), None, self._lander)
        segment = _segment(options.num_workers, options.per_worker_buffer_size, self._lander)
        return PutIterator(iter(_packing(self._loader, segment.writer())), segment, self._lander)


class PutIterator(grain.DatasetIterator[Any]):
    """Lands the batches of another iterator, one when it is asked for."""

    def __init__(self, batches: Any, segment: Segment | None, lander: Lander) -> None:
        super().__init__(batches if isinstance(batches, grain.DatasetIterator) else ())
        self._batches, self._segment, self._lander = batches, segment, lander

    def __next__(self) -> Any:
        self._assert_not_closed()
        return self._lander.land(next(self._batches), self._segment)

    def get_state(self) -> Any:
        """The state of the iterator below, as it is after the batch that came last."""
        return self._batches.get_state()

    def set_state(self, state: Any) -> None:
        """Goes on from a state that `get_state` gave."""
        self._batches.set_state(state)

    def close(self) -> None:
        """Ends the workers and frees their shared memory."""
        try:
            super().close()
            batches: Any = self._batches
            if not isinstance(batches, grain.DatasetIterator):  # A loader's has no `close` of its own.
                batches._iterator.close()
        finally:
            if self._segment is not None:
                self._segment.close()


def _segment(workers: int, buffer: int, lander: Lander) -> Segment:
    # A worker's queue and the thread that empties it hold `buffer` each, and one each in hand; one more is landing, and
    # one is still there while a `map` after the batching has replaced its arrays.
    return Segment(workers, min(64, 2 * buffer + 4 + lander.held))


def _packing(loader: Any, writer: Writer) -> Any:
    """A copy of a ``grain.DataLoader`` that batches in shared memory, and packs last in the worker.

    Its operations are private, and there is no other way to say what its workers are to do at the end.
    """
    clone = copy.copy(loader)
    operations = [
        dataclasses.replace(op, batch_fn=batch_fn) if isinstance(op, grain.transforms.Batch) and not op.batch_fn else op
        for op in loader._operations
    ]
    clone._operations = [*operations, Pack(writer)]
    clone._dataset = clone._create_dataset()
    return clone

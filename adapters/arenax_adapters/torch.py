"""torch's `DataLoader`, with batches that are pooled `jax.Array`s: change the import, and train in JAX."""

import copy
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, cast

from arenax import BufferPool, CancelToken
from arenax._call_site import caller

from ._feed import Feed
from ._land import Lander, each_ragged
from .prefetch import Prefetcher
from .shared import Segment

try:
    import torch.utils.data as torch_data
    from torch._utils import ExceptionWrapper
except ImportError as e:
    raise ImportError('arenax_adapters.torch needs torch: pip install "arenax[torch]"') from e

from ._torch_worker import Begin, Collate, Rag


class DataLoader(torch_data.DataLoader[Any]):
    """`torch.utils.data.DataLoader`, whose batches are pytrees of pooled `jax.Array`s.

    Values, order, samplers, seeds and attributes are torch's, and so is everything that a dataset, a sampler or a
    `collate_fn` may be. Workers write each batch into shared memory that was allocated once, instead of a new file for
    every array of every batch; from there it lands in the pool's slots. An array goes back to the pool when it is
    dropped, and may be kept for as long as it is needed.

    What differs from torch's: a batch's tensors are `jax.Array`s, with JAX's dtypes (int64 becomes int32 unless x64 is
    on). After a killed worker or an interrupt the next epoch works, with `persistent_workers` too. `pin_memory` is
    accepted and does nothing: the pool's own landing pins what must be. Texts and other objects pass through.

    Args:
        dataset: A map-style or iterable dataset of tensors, NumPy arrays and numbers, in tuples, named tuples, lists
            and dicts.
        *args: As torch's.
        pool: Where the batches land; a pool of the loader's own by default. Its own ragged axes are padded where the
            batches land.
        ragged: Axes that vary, as `BufferPool` takes them; axes count in the batch, where axis 0 is the samples. Rows
            of unequal length are padded to their size class in the worker, unless `collate_fn` is your own, and the
            loader gives ``(batch, sizes)``.
        prefetch: Batches to land ahead of the loop, in a thread; 0 lands each when it is asked for. Above 0, a bad
            sample ends the epoch, and the iterator has no length.
        landing: ``"copy"`` lands batches in the pool. ``"adopt"``, on CPU, hands the workers' memory to JAX without a
            copy, where an array has 64 KiB or more: such arrays are none of the pool's slots, are counted in
            `adopted_count`, are copied where a step donates them, and keep their worker's slot until they and all
            computations on them are done; a loop that holds batches exhausts the slots, and further batches come the
            slow way.
        **kwargs: As torch's.

    Attributes:
        pool: The pool.
        prefetch: Batches that are landed ahead.

    Raises:
        TypeError: For a `pool` that is none, a `prefetch` that is no integer, or what torch refuses.
        ValueError: For a negative `prefetch`, another `landing`, or what torch refuses.

    Example:
        >>> import arenax, numpy as np
        >>> from arenax_adapters.torch import DataLoader
        >>> samples = [{"x": np.full(3, i, np.float32), "y": i} for i in range(4)]
        >>> with arenax.BufferPool() as pool:
        ...     for batch in DataLoader(samples, batch_size=2, pool=pool):
        ...         print(type(batch["x"]).__name__, batch["x"].shape, batch["y"])
        ArrayImpl (2, 3) [0 1]
        ArrayImpl (2, 3) [2 3]
    """

    def __init__(
        self,
        dataset: Any,
        *args: Any,
        pool: BufferPool | None = None,
        ragged: Any = None,
        prefetch: int = 0,
        landing: str = "copy",
        **kwargs: Any,
    ) -> None:
        if isinstance(prefetch, bool) or not isinstance(prefetch, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"prefetch must be an integer, got {prefetch!r}")
        if prefetch < 0:
            raise ValueError(f"prefetch must be at least 0, got {prefetch}")
        super().__init__(dataset, *args, **kwargs)
        self.pool = BufferPool() if pool is None else pool
        self.prefetch = prefetch
        # torch gives lists for the tuples of samples.
        default = self.collate_fn in (torch_data.default_collate, torch_data.default_convert)
        self._lander = Lander(self.pool, _with_lists(ragged) if default else ragged, landing)
        self._rags = each_ragged(ragged, lambda r: Rag(r.axis, r.size_classes.boundaries, r.pad_value))
        self._kept: _Source | None = None
        if self.pin_memory:
            warnings.warn(
                "pin_memory=True is not needed: the pool's landing pins what must be pinned", UserWarning, stacklevel=2
            )

    @property
    def adopted_count(self) -> int:
        """Arrays that were adopted, with ``landing="adopt"``."""
        return self._lander.adopted_count

    @property
    def overflow_count(self) -> int:
        """Batches that found no free shared slot and came as ordinary arrays."""
        return self._lander.overflow_count

    def __iter__(self) -> Any:
        batches = _Batches(self, self._source(), self._lander)
        if not self.prefetch:
            return batches
        return Prefetcher(batches.packed(), Feed(self.pool, self.prefetch, batches.land, caller()))

    def _source(self) -> "_Source":
        """The workers: of this epoch, or those that persist."""
        kept = self._kept
        if kept is not None and kept.again(self):
            return kept
        # Those that were landed ahead are held, too.
        held = self._lander.held + self.prefetch if self._lander.adopts else 0
        source = _Source(self, held, self._rags)
        if self.persistent_workers:
            self._kept = source
        return source


class _Source:
    """torch's iterator, its workers and their segment.

    Attributes:
        segment: Where the workers write; None where there are none.
        epoch: How often it began anew.
    """

    def __init__(self, loader: DataLoader, held: int, ragged: Any) -> None:
        self.segment: Segment | None = None
        self.epoch = 0
        self._lock = threading.Lock()  # A thread that lands ahead may still be in torch's iterator when it begins anew.
        view: Any = copy.copy(loader)
        view._kept = None  # What this one replaces, which would live on with it.
        writer = None
        if loader.num_workers:
            ahead = loader.prefetch_factor or 1
            # torch asks a worker for one more before the batch that it gave has landed; and the thread of an epoch that
            # was left may still land one, when the workers go on with the next.
            landing = 2 if loader.persistent_workers and loader.prefetch else 1
            self.segment = Segment(loader.num_workers, min(64, ahead + landing + held))
            weakref.finalize(self, self.segment.close)
            writer = self.segment.writer()
            view.worker_init_fn = Begin(writer, loader.worker_init_fn)
        view.collate_fn = Collate(loader.collate_fn, writer, ragged)
        view.pin_memory = False
        self._iterator: Any = cast(Any, torch_data.DataLoader)._get_iterator(view)
        self._broken = False

    def take(self, epoch: int | None = None) -> Any:
        """Returns the next batch; with `epoch`, of that one alone."""
        # Critical section.
        with self._lock:
            if epoch not in (None, self.epoch):
                raise StopIteration
            try:
                return next(self._iterator)
            except StopIteration:
                raise
            except BaseException as e:
                _break_cycle(e)
                # Not where a sample was bad: torch goes on with the next batch. One that has ended its share exits
                # with 0.
                if not isinstance(e, Exception) or any(worker.exitcode for worker in self._workers()):
                    self.close()
                raise

    def again(self, loader: DataLoader) -> bool:
        """Begins another epoch with the workers that are there; False where they are not to be used."""
        self.epoch += 1
        # Critical section.
        with self._lock:
            if not self._broken and all(worker.is_alive() for worker in self._workers()):
                self._broken = True  # Until all of them have answered, whatever strikes before.
                try:
                    self._iterator._reset(loader)
                    self._broken = False
                    return True
                except RuntimeError:  # One has died.
                    pass
            self.close()
            return False

    def close(self) -> None:
        """Ends the workers. What torch counts of batches under way may be wrong after an interrupt."""
        self._broken = True
        if self._workers():
            self._iterator._shutdown_workers()

    def _workers(self) -> Any:
        return getattr(self._iterator, "_workers", ())


class _Batches(Iterator[Any]):
    """One epoch, landed batch by batch as the loop asks."""

    def __init__(self, loader: DataLoader, source: _Source, lander: Lander) -> None:
        self._loader, self._source, self._lander = loader, source, lander
        self._epoch = source.epoch

    def __next__(self) -> Any:
        return self.land(self._source.take())

    def __len__(self) -> int:
        return len(self._loader)

    def packed(self) -> Iterator[Any]:
        """The batches before they are landed, for a thread that lands ahead; it takes none of another epoch's."""
        while True:
            try:
                yield self._source.take(self._epoch)
            except StopIteration:
                return

    def land(self, batch: Any, cancel: CancelToken | None = None) -> Any:
        """Lands a batch and frees its shared slot."""
        return self._lander.land(batch, self._source.segment, cancel)


def _break_cycle(error: BaseException) -> None:
    """Lets what raised a worker's error again forget it: it would hold the workers until the collector comes by."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is not None and traceback.tb_frame.f_code is ExceptionWrapper.reraise.__code__:
        traceback.tb_frame.clear()


def _with_lists(ragged: Any) -> Any:
    if isinstance(ragged, dict):
        return {key: _with_lists(value) for key, value in ragged.items()}
    if isinstance(ragged, tuple | list):
        values = [_with_lists(value) for value in cast(Sequence[Any], ragged)]
        return cast(Any, type(ragged))(*values) if hasattr(ragged, "_fields") else values
    return ragged

"""The loaders that `arenax bench loader` compares, and the cases that they load: today's way and the pooled one."""

import contextlib
import functools
import importlib
import importlib.metadata
import multiprocessing
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import attrs
import jax

import arenax

from ._bench_loader_samples import (
    CLASSES,
    ROWS,
    Samples,
    Tokens,
    numpy_collate,
    pad_in_slot,
    pad_numpy,
    pad_tensors,
)
from ._bench_table import size_text, time_text

LEAVES = 12
LEAF_COLUMNS = 4096
STEP_COLUMNS = 4096
STEP_SECONDS = 0.050
# A turn of small batches would be over before it can be timed, and one of large ones or of long steps takes long.
SMALL_BYTES, LARGE_BYTES = 2**16, 2**23
# Batches that torch's workers make ahead, and grain's hold in their queue: 2 by default in the one, 1 in the other.
AHEAD = 2

Batch = dict[str, Any]


@attrs.frozen
class Case:
    """What is loaded.

    Attributes:
        name: What the reader sees.
        batch_bytes: Bytes of a batch; of ragged ones the mean.
        samples: Makes the dataset, of so many samples.
        plain: Whether it differs from the other plain ones in its size alone.
        ragged: Whether its rows are padded.
        step_seconds: How long the consumer is busy with each batch that is timed, as if it waited for a device.
        scale: Batches in a turn, over those of a batch of a few MiB.
    """

    name: str
    batch_bytes: int
    samples: Callable[[int], Any]
    plain: bool = False
    ragged: bool = False
    step_seconds: float = 0.0
    scale: float = 1.0


def cases_of(kinds: Sequence[str], sizes: Sequence[int]) -> list[Case]:
    """The cases of these kinds; of the plain one as many as there are sizes."""
    found: list[Case] = []
    if "plain" in kinds:
        for size in sizes:
            columns = size // (4 * ROWS)
            scale = 4.0 if size <= SMALL_BYTES else 1.0 if size <= LARGE_BYTES else 0.5
            make = functools.partial(Samples, columns=columns)
            found.append(Case(size_text(size), size, make, plain=True, scale=scale))
    if "step" in kinds:
        size = 4 * ROWS * STEP_COLUMNS
        name = f"{size_text(size)}, {time_text(STEP_SECONDS)} step"
        make = functools.partial(Samples, columns=STEP_COLUMNS)
        found.append(Case(name, size, make, step_seconds=STEP_SECONDS, scale=0.25))
    if "ragged" in kinds:
        mean = ROWS * 4 * sum(CLASSES) // len(CLASSES)
        found.append(Case("ragged tokens", mean, Tokens, ragged=True))
    if "leaves" in kinds:
        arrays = LEAVES - 1  # The number of the sample is a leaf too.
        size = 4 * ROWS * LEAF_COLUMNS * arrays
        found.append(Case(f"{LEAVES} leaves", size, functools.partial(Samples, columns=LEAF_COLUMNS, leaves=arrays)))
    return found


@attrs.frozen
class Loader:
    """A way to load.

    Attributes:
        label: What the reader sees.
        batches: Gives the batches of a dataset, as `jax.Array`s: of a case, its samples, the workers and the pool.
        pooled: Whether it is ours.
    """

    label: str
    batches: Callable[[Case, Any, int, arenax.BufferPool], Generator[Batch]]
    pooled: bool = False


def _torch_default(case: Case, samples: Any, workers: int, _: arenax.BufferPool) -> Generator[Batch]:
    import torch.utils.data as data

    collate = pad_tensors if case.ragged else None
    for batch in data.DataLoader(samples, ROWS, collate_fn=collate, **_torch_options(workers)):
        yield jax.device_put({key: tensor.numpy() for key, tensor in batch.items()})


def _torch_numpy(case: Case, samples: Any, workers: int, _: arenax.BufferPool) -> Generator[Batch]:
    import torch.utils.data as data

    collate = pad_numpy if case.ragged else numpy_collate
    for batch in data.DataLoader(samples, ROWS, collate_fn=collate, **_torch_options(workers)):
        yield jax.device_put(batch)


def _torch_pooled(landing: str) -> Callable[..., Generator[Batch]]:
    def batches(case: Case, samples: Any, workers: int, pool: arenax.BufferPool) -> Generator[Batch]:
        from arenax_adapters.torch import DataLoader

        if not case.ragged:
            yield from DataLoader(samples, ROWS, pool=pool, landing=landing, **_torch_options(workers))
            return
        ragged = {"tokens": arenax.Ragged(1, arenax.SizeClasses.explicit(CLASSES)), "length": None, "index": None}
        for batch, _ in DataLoader(samples, ROWS, pool=pool, ragged=ragged, landing=landing, **_torch_options(workers)):
            yield batch

    return batches


def _torch_options(workers: int) -> dict[str, Any]:
    return {"num_workers": workers, "prefetch_factor": AHEAD, "multiprocessing_context": _context()}


def _context() -> Any:
    """Where it can be, a server that has imported torch once starts the workers: it saves seconds for each of them."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.utils.data", "arenax_stress._bench_loader_samples"])
    return context


def _grain_default(case: Case, samples: Any, workers: int, _: arenax.BufferPool) -> Generator[Batch]:
    source = _grain_source(samples)
    batched = source.batch(ROWS, batch_fn=pad_numpy) if case.ragged else source.batch(ROWS)
    with contextlib.closing(iter(batched.mp_prefetch(_grain_options(workers)))) as batches:
        for batch in batches:
            yield jax.device_put(batch)


def _grain_pooled(landing: str) -> Callable[..., Generator[Batch]]:
    def batches(case: Case, samples: Any, workers: int, pool: arenax.BufferPool) -> Generator[Batch]:
        from arenax_adapters.grain import batch_and_put, mp_put

        source, options = _grain_source(samples), _grain_options(workers)
        if case.ragged:
            batched = mp_put(source.batch(ROWS, batch_fn=pad_in_slot), pool=pool, options=options, landing=landing)
        else:
            batched = batch_and_put(source, ROWS, pool=pool, options=options, landing=landing)
        with contextlib.closing(iter(batched)) as found:
            yield from found

    return batches


def _grain_source(samples: Any) -> Any:
    import grain  # pyright: ignore[reportMissingTypeStubs]
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # grain starts no worker before.
    read = grain.ReadOptions(num_threads=1, prefetch_buffer_size=ROWS)
    return grain.MapDataset.source(samples).to_iter_dataset(read)


def _grain_options(workers: int) -> Any:
    import grain  # pyright: ignore[reportMissingTypeStubs]

    return grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=AHEAD)


# Of each library: what there is today, first, and ours. "adopt" is for CPU alone.
LOADERS: Mapping[str, Mapping[str, Loader]] = {
    "torch": {
        "default": Loader("today", _torch_default),
        "numpy": Loader("numpy_collate", _torch_numpy),
        "arenax": Loader("arenax", _torch_pooled("copy"), pooled=True),
        "adopt": Loader("adopt", _torch_pooled("adopt"), pooled=True),
    },
    "grain": {
        "default": Loader("today", _grain_default),
        "arenax": Loader("arenax", _grain_pooled("copy"), pooled=True),
        "adopt": Loader("adopt", _grain_pooled("adopt"), pooled=True),
    },
}


def loaders_of(library: str, adopt: bool) -> dict[str, Loader]:
    """The loaders of a library; without ``"adopt"``, where the device is no CPU or it is not wanted."""
    return {name: loader for name, loader in LOADERS[library].items() if adopt or name != "adopt"}


def described(library: str, workers: int) -> str:
    """Imports a library, and returns one line on it, its version, and how its workers are set up."""
    importlib.import_module(f"arenax_adapters.{library}")
    version = importlib.metadata.version(library)
    if library == "torch":
        how = f"{_context().get_start_method()} workers, prefetch_factor {AHEAD}"
    else:
        how = f"a reading thread a worker, per_worker_buffer_size {AHEAD}"
    return f"{library} {version}: {workers} workers ({how}), batches of {ROWS} samples."


@contextlib.contextmanager
def opened(loader: Loader, case: Case, batch_count: int, workers: int) -> Generator[Generator[Batch]]:
    """The batches of a loader, whose workers and pool end with the scope."""
    with arenax.BufferPool(name="loader") as pool:
        batches = loader.batches(case, case.samples(ROWS * batch_count), workers, pool)
        with contextlib.closing(batches):
            yield batches

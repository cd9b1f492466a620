"""What workers run: datasets, targets of processes, programs; at module level so that they pickle. Imports no jax."""

import os
import random
import signal
import sys
import traceback
from collections.abc import Iterator, MutableMapping
from typing import Any, NamedTuple

import numpy as np

from arenax_adapters.shared import Writer, filling

SECONDS = 60  # No wait of a test that passes comes near it.


class Point(NamedTuple):
    x: Any
    y: Any


class Attributed(dict[str, Any]):
    """A dict that is more than its items."""

    def __init__(self, note: str, **items: Any) -> None:
        super().__init__(**items)
        self.note = note


class Store(MutableMapping[str, Any]):
    """A mapping whose shallow copies have their items in common."""

    def __init__(self, items: dict[str, Any]) -> None:
        self.items_ = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self.items_[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


def bytes_of(seed: int, nbytes: int) -> np.ndarray:
    """Bytes that nobody else writes."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def soak(writer: Writer, queue: Any, worker: int, count: int, biggest: int) -> None:
    """Sends batches of random sizes, made in a slot, copied there, or both; keeps and drops some of its own."""
    rng = random.Random(worker)
    kept: list[Any] = []
    for i in range(count):
        seed, nbytes = worker * 1_000_000 + i, rng.randrange(1, biggest)
        data = bytes_of(seed, nbytes)
        if rng.random() < 0.6:
            with filling(writer if rng.random() < 0.5 else None) as empty:
                x = empty((nbytes,), np.uint8)
                x[:] = data
                scratch = empty((rng.randrange(1, 300),), np.uint8)
                scratch[:] = 255
        else:
            x = data
        queue.put(writer.pack({"x": x, "seed": np.int64(seed), "rest": [data[: nbytes // 2], "text"]}, i))
        if rng.random() < 0.1:
            kept.append((x, data))
        if len(kept) > 2:
            held, expected = kept.pop(0)
            assert np.array_equal(held, expected)
    queue.put(None)


def send(writer: Writer, queue: Any, trees: list[Any]) -> None:
    """Sends batches, then what there was of an error."""
    try:
        for tree in trees:
            queue.put(writer.pack(tree, (os.getpid(), "jax" in sys.modules)))
        queue.put(None)
    except Exception:
        queue.put(traceback.format_exc())


def send_until_killed(writer: Writer, pipe: Any, nbytes: int) -> None:
    """Sends one batch, then fills a slot and is killed in the middle of it."""
    pipe.send(writer.pack(np.full(nbytes, 1, np.uint8)))
    with filling(writer) as empty:
        x = empty((nbytes,), np.uint8)
        x[: nbytes // 2] = 2
        os.kill(os.getpid(), signal.SIGKILL)


def send_then_wait(writer: Writer, pipe: Any, nbytes: int) -> None:
    """Sends a batch and waits to be told to end."""
    pipe.send(writer.pack(np.full(nbytes, 1, np.uint8)))
    pipe.recv()


def limited(writer: Writer, pipe: Any, nbytes: int) -> None:
    """Packs a batch where files may not be that large."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))
    try:
        writer.pack(np.zeros(nbytes, np.uint8))
        pipe.send("no error")
    except MemoryError as e:
        pipe.send(str(e))


# A parent that says which processes there are, and is killed: `python -c PARENT METHOD`.
PARENT = """
import multiprocessing, os, signal, sys
import numpy as np
from arenax_adapters.shared import Segment
from tests.adapters import worker_samples

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    segment = Segment(2, 3)
    pipes, workers = [], []
    for _ in range(2):
        here, there = context.Pipe()
        worker = context.Process(target=worker_samples.send_then_wait, args=(segment.writer(), there, 1000))
        worker.start()
        pipes.append(here)
        workers.append(worker)
    for pipe in pipes:
        assert pipe.recv().tree.sum() == 1000
    print(*(w.pid for w in workers), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""

# One that ends with arrays still alive, in a module and in a cycle: nothing may be said on standard error.
LEAVING = """
import pickle
import numpy as np
from arenax_adapters.shared import Segment

segment = Segment(1, 4)
writer = segment.writer()
held = [pickle.loads(pickle.dumps(writer.pack(np.arange(100)))) for _ in range(3)]
array = held[0].tree
cycle = [held[1]]
cycle.append(cycle)
print(int(array.sum()))
"""


class Rows:
    """Sample i: 3000 floats i, i itself, and a text; at `broken` there is an error instead."""

    def __init__(self, count: int, broken: int | None = None) -> None:
        self.count, self.broken = count, broken

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Any]:
        i = int(i)
        if i == self.broken:
            raise ValueError(f"sample {i} is broken")
        return {"x": np.full(3000, i, np.float32), "i": i, "text": f"t{i}", "none": None}

    def __repr__(self) -> str:
        return f"Rows({self.count})"


def with_ragged(row: Any) -> dict[str, Any]:
    """Of a row, its numbers, twice as many, and an array of which the eight rows of one batch have as much."""
    return {"x": np.repeat(row["x"], 2), "i": row["i"], "r": np.full(ragged_width(row["i"]), row["i"], np.float32)}


def ragged_width(i: int) -> int:
    return 3 + 4000 * (i // 8 % 3)


def initialised(index: int, count: int) -> None:
    """A `worker_init_fn`."""
    os.environ["WORKER_SAMPLES"] = f"{index} of {count}"


def described(batch: Any) -> Any:
    """A `map` after the batching: replaces one array, changes one in place, and adds what the worker is."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    batch["i"] += 1000
    worker = np.frombuffer(os.environ.get("WORKER_SAMPLES", "none").encode(), np.uint8)
    return {**batch, "x": batch["x"] * 2, "worker": worker, "backends": len(bridge._backends) if bridge else 0}

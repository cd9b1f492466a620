"""One of the demo's three runs, in a process of its own: train on the batches of a file, measure every step.

`python -m arenax_stress._demo_run KIND TEXTS SEED` writes a line to its output as each step ends, then the run in JSON.
"""

import contextlib
import json
import resource
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np

import arenax

from ._model import init, train_step

KINDS = ("exact", "padded", "pooled")
MOST_CLASSES = 9

Batch: TypeAlias = dict[str, Any]
Feed: TypeAlias = Callable[[Sequence[bytes]], AbstractContextManager[Batch]]


@dataclass
class Run:
    """What one run did; every list has one entry a step.

    Attributes:
        kind: One of `KINDS`.
        losses: Mean negative log-likelihood of a byte, in nats.
        step_seconds: From the texts to the loss on the host.
        landing_seconds: Of that, from the texts to the batch on the device.
        step_faults: Minor page faults in the step.
        landing_faults: Of these, until the batch was on the device.
        compiles: Train steps compiled.
        other_compiles: Other programs compiled: the pool's own.
        fresh_arrays: Arrays of the batch that got new device memory.
        padding: Share of the elements of the tokens that are padding, over all steps.
        addresses: Different places in memory that the batches' arrays had.
        setup_compiles: Programs compiled to reserve the slots.
        compile_seconds: Time spent in the compiler, from the reservation on.
        setup_seconds: To make the parameters and, in the pooled run, to reserve the slots.
        loop_seconds: The training loop.
        peak_bytes: Highest resident memory of the process.
        pool: The pool's statistics as it prints them, and its counters; empty where there is no pool.
        environment: Versions and the device.
    """

    kind: str
    losses: list[float] = field(default_factory=list[float])
    step_seconds: list[float] = field(default_factory=list[float])
    landing_seconds: list[float] = field(default_factory=list[float])
    step_faults: list[int] = field(default_factory=list[int])
    landing_faults: list[int] = field(default_factory=list[int])
    compiles: list[int] = field(default_factory=list[int])
    other_compiles: list[int] = field(default_factory=list[int])
    fresh_arrays: list[int] = field(default_factory=list[int])
    padding: float = 0.0
    addresses: int = 0
    setup_compiles: int = 0
    compile_seconds: float = 0.0
    setup_seconds: float = 0.0
    loop_seconds: float = 0.0
    peak_bytes: int = 0
    pool: dict[str, Any] = field(default_factory=dict[str, Any])
    environment: dict[str, Any] = field(default_factory=dict[str, Any])

    def steady(self, figures: Sequence[float]) -> list[float]:
        """Those of `figures`, one a step, that belong to steps in which nothing was compiled."""
        compiled = zip(self.compiles, self.other_compiles, strict=True)
        return [figure for figure, counts in zip(figures, compiled, strict=True) if not any(counts)]


class Compiles:
    """Counts the programs that this process compiles from its construction on."""

    def __init__(self) -> None:
        self.train_steps = 0
        self.others = 0
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **fields: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.seconds += duration_secs
            if "train_step" in str(fields.get("fun_name")):
                self.train_steps += 1
            else:
                self.others += 1


def collate(texts: Sequence[bytes], capacity: int) -> Batch:
    """Returns a batch as NumPy arrays: the texts in rows of `capacity` bytes, zeros behind them, and their lengths."""
    tokens = np.zeros((len(texts), capacity), np.uint8)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = np.frombuffer(text, np.uint8)
    return {"tokens": tokens, "lengths": np.array([len(text) for text in texts], np.int32)}


def longest(texts: Sequence[bytes]) -> int:
    """The length that a batch needs."""
    return max(map(len, texts))


def size_classes(batches: Sequence[Sequence[bytes]]) -> arenax.SizeClasses:
    """The size classes that pad these batches least."""
    return arenax.SizeClasses.fit([longest(texts) for texts in batches], MOST_CLASSES, multiple_of=8)


# The three ways to bring a batch to the device. Nothing else differs between the runs. --------------------------------


@contextlib.contextmanager
def exact(texts: Sequence[bytes]) -> Generator[Batch, None, None]:
    """As long as the longest text of the batch, in fresh arrays."""
    yield jax.device_put(collate(texts, longest(texts)))


def padded(classes: arenax.SizeClasses) -> Feed:
    """Padded by hand up to the size class, in fresh arrays."""

    @contextlib.contextmanager
    def feed(texts: Sequence[bytes]) -> Generator[Batch, None, None]:
        yield jax.device_put(collate(texts, classes.class_of(longest(texts))))

    return feed


def pooled(pool: arenax.BufferPool) -> Feed:
    """As long as the longest text; the pool pads it up to the size class, in a slot of its own."""

    @contextlib.contextmanager
    def feed(texts: Sequence[bytes]) -> Generator[Batch, None, None]:
        with pool.step() as step:
            yield step.put(collate(texts, longest(texts)))

    return feed


def train(kind: str, batches: Sequence[Sequence[bytes]], seed: int, on_step: Callable[[], object]) -> Run:
    """Does one run.

    Args:
        kind: One of `KINDS`.
        batches: The texts of each step.
        seed: Of the parameters.
        on_step: Called as each step ends, outside of what is timed.

    Returns:
        The run.
    """
    run = Run(kind)
    classes = size_classes(batches)
    began = time.perf_counter()
    state = init(seed)
    jax.block_until_ready(state)
    compiles = Compiles()
    with contextlib.ExitStack() as stack:
        pool = None
        feed: Feed
        if kind == "pooled":
            ragged = {"tokens": arenax.Ragged(axis=1, size_classes=classes), "lengths": None}
            pool = stack.enter_context(arenax.BufferPool(ragged=ragged, name="demo"))
            pool.reserve(collate(batches[0], longest(batches[0])), slots=1)  # One batch is alive at a time.
            feed = pooled(pool)
        else:
            feed = exact if kind == "exact" else padded(classes)
        run.setup_seconds, run.setup_compiles = time.perf_counter() - began, compiles.others
        addresses: set[int] = set()
        elements = 0
        for texts in batches:
            made, compiled, others = _made(pool), compiles.train_steps, compiles.others
            faults, start = page_faults(), time.perf_counter()
            with feed(texts) as batch:
                jax.block_until_ready(batch)
                landed, landing_faults = time.perf_counter(), page_faults()
                state, loss = train_step(state, batch["tokens"], batch["lengths"])
                run.losses.append(float(loss))  # Waits for the step.
                end, end_faults = time.perf_counter(), page_faults()
                arrays: list[jax.Array] = jax.tree.leaves(batch)
                addresses.update(a.unsafe_buffer_pointer() for a in arrays)
                elements += batch["tokens"].size
                # Without a pool every array of the batch is new; a pool tells what it had to make.
                run.fresh_arrays.append(len(arrays) if pool is None else _made(pool) - made)
                del batch, arrays
            run.step_seconds.append(end - start)
            run.landing_seconds.append(landed - start)
            run.step_faults.append(end_faults - faults)
            run.landing_faults.append(landing_faults - faults)
            run.compiles.append(compiles.train_steps - compiled)
            run.other_compiles.append(compiles.others - others)
            on_step()
        run.loop_seconds = sum(run.step_seconds)
        if pool is not None:
            stats = pool.stats()
            counters = {n: getattr(stats, n) for n in dir(stats) if n.endswith(("_count", "_bytes"))}
            run.pool = {"text": str(stats), **counters}
    run.padding = 1 - sum(len(text) for texts in batches for text in texts) / elements
    run.addresses = len(addresses)
    run.compile_seconds = compiles.seconds
    run.peak_bytes = peak_resident_bytes()
    device = jax.devices()[0]
    run.environment = {"jax": jax.__version__, "platform": device.platform, "device": device.device_kind}
    return run


def _made(pool: arenax.BufferPool | None) -> int:
    """Device arrays that the pool has made so far."""
    if pool is None:
        return 0
    stats = pool.stats()
    return stats.creation_count + stats.spill_count


def page_faults() -> int:
    """Minor page faults of this process so far: pages of memory that it touched for the first time."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def peak_resident_bytes() -> int:
    """The highest resident memory of this process."""
    # On Linux ru_maxrss begins with what the parent had when it started this process, and /proc does not.
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def save(batches: Sequence[Sequence[bytes]], path: Path) -> None:
    """Writes batches for the three processes to read."""
    path.write_text(json.dumps([[text.decode("latin-1") for text in texts] for texts in batches]), encoding="utf-8")


def load(path: Path) -> list[list[bytes]]:
    """Reads what `save` wrote."""
    return [[text.encode("latin-1") for text in texts] for texts in json.loads(path.read_text(encoding="utf-8"))]


def main() -> None:
    """Does the run that the command line asks for."""
    kind, texts, seed = sys.argv[1:]
    run = train(kind, load(Path(texts)), int(seed), lambda: print(".", flush=True))
    print(json.dumps(asdict(run)))


if __name__ == "__main__":
    main()

"""torch's loader in programs of their own, which exit, are killed or interrupted; and what a batch costs."""

# pyright: reportPossiblyUnboundVariable=false

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from arenax_adapters.torch import DataLoader  # noqa: E402
from tests.adapters.conftest import MakePool, assert_nothing_left  # noqa: E402
from tests.adapters.torch_samples import FORK, SECONDS, Samples, descriptors  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

ROOT = Path(__file__).parents[2]
BEGIN = """
import multiprocessing, os, signal, sys, warnings
warnings.filterwarnings("ignore", message=r"os\\.fork|This DataLoader will create")
import numpy as np, torch, arenax
from arenax_adapters.torch import DataLoader

class Samples:
    def __init__(self, at=None, act=None):
        self.at, self.act, self.done = at, act, multiprocessing.get_context("fork").Event()
    def __len__(self):
        return 12
    def __getitem__(self, i):
        if i == self.at and not self.done.is_set():
            self.act(self)
        return np.full(1 << 15, i, np.float32)

def loader(dataset, **options):
    return DataLoader(dataset, num_workers=1, multiprocessing_context="fork", **options)

def numbers(batches):
    return [int(b[0, -1]) for b in batches]
"""


def start(program: str) -> subprocess.Popen[str]:
    """In a session of its own, so that a signal to its group meets nobody else."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", BEGIN + program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def assert_end(pids: Sequence[int]) -> None:
    deadline = time.monotonic() + SECONDS
    while any(map(runs, pids)) and time.monotonic() < deadline:
        os.sched_yield()
    assert not any(map(runs, pids))


def test_exit_in_the_middle_of_epochs():
    """No warning and no worker stays, whatever is alive: iterators, workers that persist, a thread, adopted arrays."""
    program = """
kept = []
adopt = {"landing": "adopt"}
for options in ({}, {"persistent_workers": True}, {"prefetch": 2}, adopt, {"prefetch": 2, **adopt}):
    batches = iter(loader(Samples(), **options))
    kept.append((batches, next(batches), np.asarray(next(batches))))
whole = loader(Samples(), persistent_workers=True)
assert numbers(whole) == list(range(12))
print(*(p.pid for p in multiprocessing.active_children()))
"""
    process = start(program)
    out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, err) == (0, "")
    pids = [int(pid) for pid in out.split()]
    assert len(pids) == 6
    assert_end(pids)


def test_workers_end_with_a_parent_that_is_killed():
    """Also those that are in a sample, be it their first; torch's own would look up after it only."""
    program = """
def stay(samples):
    os.write(1, f"{os.getpid()}\\n".encode())
    signal.pause()

first, later, ahead, idle = Samples(0, stay), Samples(2, stay), Samples(3, stay), Samples()
kept = [iter(loader(first)), iter(loader(later)), iter(loader(ahead, prefetch=2)), iter(loader(idle))]
for batches in kept[1:]:
    next(batches)
(worker,) = kept[3]._source._workers()
os.write(1, f"{worker.pid}\\n".encode())
signal.pause()
"""
    process = start(program)
    try:
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in range(4)]
        assert all(map(runs, pids))
        process.kill()
        process.wait(SECONDS)
        assert_end(pids)
    finally:
        process.kill()
        process.communicate(timeout=SECONDS)


def test_an_interrupt_of_the_whole_group():
    """As Ctrl-C is: the workers end by it too."""
    program = """
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
_MultiProcessingDataLoaderIter._try_get_data.__defaults__ = (0.1,)  # torch looks after its workers every 5 seconds.
warnings.filterwarnings("ignore", "an array of .* was donated away")  # It may strike in a landing.

def interrupt(samples):
    samples.done.set()
    os.killpg(0, signal.SIGINT)

for options in ({}, {"persistent_workers": True}, {"prefetch": 2}, {"prefetch": 2, "persistent_workers": True}):
    with arenax.BufferPool() as pool:
        samples = Samples(5, interrupt)
        batches = loader(samples, pool=pool, **options)
        for _ in range(2):
            samples.done.clear()
            try:
                numbers(batches)
                print("no interrupt")
            except KeyboardInterrupt:
                pass
            assert numbers(batches) == list(range(12))
        assert pool.stats().leased_count == 0
        del batches
print(len(multiprocessing.active_children()), len(os.listdir("/proc/self/fd")))
"""
    process = start(program)
    try:
        out, err = process.communicate(timeout=2 * SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, err) == (0, "")
    assert out.split()[0] == "0"


def test_what_a_batch_costs(make_pool: MakePool):
    """No slot, no descriptor and hardly a page after warm-up, where torch's own takes a new file for each array."""
    pages = 1 << 9
    samples = Samples(lambda i: {"x": np.full(pages << 10, i, np.float32), "y": i}, 40)
    pool = make_pool()
    loader = DataLoader(samples, num_workers=2, multiprocessing_context=FORK, pool=pool)
    batches = iter(loader)
    for _ in range(10):
        next(batches)
    stats, files = pool.stats(), descriptors()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for n, batch in enumerate(batches, 10):
        assert int(batch["x"][0, -1]) == int(batch["y"][0]) == n
        assert n == 39 or descriptors() == files
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    assert n == 39
    assert pool.stats().creation_count - stats.creation_count <= 2  # `for` holds a batch while the next one lands.
    assert pool.stats().hit_count - stats.hit_count >= 58
    assert faults < 30 * pages / 4
    assert loader.overflow_count == 0
    del batch
    assert_nothing_left(pool)

"""Workloads with the rhythm of programs: steps, phases, tenants, threads."""

import itertools

import numpy as np

from ._traces import Trace
from ._workload_script import Script

KIB, MIB = 2**10, 2**20


def sawtooth(seed: int = 0, *, events: int = 20_000, layers: int = 24) -> Trace:
    """Memory climbs buffer by buffer and falls in reverse order, each time to another height.

    A training step on batches of ragged length: the activations of the forward pass, given back by the backward pass.
    Every size follows the length of the batch, so hardly two teeth have a size in common. A stack would serve it
    without any waste; it shows what it costs not to be one, and what rounding the length up to a class is worth.

    Args:
        seed: Of the random numbers.
        events: How many allocations and frees.
        layers: Each has three activations.
    """
    script, rng = Script("sawtooth", events), np.random.default_rng(seed)
    while not script.full:
        length = int(rng.lognormal(np.log(500), 0.6)) + 1
        row = 8 * length * 1024 * 2  # 8 sequences, 1,024 features, bfloat16
        forward = [script.allocate(row * width) for _ in range(layers) for width in (1, 3, 4)]
        script.free(reversed(forward))
    return script.trace()


def training_with_growing_eval(seed: int = 0, *, events: int = 20_000, steps_per_eval: int = 10) -> Trace:
    """Training on batches of one shape, and now and then an evaluation on a set that has grown.

    Parameters and the optimizer's state stay for ever. An evaluation gathers its predictions batch by batch and then
    copies them into one buffer, a little larger than the last time, and a metric of each is kept. No block that a cache
    has kept is large enough for the next one, so it holds ever more memory that nobody uses, until it must give back
    what it can; this is how a run dies at step 200,000. Where holes are joined in one region, as in XLA's by default,
    it costs nothing. A pool rounds up, and makes a new slot a few times in all.

    Args:
        seed: Of the random numbers.
        events: How many allocations and frees.
        steps_per_eval: Training steps between two evaluations.
    """
    script, rng = Script("training_with_growing_eval", events), np.random.default_rng(seed)
    weights = (rng.integers(1, 17, 40) * 256 * KIB).tolist()
    for weight in weights:
        for _ in range(3):  # itself and two moments
            script.allocate(weight)
    batches = 16.0
    while not script.full:
        for _ in range(steps_per_eval):
            batch = script.allocate(6 * MIB)
            activations = [script.allocate(2 * weight) for weight in weights[::4]]
            gradients: list[int] = []
            for activation, weight in zip(reversed(activations), weights[::-4], strict=True):
                gradients.append(script.allocate(weight))
                script.free([activation])
            script.free([*gradients, batch])
        predictions = [script.allocate(2 * MIB) for _ in range(int(batches))]
        gathered = script.allocate(2 * MIB * int(batches))
        script.free(predictions)
        script.allocate(4 * KIB)
        script.free([gathered])
        batches *= 1.03 + 0.02 * rng.random()
    return script.trace()


def two_tenants(seed: int = 0, *, events: int = 20_000, steps_per_turn: int = 20) -> Trace:
    """Two models that share a device and take turns, each with sizes of its own.

    While one runs, the other has only its parameters. It shows stranding: what is kept in the sizes of the one is of no
    use to the other, so a pool that never converts its slots needs the sum of both peaks, and a cache of blocks is on
    the way there.

    Args:
        seed: Of the random numbers.
        events: How many allocations and frees.
        steps_per_turn: Steps before the other's turn.
    """
    script, rng = Script("two_tenants", events), np.random.default_rng(seed)
    # Each has 72 MiB on the average, in sizes between two powers of two that are not the other's.
    tenants = [[int(n) * KIB for n in rng.integers(low, 2 * low, 48 * 1024 // low)] for low in (1024, 4096)]
    for sizes in tenants:
        for size in sizes:
            script.allocate(size // 2)
    turns = itertools.cycle(tenants)
    while not script.full:
        sizes = next(turns)
        for _ in range(steps_per_turn):
            alive = [script.allocate(size) for size in sizes]
            script.free([alive[i] for i in rng.permutation(len(alive))])
    return script.trace()


def producer_consumer(seed: int = 0, *, events: int = 20_000, producers: int = 4, depth: int = 8) -> Trace:
    """Threads that make batches of audio of ragged length, and one that takes and frees them.

    Threads 1, 2, … produce, thread 0 consumes; times are in seconds. At most `depth` batches wait, and a producer that
    finds the queue full waits with the batch that it has. Every buffer is freed by another thread than its own: a cache
    for each thread fills on the one side and starves on the other. The consumer is now faster than the producers, now
    slower, so the queue runs empty and full.

    Args:
        seed: Of the random numbers.
        events: How many allocations and frees.
        producers: How many threads produce.
        depth: Batches that the queue holds.
    """
    script, rng = Script("producer_consumer", events), np.random.default_rng(seed)
    # When each producer has its next batch ready; in the queue are batches that nobody has taken yet.
    ready = rng.exponential(0.01, producers)
    queue: list[int] = []
    blocked: list[tuple[int, int]] = []
    now = taken = 0.0
    while not script.full:
        producer = int(np.argmin(ready))
        if ready[producer] <= taken or not queue:
            now = max(now, float(ready[producer]))
            length = int(rng.lognormal(np.log(400), 0.7)) + 1
            batch = script.allocate(32 * length * 80 * 4, time=now, thread=producer + 1)
            if len(queue) < depth:
                queue.append(batch)
                ready[producer] = now + rng.exponential(0.01)
            else:
                blocked.append((producer, batch))
                ready[producer] = np.inf
        else:
            now = max(now, taken)
            script.free([queue.pop(0)], time=now, thread=0)
            if blocked:
                waiter, batch = blocked.pop(0)
                queue.append(batch)
                ready[waiter] = now + rng.exponential(0.01)
            slow = 1 + 0.8 * np.sin(now)  # The mean is that of all producers together.
            taken = now + rng.exponential(0.01 / producers * slow)
    return script.trace()


def phases(seed: int = 0, *, events: int = 20_000, survivors: float = 0.3, lives: int = 3) -> Trace:
    """Phases with larger buffers each, of which some survive.

    Of the 200 buffers of a phase three in ten stay until three phases later, and they lie scattered among the others.
    What is freed between two survivors is a hole of a few buffers, and those of the next phase are a third larger and
    leave a rest of it; after six phases sizes begin anew. It shows external fragmentation, mild where holes are joined
    and grave in a cache that keeps segments for sizes. Slots of fixed size have none, but strand between phases.

    Args:
        seed: Of the random numbers.
        events: How many allocations and frees.
        survivors: The share that survives.
        lives: For how many phases.
    """
    script, rng = Script("phases", events), np.random.default_rng(seed)
    old: list[list[int]] = []
    sizes = itertools.cycle(256 * KIB * (4 / 3) ** np.arange(6))
    while not script.full:
        size = next(sizes)
        buffers = [script.allocate(size * factor) for factor in rng.uniform(0.95, 1.05, 200)]
        stays = rng.random(len(buffers)) < survivors
        script.free([b for b, s in zip(buffers, stays, strict=True) if not s])
        old.append([b for b, s in zip(buffers, stays, strict=True) if s])
        if len(old) > lives:
            script.free(old.pop(0))
    return script.trace()

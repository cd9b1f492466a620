"""Scenarios that users of JAX have met: what a program did when its device ran out of memory that it seemed to have."""

from collections.abc import Callable

import numpy as np

from ._traces import Trace
from ._workload_script import Script

KIB, MIB = 2**10, 2**20


def evaluation_between_training(seed: int = 0, *, events: int = 20_000, steps_per_eval: int = 25) -> Trace:
    """Training that stops every so often to evaluate batches of another size.

    A training step keeps the activations of all its layers until the backward pass has used them; an evaluation has
    batches eight times as large and keeps those of two layers at a time. Neither asks for a size of the other's, and
    while the one runs the other's sizes lie idle. XLA's allocator joins what is free and so loses less than whatever
    keeps memory by its size: a cache of blocks, or a pool, holds both at once unless it gives one up for the other.

    Args:
        seed: Of the random numbers.
        events: How many allocations and frees.
        steps_per_eval: Training steps between two evaluations.
    """
    script, rng = Script("evaluation_between_training", events), np.random.default_rng(seed)
    widths = (rng.integers(4, 13, 24) * 64 * KIB).tolist()
    for width in widths:
        for _ in range(3):  # A layer's parameters and their two moments.
            script.allocate(4 * width)
    while not script.full:
        for _ in range(steps_per_eval):
            batch = script.allocate(2 * MIB)
            forward = [script.allocate(8 * width) for width in widths]
            for activation, width in zip(reversed(forward), reversed(widths), strict=True):
                gradient = script.allocate(4 * width)
                script.free([activation, gradient])
            script.free([batch])
        for _ in range(5):
            batch = script.allocate(16 * MIB)
            before = script.allocate(64 * widths[0])
            for width in widths[1:]:
                after = script.allocate(64 * width)
                script.free([before])
                before = after
            script.free([before, batch])
    return script.trace()


def restored_checkpoint(seed: int = 0, *, events: int = 20_000, steps_between: int = 40) -> Trace:
    """A checkpoint that is restored, again and again, into a device that is already full.

    The leaves of the new state arrive in no order, four at a time, each in float32 that is cast and dropped; only when
    all are there does the old state go. So the peak is two states, which no allocator can help. What one can lose
    on top are the holes that the casts leave between leaves that stay; and the next step, with a transient as large as
    a quarter of the state, needs one in a single piece. To restore into the old state's own buffers halves the peak.

    Args:
        seed: Of the random numbers.
        events: How many allocations and frees.
        steps_between: Training steps between two restores.
    """
    script, rng = Script("restored_checkpoint", events), np.random.default_rng(seed)
    leaves = (2 ** rng.uniform(0, 5, 60) * 256 * KIB).astype(np.int64).tolist()
    state = [script.allocate(leaf) for leaf in leaves]
    while not script.full:
        for _ in range(steps_between):
            gathered = script.allocate(sum(leaves) // 4)
            gradients = [script.allocate(leaf) for leaf in leaves[::6]]
            script.free([*gradients, gathered])
        restored: list[int] = []
        staged: list[tuple[int, int]] = []
        for leaf in rng.permutation(leaves).tolist():
            staged.append((script.allocate(2 * leaf), leaf))
            if len(staged) == 4:
                cast, size = staged.pop(int(rng.integers(4)))
                restored.append(script.allocate(size))
                script.free([cast])
        for cast, size in staged:
            restored.append(script.allocate(size))
            script.free([cast])
        script.free(state)
        state = restored
    return script.trace()


def length_curriculum(seed: int = 0, *, events: int = 20_000, stages: int = 5, layers: int = 12) -> Trace:
    """A curriculum of lengths: short sequences first, and in each stage twice as long ones.

    Within a stage every batch has a length of its own, up to that of the stage, and each size follows it. Without
    classes every length compiles the step anew. The slots of a stage are of no use to the next, so a pool that is
    never trimmed holds the sum over the stages; with `pool.trim` between stages it holds what the last one needs.

    Args:
        seed: Of the random numbers.
        events: How many allocations and frees.
        stages: How often the length doubles, and one.
        layers: Each has two activations.
    """
    script, rng = Script("length_curriculum", events), np.random.default_rng(seed)
    parameters = [script.allocate(4 * MIB) for _ in range(layers)]
    steps = max(1, events // stages // (4 * layers + 2))
    longest = 128
    while not script.full:
        for _ in range(steps):
            length = int(rng.integers(longest // 2, longest, endpoint=True))
            batch = script.allocate(16 * length * 4)
            forward = [script.allocate(16 * length * width * 2) for _ in parameters for width in (256, 1024)]
            script.free([*reversed(forward), batch])
        longest = min(2 * longest, 128 * 2 ** (stages - 1))
    return script.trace()


def kept_results(seed: int = 0, *, events: int = 20_000, kept: int = 100) -> Trace:
    """Small results that are kept alive between large transients, as in ``losses.append(step(batch))``.

    Every call works in a few large buffers whose sizes follow the length of its batch, and returns a few kilobytes,
    allocated while those are alive; a hundred results are kept, then logged and dropped. Each pins a place in the
    middle of what the next, larger call would need in one piece: memory breaks up although hardly any is in use
    (jax-ml/jax#9064). Results that are moved to the host at once, or written into a slot kept for them, pin nothing.

    Args:
        seed: Of the random numbers.
        events: How many allocations and frees.
        kept: Results that are kept before they are dropped.
    """
    script, rng = Script("kept_results", events), np.random.default_rng(seed)
    weights = [script.allocate(8 * MIB) for _ in range(8)]
    results: list[int] = []
    while not script.full:
        length = rng.lognormal(np.log(400), 0.5)
        transients = [script.allocate(length * width * KIB) for width in (96, 24, 48, 192)]
        script.free([transients.pop(0)])
        results.append(script.allocate(4 * KIB * len(weights)))
        transients.append(script.allocate(length * 64 * KIB))
        results.append(script.allocate(4 * KIB))
        script.free(transients)
        if len(results) >= 2 * kept:
            script.free(results)
            results.clear()
    return script.trace()


def actor_and_learner(seed: int = 0, *, events: int = 20_000, rollouts: int = 16) -> Trace:
    """Two models that take turns: an actor generates, and a learner trains on what it has generated.

    The actor holds a cache of keys and values for each of its rollouts, as long as that rollout becomes; the learner
    takes the rollouts four at a time, padded to the longest of the four. Both models stay. Each turn's lengths are new
    and each half of a turn leaves the other's memory free; the rollouts themselves live across the border and lie
    where it was.

    Args:
        seed: Of the random numbers.
        events: How many allocations and frees.
        rollouts: Rollouts a turn, a multiple of four.
    """
    script, rng = Script("actor_and_learner", events), np.random.default_rng(seed)
    for size in (24, 24, 24, 8):  # The learner's parameters and two moments; the actor is a smaller model.
        for _ in range(4):
            script.allocate(size * MIB)
    while not script.full:
        lengths = np.minimum(rng.lognormal(np.log(300), 0.8, rollouts).astype(np.int64) + 1, 4096)
        texts: list[tuple[int, int]] = []
        caches = [script.allocate(int(length) * 32 * KIB) for length in lengths]
        for at in np.argsort(lengths, kind="stable").tolist():  # The shortest ends first.
            texts.append((int(lengths[at]), script.allocate(int(lengths[at]) * 2 * KIB)))
            script.free([caches[at]])
        for at in range(0, rollouts, 4):
            longest = max(length for length, _ in texts[at : at + 4])
            batch = script.allocate(4 * longest * 2 * KIB)
            forward = [script.allocate(4 * longest * 8 * KIB) for _ in range(8)]
            script.free([*reversed(forward), batch])
        script.free([text for _, text in texts])
    return script.trace()


# As WORKLOADS: each takes `seed` and, by keyword, `events`, and the first paragraph of its docstring says what it is.
SCENARIOS: dict[str, Callable[..., Trace]] = {
    scenario.__name__: scenario
    for scenario in (
        evaluation_between_training,
        restored_checkpoint,
        length_curriculum,
        kept_results,
        actor_and_learner,
    )
}

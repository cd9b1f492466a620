"""In steady state a pool over eight devices makes, moves, compiles and touches nothing, as one on a single device."""

import resource
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import arenax

SLOTS, WARM, STEPS = 3, 50, 300


def batch_of(i: int) -> dict[str, Any]:
    return {"x": np.full((64, 32), i % 7, np.float32), "y": np.arange(i, i + 64, dtype=np.int32)}


@pytest.mark.parametrize("landing", ["host", "ring"])
@pytest.mark.parametrize("spec", [P("all"), P()], ids=["cut", "copied"])
def test_nothing_is_made_moved_or_compiled(spec: P, landing: str) -> None:
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("all",)), spec)
    sums = jax.jit(lambda batch: (batch["x"].sum(), batch["y"].sum()))
    seen: dict[str, set[tuple[int, ...]]] = {"x": set(), "y": set()}

    def train(count: int) -> None:
        for i in range(count):
            with pool.step() as step:
                batch = step.put(batch_of(i))
                for name, leaf in batch.items():
                    seen[name].add(tuple(shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards))
                assert [int(n) for n in sums(batch)] == [2048 * (i % 7), 64 * i + 2016]

    with arenax.BufferPool(sharding, landing=landing) as pool:
        pool.reserve(batch_of(0), slots=SLOTS)
        train(WARM)
        before = pool.stats()
        with pool.steady():
            train(STEPS)
        now = pool.stats()
        for count in ("creation_count", "spill_count", "copy_count", "conversion_count", "compile_count"):
            assert getattr(now, count) == getattr(before, count)
        assert all(0 < len(addresses) <= SLOTS for addresses in seen.values())
        assert now.hit_count - before.hit_count == 2 * STEPS
        pool.check()


def test_a_landing_touches_no_new_page() -> None:
    """Its own: a jitted function that sums over the devices takes pages for itself, some twenty a call on JAX 0.10."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("all",)), P("all"))
    batches = [batch_of(i) for i in range(7)]
    with arenax.BufferPool(sharding) as pool:
        faults = []
        for i in range(WARM + 3 * STEPS):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            with pool.step() as step:
                step.put(batches[i % 7])
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    # In the quietest third: what other tests have left in the process may touch pages of its own meanwhile.
    assert min(sum(n > 0 for n in faults[WARM + i * STEPS :][:STEPS]) for i in range(3)) < STEPS / 20

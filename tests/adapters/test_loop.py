"""What `pooled` does: the step draws its batch and gives it back, and what it returns is never overwritten."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import arenax
from arenax_adapters.loop import pooled
from tests.adapters.conftest import MakePool

SHAPE = (64, 64)


def batch_of(i: int) -> dict[str, Any]:
    return {"x": np.full(SHAPE, i, np.float32), "y": np.int32(i)}


@jax.jit
def train_step(state: Any, batch: Any) -> Any:
    return state + batch["x"].mean(), batch["y"] * 2


def test_the_loop_computes_what_it_would_without(make_pool: MakePool):
    pool = make_pool()
    step, state = pooled(train_step, pool), jnp.float32(0)
    for i in range(20):
        state, loss = step(state, batch_of(i))
        assert int(loss) == 2 * i
        assert pool.stats().leased_count == 0
    assert float(state) == sum(range(20))
    assert pool.stats().slot_count == 2


def test_one_slot_serves_and_nothing_is_allocated(make_pool: MakePool):
    pool = make_pool(on_exhausted="raise")
    pool.reserve(batch_of(0), slots=1)
    step, state = pooled(train_step, pool), jnp.float32(0)
    state, _ = step(state, batch_of(0))
    with pool.steady():
        for i in range(50):
            state, _ = step(state, batch_of(i))


def test_ragged_batches_come_with_their_sizes(make_pool: MakePool):
    traces: list[Any] = []

    @jax.jit
    def masked_sum(state: Any, batch: Any, sizes: Any) -> Any:
        traces.append(batch["x"].shape)
        assert sizes["y"] is None
        mask = arenax.valid_mask(sizes["x"], batch["x"].shape[0])
        return state + jnp.where(mask, batch["x"], 0).sum()

    ragged = {"x": arenax.Ragged(0, arenax.SizeClasses.pow2(8, 32), pad_value=99), "y": None}
    step, state = pooled(masked_sum, make_pool(ragged=ragged), with_sizes=True), jnp.int32(0)
    lengths = [3, 30, 8, 7, 17]
    for n in lengths:
        state = step(state, {"x": np.ones((n,), np.int32), "y": np.int32(0)})
    assert int(state) == sum(lengths)
    assert sorted(traces) == [(8,), (32,)]


def test_a_step_that_raises_gives_its_batch_back(make_pool: MakePool):
    def broken(state: Any, batch: Any) -> Any:
        raise ZeroDivisionError

    pool = make_pool()
    with pytest.raises(ZeroDivisionError):
        pooled(broken, pool)(0, batch_of(0))
    assert pool.stats().leased_count == 0
    assert pool.stats().slot_count == 2


def test_it_looks_like_the_function_that_it_wraps(make_pool: MakePool):
    class Model:
        def __init__(self) -> None:
            self.weights = np.ones(1000)

        def __call__(self, state: Any, batch: Any) -> int:
            return 3

    pool, model = make_pool(), Model()
    step = pooled(train_step, pool)
    assert (step.__name__, step.__wrapped__) == ("train_step", train_step)
    for callable_ in (model, functools.partial(model), lambda state, batch: 3, model.__call__):
        step = pooled(callable_, pool)
        assert step(0, batch_of(0)) == 3
        assert not hasattr(step, "weights")


@pytest.mark.parametrize(
    ("step", "pool", "match"), [(3, ..., "train_step must be a function"), (train_step, None, "pool must be")]
)
def test_bad_arguments_raise_at_once(make_pool: MakePool, step: Any, pool: Any, match: str):
    with pytest.raises(TypeError, match=match):
        pooled(step, make_pool() if pool is ... else pool)


# What it returns is the caller's. -------------------------------------------------------------------------------------


def itself(x: jax.Array) -> Any:
    return x


def on_its_device(x: jax.Array) -> Any:
    (device,) = x.devices()
    return jax.device_put(x, device)


def replicated(x: jax.Array) -> Any:
    return jax.device_put(x, NamedSharding(Mesh(np.array(jax.devices()), "d"), PartitionSpec()))


def as_one_shard(x: jax.Array) -> Any:
    devices = jax.devices()[:2]
    shards = [jax.device_put(x, devices[0]), jax.device_put(x, devices[1])]
    sharding = NamedSharding(Mesh(np.array(devices), "d"), PartitionSpec("d"))
    return jax.make_array_from_single_device_arrays((2 * SHAPE[0], SHAPE[1]), sharding, shards)


def second_handle(x: jax.Array) -> Any:
    return x.addressable_data(0)


def same_objects(x: jax.Array) -> Any:
    return [x[:], jnp.asarray(x), {"again": x.reshape(x.shape)}]


SHARING: list[Callable[[jax.Array], Any]] = [
    itself,
    on_its_device,
    replicated,
    as_one_shard,
    second_handle,
    same_objects,
]
APART: list[Callable[[jax.Array], Any]] = [
    jax.jit(itself),
    jax.jit(lambda x: {"x": x, "more": [x[:1], x.reshape(-1), x.T]}),
    jnp.copy,
    lambda x: jax.device_put(x, jax.devices()[1]),
    np.array,
]
DONATED: list[Callable[[jax.Array], Any]] = [
    jax.jit(itself, donate_argnums=0),
    jax.jit(lambda x: x + 0, donate_argnums=0),
    jax.jit(lambda x: x + 0, donate_argnums=0, keep_unused=True),
]
VIEWS: list[Callable[[jax.Array], Any]] = [np.asarray]


@pytest.mark.filterwarnings("ignore:an array of .* was donated away:RuntimeWarning")
@pytest.mark.parametrize("returns", [*SHARING, *APART, *DONATED, *VIEWS])
def test_no_result_ever_shows_another_batch(make_pool: MakePool, returns: Callable[[jax.Array], Any]):
    pool = make_pool()
    step = pooled(lambda state, batch: (state, returns(batch["x"])), pool)
    results = [step(0, batch_of(i))[1] for i in range(5)]
    for i, result in enumerate(results):
        for leaf in jax.tree.leaves(result):
            assert set(np.array(leaf).ravel()) == {i}
    assert pool.stats().slot_count == 2


@pytest.mark.parametrize("returns", SHARING)
def test_an_array_that_shares_its_memory_leaves_the_pool(make_pool: MakePool, returns: Callable[[jax.Array], Any]):
    pool = make_pool()
    step = pooled(lambda state, batch: returns(batch["x"]), pool)
    result = step(0, batch_of(1))
    assert pool.stats().creation_count == 3  # Two to begin with, and the one that took its place.
    with pytest.raises(arenax.NotSteady), pool.steady():
        step(0, batch_of(2))
    del result


@pytest.mark.parametrize("returns", APART)
def test_an_array_of_its_own_costs_nothing(make_pool: MakePool, returns: Callable[[jax.Array], Any]):
    pool = make_pool()
    step = pooled(lambda state, batch: returns(batch["x"]), pool)
    step(0, batch_of(0))
    with pool.steady():
        for i in range(5):
            step(0, batch_of(i))


def test_sizes_that_are_returned_leave_the_pool_too(make_pool: MakePool):
    pool = make_pool(ragged=arenax.Ragged(0, arenax.SizeClasses.pow2(4, 8)))
    step = pooled(lambda state, batch, sizes: sizes, pool, with_sizes=True)
    sizes = [step(0, np.zeros((n,), np.int32)) for n in (3, 4, 2)]
    assert [int(n) for n in sizes] == [3, 4, 2]


def test_arrays_without_bytes(make_pool: MakePool):
    pool = make_pool()
    step = pooled(lambda state, batch: (batch, jnp.zeros((0, 3))), pool)
    results = [step(0, np.zeros((0, 3), np.float32)) for _ in range(3)]
    assert [np.array(x).shape for result in results for x in result] == [(0, 3)] * 6


def test_a_key_made_of_a_drawn_array(make_pool: MakePool):
    step = pooled(lambda state, batch: jax.random.wrap_key_data(batch), make_pool())
    keys = [step(0, np.array([0, i], np.uint32)) for i in range(3)]
    assert [jax.random.key_data(key)[1] for key in keys] == [0, 1, 2]


def test_an_array_that_was_hidden_is_deleted_not_overwritten(make_pool: MakePool):
    # In an object that is no pytree nobody sees it. The next landing deletes it; it never shows the next batch.
    class Box:
        def __init__(self, x: jax.Array) -> None:
            self.x = x

    step = pooled(lambda state, batch: Box(batch["x"]), make_pool())
    box = step(0, batch_of(1))
    step(0, batch_of(2))
    with pytest.raises(RuntimeError, match="deleted"):
        np.array(box.x)

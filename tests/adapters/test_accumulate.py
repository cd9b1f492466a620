"""What `accumulate` does: the sums are those of hand-written code, in slots that stay where they are and go back."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import arenax
from arenax_adapters.loop import Accumulator, accumulate
from tests.adapters.conftest import MakePool, assert_nothing_left

LIKE = {"w": np.zeros((16, 8), np.float32), "b": [np.zeros(8, np.float32), np.float32(0)]}


def tree_of(i: float) -> dict[str, Any]:
    # No fractions that a sum could round.
    return {"w": jnp.full((16, 8), i, "float32"), "b": [jnp.arange(8.0) * i, jnp.float32(i)]}


def assert_equal(tree: Any, expected: Any) -> None:
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.array(x), np.array(y))


def addresses(total: Accumulator) -> list[int]:
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(total.sum)]


@pytest.mark.parametrize("landing", ["host", "ring"])
def test_sums_and_means_are_those_made_by_hand(make_pool: MakePool, landing: str):
    pool = make_pool(landing=landing)
    random = np.random.default_rng(0)
    with accumulate(pool, LIKE) as total:
        for n in (1, 3, 7):
            by_hand = LIKE
            for i in range(n):
                assert total.count == i
                grads = jax.tree.map(lambda x: jnp.array(random.normal(size=x.shape), x.dtype), LIKE)
                by_hand = jax.tree.map(jnp.add, by_hand, grads)
                total.add(grads)
            assert_equal(total.sum, by_hand)
            assert_equal(total.mean(), jax.tree.map(lambda x, n=n: x / n, by_hand))
            total.reset()
            assert total.count == 0
            assert_equal(total.sum, LIKE)
    assert_nothing_left(pool)
    assert pool.stats().slot_count == 3


def test_after_the_first_round_nothing_is_allocated_moved_or_compiled(make_pool: MakePool):
    pool = make_pool(on_exhausted="raise")
    pool.reserve(LIKE, slots=1)

    def round_of(total: Accumulator) -> Any:
        for i in range(4):
            total.add(tree_of(i))
        mean = total.mean()
        total.reset()
        return mean

    with accumulate(pool, LIKE) as total:
        round_of(total)
        expected = tree_of(1.5)
        before, created = addresses(total), pool.stats().creation_count
        with pool.steady():
            for _ in range(50):
                assert_equal(round_of(total), expected)
                assert addresses(total) == before
        assert pool.stats().creation_count == created
    assert_nothing_left(pool)


def test_another_accumulator_takes_the_same_slots(make_pool: MakePool):
    pool = make_pool()
    for i in range(2):
        with accumulate(pool, LIKE) as total:
            assert_equal(total.sum, LIKE)
            total.add(tree_of(i + 1))
            assert_equal(total.sum, tree_of(i + 1))
    assert pool.stats().slot_count == 3


def test_the_loop_around_a_step(make_pool: MakePool):
    gradient = jax.jit(jax.value_and_grad(lambda params, batch: ((batch["x"] @ params["w"]) ** 2).mean()))
    params = {"w": jnp.ones((4, 2))}
    hosts = [{"x": np.random.default_rng(i).normal(size=(8, 4)).astype(np.float32)} for i in range(6)]
    by_hand = [gradient(params, host) for host in hosts]
    pool = make_pool()
    with accumulate(pool, (jnp.float32(0), params)) as total:
        for host in hosts:
            with pool.step() as step:
                total.add(gradient(params, step.put(host)))
        expected = by_hand[0]
        for other in by_hand[1:]:
            expected = jax.tree.map(jnp.add, expected, other)
        assert_equal(total.sum, expected)
    assert_nothing_left(pool)


def test_a_sum_may_be_wider_than_what_is_added(make_pool: MakePool):
    like = {"w": jnp.zeros((4,), "bfloat16")}
    with accumulate(make_pool(), like, dtype="float32") as wide, accumulate(make_pool(), like) as narrow:
        for value in (256, 1, 1):
            for total in (wide, narrow):
                total.add({"w": jnp.full((4,), value, "bfloat16")})
        assert_equal(wide.sum, {"w": jnp.full((4,), 258.0)})
        assert_equal(narrow.sum, {"w": jnp.full((4,), 256, "bfloat16")})  # 257 is no bfloat16.
        assert wide.mean()["w"].dtype == jnp.float32
        assert narrow.mean()["w"].dtype == jnp.bfloat16


def test_dtypes_may_be_mixed(make_pool: MakePool):
    like = {
        "f": jax.ShapeDtypeStruct((3,), "float32"),
        "h": jax.ShapeDtypeStruct((3,), "bfloat16"),
        "i": arenax.ArraySpec((3,), "int32"),
        "c": np.zeros(3, np.complex64),
        "d": np.zeros(3),
        "none": None,
    }
    grads = {
        "f": np.ones(3, np.float16),
        "h": np.ones(3, np.float32),
        "i": np.ones(3, np.bool_),
        "c": np.ones(3, ml_dtypes.bfloat16),
        "d": np.ones(3),
        "none": None,
    }
    with accumulate(make_pool(), like) as total:
        for _ in range(3):
            total.add(grads)
        dtypes = {"f": "float32", "h": "bfloat16", "i": "int32", "c": "complex64", "d": "float32"}
        expected = {name: jnp.full(3, 3, dtype) for name, dtype in dtypes.items()} | {"none": None}
        assert_equal(total.sum, expected)
        assert_equal(
            total.mean(), expected | {name: jnp.ones(3, dtype) for name, dtype in dtypes.items()} | {"i": jnp.ones(3)}
        )


@pytest.mark.parametrize("leaf", [2.5, np.float32(2.5), np.full((), 2.5), jnp.float32(2.5)])
def test_scalars_and_host_arrays_may_be_added(make_pool: MakePool, leaf: Any):
    with accumulate(make_pool(), jnp.zeros(())) as total:
        total.add(leaf)
        total.add(leaf)
        assert_equal(total.sum, jnp.float32(5))


def test_a_host_array_may_be_overwritten_at_once(make_pool: MakePool):
    buffer = np.empty(100_000, np.float32)
    with accumulate(make_pool(), buffer) as total:
        for i in range(5):
            buffer[:] = i
            total.add(buffer)
        buffer[:] = -1
        assert_equal(total.sum, jnp.full(100_000, 10.0))


def test_sums_can_be_added_to_themselves(make_pool: MakePool):
    with accumulate(make_pool(), LIKE) as total:
        total.add(tree_of(1))
        total.add(total.sum)
        assert_equal(total.sum, tree_of(2))


def test_a_pool_of_another_device(make_pool: MakePool):
    device = jax.devices()[1]
    with accumulate(make_pool(placement=device), LIKE) as total:
        total.add(tree_of(3))
        assert all(x.devices() == {device} for x in jax.tree.leaves((total.sum, total.mean())))
        assert_equal(total.mean(), tree_of(3))


def test_many_leaves_of_one_shape_that_were_reserved_bring_no_warning(make_pool: MakePool):
    pool = make_pool()
    like = [np.zeros(2, np.float32)] * 100
    pool.reserve(like, slots=1)
    with accumulate(pool, like) as total:
        total.add(like)
    assert_nothing_left(pool)
    assert pool.stats().slot_count == 100


def test_a_tree_without_leaves(make_pool: MakePool):
    with accumulate(make_pool(), {"none": None}) as total:
        total.add({"none": None})
        assert (total.count, total.sum, total.mean()) == (1, {"none": None}, {"none": None})


def test_threads_may_share_one(make_pool: MakePool):
    with accumulate(make_pool(), LIKE) as total:

        def work() -> None:
            for _ in range(25):
                total.add(tree_of(1))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert total.count == 100
        assert_equal(total.sum, tree_of(100))


def test_its_repr_says_what_was_added(make_pool: MakePool):
    with accumulate(make_pool(), LIKE) as total:
        total.add(tree_of(1))
        assert repr(total) == "<Accumulator of 3 arrays: 1 added>"


# What may be kept. ----------------------------------------------------------------------------------------------------


def test_a_mean_is_the_callers_for_good(make_pool: MakePool):
    pool = make_pool()
    means: list[Any] = []
    for i in range(3):
        with accumulate(pool, LIKE) as total:
            total.add(tree_of(i))
            means.append(total.mean())
            total.reset()
    for i, mean in enumerate(means):
        assert_equal(mean, tree_of(i))
    assert pool.stats().slot_count == 3


def test_a_sum_that_is_read_too_late_was_deleted_and_is_no_other(make_pool: MakePool):
    pool = make_pool()
    late: list[Any] = []
    with accumulate(pool, LIKE) as total:
        total.add(tree_of(1))
        late.append(total.sum)
        total.add(tree_of(1))
        late.append(total.sum)
        total.reset()
        late.append(total.sum)
    with accumulate(pool, LIKE) as total:
        total.add(tree_of(1))
        for x in jax.tree.leaves(late):
            with pytest.raises(RuntimeError, match="deleted"):
                np.array(x)


# Errors, after which nothing was added and everything goes on. --------------------------------------------------------


def deleted() -> Any:
    x = jnp.float32(1)
    x.delete()
    return x


# Each a function of a tree that fits, as no array should be made before the tests run.
BAD_TREES: list[tuple[Any, type[Exception], str]] = [
    (lambda t: {"w": t["w"]}, ValueError, r"structure of `like`: it lacks \['b'\]\[0\], \['b'\]\[1\]$"),
    (lambda t: {**t, "c": 1.0}, ValueError, r"structure of `like`: it also has \['c'\]$"),
    (lambda t: {**t, "b": tuple(t["b"])}, ValueError, r"structure of `like`: it is PyTreeDef.* and not PyTreeDef"),
    (lambda t: t["w"], ValueError, r"structure of `like`: it is PyTreeDef\(\*\), and not"),
    (lambda t: {**t, "b": [jnp.zeros(7), 1.0]}, ValueError, r"tree\['b'\]\[0\] must have the shape \(8,\), got \(7,\)"),
    (lambda t: {**t, "b": [t["b"][0], np.ones(1)]}, ValueError, r"tree\['b'\]\[1\] must have the shape \(\)"),
    (lambda t: {**t, "b": [t["b"][0], 1j]}, TypeError, r"tree\['b'\]\[1\] is of complex128, which no sum of float32"),
    (lambda t: {**t, "b": [t["b"][0], "one"]}, TypeError, r"tree\['b'\]\[1\] is of <U3"),
    (lambda t: {**t, "b": [t["b"][0], jax.random.key(0)]}, TypeError, r"tree\['b'\]\[1\] is of key"),
    (lambda t: {**t, "b": [t["b"][0], deleted()]}, RuntimeError, r"tree\['b'\]\[1\] was deleted before"),
]


@pytest.mark.parametrize(("change", "kind", "match"), BAD_TREES)
def test_a_tree_that_does_not_fit_is_refused_whole(make_pool: MakePool, change: Any, kind: type[Exception], match: str):
    with accumulate(make_pool(), LIKE) as total:
        total.add(tree_of(1))
        with pytest.raises(kind, match=match):
            total.add(change(tree_of(1)))
        assert total.count == 1
        assert_equal(total.sum, tree_of(1))
        total.add(tree_of(1))
        assert_equal(total.sum, tree_of(2))


def test_many_differences_are_told_briefly(make_pool: MakePool):
    with accumulate(make_pool(), {f"p{i}": jnp.zeros(2) for i in range(9)}) as total:
        with pytest.raises(ValueError, match=r"it lacks \['p0'\], \['p1'\], \['p2'\] and 6 more$"):
            total.add({})


def test_a_tracer_is_refused(make_pool: MakePool):
    with accumulate(make_pool(), jnp.zeros(3)) as total:
        with pytest.raises(TypeError, match="tree is a tracer: call add outside of jit"):
            jax.jit(total.add)(jnp.ones(3))
        assert total.count == 0
        assert_equal(total.sum, jnp.zeros(3))


def test_there_is_no_mean_of_nothing(make_pool: MakePool):
    with accumulate(make_pool(), LIKE) as total:
        for _ in range(2):
            with pytest.raises(ValueError, match="call add first"):
                total.mean()
            total.add(tree_of(1))
            total.reset()


@pytest.mark.parametrize(
    ("pool", "like", "dtype", "match"),
    [
        (None, LIKE, None, "pool must be an arenax.BufferPool, got NoneType"),
        (..., {"w": 1.0}, None, r"like\['w'\] must have a shape and a dtype, got float"),
        (..., {"w": np.zeros(3, np.bool_)}, None, r"like\['w'\] is of bool, which cannot be summed in bool"),
        (..., {"w": np.zeros(3, np.float32)}, "int32", r"like\['w'\] is of float32, which cannot be summed in int32"),
        (..., [LIKE, np.zeros(3, object)], None, r"like\[1\] is of object, which cannot be summed in object"),
        (..., LIKE, "float3", "float3"),
    ],
)
def test_bad_arguments_raise_before_anything_is_drawn(
    make_pool: MakePool, pool: Any, like: Any, dtype: Any, match: str
):
    real = make_pool()
    with pytest.raises(TypeError, match=match):
        accumulate(real if pool is ... else pool, like, dtype)
    assert real.stats().slot_count == 0


def test_without_slots_enough_none_is_drawn(make_pool: MakePool):
    pool = make_pool(on_exhausted="raise")
    pool.reserve([LIKE["w"], LIKE["b"][0]], slots=1)
    with pytest.raises(arenax.PoolExhausted):
        accumulate(pool, LIKE)
    assert_nothing_left(pool)


def test_an_exception_in_the_body_gives_the_slots_back(make_pool: MakePool):
    pool = make_pool()
    with pytest.raises(ZeroDivisionError):
        with accumulate(pool, LIKE) as total:
            total.add(tree_of(1))
            raise ZeroDivisionError
    assert_nothing_left(pool)


def test_after_its_end_it_says_so(make_pool: MakePool):
    pool = make_pool()
    with accumulate(pool, LIKE) as total:
        total.add(tree_of(1))
    for late in (total.mean, total.reset, lambda: total.sum, lambda: total.add(tree_of(1))):
        with pytest.raises(arenax.LeaseReleased):
            late()
    total.close()
    assert total.count == 1
    assert_nothing_left(pool)


def test_an_add_that_failed_half_way_is_never_seen(make_pool: MakePool):
    pool = make_pool()
    with accumulate(pool, LIKE) as total:
        total.add(tree_of(1))
        # The last leaf: its view makes of the donation a copy, which a steady pool refuses.
        view = np.asarray(total.sum["w"])
        with pytest.raises(arenax.NotSteady), pool.steady():
            total.add(tree_of(1))
        del view
        for refused in (total.mean, lambda: total.sum, lambda: total.add(tree_of(1))):
            with pytest.raises(RuntimeError, match=r"half-way.*call reset first"):
                refused()
        total.reset()
        total.add(tree_of(5))
        assert (total.count, float(total.mean()["w"][0, 0])) == (1, 5)
    assert_nothing_left(pool)


@pytest.mark.parametrize("landing", ["host", "ring"])
def test_sums_that_the_caller_donated_are_made_anew_by_reset(make_pool: MakePool, landing: str):
    pool = make_pool(landing=landing)
    with accumulate(pool, LIKE) as total:
        total.add(tree_of(1))
        jax.jit(lambda x: x + 1, donate_argnums=0)(total.sum["w"])
        for refused in (total.mean, lambda: total.sum, lambda: total.add(tree_of(1))):
            with pytest.raises(RuntimeError, match=r"a sum was deleted.*call reset first"):
                refused()
        total.reset()
        total.add(tree_of(5))
        assert_equal(total.sum, tree_of(5))
        assert pool.stats().slot_count == 3
        with pytest.raises(arenax.NotSteady), pool.steady():
            jax.tree.leaves(total.sum)[0].delete()
            total.reset()
        total.reset()
        total.add(tree_of(6))
        assert_equal(total.sum, tree_of(6))
    assert_nothing_left(pool)

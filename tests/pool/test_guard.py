"""The compile guard: it names what steps compile, stops a step that compiles too much, and says what would end it."""

import re
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import arenax


@pytest.fixture
def pool() -> Iterator[arenax.BufferPool]:
    with arenax.BufferPool(name="guarded") as pool:
        yield pool


def jitted() -> Any:  # Anew for each test, since JAX keeps what it has compiled.
    @jax.jit
    def train_step(batch: Any, n: Any = None) -> jax.Array:
        x = batch["x"]
        return jnp.where(jnp.arange(x.shape[1]) < (x.shape[1] if n is None else n), x, 0).sum() + batch["y"].sum()

    return train_step


def batch(n: int) -> dict[str, np.ndarray]:
    return {"x": np.ones((2, n), np.float32), "y": np.zeros(2, np.float32)}


def theirs(pool: arenax.BufferPool) -> list[arenax.Compile]:
    return [c for c in pool.compiles if c.function.endswith("train_step") or "train_step" in c.function]


def test_compiles_are_named_by_function_shapes_and_line(pool: arenax.BufferPool) -> None:
    train_step = jitted()
    for n in (3, 4, 3, 4):
        with pool.step() as step:
            train_step(step.put(batch(n)))
    found = theirs(pool)
    assert [c.shapes for c in found] == [("float32[2,3]", "float32[2]"), ("float32[2,4]", "float32[2]")]
    assert [c.count for c in found] == [1, 1]
    assert all(re.search(r"test_guard\.py:\d+$", c.call_site) for c in found)
    assert "train_step for float32[2,3], float32[2] at " in str(found[0]).replace("jit(", "").replace(")", "")


def test_what_is_compiled_outside_of_steps_is_not_theirs(pool: arenax.BufferPool) -> None:
    train_step = jitted()
    train_step(pool.put(batch(3)))
    assert theirs(pool) == []


def test_a_program_that_is_compiled_again_is_counted(pool: arenax.BufferPool) -> None:
    train_step = jitted()
    for _ in range(3):
        with pool.step() as step:
            train_step(step.put(batch(3)))
        train_step.clear_cache()
    (found,) = theirs(pool)
    assert found.count == 3
    assert str(found).endswith(", 3 times")


def test_a_step_may_be_allowed_no_compiles(pool: arenax.BufferPool) -> None:
    train_step = jitted()
    with pool.step() as step:
        train_step(step.put(batch(3)))
    with pool.step(max_compiles=0) as step:
        train_step(step.put(batch(3)))
    with pytest.raises(arenax.NotSteady, match=r"1 programs in one step, where 0 may be: .*train_step") as caught:
        with pool.step(max_compiles=0) as step:
            train_step(step.put(batch(3)) | {"y": np.zeros(3, np.float32)})
    assert caught.value.cause == "compile"
    assert pool.stats().leased_count == 0
    with pool.step(max_compiles=100) as step:
        train_step(step.put(batch(4)))


def test_an_error_of_the_body_comes_first(pool: arenax.BufferPool) -> None:
    for n in range(3, 20):  # There is something to be said, too.
        pool.put(batch(n))
    with pytest.raises(ZeroDivisionError):
        with pool.step(max_compiles=0) as step:
            jitted()(step.put(batch(3)))
            raise ZeroDivisionError


@pytest.mark.parametrize(("value", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_bad_max_compiles(pool: arenax.BufferPool, value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="max_compiles must be"):
        pool.step(max_compiles=value)  # pyright: ignore[reportArgumentType]


def test_the_warning_says_what_to_write_and_that_ends_the_compiles(pool: arenax.BufferPool) -> None:
    train_step, lengths = jitted(), [*range(3, 15), 5, 9]

    def run() -> None:
        for n in lengths:
            with pool.step() as step:
                train_step(step.put(batch(n)))

    with pytest.warns(RuntimeWarning, match="is compiled anew for each") as caught:
        run()
    (warning,) = caught
    assert warning.filename == __file__
    message = str(warning.message)
    assert "pool 'guarded' sees 8 shapes in 8 steps on axis 1 of leaf ['x']" in message
    written = re.search(r"BufferPool\((ragged=.*)\), with a boundary", message)
    assert written
    ragged = eval(f"dict({written[1]})")["ragged"]
    assert ragged["y"] is None
    classes = arenax.SizeClasses.explicit([*ragged["x"].size_classes.boundaries, 14])
    ragged["x"] = arenax.Ragged(ragged["x"].axis, classes)
    train_step = jitted()
    with warnings.catch_warnings(), arenax.BufferPool(ragged=ragged) as mended:
        warnings.simplefilter("error")
        for n in lengths:
            with mended.step() as step:
                drawn, sizes = step.put(batch(n), with_sizes=True)
                assert train_step(drawn, sizes["x"]) == 2 * n
        assert len(theirs(mended)) == len({classes.class_of(n) for n in lengths})


def test_what_is_declared_already_is_written_again() -> None:
    train_step = jitted()
    ragged = {"x": arenax.Ragged(1, arenax.SizeClasses.explicit([16]), pad_value=-1), "y": None}

    def run() -> None:
        with arenax.BufferPool(ragged=ragged) as pool:
            for n in range(3, 13):
                with pool.step() as step:
                    train_step(step.put({"x": np.ones((2, n), np.float32), "y": np.zeros(n, np.float32)}))

    with pytest.warns(RuntimeWarning, match="10 shapes|8 shapes") as caught:
        run()
    # Of all that was warned of: what an earlier test left behind may be found, and told of, just now.
    told = "\n".join(str(warning.message) for warning in caught)
    found = re.search(r"BufferPool\((ragged=.*)\), with a boundary", told)
    assert found
    written = eval(f"dict({found[1]})")["ragged"]
    assert written["x"] == ragged["x"]
    assert written["y"].axis == 0


def test_ragged_axes_and_few_shapes_do_not_warn() -> None:
    train_step = jitted()
    ragged = {"x": arenax.Ragged(1, arenax.SizeClasses.multiples(1, 20)), "y": None}  # A class for each length.
    with warnings.catch_warnings(), arenax.BufferPool(ragged=ragged) as pool, arenax.BufferPool() as few:
        warnings.simplefilter("error")
        for n in range(3, 15):
            with pool.step() as step:
                train_step(step.put(batch(n)))
            with few.step() as step:
                train_step(step.put(batch(3 + n % 4)))

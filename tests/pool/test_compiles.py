"""The compile watch: it counts the programs compiled in its scopes, in their threads, each once."""

import itertools
import threading
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import arenax
from arenax._compiles import CompileCounter, Scope

X = np.arange(3, dtype=np.float32)
_lengths = itertools.count(1001)


def fresh() -> np.ndarray:
    """An array of a shape that no test has used: JAX keeps what it has compiled, also from one pool to the next."""
    return np.ones(next(_lengths), np.float32)


def compile_one(name: str = "one") -> None:
    """Compiles one program, of a function of this name."""

    def function(x: jax.Array) -> jax.Array:
        return x + 1

    function.__name__ = name
    jax.jit(function).lower(X).compile()


def in_a_thread(function: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert errors == []


def test_a_step_that_never_ends_is_not_watched_on() -> None:
    """An interrupt can strike between a step's beginning and its block."""
    with arenax.BufferPool() as pool:
        for _ in range(10):
            pool.step().__enter__()
        compile_one()
        assert pool.stats().compile_count == 0
        step = pool.step()
        step.__enter__()
        compile_one()
        assert pool.stats().compile_count == 1
        step.__exit__(None, None, None)


def test_it_counts_what_is_compiled_inside_and_nothing_else() -> None:
    counter = CompileCounter()
    compile_one()
    assert counter.count == 0
    with counter.watch():
        assert counter.count == 0
        compile_one()
        compile_one()
        assert counter.count == 2
    compile_one()
    assert counter.count == 2
    with counter.watch():
        compile_one()
    assert counter.count == 3


def test_a_cached_call_is_not_a_compile() -> None:
    counter, double = CompileCounter(), jax.jit(lambda x: x * 2)
    with counter.watch():
        double(X)
        first = counter.count
        assert first >= 1
        double(X + 1)
        assert counter.count == first
        double(np.ones(5, np.float32))
        assert counter.count > first


def test_it_ends_when_the_body_raises() -> None:
    counter = CompileCounter()
    with pytest.raises(ZeroDivisionError), counter.watch():
        compile_one()
        raise ZeroDivisionError
    compile_one()
    assert counter.count == 1


def test_it_names_what_was_compiled_and_keeps_the_last_names() -> None:
    counter = CompileCounter()
    with counter.watch():
        for i in range(18):
            compile_one(f"my_function_{i}")
    assert counter.count == 18
    assert len(counter.names) == 16
    for i, name in zip(range(2, 18), counter.names, strict=True):
        assert f"my_function_{i}" in name


def test_only_the_threads_inside_it_count() -> None:
    counter = CompileCounter()
    with counter.watch():
        in_a_thread(compile_one)
        assert counter.count == 0

        def watched() -> None:
            with counter.watch():
                compile_one()
            compile_one()

        in_a_thread(watched)
        assert counter.count == 1
        compile_one()
    assert counter.count == 2


def test_threads_that_watch_at_once_are_all_counted() -> None:
    counter, gate = CompileCounter(), threading.Barrier(4)

    def watched() -> None:
        with counter.watch():
            gate.wait(60)
            for _ in range(3):
                compile_one()

    threads = [threading.Thread(target=watched) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert counter.count == 12


def test_nested_counters_each_count() -> None:
    outer, inner = CompileCounter(), CompileCounter()
    with outer.watch():
        compile_one("before")
        with inner.watch():
            compile_one("within")
        compile_one("after")
    assert (outer.count, inner.count) == (3, 1)
    assert ["within" in n for n in outer.names] == [False, True, False]
    assert ["within" in n for n in inner.names] == [True]


def test_one_counter_twice_in_a_thread_counts_once() -> None:
    counter = CompileCounter()
    with counter.watch():
        with counter.watch():
            compile_one()
            assert counter.count == 1
        compile_one()
        assert counter.count == 2


def test_watches_may_end_in_any_order_and_twice() -> None:
    a, b = CompileCounter(), CompileCounter()
    first, second = a.watch(), b.watch()
    first.__exit__()
    compile_one()
    assert (a.count, b.count) == (0, 1)
    first.__exit__()
    second.__exit__()
    second.__exit__()
    compile_one()
    assert (a.count, b.count) == (0, 1)


def test_a_watch_may_be_ended_by_another_thread() -> None:
    counter, watches = CompileCounter(), list[Scope]()
    watches.append(counter.watch())
    in_a_thread(watches[0].__exit__)
    compile_one()
    assert counter.count == 0

    # The other way about: begun in a thread that is over.
    in_a_thread(lambda: watches.append(counter.watch()))
    compile_one()
    watches[1].__exit__()
    assert counter.count == 0


def test_a_pool_counts_its_own_programs_and_those_of_its_steps() -> None:
    batch = fresh()
    with arenax.BufferPool() as pool:
        pool.put(batch)
        own = pool.stats().compile_count
        assert own == 2  # The slot and its landing.
        assert all("arenax" in n or "take" in n for n in pool.compile_counter.names)
        compile_one()
        assert pool.stats().compile_count == own
        with pool.step() as step:
            step.put(batch)
            compile_one("in_the_step")
        assert pool.stats().compile_count == own + 1
        assert "in_the_step" in pool.compile_counter.names[-1]
        compile_one()
        assert pool.stats().compile_count == own + 1


def test_steady_names_a_compile_of_this_thread_at_its_end() -> None:
    with arenax.BufferPool() as pool:
        with pytest.raises(arenax.NotSteady, match=r"compile .*1 programs.*a_new_shape") as error, pool.steady():
            compile_one("a_new_shape")
        assert error.value.cause == "compile"
        assert "test_compiles.py" in error.value.call_site
        with pool.steady():
            in_a_thread(compile_one)


def test_steady_names_a_compile_of_the_pool_in_another_thread() -> None:
    batch = fresh()
    with arenax.BufferPool() as pool:
        pool.reserve(batch, slots=1)

        def land() -> None:
            pool.put(batch)  # Compiles the landing.

        with pytest.raises(arenax.NotSteady) as error, pool.steady():
            in_a_thread(land)
        assert error.value.cause == "compile"
        with pool.steady():
            in_a_thread(land)


def test_an_error_in_the_body_of_steady_is_not_hidden_by_a_compile() -> None:
    with arenax.BufferPool() as pool:
        with pytest.raises(ZeroDivisionError), pool.steady():
            compile_one()
            raise ZeroDivisionError
        pool.put(X)  # And the scope has ended: a creation is allowed again.


def test_a_training_step_compiles_once_a_class() -> None:
    classes = arenax.SizeClasses.explicit([4, 8])
    train = jax.jit(lambda x, n: jnp.sum(jnp.where(arenax.valid_mask(n, x.shape[0]), x, 0)))
    with arenax.BufferPool(ragged=arenax.Ragged(0, classes, pad_value=-1)) as pool:
        counter = CompileCounter()
        for n in (3, 8, 5, 1, 4, 7, 2, 6):
            with pool.step() as step:
                x, size = step.put(np.ones(n, np.float32), with_sizes=True)
                with counter.watch():
                    assert float(train(x, size)) == n
        assert counter.count == 2

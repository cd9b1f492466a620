"""A warm-up meets every shape that a batch can have, and leaves nothing to compile."""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import arenax
from arenax import ArraySpec, Ragged, SizeClasses

CLASSES = SizeClasses.explicit([4, 8, 16])
OTHERS = SizeClasses.explicit([2, 3])


def seen_by(spec: Any, ragged: Any, with_sizes: bool = False) -> list[Any]:
    seen: list[Any] = []

    def note(batch: Any, sizes: Any = None) -> None:
        seen.append(jax.tree.map(lambda x: (x.shape, x.dtype.name), batch))
        assert not any(np.asarray(x).any() for x in jax.tree.leaves(batch))
        assert (sizes is not None) == with_sizes

    with arenax.BufferPool(ragged=ragged) as pool:
        pool.warm_up(note, spec, with_sizes)
        assert pool.stats().leased_count == 0
    return seen


def test_each_class_of_a_ragged_axis() -> None:
    spec = {"x": ArraySpec((2, CLASSES), "int32"), "y": jax.ShapeDtypeStruct((2,), np.float32)}
    y = ((2,), "float32")
    expected = [{"x": ((2, n), "int32"), "y": y} for n in CLASSES.boundaries]
    assert seen_by(spec, {"x": Ragged(1, CLASSES), "y": None}) == expected


def test_equal_classes_vary_together_and_others_in_all_combinations() -> None:
    spec = [ArraySpec((1,), "bool"), ArraySpec((1,), "bool"), np.zeros((5, 1), np.int8)]
    seen = seen_by(spec, [Ragged(0, CLASSES), Ragged(0, CLASSES), Ragged(-1, OTHERS)], with_sizes=True)
    shapes = [tuple(shape for shape, _ in batch) for batch in seen]
    assert shapes == [((n,), (n,), (5, m)) for n in CLASSES.boundaries for m in OTHERS.boundaries]


def test_without_ragged_axes_there_is_one_call() -> None:
    assert seen_by(ArraySpec((3,), "float32"), None) == [((3,), "float32")]
    assert len(seen_by(ArraySpec((3, CLASSES), "float32"), None)) == 3


def test_the_run_after_it_is_steady() -> None:
    @jax.jit
    def train_step(batch: Any, sizes: Any) -> Any:
        x = batch["x"]
        return jnp.where(jnp.arange(x.shape[1]) < sizes["x"], x, 0).sum()

    spec = {"x": ArraySpec((2, CLASSES), "float32")}
    with arenax.BufferPool(ragged=Ragged(1, CLASSES)) as pool:
        assert pool.warm_up(train_step, spec, with_sizes=True) >= 3
        assert pool.warm_up(train_step, spec, with_sizes=True) == 0
        with pool.steady():
            for n in range(1, 17):
                with pool.step(max_compiles=0) as step:
                    total = train_step(*step.put({"x": np.ones((2, n), np.float32)}, with_sizes=True))
                assert float(total) == 2 * n


def test_examples_and_what_does_not_fit() -> None:
    assert seen_by([1.5, [2]], None) == [[((), "float32"), [((), "int32")]]]
    with arenax.BufferPool(ragged=Ragged(2, CLASSES)) as pool:
        with pytest.raises(ValueError, match="rank 1 and so no axis 2"):
            pool.warm_up(print, ArraySpec((3,), "int8"))


def test_an_error_of_the_function_goes_on_and_nothing_stays_drawn() -> None:
    with arenax.BufferPool() as pool:
        with pytest.raises(ZeroDivisionError):
            pool.warm_up(lambda batch: 1 / 0, ArraySpec((3,), "float32"))
        assert pool.stats().leased_count == 0
        with pytest.raises(TypeError, match="fn must be a function"):
            pool.warm_up(3, ArraySpec((3,), "float32"))  # pyright: ignore[reportArgumentType]


@pytest.mark.skipif(importlib.util.find_spec("rich") is None, reason="the bar is rich's")
def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    tracked: list[str] = []
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr("rich.progress.track", lambda items, what, **_: tracked.append(what) or items)
    seen_by(ArraySpec((CLASSES,), "int8"), None)
    assert tracked == ["arenax: compiling for 3 shapes"]

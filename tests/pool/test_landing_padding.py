"""Padding: rewritten only where it is dirty, and always right, whoever had the slot before."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import arenax

from .conftest import address, pool_on

CLASSES = arenax.SizeClasses.explicit([4, 8])
kinds = pytest.mark.parametrize("kind", ["cpu", "ring"])


def pool_of(kind: str, ragged: Any = None) -> arenax.BufferPool:
    return pool_on(kind, ragged=ragged)


def padded(value: np.ndarray, axis: int, capacity: int, pad: Any) -> np.ndarray:
    widths = [(0, capacity - n if i == axis else 0) for i, n in enumerate(value.shape)]
    return np.pad(value, widths, constant_values=pad)


@kinds
@pytest.mark.parametrize("name", ["float32", "int32", "bool", "bfloat16", "float16", "complex64"])
def test_every_length_after_every_other(kind: str, name: str) -> None:
    dtype = jnp.dtype(name)
    with pool_of(kind, arenax.Ragged(0, arenax.SizeClasses.explicit([5]), pad_value=1)) as pool:
        where = set()
        for first in range(6):
            for second in range(6):
                for n in (first, second):
                    value = np.zeros((n, 2), dtype)
                    x = pool.put(value)
                    where.add(address(x))
                    np.testing.assert_array_equal(np.asarray(x), padded(value, 0, 5, np.ones((), dtype)))
                    del x
        assert len(where) == 1
        assert pool.stats().creation_count == 1


# Everything that can happen to the slots of float32[4,4]. Of the pads, -0.0 and 0.0 are equal but not the same
# bits, and NaN is not equal to itself.
PADS = [0.0, -0.0, 7.0, float("nan")]
ragged_puts = st.tuples(st.just("ragged"), st.integers(0, 1), st.integers(0, 4), st.sampled_from(PADS), st.booleans())
others = st.tuples(
    st.sampled_from(["fixed", "nan", "zeros", "full", "write", "update", "append", "donate", "array", "view"]),
    st.just(0),
    st.integers(1, 4),
    st.sampled_from(PADS),
    st.booleans(),
)


def _nan(x: jax.Array) -> jax.Array:
    return x * float("nan")


@pytest.mark.filterwarnings("ignore:an array of .* was donated away:RuntimeWarning")
@kinds
def test_padding_is_right_after_any_history(kind: str) -> None:
    eat = jax.jit(lambda x: x * 1, donate_argnums=0)
    size = arenax.SizeClasses.explicit([4])
    # One pool whose slots pass from one leaf to the next: a leaf for each axis and pad, and one that is fixed.
    ragged = {(axis, i): arenax.Ragged(axis, size, pad) for axis in (0, 1) for i, pad in enumerate(PADS)}
    pool = pool_of(kind, {**{str(k): r for k, r in ragged.items()}, "fixed": None})
    blank = {str(k): [] for k in ragged} | {"fixed": []}

    def land(place: Any, leaf: str, value: Any) -> jax.Array:
        return place.put({**blank, leaf: [value]})[leaf][0]

    def same(x: Any, expected: np.ndarray) -> None:
        assert np.asarray(x).tobytes() == expected.astype(np.float32).tobytes()

    @settings(max_examples=60)
    @given(st.lists(st.one_of(ragged_puts, ragged_puts, others), min_size=1, max_size=12))
    def history(events: list[tuple[str, int, int, float, bool]]) -> None:
        view = None
        for count, (event, axis, n, pad, in_step) in enumerate(events):
            fill = float("nan") if in_step and event == "ragged" else count + 1.0
            full = np.full((4, 4), fill, np.float32)
            if event in ("ragged", "array"):
                which = next(i for i, p in enumerate(PADS) if p is pad or (p == pad and str(p) == str(pad)))
                value = full[:n] if axis == 0 else full[:, :n].copy()
                source = jax.device_put(value) if event == "array" else value
                expected = padded(value, axis, 4, np.float32(pad))
                if in_step:
                    with pool.step() as step:
                        same(land(step, str((axis, which)), source), expected)
                else:
                    same(land(pool, str((axis, which)), source), expected)
            elif event in ("fixed", "nan", "donate", "view"):
                value = np.full((4, 4), np.nan, np.float32) if event == "nan" else full
                with pool.step() as step:
                    x = land(step, "fixed", value)
                    same(x, value)
                    if event == "donate":
                        eat(x)
                    elif event == "view":
                        view = np.asarray(x)
                    del x
            elif event in ("zeros", "full"):
                with pool.step() as step:
                    x = step.zeros((4, 4)) if event == "zeros" else step.full((4, 4), np.float32(pad))
                    same(x, np.full((4, 4), 0.0 if event == "zeros" else pad, np.float32))
                    del x
            else:
                with pool.lease((4, 4), fill=pad) as lease:
                    same(lease.array, np.full((4, 4), pad, np.float32))
                    if event == "write":
                        lease.write(full[:n], at=(4 - n, 0))
                    elif event == "append":
                        lease.append(full[:n])
                    else:
                        lease.update(_nan)
        pool.check()
        assert pool.stats().leased_count == 0
        del view

    history()
    pool.close()


@kinds
def test_leaves_of_equal_padded_shape_share_slots_whatever_their_axis(kind: str) -> None:
    ragged = {"rows": arenax.Ragged(0, CLASSES, 5), "columns": arenax.Ragged(1, CLASSES, 6)}
    random = np.random.default_rng(0)
    with pool_of(kind, ragged) as pool:
        for _ in range(60):
            m, n = random.integers(0, 5, 2)
            batch = {"rows": np.full((m, 4), np.nan, np.float32), "columns": np.full((4, n), np.inf, np.float32)}
            if random.random() < 0.5:  # Which slot serves which leaf depends on the order of return.
                got = pool.put(batch)
                first, second = got["rows"], got["columns"]
                del got
                checks = [(first, padded(batch["rows"], 0, 4, 5)), (second, padded(batch["columns"], 1, 4, 6))]
                for x, expected in checks if random.random() < 0.5 else checks[::-1]:
                    np.testing.assert_array_equal(x, expected)
                del first, second, checks, x
            else:
                with pool.step() as step:
                    got = step.put(batch)
                    np.testing.assert_array_equal(got["rows"], padded(batch["rows"], 0, 4, 5))
                    np.testing.assert_array_equal(got["columns"], padded(batch["columns"], 1, 4, 6))
                    del got
        assert {str(c) for c in pool.stats().by_class} == {"float32[4,4]"}
        assert pool.stats().slot_count == 2


def test_clean_padding_is_not_written_again() -> None:
    """Seen by a mark that is planted in the padding behind the pool's back: a clean landing leaves it there."""
    with arenax.BufferPool(ragged=arenax.Ragged(0, arenax.SizeClasses.explicit([1024]), pad_value=3)) as pool:

        def land(n: int) -> None:
            x = pool.put(np.zeros(n, np.float32))
            del x

        def mark(i: int) -> Any:
            (shelf,) = pool.arena.shelves.values()
            (slot,) = shelf.slots
            slot.view[i] = 99
            return slot.view

        land(500)
        view = mark(1000)
        assert (view[500:1000] == 3).all()
        for n in (400, 0, 700, 1000, 3):
            land(n)
            assert view[1000] == 99
            assert (view[n:1000] == 3).all()
        land(1024)
        land(5)
        assert (view[5:] == 3).all()


def test_a_pad_value_of_the_wrong_kind_is_refused_before_anything_lands() -> None:
    for pad, dtype in ((-1, np.uint8), (0.5, np.int32), (np.nan, np.int32), (np.int8(-1), np.uint8)):
        with arenax.BufferPool(ragged={"a": None, "b": arenax.Ragged(0, CLASSES, pad)}) as pool:
            with pytest.raises(ValueError, match=r"pad_value .* does not fit .*\['b'\]"):
                pool.put({"a": np.ones(3, np.float32), "b": np.ones(3, dtype)})
            assert pool.stats().slot_count == 0


@kinds
def test_zero_size_leaves_land_and_pad(kind: str) -> None:
    with pool_of(kind, arenax.Ragged(0, CLASSES, 2)) as pool:
        for shape in ((0, 3), (0, 0), (3, 0)):
            x, size = pool.put(np.ones(shape, np.float32), with_sizes=True)
            assert x.shape == (4, shape[1])
            assert int(size) == shape[0]
            np.testing.assert_array_equal(x, padded(np.ones(shape, np.float32), 0, 4, 2))
            del x, size

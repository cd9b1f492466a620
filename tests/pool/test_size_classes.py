"""Size classes: pure functions on integers, checked against a linear search."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import arenax
from arenax import SizeClasses

sizes = st.integers(1, 5_000)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[int, int]:
    lo = draw(sizes)
    return lo, draw(st.integers(lo, lo * 40))


@st.composite
def any_classes(draw: st.DrawFn) -> tuple[SizeClasses, int]:
    """Size classes of any kind, and the maximum they were made for."""
    lo, hi = draw(ranges())
    kind = draw(st.sampled_from(["explicit", "pow2", "geometric", "multiples"]))
    if kind == "explicit":
        listed = draw(st.lists(st.integers(1, hi), max_size=20))
        return SizeClasses.explicit([*listed, hi]), hi
    if kind == "geometric":
        return SizeClasses.geometric(lo, hi, draw(st.integers(1, 9))), hi
    return (SizeClasses.pow2(lo, hi) if kind == "pow2" else SizeClasses.multiples(max(lo, hi // 50), hi)), hi


@given(any_classes(), st.data())
def test_every_size_is_held_by_the_smallest_class_that_holds_it(
    made: tuple[SizeClasses, int], data: st.DataObject
) -> None:
    classes, hi = made
    boundaries = classes.boundaries
    assert boundaries[-1] == classes.maximum == hi
    assert boundaries == tuple(sorted(set(boundaries)))
    assert all(type(b) is int and b >= 1 for b in boundaries)
    near = {0, hi} | {b + d for b in boundaries for d in (-1, 0, 1) if 0 <= b + d <= hi}
    for n in near | {data.draw(st.integers(0, hi))}:
        assert classes.class_of(n) == next(b for b in boundaries if b >= n)
    for n in (hi + 1, 2 * hi):
        with pytest.raises(arenax.NoSizeClass):
            classes.class_of(n)


@given(ranges())
def test_pow2_is_powers_of_two_ended_by_the_maximum(lo_hi: tuple[int, int]) -> None:
    lo, hi = lo_hi
    *powers, top = SizeClasses.pow2(lo, hi).boundaries
    assert top == hi
    assert all(p & (p - 1) == 0 for p in powers)
    if powers:
        assert powers[0] // 2 < lo <= powers[0]
        assert powers == [powers[0] << i for i in range(len(powers))]
        assert powers[-1] < hi <= 2 * powers[-1]


@given(ranges(), st.integers(1, 9))
def test_geometric_bounds_classes_per_doubling_and_padding(lo_hi: tuple[int, int], per_doubling: int) -> None:
    lo, hi = lo_hi
    classes = SizeClasses.geometric(lo, hi, per_doubling)
    assert classes.boundaries[0] == lo
    base = lo
    while base < hi:
        assert 1 <= sum(base < b <= 2 * base for b in classes.boundaries) <= per_doubling
        base *= 2
    for smaller, larger in zip(classes.boundaries, classes.boundaries[1:], strict=False):
        # The request that pads most is one above the class below it.
        assert (larger - (smaller + 1)) * per_doubling <= smaller


@given(st.integers(1, 50), st.integers(1, 1_000))
def test_multiples_are_all_multiples_below_the_maximum(of: int, hi: int) -> None:
    *inner, top = SizeClasses.multiples(of, hi).boundaries
    assert (inner, top) == (list(range(of, hi, of)), hi)


def test_the_documented_examples() -> None:
    assert SizeClasses.pow2(16, 100).boundaries == (16, 32, 64, 100)
    assert SizeClasses.pow2(5, 64).boundaries == (8, 16, 32, 64)
    assert SizeClasses.pow2(5, 7).boundaries == (7,)
    assert SizeClasses.pow2(1, 1).boundaries == (1,)
    assert SizeClasses.geometric(64, 300).boundaries == (64, 80, 96, 112, 128, 160, 192, 224, 256, 300)
    assert SizeClasses.geometric(3, 3).boundaries == (3,)
    assert SizeClasses.multiples(128, 300).boundaries == (128, 256, 300)
    assert SizeClasses.multiples(128, 100).boundaries == (100,)
    assert SizeClasses.explicit([512, 64, 64]).boundaries == (64, 512)
    assert SizeClasses.explicit(np.array([8, 4])).boundaries == (4, 8)
    assert SizeClasses.explicit(iter([2])).class_of(0) == 2


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: SizeClasses.explicit([]), ValueError, "at least one boundary"),
        (lambda: SizeClasses.explicit([4, 0]), ValueError, "at least 1, got 0"),
        (lambda: SizeClasses.explicit([-4]), ValueError, "at least 1, got -4"),
        (lambda: SizeClasses.explicit([4, 5.0]), TypeError, "integer, got 5.0"),
        (lambda: SizeClasses.explicit([True]), TypeError, "integer, got True"),
        (lambda: SizeClasses.explicit("48"), TypeError, "integer, got '4'"),
        (lambda: SizeClasses.explicit(8), TypeError, "int"),
        (lambda: SizeClasses.pow2(0, 8), ValueError, "lo must be at least 1"),
        (lambda: SizeClasses.pow2(9, 8), ValueError, "lo must be at most hi, got lo=9 and hi=8"),
        (lambda: SizeClasses.pow2(1, 8.0), TypeError, "hi must be an integer"),
        (lambda: SizeClasses.geometric(9, 8), ValueError, "lo must be at most hi"),
        (lambda: SizeClasses.geometric(1, 8, 0), ValueError, "per_doubling must be at least 1"),
        (lambda: SizeClasses.geometric(1, 8, 1.5), TypeError, "per_doubling must be an integer"),
        (lambda: SizeClasses.multiples(0, 8), ValueError, "of must be at least 1"),
        (lambda: SizeClasses.multiples(2, 0), ValueError, "hi must be at least 1"),
        (lambda: SizeClasses.multiples(2, None), TypeError, "hi must be an integer"),
        (lambda: SizeClasses.explicit([8]).class_of(-1), ValueError, "at least 0, got -1"),
    ],
)
def test_bad_arguments_are_named(make: object, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as raised:
        make()  # type: ignore[operator]
    assert type(raised.value) is error


def test_no_size_class_carries_its_figures() -> None:
    with pytest.raises(arenax.NoSizeClass, match="size 17 is above the largest size class, 16") as error:
        SizeClasses.explicit([8, 16]).class_of(17)
    assert (error.value.size, error.value.maximum, error.value.axis, error.value.leaf) == (17, 16, None, "")
    assert isinstance(error.value, ValueError)


def test_they_are_values_frozen_equal_and_hashable() -> None:
    a, b = SizeClasses.explicit([4, 8]), SizeClasses.pow2(4, 8)
    assert a == b
    assert hash(a) == hash(b)
    assert a != SizeClasses.explicit([4])
    assert pickle.loads(pickle.dumps(a)) == copy.deepcopy(a) == a
    with pytest.raises(AttributeError):
        a.boundaries = (1,)  # type: ignore[misc]

"""What a caller asks for: dtypes, shapes, castability, ragged axes, pad values and specifications."""

import pickle

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import arenax
from arenax import ArraySpec, Ragged, SizeClass, SizeClasses
from arenax._request import canonical_dtype, exact_shape, is_castable

CLASSES = SizeClasses.explicit([4, 8])
WIDE = {"float64": "float32", "int64": "int32", "uint64": "uint32", "complex128": "complex64"}


@pytest.mark.parametrize(
    "name", ["bool", "int8", "uint16", "int32", "float16", "float32", "complex64", "bfloat16", "float8_e5m2"]
)
def test_a_dtype_that_jax_has_stays(name: str) -> None:
    dtype = canonical_dtype(name if name in np.sctypeDict else getattr(ml_dtypes, name))
    assert type(dtype) is type(np.dtype(dtype))
    assert dtype.name == name
    with jax.enable_x64(True):
        assert canonical_dtype(dtype) == dtype


@pytest.mark.parametrize(("wide", "narrow"), WIDE.items())
def test_wide_dtypes_are_narrowed_unless_x64_is_on(wide: str, narrow: str) -> None:
    for given in (wide, np.dtype(wide), np.dtype(wide).type, np.dtype(wide).newbyteorder()):
        assert canonical_dtype(given) == np.dtype(narrow)
        with jax.enable_x64(True):
            got = canonical_dtype(given)
        assert got == np.dtype(wide)
        assert got.isnative


def test_python_types_and_swapped_bytes() -> None:
    assert canonical_dtype(float) == np.float32
    assert canonical_dtype(int) == np.int32
    assert canonical_dtype(bool) == np.bool_
    swapped = np.dtype(np.int16).newbyteorder()
    assert not swapped.isnative
    assert canonical_dtype(swapped) == np.int16
    assert canonical_dtype(swapped).isnative


@pytest.mark.parametrize(
    "dtype",
    [object, "U3", "S2", "datetime64[s]", "timedelta64[D]", "V8", [("a", "f4")], np.longdouble],
    ids=str,
)
def test_what_jax_cannot_hold_is_a_type_error(dtype: object) -> None:
    with pytest.raises(TypeError, match="dtype"):
        canonical_dtype(dtype)


def test_a_variable_width_string_and_a_name_of_nothing_are_refused() -> None:
    with pytest.raises(TypeError):
        canonical_dtype("no such dtype")
    with pytest.raises(TypeError, match="dtype"):
        canonical_dtype(np.dtypes.StringDType())


def test_a_key_is_refused_with_the_remedy() -> None:
    with pytest.raises(TypeError, match=r"jax\.random\.key_data"):
        canonical_dtype(jax.random.key(0).dtype)


def test_exact_shape_takes_integers_and_nothing_else() -> None:
    assert exact_shape(3) == (3,)
    assert exact_shape(()) == ()
    assert exact_shape([np.int64(2), 0]) == (2, 0)
    assert all(type(n) is int for n in exact_shape(np.array([2, 3])))
    for bad in (2.0, (1, 2.5), "ab", None, (None,), ((1,),)):
        with pytest.raises(TypeError, match="shape must be integers"):
            exact_shape(bad)
    for negative in (-1, (2, -3)):
        with pytest.raises(ValueError, match="must not be negative"):
            exact_shape(negative)


def test_kinds_are_cast_upwards_only() -> None:
    ladder = [
        [np.dtype(bool)],
        [np.dtype(np.uint8), np.dtype(np.int32), np.dtype(np.int64)],
        [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.float32)],
        [np.dtype(np.complex64)],
    ]
    for i, sources in enumerate(ladder):
        for j, targets in enumerate(ladder):
            for source in sources:
                assert [is_castable(source, target) for target in targets] == [i <= j] * len(targets)


def test_ragged_is_validated_where_it_is_made() -> None:
    assert Ragged(0, CLASSES).pad_value == 0
    assert Ragged(0, CLASSES) == Ragged(axis=0, size_classes=CLASSES, pad_value=0)
    assert pickle.loads(pickle.dumps(Ragged(-1, CLASSES, 7))) == Ragged(-1, CLASSES, 7)
    for axis in ("0", 1.0, True, None):
        with pytest.raises(TypeError, match="axis must be an integer"):
            Ragged(axis, CLASSES)  # type: ignore[arg-type]
    for classes in ([4, 8], None, (4,)):
        with pytest.raises(TypeError, match="size_classes must be a SizeClasses"):
            Ragged(0, classes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pad_value must be a scalar"):
        Ragged(0, CLASSES, [0, 1])
    with pytest.raises(AttributeError):
        Ragged(0, CLASSES).axis = 1  # type: ignore[misc]


def test_axis_of_counts_from_the_front_and_names_the_leaf() -> None:
    assert [Ragged(a, CLASSES).axis_of(3, "x") for a in (-3, -2, -1, 0, 1, 2)] == [0, 1, 2, 0, 1, 2]
    for axis, rank in ((3, 3), (-4, 3), (0, 0), (-1, 0)):
        with pytest.raises(ValueError, match=rf"leaf \['x'\] has rank {rank} and so no axis {axis}"):
            Ragged(axis, CLASSES).axis_of(rank, "leaf ['x']")


def test_capacity_names_axis_leaf_size_and_maximum() -> None:
    ragged = Ragged(1, CLASSES)
    assert [ragged.capacity(n, 1, "x") for n in (0, 4, 5, 8)] == [4, 4, 8, 8]
    with pytest.raises(arenax.NoSizeClass, match=r"axis 1 of leaf \['x'\] has size 9, above .* 8") as error:
        ragged.capacity(9, 1, "leaf ['x']")
    assert (error.value.axis, error.value.leaf, error.value.size, error.value.maximum) == (1, "leaf ['x']", 9, 8)


@pytest.mark.parametrize(
    ("pad", "dtype"),
    [
        (0, "bool"),
        (True, "bool"),
        (1, "bool"),
        (255, "uint8"),
        (-128, "int8"),
        (3.0, "int32"),
        (np.int64(-100), "int32"),
        (2**31 - 1, "int32"),
        (0.1, "float32"),
        (np.nan, "float16"),
        (np.inf, "bfloat16"),
        (-1, "bfloat16"),
        (0.1, "bfloat16"),
        (np.nan, "float8_e4m3fn"),
        (1j, "complex64"),
    ],
)
def test_a_pad_value_that_fits_becomes_a_scalar_of_the_dtype(pad: object, dtype: str) -> None:
    target = jnp.dtype(dtype)
    scalar = Ragged(0, CLASSES, pad).pad(target, "x")
    assert (scalar.dtype, np.ndim(scalar)) == (target, 0)
    assert scalar.tobytes() == np.asarray(pad).astype(target).tobytes()
    if np.isfinite(pad):  # type: ignore[call-overload]
        assert complex(scalar) == pytest.approx(complex(pad), rel=0.01)  # type: ignore[call-overload]
    else:
        assert not np.isfinite(np.asarray(scalar).astype(np.float32))


@pytest.mark.parametrize(
    ("pad", "dtype"),
    [
        (-1, "uint8"),
        (256, "uint8"),
        (0.5, "int32"),
        (2**31, "int32"),
        (2**64, "int32"),
        (np.nan, "int32"),
        (np.inf, "int32"),
        (np.nan, "bool"),
        (2, "bool"),
        (-1, "bool"),
        (1j, "int32"),
        (1j, "float32"),
        # A wrap-around that comes back to itself on the return trip.
        (np.int8(-1), "uint8"),
        (np.uint8(255), "int8"),
        (np.uint32(2**32 - 1), "int32"),
        ("x", "float32"),
        (None, "int32"),
        (Ellipsis, "float32"),
    ],
    ids=repr,
)
def test_a_pad_value_that_does_not_fit_is_refused_by_name(pad: object, dtype: str) -> None:
    with pytest.raises(ValueError, match=rf"pad_value .* does not fit the dtype {dtype} of leaf \['x'\]"):
        Ragged(0, CLASSES, pad).pad(jnp.dtype(dtype), "leaf ['x']")


def test_a_spec_stands_for_every_class_of_its_axes() -> None:
    spec = ArraySpec((2, CLASSES, SizeClasses.explicit([1, 3])), "bfloat16")
    assert [str(c) for c in spec.classes()] == [f"bfloat16[2,{a},{b}]" for a in (4, 8) for b in (1, 3)]
    assert [str(c) for c in ArraySpec(5, float).classes()] == ["float32[5]"]
    assert [c.shape for c in ArraySpec(CLASSES, "int8").classes()] == [(4,), (8,)]
    assert [c.shape for c in ArraySpec((), "int8").classes()] == [()]
    assert ArraySpec([np.int64(3)], "int8") == ArraySpec((3,), np.int8)
    with jax.enable_x64(True):
        assert ArraySpec((), "float64").dtype == np.float64


def test_a_bad_spec_is_refused() -> None:
    for shape, dtype, error in [
        ((2.5,), "int8", TypeError),
        ((-1,), "int8", ValueError),
        ("ab", "int8", TypeError),
        ((2,), object, TypeError),
        ((2,), "datetime64[s]", TypeError),
    ]:
        with pytest.raises(error):
            ArraySpec(shape, dtype)


def test_a_size_class_is_a_value_with_bytes_and_a_name() -> None:
    for shape, dtype, text, nbytes in [
        ((64, 32), "float32", "float32[64,32]", 8192),
        ((), "int32", "int32[]", 4),
        ((0, 7), "bool", "bool[0,7]", 0),
        ((3,), "bfloat16", "bfloat16[3]", 6),
        ((1 << 20, 1 << 20), "uint8", "uint8[1048576,1048576]", 1 << 40),
    ]:
        size_class = SizeClass(shape, jnp.dtype(dtype))
        assert (str(size_class), size_class.nbytes) == (text, nbytes)
        assert len({size_class, SizeClass(shape, jnp.dtype(dtype))}) == 1
        assert pickle.loads(pickle.dumps(size_class)) == size_class

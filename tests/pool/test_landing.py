"""Landing host values on the real CPU device: every dtype, every layout, three ways in, always as JAX itself has it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import arenax

from .conftest import address, pool_on

NATIVE = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]
FLOAT8 = [
    f"float8_{kind}" for kind in ["e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu"]
]
# Their arrays are smaller than their nbytes says, not every XLA compiles them, and one that cannot compile float6 ends
# the process: all of them land right, or are refused by name.
SUB_BYTE = ["int1", "uint1", "int2", "uint2", "int4", "uint4", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"]

Put = Callable[[arenax.BufferPool, Any], jax.Array]


def by_put(pool: arenax.BufferPool, value: Any) -> jax.Array:
    return pool.put(value)


def by_step(pool: arenax.BufferPool, value: Any) -> jax.Array:
    with pool.step() as step:
        return step.keep(step.put(value))


def by_write(pool: arenax.BufferPool, value: Any) -> jax.Array:
    like = np.asarray(value, dtype=jax.dtypes.canonicalize_dtype(np.asarray(value).dtype.newbyteorder("=")))
    with pool.lease(like.shape, like.dtype, fill=None) as lease:
        lease.write(value)
        return lease.detach()


ways = pytest.mark.parametrize("put", [by_put, by_step, by_write], ids=["put", "step", "lease"])


@pytest.fixture(scope="module", params=["cpu", "ring"])
def pool(request: pytest.FixtureRequest) -> Iterator[arenax.BufferPool]:
    """One pool of each landing for the whole file, so that its programs are compiled once."""
    with pool_on(request.param) as pool:
        yield pool


@pytest.fixture(scope="module")
def cpu_pool() -> Iterator[arenax.BufferPool]:
    with arenax.BufferPool() as pool:
        yield pool


@pytest.fixture(autouse=True)
def _nothing_is_lost(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in {"pool", "cpu_pool"} & set(request.fixturenames):
        pool = request.getfixturevalue(name)
        pool.check()
        assert pool.stats().leased_count == 0


def same(got: jax.Array, expected: Any) -> None:
    """Same shape, dtype and bits as JAX's own array."""
    assert isinstance(got, jax.Array)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_array_equal(bits(got), bits(expected))


def as_jax(value: Any) -> jax.Array:
    """JAX's own array of a NumPy value; JAX knows no swapped bytes, which mean the same numbers."""
    array = np.asarray(value)
    return jax.device_put(array.astype(array.dtype.newbyteorder("=")))


def bits(x: Any) -> np.ndarray:
    array = np.asarray(x)
    return np.frombuffer(array.tobytes(), np.uint8)


def values(dtype: Any, shape: tuple[int, ...] = (5, 7)) -> np.ndarray:
    """Distinct bits all over, as far as the dtype has them, without signalling anything."""
    size = int(np.prod(shape))
    if np.dtype(dtype).kind in "biufc":
        return (np.arange(size) % 120 + 1).astype(dtype).reshape(shape)
    return (np.arange(size) % 7).astype(np.float32).astype(dtype).reshape(shape)


@pytest.mark.parametrize(
    ("pool", "name"),
    [
        *(("cpu", name) for name in [*NATIVE, "bfloat16", *FLOAT8]),
        *(("ring", name) for name in ("float32", "int64", "bool", "bfloat16", "float8_e5m2")),
    ],
    indirect=["pool"],
)
@ways
def test_every_dtype_lands_as_device_put_has_it(pool: arenax.BufferPool, put: Put, name: str) -> None:
    source = values(np.dtype(name) if name in NATIVE else jnp.dtype(name))
    same(put(pool, source), jax.device_put(source))


@pytest.mark.parametrize("name", SUB_BYTE)
def test_a_dtype_below_a_byte_lands_right_or_is_refused_by_name(cpu_pool: arenax.BufferPool, name: str) -> None:
    source = np.array([0, 1, 0], np.int8).astype(getattr(ml_dtypes, name))
    for put in (by_put, by_step, by_write):
        got, refusal = landed_or_refused(lambda put=put: put(cpu_pool, source))
        if got is None:
            assert name in refusal
            assert "cast" in refusal
        else:
            same(got, jax.device_put(source))


@pytest.mark.parametrize("name", ["float64", "int64", "uint64", "complex128"])
@ways
def test_wide_dtypes_stay_wide_under_x64(pool: arenax.BufferPool, put: Put, name: str) -> None:
    source = (np.arange(6) + 2**40).astype(name) if name != "float64" else np.arange(6) / 3
    with jax.enable_x64(True):
        got = put(pool, source)
        assert got.dtype == source.dtype
        np.testing.assert_array_equal(got, source)
    assert put(pool, source % 100 if name != "complex128" else source * 0).dtype == jax.dtypes.canonicalize_dtype(name)


@ways
@pytest.mark.parametrize(
    "bad",
    [np.ones(3, np.longdouble), np.array(["a"]), np.array([object()]), np.zeros(2, "datetime64[s]")],
    ids=lambda x: x.dtype.name,
)
def test_what_jax_cannot_hold_is_a_type_error(cpu_pool: arenax.BufferPool, put: Put, bad: np.ndarray) -> None:
    with pytest.raises(TypeError):
        put(cpu_pool, bad)


@pytest.mark.parametrize(
    "bad",
    [
        np.ones(3, np.longdouble),
        np.zeros(2, "V8"),
        np.zeros(2, [("a", "f4")]),
        np.array(["a"]),
        jax.ShapeDtypeStruct((3,), np.float32),
        arenax.ArraySpec((3,), "float32"),
    ],
    ids=lambda x: f"{type(x).__name__}-{x.dtype}",
)
def test_what_is_no_array_of_jaxs_is_refused_by_the_name_of_its_leaf(cpu_pool: arenax.BufferPool, bad: Any) -> None:
    written = cpu_pool.stats().write_count
    with pytest.raises(TypeError, match=r"leaf \['b'\]"):
        cpu_pool.put({"a": np.ones(3), "b": bad})
    assert cpu_pool.stats().write_count == written


def test_a_key_is_refused_by_the_name_of_its_leaf(cpu_pool: arenax.BufferPool) -> None:
    with pytest.raises(TypeError, match=r"leaf \['b'\].*key_data"):
        cpu_pool.put({"a": np.ones(3), "b": jax.random.key(0)})


def test_a_masked_array_is_refused_as_jax_does_since_its_mask_would_be_lost(cpu_pool: arenax.BufferPool) -> None:
    masked = np.ma.masked_array([1.0, 2.0], [True, False])
    with pytest.raises(ValueError, match="masked"):
        jax.device_put(masked)
    with pytest.raises((TypeError, ValueError), match="mask"):
        cpu_pool.put(masked)


def landed_or_refused(call: Callable[[], jax.Array]) -> tuple[jax.Array | None, str]:
    try:
        return call(), ""
    except (TypeError, ValueError) as e:
        return None, str(e)


def layouts(tmp_path: Path) -> dict[str, Any]:
    base = values(np.float32, (8, 6))
    read_only = base.copy()
    read_only.flags.writeable = False
    mapped = np.memmap(tmp_path / "mapped", np.float32, "w+", shape=(8, 6))
    mapped[...] = base
    odd = np.frombuffer(b"x" + base.tobytes(), np.uint8)[1:].view(np.float32).reshape(8, 6)
    assert odd.ctypes.data % 4
    return {
        "c": base,
        "fortran": np.asfortranarray(base),
        "transposed": base.T,
        "steps": base[::2, 1::3],
        "negative": base[::-1, ::-2],
        "broadcast": np.broadcast_to(base[0], (4, 6)),
        "read-only": read_only,
        "swapped": base.astype(base.dtype.newbyteorder()),
        "swapped-strided": base.astype(">f8")[::-2],
        "misaligned": odd,
        "zero-size": base[:0],
        "zero-columns": np.zeros((3, 0, 2), np.int32),
        "0-d": np.array(2.5, np.float32),
        "scalar": np.float64(2.5),
        "scalar-int": np.int16(-3),
        "bool": True,
        "int": -(2**31),
        "float": 2.5,
        "complex": 1 + 2j,
        "list": [[1, 2], [3, 4]],
        "memmap": mapped,
        "recarray": base.view(np.recarray),
        "subclass": base.view(_Tagged),
    }


class _Tagged(np.ndarray):
    """A NumPy subclass that brings its own arithmetic along, none of which a landing may use."""

    def __array_ufunc__(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a landing computed with the caller's array")


LAYOUTS = list(layouts(Path("/tmp")))


@pytest.mark.parametrize("layout", LAYOUTS)
@ways
def test_every_layout_lands_as_device_put_has_it(
    pool: arenax.BufferPool, put: Put, layout: str, tmp_path: Path
) -> None:
    value = layouts(tmp_path)[layout]
    if layout == "list" and put is not by_write:  # A pytree of scalars.
        assert [[int(x) for x in row] for row in pool.put(value)] == value
        return
    plain = value.view(np.ndarray) if isinstance(value, np.ndarray) else value
    same(put(pool, value), as_jax(plain))


@pytest.mark.parametrize("bad", [2**31, -(2**31) - 1, 2**70])
def test_a_python_integer_that_does_not_fit_overflows(pool: arenax.BufferPool, bad: int) -> None:
    with pytest.raises(OverflowError):
        jax.device_put(bad)
    with pytest.raises(OverflowError):
        pool.put(bad)
    with pool.step() as step, pytest.raises(OverflowError):
        step.put({"x": bad})
    with pool.lease((), "int32") as lease:
        with pytest.raises(OverflowError):
            lease.write(bad)
        assert int(lease.array) == 0
    assert pool.stats().leased_count == 0


@st.composite
def strided(draw: st.DrawFn) -> np.ndarray:
    """A view of an array: any order, steps of either sign, any rank up to 4."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    dtype = draw(st.sampled_from(["float32", ">f4", "int16", ">i8", "bool", "complex64", "uint8", "float16"]))
    base = values(np.dtype(dtype), tuple(shape))
    view = base[tuple(slice(None, None, draw(st.sampled_from([1, 2, 3, -1, -2]))) for _ in shape)]
    return view.transpose(draw(st.permutations(range(len(shape)))))


@pytest.mark.parametrize("kind", ["cpu", "ring"])
def test_any_strides_land_right(kind: str) -> None:
    with pool_on(kind) as pool:

        @settings(max_examples=40)
        @given(strided())
        def check(value: np.ndarray) -> None:
            expected = as_jax(value)
            for put in (by_put, by_step, by_write)[: 3 if kind == "cpu" else 1]:
                same(put(pool, value), expected)

        check()
        pool.check()
        assert pool.stats().leased_count == 0


@pytest.mark.parametrize("offset", [0, 16])
@ways
def test_the_callers_array_is_never_aliased(pool: arenax.BufferPool, put: Put, offset: int) -> None:
    raw = np.zeros(4096 + 128, np.uint8)
    start = -raw.ctypes.data % 64 + offset
    source = raw[start : start + 4096].view(np.float32)
    assert source.ctypes.data % 64 == offset
    for i in range(20):
        source[...] = i
        got = put(pool, source)
        source[...] = -1
        assert address(got) != source.ctypes.data
        np.testing.assert_array_equal(got, np.full(1024, i, np.float32))
        del got

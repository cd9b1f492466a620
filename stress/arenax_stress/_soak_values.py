"""What the soak puts into arrays: kinds, patterns that tell one write from another, sources of every layout."""

from random import Random
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

import arenax

Array = np.ndarray[Any, Any]

BOUNDARIES = (4, 16, 64)
_CLASSES = arenax.SizeClasses.explicit(BOUNDARIES)
# The trees of batches: one list of leaves for each way to be ragged. Axis 0 and the last one share boundaries, so that
# one slot is padded now along the one axis and now along the other, with another pad value.
RAGGED: dict[str, arenax.Ragged | None] = {
    "rows": arenax.Ragged(0, _CLASSES, 0),
    "columns": arenax.Ragged(-1, _CLASSES, 1),
    "nan": arenax.Ragged(0, _CLASSES, float("nan")),
    "fixed": None,
}
# Patterns are residues of these numbers, each exact in its dtype.
_MODULI = {
    "float32": 16_777_213,
    "int32": 2_147_483_629,
    "bfloat16": 251,
    "uint8": 251,
    "bool": 2,
    "float16": 2_039,
    "complex64": 16_777_213,
}
_WIDE = {"float32": np.float64, "int32": np.int64, "complex64": np.complex128}
_INDEX = np.arange(1 << 18, dtype=np.int64)


@attrs.frozen
class Kind:
    """One kind of array that is in play.

    Attributes:
        group: Its place in the batch, a key of `RAGGED`.
        dtype: Its dtype.
        shape: Its shape, the ragged axis at its largest.
    """

    group: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def axis(self) -> int | None:
        """The ragged axis, from the front."""
        ragged = RAGGED[self.group]
        return None if ragged is None else ragged.axis % len(self.shape)

    def at(self, extent: int) -> tuple[int, ...]:
        """The shape with that extent on the ragged axis."""
        axis = self.axis
        return self.shape if axis is None else (*self.shape[:axis], extent, *self.shape[axis + 1 :])

    def classes(self) -> list[arenax.SizeClass]:
        """Every size class it may take."""
        extents = (0,) if self.axis is None else BOUNDARIES
        return [arenax.SizeClass(self.at(n), self.dtype) for n in extents]

    def padded(self, value: Array) -> Array:
        """What the slot must hold after `value` has landed in it."""
        axis, ragged = self.axis, RAGGED[self.group]
        if axis is None or ragged is None:
            return value
        capacity = _CLASSES.class_of(value.shape[axis])
        result = np.full(self.at(capacity), ragged.pad_value, self.dtype)
        result[(slice(None),) * axis + (slice(value.shape[axis]),)] = value
        return result

    def __str__(self) -> str:
        return f"{self.group} {self.dtype.name}{list(self.shape)}"


def make_kinds(seed: int, count: int) -> list[Kind]:
    """Returns `count` different kinds; many of them share size classes, which makes one a later tenant of another."""
    rng = Random(f"{seed}/kinds")
    shapes: list[tuple[int, ...]] = [
        (64,),
        (64, 16),
        (16, 64),
        (64, 64),
        (4, 64),
        (64, 4, 3),
        (256, 64),
        (64, 0),
        (64, 512),
    ]
    fixed: list[tuple[int, ...]] = [*shapes, (), (16,), (16, 16), (4,), (0,), (4, 4), (16, 4)]
    kinds: dict[Kind, None] = {}
    # The first few dtypes come back, or hardly two kinds would ever share a class.
    dtypes = rng.sample(list(_MODULI), max(2, min(len(_MODULI), count // 2)))
    while len(kinds) < count:
        group = rng.choice([*RAGGED, "fixed"])
        dtype = jnp.dtype(rng.choice(dtypes))
        shape = rng.choice(fixed if group == "fixed" else shapes)
        if group == "nan" and not jnp.issubdtype(dtype, jnp.inexact):
            continue
        if group == "columns" and shape[-1] != 64:
            shape = (16, 64)
        if group in ("rows", "nan") and shape[0] != 64:
            shape = (64, 16)
        kinds[Kind(group, dtype, shape)] = None
        if len(kinds) < count and rng.random() < 0.05:
            dtypes = [*_MODULI]
    return [*kinds]


def make_batches(seed: int, kinds: list[Kind]) -> list[list[Kind]]:
    """Returns the batches that are in play, each a few kinds; not any mixture, since each compiles a program."""
    rng = Random(f"{seed}/batches")
    singles = [[kind] for kind in kinds]
    return [*singles, *(rng.choices(kinds, k=rng.randint(2, 4)) for _ in range(max(3, len(kinds) // 2)))]


def pattern(dtype: np.dtype[Any], shape: tuple[int, ...], rng: Random) -> Array:
    """Values that hardly another call gives; now and then all NaN, where the dtype has one."""
    tag = rng.getrandbits(31)
    if jnp.issubdtype(dtype, jnp.inexact) and tag % 20 == 0:
        return np.full(shape, np.nan, dtype)
    modulus = _MODULI[dtype.name]
    count = int(np.prod(shape))
    if modulus == 2:
        values = ((tag + _INDEX[:count] * (tag >> 5 | 1)) >> 9) & 1
    else:
        values = (tag + _INDEX[:count] * ((tag >> 3) % 65_521 | 1)) % modulus
    result = values.astype(dtype)
    if dtype.kind == "c":
        result.imag = values[::-1]
    return result.reshape(shape)


@attrs.frozen
class Source:
    """A value in some layout, to be given to the pool.

    Attributes:
        value: What the pool gets.
        memory: The NumPy memory behind it, or None.
    """

    value: Any
    memory: Array | None

    def scribble(self) -> None:
        """Overwrites the memory, as a caller may once the pool has returned."""
        if self.memory is not None:
            self.memory.setflags(write=True)
            self.memory.reshape(-1).view(np.uint8)[...] = 0xA5


LAYOUTS = ("plain", "aligned", "strided", "reversed", "fortran", "swapped", "read-only", "wide", "scalar")


def source(value: Array, rng: Random, device_share: float) -> Source:
    """Returns the value in a random layout, `device_share` of the time as a `jax.Array`."""
    if rng.random() < device_share:
        devices = jax.devices()
        # Of a copy, which jax may alias: nobody else has it.
        where = devices[rng.randrange(len(devices))] if rng.random() < 0.3 else None
        return Source(jax.device_put(value.copy(), where), None)
    layout, shape, dtype = rng.choice(LAYOUTS), value.shape, value.dtype
    memory: Array
    if layout == "aligned":
        raw = np.empty(value.nbytes + 64, np.uint8)
        start = -raw.ctypes.data % 64
        memory = raw[start : start + value.nbytes].view(dtype).reshape(shape)
        view = memory
    elif layout == "strided" and shape:
        memory = np.empty((*shape[:-1], 2 * shape[-1]), dtype)
        view = memory[..., ::2]
    elif layout == "reversed" and shape:
        memory = np.empty(shape, dtype)
        view = memory[::-1]
    elif layout == "fortran":
        memory = np.empty(shape[::-1], dtype)
        view = memory.T
    elif layout == "swapped" and dtype.kind in "iufc" and dtype.itemsize > 1:
        view = memory = np.empty(shape, dtype.newbyteorder())
    elif layout == "wide" and dtype.name in _WIDE:
        view = memory = np.empty(shape, _WIDE[dtype.name])
    elif layout == "scalar" and not shape:
        return Source(value[()], None)
    else:
        view = memory = np.empty(shape, dtype)
    view[...] = value
    if layout == "read-only":
        view.setflags(write=False)
    return Source(view, memory)


def difference(got: Array, expected: Array) -> str:
    """Says where two arrays differ, byte for byte; an empty text where they do not."""
    if (got.shape, got.dtype) != (expected.shape, expected.dtype):
        return f"is {got.dtype}{list(got.shape)} where {expected.dtype}{list(expected.shape)} was due"
    left, right = got.tobytes(), expected.tobytes()
    if left == right:
        return ""
    wrong = np.frombuffer(left, np.uint8) != np.frombuffer(right, np.uint8)
    elements = wrong.reshape(got.size, -1).any(axis=1)
    first = int(elements.argmax())
    index = tuple(int(i) for i in np.unravel_index(first, got.shape)) if got.shape else ()
    count = int(elements.sum())
    return (
        f"{count} of {got.size} elements of {got.dtype}{list(got.shape)} are wrong, the first at {index}: "
        f"{got[index]} where {expected[index]} was due"
    )

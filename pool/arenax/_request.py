"""What a caller asks for: dtypes by JAX's rules, size classes of arrays, ragged axes, specifications."""

import math
import operator
from collections.abc import Iterable, Iterator
from typing import Any, cast

import attrs
import jax
import numpy as np

from ._errors import NoSizeClass
from ._size_classes import SizeClasses

INT32 = np.dtype(np.int32)


_WHOLE_BYTES = frozenset(
    f"{kind}{bits}"
    for kind, widths in {
        "int": (8, 16, 32, 64),
        "uint": (8, 16, 32, 64),
        "float": (16, 32, 64),
        "complex": (64, 128),
    }.items()
    for bits in widths
) | {"bool", "bfloat16"}


def canonical_dtype(dtype: Any) -> np.dtype[Any]:
    """Returns the dtype that JAX would store: float64 becomes float32 unless x64 is on, byte order is native.

    Raises:
        TypeError: For anything that cannot live in a slot: objects, strings, dates, records, PRNG keys, and dtypes
            below a byte, whose arrays are smaller than their ``nbytes`` says and which not every XLA compiles.
    """
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        raise TypeError(
            f"arrays of dtype {dtype} cannot live in a slot; for PRNG keys, put jax.random.key_data(key) "
            "and wrap it again with jax.random.wrap_key_data"
        )
    try:
        plain = np.dtype(dtype).newbyteorder("=")
    except TypeError:
        raise TypeError(f"dtype {dtype!r} is not a dtype") from None
    if plain.name not in _WHOLE_BYTES and not plain.name.startswith("float8_"):
        raise TypeError(
            f"dtype {plain.name} cannot live in a slot; allowed are booleans, integers, floats and complex numbers of "
            "whole bytes that JAX holds: cast it first, int4 to int8 for example"
        )
    return np.dtype(jax.dtypes.canonicalize_dtype(plain))


def bits_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The unsigned integer of a dtype's size, which XLA re-types it to and from; itself, where XLA does not.

    Example:
        >>> import numpy as np
        >>> from arenax._request import bits_of
        >>> bits_of(np.dtype("bfloat16")), bits_of(np.dtype("bool"))
        (dtype('uint16'), dtype('bool'))
    """
    return dtype if dtype.kind in "bc" else np.dtype(f"uint{8 * dtype.itemsize}")


def as_array(leaf: Any, name: str) -> Any:
    """Returns an array as it is, and a Python scalar, a list or anything with ``__array__`` as JAX would take it.

    Raises:
        TypeError: For what is no array and cannot become one.
        ValueError: For a masked array, whose mask would be lost.
        OverflowError: For a Python integer that does not fit.
    """
    if isinstance(leaf, np.ma.MaskedArray):
        raise ValueError(f"{name} is a masked array, whose mask would be lost: put its .filled() data and its mask")
    if isinstance(leaf, np.ndarray | np.generic | jax.Array):
        return leaf
    try:
        array = np.asarray(leaf)
        wide = array.dtype == object and isinstance(leaf, int)
        dtype = canonical_dtype(np.int64 if wide else array.dtype)
    except (TypeError, ValueError) as e:
        raise TypeError(f"{name} is {type(leaf).__name__}, not an array: {e}") from None
    try:
        return np.asarray(leaf, dtype)  # An array of a wider dtype wraps around, as in JAX; a Python integer does not.
    except OverflowError:
        raise OverflowError(f"{name}: {leaf} does not fit {dtype.name}") from None


def scalar_of(value: Any, dtype: np.dtype[Any]) -> Any:
    """Returns `value` as a scalar of `dtype`, or raises where it is none or does not fit."""
    if np.ndim(value) != 0:
        raise ValueError(f"a fill must be a scalar, got shape {np.shape(value)}")
    return np.asarray(value, dtype)


def exact_shape(shape: Any) -> tuple[int, ...]:
    """Returns `shape` as a tuple of ints of at least 0; a lone integer is a shape of rank 1."""
    try:
        axes: Iterable[Any] = shape if isinstance(shape, Iterable) else (shape,)
        result = tuple(operator.index(n) for n in axes)
    except TypeError:
        raise TypeError(f"shape must be integers, got {shape!r}") from None
    if any(n < 0 for n in result):
        raise ValueError(f"shape must not be negative, got {shape!r}")
    return result


def _rank(dtype: np.dtype[Any]) -> int:
    kinds = (np.bool_, np.integer, np.floating, np.complexfloating)
    return next(i for i, kind in enumerate(kinds) if jax.dtypes.issubdtype(dtype, kind))


def is_castable(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Whether values may be written into `target`: bools into all, integers into floats, floats into complex numbers.

    Precision may be lost, as everywhere in JAX; a kind may not (NumPy's own rules do not know bfloat16 and its like).
    """
    return _rank(source) <= _rank(target)


@attrs.frozen
class SizeClass:
    """The fixed shape and dtype of a slot, and where a pool has shardings, its own.

    Attributes:
        shape: Capacity of each axis.
        dtype: The NumPy dtype of the elements.
        sharding: How the slot lies on the devices of a mesh; None in a pool of one device.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: jax.sharding.NamedSharding | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of one slot: of a sharded one, those of all its shards on this process's devices."""
        if self.sharding is None:
            return math.prod(self.shape) * self.dtype.itemsize
        part = math.prod(self.sharding.shard_shape(self.shape)) * self.dtype.itemsize
        return part * len(self.sharding.addressable_devices)

    def __str__(self) -> str:
        text = f"{self.dtype.name}[{','.join(map(str, self.shape))}]"
        return text if self.sharding is None else f"{text} over {_spec_text(self.sharding)}"


@attrs.frozen
class Ragged:
    """Says that one axis of a leaf varies and is padded up to a size class.

    Give it to `BufferPool(ragged=...)`, alone or at the leaves of a pytree prefix of the batch.

    Attributes:
        axis: The ragged axis; negative counts from the end.
        size_classes: Capacities of that axis.
        pad_value: What the padding holds; it must fit the leaf's dtype.

    Example:
        >>> import arenax
        >>> ragged = {"tokens": arenax.Ragged(1, arenax.SizeClasses.pow2(64, 1024)), "label": None}
    """

    axis: int
    size_classes: SizeClasses
    pad_value: Any = 0

    def __attrs_post_init__(self) -> None:
        axis, classes = cast(Any, self.axis), cast(Any, self.size_classes)
        if isinstance(axis, bool) or not isinstance(axis, int):
            raise TypeError(f"axis must be an integer, got {axis!r}")
        if not isinstance(classes, SizeClasses):
            raise TypeError(f"size_classes must be a SizeClasses, got {type(classes).__name__}")
        if np.ndim(self.pad_value) != 0:
            raise ValueError(f"pad_value must be a scalar, got shape {np.shape(self.pad_value)}")

    def axis_of(self, rank: int, leaf: str) -> int:
        """Returns the axis, counted from the front, for a leaf of `rank`."""
        if not -rank <= self.axis < rank:
            raise ValueError(
                f"{leaf} has rank {rank} and so no axis {self.axis} to be ragged: give ragged= a tree with None "
                "at the leaves that are not ragged"
            )
        return self.axis % rank

    def capacity(self, size: int, axis: int, leaf: str) -> int:
        """Returns the size class for `size`, or raises `NoSizeClass` naming axis, size and maximum."""
        try:
            return self.size_classes.class_of(size)
        except NoSizeClass as e:
            raise NoSizeClass(
                f"axis {axis} of {leaf} has size {size}, above the largest size class, {e.maximum}: declare a "
                "larger maximum or cut the data",
                size=e.size,
                maximum=e.maximum,
                axis=axis,
                leaf=leaf,
            ) from None

    def pad(self, dtype: np.dtype[Any], leaf: str) -> Any:
        """Returns the pad value as a scalar of `dtype`, or raises where it does not fit.

        An inexact dtype takes any number, rounded; any other must hold the very value: -1 does not fit uint8.
        """
        try:
            value = np.asarray(self.pad_value)
            if value.dtype.kind == "c" and not jax.dtypes.issubdtype(dtype, np.complexfloating):
                raise TypeError
            with np.errstate(all="ignore"):
                scalar = value.astype(dtype)
            if jax.dtypes.issubdtype(dtype, np.inexact) or scalar.item() == value.item():
                return scalar[()]
        except (TypeError, ValueError, OverflowError):
            pass
        raise ValueError(f"pad_value {self.pad_value!r} does not fit the dtype {dtype.name} of {leaf}")


def _spec_text(sharding: jax.sharding.NamedSharding) -> str:
    """A sharding as messages name it."""
    kind = sharding.memory_kind
    home = next(iter(sharding.device_set)).default_memory().kind
    where = "" if kind in (None, home) else f" in {kind}"
    return f"P({', '.join(map(repr, sharding.spec))}){where}"


def _spec_shape(shape: Any) -> tuple[int | SizeClasses, ...]:
    axes: Iterable[Any] = shape if isinstance(shape, Iterable) else (shape,)
    return tuple(n if isinstance(n, SizeClasses) else exact_shape((n,))[0] for n in axes)


@attrs.frozen
class ArraySpec:
    """Shape and dtype of an array to reserve slots for, without an array at hand.

    Attributes:
        shape: Size of each axis; an axis may be a `SizeClasses`, which stands for each of its capacities.
        dtype: Anything that `numpy.dtype` takes, such as ``"bfloat16"``.

    Example:
        >>> import arenax
        >>> spec = arenax.ArraySpec((8, arenax.SizeClasses.explicit([64, 128])), "int32")
        >>> [str(c) for c in spec.classes()]
        ['int32[8,64]', 'int32[8,128]']
    """

    shape: tuple[int | SizeClasses, ...] = attrs.field(converter=_spec_shape)
    dtype: np.dtype[Any] = attrs.field(converter=canonical_dtype)

    def classes(self) -> Iterator[SizeClass]:
        """Yields every size class that the specification stands for."""
        shapes: list[tuple[int, ...]] = [()]
        for axis in self.shape:
            sizes = axis.boundaries if isinstance(axis, SizeClasses) else (axis,)
            shapes = [(*s, n) for s in shapes for n in sizes]
        return (SizeClass(s, self.dtype) for s in shapes)

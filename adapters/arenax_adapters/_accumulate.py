"""Sums of trees, such as gradients, in slots of the pool; `arenax_adapters.loop` has it for users."""

import threading
from collections.abc import Sequence
from typing import Any, Self

import jax
import numpy as np
from jax.core import Tracer
from jax.tree_util import keystr, tree_flatten_with_path

from arenax import BufferPool, Lease

# A value fits a sum of its own kind or of a later one.
_KINDS = (np.bool_, np.integer, np.floating, np.complexfloating)


def accumulate(pool: BufferPool, like: Any, dtype: Any = None) -> "Accumulator":
    """Sums trees, such as the gradients of micro-batches, in slots of the pool.

    The slots are drawn here, one a leaf, set to zero, and go back at the end of the ``with``. `Accumulator.add` adds to
    them in place, by one small program a leaf: each add after the first allocates and compiles nothing, and the sums
    stay where they are, so that one accumulator can serve a whole run, with `Accumulator.reset` after each optimizer
    step.

    Args:
        pool: Where the slots are drawn, one after the other: where two of these wait for slots of one pool, have enough
            for both. One that uses reserved slots only needs another for each leaf:
            ``pool.reserve(like, slots=1)``, of a tree with the dtypes of the sums. This also spares you the pool's
            warning that it grows, where 64 leaves or more have the same shape. In a pool with ragged axes, `reserve`
            makes size classes instead of exact shapes: give the sums a pool of their own then.
        like: A pytree of arrays, `jax.ShapeDtypeStruct` or `arenax.ArraySpec`, such as the parameters or their
            gradients: the structure, shapes and dtypes of what is added.
        dtype: The dtype of all sums, such as ``"float32"`` for bfloat16 gradients; None is the dtype of each leaf.

    Returns:
        An `Accumulator`, to be used as ``with accumulate(pool, params) as total:``.

    Raises:
        TypeError: Where `pool` is no `BufferPool`, a leaf of `like` has no shape and dtype, or no sum of `dtype` can
            hold it. Nothing is drawn then.
        PoolExhausted: As the pool's mode says; nothing stays drawn then.

    Example:
        >>> import arenax, jax, jax.numpy as jnp
        >>> from arenax_adapters.loop import accumulate
        >>> gradient = jax.jit(jax.grad(lambda params, x: (params["w"] * x).sum()))
        >>> params = {"w": jnp.ones(3)}
        >>> with arenax.BufferPool() as pool, accumulate(pool, params) as total:
        ...     for update in range(2):
        ...         for micro in range(4):
        ...             total.add(gradient(params, jnp.arange(3.0)))
        ...         params = jax.tree.map(lambda p, g: p - 0.5 * g, params, total.mean())
        ...         total.reset()
        ...     print(params["w"], pool.stats().creation_count)
        [ 1.  0. -1.] 1
    """
    if not isinstance(pool, BufferPool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"pool must be an arenax.BufferPool, got {type(pool).__name__}")
    paths, treedef = tree_flatten_with_path(like)
    classes: list[Any] = []
    wanted = None if dtype is None else np.dtype(dtype)
    for path, leaf in paths:
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise TypeError(f"like{keystr(path)} must have a shape and a dtype, got {type(leaf).__name__}")
        sum_dtype = leaf.dtype if wanted is None else wanted
        if _kind(sum_dtype) < 1 or not _fits(leaf.dtype, sum_dtype):
            raise TypeError(f"like{keystr(path)} is of {leaf.dtype}, which cannot be summed in {sum_dtype}")
        classes.append((leaf.shape, sum_dtype))
    leases: list[Lease] = []
    try:
        for shape, sum_dtype in classes:
            leases.append(pool.lease(shape, sum_dtype))
        return Accumulator(leases, treedef)
    except BaseException:
        for lease in leases:
            lease.release()
        raise


class Accumulator:
    """A tree of sums, each in a slot of the pool, made by `accumulate`; a context manager that returns the slots.

    What may be kept: `mean` gives arrays of the caller's own. `sum` gives the slots themselves: the next `add` or
    `reset` deletes these arrays, and after the scope the next borrower of the slot does. JAX then says ``Array has been
    deleted``; none is ever seen with another's values.

    An `add` or `reset` that fails half-way, by an interrupt, say, leaves sums of which some are ahead of the others.
    From then on everything but `count`, `reset` and `close` raises `RuntimeError`. So it does where the caller donated
    a sum: `reset` puts a new array in its place, which costs an allocation, that `BufferPool.steady` refuses. Calls of
    several threads are serialised.
    """

    __slots__ = ("_count", "_leases", "_lock", "_torn", "_treedef")

    def __init__(self, leases: Sequence[Lease], treedef: Any) -> None:
        self._leases = leases
        self._treedef = treedef
        self._lock = threading.RLock()
        self._count = 0
        self._torn = False

    @property
    def count(self) -> int:
        """Trees that were added since the start, or the last `reset`."""
        return self._count

    @property
    def sum(self) -> Any:
        """The tree of sums, in the slots themselves: valid until the next `add` or `reset`, or the end of the scope.

        To use it without any copy, pass it and `count` to a jitted function, and divide there.

        Raises:
            LeaseReleased: After the end.
            RuntimeError: Where an `add` or `reset` failed half-way, or a sum was donated.
        """
        with self._lock:
            return jax.tree.unflatten(self._treedef, self._arrays())

    def mean(self) -> Any:
        """The tree of sums divided by `count`, in new arrays, which are the caller's for good.

        One program computes them all. They take as much memory as the sums until they are dropped; the pool holds
        none of it.

        Returns:
            A tree of arrays of the sums' dtypes; of JAX's default floating dtype where these are integers.

        Raises:
            ValueError: Where nothing was added.
            LeaseReleased: After the end.
            RuntimeError: Where an `add` or `reset` failed half-way, or a sum was donated.
        """
        with self._lock:
            arrays = self._arrays()
            if not self._count:
                raise ValueError("there is no mean of nothing: call add first")
            return jax.tree.unflatten(self._treedef, _divided(arrays, self._count))

    def add(self, tree: Any) -> None:
        """Adds a tree to the sums, in place.

        The first one compiles a program for each shape and dtype. Leaves on another device are brought to the pool's.

        Args:
            tree: Arrays or scalars, in the structure and shapes of `like`. Each is cast to its sum's dtype before it is
                added.

        Raises:
            ValueError: Where the structure or a shape is another.
            TypeError: Where a dtype does not fit its sum, a float for an integer, say; for a leaf that is no array;
                and for a tracer, that is, inside a jitted function.
            LeaseReleased: After the end.
            RuntimeError: Where a leaf was deleted, by donation, say; where an earlier `add` or `reset` failed half-way,
                or a sum was donated. In all these cases nothing was added.
        """
        with self._lock:
            self._arrays()
            leaves = self._checked(tree)
            self._torn = True
            for lease, leaf in zip(self._leases, leaves, strict=True):
                lease.update(_plus, leaf)
            self._count += 1
            self._torn = False

    def reset(self) -> None:
        """Sets the sums and `count` to zero, for the next round.

        Raises:
            LeaseReleased: After the end.
        """
        with self._lock:
            self._torn = True
            for lease in self._leases:
                donated = lease.array.is_deleted()
                try:
                    lease.fill(0)
                except Exception:
                    if not donated:
                        raise
                    lease.fill(0)  # The one that failed has put a new buffer in its place.
            self._count = 0
            self._torn = False

    def close(self) -> None:
        """Returns the slots. Idempotent."""
        with self._lock:
            for lease in self._leases:
                if not lease.released:
                    lease.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Accumulator of {len(self._leases)} arrays: {self._count} added>"

    def _arrays(self) -> list[jax.Array]:
        arrays = [lease.array for lease in self._leases]
        if self._torn:
            raise RuntimeError("an add or reset failed half-way, and the sums do not belong together: call reset first")
        if any(array.is_deleted() for array in arrays):
            raise RuntimeError("a sum was deleted, by donation, say: call reset first, and donate what mean gives")
        return arrays

    def _checked(self, tree: Any) -> list[Any]:
        """The leaves of a tree all of which can be added."""
        paths, treedef = tree_flatten_with_path(tree)
        if treedef != self._treedef:
            raise ValueError(f"tree must have the structure of `like`: {self._difference(paths, treedef)}")
        for (path, leaf), lease in zip(paths, self._leases, strict=True):
            if isinstance(leaf, Tracer):
                raise TypeError(f"tree{keystr(path)} is a tracer: call add outside of jit, with what it returned")
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise RuntimeError(f"tree{keystr(path)} was deleted before it could be added: was it donated?")
            value = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
            if value.dtype != lease.dtype and not _fits(value.dtype, lease.dtype):
                raise TypeError(f"tree{keystr(path)} is of {value.dtype}, which no sum of {lease.dtype} can hold")
            if tuple(value.shape) != lease.shape:
                raise ValueError(f"tree{keystr(path)} must have the shape {lease.shape}, got {tuple(value.shape)}")
        return [leaf for _, leaf in paths]

    def _difference(self, paths: Sequence[tuple[Any, Any]], treedef: Any) -> str:
        """What distinguishes two trees, briefly also where both have thousands of leaves."""
        sums, _ = tree_flatten_with_path(jax.tree.unflatten(self._treedef, self._leases))
        expected = [keystr(path) for path, _ in sums]
        got = [keystr(path) for path, _ in paths]
        for difference, names, others in (("it lacks", expected, {*got}), ("it also has", got, {*expected})):
            # A tree that is itself a leaf has no name.
            if "" not in (*names, *others) and (odd := [name for name in names if name not in others]):
                more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
                return f"{difference} {', '.join(odd[:3])}{more}"
        return f"it is {treedef!s:.300}, and not {self._treedef!s:.300}"


@jax.jit
def _divided(arrays: list[jax.Array], count: int) -> list[jax.Array]:
    return [x / count for x in arrays]


def _plus(total: jax.Array, x: jax.Array) -> jax.Array:
    return total + x.astype(total.dtype)


def _kind(dtype: Any) -> int:
    """The index of a dtype in `_KINDS`, or -1."""
    return next((i for i, kind in enumerate(_KINDS) if jax.dtypes.issubdtype(dtype, kind)), -1)


def _fits(dtype: Any, sum_dtype: Any) -> bool:
    return 0 <= _kind(dtype) <= _kind(sum_dtype)

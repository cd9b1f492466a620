"""The ways to bring a host batch to a device, as rivals that can be timed and verified."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

import arenax

from ._bench_clock import Forms

Array: TypeAlias = np.ndarray[Any, Any]
See = Callable[[Any], Any]
# Brings the batch once, and hands it to a function while it is valid.
Form = Callable[[See], Any]

wait: See = jax.block_until_ready

REF = getattr(jax, "new_ref", None)
NO_REF = f"new_ref: jax {jax.__version__} has no jax.new_ref, so that column is empty."


def default_device() -> Any:
    """Where JAX puts what is not told where to go."""
    (device,) = jnp.zeros(()).devices()
    return device


def ordinary(nbytes: int, seed: int = 0) -> Array:
    """Returns random float32 values that lie as NumPy's own large arrays do, at 16 bytes modulo 64.

    On CPU JAX would take an array at a multiple of 64 as it is, without a copy. Where a small one lies is chance.

    Args:
        nbytes: Their size, a multiple of 4.
        seed: Of the values.

    Returns:
        An array of 256 columns, or of one axis where that does not divide.
    """
    raw = np.empty(nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 64 + 16
    values = raw[start : start + nbytes].view(np.float32)
    np.random.default_rng(seed).random(out=values, dtype=np.float32)
    return values.reshape(-1, 256) if nbytes % 1024 == 0 else values


def landing_forms(batch: Any, pool: arenax.BufferPool) -> dict[str, Form]:
    """The forms that take any pytree.

    Args:
        batch: Arrays as `ordinary` makes them.
        pool: A pool with a slot for each leaf.

    Returns:
        ``memcpy``, ``device_put``, ``put`` and ``step``.
    """
    sources: list[Array] = jax.tree.leaves(batch)
    targets = [np.zeros_like(source) for source in sources]  # zeros_like writes: its pages are there.
    pairs = list(zip(targets, sources, strict=True))

    def memcpy(see: See) -> Any:
        for target, source in pairs:
            np.copyto(target, source)
        return None if see is wait else see(targets)

    def device_put(see: See) -> Any:
        return see(jax.device_put(batch))

    def put(see: See) -> Any:
        return see(pool.put(batch))

    def step(see: See) -> Any:
        with pool.step() as scope:
            return see(scope.put(batch))

    return {"memcpy": memcpy, "device_put": device_put, "put": put, "step": step}


def array_form(value: Array) -> Form:
    """`jax.numpy.array`, for one leaf."""

    def array(see: See) -> Any:
        return see(jnp.array(value))

    return array


def ref_form(value: Array) -> Form | None:
    """The upstream rival: a mutable reference written in place by a jitted function; None where JAX has none."""
    if REF is None:
        return None
    ref = REF(jnp.zeros(value.shape, value.dtype))

    @jax.jit
    def write(ref: Any, value: Any) -> Any:
        ref[...] = value
        return ref[(0,) * value.ndim]  # A reference cannot be awaited: this element is there once the write is done.

    def new_ref(see: See) -> Any:
        done = jax.block_until_ready(write(ref, value))
        return done if see is wait else see(ref[...])

    return new_ref


def put_form(value: Any, pool: arenax.BufferPool) -> Form:
    """`BufferPool.put` of another pool."""

    def put(see: See) -> Any:
        return see(pool.put(value))

    return put


def timed(forms: Mapping[str, Form]) -> Forms:
    """The forms as they are timed: each result is awaited and then dropped."""
    return {name: functools.partial(form, wait) for name, form in forms.items()}


def verified(forms: Mapping[str, Form], batch: Any, where: str) -> list[str]:
    """Does each form once and compares every value.

    Args:
        forms: The forms.
        batch: What each must have brought.
        where: Names the batch.

    Returns:
        A line for each form that brought anything else.
    """
    sources: Sequence[Array] = jax.tree.leaves(batch)

    def equal(result: Any) -> bool:
        leaves = jax.tree.leaves(result)
        return len(leaves) == len(sources) and all(
            np.array_equal(np.asarray(leaf), source) for leaf, source in zip(leaves, sources, strict=True)
        )

    return [f"{name} brought wrong values at {where}" for name, form in forms.items() if not form(equal)]

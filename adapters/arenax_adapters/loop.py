"""What a training loop draws from the pool: a step's batch, by a call instead of a ``with``, and sums of gradients."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from arenax import BufferPool

from ._accumulate import Accumulator as Accumulator
from ._accumulate import accumulate as accumulate

Result = TypeVar("Result")


def pooled(
    train_step: Callable[..., Result], pool: BufferPool, with_sizes: bool = False
) -> Callable[[Any, Any], Result]:
    """Turns ``train_step(state, batch)``, a function of device arrays, into one that takes batches of host arrays.

    Each call opens a `BufferPool.step`, draws the batch in it, runs `train_step` and gives the batch's slots back. One
    slot of each kind serves the loop.

    What `train_step` returns is the caller's for good. Where an array in it is one of the drawn ones, or lies in the
    memory of one, that slot's array leaves the pool and a new one takes its place: this costs an allocation each call,
    which `BufferPool.steady` refuses, and never happens to the results of a jitted function, which are arrays of their
    own. Arrays that `train_step` puts elsewhere, or into an object that is no pytree, are not seen: they must not be
    read after the call, since the next landing in the slot deletes them.

    Args:
        train_step: A function ``(state, batch)``, or ``(state, batch, sizes)`` with `with_sizes`, jitted or not, that
            returns a pytree. It may donate both.
        pool: Where the batches are drawn.
        with_sizes: Whether `train_step` takes the sizes too, as `BufferPool.put` gives them.

    Returns:
        A function ``(state, batch)`` of a state and a pytree of host arrays, that returns what `train_step` returns.

    Raises:
        TypeError: Where `train_step` cannot be called or `pool` is no `BufferPool`.

    Example:
        >>> import arenax, jax, numpy as np
        >>> from arenax_adapters.loop import pooled
        >>> @jax.jit
        ... def train_step(total, batch):
        ...     return total + batch["x"].sum(), batch["x"].max()
        >>> with arenax.BufferPool() as pool:
        ...     step, total = pooled(train_step, pool), 0.0
        ...     for i in range(3):
        ...         total, loss = step(total, {"x": np.full((2, 3), i, np.float32)})
        ...     print(total, loss, pool.stats().slot_count)
        18.0 2.0 1
    """
    if not callable(train_step):
        raise TypeError(f"train_step must be a function, got {type(train_step).__name__}")
    if not isinstance(pool, BufferPool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"pool must be an arenax.BufferPool, got {type(pool).__name__}")

    # Without the attributes of a callable object, whose state is its own.
    @functools.wraps(train_step, updated=())
    def step_on_host_batch(state: Any, batch: Any) -> Result:
        with pool.step() as step:
            drawn = step.put(batch, with_sizes)
            result = train_step(state, *drawn) if with_sizes else train_step(state, drawn)
            escaping = _shared(drawn, result)
            if escaping:
                step.keep(escaping)
            return result

    return step_on_host_batch


def _shared(drawn: Any, result: Any) -> list[Any]:
    """The drawn arrays that are in the result, themselves or as other array objects on the same memory.

    Such another object is what `jax.device_put` to the array's own device gives, or a replicated one, or the shard of
    an array put together from several. An array that `train_step` donated is no longer the pool's, whoever has its
    memory now.
    """
    by_address = {a: x for x in jax.tree.leaves(drawn) for a in _addresses(x)}
    shared = (by_address.get(a) for x in jax.tree.leaves(result) for a in _addresses(x))
    return list({id(x): x for x in shared if x is not None}.values())


def _addresses(array: Any) -> tuple[int, ...]:
    """Where the bytes of an array lie, one address a shard; none for a deleted array, or what is no device array."""
    if not hasattr(array, "unsafe_buffer_pointer") or array.is_deleted():
        return ()
    if isinstance(array, jax.Array) and (len(array.sharding.device_set) > 1 or not array.is_fully_addressable):
        return tuple(a for shard in array.addressable_shards for a in _addresses(shard.data))
    return (array.unsafe_buffer_pointer() or id(array),)  # Of no bytes, there may be none.

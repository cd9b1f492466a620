"""The private names of JAX that are used, for speed alone, each with the public way that is taken where it is missing.

`tests/pool/test_private.py` fails where a release of JAX no longer has one, or where it does something else.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

# What a compiled program itself calls, in C++, from its second call on. Publicly its `__call__`, a function of Python's
# that takes a tenth of the time of a small donation.
CPP_CALL = "_call"

# In `jaxlib._jax`: gives what makes an array object of an abstract value, a sharding and single-device arrays.
ARRAY_MAKER = "array_result_handler"


def assembler(array: jax.Array) -> Callable[[Sequence[jax.Array]], jax.Array]:
    """Returns what makes of single-device arrays a global one such as `array`, on the same buffers.

    Publicly that is `jax.make_array_from_single_device_arrays`, which takes seven times as long.
    """
    shape, sharding = array.shape, array.sharding
    try:
        import jaxlib._jax as _jax  # A module that may be gone.

        like: tuple[Any, ...] = (array.aval, sharding, True)
        make_maker = getattr(_jax, ARRAY_MAKER)
        try:
            maker = make_maker(*like, True)  # Up to jax 0.10 it checks the arrays each time unless told not to.
        except TypeError:
            maker = make_maker(*like)
        parts = [shard.data for shard in array.addressable_shards]
        again = maker(parts)
        pointers = [shard.data.unsafe_buffer_pointer() for shard in again.addressable_shards]
        if again.sharding is sharding and pointers == [part.unsafe_buffer_pointer() for part in parts]:
            return maker
    except (ImportError, AttributeError, TypeError):
        pass
    return lambda parts: jax.make_array_from_single_device_arrays(shape, sharding, [*parts])


def second_handle(array: jax.Array) -> Callable[[list[jax.Array]], jax.Array]:
    """Returns what makes of ``[a]`` another object on the buffer of `a`, an array such as `array`.

    Publicly that is `addressable_data(0)`, which makes the abstract value and the sharding anew as well, in Python: a
    seventh of the time of a small put.
    """
    try:
        import jaxlib._jax as _jax  # A module that may be gone.

        like: tuple[Any, ...] = (array.aval, array.sharding, array.committed)
        make_maker = getattr(_jax, ARRAY_MAKER)
        try:
            maker = make_maker(*like, True)  # Up to jax 0.10 it checks the arrays each time unless told not to.
        except TypeError:
            maker = make_maker(*like)
        second = maker([array])
        if second is not array and second.unsafe_buffer_pointer() == array.unsafe_buffer_pointer():
            return maker
    except (ImportError, AttributeError, TypeError):
        pass
    return lambda arrays: arrays[0].addressable_data(0)

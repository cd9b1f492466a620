"""Masks of the valid part of a padded axis."""

from typing import Any

import jax
import jax.numpy as jnp


def valid_mask(size: Any, capacity: int) -> jax.Array:
    """Returns True where a padded axis holds data. Works inside `jit`, with `capacity` static.

    Args:
        size: Valid extent, an int scalar or an array of any shape.
        capacity: Length of the padded axis, such as ``x.shape[1]``.

    Returns:
        Booleans of shape ``(*size.shape, capacity)``.

    Example:
        >>> import arenax
        >>> print(arenax.valid_mask(2, 4))
        [ True  True False False]
    """
    return jnp.arange(capacity, dtype=jnp.int32) < jnp.asarray(size, jnp.int32)[..., None]

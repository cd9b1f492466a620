"""The recipes run with JAX's own promotion, as a user's program does: optax needs it."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def _standard_promotion() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    with jax.numpy_dtype_promotion("standard"):
        yield

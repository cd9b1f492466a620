"""Gradient accumulation with optax."""

import jax.numpy as jnp
import pytest

from tests.adapters.recipes import losses_by_hand, run_recipe

pytest.importorskip("optax")


def test_the_losses_are_those_without_the_pool():
    recipe = run_recipe("optax")
    params = {"w": jnp.zeros((4, 1)), "b": jnp.zeros(1)}
    losses = losses_by_hand(
        recipe["batches"](),
        (params, recipe["optimizer"].init(params)),
        lambda state, batch: recipe["gradient"](state[0], batch),
        lambda state, grads: recipe["apply"](*state, grads),
    )
    assert recipe["losses"] == losses
    assert recipe["pool"].stats().creation_count == 2 + 3

"""Gradient accumulation with Equinox."""

import jax
import pytest

from tests.adapters.recipes import losses_by_hand, run_recipe

pytest.importorskip("equinox")
pytest.importorskip("optax")


def test_the_losses_are_those_without_the_pool():
    import equinox as eqx

    recipe = run_recipe("Equinox")
    model = eqx.nn.MLP(4, 1, width_size=8, depth=1, key=jax.random.key(0))
    losses = losses_by_hand(
        recipe["batches"](),
        (model, recipe["optimizer"].init(eqx.filter(model, eqx.is_inexact_array))),
        lambda state, batch: recipe["gradient"](state[0], batch),
        lambda state, grads: recipe["apply"](*state, grads),
    )
    assert recipe["losses"] == losses
    assert recipe["pool"].stats().creation_count == 2 + 5

"""Gradient accumulation with the two APIs of Flax, and landing ahead in place of its own."""

import jax
import jax.numpy as jnp
import pytest

from tests.adapters.recipes import losses_by_hand, run_recipe

pytest.importorskip("flax")
pytest.importorskip("optax")


def test_nnx_losses_are_those_without_the_pool():
    from flax import nnx

    recipe = run_recipe("Flax NNX")
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, recipe["optax"].adam(0.1), wrt=nnx.Param)
    losses = losses_by_hand(
        recipe["batches"](),
        None,  # The model and the optimizer are updated in place.
        lambda _, batch: recipe["gradient"](model, batch),
        lambda _, grads: recipe["apply"](model, optimizer, grads),
    )
    assert recipe["losses"] == losses
    assert recipe["pool"].stats().creation_count == 2 + 3


def test_linen_losses_are_those_without_the_pool():
    from flax.training.train_state import TrainState

    recipe = run_recipe("Flax Linen")
    params = recipe["model"].init(jax.random.key(0), jnp.zeros((1, 4)))["params"]
    state = TrainState.create(apply_fn=recipe["model"].apply, params=params, tx=recipe["optax"].adam(0.1))
    losses = losses_by_hand(recipe["batches"](), state, recipe["gradient"], recipe["apply"])
    assert recipe["losses"] == losses
    assert recipe["pool"].stats().creation_count == 2 + 3


def test_prefetch_gives_the_losses_of_prefetch_to_device():
    from flax.jax_utils import prefetch_to_device

    recipe = run_recipe("In place of Flax's prefetch_to_device")
    params, losses = jnp.zeros((4, 1)), list[float]()
    with_an_axis = ({name: leaf[None] for name, leaf in host.items()} for host in recipe["batches"]())
    for batch in prefetch_to_device(with_an_axis, 2, devices=jax.devices()[:1]):
        params, loss = recipe["train_step"](params, jax.tree.map(lambda leaf: leaf[0], batch))
        losses.append(float(loss))
    assert recipe["losses"] == losses
    assert recipe["pool"].stats().creation_count <= 2 * 3

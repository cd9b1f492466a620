"""Batches of tf.data."""

import pytest

from tests.adapters.recipes import losses_of_training, run_recipe

pytest.importorskip("tensorflow")


def test_the_losses_are_those_without_the_pool():
    recipe = run_recipe("tf.data")
    assert recipe["losses"] == losses_of_training(recipe, [*recipe["batches"](), *recipe["batches"]()])
    assert recipe["pool"].stats().creation_count <= 2 * 3

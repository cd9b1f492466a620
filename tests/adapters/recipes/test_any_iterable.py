"""Batches of a generator that writes each into the same host arrays."""

from tests.adapters.recipes import losses_of_training, run_recipe


def test_the_losses_are_those_of_batches_that_are_apart():
    recipe = run_recipe("Any iterable")
    assert recipe["losses"] == losses_of_training(recipe, recipe["batches"]())
    assert len({*recipe["losses"]}) == 8
    assert recipe["pool"].stats().creation_count <= 2 * 3

"""Batches of a Hugging Face dataset that lies in memory."""

import numpy as np
import pytest

from tests.adapters.recipes import losses_of_training, run_recipe

pytest.importorskip("datasets")


def test_the_losses_are_those_without_the_pool():
    recipe = run_recipe("Hugging Face datasets")
    hosts = [
        host
        for epoch in range(2)
        for host in recipe["table"].shuffle(seed=epoch).iter(batch_size=16, drop_last_batch=True)
    ]
    assert all(leaf.dtype == np.float32 for host in hosts for leaf in host.values())
    assert recipe["losses"] == losses_of_training(recipe, hosts)
    assert len(hosts) == 16
    assert recipe["pool"].stats().creation_count <= 2 * 3

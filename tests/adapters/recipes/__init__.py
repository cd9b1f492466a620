"""The recipes of docs/recipes.md, run as they stand there: a test that copied them would let them drift."""

import itertools
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

PAGE = Path(__file__).parents[3] / "docs" / "recipes.md"
SECTION = re.compile(r"^#+ (?P<heading>[^\n]+)\n(?P<text>.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHARED = "What they share"


def blocks() -> dict[str, tuple[int, str]]:
    """By heading: the line before each block, and its code."""
    page = PAGE.read_text(encoding="utf-8")
    found: dict[str, tuple[int, str]] = {}
    for section in SECTION.finditer(page):
        for block in BLOCK.finditer(page, section.start("text"), section.end()):
            assert section["heading"] not in found, "one block a heading"
            found[section["heading"]] = (page.count("\n", 0, block.start(1)), block[1])
    return found


def run_recipe(heading: str) -> dict[str, Any]:
    """Runs one recipe, after what they share, and returns its names. Its pool must be as it was before."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for line, code in (blocks()[SHARED], blocks()[heading]):
        exec(compile("\n" * line + code, PAGE, "exec"), names)
    assert names["pool"].stats().leased_count == 0
    names["pool"].check()
    return names


def losses_by_hand(
    batches: Iterable[Any], state: Any, gradient: Callable[[Any, Any], Any], apply: Callable[[Any, Any], Any]
) -> list[float]:
    """The losses without the pool, of an optimizer step every four batches.

    Args:
        batches: Host batches.
        state: What the loop carries.
        gradient: Of a state and a batch, gives a loss and its gradients.
        apply: Of a state and the mean gradients, gives the next state.
    """
    hosts, losses = iter(batches), list[float]()
    while four := [*itertools.islice(hosts, 4)]:
        total, *others = [gradient(state, jax.device_put(host)) for host in four]
        for other in others:
            total = jax.tree.map(jnp.add, total, other)
        loss, grads = jax.tree.map(lambda x: x / 4, total)
        state = apply(state, grads)
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    return losses


def losses_of_training(recipe: dict[str, Any], batches: Iterable[Any]) -> list[float]:
    """The losses without the pool, of the page's `train_step`."""
    params, losses = jnp.zeros((4, 1)), list[float]()
    for host in batches:
        params, loss = recipe["train_step"](params, jax.device_put(host))
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    return losses

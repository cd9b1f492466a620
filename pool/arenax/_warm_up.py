"""Warming up: a function is called once for each size class of its batch, so that the run itself compiles nothing."""

import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ._batch import as_spec, label
from ._compiles import CompileCounter
from ._request import ArraySpec, Ragged
from ._size_classes import SizeClasses

if TYPE_CHECKING:
    from ._pool import BufferPool


def warm_up(pool: "BufferPool", function: Callable[..., Any], spec: Any, with_sizes: bool) -> int:
    """Calls `function` with a batch of zeros of every shape, each in a step of its own; returns how many compiled."""
    counter = CompileCounter()
    paths, treedef = jax.tree_util.tree_flatten_with_path(spec)
    names = [label(path) for path, _ in paths]
    leaves = [as_spec(leaf, name) for (_, leaf), name in zip(paths, names, strict=True)]
    shapes = [*batches(leaves, pool.planner.specs_of(spec, treedef), names)]
    with counter.watch():
        for batch in _progress(shapes, f"arenax: compiling for {len(shapes)} shapes"):
            with pool.step() as step:
                arguments = step.put(treedef.unflatten(batch), with_sizes)
                jax.block_until_ready(function(*arguments) if with_sizes else function(arguments))
    return counter.count


def batches(
    leaves: Sequence[ArraySpec], ragged: Sequence[Ragged | None], names: Sequence[str]
) -> Iterator[list[np.ndarray[Any, Any]]]:
    """Yields a batch of zeros, as leaves, for every combination of classes.

    Axes with equal size classes are taken to have one length, as tokens and their labels have, and vary together.
    """
    axes = [_axes(*each) for each in zip(leaves, ragged, names, strict=True)]
    kinds = [*dict.fromkeys(classes for of_leaf in axes for classes in of_leaf if isinstance(classes, SizeClasses))]
    for sizes in itertools.product(*(kind.boundaries for kind in kinds)):
        size_of = dict(zip(kinds, sizes, strict=True))
        yield [
            np.zeros([size_of[n] if isinstance(n, SizeClasses) else n for n in of_leaf], leaf.dtype)
            for leaf, of_leaf in zip(leaves, axes, strict=True)
        ]


def _axes(leaf: ArraySpec, ragged: Ragged | None, name: str) -> list[Any]:
    axes: list[Any] = [*leaf.shape]
    if ragged is not None:
        axes[ragged.axis_of(len(axes), name)] = ragged.size_classes
    return axes


def _progress(items: Sequence[Any], what: str) -> Iterable[Any]:
    """The items, with a bar where there is a terminal to draw it on and rich to draw it with."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        return items
    import rich.console
    import rich.progress

    return rich.progress.track(items, what, console=rich.console.Console(stderr=True), transient=True)

"""Batches as trees of plain containers, walked without jax: dicts, named tuples, tuples, lists and their subclasses."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """Returns a tree like `tree`, of the same types of containers, with `function` of each leaf in its place.

    What is no mapping, tuple or list is a leaf: a text too, and None.
    """
    if isinstance(tree, Mapping):
        mapping = cast(Mapping[Any, Any], tree)
        found = {key: map_tree(function, value) for key, value in mapping.items()}
        return like(mapping, found)
    if isinstance(tree, tuple):
        items = [map_tree(function, item) for item in cast(tuple[Any, ...], tree)]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, list):
        items = [map_tree(function, item) for item in cast(list[Any], tree)]
        return items if type(tree) is list else _like_list(tree, items)
    return function(tree)


def leaves_of(tree: Any) -> Iterator[Any]:
    """The leaves, in the order in which `map_tree` passes them."""
    if isinstance(tree, Mapping):
        for value in cast(Mapping[Any, Any], tree).values():
            yield from leaves_of(value)
    elif isinstance(tree, tuple | list):
        for item in cast(Sequence[Any], tree):
            yield from leaves_of(item)
    else:
        yield tree


def like(mapping: Any, found: dict[Any, Any]) -> Any:
    """Returns a mapping of the type of `mapping`, with the items of `found`."""
    if type(mapping) is dict:
        return found
    # A defaultdict's constructor takes no items, and a mapping may have attributes of its own. But the copy of one that
    # does not say how it is copied may have its items in common with it.
    if isinstance(mapping, dict) or hasattr(type(mapping), "__copy__"):
        try:
            clone = copy.copy(mapping)
            clone.update(found)
            return clone
        except (TypeError, AttributeError):
            pass
    return type(mapping)(found)


def _like_list(items: Any, found: list[Any]) -> Any:
    clone = copy.copy(items)
    clone[:] = found
    return clone

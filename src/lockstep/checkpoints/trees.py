"""Trees of dicts, lists and tuples, as checkpoints are. Free of torch."""

from collections.abc import Callable, Iterator
from typing import Any

Place = tuple[Any, ...]  # the keys and indices that lead to a leaf


def leaves(tree: Any, path: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Everything in `tree` that is no dict, list or tuple, with its path."""
    if isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(value, (*path, key))
    else:
        yield path, tree


def mapped(tree: Any, change: Callable[[Place, Any], Any], path: Place = ()) -> Any:
    """`tree` with `change(path, leaf)` in place of each leaf."""
    if isinstance(tree, dict):
        return {key: mapped(value, change, (*path, key)) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(mapped(value, change, (*path, i)) for i, value in enumerate(tree))
    return change(path, tree)

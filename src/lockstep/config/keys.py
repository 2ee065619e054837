"""Dotted keys of a config."""

from typing import Any


def dotted(tree: Any, key: str = "") -> dict[str, Any]:
    """The values of nested dicts by their dotted keys, each prefixed with `key`. A list is a value."""
    if not isinstance(tree, dict):
        return {key: tree}
    return {
        name: value
        for inner, node in tree.items()
        for name, value in dotted(node, f"{key}.{inner}" if key else str(inner)).items()
    }

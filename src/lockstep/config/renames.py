"""Classes that moved and values that went, for the configs and checkpoints of earlier versions. Free of torch."""

from typing import Any

# A name that ends in a dot stands for all that begin with it.
MOVED = {
    "lockstep.augment.": "lockstep.kit.augment.",
    "lockstep.tasks.": "lockstep.kit.tasks.",
    "lockstep.training.schedules.": "lockstep.kit.schedules.",
    "lockstep.training.task.": "lockstep.kit.task.",
    "lockstep.data.Arrays": "lockstep.Arrays",
    "lockstep.data.Folder": "lockstep.kit.Folder",
    "lockstep.data.Images": "lockstep.kit.Images",
    "lockstep.data.Published": "lockstep.kit.Published",
    "lockstep.models.from_timm": "lockstep.kit.timm.from_timm",
    # in 0.1
    "lockstep.models.BasicNet": "project.model.BasicNet",
}


def moved(target: str) -> str:
    """Where a class is today."""
    old = next((old for old in MOVED if target == old or (old.endswith(".") and target.startswith(old))), "")
    return MOVED[old] + target.removeprefix(old) if old else target


def with_moved(node: Any) -> Any:
    """A saved config with the classes of today."""
    if isinstance(node, list):
        return [with_moved(item) for item in node]
    if not isinstance(node, dict):
        return node
    known: dict[tuple[str, str], Any] = {("num_sanity_val_steps", "auto"): 2}  # in 0.2
    known |= {("_target_", item): moved(item) for item in [node.get("_target_")] if isinstance(item, str)}
    return {key: known.get((key, str(item)), with_moved(item)) for key, item in node.items()}

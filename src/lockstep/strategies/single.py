"""One process on one device."""

from lightning.fabric.plugins import ClusterEnvironment


def single(*, environment: ClusterEnvironment | None, sharded_checkpoints: bool, name: str = "single") -> str:
    """Lightning's own choice for one device."""
    return "auto"

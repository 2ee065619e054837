"""The mean and standard deviation that images are normalised with."""

from omegaconf import DictConfig

from lockstep.config.instantiate import to_plain
from lockstep.config.signatures import locate


def with_numbers(cfg: DictConfig) -> DictConfig:
    """`cfg` with numbers in place of data.mean=model and data.std=model, so a newer timm cannot change a resumed run."""
    if not (wanted := [key for key in ("mean", "std") if cfg.data.get(key) == "model"]):
        return cfg
    cfg = cfg.copy()
    dataset = locate(cfg.data._target_)
    network_class = locate(cfg.model._target_) if cfg.model else None
    of_network = getattr(network_class, "normalisation", lambda _: None)(cfg.model.get("name"))
    own = dataset.normalisation(to_plain(cfg.data))
    if of_network and len(of_network[0]) != len(own[0]):  # pretrained on colour images, used on grey ones
        of_network = None
    numbers = dict(zip(("mean", "std"), of_network or own, strict=True))
    for key in wanted:
        cfg.data[key] = list(numbers[key])
    return cfg

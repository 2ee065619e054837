"""Any timm network, with the channels and classes of the data."""

from pathlib import Path
from typing import Any

from torch import nn

from lockstep import UserError, world


def from_timm(
    *,
    name: str,
    in_channels: int,
    num_classes: int,
    image_size: int,
    pretrained: bool = False,
    checkpoint_path: str | None = None,
    **model_args: object,
) -> nn.Module:
    """A timm network that maps image_BCHW to logits_BK.

    `checkpoint_path` is a local file of weights; `model_args` go to the network's class. With `pretrained`, the weights
    of the file or of timm's hub may be for different classes and channels: the head is then reinitialised.

    Raises:
        UserError: timm does not have this model, or its weights cannot be downloaded or read.
    """
    path = str(Path(checkpoint_path).expanduser()) if checkpoint_path else ""
    import timm  # 1 s; not needed for basic_net

    config = pretrained_config(name)
    if config and config.fixed_input_size:
        model_args.setdefault("img_size", image_size)
    if pretrained and not path and config and config.hf_hub_id:
        path = offline_weights(name, config.hf_hub_id)
    try:
        return timm.create_model(  # type: ignore[no-any-return]
            name,
            pretrained=pretrained,
            **({"pretrained_cfg_overlay": {"file": path}} if pretrained and path else {"checkpoint_path": path}),
            in_chans=in_channels,
            num_classes=num_classes,
            **model_args,
        )
    except Exception as e:
        setting = f"model.checkpoint_path={checkpoint_path}" if checkpoint_path else f"model.pretrained=true for {name}"
        if not (pretrained or checkpoint_path):
            raise UserError(f"model.name={name} cannot be built: {e}") from e
        reason = " ".join(" ".join(str(e).splitlines()[:2]).split()) or type(e).__name__
        if "weights_only" in reason:  # torch's own message recommends running the file's code
            reason = "it contains objects that could run code; a weights file may contain only tensors"
        raise UserError(
            f"{setting}: the weights could not be loaded ({reason}). Pass a different model.checkpoint_path=<file>, with "
            "model.pretrained=true if its classes differ, or set model.pretrained=false to start from random weights."
        ) from e


def offline_weights(name: str, repository: str) -> str:
    """The downloaded weights of a timm network, if the hub cannot be reached: its client would retry for a minute."""
    from huggingface_hub import constants, try_to_load_from_cache

    if not (reason := world.unreachable(constants.ENDPOINT)):
        return ""
    files = (try_to_load_from_cache(repository, file) for file in ("model.safetensors", "pytorch_model.bin"))
    if found := next((file for file in files if isinstance(file, str)), ""):
        return found
    raise UserError(
        f"model.pretrained=true for {name}: {reason}, and the weights have not been downloaded. Set model.checkpoint_path=<file>, or model.pretrained=false."
    )


def pretrained_config(name: str) -> Any:
    """What timm knows of the weights of a model; None if it has none of that name."""
    import timm

    try:
        return timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    except RuntimeError:  # an unknown tag
        return None


RESIZE = {"center": "crop", "squash": "squash", "border": "pad"}  # by timm's crop_mode


def preprocessing(name: str) -> dict[str, Any] | None:
    """The evaluation preprocessing of timm's pretrained model `name`, as keys of `data`; None if unknown to timm."""

    config = pretrained_config(name)
    if config is None:
        return None
    keys = {"mean": list(config.mean), "std": list(config.std), "crop_pct": config.crop_pct}
    return {**keys, "interpolation": config.interpolation, "resize": RESIZE[config.crop_mode]}


from_timm.preprocessing = preprocessing  # type: ignore[attr-defined]  # for data.mean=model, see config/settings.py

"""The networks: BasicNet is the tutorial's; from_timm gives any of timm's for the data at hand, without a network."""

from functools import partial
from pathlib import Path

import huggingface_hub
import pytest
import torch
from conftest import Touch
from safetensors.torch import save_file
from torch import nn

from lockstep.errors import UserError
from lockstep.extras import airbench
from lockstep.extras.airbench import AirbenchNet
from lockstep.kit.timm import from_timm, preprocessing
from lockstep.machine import world
from project.model import BasicNet

SMALL = "test_resnet"  # timm's own for tests: 0.4 million parameters


def small(classes: int = 7, **args) -> nn.Module:
    return from_timm(name=SMALL, in_channels=1, num_classes=classes, image_size=32, **args)


# --- BasicNet --------------------------------------------------------------------------------------------------------


def test_basic_net_computes_what_the_tutorial_does_up_to_its_softmax():
    net, image_BCHW = BasicNet().eval(), torch.randn(4, 1, 28, 28)
    assert sum(parameter.numel() for parameter in net.parameters()) == 1_199_882
    first, second = (module for module in net.modules() if isinstance(module, nn.Conv2d))
    hidden, last = (module for module in net.modules() if isinstance(module, nn.Linear))
    x = torch.relu(second(torch.relu(first(image_BCHW))))  # ReLU before the pool, which gives the same
    x = nn.functional.max_pool2d(x, 2).flatten(1)
    torch.testing.assert_close(net(image_BCHW), last(torch.relu(hidden(x))))


def test_basic_net_drops_before_its_linear_layers_as_the_tutorial():
    assert [module.p for module in BasicNet().modules() if isinstance(module, nn.Dropout)] == [0.25, 0.5]
    image_BCHW = torch.rand(4, 1, 28, 28)
    all_of_conv, all_of_fc = BasicNet(dropout_conv=1.0, dropout_fc=0.0), BasicNet(dropout_fc=1.0)
    hidden, last = (module for module in all_of_conv.modules() if isinstance(module, nn.Linear))
    torch.testing.assert_close(all_of_conv(image_BCHW), last(hidden.bias.relu()).expand(4, 10))
    torch.testing.assert_close(all_of_fc(image_BCHW), all_of_fc.classifier[-1].bias.expand(4, 10))


@pytest.mark.parametrize("side", [28, 87, 88, 336])
def test_basic_net_stays_small_for_images_of_any_size(side):
    net = BasicNet(in_channels=3, image_size=side).eval()
    assert net(torch.zeros(2, 3, side, side)).shape == (2, 10)
    assert sum(parameter.numel() for parameter in net.parameters()) < 14e6


@pytest.mark.parametrize(("make", "least"), [(BasicNet, 6), (partial(AirbenchNet, widths=(8, 8, 8)), 9)])
def test_a_network_takes_the_shape_of_the_data(make, least):
    for size, channels in ((least, 1), (32, 3)):
        net = make(in_channels=channels, num_classes=7, image_size=size)
        assert net(torch.rand(2, channels, size, size)).shape == (2, 7)
    with pytest.raises(ValueError, match=rf"data\.image_size={least - 1}: .* at least {least} pixels"):
        make(image_size=least - 1)


# --- AirbenchNet -----------------------------------------------------------------------------------------------------


def test_airbench_net_has_the_papers_parameters_and_begins_as_the_identity():
    """1.97 million. The whitening layer's 24 filters of 2x2 are ordinary ones here."""
    assert sum(p.numel() for p in AirbenchNet().parameters()) == 1_972_792
    image_BCHW = torch.rand(2, 8, 9, 9)
    found = airbench.convolution(8, 16)(image_BCHW)
    torch.testing.assert_close(found[:, :8], image_BCHW)
    assert found[:, 8:].abs().sum() > 0


# --- timm ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "channels", "size"), [
    (SMALL, 3, 32), (f"{SMALL}.r160_in1k", 1, 32),
    ("vit_tiny_patch16_224", 1, 64),  # of a fixed size: it is built for the images
])  # fmt: skip
def test_channels_classes_and_size_come_from_the_data(name, channels, size):
    net = from_timm(name=name, in_channels=channels, num_classes=4, image_size=size).eval()
    assert net(torch.zeros(2, channels, size, size)).shape == (2, 4)


def test_further_arguments_go_to_the_networks_class():
    assert small(drop_rate=0.25).drop_rate == 0.25
    with pytest.raises(UserError, match=rf"model\.name={SMALL} cannot be built: .*nonsense"):
        small(nonsense=1)


@pytest.mark.parametrize(("given", "told"), [
    ("resnt50d", r"resnt50d cannot be built: Unknown model \(resnt50d\)"),
    (f"{SMALL}.nonsense", rf"{SMALL}\.nonsense cannot be built: Invalid pretrained tag"),  # a tag behind a known name
])  # fmt: skip
def test_an_unknown_name_is_named(given, told):
    with pytest.raises(UserError, match=rf"model\.name={told}"):
        from_timm(name=given, in_channels=1, num_classes=10, image_size=32)


def test_images_are_normalised_as_in_pretraining():
    half, ours = [0.5] * 3, {"resize": "crop", "crop_pct": 0.9, "interpolation": "bicubic"}
    assert preprocessing("vit_tiny_patch16_224") == {
        "mean": half,
        "std": half,
        **ours,
    }  # not the values of most networks
    assert preprocessing("convnext_tiny.in12k_ft_in1k_384")["resize"] == "squash"
    assert preprocessing("basic_net") is None
    assert preprocessing(f"{SMALL}.nonsense") is None


# --- weights ---------------------------------------------------------------------------------------------------------


def test_pretrained_weights_without_a_network_are_answered_with_what_to_type():
    with pytest.raises(UserError, match=rf"model\.pretrained=true for {SMALL}") as error:
        small(pretrained=True)
    assert all(key in str(error.value) for key in ("model.pretrained=false", "model.checkpoint_path=<file>"))


@pytest.fixture(scope="module")
def trained() -> dict[str, torch.Tensor]:
    """The weights of a network that is not new."""
    torch.manual_seed(1)
    return {key: value + (1 if value.is_floating_point() else 0) for key, value in small().state_dict().items()}


def saved(weights: dict[str, torch.Tensor], path: Path) -> Path:
    save_file(weights, path) if path.suffix == ".safetensors" else torch.save(weights, path)
    return path


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_the_weights_of_a_local_file_are_loaded(trained, tmp_path, monkeypatch, suffix):
    saved(trained, tmp_path / f"weights{suffix}")
    monkeypatch.setenv("HOME", str(tmp_path))
    net = small(checkpoint_path=f"~/weights{suffix}")
    assert net.state_dict().keys() == trained.keys()
    assert all(torch.equal(value, trained[key]) for key, value in net.state_dict().items())


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_pretrained_weights_of_a_local_file_may_be_for_other_classes_and_channels(tmp_path, suffix):
    trained = from_timm(name=SMALL, in_channels=3, num_classes=7, image_size=32).state_dict()
    path = saved(trained, tmp_path / f"weights{suffix}")
    found = small(classes=9, pretrained=True, checkpoint_path=str(path)).state_dict()
    new = {key for key, value in found.items() if value.shape != trained[key].shape}
    assert new == {"conv1.0.weight", "fc.weight", "fc.bias"}
    torch.testing.assert_close(found["conv1.0.weight"], trained["conv1.0.weight"].sum(1, keepdim=True))
    assert all(torch.equal(value, trained[key]) for key, value in found.items() if key not in new)


def test_downloaded_weights_are_used_while_the_hub_cannot_be_reached(tmp_path, monkeypatch):
    trained = from_timm(name=SMALL, in_channels=3, num_classes=7, image_size=32).state_dict()
    path = saved(trained, tmp_path / "model.safetensors")
    monkeypatch.setattr(world, "unreachable", lambda _: "the hub cannot be reached")
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda _, file: str(path) if file == path.name else None
    )
    found = small(pretrained=True).state_dict()
    assert torch.equal(found["conv1.3.weight"], trained["conv1.3.weight"])


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("content", ["missing", "damaged", "other classes"])
def test_a_file_of_weights_that_cannot_be_loaded_is_named(trained, tmp_path, suffix, content):
    path = tmp_path / f"weights{suffix}"
    if content != "missing":
        saved(trained, path)
    if content == "damaged":
        path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(
        UserError, match="FileNotFoundError" if content == "missing" else "could not be loaded"
    ) as error:
        small(classes=9 if content == "other classes" else 7, checkpoint_path=str(path))
    assert f"model.checkpoint_path={path}" in str(error.value)


def test_a_file_of_weights_cannot_run_code(trained, tmp_path):
    marker = tmp_path / "marker"
    path = saved({**trained, "more": Touch(marker)}, tmp_path / "weights.pth")
    with pytest.raises(UserError, match=r"could not be loaded \(it contains objects that could run code") as error:
        small(checkpoint_path=str(path))
    assert "weights_only" not in str(error.value)  # torch's advice to run it
    assert not marker.exists()
    torch.load(path, weights_only=False)
    assert marker.exists()  # it would have run

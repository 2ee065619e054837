"""The networks: BasicNet is the tutorial's; from_timm gives any of timm's for the data at hand, without a network."""

import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lockstep.errors import UserError
from lockstep.extras import airbench
from lockstep.extras.airbench import AirbenchNet
from lockstep.models import BasicNet, from_timm
from lockstep.models.from_timm import normalisation

SMALL = "test_resnet"  # timm's own for tests: 0.4 million parameters


@pytest.fixture
def nobody() -> Iterator[int]:
    """A port that is taken, where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Sets the address of the model hub, on this machine, where nothing is in its cache and there is no proxy."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    return lambda port: monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")


def small(classes: int = 7, **args) -> nn.Module:
    return from_timm(name=SMALL, in_channels=1, num_classes=classes, image_size=32, **args)


# --- BasicNet --------------------------------------------------------------------------------------------------------


def test_basic_net_has_the_layers_of_the_tutorial():
    layers = [module for module in BasicNet().modules() if not list(module.children())]
    expected = [
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.MaxPool2d(2),
        nn.ReLU(),  # before the pool in the tutorial, which gives the same
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    ]
    assert [repr(layer) for layer in layers] == [repr(layer) for layer in expected]
    assert sum(parameter.numel() for parameter in BasicNet().parameters()) == 1_199_882
    rates = [m.p for m in BasicNet(dropout_conv=0.0, dropout_fc=0.125).modules() if isinstance(m, nn.Dropout)]
    assert rates == [0.0, 0.125]


@pytest.mark.parametrize(
    ("make", "size", "channels"),
    [(BasicNet, 6, 1), (BasicNet, 32, 3), (AirbenchNet, 28, 1), (partial(AirbenchNet, widths=(8, 8, 8)), 9, 1)],
)
def test_a_network_takes_the_shape_of_the_data(make, size, channels):
    net = make(in_channels=channels, num_classes=7, image_size=size)
    assert net(torch.rand(2, channels, size, size)).shape == (2, 7)


@pytest.mark.parametrize(("make", "least"), [(BasicNet, 6), (AirbenchNet, 9)])
def test_images_that_are_too_small_are_refused(make, least):
    with pytest.raises(ValueError, match=rf"data\.image_size={least - 1}: .* at least {least} pixels"):
        make(image_size=least - 1)


# --- AirbenchNet -----------------------------------------------------------------------------------------------------


def test_airbench_net_has_the_papers_number_of_parameters():
    """1.97 million. The whitening layer's 24 filters of 2x2 are ordinary ones here."""
    assert sum(p.numel() for p in AirbenchNet().parameters()) == 1_972_792


def test_a_convolution_begins_as_the_identity():
    image_BCHW = torch.rand(2, 8, 9, 9)
    found = airbench.convolution(8, 16)(image_BCHW)
    torch.testing.assert_close(found[:, :8], image_BCHW)
    assert found[:, 8:].abs().sum() > 0


# --- timm ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "channels", "classes"), [(SMALL, 3, 4), ("resnet10t", 1, 10), (f"{SMALL}.r160_in1k", 1, 10)]
)
def test_channels_and_classes_come_from_the_data(name, channels, classes):
    net = from_timm(name=name, in_channels=channels, num_classes=classes, image_size=32).eval()
    assert net(torch.zeros(2, channels, 32, 32)).shape == (2, classes)


def test_a_network_of_fixed_size_is_built_for_the_size_of_the_images():
    net = from_timm(name="vit_tiny_patch16_224", in_channels=1, num_classes=10, image_size=64).eval()
    assert net.patch_embed.num_patches == 16
    assert net(torch.zeros(2, 1, 64, 64)).shape == (2, 10)


def test_further_arguments_go_to_the_networks_class():
    assert small(drop_rate=0.25).drop_rate == 0.25
    with pytest.raises(UserError, match=rf"model\.name={SMALL} cannot be built .*nonsense"):
        small(nonsense=1)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("resnt50d", r"resnt50d is unknown to timm.*\bresnet50d\b"),
        ("vit_tiny_patch16", r"vit_tiny_patch16 is unknown to timm.*\bvit_tiny_patch16_224\b"),
        ("qqqq", r"qqqq is unknown to timm. Similar: none. timm\.list_models\(\) lists all"),
        (f"{SMALL}.nonsense", rf"{SMALL}\.nonsense is unknown"),  # a tag behind a known name
    ],
)
def test_an_unknown_name_is_answered_with_near_ones(given, told):
    with pytest.raises(UserError, match=rf"model\.name={told}"):
        from_timm(name=given, in_channels=1, num_classes=10, image_size=32)


def test_images_are_normalised_as_in_pretraining():
    import timm

    config = timm.get_pretrained_cfg("vit_tiny_patch16_224")
    assert normalisation("vit_tiny_patch16_224") == (list(config.mean), list(config.std))
    assert normalisation("vit_tiny_patch16_224") == ([0.5] * 3, [0.5] * 3)  # not the values of most networks
    assert normalisation("basic_net") is None
    assert normalisation(f"{SMALL}.nonsense") is None


# --- weights ---------------------------------------------------------------------------------------------------------


def test_pretrained_weights_without_a_network_are_answered_with_what_to_type(hub, nobody):
    hub(nobody)
    with pytest.raises(UserError, match=rf"model\.pretrained=true for {SMALL}") as error:
        small(pretrained=True)
    assert "model.pretrained=false" in str(error.value)
    assert "model.checkpoint_path=<file>" in str(error.value)


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
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
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


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("content", ["missing", "damaged", "other classes"])
def test_a_file_of_weights_that_cannot_be_loaded_is_named(trained, tmp_path, suffix, content):
    path = tmp_path / f"weights{suffix}"
    if content != "missing":
        saved(trained, path)
    if content == "damaged":
        path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"the weights could not be loaded") as error:
        small(classes=9 if content == "other classes" else 7, checkpoint_path=str(path))
    assert f"model.checkpoint_path={path}" in str(error.value)


class Touch:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_file_of_weights_cannot_run_code(trained, tmp_path):
    path, marker = saved({**trained, "more": Touch(tmp_path / "marker")}, tmp_path / "weights.pth"), tmp_path / "marker"
    with pytest.raises(
        UserError, match=r"the weights could not be loaded \(it holds objects that could run code"
    ) as error:
        small(checkpoint_path=str(path))
    assert "weights_only" not in str(error.value)  # torch's advice to run it
    assert not marker.exists()
    torch.load(path, weights_only=False)
    assert marker.exists()  # it would have run


def test_basic_net_computes_what_the_tutorial_does_up_to_its_softmax():
    net, image_BCHW = BasicNet().eval(), torch.randn(4, 1, 28, 28)
    first, second, *_ = (module for module in net.features if isinstance(module, nn.Conv2d))
    hidden, last = (module for module in net.classifier if isinstance(module, nn.Linear))
    x = torch.relu(second(torch.relu(first(image_BCHW))))
    x = nn.functional.max_pool2d(x, 2).flatten(1)
    torch.testing.assert_close(net(image_BCHW), last(torch.relu(hidden(x))))

"""A network with its preprocessing and activation as one graph: ONNX, and torch.export. Compared before they are kept."""

import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.errors import UserError
from lockstep.extras.exported import ACTIVATIONS, Model

# B batch · C channel · H W pixel


TOLERANCE = 1e-4
BATCHES = (1, 5)  # the exporter has frozen the batch of a network to that of its example (pytorch#157621)
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
INTERNAL_BYTES = 1.8e9  # of weights within an ONNX file, which holds at most 2 GiB


class Whole(nn.Module):
    """uint8 image_BCHW of any size to probabilities or numbers."""

    scale: Tensor
    shift: Tensor

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.net, self.size, self.activation = model.net, model.image_size, model.activation
        self.register_buffer("scale", model.preprocess.scale.clone())
        self.register_buffer("shift", model.preprocess.shift.clone())

    def forward(self, image_BCHW: Tensor) -> Tensor:
        x = F.interpolate(image_BCHW.float(), size=(self.size, self.size), mode="bilinear", antialias=True)
        return ACTIVATIONS[self.activation](self.net(x * self.scale + self.shift))


def missing(formats: list[str]) -> Iterator[str]:
    """Problems: packages that a format needs."""
    absent = [name for name in ONNX_PACKAGES if find_spec(name) is None]
    if "onnx" in formats and absent:
        yield f"--onnx needs {', '.join(absent)}, which {'are' if len(absent) > 1 else 'is'} not installed. Type uv pip install 'lockstep[onnx]', or uv pip install {' '.join(absent)}."


def captured(model: Model, what: str) -> Any:
    """The graph of torch.export, for any number of images of any size."""
    side = model.image_size
    example = torch.zeros(2, model.channels, side + 3, side + 5, dtype=torch.uint8)
    any_size = {0: torch.export.Dim("batch"), 2: torch.export.Dim("height"), 3: torch.export.Dim("width")}
    try:
        return torch.export.export(Whole(model).eval(), (example,), dynamic_shapes={"image_BCHW": any_size})
    except Exception as e:  # of torch's tracing: anything
        raise not_exportable(what, e) from e


def not_exportable(what: str, error: Exception) -> UserError:
    why = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return UserError(f"{what}: torch cannot export this network ({why}). Leave {what} out: load.py needs no export.")


def write_graphs(model: Model, formats: list[str], folder: Path) -> dict[str, Callable[[Tensor], Tensor]]:
    """Writes model.onnx and model.pt2 as asked for; returns how to run each file."""
    if not formats:
        return {}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the exporters warn about themselves
        graph = captured(model, " ".join(f"--{name}" for name in formats))
        found: dict[str, Callable[[Tensor], Tensor]] = {}
        if "pt2" in formats:
            torch.export.save(graph, folder / "model.pt2")
            found["model.pt2"] = torch.export.load(folder / "model.pt2").module()
        if "onnx" in formats:
            write_onnx(model, graph, folder / "model.onnx")
            found["model.onnx"] = onnx_runner(folder / "model.onnx")
    return found


def write_onnx(model: Model, graph: Any, path: Path) -> None:
    large = sum(p.numel() * p.element_size() for p in model.net.parameters()) > INTERNAL_BYTES
    name = "values" if model.activation == "identity" else "probabilities"
    try:
        torch.onnx.export(
            graph,
            (),
            str(path),
            dynamo=True,
            input_names=["image"],
            output_names=[name],
            external_data=large,
            verbose=False,
        )
    except Exception as e:
        raise not_exportable("--onnx", e) from e


def onnx_runner(path: Path) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda image_BCHW: torch.from_numpy(session.run(None, {"image": image_BCHW.numpy()})[0])


@torch.inference_mode()
def compared(
    runners: dict[str, Callable[[Tensor], Tensor]], original: Callable[[Tensor], Tensor], image_BCHW: Tensor
) -> dict[str, float]:
    """The largest difference of each file's outputs from those of the original network, over all images and BATCHES.

    Raises:
        UserError: one is above TOLERANCE.
    """
    expected = torch.cat([original(part) for part in image_BCHW.split(max(BATCHES))])
    found = dict.fromkeys(runners, 0.0)
    for name, run in runners.items():
        for batch in BATCHES:
            try:
                outputs = torch.cat([run(part) for part in image_BCHW.split(batch)])
            except Exception as e:
                raise UserError(f"{name} does not run on a batch of {batch}: {str(e)[:300]}. Nothing was kept.") from e
            found[name] = max(found[name], (outputs - expected).abs().max().item())
            if not found[name] <= TOLERANCE:
                raise UserError(
                    f"{name} differs from the network by {found[name]:.2g} on {len(image_BCHW)} images in batches of {batch}; at most "
                    f"{TOLERANCE:g} is accepted. Nothing was kept."
                )
    return found

"""Parts of an exported folder: the source files of the network, and graphs of it, ONNX and torch.export, compared before they are kept."""

import ast
import importlib.util
import math
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.checkpoints.finding import leaves, mapped
from lockstep.data.dataset import Batch
from lockstep.data.pixels import Frame
from lockstep.errors import UserError
from lockstep.extras.exported import ACTIVATIONS, Model
from lockstep.training.losses import samples_at

# --- The source files that a network needs: its own, and those of its package that it imports, directly or through others ---

# By data/dataset.py and errors.py.
OFFERED = {"lockstep.errors.UserError", *(f"lockstep.data.{name}" for name in ("Arrays", "Batch", "DataSet", "Sound"))}
ALLOWED = {"torch", "torchvision", "timm", "numpy", "safetensors"}  # importable besides Python's own


def source_of(module: str) -> Path | None:
    """The file of a module; None if there is no such module or it is not Python's."""
    with suppress(ImportError, AttributeError, ValueError):
        spec = find_spec(module)
        if spec and spec.origin and spec.origin.endswith(".py"):
            return Path(spec.origin)
    return None


def needed(module: str, offered: Set[str] = frozenset()) -> dict[str, Path]:
    """The modules of its package that a module needs, itself first, with their files. The folder has what is `offered`.

    Raises:
        UserError: one of them imports a package that the folder may not need.
    """
    package, found, foreign = module.partition(".")[0], dict[str, Path](), dict[str, set[str]]()
    left = [module]
    for name in left:  # which grows
        if name in found:
            continue
        path = source_of(name)
        assert path is not None, name
        found[name] = path
        names = imported(path, name)
        own = {each for each in names if each.partition(".")[0] == package}
        if others := {each.partition(".")[0] for each in names - own - offered} - ALLOWED - sys.stdlib_module_names:
            foreign[path.name] = others
        left += sorted(each for each in own if source_of(each))
    if package == "lockstep" and len(found) > 1:
        foreign[found[module].name] = {"lockstep"}
    if foreign:
        which = "; ".join(f"{file} imports {', '.join(sorted(names))}" for file, names in foreign.items())
        raise UserError(
            f"{which}: the files of an exported network may import only torch, torchvision, timm, numpy and each other. "
            "Put other code that they need into your package."
        )
    return found


def imported(path: Path, module: str) -> set[str]:
    """The modules that a file imports, in full; without those for type checkers."""
    inside = module if path.name == "__init__.py" else module.rpartition(".")[0]
    own, found = module.partition(".")[0] + ".", set[str]()
    for node in walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), inside)
            for name in (f"{base}.{alias.name}" for alias in node.names):
                is_module = name.startswith(own) and source_of(name)
                found.add(name if is_module or name in OFFERED else base)
    return found


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes except those under `if TYPE_CHECKING`."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield from walk(child)


def copy(modules: dict[str, Path], folder: Path) -> None:
    """Writes the modules into `folder` as packages; an __init__.py that no other needs is empty."""
    for name, path in modules.items():
        place = folder.joinpath(*name.split("."))
        target = place / "__init__.py" if path.name == "__init__.py" else place.with_suffix(".py")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    for package in (path for path in folder.rglob("*") if path.is_dir()):
        (package / "__init__.py").touch()


# --- A network with its preprocessing and activation as one graph ---

# B batch · C channel · H W pixel


Inputs = tuple[Any, ...]  # arguments of a network: tensors, or dicts, lists and tuples of them
Run = Callable[..., Any]
# the arguments of a file for some samples, and what the network makes of them
Original = Callable[[Batch], tuple[Inputs, Any]]
TOLERANCE = 1e-4
BATCHES = (1, 5)  # the exporter has frozen the batch of a network to that of its example (pytorch#157621)
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
INTERNAL_BYTES = 1.8e9  # of weights within an ONNX file, which holds at most 2 GiB


class Whole(nn.Module):
    """From uint8 image_BCHW of any size, or from the network's own arguments, to probabilities or numbers."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.net, self.call, self.activation = model.net, model.call, ACTIVATIONS[model.activation]
        self.normalise = model.reader.normalise if model.inputs is None else None
        if self.normalise:
            self.scale, self.shift = nn.Buffer(self.normalise.scale), nn.Buffer(self.normalise.shift)

    def forward(self, *inputs: Any) -> Any:
        if self.normalise:
            inputs = (in_frame(inputs[0].float(), self.normalise.frame) * self.scale + self.shift,)
        return self.activation(self.call(*inputs))


def in_frame(x: Tensor, frame: Frame) -> Tensor:
    """`Frame.tensor` for graphs of images (..., H, W) of any size, which have no branches."""
    size, (height, width) = frame.size, x.shape[-2:]
    apart = (torch.sym_max(side - size, size - side) for side in (height, width))
    full = size + (math.floor(size / frame.crop_pct) - size) * torch.sym_min(sum(apart), 1)  # one of its size stays
    side = {"crop": torch.sym_min, "pad": torch.sym_max, "squash": lambda *_: 1}[frame.resize](height, width)
    height, width = (full * length // side if frame.resize != "squash" else full for length in (height, width))
    x = F.interpolate(x, size=(height, width), mode=frame.interpolation, antialias=True)
    x = x.clamp(0, 255) if frame.interpolation == "bicubic" else x
    for dim, length in ((-2, height), (-1, width)):
        cut, added = torch.sym_max(length - size, 0), torch.sym_min(length - size, 0)
        start = cut // 2 + cut % 2 * (cut // 2 % 2) + (added + 1) // 2  # as Python's round, and torchvision's padding
        place = torch.arange(size, device=x.device) + start
        x = x.index_select(dim, place.clamp(min=0).minimum(torch.zeros_like(place) + length - 1))
        if frame.resize == "pad" or frame.crop_pct > 1:  # on black
            inside = (place >= 0) & (place < length)
            x = x * (inside[:, None] if dim == -2 else inside)
    return x


def missing(formats: Sequence[str]) -> Iterator[str]:
    """Problems: packages that a format needs."""
    absent = [name for name in ONNX_PACKAGES if find_spec(name) is None]
    if "onnx" in formats and absent:
        yield f"--onnx needs {', '.join(absent)}, which {'are' if len(absent) > 1 else 'is'} not installed. Run uv pip install 'lockstep[onnx]', or uv pip install {' '.join(absent)}."


def write_graphs(model: Model, formats: Sequence[str], folder: Path, examples: Sequence[Inputs]) -> dict[str, Run]:
    """Writes model.onnx and model.pt2 as asked for; returns how to run each file."""
    example, other = examples[0], dict(leaves(examples[1]))
    dynamic = torch.export.Dim.DYNAMIC  # any size of the dimensions in which the examples differ

    def varying(place: Any, one: Tensor) -> dict[int, Any]:
        return {dim: dynamic for dim, size in enumerate(one.shape) if size != other[place].shape[dim]}

    shapes = {"inputs": mapped(example, varying)}
    found: dict[str, Run] = {}
    what = " ".join(f"--{name}" for name in formats)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # the exporters warn about themselves
            graph = torch.export.export(Whole(model).eval(), example, dynamic_shapes=shapes)
            if "pt2" in formats:
                torch.export.save(graph, folder / "model.pt2")
                found["model.pt2"] = torch.export.load(folder / "model.pt2").module()
            if "onnx" in formats:
                what = "--onnx"
                found["model.onnx"] = write_onnx(model, graph, folder / "model.onnx")
    except Exception as e:  # of torch's tracing: anything
        why = next(iter(str(e).strip().splitlines()), type(e).__name__)
        raise UserError(
            f"{what}: torch cannot export this network ({why}). Remove {what}, or set callbacks.exportable.formats=[]: load.py needs no graph."
        ) from e
    return found


def write_onnx(model: Model, graph: Any, path: Path) -> Run:
    """Returns what runs the file."""
    import onnxruntime

    large = sum(p.numel() * p.element_size() for p in model.net.parameters()) > INTERNAL_BYTES
    names = ["image"] if model.inputs is None else [str(name).replace(".", "_") for _, name in leaves(model.inputs)]
    outputs = {"identity": ["values"], "none": None}.get(model.activation, ["probabilities"])
    unique = names if len(set(names)) == len(names) else None
    options: Any = {"input_names": unique, "output_names": outputs, "external_data": large, "verbose": False}
    torch.onnx.export(graph, (), str(path), dynamo=True, **options)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(*inputs: Any) -> list[Tensor]:
        values = (tensor.numpy() for _, tensor in leaves(inputs))
        named = {each.name: value for each, value in zip(session.get_inputs(), values, strict=True)}
        return [torch.from_numpy(each) for each in session.run(None, named)]

    return run


def difference(a: Tensor, b: Tensor) -> float:
    """The largest one; infinite where one is NaN."""
    return (a.float() - b.float()).abs().where(a != b, 0.0).nan_to_num(nan=math.inf).max().item()


# a network may change its inputs in place, and the next one its outputs
cloned = partial(apply_to_collection, dtype=Tensor, function=Tensor.clone)


@torch.inference_mode()
def compared(runners: dict[str, Run], original: Original, batch: Batch) -> dict[str, float]:
    """The largest difference of each file's outputs from those of the trained network, over all samples and BATCHES.

    Raises:
        UserError: one is above TOLERANCE.
    """
    found, count = dict.fromkeys(runners, 0.0), len(batch["index"])
    for size in BATCHES:
        for first in range(0, count, size):
            inputs, expected = original(samples_at(batch, slice(first, first + size), count))
            for name, run in runners.items():
                try:
                    pairs = zip(leaves(run(*cloned(inputs))), leaves(expected), strict=True)
                    differences = [difference(a, b) for (_, a), (_, b) in pairs]
                except Exception as e:
                    raise UserError(f"{name} does not run on a batch of {size}: {e!s:.300}. Nothing was kept.") from e
                found[name] = max(found[name], *differences)
                if not found[name] <= TOLERANCE:
                    raise UserError(
                        f"{name} differs from the network by {found[name]:.2g} on {count} samples in batches of {size}; at most "
                        f"{TOLERANCE:g} is accepted. Nothing was kept."
                    )
    return found

"""Parts of an exported folder: the network's source files and its graphs (ONNX, torch.export), compared before they are kept."""

import ast
import importlib.util
import math
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep import HOMES, PACKAGE
from lockstep.checkpoints.finding import leaves, map_leaves
from lockstep.data.dataset import Batch
from lockstep.errors import UserError
from lockstep.extras.exported import ACTIVATIONS, Model
from lockstep.kit.pixels import Frame
from lockstep.training.losses import samples_at

# --- The source files of a network: its module, and what it imports from its package, directly or indirectly ---

# Modules that a folder has copies of, for the code of a data set: dataset.py imports the others. And the names that they provide.
STANDIN = ("data.dataset", "data.sampler", "errors")
OFFERED = {"lockstep.errors.UserError", *(f"lockstep.{name}" for home in STANDIN for name in HOMES[home])}
ALLOWED = {"torch", "torchvision", "timm", "numpy", "safetensors"}  # importable, like the standard library


def source_of(module: str) -> Path | None:
    """The file of a module; None if there is no such module or it is not a Python file."""
    with suppress(ImportError, AttributeError, ValueError):
        spec = importlib.util.find_spec(module)
        if spec and spec.origin and spec.origin.endswith(".py"):
            return Path(spec.origin)
    return None


def required_modules(module: str, offered: Set[str] = frozenset()) -> dict[str, Path]:
    """The modules that a module needs from its own package, itself first, with their files. The folder already has `offered`.

    Raises:
        UserError: one of them imports a package that an exported folder must not depend on.
    """
    package, paths, disallowed = module.partition(".")[0], dict[str, Path](), dict[str, set[str]]()
    queue = [module]
    for name in queue:  # grows in the loop
        path = source_of(name)
        if name in paths or path is None:
            continue
        paths[name] = path
        names = imported_names(path, name)
        ours = {dep for dep in names if dep.partition(".")[0] == package}
        if others := {dep.partition(".")[0] for dep in names - ours - offered} - ALLOWED - sys.stdlib_module_names:
            disallowed[path.name] = others
        queue += sorted(ours)
    if not paths:
        raise UserError(
            f"{module} has no Python source, so its code cannot be exported. Move the class into a .py file."
        )
    if package == "lockstep" and len(paths) > 1:
        disallowed[paths[module].name] = {"lockstep"}
    if disallowed:
        details = "; ".join(f"{file} imports {', '.join(sorted(names))}" for file, names in disallowed.items())
        raise UserError(
            f"{details}: the files of an exported network may import only torch, torchvision, timm, numpy and each other. Move other code that they need into your package."
        )
    return paths


def imported_names(path: Path, module: str) -> set[str]:
    """Full names of the modules that a file imports, except under `if TYPE_CHECKING`."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    prefix, names = module.partition(".")[0] + ".", set[str]()
    for imported, attributes in imports(ast.parse(path.read_bytes())):
        base = importlib.util.resolve_name(imported, package)
        for name in [f"{base}.{attribute}" for attribute in attributes] or [base]:
            is_module = name.startswith(prefix) and source_of(name)
            names.add(name if is_module or name in OFFERED else base)
    return names


def imports(node: ast.AST) -> Iterator[tuple[str, list[str]]]:
    """The name in each import, perhaps relative, and what is imported from it; without those under `if TYPE_CHECKING`."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, []) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield "." * node.level + (node.module or ""), [alias.name for alias in node.names]
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield from imports(child)


def requirements(folder: Path, library: str, formats: Sequence[str]) -> str:
    """The packages that the files of a folder import, at their installed versions. `library`: that of the network."""
    top = {library.partition(".")[0]}
    for path in folder.rglob("*.py"):
        top |= {name.partition(".")[0] for name, _ in imports(ast.parse(path.read_bytes()))}
    needed = sorted(ALLOWED & top) + ["pillow"] * ("PIL" in top) + ["onnxruntime"] * ("onnx" in formats)
    return "".join(f"{package}=={version(package).partition('+')[0]}\n" for package in needed)


def copy(modules: dict[str, Path], folder: Path) -> None:
    """Copies the modules into `folder` as packages; a missing __init__.py becomes an empty file."""
    for name, path in modules.items():
        base = folder.joinpath(*name.split("."))
        target = base / "__init__.py" if path.name == "__init__.py" else base.with_suffix(".py")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    for package in folder.rglob("*/"):
        (package / "__init__.py").touch()


def write_standin(folder: Path) -> None:
    """A package `lockstep` with the names that a data set's code may import, where Lockstep is not installed."""
    copy({f"lockstep.{home}": PACKAGE.joinpath(*home.split(".")).with_suffix(".py") for home in STANDIN}, folder)
    imports = "".join(f"from lockstep.{home} import {', '.join(HOMES[home])}\n" for home in STANDIN)
    (folder / "lockstep/__init__.py").write_text(imports, encoding="utf-8")


# --- A network with its preprocessing and activation as one graph ---

# B batch · C channel · H W pixel


Inputs = tuple[Any, ...]  # arguments of a network: tensors, or dicts, lists and tuples of them
Run = Callable[..., Any]
TOLERANCE = 1e-4
BATCHES = (1, 5)  # the exporter has frozen a network's batch size to that of its example (pytorch#157621)
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
INTERNAL_BYTES = 1.8e9  # of weights inside an ONNX file, which holds at most 2 GiB


class Whole(nn.Module):
    """From uint8 image_BCHW of any size, or from the network's arguments, to probabilities or numbers."""

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
    """`Frame.tensor` without branches, for graphs that take images (..., H, W) of any size."""
    size, (height, width) = frame.size, x.shape[-2:]
    differences = (torch.sym_max(side - size, size - side) for side in (height, width))
    # an image of exactly `size` is not resized
    full = size + (math.floor(size / frame.crop_pct) - size) * torch.sym_min(sum(differences), 1)
    if frame.resize == "squash":
        height = width = 1
    side = (torch.sym_max if frame.resize == "pad" else torch.sym_min)(height, width)
    height, width = (full * length // side for length in (height, width))
    x = F.interpolate(x, size=(height, width), mode=frame.interpolation, antialias=True)
    x = x.clamp(0, 255) if frame.interpolation == "bicubic" else x
    for dim, length in ((-2, height), (-1, width)):
        cut, added = torch.sym_max(length - size, 0), torch.sym_min(length - size, 0)
        start = cut // 2 + cut % 2 * (cut // 2 % 2) + (added + 1) // 2  # rounds like Python, pads like torchvision
        index = torch.arange(size, device=x.device) + start
        x = x.index_select(dim, index.clamp(min=0).minimum(torch.zeros_like(index) + length - 1))
        if frame.resize == "pad" or frame.crop_pct > 1:  # pad with black
            inside = (index >= 0) & (index < length)
            x = x * (inside[:, None] if dim == -2 else inside)
    return x


def missing(formats: Sequence[str]) -> Iterator[str]:
    """Errors: packages that a format needs and that are not installed."""
    absent = [name for name in ONNX_PACKAGES if importlib.util.find_spec(name) is None]
    if "onnx" in formats and absent:
        yield f"--onnx needs {', '.join(absent)}, which {'are' if len(absent) > 1 else 'is'} not installed. Run uv pip install 'lockstep[onnx]', or uv pip install {' '.join(absent)}."


def write_graphs(model: Model, formats: Sequence[str], folder: Path, examples: Sequence[Inputs]) -> dict[str, Run]:
    """Writes model.onnx and model.pt2 if requested; returns a function to run each file."""
    example, other = examples
    whole, inputs = Whole(model).eval(), torch.export.AdditionalInputs()
    inputs.add(other)  # dimensions in which the examples differ may have any size
    shapes = map_leaves(inputs.dynamic_shapes(whole, example), lambda _, dim: dim or torch.export.Dim.STATIC)
    runners: dict[str, Run] = {}
    flags = " ".join(f"--{name}" for name in formats)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # the exporters emit warnings about their own code
            graph = torch.export.export(whole, example, dynamic_shapes=shapes)
            if "pt2" in formats:
                torch.export.save(graph, folder / "model.pt2")
                runners["model.pt2"] = torch.export.load(folder / "model.pt2").module()
            if "onnx" in formats:
                flags = "--onnx"
                runners["model.onnx"] = write_onnx(model, graph, folder / "model.onnx")
    except Exception as e:  # torch's tracing may raise anything
        reason = next(iter(str(e).strip().splitlines()), type(e).__name__)
        raise UserError(
            f"{flags}: torch cannot export this network ({reason}). Remove {flags}, or set callbacks.exportable.formats=[]; load.py works without a graph."
        ) from e
    return runners


def write_onnx(model: Model, graph: Any, path: Path) -> Run:
    """Writes model.onnx; returns a function to run it."""
    import onnxruntime

    large = sum(p.numel() * p.element_size() for p in model.net.parameters()) > INTERNAL_BYTES
    names = ["image"] if model.inputs is None else [str(name).replace(".", "_") for _, name in leaves(model.inputs)]
    outputs = {"identity": ["values"], "none": None}.get(model.activation, ["probabilities"])
    unique = names if len(set(names)) == len(names) else None
    torch.onnx.export(
        graph, (), path, dynamo=True, input_names=unique, output_names=outputs, external_data=large, verbose=False
    )
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(*inputs: Any) -> list[Tensor]:
        pairs = zip(session.get_inputs(), leaves(inputs), strict=True)
        feed = {argument.name: tensor.numpy() for argument, (_, tensor) in pairs}
        return [torch.from_numpy(array) for array in session.run(None, feed)]

    return run


def difference(a: Tensor, b: Tensor) -> float:
    """The largest absolute difference; infinite if there is a NaN."""
    return (a.float() - b.float()).abs().where(a != b, 0.0).nan_to_num(nan=math.inf).max().item()


# a network may change its inputs in place, and the next module its outputs
cloned = partial(apply_to_collection, dtype=Tensor, function=Tensor.clone)


@torch.inference_mode()
def compare_outputs(runners: dict[str, Run], original: Run, batch: Batch) -> dict[str, float]:
    """The largest difference between each file's outputs and those of the trained network, over all samples and BATCHES.

    `original`: from samples to the arguments of an exported file, and the outputs of the trained network.

    Raises:
        UserError: a difference is above TOLERANCE.
    """
    largest, count = dict.fromkeys(runners, 0.0), len(batch["index"])
    for size in BATCHES:
        for start in range(0, count, size):
            inputs, expected = original(samples_at(batch, slice(start, start + size), count))
            for name, run in runners.items():
                try:
                    pairs = zip(leaves(run(*cloned(inputs))), leaves(expected), strict=True)
                    differences = [difference(a, b) for (_, a), (_, b) in pairs]
                except Exception as e:
                    raise UserError(f"{name} does not run on a batch of {size}: {e!s:.300}. Nothing was kept.") from e
                largest[name] = max(largest[name], *differences)
                if not largest[name] <= TOLERANCE:
                    raise UserError(
                        f"{name} differs from the network by {largest[name]:.2g} on {count} samples in batches of {size}; the limit is {TOLERANCE:g}. Nothing was kept."
                    )
    return largest

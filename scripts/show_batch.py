"""Draw the network's input: samples of a training batch before and after augmentation, with their targets.

python scripts/show_batch.py [--count 16] [--step 0] [--epoch 0] [--out batch.png] [key=value ...]

Takes the keys of train.py: python scripts/show_batch.py data=cifar10 augment=strong. It draws exactly the samples that a run with
these arguments trains on at that step, prepared by the same code.
"""

import argparse
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from lockstep.errors import UserError, raise_problems
from lockstep.launch.exits import after_output, exit_code
from lockstep.machine.files import local_path
from lockstep.machine.process import protect_streams

if TYPE_CHECKING:
    from lockstep.data.dataset import Batch

# B batch · C channel · H W pixel

COLUMNS, SMALLEST, GAP, LINE, MARGIN, FONT = 8, 112, 6, 14, 52, 11  # pixels, except for COLUMNS


def show(overrides: list[str], *, count: int, step: int, epoch: int, out: Path) -> None:
    """Raises UserError if the arguments are wrong, or the data has no images."""
    from lockstep import launch
    from lockstep.config import checks, compose, project
    from lockstep.launch.start import prepare_data

    project.make_importable()
    checked = launch.Settings.of(checks.resolve(overrides))
    raise_problems(checks.check_classes(checked, shipped=compose.needs_signature_check(overrides)))
    job = launch.job("train")
    settings, prepared, _ = prepare_data(job, checked)
    if settings.loader is None:
        raise UserError(f"{settings.cfg.data.target} creates its own batches, which this script cannot draw.")
    from lockstep import build
    from lockstep.data.standard import Division, StandardLoader
    from lockstep.kit.datamodule import DataModule

    numbered = settings.with_pretraining_values()
    data = build.datamodule(numbered, prepared if numbered is settings else job.read_data(numbered))
    assert isinstance(data, DataModule)
    loader = StandardLoader(data.train_dataloader(), Division(seed=settings.seed))  # as one process reads
    if step >= len(loader):
        raise UserError(f"an epoch has {len(loader)} steps, so step {step} does not exist. Steps count from 0.")
    batch, info = next(loader.items(settings.seed, epoch, step))
    before = data.evaluated.preprocess(data.raw("train", batch["index"]))
    after = data.augmented(data.targets.renumber("train", batch), info.places or range(0), settings.seed, epoch)
    picture(before, after, data.metadata, min(count, len(after["index"]))).save(out)
    print(f"{out}: {min(count, len(after['index']))} samples of epoch {epoch}, step {step}")


def picture(before: "Batch", after: "Batch", metadata: Mapping[str, Any], count: int) -> Image.Image:
    """The first `count` samples of two batches as the network receives them. Raises UserError if they are not images."""
    images = [bytes_of(batch, metadata)[:count] for batch in (before, after)]
    scale = max(1, math.ceil(SMALLEST / images[1].shape[2]))
    width, height = images[1].shape[2] * scale, images[1].shape[1] * scale
    columns = min(COLUMNS, count)
    row_height = 2 * (height + GAP) + LINE + GAP
    page = Image.new("RGB", (MARGIN + columns * (width + GAP), math.ceil(count / columns) * row_height + GAP), "white")
    draw = ImageDraw.Draw(page)
    captions = [caption(after, index, metadata) for index in range(count)]
    draw.font = font_for("".join(captions))
    for index, text in enumerate(captions):
        row, column = divmod(index, columns)
        left, top = MARGIN + column * (width + GAP), GAP + row * row_height
        for line, (batch, drawn) in enumerate(zip((before, after), images, strict=True)):
            tile = with_mask(drawn[index], batch["target"][index].numpy())
            page.paste(tile.resize((width, height), Image.Resampling.NEAREST), (left, top + line * (height + GAP)))
            if not column:
                draw.text((4, top + line * (height + GAP)), ("before", "after")[line], fill="black")
        while draw.textlength(text) > width:
            text = text[:-1]
        draw.text((left, top + 2 * (height + GAP) - 2), text, fill="black")
    return page


def font_for(text: str) -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which comes with matplotlib; if it lacks characters of the text, the installed font that lacks the fewest."""
    from matplotlib import font_manager, ft2font

    def missing(path: str) -> int:
        try:
            return len(set(map(ord, text)) - set(ft2font.FT2Font(path).get_charmap()))
        except RuntimeError:  # a font that FreeType cannot read
            return len(text) + 1

    path = str(font_manager.findfont("DejaVu Sans"))
    if missing(path):
        path = min([path, *sorted(font_manager.findSystemFonts())], key=missing)
    return ImageFont.truetype(path, FONT)


def bytes_of(batch: "Batch", metadata: Mapping[str, Any]) -> NDArray[np.uint8]:
    """image_BHW3: the input of the network without its normalisation."""
    value: Any = batch.get("input")
    from lockstep.extras.page import denormalised

    image_BCHW = denormalised(value, metadata)
    if image_BCHW is None or image_BCHW.shape[1] not in (1, 3):
        kind = f"{value.dtype} of shape {tuple(value.shape)}" if hasattr(value, "shape") else type(value).__name__
        raise UserError(f"only images can be shown; `input` is {kind}.")
    image: NDArray[np.uint8] = image_BCHW.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).numpy()
    return image


def with_mask(image_HW3: NDArray[np.uint8], target: NDArray[Any]) -> Image.Image:
    """The image; if the target is a mask, with the mask over it."""
    if target.shape != image_HW3.shape[:2]:
        return Image.fromarray(image_HW3)
    from lockstep.extras.panels import blend

    return blend(image_HW3, target)


def caption(batch: "Batch", index: int, metadata: Mapping[str, Any]) -> str:
    """The target of a sample; for a mixed sample, both targets with their fractions."""
    text = name(batch["target"][index].tolist(), metadata)
    if "share" in batch:
        share, other = float(batch["share"][index]), int(batch["partner"][index])
        text = f"{share:.0%} {text} + {1 - share:.0%} {name(batch['target'][other].tolist(), metadata)}"
    return text


def name(target: Any, metadata: Mapping[str, Any]) -> str:
    """A target as text; empty for a mask."""
    if isinstance(target, list):
        labels = metadata.get("labels")
        if labels and len(labels) == len(target):
            return ", ".join(str(label) for label, is_present in zip(labels, target, strict=True) if is_present)
        return "" if target and isinstance(target[0], list) else ", ".join(f"{value:.3g}" for value in target)
    classes = metadata.get("classes")
    return str(classes[target]) if classes and isinstance(target, int) else f"{target:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=16, help="number of samples")
    parser.add_argument("--step", type=int, default=0, help="step of the epoch, from 0")
    parser.add_argument("--epoch", type=int, default=0)
    parser.add_argument("--out", type=local_path, default=Path("batch.png"))
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for train.py")
    args = parser.parse_args()
    if min(args.count, args.step + 1, args.epoch + 1) < 1:
        raise UserError("--count must be at least 1, --step and --epoch at least 0.")
    if run := [override for override in args.overrides if override.startswith(("run=", "resume="))]:
        raise UserError(
            f"{run[0]}: a batch is drawn from a command, not from a run. Pass the run's overrides, which `runs.py show <run>` prints."
        )
    show(args.overrides, count=args.count, step=args.step, epoch=args.epoch, out=args.out)


if __name__ == "__main__":
    protect_streams()
    sys.exit(after_output(exit_code(main)))
